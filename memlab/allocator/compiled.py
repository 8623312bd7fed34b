"""The caching allocator, compiled: what `CachingAllocator` does, on arrays instead of lists."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from memlab.allocator import tables
from memlab.allocator.block_table import BlockTable
from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.pools import ExpandablePool
from memlab.allocator.protocol import EMPTY_CACHE, MAKE_SPACE, NO_BLOCK, Operations, Served
from memlab.allocator.tables import NO_LIMIT, Tables
from memlab.config.allocator_settings import AllocatorSettings

_SLOT, _REQUESTED, _STREAM, _BLOCK, _RESULTS = (tables.NUM_ARGUMENTS + place for place in (0, 1, 2, 3, 4))
"""Places behind the arguments in `CompiledAllocator._call`: one operation, the block in its slot, and its results."""
_ANSWER, _ERROR, _END = (tables.NUM_ARGUMENTS + place for place in (7, 8, 9))


class CompiledAllocator:
    """See `Allocator`; the settings are those that the process would be started with."""

    def __init__(self, settings: AllocatorSettings, state: Tables, serve: Any) -> None:
        self.log: array[int] | None = None
        self.settings, self._code = settings, serve
        self._is_serving = False
        """Python may collect garbage in the middle of a method. What that frees waits in `_late` for its end."""
        self._late: list[int] = []
        self._call_array = np.zeros(_END, dtype=np.int64)
        self._call, start = self._call_array.data, self._call_array.ctypes.data
        self._addresses = start + 8 * _ANSWER, start + 8 * _ERROR, start
        of_one = start + 8 * _SLOT, 0, 1, start + 8 * _BLOCK, start + 8 * _RESULTS, NO_LIMIT, NO_LIMIT
        self._call_array[tables.OPERATIONS : tables.ENDED] = self._of_one = np.array(of_one)
        self._use(state)

    def _use(self, state: Tables) -> None:
        blocks, lists, pools, numbers = self._tables = state
        self._numbers, self._columns = numbers.data, blocks.reshape(-1).data
        addresses = (each.ctypes.data for each in (blocks, lists, pools, numbers))
        self._call_array[: tables.OPERATIONS] = *addresses, len(blocks), len(pools)
        self._num_streams = len(pools) // 2

    @classmethod
    def of(cls, former: CachingAllocator, serve: Any) -> CompiledAllocator:
        """Returns an allocator in the state of another one, with its log."""
        table, pools = former.blocks, former.pools
        columns = (table.address, table.num_bytes, table.pool, table.is_free, table.before, table.after)
        blocks = np.array([*columns, table.free_since], dtype=np.int64).T.copy()
        free = [block for _, pool in sorted(pools.items()) for *_, block in pool.free_blocks]
        unmapped = {block for pool in pools.values() if isinstance(pool, ExpandablePool) for block in pool.unmapped}
        holes = sorted(unmapped, key=table.address.__getitem__)
        blocks[holes, tables.STATE] = tables.UNMAPPED
        lists = np.zeros((tables.NUM_LISTS, len(blocks)), dtype=np.int64)
        for row, of_row in ((tables.UNUSED, table.unused), (tables.IN_ORDER, free), (tables.HOLES, holes)):
            lists[row, : len(of_row)] = of_row
        of_pools = np.zeros((max(pools) + 1, tables.NUM_POOL_COLUMNS), dtype=np.int64)
        for number, pool in pools.items():
            of_pools[number] = pool.reserved_bytes, pool.lowest, pool.num_searches, 1
        options = (former.settings.expandable_segments, former.unsplit_from_bytes, former.is_capturing)
        counts = (len(blocks), len(table.unused), len(free), len(holes))
        numbers = np.array([table.reserved_bytes, *counts, *options], dtype=np.int64)
        allocator = cls(former.settings, Tables(blocks, lists, of_pools, numbers), serve)
        allocator.log = former.log
        return allocator

    def in_python(self) -> CachingAllocator:
        with self._serving():
            former = self._in_python()
            for block in self._late:
                former.free(block)
            former.log = self.log
            return former

    def _in_python(self) -> CachingAllocator:
        former, (blocks, lists, pools, numbers) = CachingAllocator(self.settings), self._tables
        table, rows = BlockTable(), blocks[: numbers[tables.NUM_PLACES]]
        columns = rows.T.tolist()
        table.address, table.num_bytes, table.pool, _, table.before, table.after, table.free_since = columns
        table.is_free = (rows[:, tables.STATE] == tables.FREE).tolist()
        table.unused = lists[tables.UNUSED, : numbers[tables.NUM_UNUSED]].tolist()
        table.reserved_bytes, former.is_capturing = self.reserved_bytes, bool(numbers[tables.CAPTURES])
        former.blocks, former.pools = table, {}
        for number, (reserved_bytes, lowest, num_searches, exists) in enumerate(pools.tolist()):
            if exists:
                pool = former.add_pool(number)
                pool.reserved_bytes, pool.lowest, pool.num_searches = reserved_bytes, lowest, num_searches
        for block in lists[tables.IN_ORDER, : numbers[tables.NUM_FREE]].tolist():
            key = table.num_bytes[block], table.address[block], block
            former.pools[table.pool[block]].free_blocks.append(key)
        for block in lists[tables.HOLES, : numbers[tables.NUM_HOLES]].tolist():
            pool = former.pools[table.pool[block]]
            assert isinstance(pool, ExpandablePool), "only these have pages"
            pool.unmapped.add(block)
        return former

    @property
    def reserved_bytes(self) -> int:
        return self._numbers[tables.RESERVED]

    def num_bytes(self, block: int) -> int:
        return self._columns[block * tables.NUM_COLUMNS + tables.NUM_BYTES]

    def largest_free_bytes(self, requested_bytes: int, stream: int = 0) -> int | None:
        return self.in_python().largest_free_bytes(requested_bytes, stream)

    def allocate(self, requested_bytes: int, stream: int = 0) -> int:
        self._is_serving = True
        try:
            if stream >= self._num_streams:
                self._add_pools(stream)
            call = self._call
            call[_REQUESTED], call[_STREAM] = requested_bytes, stream
            self._serve(1)
            block = call[_BLOCK]
            if self.log is not None:
                self.log.extend((block, requested_bytes, stream))
        finally:
            self._is_serving = False  # after Ctrl-C too, or what is freed then would wait for a later call
        if self._late:
            self._free_late()
        return block

    def free(self, block: int) -> None:
        if self._is_serving:
            self._late.append(block)
            return
        self._is_serving = True
        try:
            call = self._call
            call[_REQUESTED], call[_BLOCK] = 0, block
            self._serve(1)
            if self.log is not None:
                self.log.extend((block, 0, 0))
        finally:
            self._is_serving = False
        if self._late:
            self._free_late()

    def _free_late(self) -> None:
        late, self._late = self._late, []
        for block in late:
            self.free(block)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Defers what is freed in the block to its end; `allocate` and `free` do so without the time of a context."""
        self._is_serving = True
        try:
            yield
        finally:
            self._is_serving = False
            self._free_late()

    def empty_cache(self) -> None:
        with self._serving():
            self._ask(EMPTY_CACHE, 0, 0, NO_LIMIT, NO_LIMIT)
            if self.log is not None:
                self.log.extend((EMPTY_CACHE, 0, 0))

    def makes_space(self, requested_bytes: int, limit_bytes: int, stream: int = 0) -> bool:
        with self._serving():
            self._add_pools(stream)
            return self._ask(MAKE_SPACE, requested_bytes, stream, *self._limits(limit_bytes))

    def _ask(self, slot: int, requested_bytes: int, stream: int, limit_bytes: int, garbage_bytes: int) -> bool:
        """Serves an operation about no slot; returns whether it was served."""
        call = self._call
        call[_SLOT], call[_REQUESTED], call[_STREAM] = slot, requested_bytes, stream
        call[tables.LIMIT], call[tables.GARBAGE] = limit_bytes, garbage_bytes
        try:
            return self._serve(1) == 1
        finally:
            call[_SLOT], call[tables.LIMIT], call[tables.GARBAGE] = 0, NO_LIMIT, NO_LIMIT

    def run(self, operations: Operations, blocks: list[int], limit_bytes: int | None = None) -> Served:
        table, slots, count = np.ascontiguousarray(operations.table), np.array(blocks, dtype=np.int64), len(operations)
        before, results = self.reserved_bytes, np.empty((count, 3), dtype=np.int64)
        addresses, limits = (slots.ctypes.data, results.ctypes.data), self._limits(limit_bytes)
        with self._serving():
            self._add_pools(operations.last_stream)
            self._call_array[tables.OPERATIONS : tables.ENDED] = table.ctypes.data, 0, count, *addresses, *limits
            try:
                number = self._serve(count)
            finally:
                self._call_array[tables.OPERATIONS : tables.ENDED] = self._of_one
            num_bytes, reserved, used = results[:number].T
            if self.log is not None:
                self.log.frombytes(np.stack([used, *table[:number, 1:].T], axis=1).tobytes())
        blocks[:] = slots.tolist()
        if (reserved == before).all():  # most tables need nothing of the device
            return Served(num_bytes.copy(), [])
        changes = np.diff(reserved, prepend=before)
        places = np.flatnonzero(changes)
        return Served(num_bytes.copy(), list(zip(places.tolist(), changes[places].tolist(), strict=True)))

    def _serve(self, count: int) -> int:
        """Serves the operations that `_call` names, until one does not fit; returns how many are served then."""
        call, code, addresses = self._call, self._code, self._addresses
        failed = code(*addresses)
        while failed or call[_ANSWER] < count:
            assert not failed, "the last block has more addresses than any GPU has memory"
            assert call[tables.ENDED] != tables.WRONG, "what is freed is allocated"
            if call[tables.ENDED] == tables.REFUSED:
                break
            call[tables.FIRST] = call[_ANSWER]
            self._add_places()
            failed = code(*addresses)
        return call[_ANSWER]

    def _limits(self, limit_bytes: int | None) -> tuple[int, int]:
        threshold = self.settings.garbage_collection_threshold
        if limit_bytes is None:
            return NO_LIMIT, NO_LIMIT
        return limit_bytes, NO_LIMIT if threshold is None else int(threshold * limit_bytes)

    def state(self, blocks: Iterable[int]) -> Hashable:
        addresses = np.fromiter(blocks, dtype=np.int64)
        with self._serving():
            table, lists, pools, numbers = self._tables
            # Garbage collection, of large pools only, knows how long a block has been free.
            clock = None if self.settings.garbage_collection_threshold is None else int(pools[1, tables.NUM_SEARCHES])
            of_pools = [(number, *row[:2]) for number, row in enumerate(pools.tolist()) if row[tables.EXISTS]]
            free = table[lists[tables.IN_ORDER, : numbers[tables.NUM_FREE]], : tables.POOL + 1]
            holes = table[lists[tables.HOLES, : numbers[tables.NUM_HOLES]], : tables.POOL + 1].tolist()
            is_live = addresses != NO_BLOCK
            addresses[is_live] = table[addresses[is_live], tables.ADDRESS]
            captures = bool(numbers[tables.CAPTURES])
        return tuple(of_pools), clock, captures, free.tobytes(), tuple(sorted(map(tuple, holes))), addresses.tobytes()

    def copy(self) -> Self:
        with self._serving():
            return type(self)(self.settings, Tables(*(each.copy() for each in self._tables)), self._code)

    def _add_pools(self, stream: int) -> None:
        missing = 2 * stream + 2 - len(self._tables.pools)
        if missing > 0:
            self._use(self._tables._replace(pools=np.pad(self._tables.pools, ((0, missing), (0, 0)))))

    def _add_places(self) -> None:
        blocks, lists = self._tables[:2]
        more = (0, len(blocks) + 8)
        self._use(self._tables._replace(blocks=np.pad(blocks, (more, (0, 0))), lists=np.pad(lists, ((0, 0), more))))
