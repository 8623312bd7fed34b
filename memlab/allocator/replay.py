"""torch's caching allocator, replayed from its own history: which block every request got, and how large it was.

The history contains requested bytes; the allocator counts the bytes of the block that it gave. A block is the request
rounded to 512 bytes, or larger where the remainder was too small to split off. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``round_size``, ``should_split``, ``try_merge_blocks``); the
address in the history replaces its search for a block that fits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memlab.allocator.rules import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, rounded_bytes, splits_remainder

Change = Literal["allocated", "freed", "completed", "reserved", "returned"]


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment. Blocks of one segment are linked in the order of their addresses."""

    address: int
    num_bytes: int
    is_free: bool
    segment: int
    """Address of the segment that the block is part of."""
    before: Block | None = None
    after: Block | None = None
    free_since: int = 0
    """When a simulated pool got it back, on the pool's clock."""
    number: int = -1
    """Of the block in a `RequestLog`."""


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
        self._blocks: dict[int, Block] = {}
        self._segment_bytes: dict[int, int] = {}
        self.reserved_bytes = 0
        self.waiting: set[int] = set()
        """Addresses of blocks that were freed while another stream still used them."""
        for segment in segments:
            self._open(segment)

    def _open(self, segment: Mapping[str, Any]) -> None:
        self.reserved_bytes += segment["total_size"]
        self._segment_bytes[segment["address"]] = segment["total_size"]
        before: Block | None = None
        for part in segment["blocks"]:
            block = Block(part["address"], part["size"], part["state"] == "inactive", segment["address"], before=before)
            if before is not None:
                before.after = block
            before = block
            if not (block.is_free and self._expandable):
                self._blocks[block.address] = block
            if part["state"] == "active_pending_free":
                self.waiting.add(block.address)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def largest_free_bytes(self, requested_bytes: int) -> int | None:
        """Returns the largest free block that such a request may take; None where segments are expandable."""
        if self._expandable:
            return None
        is_small = rounded_bytes(requested_bytes) <= SMALL_REQUEST_BYTES
        free = (block for block in self if block.is_free and self._is_small(block) == is_small)
        return max((block.num_bytes for block in free), default=0)

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
            return "freed", entry["addr"], self._block(entry["addr"]).num_bytes
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

    def _block(self, address: int) -> Block:
        block = self._blocks.get(address)
        assert block is not None, f"the allocator's history names a block at {address:#x} that does not exist"
        return block

    def _allocate(self, address: int, requested_bytes: int) -> int:
        num_bytes = rounded_bytes(requested_bytes)
        if self._expandable:
            self._blocks[address] = Block(address, num_bytes, False, address)
            return num_bytes
        block = self._block(address)
        assert block.is_free, f"the allocator's history allocates the block at {address:#x} twice"
        block.is_free = False
        if num_bytes < self._unsplit_from_bytes and self._splits(block, block.num_bytes - num_bytes):
            remainder = Block(address + num_bytes, block.num_bytes - num_bytes, True, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.num_bytes = remainder, num_bytes
            self._blocks[remainder.address] = remainder
        return block.num_bytes

    def _splits(self, block: Block, remaining_bytes: int) -> bool:
        return splits_remainder(remaining_bytes, in_small_segment=self._is_small(block))

    def _is_small(self, block: Block) -> bool:
        """Whether a block is in a segment of requests up to 1 MiB."""
        return self._segment_bytes[block.segment] == SMALL_SEGMENT_BYTES

    def _free(self, address: int) -> int:
        block = self._block(address)
        num_bytes = block.num_bytes
        if self._expandable:
            del self._blocks[address]
            return num_bytes
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._merge(block, block.after)
        if block.before is not None and block.before.is_free:
            self._merge(block.before, block)
        return num_bytes

    def _merge(self, block: Block, after: Block) -> None:
        block.num_bytes += after.num_bytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._blocks[after.address]

    def _reserve(self, address: int, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        if not self._expandable:
            self._segment_bytes[address] = num_bytes
            self._blocks[address] = Block(address, num_bytes, True, address)

    def _return(self, address: int, num_bytes: int) -> None:
        self.reserved_bytes -= num_bytes
        if not self._expandable:
            block = self._block(address)
            assert block.is_free and block.num_bytes == num_bytes, f"a segment in use at {address:#x} is returned"
            del self._blocks[address], self._segment_bytes[address]
