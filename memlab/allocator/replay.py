"""torch's caching allocator, replayed from its own history: which block every request got, and how large it was.

The history contains requested bytes; the allocator counts the bytes of the block that it gave. A block is the request
rounded to 512 bytes, or larger where the remainder was too small to split off. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``round_size``, ``should_split``, ``try_merge_blocks``); the
address in the history replaces its search for a block that fits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from memlab.allocator.block_table import BlockTable
from memlab.allocator.protocol import NO_BLOCK
from memlab.allocator.rules import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, rounded_bytes, splits_remainder

Change = Literal["allocated", "freed", "completed", "reserved", "returned"]


class Blocks:
    """All segments of one device, and the blocks in them.

    Args:
        segments: Those of a torch snapshot that was taken before the history that is replayed.
        expandable: Whether the allocator ran with ``expandable_segments``: it then splits off every remainder. Free
            memory inside a segment is not tracked, since its pages are mapped and unmapped.
        unsplit_from_bytes: The allocator's ``max_split_size``; for requests of this size and larger no block is split.
    """

    def __init__(
        self,
        segments: Iterable[Mapping[str, Any]],
        *,
        expandable: bool = False,
        unsplit_from_bytes: int = sys.maxsize,
    ) -> None:
        self._expandable = expandable
        self._unsplit_from_bytes = unsplit_from_bytes
        self._blocks = BlockTable()
        self._at: dict[int, int] = {}
        """The blocks by address."""
        self.waiting: set[int] = set()
        """Addresses of blocks that were freed while another stream still used them."""
        for segment in segments:
            self._open(segment)

    def _open(self, segment: Mapping[str, Any]) -> None:
        blocks, pool = self._blocks, _pool_of_segment(segment["total_size"])
        blocks.reserved_bytes += segment["total_size"]
        before = NO_BLOCK
        for part in segment["blocks"]:
            is_free = part["state"] == "inactive"
            block = blocks.add(part["address"], part["size"], pool, is_free=is_free)
            if before != NO_BLOCK:
                blocks.after[before], blocks.before[block] = block, before
            before = block
            if not (is_free and self._expandable):
                self._at[part["address"]] = block
            if part["state"] == "active_pending_free":
                self.waiting.add(part["address"])

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return self._blocks.reserved_bytes

    def allocated(self) -> dict[int, int]:
        """Returns the bytes of each block that is not free, by its address."""
        return {
            address: self._blocks.num_bytes[block]
            for address, block in self._at.items()
            if not self._blocks.is_free[block]
        }

    def largest_free_bytes(self, requested_bytes: int) -> int | None:
        """Returns the largest free block that such a request may take; None where segments are expandable."""
        if self._expandable:
            return None
        blocks, pool = self._blocks, int(rounded_bytes(requested_bytes) > SMALL_REQUEST_BYTES)
        of_pool = (each for each in self._at.values() if blocks.pool[each] == pool)
        return max((blocks.num_bytes[each] for each in of_pool if blocks.is_free[each]), default=0)

    def replay(self, entry: Mapping[str, Any]) -> tuple[Change, int, int] | None:
        """Applies one entry of the history.

        Returns:
            What changed, the address, and the bytes of the block or segment; None if nothing changed.
        """
        action = entry["action"]
        if action == "alloc":
            return "allocated", entry["addr"], self._allocate(entry["addr"], entry["size"])
        if action == "free_requested":
            self.waiting.add(entry["addr"])
            return "freed", entry["addr"], self._blocks.num_bytes[self._block(entry["addr"])]
        if action == "free_completed":
            self.waiting.discard(entry["addr"])
            return "completed", entry["addr"], self._free(entry["addr"])
        if action in ("segment_alloc", "segment_map"):
            self._reserve(entry["addr"], entry["size"])
            return "reserved", entry["addr"], entry["size"]
        if action in ("segment_free", "segment_unmap"):
            self._return(entry["addr"], entry["size"])
            return "returned", entry["addr"], entry["size"]
        return None

    def _block(self, address: int) -> int:
        block = self._at.get(address)
        assert block is not None, f"the allocator's history names a block at {address:#x} that does not exist"
        return block

    def _allocate(self, address: int, requested_bytes: int) -> int:
        blocks, num_bytes = self._blocks, rounded_bytes(requested_bytes)
        if self._expandable:
            self._at[address] = blocks.add(address, num_bytes, 0, is_free=False)
            return num_bytes
        block = self._block(address)
        assert blocks.is_free[block], f"the allocator's history allocates the block at {address:#x} twice"
        remainder = blocks.num_bytes[block] - num_bytes
        is_small = blocks.pool[block] == 0
        if num_bytes < self._unsplit_from_bytes and splits_remainder(remainder, in_small_segment=is_small):
            self._at[address + num_bytes] = blocks.split(block, num_bytes)
        blocks.is_free[block] = False
        return blocks.num_bytes[block]

    def _free(self, address: int) -> int:
        blocks, block = self._blocks, self._block(address)
        num_bytes = blocks.num_bytes[block]
        if self._expandable:
            del self._at[address]
            blocks.remove(block)
            return num_bytes
        del self._at[address]
        whole = blocks.free(block, lambda neighbour: self._at.pop(blocks.address[neighbour]))
        self._at[blocks.address[whole]] = whole
        return num_bytes

    def _reserve(self, address: int, num_bytes: int) -> None:
        self._blocks.reserved_bytes += num_bytes
        if not self._expandable:
            self._at[address] = self._blocks.add(address, num_bytes, _pool_of_segment(num_bytes))

    def _return(self, address: int, num_bytes: int) -> None:
        self._blocks.reserved_bytes -= num_bytes
        if not self._expandable:
            block = self._block(address)
            is_whole = self._blocks.is_free[block] and self._blocks.num_bytes[block] == num_bytes
            assert is_whole, f"a segment in use at {address:#x} is returned"
            del self._at[address]
            self._blocks.remove(block)


def _pool_of_segment(num_bytes: int) -> int:
    """Returns 0 for a segment of requests up to 1 MiB, and 1 for another."""
    return int(num_bytes != SMALL_SEGMENT_BYTES)
