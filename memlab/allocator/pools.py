"""The two kinds of pools in which torch's caching allocator keeps free blocks: with fixed and expandable segments.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``get_free_block``, ``try_merge_blocks``,
``alloc_block``, ``try_allocate_expandable_block``, ``map_block``, ``unmap_block``). A device has two pools for each
stream: one for requests of at most 1 MiB, and one for larger ones. (torch has two for all streams, ordered by stream
first: ``BlockComparatorSize``. A search never leaves its stream.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any, Self

from memlab.allocator.replay import Block
from memlab.allocator.rules import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    segment_bytes,
    smallest_split_bytes,
)

_ADDRESSES_BYTES = 2**50
"""Addresses of a pool: more than the memory of any GPU, so that they never run out."""


def pool_number(block: Block) -> int:
    """Returns the number of the pool that a block is of: pools share no addresses."""
    return block.address // _ADDRESSES_BYTES


class SegmentPool:
    """Segments of fixed size, each of them one piece of the device's memory (``cudaMalloc``).

    Args:
        number: Of the pool: 0 and 1 for the default stream, 2 and 3 for the next one. Even ones are the pools of
            requests up to 1 MiB.
    """

    def __init__(self, number: int) -> None:
        self.reserved_bytes = 0
        self.num_searches = 0
        """Requests that searched the pool: the clock by which garbage collection tells the age of a free block."""
        self.number = number
        self.is_small = number % 2 == 0
        self._top = number * _ADDRESSES_BYTES
        self._free: list[tuple[int, int, Block]] = []
        """Size and address of the free blocks, in torch's search order, and the blocks."""
        self.smallest_split_bytes = smallest_split_bytes(in_small_segment=self.is_small)
        """From this size on, the free end of a block becomes a block of its own."""

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block, 0 if there is none."""
        return self._free[-1][0] if self._free else 0

    def find(self, num_bytes: int) -> Block | None:
        """Returns the smallest free block that holds so many bytes, and leaves it in the pool."""
        place = bisect_left(self._free, (num_bytes,))
        return self._free[place][2] if place < len(self._free) else None

    def take(self, num_bytes: int) -> Block | None:
        """Takes the block that `find` returns out of the pool."""
        free = self._free
        place = bisect_left(free, (num_bytes,))
        return free.pop(place)[2] if place < len(free) else None

    def growth_bytes(self, num_bytes: int) -> int:
        """Returns by how much `grow` would raise the reserved bytes."""
        return segment_bytes(num_bytes)

    def grow(self, num_bytes: int) -> Block:
        """Reserves memory, and returns a free block for so many bytes that is not in the pool."""
        size = segment_bytes(num_bytes)
        block = Block(self._top, size, True, self._top)
        self._top += size
        self.reserved_bytes += size
        return block

    def offer(self, block: Block) -> None:
        """Puts a free block into the pool."""
        block.free_since = self.num_searches
        insort(self._free, (block.num_bytes, block.address, block))

    def withdraw(self, block: Block) -> None:
        """Takes a free block out of the pool."""
        del self._free[bisect_left(self._free, (block.num_bytes, block.address))]

    def free(self, block: Block) -> Block:
        """Frees a block, merges it with its free neighbours, and returns the whole."""
        block.is_free = True
        after, before = block.after, block.before
        if after is not None and after.is_free:
            self.withdraw(after)
            _merge(block, after)
        if before is not None and before.is_free:
            self.withdraw(before)
            _merge(before, block)
            block = before
        self.offer(block)
        return block

    def free_segments(self) -> list[Block]:
        """Returns the segments in which nothing is allocated, each as its one block, the smallest first."""
        return [block for block in self.blocks() if block.before is None and block.after is None]

    def age(self, block: Block) -> int:
        """Returns how many requests have searched the pool since a block was freed."""
        return self.num_searches - block.free_since

    def give_back(self, segment: Block) -> None:
        """Returns a segment in which nothing is allocated to the device."""
        self.withdraw(segment)
        self.reserved_bytes -= segment.num_bytes

    def blocks(self) -> list[Block]:
        """Returns the free blocks."""
        return [block for _, _, block in self._free]

    def state(self) -> tuple[Any, ...]:
        """Returns what decides about later requests; see `CachingAllocator.state`."""
        return self.reserved_bytes, self._top, tuple([(size, address) for size, address, _ in self._free])

    def copy(self, copies: Mapping[int, Block]) -> Self:
        """Returns a pool in the same state.

        Args:
            copies: Its blocks, by the identity of the own ones.
        """
        other = type(self)(self.number)
        other.reserved_bytes, other.num_searches, other._top = self.reserved_bytes, self.num_searches, self._top
        other._free = [(size, address, copies[id(block)]) for size, address, block in self._free]
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

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.smallest_split_bytes = MIN_BLOCK_BYTES
        self._page_bytes = SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES
        self._start = self._top
        self._unmapped = {self._start: Block(self._start, _ADDRESSES_BYTES, False, self._start)}
        """By address. They are not free: a block there has no memory."""

    def find(self, num_bytes: int) -> Block | None:
        """Returns the free block that can grow least among the smallest ones that hold so many bytes."""
        place = bisect_left(self._free, (num_bytes,))
        if place == len(self._free):
            return None
        block = self._free[place][2]
        for index in range(place + 1, len(self._free)):
            other = self._free[index][2]
            if self._size_with_growth(other) >= self._size_with_growth(block):
                break
            block = other
        return block

    def take(self, num_bytes: int) -> Block | None:
        """Takes the block that `find` returns out of the pool."""
        block = self.find(num_bytes)
        if block is not None:
            self.withdraw(block)
        return block

    def growth_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of the pages that `grow` would map."""
        block: Block | None = self._place_to_grow(num_bytes)
        needed, growth = num_bytes, 0
        while needed > 0:
            assert block is not None
            size = block.num_bytes
            if self._is_unmapped(block):
                size = min(size, -(-needed // self._page_bytes) * self._page_bytes)
                growth += size
            needed -= size
            block = block.after
        return growth

    def grow(self, num_bytes: int) -> Block:
        """Maps pages, and returns a free block for so many bytes that is not in the pool."""
        block = self._place_to_grow(num_bytes)
        if self._is_unmapped(block):
            block = self._map(block, num_bytes)
        while block.num_bytes < num_bytes:
            assert block.after is not None, "the last block is unmapped"
            block = self._map(block.after, num_bytes - block.num_bytes)
        self.withdraw(block)
        return block

    def free_segments(self) -> list[Block]:
        """Returns none: only pages are returned to the device, and garbage collection leaves them alone."""
        return []

    def blocks(self) -> list[Block]:
        """Returns the free blocks, and those without memory."""
        return [*super().blocks(), *self._unmapped.values()]

    def state(self) -> tuple[Any, ...]:
        """Returns what decides about later requests."""
        return *super().state(), tuple((block.address, block.num_bytes) for block in self._unmapped.values())

    def copy(self, copies: Mapping[int, Block]) -> Self:
        """Returns a pool in the same state."""
        other = super().copy(copies)
        other._unmapped = {address: copies[id(block)] for address, block in self._unmapped.items()}
        return other

    def empty(self) -> None:
        """Returns every page in which nothing is allocated to the device."""
        for block in super().blocks():
            self._unmap(block)

    def _size_with_growth(self, block: Block) -> int:
        after = block.after
        return block.num_bytes + (after.num_bytes if after is not None and self._is_unmapped(after) else 0)

    def _is_unmapped(self, block: Block) -> bool:
        return self._unmapped.get(block.address) is block

    def _place_to_grow(self, num_bytes: int) -> Block:
        """Returns the first of neighbours, free or unmapped, at the lowest address that has room (and no memory)."""
        for address in sorted(self._unmapped):
            first = self._unmapped[address]
            if first.before is not None and first.before.is_free:
                first = first.before
            room, block = 0, first
            while room < num_bytes and (block.is_free or self._is_unmapped(block)):
                room += block.num_bytes
                if block.after is None:
                    break
                block = block.after
            if room >= num_bytes:
                return first
        raise AssertionError("the last block has more addresses than any GPU has memory")

    def _map(self, block: Block, num_bytes: int) -> Block:
        """Maps pages from a block's start on, and returns the free block that they are then part of."""
        size = min(block.num_bytes, -(-num_bytes // self._page_bytes) * self._page_bytes)
        del self._unmapped[block.address]
        self.reserved_bytes += size
        if size < block.num_bytes:
            rest = _cut(block, size)
            self._unmapped[rest.address] = rest
        return self.free(block)

    def _unmap(self, block: Block) -> None:
        """Returns the pages that lie in a free block as a whole."""
        first = -(-(block.address - self._start) // self._page_bytes) * self._page_bytes + self._start
        end = (block.address + block.num_bytes - self._start) // self._page_bytes * self._page_bytes + self._start
        if first >= end:
            return
        self.withdraw(block)
        self.reserved_bytes -= end - first
        middle = block
        if first > block.address:
            middle = _cut(block, first - block.address)
            self.offer(block)
        if end < middle.address + middle.num_bytes:
            self.offer(_cut(middle, end - middle.address))
        middle.is_free = False
        if middle.after is not None and self._is_unmapped(middle.after):
            del self._unmapped[middle.after.address]
            _merge(middle, middle.after)
        if middle.before is not None and self._is_unmapped(middle.before):
            middle = middle.before
            assert middle.after is not None
            _merge(middle, middle.after)
        self._unmapped[middle.address] = middle


def _cut(block: Block, num_bytes: int) -> Block:
    """Cuts a block after so many bytes, and returns the second part, as free or not as the first."""
    rest = Block(
        block.address + num_bytes, block.num_bytes - num_bytes, block.is_free, block.segment, block, block.after
    )
    if block.after is not None:
        block.after.before = rest
    block.after, block.num_bytes = rest, num_bytes
    return rest


def _merge(block: Block, after: Block) -> None:
    block.num_bytes += after.num_bytes
    block.after = after.after
    if after.after is not None:
        after.after.before = block
