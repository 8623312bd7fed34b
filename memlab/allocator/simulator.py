"""torch's caching allocator, simulated: which block a request would get, and what the allocator would reserve.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``malloc``, ``get_free_block``,
``should_split``, ``garbage_collect_cached_blocks``, ``release_available_cached_blocks``, ``release_cached_blocks``).
A block belongs to the stream that was current when its segment was reserved, and no request on another stream gets it.
`Blocks` replays what a real allocator did; this class also searches for the block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memlab.allocator.pools import ExpandablePool, SegmentPool, pool_number
from memlab.allocator.replay import Block
from memlab.allocator.request_log import RequestLog
from memlab.allocator.rules import LARGE_SEGMENT_BYTES, SMALL_REQUEST_BYTES, rounded_bytes, segment_bytes
from memlab.config.allocator_settings import AllocatorSettings
from memlab.units import MIB


class CachingAllocator:
    """The blocks of one device, split as torch would split them.

    Args:
        settings: The options that the process would be started with.
    """

    def __init__(self, settings: AllocatorSettings = AllocatorSettings()) -> None:  # noqa: B008  # frozen
        self._settings = settings
        split_mib = settings.max_split_size_mb
        self._unsplit_from_bytes = sys.maxsize if split_mib is None else split_mib * MIB
        self._whole_from_bytes = sys.maxsize if settings.expandable_segments else self._unsplit_from_bytes
        """For requests of this size and larger no block is split."""
        self._kind = ExpandablePool if settings.expandable_segments else SegmentPool
        self._small, self._large = self._kind(0), self._kind(1)
        self._of_streams: dict[int, SegmentPool] = {}
        """The pools of other streams, by number."""
        self._log: RequestLog | None = None

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has taken from the device, used or not."""
        of_default_stream = self._small.reserved_bytes + self._large.reserved_bytes
        if not self._of_streams:  # nearly always
            return of_default_stream
        return of_default_stream + sum(pool.reserved_bytes for pool in self._of_streams.values())

    def largest_free_bytes(self, requested_bytes: int, stream: int = 0) -> int | None:
        """Returns the largest free block that such a request may take; None where segments are expandable."""
        if self._settings.expandable_segments:
            return None
        return self._pool_of(rounded_bytes(requested_bytes), stream).largest_free_bytes

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block:
        """Returns the block that a request gets.

        Args:
            requested_bytes: The size of the request.
            stream: The number of the current stream, 0 for the default one.
        """
        num_bytes = rounded_bytes(requested_bytes)
        pool = self._pool_of(num_bytes, stream)
        if self._unsplit_from_bytes == sys.maxsize:  # nearly always
            found = pool.take(num_bytes)
        else:
            found = self._best_fit(pool, num_bytes)
            if found is not None:
                pool.withdraw(found)
        block = pool.grow(num_bytes) if found is None else found
        block.is_free = False
        remainder = block.num_bytes - num_bytes
        if remainder >= pool.smallest_split_bytes and num_bytes < self._whole_from_bytes:
            after = Block(block.address + num_bytes, remainder, True, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.num_bytes = after, num_bytes
            pool.offer(after)
        if self._log is not None:
            self._log.allocated(block, requested_bytes, stream)
        return block

    def makes_space(self, requested_bytes: int, limit_bytes: int, stream: int = 0) -> bool:
        """Returns whether a request fits within `limit_bytes` reserved, after returning free memory if it must.

        The limit is one that torch knows, as ``torch.cuda.set_per_process_memory_fraction`` sets it: only then does
        it collect garbage. It is compared with the request rounded to a segment, also where pages suffice.
        """
        num_bytes = rounded_bytes(requested_bytes)
        pool = self._pool_of(num_bytes, stream)
        # Garbage collection has one clock for the large pools of all streams.
        for each in self._pools() if self._of_streams else (pool,):
            each.num_searches += each.is_small == pool.is_small
        if self._best_fit(pool, num_bytes) is not None:
            return True
        if self._settings.garbage_collection_threshold is not None:
            self._collect_garbage(int(self._settings.garbage_collection_threshold * limit_bytes))
        if self._can_grow(pool, num_bytes, limit_bytes):
            return True
        if self._return_oversize(pool, num_bytes) and self._can_grow(pool, num_bytes, limit_bytes):
            return True
        self.empty_cache()
        return self._can_grow(pool, num_bytes, limit_bytes)

    def free(self, block: Block) -> None:
        """Frees a block, and merges it with its free neighbours."""
        if self._log is not None:
            self._log.freed(block)
        number = pool_number(block)
        (self._large if number == 1 else self._small if number == 0 else self._of_streams[number]).free(block)

    def empty_cache(self) -> None:
        """Returns the segments or pages in which nothing is allocated to the device."""
        if self._log is not None:
            self._log.emptied()
        for pool in self._pools():
            pool.empty()
        # A stream that is used again gets a pool again; programs make new streams, and each pool takes time.
        self._of_streams = {number: pool for number, pool in self._of_streams.items() if pool.reserved_bytes}

    @contextmanager
    def logging_requests(self, blocks: Iterable[Block]) -> Iterator[RequestLog]:
        """Logs the requests to this allocator until the context ends.

        Args:
            blocks: All that are allocated.
        """
        log = self._log = RequestLog(self, blocks)
        try:
            yield log
        finally:
            self._log = None

    def state(self) -> tuple[Any, ...]:
        """Returns what decides about later requests, beside the allocated blocks."""
        # Garbage collection knows how long a block has been free.
        clock = None if self._settings.garbage_collection_threshold is None else self._large.num_searches
        return *(pool.state() for pool in self._pools()), clock

    def copy(self, blocks: Iterable[Block]) -> tuple[CachingAllocator, dict[int, Block]]:
        """Returns an allocator in the same state and without a log, for requests that may have to be undone.

        Args:
            blocks: All that are allocated.

        Returns:
            The allocator, and its blocks by the identity of the own ones.
        """
        copies: dict[int, Block] = {}
        originals: list[Block] = []
        waiting = [*blocks, *(block for pool in self._pools() for block in pool.blocks())]
        while waiting:
            block = waiting.pop()
            if id(block) not in copies:
                copied = Block(block.address, block.num_bytes, block.is_free, block.segment)
                copied.free_since = block.free_since
                copies[id(block)] = copied
                waiting += [each for each in (block.before, block.after) if each is not None]
                originals.append(block)
        for block in originals:
            copied = copies[id(block)]
            copied.before = None if block.before is None else copies[id(block.before)]
            copied.after = None if block.after is None else copies[id(block.after)]
        other = CachingAllocator(self._settings)
        other._small, other._large = self._small.copy(copies), self._large.copy(copies)
        other._of_streams = {number: pool.copy(copies) for number, pool in self._of_streams.items()}
        return other, copies

    def _pools(self) -> list[SegmentPool]:
        return [self._small, self._large, *self._of_streams.values()]

    def _pool_of(self, num_bytes: int, stream: int) -> SegmentPool:
        of_default_stream = self._small if num_bytes <= SMALL_REQUEST_BYTES else self._large
        if stream == 0:
            return of_default_stream
        number = 2 * stream + of_default_stream.number
        pool = self._of_streams.get(number)
        if pool is None:
            pool = self._of_streams[number] = self._kind(number)
            pool.num_searches = of_default_stream.num_searches
        return pool

    def _best_fit(self, pool: SegmentPool, num_bytes: int) -> Block | None:
        block = pool.find(num_bytes)
        if block is None or self._unsplit_from_bytes == sys.maxsize:
            return block
        if num_bytes < self._unsplit_from_bytes:
            return block if block.num_bytes < self._unsplit_from_bytes else None
        # A block that is never split may be larger than its request by less than 20 MiB (max_non_split_rounding_mb).
        return block if block.num_bytes < num_bytes + LARGE_SEGMENT_BYTES else None

    def _can_grow(self, pool: SegmentPool, num_bytes: int, limit_bytes: int) -> bool:
        growth = max(segment_bytes(num_bytes), pool.growth_bytes(num_bytes))
        return self.reserved_bytes + growth <= limit_bytes

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """Returns large segments to the device, those first that have been free for longest."""
        excess = self.reserved_bytes - threshold_bytes
        large = [pool for pool in self._pools() if not pool.is_small]
        free = [(pool, segment) for pool in large for segment in pool.free_segments()]
        ages = {segment.address: (pool, segment, pool.age(segment)) for pool, segment in free}
        while excess > 0 and ages:
            mean = sum(age for _, _, age in ages.values()) / len(ages)
            # Never more often than needed: all of at least the mean age go, also when fewer would do.
            old = [(pool, segment) for pool, segment, age in ages.values() if age >= mean]
            for pool, segment in old:
                excess -= segment.num_bytes
                pool.give_back(segment)
                del ages[segment.address]

    def _return_oversize(self, pool: SegmentPool, num_bytes: int) -> bool:
        """Returns blocks that are never split to the device until they make up a request; returns whether they do."""
        needed = max(num_bytes, self._unsplit_from_bytes)
        oversize = [block for block in pool.free_segments() if block.num_bytes >= self._unsplit_from_bytes]
        enough = [block for block in oversize if block.num_bytes >= needed]
        returned = 0
        for block in enough[:1] or reversed(oversize):
            pool.give_back(block)
            returned += block.num_bytes
            if returned >= needed:
                return True
        return False
