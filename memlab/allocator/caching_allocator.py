"""torch's caching allocator, simulated: which block a request would get, and what the allocator would reserve.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``malloc``, ``get_free_block``,
``should_split``, ``garbage_collect_cached_blocks``, ``release_available_cached_blocks``, ``release_cached_blocks``).
A block belongs to the stream that was current when its segment was reserved, and no request on another stream gets it.
`memlab.allocator.replay` follows what a real allocator did; this class also searches for the block.
`memlab.allocator.kernels` has the same rules once more, for numba: who changes one changes both.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Iterable

import numpy as np

from memlab.allocator.block_table import BlockTable
from memlab.allocator.pools import ExpandablePool, SegmentPool
from memlab.allocator.protocol import EMPTY_CACHE, EXCHANGE_POOLS, NO_BLOCK, Operations, Served
from memlab.allocator.rules import LARGE_SEGMENT_BYTES, PRIVATE_POOLS, SMALL_REQUEST_BYTES, rounded_bytes, segment_bytes
from memlab.config.allocator_settings import AllocatorSettings
from memlab.units import MIB


class CachingAllocator:
    """The blocks of one device, split as torch would split them in a process with these options; see `Allocator`."""

    def __init__(self, settings: AllocatorSettings = AllocatorSettings()) -> None:  # noqa: B008  # frozen
        self.log: array[int] | None = None
        self.is_capturing = False
        self.settings = settings
        split_mib = settings.max_split_size_mb
        self.unsplit_from_bytes = sys.maxsize if split_mib is None else split_mib * MIB
        self._has_unsplit = split_mib is not None
        self._whole_from_bytes = sys.maxsize if settings.expandable_segments else self.unsplit_from_bytes
        """For requests of this size and larger no block is split."""
        self._kind = ExpandablePool if settings.expandable_segments else SegmentPool
        self.blocks = BlockTable()
        self.pools = {number: self._kind(number, self.blocks) for number in (0, 1)}
        """By number: those of the default stream, and those of other streams that have memory. From `PRIVATE_POOLS` on
        those of a CUDA graph, or while it is captured all others."""

    @property
    def reserved_bytes(self) -> int:
        return self.blocks.reserved_bytes

    def largest_free_bytes(self, requested_bytes: int, stream: int = 0) -> int | None:
        if self.settings.expandable_segments:
            return None
        return self._pool_of(rounded_bytes(requested_bytes), stream).largest_free_bytes

    def num_bytes(self, block: int) -> int:
        return self.blocks.num_bytes[block]

    def allocate(self, requested_bytes: int, stream: int = 0) -> int:
        num_bytes, blocks = rounded_bytes(requested_bytes), self.blocks
        pool = self.pools.get(2 * stream + (num_bytes > SMALL_REQUEST_BYTES)) or self._pool_of(num_bytes, stream)
        if not self._has_unsplit:  # nearly always
            block = pool.take(num_bytes)
        else:
            block = self._best_fit(pool, num_bytes)
            if block != NO_BLOCK:
                pool.withdraw(block)
        if block == NO_BLOCK:
            block = pool.grow(num_bytes)
        remainder = blocks.num_bytes[block] - num_bytes
        if remainder >= pool.smallest_split_bytes and num_bytes < self._whole_from_bytes:
            pool.offer(blocks.split(block, num_bytes))
        blocks.is_free[block] = False
        if self.log is not None:
            self.log.extend((block, requested_bytes, stream))
        return block

    def makes_space(self, requested_bytes: int, limit_bytes: int, stream: int = 0) -> bool:
        # The limit is one that torch knows, as torch.cuda.set_per_process_memory_fraction sets it: only then does it
        # collect garbage. It is compared with the request rounded to a segment, also where pages suffice.
        num_bytes = rounded_bytes(requested_bytes)
        pool = self._pool_of(num_bytes, stream)
        # Garbage collection has one clock for the large pools of all streams.
        for each in self.pools.values():
            each.num_searches += each.is_small == pool.is_small
        if self._best_fit(pool, num_bytes) != NO_BLOCK:
            return True
        if self.settings.garbage_collection_threshold is not None:
            self._collect_garbage(int(self.settings.garbage_collection_threshold * limit_bytes))
        if self._can_grow(pool, num_bytes, limit_bytes):
            return True
        if self._return_oversize(pool, num_bytes) and self._can_grow(pool, num_bytes, limit_bytes):
            return True
        self.empty_cache()  # the pool may be gone
        return self._can_grow(self._pool_of(num_bytes, stream), num_bytes, limit_bytes)

    def _returnable(self) -> list[SegmentPool]:
        """Returns the pools of which segments may be returned to the device: none while a graph is captured.

        (torch 2.11: ``captures_underway`` in ``malloc`` and ``release_cached_blocks``.)
        """
        return [] if self.is_capturing else [pool for number, pool in self.pools.items() if number < PRIVATE_POOLS]

    def free(self, block: int) -> None:
        if self.log is not None:
            self.log.extend((block, 0, 0))
        self.pools[self.blocks.pool[block]].free(block)

    def empty_cache(self) -> None:
        if self.log is not None:
            self.log.extend((EMPTY_CACHE, 0, 0))
        returnable = self._returnable()
        for pool in self.pools.values():
            if pool in returnable or not pool.reserved_bytes:
                pool.empty()
        # A stream that is used again gets a pool again; programs make new streams, and each pool takes time.
        self.pools = {number: pool for number, pool in self.pools.items() if number < 2 or pool.reserved_bytes}

    def exchange_pools(self, *, of_same_graph: bool = False) -> None:
        if self.log is not None:
            self.log.extend((EXCHANGE_POOLS, 0, of_same_graph))
        self.is_capturing = not self.is_capturing
        former = self.pools
        for number, pool in former.items():
            is_emptied = self.is_capturing and not (of_same_graph and number >= PRIVATE_POOLS)
            if is_emptied or not pool.reserved_bytes:
                pool.empty()
        self.pools = {number ^ PRIVATE_POOLS: pool for number, pool in former.items() if pool.reserved_bytes}
        for number, pool in self.pools.items():
            pool.number = number
        self.blocks.pool = [number ^ PRIVATE_POOLS for number in self.blocks.pool]
        for number in (0, 1):
            if number not in self.pools:
                self.add_pool(number).num_searches = former[number].num_searches

    def run(self, operations: Operations, blocks: list[int], limit_bytes: int | None = None) -> Served:
        table, num_bytes, changes = self.blocks, list[int](), list[tuple[int, int]]()
        sizes, reserved_bytes = table.num_bytes, table.reserved_bytes
        for slot, requested_bytes, stream in operations.rows:
            if requested_bytes:
                if limit_bytes is not None and not self.makes_space(requested_bytes, limit_bytes, stream):
                    break
                block = blocks[slot] = self.allocate(requested_bytes, stream)
                num_bytes.append(sizes[block])
            elif slot == EMPTY_CACHE:
                self.empty_cache()
                num_bytes.append(0)
            else:
                block, blocks[slot] = blocks[slot], NO_BLOCK
                assert block != NO_BLOCK, "what is freed is allocated"
                num_bytes.append(sizes[block])
                self.free(block)
                continue  # which changes no reserved bytes
            if table.reserved_bytes != reserved_bytes:
                changes.append((len(num_bytes) - 1, table.reserved_bytes - reserved_bytes))
                reserved_bytes = table.reserved_bytes
        return Served(np.array(num_bytes, dtype=np.int64), changes)

    def state(self, blocks: Iterable[int]) -> Hashable:
        # Garbage collection knows how long a block has been free.
        clock = None if self.settings.garbage_collection_threshold is None else self.pools[1].num_searches
        of_pools = tuple((number, pool.state()) for number, pool in sorted(self.pools.items()))
        address = self.blocks.address
        return (
            of_pools,
            clock,
            self.is_capturing,
            tuple([-1 if block == NO_BLOCK else address[block] for block in blocks]),
        )

    def in_python(self) -> CachingAllocator:
        return self

    def add_pool(self, number: int) -> SegmentPool:
        """Adds the pool of a number, which has no memory yet."""
        pool = self.pools[number] = self._kind(number, self.blocks)
        return pool

    def copy(self) -> CachingAllocator:
        other = CachingAllocator(self.settings)
        other.blocks, other.is_capturing = self.blocks.copy(), self.is_capturing
        other.pools = {number: pool.copy(other.blocks) for number, pool in self.pools.items()}
        return other

    def _pool_of(self, num_bytes: int, stream: int) -> SegmentPool:
        number = 2 * stream + (num_bytes > SMALL_REQUEST_BYTES)
        pool = self.pools.get(number)
        if pool is None:
            pool = self.add_pool(number)
            pool.num_searches = self.pools[number % 2].num_searches
        return pool

    def _best_fit(self, pool: SegmentPool, num_bytes: int) -> int:
        block = pool.find(num_bytes)
        if block == NO_BLOCK or not self._has_unsplit:
            return block
        found_bytes = self.blocks.num_bytes[block]
        if num_bytes < self.unsplit_from_bytes:
            return block if found_bytes < self.unsplit_from_bytes else NO_BLOCK
        # A block that is never split may be larger than its request by less than 20 MiB (max_non_split_rounding_mb).
        return block if found_bytes < num_bytes + LARGE_SEGMENT_BYTES else NO_BLOCK

    def _can_grow(self, pool: SegmentPool, num_bytes: int, limit_bytes: int) -> bool:
        growth = max(segment_bytes(num_bytes), pool.growth_bytes(num_bytes))
        return self.reserved_bytes + growth <= limit_bytes

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """Returns large segments to the device, those first that have been free for longest."""
        excess = self.reserved_bytes - threshold_bytes
        large = [pool for pool in self._returnable() if not pool.is_small]
        ages = {segment: (pool, pool.age(segment)) for pool in large for segment in pool.free_segments()}
        while excess > 0 and ages:
            mean = sum(age for _, age in ages.values()) / len(ages)
            # Never more often than needed: all of at least the mean age go, also when fewer would do.
            old = [(pool, segment) for segment, (pool, age) in ages.items() if age >= mean]
            for pool, segment in old:
                excess -= self.blocks.num_bytes[segment]
                pool.give_back(segment)
                del ages[segment]

    def _return_oversize(self, pool: SegmentPool, num_bytes: int) -> bool:
        """Returns blocks that are never split to the device until they make up a request; returns whether they do."""
        sizes = self.blocks.num_bytes
        needed = max(num_bytes, self.unsplit_from_bytes)
        if self.is_capturing:
            return False
        oversize = [block for block in pool.free_segments() if sizes[block] >= self.unsplit_from_bytes]
        enough = [block for block in oversize if sizes[block] >= needed]
        returned = 0
        for block in enough[:1] or reversed(oversize):
            returned += sizes[block]
            pool.give_back(block)
            if returned >= needed:
                return True
        return False
