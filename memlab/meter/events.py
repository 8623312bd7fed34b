"""The events of a step in order, and the bytes that they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from memlab.meter.allocations import Allocation, Event, Opening, columns_of
from memlab.meter.labels import Labels
from memlab.record.out_of_memory import FailedAllocation
from memlab.units import format_bytes
from memlab.vocabulary import PHASES, POOLS

_DEVICE, _HOST, _RESERVED = (POOLS.index(name) for name in ("device", "host", "reserved"))


class EventLog:
    """Events since `begin`, with the labels of their moments."""

    def __init__(self, labels: Labels) -> None:
        self.events: list[Any] = []
        """In order: an `Event`, or what stands for several (`memlab.meter.recording.Replay`)."""
        self.opening = Opening([])
        self.device_bytes = 0
        self.host_bytes = 0
        self.peak_host_bytes = 0
        """The most host bytes since somebody set it."""
        self.out_of_memory: FailedAllocation | None = None
        """The last request of the step that was refused."""
        self.after_event: Callable[[int, Allocation], None] | None = None
        """Called after each event with its bytes, below 0 for a free, if it is set."""
        self.started = time.perf_counter_ns()
        """When the step began."""
        self._labels = labels
        self._num_device_events = 0
        self._look: tuple[int, Callable[[], None]] | None = None

    def begin(self, opening: Opening) -> None:
        """Begins a step that finds the storages of an opening."""
        self.out_of_memory, self._num_device_events = None, 0
        self.events.clear()
        self.opening, self.started = opening, time.perf_counter_ns()

    def note(self, delta: int, allocation: Allocation) -> None:
        """Adds the event of a storage that was allocated (`delta` above 0) or freed (below 0); none for no bytes."""
        if not delta:
            return
        pool = allocation.pool
        self.events.append(Event.of(allocation, delta, time.perf_counter_ns(), pool, self._labels.phase))
        if pool == _DEVICE:
            self.device_bytes += delta
            self._num_device_events += 1
            if self._look is not None and self._look[0] == self._num_device_events:
                self._look[1]()
        elif pool == _HOST:
            self.host_bytes += delta
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        if self.after_event is not None and pool != _RESERVED:
            self.after_event(delta, allocation)

    def mark(self) -> None:
        """Adds an event of no bytes."""
        self.events.append(Event.marking(time.perf_counter_ns(), self._labels.phase))

    def add(self, num_device_events: int, device_bytes: int, host_bytes: int, most_host_bytes: int) -> None:
        """Counts what stands for several events.

        Args:
            num_device_events: How many of them are on the device.
            device_bytes: Their sum there.
            host_bytes: Their sum on the host.
            most_host_bytes: The largest sum of the first ones on the host.
        """
        self._num_device_events += num_device_events
        self.device_bytes += device_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes + most_host_bytes)
        self.host_bytes += host_bytes

    def columns(
        self, marks: Collection[int] = ()
    ) -> tuple[npt.NDArray[np.int64], dict[int, int], list[tuple[int, int]]]:
        """Returns the step so far; see `columns_of`."""
        return columns_of(self.opening, self.events, self.started, marks)

    def end(self) -> None:
        """Forgets the step."""
        self.events.clear()
        self.opening = Opening([])

    @property
    def looks(self) -> bool:
        """Whether a function waits for its event."""
        return self._look is not None

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        """Calls a function right after a device event of the block, counted from 1 in each step."""
        self._look = number, look
        try:
            yield
        finally:
            self._look = None

    def refuse(
        self,
        num_bytes: int,
        limit_bytes: int,
        *,
        reserved_bytes: int | None = None,
        largest_free_bytes: int | None = None,
    ) -> NoReturn:
        """Raises `torch.OutOfMemoryError` for a request, and remembers it."""
        labels = self._labels
        self.out_of_memory = FailedAllocation(
            phase=PHASES[labels.phase],
            module=labels.modules[labels.module],
            nanoseconds=time.perf_counter_ns() - self.started,
            requested_bytes=num_bytes,
            allocated_bytes=self.device_bytes,
            limit_bytes=limit_bytes,
            reserved_bytes=reserved_bytes,
            largest_free_bytes=largest_free_bytes,
        )
        allocated = f"{format_bytes(self.device_bytes)} of {format_bytes(limit_bytes)} allocated"
        raise torch.OutOfMemoryError(f"in {labels.place}: {format_bytes(num_bytes)} requested with {allocated}")
