"""The arrays in which the compiled allocator keeps its state, and what it is called with."""

from __future__ import annotations

from typing import NamedTuple

from memlab.allocator.protocol import IntArray

NUM_COLUMNS = 7
ADDRESS, NUM_BYTES, POOL, STATE, BEFORE, AFTER, FREE_SINCE = range(NUM_COLUMNS)
"""Columns of `Tables.blocks`."""
ALLOCATED, FREE, UNMAPPED = range(3)
"""States of a block. One that is unmapped is a range of an expandable segment that has no pages."""
NUM_LISTS = 4
UNUSED, IN_ORDER, HOLES, SEGMENTS = range(NUM_LISTS)
"""Rows of `Tables.lists`: places for new blocks; the free blocks by pool, size and address; the unmapped ones by
address; and free segments while they are returned."""
NUM_POOL_COLUMNS = 4
POOL_RESERVED, LOWEST, NUM_SEARCHES, EXISTS = range(NUM_POOL_COLUMNS)
"""Columns of `Tables.pools`."""
NUM_NUMBERS = 8
RESERVED, NUM_PLACES, NUM_UNUSED, NUM_FREE, NUM_HOLES, EXPANDS, UNSPLIT_FROM, CAPTURES = range(NUM_NUMBERS)
"""Places in `Tables.numbers`."""
NUM_ARGUMENTS = 14
BLOCKS, LISTS, POOLS, NUMBERS, PLACES, POOL_ROWS, OPERATIONS, FIRST, LAST, SLOTS, RESULTS, LIMIT, GARBAGE, ENDED = (
    range(NUM_ARGUMENTS)
)
"""Places in what a call gets: the addresses of the `Tables`, and how many blocks and pools these have; the address of a
table of `Operations`, the first one to serve, and how many there are; the addresses of the blocks in the slots, and of
an array that gets a row for each operation (the bytes of its block, the reserved bytes after it, and the block); what
may be reserved, and from where on garbage is collected, or `NO_LIMIT`. The call adds how it has ended."""
DONE, REFUSED, FULL, WRONG = range(4)
"""How a call ends: with all operations, at a request that does not fit, because no place is left for new blocks, or at
a free of what is not allocated."""
NO_LIMIT = -1


class Tables(NamedTuple):
    """An allocator."""

    blocks: IntArray
    """A row per block; a block is its place."""
    lists: IntArray
    """Rows of blocks, each as wide as there are blocks; how many of them count is in `numbers`."""
    pools: IntArray
    """A row per pool, by its number."""
    numbers: IntArray
    """What there is one of."""
