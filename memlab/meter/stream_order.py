"""Which work on a GPU's streams is known to have ended, if the GPU is behind: what a program has waited for.

A block that ``record_stream`` has marked is free again when the other stream's work of that moment has ended
(``insert_events`` and ``process_events`` in c10/cuda/CUDACachingAllocator.cpp, torch 2.11). How far a GPU is behind
depends on the job; here it has done no more than what the process waited for, so that such blocks wait for longest.
"""

from __future__ import annotations

from collections.abc import Callable

Moment = dict[int, int]
"""By stream, how much of its work: the number of the event that ends it."""

SENDING = -1
"""The number of the stream of NCCL by which ranks send each other tensors one at a time. NCCL's backend records it for
each of them (``ProcessGroupNCCL::pointToPoint`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.11)."""

_NUM_STREAMS = 32
"""torch takes the streams of a process from a pool in turn, and then the first one again (``kStreamsPerPool`` in
``c10/cuda/CUDAStream.cpp``, torch 2.11)."""


class StreamNumbers:
    """The numbers of the streams that a process takes."""

    num_taken = 0

    def take(self) -> int:
        """Returns the number of the next stream, from 1."""
        self.num_taken += 1
        return (self.num_taken - 1) % _NUM_STREAMS + 1


STREAM_NUMBERS = StreamNumbers()


class StreamOrder:
    """The streams of one process by their numbers."""

    def __init__(self) -> None:
        self._before: dict[int, Moment] = {}
        """By stream, what has ended before its next work begins."""
        self._ended: Moment = {}
        self.on_synchronize: Callable[[], None] | None = None
        """Called when the process has waited for all streams."""

    def event(self, stream: int) -> Moment:
        """Returns the moment after all that a stream has been given so far."""
        before = self._before.setdefault(stream, {})
        before[stream] = before.get(stream, 0) + 1
        return dict(before)

    def wait(self, stream: int, moment: Moment) -> None:
        """Has a stream's next work begin after a moment."""
        _advance(self._before.setdefault(stream, {}), moment)

    def synchronize(self, moment: Moment | None = None) -> None:
        """Has the process wait for a moment; for all streams without one."""
        for each in [self.event(stream) for stream in self._before] if moment is None else [moment]:
            _advance(self._ended, each)
        if moment is None and self.on_synchronize is not None:
            self.on_synchronize()

    def has_ended(self, stream: int, moment: Moment) -> bool:
        """Whether what a stream had been given at a moment of its own has ended."""
        return self._ended.get(stream, 0) >= moment[stream]


def _advance(known: Moment, moment: Moment) -> None:
    for stream, number in moment.items():
        known[stream] = max(known.get(stream, 0), number)
