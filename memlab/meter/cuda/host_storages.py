"""The host's side of a GPU's meter: the tensors that it is told of, and what torch pins besides."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from memlab.meter.allocations import Event, Life
from memlab.meter.labels import Labels
from memlab.vocabulary import POOLS

_HOST = POOLS.index("host")


class HostStorages:
    """Counts host tensors until their storages die."""

    def __init__(self, labels: Labels) -> None:
        self.events: list[Event] = []
        """Since `start`."""
        self._labels = labels
        self._live: dict[int, Life] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._num_bytes = self._peak_bytes = 0
        self._pinned_before = 0
        self._num_starts = 0

    def start(self) -> list[Event]:
        """Begins a timeline; returns its opening events."""
        self._num_starts += 1
        self.events.clear()
        return [Event.opening(life) for life in self._live.values()]

    def hold(self, tensor: torch.Tensor) -> Life:
        """Counts a tensor from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self._live.get(key)
        if life is None:
            labels = self._labels
            life = Life(storage.nbytes(), _HOST, labels.module, labels.phase, labels.span, False, self._num_starts)
            self._live[key] = life
            self._event(life.num_bytes, life)
            self._references[key] = weakref.ref(storage, lambda _: self._died(key, life))
        return life

    def live_bytes(self) -> int:
        """Returns the bytes alive now."""
        return sum(life.num_bytes for life in self._live.values())

    def restart_peak(self) -> None:
        """Lets `peak_bytes` begin anew."""
        torch.cuda.reset_peak_host_memory_stats()
        self._peak_bytes = self._num_bytes = self.live_bytes()
        self._pinned_before = pinned_bytes("current")

    @property
    def peak_bytes(self) -> int:
        """The most bytes since `restart_peak`, those included that torch pinned and gave up again."""
        return self._peak_bytes + max(0, pinned_bytes("peak") - self._pinned_before)

    def _died(self, key: int, life: Life) -> None:
        del self._live[key], self._references[key]
        life.died_in_span, life.died_in_step = self._labels.span, self._num_starts
        self._event(-life.num_bytes, life)

    def _event(self, delta: int, life: Life) -> None:
        if delta:
            self._num_bytes += delta
            self._peak_bytes = max(self._peak_bytes, self._num_bytes)
            self.events.append(Event.of(life, delta, time.time_ns(), _HOST, self._labels.phase))


def pinned_bytes(when: str) -> int:
    """Returns what torch really holds of pinned memory (``current``, ``peak``), what it keeps for reuse included."""
    return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{when}", 0))
