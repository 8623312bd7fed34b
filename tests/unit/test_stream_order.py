"""What of a GPU's streams is known to have ended, by hand."""

from __future__ import annotations

from memlab.meter.stream_order import StreamOrder


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
