"""A meter for the CPU and for fake tensors: every allocation, resize and free of a storage, exact to the byte.

A dispatch mode receives each operation's results, a weak reference reports each storage's free, and
`UntypedStorage.resize_` is watched, because Megatron frees and refills storages in place with it. What an operation
allocates and frees inside itself is not an event; what several operations do inside one `one_kernel` block goes to the
``on_chip`` pool.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Allocation, Event, Opening, label_others, timeline_of
from memlab.meter.labels import Labels
from memlab.meter.observers import Answer, Frees, ObserveResults, computed, observe_resizes, tensors_in
from memlab.record.device_bytes import DeviceBytes
from memlab.record.out_of_memory import FailedAllocation
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

if TYPE_CHECKING:
    from memlab.meter.simulated_meter import SimulatedMeter

_DEVICE, _HOST, _ON_CHIP = (POOLS.index(name) for name in ("device", "host", "on_chip"))


@dataclass(slots=True, eq=False)
class StorageAllocation(Allocation):
    """An allocation with what the meter needs to follow its storage."""

    requested_bytes: int = 0
    """The storage's size; `num_bytes` is what it takes of its pool."""
    reference: weakref.ref[Any] | None = None
    key: int = 0
    """Under which the meter has it: its storage's identity, below 0 without a storage."""
    birth: int = 0
    """Its place among the meter's allocations, the earliest first."""


