"""The rules of `memlab.allocator.caching_allocator` once more, on arrays, for numba: they are 4 times as fast.

Only `memlab.allocator.machine_code` imports this file, and only to compile it. `CachingAllocator` is the one to read:
each function here has the name and the steps of one there, and tests hold the two against each other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.cgutils import intp_t, unpack_tuple
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from memlab.allocator import rules
from memlab.allocator.protocol import EMPTY_CACHE, MAKE_SPACE, NO_BLOCK
from memlab.allocator.tables import (
    ADDRESS,
    AFTER,
    ALLOCATED,
    BEFORE,
    BLOCKS,
    CAPTURES,
    DONE,
    ENDED,
    EXISTS,
    EXPANDS,
    FIRST,
    FREE,
    FREE_SINCE,
    FULL,
    GARBAGE,
    HOLES,
    IN_ORDER,
    LAST,
    LIMIT,
    LISTS,
    LOWEST,
    NO_LIMIT,
    NUM_ARGUMENTS,
    NUM_BYTES,
    NUM_COLUMNS,
    NUM_FREE,
    NUM_HOLES,
    NUM_LISTS,
    NUM_NUMBERS,
    NUM_PLACES,
    NUM_POOL_COLUMNS,
    NUM_SEARCHES,
    NUM_UNUSED,
    NUMBERS,
    OPERATIONS,
    PLACES,
    POOL,
    POOL_RESERVED,
    POOL_ROWS,
    POOLS,
    REFUSED,
    RESERVED,
    RESULTS,
    SEGMENTS,
    SLOTS,
    STATE,
    UNMAPPED,
    UNSPLIT_FROM,
    UNUSED,
    WRONG,
    Tables,
)

_ADDRESSES_BYTES = 2**50
_MAX = np.iinfo(np.int64).max
_LARGE_SEGMENT_BYTES, _SMALL_SEGMENT_BYTES = rules.LARGE_SEGMENT_BYTES, rules.SMALL_SEGMENT_BYTES
_MIN_BLOCK_BYTES, _SMALL_REQUEST_BYTES = rules.MIN_BLOCK_BYTES, rules.SMALL_REQUEST_BYTES
_PRIVATE_POOLS = rules.PRIVATE_POOLS
_Function = TypeVar("_Function")
_OPTIONS: dict[str, Any] = {"_nrt": False, "no_cfunc_wrapper": True}
"""numba does not list these among its options. Without them it counts references to arrays that no function keeps."""


def _compiled(function: _Function) -> _Function:
    """Returns a function that numba compiles for other compiled ones."""
    compiled: _Function = numba.njit(**_OPTIONS | {"no_cpython_wrapper": True})(function)
    return compiled


_unsigned = np.uint64
"""An index that cannot be negative: LLVM then moves several entries at a time."""
_rounded_bytes, _segment_bytes = _compiled(rules.rounded_bytes), _compiled(rules.segment_bytes)


@_compiled
def _place(t: Tables, pool: int, num_bytes: int, address: int) -> int:
    """Returns how many free blocks come before such a one."""
    low, high = 0, t.numbers[NUM_FREE]
    while low < high:
        middle = (low + high) // 2
        block = t.lists[IN_ORDER, middle]
        other = t.blocks[block, POOL]
        if other == pool:
            size = t.blocks[block, NUM_BYTES]
            is_before = size < num_bytes or (size == num_bytes and t.blocks[block, ADDRESS] < address)
        else:
            is_before = other < pool
        if is_before:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _at(t: Tables, place: int, pool: int) -> int:
    if place < t.numbers[NUM_FREE]:
        block = t.lists[IN_ORDER, place]
        if t.blocks[block, POOL] == pool:
            return block
    return NO_BLOCK


@_compiled
def _insert(t: Tables, row: int, count: int, place: int, block: int) -> None:
    for index in range(_unsigned(t.numbers[count] - place)):
        behind = _unsigned(t.numbers[count]) - index
        t.lists[row, behind] = t.lists[row, behind - _unsigned(1)]
    t.lists[row, place] = block
    t.numbers[count] += 1


@_compiled
def _delete(t: Tables, row: int, count: int, place: int) -> None:
    t.numbers[count] -= 1
    for index in range(_unsigned(place), _unsigned(t.numbers[count])):
        t.lists[row, index] = t.lists[row, index + _unsigned(1)]


@_compiled
def _offer(t: Tables, block: int) -> None:
    pool = t.blocks[block, POOL]
    t.blocks[block, FREE_SINCE] = t.pools[pool, NUM_SEARCHES]
    place = _place(t, pool, t.blocks[block, NUM_BYTES], t.blocks[block, ADDRESS])
    _insert(t, IN_ORDER, NUM_FREE, place, block)


@_compiled
def _withdraw(t: Tables, block: int) -> None:
    place = _place(t, t.blocks[block, POOL], t.blocks[block, NUM_BYTES], t.blocks[block, ADDRESS])
    _delete(t, IN_ORDER, NUM_FREE, place)


@_compiled
def _remove(t: Tables, block: int) -> None:
    t.lists[UNUSED, t.numbers[NUM_UNUSED]] = block
    t.numbers[NUM_UNUSED] += 1


@_compiled
def _add(t: Tables, address: int, num_bytes: int, pool: int, state: int) -> int:
    if t.numbers[NUM_UNUSED]:
        t.numbers[NUM_UNUSED] -= 1
        block = t.lists[UNUSED, t.numbers[NUM_UNUSED]]
    else:
        block = t.numbers[NUM_PLACES]
        t.numbers[NUM_PLACES] += 1
    t.blocks[block, ADDRESS], t.blocks[block, NUM_BYTES], t.blocks[block, POOL] = address, num_bytes, pool
    t.blocks[block, STATE], t.blocks[block, BEFORE], t.blocks[block, AFTER] = state, NO_BLOCK, NO_BLOCK
    return block


@_compiled
def _split(t: Tables, block: int, num_bytes: int) -> int:
    address, size = t.blocks[block, ADDRESS], t.blocks[block, NUM_BYTES]
    rest = _add(t, address + num_bytes, size - num_bytes, t.blocks[block, POOL], t.blocks[block, STATE])
    after = t.blocks[block, AFTER]
    t.blocks[block, NUM_BYTES] = num_bytes
    t.blocks[block, AFTER], t.blocks[rest, BEFORE], t.blocks[rest, AFTER] = rest, block, after
    if after != NO_BLOCK:
        t.blocks[after, BEFORE] = rest
    return rest


@_compiled
def _join(t: Tables, block: int, after: int) -> None:
    t.blocks[block, NUM_BYTES] += t.blocks[after, NUM_BYTES]
    behind = t.blocks[after, AFTER]
    t.blocks[block, AFTER] = behind
    if behind != NO_BLOCK:
        t.blocks[behind, BEFORE] = block
    _remove(t, after)


@_compiled
def _free(t: Tables, block: int) -> int:
    t.blocks[block, STATE] = FREE
    after, before = t.blocks[block, AFTER], t.blocks[block, BEFORE]
    if after != NO_BLOCK and t.blocks[after, STATE] == FREE:
        _withdraw(t, after)
        _join(t, block, after)
    if before != NO_BLOCK and t.blocks[before, STATE] == FREE:
        _withdraw(t, before)
        _join(t, before, block)
        block = before
    _offer(t, block)
    return block


@_compiled
def _reserve(t: Tables, pool: int, num_bytes: int) -> None:
    t.pools[pool, POOL_RESERVED] += num_bytes
    t.numbers[RESERVED] += num_bytes


@_compiled
def _pool_of(t: Tables, num_bytes: int, stream: int) -> int:
    is_large = num_bytes > _SMALL_REQUEST_BYTES
    pool = 2 * stream + is_large
    if not t.pools[pool, EXISTS]:
        t.pools[pool, EXISTS], t.pools[pool, LOWEST] = 1, _ADDRESSES_BYTES
        t.pools[pool, NUM_SEARCHES] = t.pools[int(is_large), NUM_SEARCHES]
    return pool


@_compiled
def _with_growth(t: Tables, block: int) -> int:
    after = t.blocks[block, AFTER]
    growth = t.blocks[after, NUM_BYTES] if after != NO_BLOCK and t.blocks[after, STATE] == UNMAPPED else 0
    return t.blocks[block, NUM_BYTES] + growth


@_compiled
def _find(t: Tables, pool: int, num_bytes: int) -> int:
    place = _place(t, pool, num_bytes, -1)
    block = _at(t, place, pool)
    if block == NO_BLOCK or not t.numbers[EXPANDS]:
        return block
    while True:
        place += 1
        other = _at(t, place, pool)
        if other == NO_BLOCK or _with_growth(t, other) >= _with_growth(t, block):
            return block
        block = other


@_compiled
def _best_fit(t: Tables, pool: int, num_bytes: int) -> int:
    block, unsplit_from = _find(t, pool, num_bytes), t.numbers[UNSPLIT_FROM]
    if block == NO_BLOCK or unsplit_from == _MAX:
        return block
    found_bytes = t.blocks[block, NUM_BYTES]
    if num_bytes < unsplit_from:
        return block if found_bytes < unsplit_from else NO_BLOCK
    return block if found_bytes < num_bytes + _LARGE_SEGMENT_BYTES else NO_BLOCK


@_compiled
def _page_bytes(pool: int) -> int:
    return _LARGE_SEGMENT_BYTES if pool % 2 else _SMALL_SEGMENT_BYTES


@_compiled
def _add_hole(t: Tables, block: int) -> None:
    t.blocks[block, STATE] = UNMAPPED
    place = 0
    while place < t.numbers[NUM_HOLES] and t.blocks[t.lists[HOLES, place], ADDRESS] < t.blocks[block, ADDRESS]:
        place += 1
    _insert(t, HOLES, NUM_HOLES, place, block)


@_compiled
def _remove_hole(t: Tables, block: int) -> None:
    place = 0
    while t.lists[HOLES, place] != block:
        place += 1
    _delete(t, HOLES, NUM_HOLES, place)


@_compiled
def _place_to_grow(t: Tables, pool: int, num_bytes: int) -> int:
    has_holes = False
    for index in range(t.numbers[NUM_HOLES]):
        hole = t.lists[HOLES, index]
        if t.blocks[hole, POOL] != pool:
            continue
        has_holes = True
        before = t.blocks[hole, BEFORE]
        first = before if before != NO_BLOCK and t.blocks[before, STATE] == FREE else hole
        room, block = 0, first
        while room < num_bytes and block != NO_BLOCK and t.blocks[block, STATE] != ALLOCATED:
            room += t.blocks[block, NUM_BYTES]
            block = t.blocks[block, AFTER]
        if room >= num_bytes:
            return first
    assert not has_holes, "the last block has more addresses than any GPU has memory"
    first = _add(t, 0, _ADDRESSES_BYTES, pool, UNMAPPED)
    _add_hole(t, first)
    return first


@_compiled
def _growth_bytes(t: Tables, pool: int, num_bytes: int) -> int:
    if not t.numbers[EXPANDS]:
        return _segment_bytes(num_bytes)
    block, page = _place_to_grow(t, pool, num_bytes), _page_bytes(pool)
    needed, growth = num_bytes, 0
    while needed > 0:
        size = t.blocks[block, NUM_BYTES]
        if t.blocks[block, STATE] == UNMAPPED:
            size = min(size, -(-needed // page) * page)
            growth += size
        needed -= size
        block = t.blocks[block, AFTER]
    return growth


@_compiled
def _map(t: Tables, block: int, num_bytes: int) -> int:
    pool = t.blocks[block, POOL]
    page = _page_bytes(pool)
    size = min(t.blocks[block, NUM_BYTES], -(-num_bytes // page) * page)
    _remove_hole(t, block)
    _reserve(t, pool, size)
    if size < t.blocks[block, NUM_BYTES]:
        _add_hole(t, _split(t, block, size))
    return _free(t, block)


@_compiled
def _grow(t: Tables, pool: int, num_bytes: int) -> int:
    if not t.numbers[EXPANDS]:
        size = _segment_bytes(num_bytes)
        t.pools[pool, LOWEST] -= size
        _reserve(t, pool, size)
        return _add(t, t.pools[pool, LOWEST], size, pool, FREE)
    block = _place_to_grow(t, pool, num_bytes)
    if t.blocks[block, STATE] == UNMAPPED:
        block = _map(t, block, num_bytes)
    while t.blocks[block, NUM_BYTES] < num_bytes:
        block = _map(t, t.blocks[block, AFTER], num_bytes - t.blocks[block, NUM_BYTES])
    _withdraw(t, block)
    return block


@_compiled
def _allocate(t: Tables, requested_bytes: int, stream: int) -> int:
    num_bytes = _rounded_bytes(requested_bytes)
    pool = _pool_of(t, num_bytes, stream)
    block = _best_fit(t, pool, num_bytes)
    if block == NO_BLOCK:
        block = _grow(t, pool, num_bytes)
    else:
        _withdraw(t, block)
    remainder = t.blocks[block, NUM_BYTES] - num_bytes
    smallest = _MIN_BLOCK_BYTES if t.numbers[EXPANDS] or pool % 2 == 0 else _SMALL_REQUEST_BYTES + 1
    if remainder >= smallest and (t.numbers[EXPANDS] or num_bytes < t.numbers[UNSPLIT_FROM]):
        _offer(t, _split(t, block, num_bytes))
    t.blocks[block, STATE] = ALLOCATED
    return block


@_compiled
def _is_returnable(t: Tables, pool: int) -> bool:
    return pool < _PRIVATE_POOLS and not t.numbers[CAPTURES]


@_compiled
def _list_segments(t: Tables, only_large: bool) -> int:
    """Lists the segments in which nothing is allocated, the smallest of each pool first; returns how many."""
    count = 0
    for index in range(t.numbers[NUM_FREE]):
        block = t.lists[IN_ORDER, index]
        if not _is_returnable(t, t.blocks[block, POOL]):
            break  # all others are of pools with larger numbers
        is_whole = t.blocks[block, BEFORE] == NO_BLOCK and t.blocks[block, AFTER] == NO_BLOCK
        if is_whole and (t.blocks[block, POOL] % 2 or not only_large):
            t.lists[SEGMENTS, count] = block
            count += 1
    return count


@_compiled
def _give_back(t: Tables, segment: int) -> None:
    _withdraw(t, segment)
    _reserve(t, t.blocks[segment, POOL], -t.blocks[segment, NUM_BYTES])
    _remove(t, segment)


@_compiled
def _unmap(t: Tables, block: int) -> None:
    page = _page_bytes(t.blocks[block, POOL])
    start = t.blocks[block, ADDRESS]
    end = start + t.blocks[block, NUM_BYTES]
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return
    _withdraw(t, block)
    _reserve(t, t.blocks[block, POOL], first - last)
    middle = block
    if first > start:
        middle = _split(t, block, first - start)
        _offer(t, block)
    if last < end:
        _offer(t, _split(t, middle, last - first))
    after, before = t.blocks[middle, AFTER], t.blocks[middle, BEFORE]
    if after != NO_BLOCK and t.blocks[after, STATE] == UNMAPPED:
        _remove_hole(t, after)
        _join(t, middle, after)
    if before != NO_BLOCK and t.blocks[before, STATE] == UNMAPPED:
        _join(t, before, middle)  # and stays the hole that it is
    else:
        _add_hole(t, middle)


@_compiled
def _empty_cache(t: Tables) -> None:
    if t.numbers[EXPANDS]:
        count = t.numbers[NUM_FREE]
        for index in range(count):  # a slice would need numba's runtime
            t.lists[SEGMENTS, index] = t.lists[IN_ORDER, index]
        for index in range(count):
            if _is_returnable(t, t.blocks[t.lists[SEGMENTS, index], POOL]):
                _unmap(t, t.lists[SEGMENTS, index])
        for place in range(t.numbers[NUM_HOLES] - 1, -1, -1):
            hole = t.lists[HOLES, place]
            if not t.pools[t.blocks[hole, POOL], POOL_RESERVED]:
                _delete(t, HOLES, NUM_HOLES, place)
                _remove(t, hole)
    else:
        for index in range(_list_segments(t, False)):
            _give_back(t, t.lists[SEGMENTS, index])
    for pool in range(2, len(t.pools)):
        if not t.pools[pool, POOL_RESERVED]:
            t.pools[pool, EXISTS] = 0


@_compiled
def _can_grow(t: Tables, pool: int, num_bytes: int, limit_bytes: int) -> bool:
    growth = max(_segment_bytes(num_bytes), _growth_bytes(t, pool, num_bytes))
    return t.numbers[RESERVED] + growth <= limit_bytes


@_compiled
def _collect_garbage(t: Tables, threshold_bytes: int) -> None:
    excess = t.numbers[RESERVED] - threshold_bytes
    count = 0 if t.numbers[EXPANDS] else _list_segments(t, True)
    while excess > 0 and count:
        total = 0
        for index in range(count):
            segment = t.lists[SEGMENTS, index]
            total += t.pools[t.blocks[segment, POOL], NUM_SEARCHES] - t.blocks[segment, FREE_SINCE]
        mean, kept = total / count, 0
        for index in range(count):
            segment = t.lists[SEGMENTS, index]
            age = t.pools[t.blocks[segment, POOL], NUM_SEARCHES] - t.blocks[segment, FREE_SINCE]
            if age >= mean:
                excess -= t.blocks[segment, NUM_BYTES]
                _give_back(t, segment)
            else:
                t.lists[SEGMENTS, kept] = segment
                kept += 1
        count = kept


@_compiled
def _return_oversize(t: Tables, pool: int, num_bytes: int) -> bool:
    unsplit_from = t.numbers[UNSPLIT_FROM]
    if unsplit_from == _MAX or t.numbers[EXPANDS]:
        return False
    needed, count = max(num_bytes, unsplit_from), 0
    for index in range(_list_segments(t, False)):
        segment = t.lists[SEGMENTS, index]
        if t.blocks[segment, POOL] != pool or t.blocks[segment, NUM_BYTES] < unsplit_from:
            continue
        if t.blocks[segment, NUM_BYTES] >= needed:
            _give_back(t, segment)
            return True
        t.lists[SEGMENTS, count] = segment
        count += 1
    returned = 0
    for index in range(count - 1, -1, -1):
        segment = t.lists[SEGMENTS, index]
        returned += t.blocks[segment, NUM_BYTES]
        _give_back(t, segment)
        if returned >= needed:
            return True
    return False


@_compiled
def _makes_space(t: Tables, requested_bytes: int, stream: int, limit_bytes: int, garbage_bytes: int) -> bool:
    num_bytes = _rounded_bytes(requested_bytes)
    pool = _pool_of(t, num_bytes, stream)
    for each in range(pool % 2, len(t.pools), 2):
        t.pools[each, NUM_SEARCHES] += t.pools[each, EXISTS]
    if _best_fit(t, pool, num_bytes) != NO_BLOCK:
        return True
    if garbage_bytes != NO_LIMIT:
        _collect_garbage(t, garbage_bytes)
    if _can_grow(t, pool, num_bytes, limit_bytes):
        return True
    if _return_oversize(t, pool, num_bytes) and _can_grow(t, pool, num_bytes, limit_bytes):
        return True
    _empty_cache(t)
    return _can_grow(t, _pool_of(t, num_bytes, stream), num_bytes, limit_bytes)


@_compiled
def _has_places(t: Tables) -> bool:
    """Whether there are places for the blocks that one operation can add: two for each free block whose pages go."""
    needed = 4 + 2 * t.numbers[NUM_FREE] * t.numbers[EXPANDS]
    return len(t.blocks) - t.numbers[NUM_PLACES] + t.numbers[NUM_UNUSED] >= needed


def _make_array_at(_: Any, address: Any, shape: Any) -> Any:
    """Says how an array of a shape is made at an address, as `numba.carray` makes one with numba's runtime."""
    array = numba.types.Array(numba.types.int64, len(shape), "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, sizes = builder.inttoptr(arguments[0], intp_t.as_pointer()), unpack_tuple(builder, arguments[1])
        strides = [intp_t(8)]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        made = make_array(array)(context, builder)
        populate_array(made, data, sizes, strides, intp_t(8), meminfo=None)
        return made._getvalue()

    return array(numba.types.int64, numba.types.UniTuple(numba.types.int64, len(shape))), generate


_array_at: Any = intrinsic(_make_array_at)


def _serve(call: int) -> int:
    """Serves the operations at an address (`memlab.allocator.tables`); returns how many of them are served then."""
    c = _array_at(call, (NUM_ARGUMENTS,))
    t = Tables(
        _array_at(c[BLOCKS], (c[PLACES], NUM_COLUMNS)),
        _array_at(c[LISTS], (NUM_LISTS, c[PLACES])),
        _array_at(c[POOLS], (c[POOL_ROWS], NUM_POOL_COLUMNS)),
        _array_at(c[NUMBERS], (NUM_NUMBERS,)),
    )
    operations, rows = _array_at(c[OPERATIONS], (c[LAST], 3)), _array_at(c[RESULTS], (c[LAST], 3))
    slots, limit_bytes, garbage_bytes = _array_at(c[SLOTS], (_MAX,)), c[LIMIT], c[GARBAGE]
    for index in range(c[FIRST], c[LAST]):
        if not _has_places(t):
            c[ENDED] = FULL
            return index
        slot, requested_bytes, stream = operations[index, 0], operations[index, 1], operations[index, 2]
        block, num_bytes = slot, 0
        if requested_bytes:
            if limit_bytes != NO_LIMIT and not _makes_space(t, requested_bytes, stream, limit_bytes, garbage_bytes):
                c[ENDED] = REFUSED
                return index
            if slot != MAKE_SPACE:
                block = slots[slot] = _allocate(t, requested_bytes, stream)
                num_bytes = t.blocks[block, NUM_BYTES]
        elif slot == EMPTY_CACHE:
            _empty_cache(t)
        else:
            block = slots[slot]
            if block == NO_BLOCK:
                c[ENDED] = WRONG
                return index
            slots[slot] = NO_BLOCK
            num_bytes = t.blocks[block, NUM_BYTES]
            _free(t, block)
        rows[index, 0], rows[index, 1], rows[index, 2] = num_bytes, t.numbers[RESERVED], block
    c[ENDED] = DONE
    return c[LAST]


def assembly() -> tuple[str, str]:
    """Returns the name of `_serve` in the code that LLVM gets, and this code, after numba's optimization of it."""
    function = numba.njit(**_OPTIONS | {"no_cpython_wrapper": True})(_serve)
    function.compile((numba.types.int64,))
    (result,) = function.overloads.values()
    return result.fndesc.llvm_func_name, result.library.get_llvm_str()
