"""A meter for the CPU and for fake tensors: every storage's birth, growth and death, exact to the byte.

A dispatch mode sees each operation's results, a weak reference sees each storage die, and
`UntypedStorage.resize_` is watched, because Megatron frees and refills storages in place with it. What an
operation allocates and frees inside itself is not an event; what several operations do inside one
`one_kernel` block goes to the ``on_chip`` pool.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.meter.allocations import Event, Life, timeline_of
from memlab.meter.labels import Labels
from memlab.meter.observers import ObserveResults, observe_resizes, tensors_in
from memlab.record.out_of_memory import Refusal
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _HOST, _ON_CHIP = (POOLS.index(name) for name in ("device", "host", "on_chip"))


@dataclass(slots=True, eq=False)
class StorageLife(Life):
    """A life with what the meter needs to follow its storage."""

    requested_bytes: int = 0
    """The storage's size; `num_bytes` is what it takes of its pool."""
    reference: weakref.ref[Any] | None = None


class StorageMeter:
    """Accounts for every storage that is made on its thread while `watching`."""

    def __init__(self, labels: Labels) -> None:
        self.device_memory_bytes: int | None = None
        """The size of the device, where it is pretended: what would exceed it raises `torch.OutOfMemoryError`."""
        self._on_device_event: Callable[[int], None] | None = None
        self._num_device_events = 0
        self.out_of_memory: Refusal | None = None
        self._labels = labels
        self._device_bytes = 0
        self._host_bytes = 0
        self._peak_host_bytes = 0
        self._num_starts = 0
        self._live: dict[int, StorageLife] = {}
        self._events: list[Event] = []
        self._opening: list[Event] = []
        self._in_kernel: list[StorageLife] = []
        self._started = time.perf_counter_ns()
        labels.on_kernel_end = self._leave_kernel

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meters what the block does on this thread."""
        with ObserveResults(self), observe_resizes(self):
            yield

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Lets the block run unmetered within `watching`; what is born in it stays unknown, deaths are still seen."""
        with _disable_current_modes():
            yield

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Begins a timeline: what is alive now becomes its opening events.

        Args:
            categories: Category to the tensors that are of it, as `Timeline` will name them.
        """
        self.categorise(categories)
        self._num_starts += 1
        self._num_device_events = 0
        self.out_of_memory = None
        self._events.clear()
        self._opening = [Event.opening(life) for life in self._live.values() if life.num_bytes]
        self._started = time.perf_counter_ns()

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Fixes the category of storages by name; it holds from their birth on."""
        for name, tensors in categories.items():
            code = CATEGORIES.index(name)
            for tensor in tensors:
                life = self.life_of(tensor)
                if life is not None:
                    life.category = code

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """Returns what is known of a tensor's storage, None for one that was never seen."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def pool_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the pool that a tensor's storage lives in, None for one that was never seen."""
        life = self.life_of(tensor)
        return None if life is None else POOLS[life.pool]

    def restart_peak(self) -> None:
        """Lets `peak_host_bytes` begin at what is alive now."""
        self._peak_host_bytes = self._host_bytes

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes on the host since `restart_peak`."""
        return self._peak_host_bytes

    def live_bytes(self, pool: str = "device") -> int:
        """Returns the bytes alive in a pool now."""
        code = POOLS.index(pool)
        return sum(life.num_bytes for life in self._live.values() if life.pool == code)

    def hold_on_host(self, tensor: torch.Tensor) -> None:
        """Does nothing: a host tensor is seen like any other."""

    def host_reserved_bytes(self) -> None:
        """Returns nothing: the CPU pins no memory."""

    def bytes_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the device bytes alive now that are none of the tensors'."""
        named = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(life.num_bytes for key, life in self._live.items() if life.pool == _DEVICE and key not in named)

    def uncategorised_bytes(self) -> int:
        """Returns the device bytes alive now that `categorise` has given no name."""
        return sum(life.num_bytes for life in self._live.values() if life.pool == _DEVICE and life.category is None)

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        """Calls `look` right after device event `number` since the next `start`."""
        self._on_device_event = lambda count: look() if count == number else None
        try:
            yield
        finally:
            self._on_device_event = None

    def finish(self) -> Timeline:
        """Ends the timeline that `start` began, and returns it."""
        timeline = timeline_of(self._opening, self._events, self._started, self._labels.modules)
        self._events.clear()
        self._opening = []
        return timeline

    def close(self) -> None:
        """Ends the watch for good; here nothing outlives `watching`."""

    def observe(self, results: Any, arguments: Any = ()) -> None:
        """Books the storages of an operation's results that are new or that changed their size."""
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self._observe_storage(result.untyped_storage(), arguments)
            elif isinstance(result, (tuple, list)):
                self.observe(result, arguments)

    def _observe_storage(self, storage: Any, arguments: Any) -> None:
        key = storage._cdata
        life = self._live.get(key)
        if life is None:
            self._born(storage, key, self._pool_of_new(arguments))
        elif life.requested_bytes != storage.nbytes():
            self.resized(storage)

    def _pool_of_new(self, arguments: Any) -> int:
        if self._labels.host_depth:
            return _HOST
        if self._labels.fused_depth:
            return _ON_CHIP
        lives = [self.life_of(tensor) for tensor in tensors_in(arguments)]
        if lives and all(life is not None and life.pool == _HOST for life in lives):
            return _HOST
        return _DEVICE

    def require_room(self, num_bytes: int) -> None:
        """Refuses device bytes that are more than the device has left.

        Raises:
            torch.OutOfMemoryError: With what was asked for, and what is allocated of how much.
        """
        if self.device_memory_bytes is not None and self._device_bytes + num_bytes > self.device_memory_bytes:
            self._refuse(num_bytes, self.device_memory_bytes)

    def _refuse(self, num_bytes: int, limit_bytes: int, **of_an_allocator: int) -> NoReturn:
        labels = self._labels
        self.out_of_memory = Refusal(
            phase=PHASES[labels.phase],
            module=labels.modules[labels.module],
            nanoseconds=time.perf_counter_ns() - self._started,
            requested_bytes=num_bytes,
            allocated_bytes=self._device_bytes,
            limit_bytes=limit_bytes,
            **of_an_allocator,
        )
        allocated = f"{format_bytes(self._device_bytes)} of {format_bytes(limit_bytes)} allocated"
        raise torch.OutOfMemoryError(f"in {labels.place}: {format_bytes(num_bytes)} asked for with {allocated}")

    def _born(self, storage: Any, key: int, pool: int) -> None:
        if pool == _DEVICE:
            self.require_room(storage.nbytes())
        labels = self._labels
        life = StorageLife(
            storage.nbytes(),
            pool,
            labels.module,
            labels.phase,
            labels.span,
            labels.recomputing,
            self._num_starts,
            labels.known_category,
            requested_bytes=storage.nbytes(),
        )
        life.num_bytes = self._take(life, life.num_bytes)
        life.reference = weakref.ref(storage, lambda _: self._died(key, life))
        self._live[key] = life
        if pool == _ON_CHIP:
            self._in_kernel.append(life)
        self._event(life.num_bytes, life)

    def _take(self, life: StorageLife, num_bytes: int) -> int:
        """Returns the bytes that a storage of so many takes of its life's pool."""
        return num_bytes

    def _give_back(self, life: StorageLife) -> None:
        """Ends what `_take` began."""

    def _died(self, key: int, life: StorageLife) -> None:
        if self._live.get(key) is life:
            del self._live[key]
        life.died_in_span = self._labels.span
        life.died_in_step = self._num_starts
        self._event(-life.num_bytes, life)
        self._give_back(life)
        life.num_bytes = 0

    def resizes(self, storage: Any, num_bytes: int) -> None:
        """Refuses a growth in place that the device has no room for, before it happens."""
        life = self._live.get(storage._cdata)
        if life is not None and life.pool == _DEVICE:
            self.require_room(num_bytes - life.requested_bytes)

    def resized(self, storage: Any) -> None:
        """Books a storage whose size changed in place."""
        life = self._live.get(storage._cdata)
        if life is not None:
            self._event(-life.num_bytes, life)
            self._give_back(life)
            life.num_bytes = life.requested_bytes = 0
            life.num_bytes = self._take(life, storage.nbytes())
            life.requested_bytes = storage.nbytes()
            self._event(life.num_bytes, life)

    def _leave_kernel(self) -> None:
        survivors = [life for life in self._in_kernel if life.died_in_span is None]
        self._in_kernel.clear()
        self.require_room(sum(life.num_bytes for life in survivors))
        for life in survivors:
            self._event(-life.num_bytes, life)
            life.pool, life.num_bytes = _DEVICE, 0
        for life in survivors:
            life.num_bytes = self._take(life, life.requested_bytes)
            self._event(life.num_bytes, life)

    def _event(self, delta: int, life: Life) -> None:
        if delta:
            if life.pool == _DEVICE:
                self._device_bytes += delta
            elif life.pool == _HOST:
                self._host_bytes += delta
                self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
            self._events.append(Event.of(life, delta, time.perf_counter_ns(), life.pool, self._labels.phase))
            if life.pool == _DEVICE:
                self._num_device_events += 1
                if self._on_device_event is not None:
                    self._on_device_event(self._num_device_events)
