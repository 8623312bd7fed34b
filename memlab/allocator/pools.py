"""The two kinds of pools in which torch's caching allocator keeps free blocks: with fixed and expandable segments.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``get_free_block``, ``try_merge_blocks``,
``alloc_block``, ``try_allocate_expandable_block``, ``map_block``, ``unmap_block``). A device has two pools for each
stream: one for requests of at most 1 MiB, and one for larger ones. (torch has two for all streams, ordered by stream
first: ``BlockComparatorSize``. A search never leaves its stream.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from copy import copy
from typing import Self

from memlab.allocator.block_table import BlockTable
from memlab.allocator.protocol import NO_BLOCK
from memlab.allocator.rules import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    segment_bytes,
    smallest_split_bytes,
)

_ADDRESSES_BYTES = 2**50
"""Addresses of a pool: more than the memory of any GPU, so that they never run out."""


class SegmentPool:
    """Segments of fixed size, each of them one piece of the device's memory (``cudaMalloc``).

    Args:
        number: Of the pool: 0 and 1 for the default stream, 2 and 3 for the next one. Even ones are the pools of
            requests up to 1 MiB.
    """

    def __init__(self, number: int, blocks: BlockTable) -> None:
        self.reserved_bytes = 0
        self.num_searches = 0
        """Requests that searched the pool: the clock by which garbage collection tells the age of a free block."""
        self.number = number
        self.is_small = number % 2 == 0
        self._blocks = blocks
        self.lowest = _ADDRESSES_BYTES
        """The lowest address so far: each segment lies below the former one (`grow`)."""
        self.free_blocks: list[tuple[int, int, int]] = []
        """Size and address of the free blocks, in torch's search order, and the blocks."""
        self.smallest_split_bytes = smallest_split_bytes(in_small_segment=self.is_small)
        """From this size on, the free end of a block becomes a block of its own."""

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block, 0 if there is none."""
        return self.free_blocks[-1][0] if self.free_blocks else 0

    def find(self, num_bytes: int) -> int:
        """Returns the smallest free block that holds so many bytes, and leaves it in the pool; or `NO_BLOCK`."""
        place = bisect_left(self.free_blocks, (num_bytes,))
        return self.free_blocks[place][2] if place < len(self.free_blocks) else NO_BLOCK

    def take(self, num_bytes: int) -> int:
        """Takes the block that `find` returns out of the pool."""
        free = self.free_blocks
        place = bisect_left(free, (num_bytes,))
        return free.pop(place)[2] if place < len(free) else NO_BLOCK

    def growth_bytes(self, num_bytes: int) -> int:
        """Returns by how much `grow` would raise the reserved bytes."""
        return segment_bytes(num_bytes)

    def grow(self, num_bytes: int) -> int:
        """Reserves memory, and returns a free block for so many bytes that is not in the pool.

        CUDA gives a new segment addresses below the former ones (seen on an H200), and of free blocks of one size torch
        takes the one with the lowest address: one of the latest segment.
        """
        size = segment_bytes(num_bytes)
        self.lowest -= size
        block = self._blocks.add(self.lowest, size, self.number)
        self._reserve(size)
        return block

    def _reserve(self, num_bytes: int) -> None:
        """Takes memory from the device, or returns it (below 0)."""
        self.reserved_bytes += num_bytes
        self._blocks.reserved_bytes += num_bytes

    def offer(self, block: int) -> None:
        """Puts a free block into the pool."""
        blocks = self._blocks
        blocks.free_since[block] = self.num_searches
        insort(self.free_blocks, (blocks.num_bytes[block], blocks.address[block], block))

    def withdraw(self, block: int) -> None:
        """Takes a free block out of the pool."""
        blocks = self._blocks
        del self.free_blocks[bisect_left(self.free_blocks, (blocks.num_bytes[block], blocks.address[block]))]

    def free(self, block: int) -> int:
        """Frees a block, merges it with its free neighbours, and returns the whole."""
        whole = self._blocks.free(block, self.withdraw)
        self.offer(whole)
        return whole

    def free_segments(self) -> list[int]:
        """Returns the segments in which nothing is allocated, each as its one block, the smallest first."""
        before, after = self._blocks.before, self._blocks.after
        return [block for *_, block in self.free_blocks if before[block] == after[block] == NO_BLOCK]

    def age(self, block: int) -> int:
        """Returns how many requests have searched the pool since a block was freed."""
        return self.num_searches - self._blocks.free_since[block]

    def give_back(self, segment: int) -> None:
        """Returns a segment in which nothing is allocated to the device."""
        self.withdraw(segment)
        self._reserve(-self._blocks.num_bytes[segment])
        self._blocks.remove(segment)

    def state(self) -> Hashable:
        """Returns what decides about later requests; see `Allocator.state`."""
        return self.reserved_bytes, self.lowest, tuple([(size, address) for size, address, _ in self.free_blocks])

    def copy(self, blocks: BlockTable) -> Self:
        """Returns a pool in the same state, of a copy of its blocks."""
        other = copy(self)
        other._blocks, other.free_blocks = blocks, self.free_blocks.copy()
        return other

    def empty(self) -> None:
        """Returns everything that can be returned to the device."""
        for segment in self.free_segments():
            self.give_back(segment)


class ExpandablePool(SegmentPool):
    """One segment that grows and shrinks by pages: ``expandable_segments``.

    A range of addresses of which some are mapped to pages of memory. Each page belongs to the pool as a whole, so that
    free neighbours merge across what would be two segments otherwise.
    """

    def __init__(self, number: int, blocks: BlockTable) -> None:
        super().__init__(number, blocks)
        self.smallest_split_bytes = MIN_BLOCK_BYTES
        self._page_bytes = SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES
        self.unmapped: set[int] = set()
        """They are not free: a block there has no memory. None while no page is mapped."""

    def find(self, num_bytes: int) -> int:
        """Returns the free block that can grow least among the smallest ones that hold so many bytes."""
        place = bisect_left(self.free_blocks, (num_bytes,))
        if place == len(self.free_blocks):
            return NO_BLOCK
        block = self.free_blocks[place][2]
        for index in range(place + 1, len(self.free_blocks)):
            other = self.free_blocks[index][2]
            if self._size_with_growth(other) >= self._size_with_growth(block):
                break
            block = other
        return block

    def take(self, num_bytes: int) -> int:
        """Takes the block that `find` returns out of the pool."""
        block = self.find(num_bytes)
        if block != NO_BLOCK:
            self.withdraw(block)
        return block

    def growth_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of the pages that `grow` would map."""
        blocks, block = self._blocks, self._place_to_grow(num_bytes)
        needed, growth = num_bytes, 0
        while needed > 0:
            size = blocks.num_bytes[block]
            if block in self.unmapped:
                size = min(size, -(-needed // self._page_bytes) * self._page_bytes)
                growth += size
            needed -= size
            block = blocks.after[block]
        return growth

    def grow(self, num_bytes: int) -> int:
        """Maps pages, and returns a free block for so many bytes that is not in the pool."""
        blocks, block = self._blocks, self._place_to_grow(num_bytes)
        if block in self.unmapped:
            block = self._map(block, num_bytes)
        while blocks.num_bytes[block] < num_bytes:
            block = self._map(blocks.after[block], num_bytes - blocks.num_bytes[block])  # the last block is unmapped
        self.withdraw(block)
        return block

    def free_segments(self) -> list[int]:
        """Returns none: only pages are returned to the device, and garbage collection leaves them alone."""
        return []

    def state(self) -> Hashable:
        """Returns what decides about later requests."""
        unmapped = [(self._blocks.address[block], self._blocks.num_bytes[block]) for block in self.unmapped]
        return super().state(), tuple(sorted(unmapped))

    def copy(self, blocks: BlockTable) -> Self:
        """Returns a pool in the same state."""
        other = super().copy(blocks)
        other.unmapped = self.unmapped.copy()
        return other

    def empty(self) -> None:
        """Returns every page in which nothing is allocated to the device."""
        for *_, block in self.free_blocks.copy():
            self._unmap(block)
        if not self.reserved_bytes:
            for block in self.unmapped:
                self._blocks.remove(block)
            self.unmapped.clear()

    def _size_with_growth(self, block: int) -> int:
        after, num_bytes = self._blocks.after[block], self._blocks.num_bytes
        return num_bytes[block] + (num_bytes[after] if after in self.unmapped else 0)

    def _place_to_grow(self, num_bytes: int) -> int:
        """Returns the first of neighbours, free or unmapped, at the lowest address that has room (and no memory)."""
        blocks = self._blocks
        if not self.unmapped:
            self.unmapped.add(blocks.add(0, _ADDRESSES_BYTES, self.number, is_free=False))
        for hole in sorted(self.unmapped, key=blocks.address.__getitem__):
            before = blocks.before[hole]
            first = before if before != NO_BLOCK and blocks.is_free[before] else hole
            room, block = 0, first
            while room < num_bytes and block != NO_BLOCK and (blocks.is_free[block] or block in self.unmapped):
                room += blocks.num_bytes[block]
                block = blocks.after[block]
            if room >= num_bytes:
                return first
        raise AssertionError("the last block has more addresses than any GPU has memory")

    def _map(self, block: int, num_bytes: int) -> int:
        """Maps pages from a block's start on, and returns the free block that they are then part of."""
        blocks = self._blocks
        size = min(blocks.num_bytes[block], -(-num_bytes // self._page_bytes) * self._page_bytes)
        self.unmapped.remove(block)
        self._reserve(size)
        if size < blocks.num_bytes[block]:
            self.unmapped.add(blocks.split(block, size))
        return self.free(block)

    def _unmap(self, block: int) -> None:
        """Returns the pages that lie in a free block as a whole."""
        blocks, page = self._blocks, self._page_bytes
        start, end = blocks.address[block], blocks.address[block] + blocks.num_bytes[block]
        first, last = -(-start // page) * page, end // page * page
        if first >= last:
            return
        self.withdraw(block)
        self._reserve(first - last)
        middle = block
        if first > start:
            middle = blocks.split(block, first - start)
            self.offer(block)
        if last < end:
            self.offer(blocks.split(middle, last - first))
        blocks.is_free[middle] = False
        after, before = blocks.after[middle], blocks.before[middle]
        if after in self.unmapped:
            self.unmapped.remove(after)
            blocks.join(middle, after)
        if before in self.unmapped:
            blocks.join(before, middle)
            middle = before
        self.unmapped.add(middle)
