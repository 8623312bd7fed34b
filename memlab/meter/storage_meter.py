"""A meter for the CPU and for fake tensors: of storages, the memory that they take, and the events of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import timeline_of_columns
from memlab.meter.caching_memory import CachingMemory
from memlab.meter.events import EventLog
from memlab.meter.labels import Labels
from memlab.meter.memory import PlainMemory
from memlab.meter.observers import PRODUCTS, Answer, ObserveResults, computed, observe_resizes, unobserved
from memlab.meter.repeater import Repeater
from memlab.meter.storages import Storages
from memlab.record.device_bytes import DeviceBytes
from memlab.record.out_of_memory import FailedAllocation
from memlab.record.timeline import Timeline
from memlab.upstream.patching import patched
from memlab.vocabulary import PHASES, POOLS

_BACKWARD = PHASES.index("backward")

_DEVICE = POOLS.index("device")

_WITH_BIAS = torch.ops.aten.addmm.default


class StorageMeter:
    """Counts every storage that is made on its thread inside `watching`; see `memlab.meter.protocol.Meter`.

    Args:
        storages: What is alive, with the log and the memory of the meter.
        observed: Returns a context that tells the storages of its block's operations.
        repeater: Of the same storages.
    """

    def __init__(
        self,
        labels: Labels,
        storages: Storages,
        observed: Callable[[], AbstractContextManager[object]],
        repeater: Repeater | None = None,
    ) -> None:
        self.kept_gather_bytes = self.late_free_bytes = 0
        self.storages, self.repeater = storages, repeater
        self._log, self._memory = storages.log, storages.memory
        self._labels, self._observed = labels, observed

    @property
    def device_memory_bytes(self) -> int | None:
        return self._memory.limit_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        self._memory.limit_bytes = num_bytes

    @property
    def out_of_memory(self) -> FailedAllocation | None:
        return self._log.out_of_memory

    def use_allocator(self, settings: AllocatorSettings) -> None:
        self._memory.use_allocator(settings)

    def remember(self) -> Callable[[], bool]:
        return self._memory.remember(self.storages.in_order)

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        return self._memory.logging_requests()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._observed(), observe_resizes(self.storages), patched(self._memory.replacements):
            yield

    def paused(self) -> AbstractContextManager[None]:
        return unobserved()  # frees are still reported, of storages that are known

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        self.storages.begin(categories, others)
        live = self.storages.in_order()
        self._log.begin(self._memory.opening(live))
        if self.repeater is not None:
            self.repeater.step_begins(live)

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        self.storages.categorise(categories, module)

    def mark(self) -> None:
        self._log.mark()

    def finish(self) -> Timeline:
        self.storages.frees.check()
        columns, numbers, _ = self._log.columns()
        columns[0] -= self._log.started
        self.kept_gather_bytes = self._memory.kept_gather_bytes(columns)
        self.late_free_bytes = self._memory.late_free_bytes(columns)
        if self.repeater is not None:
            self.repeater.step_ended(columns, numbers)
        timeline = timeline_of_columns(columns, len(self._log.opening), self._labels.modules)
        self._log.end()
        return timeline

    def drop(self) -> None:
        self.storages.frees.check()
        self._log.end()

    @property
    def looks(self) -> bool:
        return self._log.looks

    def at_event(self, number: int, look: Callable[[], None]) -> AbstractContextManager[None]:
        return self._log.at_event(number, look)

    def pool_of(self, tensor: torch.Tensor) -> str | None:
        allocation = self.storages.allocation_of(tensor)
        return None if allocation is None else POOLS[allocation.pool]

    def reset_peak(self) -> None:
        self._log.peak_host_bytes = self._log.host_bytes

    @property
    def peak_host_bytes(self) -> int:
        return self._log.peak_host_bytes

    def live_bytes(self, pool: str = "device") -> int:
        return sum(allocation.num_bytes for allocation in self.storages.in_pool(pool))

    def device_bytes(self) -> DeviceBytes:
        allocated, reserved = self.live_bytes(), self._memory.reserved_bytes
        if reserved is None:
            return DeviceBytes(allocated_bytes=allocated)
        return DeviceBytes(allocated_bytes=allocated, active_bytes=allocated, reserved_bytes=reserved)

    def track_host_tensor(self, tensor: torch.Tensor) -> None:
        pass  # this meter counts host tensors like all others

    def host_reserved_bytes(self) -> int | None:
        return self._memory.host_reserved_bytes()

    def free_cached_pinned_memory(self) -> None:
        self._memory.free_cached_pinned_memory()

    def untracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        tracked = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(each.num_bytes for each in self.storages.in_pool("device") if each.key not in tracked)

    def uncategorised_bytes(self) -> int:
        others = [each for each in self.storages.live.values() if each.category is None]
        return sum(each.num_bytes for each in others if each.pool == _DEVICE)

    def close(self) -> None:
        pass  # nothing outlives `watching`


def plain_meter(labels: Labels, answer: Answer = computed) -> StorageMeter:
    """Returns a meter of memory in which a storage takes what it asks for."""
    log = EventLog(labels)
    storages = Storages(labels, log, PlainMemory(log))
    return StorageMeter(labels, storages, lambda: ObserveResults(storages.after_operation, answer))


def simulated_meter(
    labels: Labels, answer: Answer = computed, bytes_beside: Callable[[Any, Any, Any], int] = lambda *_: 0
) -> StorageMeter:
    """Returns a meter that counts fake tensors as if they were on a GPU.

    Args:
        bytes_beside: Returns what the kernel of an operation with such arguments and such a result allocates and frees.
    """
    log = EventLog(labels)
    memory = CachingMemory(labels, log)
    storages = Storages(labels, log, memory)
    labels.on_kept = lambda tensors: memory.gathers.note(map(storages.allocation_of, tensors))
    labels.on_timing = memory.pass_through
    labels.on_record_stream = lambda tensor, stream: memory.record_stream(storages.allocation_of(tensor), stream)
    labels.stream_order.on_synchronize = memory.free_sent
    labels.on_other_user = lambda tensor: memory.keep_in_graph(storages.allocation_of(tensor))
    repeater = Repeater(labels, log, memory, storages)

    def afterwards(operation: Any, arguments: Any, result: Any) -> None:
        if id(operation) not in PRODUCTS:
            num_bytes = bytes_beside(operation, arguments, result)
            if num_bytes:  # it is freed at once
                device = (result[0] if isinstance(result, (list, tuple)) else result).device
                storages.after_operation(torch.empty(num_bytes, dtype=torch.uint8, device=device), ())
        elif labels.on_product is not None and not labels.fused_depth:
            is_backward = labels.phase == _BACKWARD
            labels.on_product("backward" if is_backward else "forward")
            if operation is _WITH_BIAS and arguments[0].dim() == 1 and labels.on_product is not None:
                labels.on_product("backward with bias" if is_backward else "forward with bias")

    def observed() -> ObserveResults:
        return ObserveResults(storages.after_operation, answer, afterwards)

    return StorageMeter(labels, storages, observed, repeater)
