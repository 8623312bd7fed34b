"""The allocator in Python and the compiled one, which get the same random requests and have to give the same answers."""

from __future__ import annotations

import random
from array import array

import numpy as np

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.compiled import CompiledAllocator
from memlab.allocator.machine_code import serve
from memlab.allocator.protocol import EMPTY_CACHE, NO_BLOCK, Allocator, Operations
from memlab.config.allocator_settings import AllocatorSettings
from memlab.units import MIB

_SIZES = ((9, 14), (9, 21), (18, 22), (20, 25), (22, 28))
"""Powers of two between which requests are drawn: within small segments, across both kinds of pools, large ones."""


def random_settings(rng: random.Random) -> AllocatorSettings:
    """Draws options; torch allows all combinations."""
    return AllocatorSettings(
        expandable_segments=rng.random() < 0.4,
        max_split_size_mb=rng.choice([None, None, 20, 32, 128]),
        garbage_collection_threshold=rng.choice([None, None, 0.3, 0.7, 0.95]),
    )


def random_operations(rng: random.Random, blocks: list[int], number: int) -> Operations:
    """Draws requests and frees that are possible with these blocks in the slots, and sometimes an emptied cache."""
    is_live = [block != NO_BLOCK for block in blocks]
    smallest, largest = rng.choice(_SIZES)
    streams = rng.choice([(0,), (0,), (0, 1), (0, 1, 5)])
    share, rows = rng.choice([0.0, 0.0, 0.02]), []
    for _ in range(number):
        if rng.random() < share:
            rows.append((EMPTY_CACHE, 0, 0))
            continue
        slot = rng.randrange(len(blocks))
        is_live[slot] = not is_live[slot]
        size = int(2 ** rng.uniform(smallest, largest))
        rows.append(
            (slot, rng.choice([size, size // 512 * 512]), rng.choice(streams)) if is_live[slot] else (slot, 0, 0)
        )
    return Operations(np.array(rows, dtype=np.int64))


def places(allocator: Allocator, blocks: list[int]) -> list[tuple[int, ...] | None]:
    """Returns address, size and pool of each block."""
    if isinstance(allocator, CachingAllocator):
        table = allocator.blocks
        columns: list[list[int]] = [table.address, table.num_bytes, table.pool]
    else:
        assert isinstance(allocator, CompiledAllocator)
        columns = allocator._tables.blocks[:, :3].T.tolist()
    return [None if block == NO_BLOCK else tuple(column[block] for column in columns) for block in blocks]


def compiled_from(python: CachingAllocator) -> CompiledAllocator:
    """Returns a compiled allocator in the state of another one."""
    return CompiledAllocator.of(python, serve(compiles=True))


def _serve_one_by_one(
    rng: random.Random, python: Allocator, compiled: Allocator, blocks: list[int], others: list[int]
) -> int:
    """Gives single requests and frees to both, and compares; returns how many were served."""
    both, num_served = ((python, blocks), (compiled, others)), rng.choice([0, 1, 40])
    python.log, compiled.log = array("q"), array("q")
    for _ in range(num_served):
        slot, size, stream = rng.randrange(len(blocks)), int(2 ** rng.uniform(9, 28)), rng.randrange(3)
        if blocks[slot] != NO_BLOCK:
            for each, of_each in both:
                each.free(of_each[slot])
                of_each[slot] = NO_BLOCK
            continue
        for each, of_each in both:
            of_each[slot] = each.allocate(size, stream)
        assert python.num_bytes(blocks[slot]) == compiled.num_bytes(others[slot])
        assert python.reserved_bytes == compiled.reserved_bytes
    if rng.random() < 0.2:
        python.empty_cache()
        compiled.empty_cache()
    assert [row[1:] for row in _rows(python.log)] == [row[1:] for row in _rows(compiled.log)]
    python.log = compiled.log = None
    if rng.random() < 0.3:
        size, limit = int(2 ** rng.uniform(9, 28)), int(python.reserved_bytes * rng.uniform(0.7, 1.3)) + MIB
        stream = rng.randrange(3)
        assert compiled.makes_space(size, limit, stream) == python.makes_space(size, limit, stream)
        assert compiled.largest_free_bytes(size, stream) == python.largest_free_bytes(size, stream)
    return num_served


def _rows(log: array[int]) -> list[tuple[int, ...]]:
    return [tuple(log[first : first + 3]) for first in range(0, len(log), 3)]


def require_equal_answers(seed: int) -> int:
    """Gives random requests to both, some of them within a limit, and compares; returns how many were served.

    Some requests come in tables, the others one by one. The compiled one takes over from the other after the first tables, and copies of both take over from them.
    """
    rng = random.Random(seed)
    settings, blocks = random_settings(rng), [NO_BLOCK] * rng.choice([4, 30, 200])
    python, others = CachingAllocator(settings), list(blocks)
    compiled = compiled_from(python)
    num_served, limit_bytes = 0, None
    states: list[tuple[object, object]] = []
    for turn in range(rng.randint(2, 8)):
        operations = random_operations(rng, blocks, rng.choice([1, 20, 300]))
        served, by_compiled = (
            each.run(operations, of_each, limit_bytes) for each, of_each in ((python, blocks), (compiled, others))
        )
        assert served.num_bytes.tolist() == by_compiled.num_bytes.tolist()
        assert served.changes == by_compiled.changes
        assert python.reserved_bytes == compiled.reserved_bytes
        assert places(python, blocks) == places(compiled, others)
        num_served += len(served.num_bytes)
        num_served += _serve_one_by_one(rng, python, compiled, blocks, others)
        again = compiled.in_python()
        assert places(again, others) == places(python, blocks) and again.state(others) == python.state(blocks)
        if rng.random() < 0.3:  # the capture of a CUDA graph begins or ends
            again = compiled.in_python()
            for each in (again, python):
                each.exchange_pools()
            compiled = compiled_from(again)
        if turn == 0:
            compiled, others = compiled_from(python), list(blocks)
        if rng.random() < 0.3:
            python, compiled = python.copy(), compiled.copy()
        states.append((python.state(blocks), compiled.state(others)))
        limit_bytes = rng.choice([None, int(python.reserved_bytes * rng.uniform(0.5, 1.5)) + 2 * MIB])
    same = [[one[which] == other[which] for one in states for other in states] for which in (0, 1)]
    assert same[0] == same[1]
    return num_served
