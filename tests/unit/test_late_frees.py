"""What of a GPU's streams is known to have ended, and which blocks wait for them, by hand."""

from __future__ import annotations

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.meter.late_frees import LateFrees
from memlab.meter.stream_order import StreamOrder
from memlab.units import MIB

SIZE = 20 * MIB
"""Of a block that has a segment of its own."""


def test_a_stream_that_waited_brings_what_it_waited_for() -> None:
    order = StreamOrder()
    gathered = order.event(1)
    order.wait(0, gathered)
    computed = order.event(0)
    later = order.event(1)
    assert not order.has_ended(1, gathered)
    order.synchronize(computed)
    assert order.has_ended(0, computed) and order.has_ended(1, gathered)
    assert not order.has_ended(1, later), "nobody has waited for the second gather"
    order.synchronize()
    assert order.has_ended(1, later)


def test_a_block_waits_until_the_program_has_waited_for_its_other_streams() -> None:
    order, first = StreamOrder(), CachingAllocator()
    old = first.allocate(SIZE, 1)
    late = LateFrees(first, order)
    late.begin()

    def again(block: int, users: frozenset[int]) -> int:
        first.free(block)
        late.give_back(block, users)
        new = first.allocate(SIZE, 1)
        late.take(new, SIZE, 1)
        return new

    new = again(old, frozenset())
    assert late.most_reserved_bytes == first.reserved_bytes == SIZE, "used by its own stream alone"
    new = again(new, frozenset({0}))
    assert late.most_reserved_bytes == 2 * SIZE and first.reserved_bytes == SIZE
    order.synchronize(order.event(0))
    new = again(new, frozenset({0}))
    assert late.most_reserved_bytes == 2 * SIZE, "the first one serves again"
    late.begin()
    late.empty_cache()
    late.begin()
    assert late.most_reserved_bytes == SIZE, "only what is allocated stays"