class StorageMeter:
    """Counts every storage that is made on its thread inside `watching`; see `memlab.meter.protocol.Meter`.

    Args:
        labels: Say what each storage is for.
        answer: Returns the results of operations.
    """

    _observe: ClassVar[type[ObserveResults]] = ObserveResults

    def __init__(self, labels: Labels, answer: Answer = computed) -> None:
        self._answer = answer
        self.device_memory_bytes: int | None = None
        self.out_of_memory: FailedAllocation | None = None
        self._on_device_event: Callable[[int], None] | None = None
        self._num_device_events = 0
        self._labels = labels
        self._frees = Frees()
        self._report = self._on_free  # one bound method for all storages
        self._device_bytes = 0
        self._host_bytes = 0
        self._peak_host_bytes = 0
        self._num_starts = 0
        self._num_births = 0
        self._live: dict[int, StorageAllocation] = {}
        self._events: list[Any] = []
        """In order: an `Event`, or what stands for several (`memlab.meter.recording.Replay`)."""
        self._opening = Opening([])
        self._in_kernel: list[StorageAllocation] = []
        self._started = time.perf_counter_ns()
        labels.on_kernel_end = self._end_kernel
        labels.is_followed = self._is_followed

    def use_allocator(self, settings: AllocatorSettings) -> None:
        """Does nothing: a CPU has no caching allocator."""

    @property
    def repeater(self) -> SimulatedMeter | None:
        return None

    @property
    def kept_gather_bytes(self) -> int:
        return 0

    def remember(self) -> Callable[[], bool]:
        device_bytes, host_bytes = self.live_bytes("device"), self.live_bytes("host")
        # Without an allocator, no other place can differ.
        return lambda: (self.live_bytes("device"), self.live_bytes("host")) == (device_bytes, host_bytes)

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        return nullcontext()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._observe(self, self._answer), observe_resizes(self):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        # Frees are still reported, of storages that are known.
        with _disable_current_modes():
            yield

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        self._frees.check()
        self.categorise(categories)
        label_others(self._live.values(), others)
        self._num_starts += 1
        self._num_device_events = 0
        self.out_of_memory = None
        self._events.clear()
        self._opening = self._open(self._in_order())
        self._started = time.perf_counter_ns()

    def _open(self, live: list[StorageAllocation]) -> Opening:
        """Returns the opening of a step that finds these storages."""
        return Opening([allocation for allocation in live if allocation.num_bytes])

    def _in_order(self) -> list[StorageAllocation]:
        return sorted(self._live.values(), key=attrgetter("birth"))

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        with torch._C.DisableTorchFunction():  # a function mode would see each look at one of hundreds of tensors
            for name, tensors in categories.items():
                code = CATEGORIES.index(name)
                for tensor in tensors:
                    allocation = self.allocation_of(tensor)
                    if allocation is not None:
                        allocation.category = code
                        if module is not None:
                            allocation.module = self._labels.code(module)

    def allocation_of(self, tensor: torch.Tensor) -> StorageAllocation | None:
        """Returns what the meter knows of a tensor's storage; None for an unknown storage."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether `_count_storage` would change nothing."""
        storage = tensor.untyped_storage()
        allocation = self._live.get(storage._cdata)
        return allocation is not None and allocation.requested_bytes == storage.nbytes()

    def pool_of(self, tensor: torch.Tensor) -> str | None:
        allocation = self.allocation_of(tensor)
        return None if allocation is None else POOLS[allocation.pool]

    def reset_peak(self) -> None:
        self._peak_host_bytes = self._host_bytes

    @property
    def peak_host_bytes(self) -> int:
        return self._peak_host_bytes

    def live_bytes(self, pool: str = "device") -> int:
        return sum(allocation.num_bytes for allocation in self._in_pool(POOLS.index(pool)))

    def device_bytes(self) -> DeviceBytes:
        return DeviceBytes(allocated_bytes=self.live_bytes())

    def track_host_tensor(self, tensor: torch.Tensor) -> None:
        pass  # this meter counts host tensors like all others

    def host_reserved_bytes(self) -> int | None:
        return None  # the CPU pins nothing

    def free_cached_pinned_memory(self) -> None:
        pass

    def untracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        tracked = {tensor.untyped_storage()._cdata for tensor in tensors}
        on_device = self._in_pool(_DEVICE)
        return sum(allocation.num_bytes for allocation in on_device if allocation.key not in tracked)

    def uncategorised_bytes(self) -> int:
        on_device = self._in_pool(_DEVICE)
        return sum(allocation.num_bytes for allocation in on_device if allocation.category is None)

    def _in_pool(self, pool: int) -> list[StorageAllocation]:
        return [allocation for allocation in self._live.values() if allocation.pool == pool]

    @property
    def looks(self) -> bool:
        """Whether `at_event` is waiting for its event."""
        return self._on_device_event is not None

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        self._on_device_event = lambda count: look() if count == number else None
        try:
            yield
        finally:
            self._on_device_event = None

    def finish(self) -> Timeline:
        self._frees.check()
        timeline = timeline_of(self._opening, self._events, self._started, self._labels.modules)
        self._events.clear()
        self._opening = Opening([])
        return timeline

    def close(self) -> None:
        pass  # nothing outlives `watching`

    def after_operation(self, results: Any, arguments: Any = ()) -> None:
        """Counts the storages of an operation's results that are new or that changed their size."""
        if isinstance(results, torch.Tensor):
            self._count_storage(results.untyped_storage(), arguments)
        elif isinstance(results, (tuple, list)):
            for result in results:
                if isinstance(result, torch.Tensor):
                    self._count_storage(result.untyped_storage(), arguments)
                elif isinstance(result, (tuple, list)):
                    self.after_operation(result, arguments)

    def _count_storage(self, storage: Any, arguments: Any) -> None:
        key = storage._cdata
        allocation = self._live.get(key)
        if allocation is None:
            self._on_alloc(storage, key, self._pool_of_new(arguments))
        elif allocation.requested_bytes != storage.nbytes():
            self.before_resize(storage, storage.nbytes())
            self.after_resize(storage)

    def _pool_of_new(self, arguments: Any) -> int:
        if self._labels.host_depth:
            return _HOST
        if self._labels.fused_depth:
            return _ON_CHIP
        pool = _DEVICE  # without inputs
        for tensor in tensors_in(arguments):
            allocation = self.allocation_of(tensor)
            if allocation is None or allocation.pool != _HOST:
                return _DEVICE
            pool = _HOST
        return pool

    def require_capacity(self, num_bytes: int) -> None:
        """Checks that the device has this many bytes left for one request.

        Raises:
            torch.OutOfMemoryError: If it has not; with the request, the allocated bytes and the limit.
        """
        if self.device_memory_bytes is not None and self._device_bytes + num_bytes > self.device_memory_bytes:
            self._fail_allocation(num_bytes, self.device_memory_bytes)

    def _fail_allocation(
        self,
        num_bytes: int,
        limit_bytes: int,
        *,
        reserved_bytes: int | None = None,
        largest_free_bytes: int | None = None,
    ) -> NoReturn:
        labels = self._labels
        self.out_of_memory = FailedAllocation(
            phase=PHASES[labels.phase],
            module=labels.modules[labels.module],
            nanoseconds=time.perf_counter_ns() - self._started,
            requested_bytes=num_bytes,
            allocated_bytes=self._device_bytes,
            limit_bytes=limit_bytes,
            reserved_bytes=reserved_bytes,
            largest_free_bytes=largest_free_bytes,
        )
        allocated = f"{format_bytes(self._device_bytes)} of {format_bytes(limit_bytes)} allocated"
        raise torch.OutOfMemoryError(f"in {labels.place}: {format_bytes(num_bytes)} requested with {allocated}")

    def _on_alloc(self, storage: Any, key: int, pool: int) -> None:
        num_bytes = storage.nbytes()
        if pool == _DEVICE:
            self.require_capacity(num_bytes)
        labels = self._labels
        allocation = StorageAllocation(
            num_bytes,
            pool,
            labels.module,
            labels.phase,
            labels.span,
            labels.recomputing,
            self._num_starts,
            labels.known_category,
            requested_bytes=num_bytes,
            birth=self._num_births,
        )
        self._num_births += 1
        allocation.num_bytes = self._take(allocation, num_bytes)
        self._watch(storage, allocation)
        if pool == _HOST:
            storage.memlab_on_host = True  # `Tensor.is_cuda` is read of results, too
        if pool == _ON_CHIP:
            self._in_kernel.append(allocation)
        self._event(allocation.num_bytes, allocation)

    def _watch(self, storage: Any, allocation: StorageAllocation) -> None:
        allocation.key = storage._cdata
        allocation.reference = self._frees.watch(storage, self._report, allocation)
        self._live[allocation.key] = allocation

    def _take(self, allocation: StorageAllocation, num_bytes: int) -> int:
        """Returns the bytes that a storage of `num_bytes` takes of its pool."""
        return num_bytes

    def _give_back(self, allocation: StorageAllocation) -> None:
        """Frees what `_take` took."""

    def _on_free(self, allocation: StorageAllocation) -> None:
        if self._live.get(allocation.key) is allocation:
            del self._live[allocation.key]
        allocation.reference = None  # it refers to the allocation: a cycle for each storage that a step frees
        allocation.freed_in_span = self._labels.span
        allocation.freed_in_step = self._num_starts
        self._event(-allocation.num_bytes, allocation)
        self._give_back(allocation)
        allocation.num_bytes = 0

    def before_resize(self, storage: Any, num_bytes: int) -> None:
        """Checks the device's capacity before a storage grows in place."""
        allocation = self._live.get(storage._cdata)
        if allocation is not None and allocation.pool == _DEVICE and num_bytes > allocation.requested_bytes:
            self.require_capacity(num_bytes)  # torch allocates the new memory before it frees the old

    def after_resize(self, storage: Any) -> None:
        """Counts a storage whose size changed in place."""
        allocation = self._live.get(storage._cdata)
        if allocation is not None:
            self._event(-allocation.num_bytes, allocation)
            self._give_back(allocation)
            allocation.num_bytes = allocation.requested_bytes = 0
            allocation.num_bytes = self._take(allocation, storage.nbytes())
            allocation.requested_bytes = storage.nbytes()
            self._event(allocation.num_bytes, allocation)

    def _end_kernel(self) -> None:
        """Moves the storages that outlive a fused kernel from on chip to the device."""
        survivors = [allocation for allocation in self._in_kernel if allocation.freed_in_span is None]
        self._in_kernel.clear()
        for allocation in survivors:
            self._event(-allocation.num_bytes, allocation)
            allocation.pool, allocation.num_bytes = _DEVICE, 0
        for allocation in survivors:
            self.require_capacity(allocation.requested_bytes)
            allocation.num_bytes = self._take(allocation, allocation.requested_bytes)
            self._event(allocation.num_bytes, allocation)

    def mark(self) -> None:
        self._events.append(Event.marking(time.perf_counter_ns(), self._labels.phase))

    def _event(self, delta: int, allocation: Allocation) -> None:
        if not delta:
            return
        pool = allocation.pool
        self._events.append(Event.of(allocation, delta, time.perf_counter_ns(), pool, self._labels.phase))
        if pool == _HOST:
            self._host_bytes += delta
            self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
        elif pool == _DEVICE:
            self._device_bytes += delta
            self._num_device_events += 1
            if self._on_device_event is not None:
                self._on_device_event(self._num_device_events)
