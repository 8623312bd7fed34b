"""The host side of a GPU's meter: the tensors that it was given, and what torch pins in addition to them."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from memlab.meter.allocations import Allocation, Event
from memlab.meter.labels import Labels
from memlab.meter.observers import Frees
from memlab.vocabulary import POOLS

_HOST = POOLS.index("host")


class HostStorages:
    """Counts host tensors until their storages are freed."""

    def __init__(self, labels: Labels) -> None:
        self.events: list[Event] = []
        """Since `start`."""
        self.frees = Frees()
        self._labels = labels
        self._live: dict[int, Allocation] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._num_bytes = self._peak_bytes = 0
        self._pinned_before = 0
        self._num_starts = 0

    def start(self) -> list[Allocation]:
        """Begins a timeline; returns what it finds."""
        self._num_starts += 1
        self.events.clear()
        return list(self._live.values())

    def track(self, tensor: torch.Tensor) -> Allocation:
        """Counts a tensor from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        allocation = self._live.get(key)
        if allocation is None:
            labels, step = self._labels, self._num_starts
            place = (labels.module, labels.phase, labels.span)
            allocation = Allocation(storage.nbytes(), _HOST, *place, recomputed=False, step=step)
            self._live[key] = allocation
            self._event(allocation.num_bytes, allocation)
            self._references[key] = self.frees.watch(storage, lambda _: self._on_free(key, allocation), None)
        return allocation

    def live_bytes(self) -> int:
        """Returns the bytes allocated now."""
        return sum(allocation.num_bytes for allocation in self._live.values())

    def reset_peak(self) -> None:
        """Restarts `peak_bytes` at the bytes allocated now."""
        torch.cuda.reset_peak_host_memory_stats()
        self._peak_bytes = self._num_bytes = self.live_bytes()
        self._pinned_before = pinned_bytes("current")

    @property
    def peak_bytes(self) -> int:
        """The most bytes since `reset_peak`, including memory that torch pinned and freed again."""
        return self._peak_bytes + max(0, pinned_bytes("peak") - self._pinned_before)

    def _on_free(self, key: int, allocation: Allocation) -> None:
        del self._live[key], self._references[key]
        allocation.freed_in_span, allocation.freed_in_step = self._labels.span, self._num_starts
        self._event(-allocation.num_bytes, allocation)

    def _event(self, delta: int, allocation: Allocation) -> None:
        if delta:
            self._num_bytes += delta
            self._peak_bytes = max(self._peak_bytes, self._num_bytes)
            self.events.append(Event.of(allocation, delta, time.time_ns(), _HOST, self._labels.phase))


def pinned_bytes(when: str) -> int:
    """Returns the pinned memory that torch holds (``current`` or ``peak``), what it keeps for reuse included."""
    return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{when}", 0))
