"""The caching allocator, compiled: what `CachingAllocator` does with tables of operations, on arrays instead of lists.

It takes over an allocator's state and gives it back, since one request at a time costs more here than there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from memlab.allocator import kernels
from memlab.allocator.block_table import BlockTable
from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.kernels import NO_LIMIT, Tables
from memlab.allocator.pools import ExpandablePool
from memlab.allocator.protocol import NO_BLOCK, Operations, Served
from memlab.config.allocator_settings import AllocatorSettings


class CompiledAllocator:
    """See `ServesTables`.

    Args:
        settings: The options that the process would be started with.
        tables: Its state.
    """

    def __init__(self, settings: AllocatorSettings, tables: Tables) -> None:
        self._settings = settings
        self._tables = tables

    @classmethod
    def of(cls, former: CachingAllocator) -> CompiledAllocator:
        """Returns an allocator in the state of another one."""
        table, pools = former.blocks, former.pools
        columns = (table.address, table.num_bytes, table.pool, table.is_free, table.before, table.after)
        blocks = np.array([*columns, table.free_since], dtype=np.int64).T.copy()
        free = [block for _, pool in sorted(pools.items()) for *_, block in pool.free_blocks]
        unmapped = {block for pool in pools.values() if isinstance(pool, ExpandablePool) for block in pool.unmapped}
        holes = sorted(unmapped, key=table.address.__getitem__)
        blocks[holes, kernels.STATE] = kernels.UNMAPPED
        lists = np.zeros((4, len(blocks)), dtype=np.int64)
        for row, of_row in ((kernels.UNUSED, table.unused), (kernels.IN_ORDER, free), (kernels.HOLES, holes)):
            lists[row, : len(of_row)] = of_row
        of_pools = np.zeros((max(pools) + 1, 4), dtype=np.int64)
        for number, pool in pools.items():
            of_pools[number] = pool.reserved_bytes, pool.top, pool.num_searches, 1
        options = (former.settings.expandable_segments, former.unsplit_from_bytes, former.is_capturing)
        numbers = (table.reserved_bytes, len(blocks), len(table.unused), len(free), len(holes), *options)
        return cls(former.settings, Tables(blocks, lists, of_pools, np.array(numbers, dtype=np.int64)))

    def in_python(self) -> CachingAllocator:
        """Returns an allocator in the same state, with the same numbers of blocks."""
        former, (blocks, lists, pools, numbers) = CachingAllocator(self._settings), self._tables
        table, rows = BlockTable(), blocks[: numbers[kernels.NUM_PLACES]]
        columns = rows.T.tolist()
        table.address, table.num_bytes, table.pool, _, table.before, table.after, table.free_since = columns
        table.is_free = (rows[:, kernels.STATE] == kernels.FREE).tolist()
        table.unused = lists[kernels.UNUSED, : numbers[kernels.NUM_UNUSED]].tolist()
        table.reserved_bytes, former.is_capturing = self.reserved_bytes, bool(numbers[kernels.CAPTURES])
        former.blocks, former.pools = table, {}
        for number, (reserved_bytes, top, num_searches, exists) in enumerate(pools.tolist()):
            if exists:
                pool = former.add_pool(number)
                pool.reserved_bytes, pool.top, pool.num_searches = reserved_bytes, top, num_searches
        for block in lists[kernels.IN_ORDER, : numbers[kernels.NUM_FREE]].tolist():
            key = table.num_bytes[block], table.address[block], block
            former.pools[table.pool[block]].free_blocks.append(key)
        for block in lists[kernels.HOLES, : numbers[kernels.NUM_HOLES]].tolist():
            pool = former.pools[table.pool[block]]
            assert isinstance(pool, ExpandablePool), "only these have pages"
            pool.unmapped.add(block)
        return former

    @property
    def reserved_bytes(self) -> int:
        return int(self._tables.numbers[kernels.RESERVED])

    def run(self, operations: Operations, blocks: list[int], limit_bytes: int | None = None) -> Served:
        threshold, limits = self._settings.garbage_collection_threshold, (NO_LIMIT, NO_LIMIT)
        if limit_bytes is not None:
            limits = limit_bytes, NO_LIMIT if threshold is None else int(threshold * limit_bytes)
        self._add_pools(operations.last_stream)
        slots, before, number, end = np.array(blocks, dtype=np.int64), self.reserved_bytes, 0, kernels.FULL
        num_bytes, reserved = results = np.empty((2, len(operations)), dtype=np.int64)
        while end == kernels.FULL:
            end, number = kernels.run(*self._tables, operations.table, slots, limits, results, number)
            if end == kernels.FULL:
                self._add_places()
        blocks[:] = slots.tolist()
        changes = np.diff(reserved[:number], prepend=before)
        places = np.flatnonzero(changes)
        return Served(num_bytes[:number], list(zip(places.tolist(), changes[places].tolist(), strict=True)))

    def state(self, blocks: Iterable[int]) -> Hashable:
        table, lists, pools, numbers = self._tables
        # Garbage collection, of large pools only, knows how long a block has been free.
        clock = None if self._settings.garbage_collection_threshold is None else int(pools[1, kernels.NUM_SEARCHES])
        of_pools = [(number, *row[:2]) for number, row in enumerate(pools.tolist()) if row[kernels.EXISTS]]
        free = table[lists[kernels.IN_ORDER, : numbers[kernels.NUM_FREE]], : kernels.POOL + 1]
        holes = table[lists[kernels.HOLES, : numbers[kernels.NUM_HOLES]], : kernels.POOL + 1].tolist()
        addresses = np.fromiter(blocks, dtype=np.int64)
        is_live = addresses != NO_BLOCK
        addresses[is_live] = table[addresses[is_live], kernels.ADDRESS]
        captures = bool(numbers[kernels.CAPTURES])
        return tuple(of_pools), clock, captures, free.tobytes(), tuple(sorted(map(tuple, holes))), addresses.tobytes()

    def copy(self) -> CompiledAllocator:
        return CompiledAllocator(self._settings, Tables(*(each.copy() for each in self._tables)))

    def _add_pools(self, stream: int) -> None:
        blocks, lists, pools, numbers = self._tables
        missing = max(2 * stream + 2 - len(pools), 0)
        self._tables = Tables(blocks, lists, np.pad(pools, ((0, missing), (0, 0))), numbers)

    def _add_places(self) -> None:
        blocks, lists, *others = self._tables
        more = (0, len(blocks) + 8)
        self._tables = Tables(np.pad(blocks, (more, (0, 0))), np.pad(lists, ((0, 0), more)), *others)
