"""torch's caching allocator, simulated: which block a request would get, and what the allocator would reserve.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``get_pool``, ``get_free_block``,
``get_allocation_size``, ``should_split``, ``try_merge_blocks``) with its default settings, for one stream and a
device with enough memory. `Blocks` replays what a real allocator did; this class also searches for the block.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memlab.allocator.replay import Block
from memlab.allocator.rules import SMALL_REQUEST_BYTES, rounded_bytes, segment_bytes, splits_remainder


class CachingAllocator:
    """The blocks of one device, split as torch would split them."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._top = 0
        self._small_segments: set[int] = set()
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Size and address of the free blocks, in small segments and in others, in torch's search order."""
        self._free_blocks: dict[int, Block] = {}

    def allocate(self, requested_bytes: int) -> Block:
        """Returns the block that a request gets."""
        num_bytes = rounded_bytes(requested_bytes)
        is_small = num_bytes <= SMALL_REQUEST_BYTES
        block = self._best_fit(num_bytes, is_small) or self._new_segment(num_bytes, is_small)
        block.is_free = False
        remainder = block.num_bytes - num_bytes
        if splits_remainder(remainder, in_small_segment=is_small):
            after = Block(block.address + num_bytes, remainder, True, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.num_bytes = after, num_bytes
            self._offer(after)
        return block

    def makes_space(self, requested_bytes: int, limit_bytes: int) -> bool:
        """Returns whether a request fits within `limit_bytes` reserved, after returning free segments if it must."""
        num_bytes = rounded_bytes(requested_bytes)
        is_small = num_bytes <= SMALL_REQUEST_BYTES
        free = self._free[is_small]
        if free and free[-1][0] >= num_bytes:
            return True
        if self.reserved_bytes + segment_bytes(num_bytes) > limit_bytes:
            self.empty_cache()
        return self.reserved_bytes + segment_bytes(num_bytes) <= limit_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that needs no new segment."""
        return max((free[-1][0] for free in self._free.values() if free), default=0)

    def free(self, block: Block) -> None:
        """Frees a block, and merges it with its free neighbours."""
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._withdraw(block.after)
            self._merge(block, block.after)
        if block.before is not None and block.before.is_free:
            self._withdraw(block.before)
            self._merge(block.before, block)
            block = block.before
        self._offer(block)

    def empty_cache(self) -> None:
        """Returns the segments in which nothing is allocated to the device."""
        for block in list(self._free_blocks.values()):
            if block.before is None and block.after is None:
                self._withdraw(block)
                self._small_segments.discard(block.segment)
                self.reserved_bytes -= block.num_bytes

    @staticmethod
    def _merge(block: Block, after: Block) -> None:
        block.num_bytes += after.num_bytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    def _offer(self, block: Block) -> None:
        insort(self._free[block.segment in self._small_segments], (block.num_bytes, block.address))
        self._free_blocks[block.address] = block

    def _withdraw(self, block: Block) -> None:
        free = self._free[block.segment in self._small_segments]
        del free[bisect_left(free, (block.num_bytes, block.address))]
        del self._free_blocks[block.address]

    def _best_fit(self, num_bytes: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        place = bisect_left(free, (num_bytes, -1))
        if place == len(free):
            return None
        block = self._free_blocks[free[place][1]]
        self._withdraw(block)
        return block

    def _new_segment(self, num_bytes: int, is_small: bool) -> Block:
        size = segment_bytes(num_bytes)
        if is_small:
            self._small_segments.add(self._top)
        block = Block(self._top, size, True, self._top)
        self._top += size
        self.reserved_bytes += size
        return block
