"""A meter for a real GPU: the caching allocator's own history, with a stamp of the step's labels in every entry.

torch writes an entry for each allocation, each free and each segment, and in it a text that is set for the thread
(``torch.cuda.memory._set_memory_metadata``, torch 2.10 and later). Backward runs on autograd's own thread, where the
hooks of `Labels` set it as well. `Blocks` turns the history into exact bytes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Allocation, Event, Opening, label_others, timeline_of
from memlab.meter.cuda.device_storages import DeviceStorages
from memlab.meter.cuda.history_labels import Stamps
from memlab.meter.cuda.host_storages import HostStorages, pinned_bytes
from memlab.meter.labels import Labels
from memlab.record.device_bytes import DeviceBytes
from memlab.record.out_of_memory import FailedAllocation
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _PENDING, _RESERVED = (POOLS.index(name) for name in ("device", "pending_free", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
_IDLE = PHASES.index("idle")


class AllocatorMeter:
    """Counts the bytes of the current CUDA device, and of the host tensors that it is given; see `Meter`."""

    def __init__(self, labels: Labels) -> None:
        self.labelled_share = 1.0
        """The share of the bytes allocated in the last timeline that carried a stamp of the moment of allocation."""
        self._labels = labels
        self._stamps = Stamps(labels)
        self._device = DeviceStorages(labels)
        self._host = HostStorages(labels)
        self._pending_categories: list[tuple[int, dict[int, int], int | None]] = []
        """Calls of `categorise` that were not applied yet: the number of each call's stamp, its categories by address,
        and its module. They hold for what was allocated before the first entry with that stamp."""
        self._marks: list[Event] = []
        self._opening = Opening([])
        self._stamps_of_events: list[int] = []

    @property
    def out_of_memory(self) -> FailedAllocation | None:
        return self._device.refusal

    @property
    def device_memory_bytes(self) -> int | None:
        return self._device.limit_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        if num_bytes == self._device.limit_bytes:
            return
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.empty_cache()  # the limit applies to new segments only
        # Never for a process without a limit: torch reads garbage_collection_threshold only after this call.
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / total))
        self._device.limit_bytes = num_bytes

    @property
    def repeater(self) -> None:
        return None

    @property
    def looks(self) -> bool:
        return self._stamps.look is not None

    @property
    def kept_gather_bytes(self) -> int:
        return 0  # what a GPU keeps is allocated

    @property
    def late_free_bytes(self) -> int:
        return 0  # what waits is reserved

    def remember(self) -> Callable[[], bool]:
        return lambda: False  # a process has one allocator

    def logging_requests(self) -> AbstractContextManager[None]:
        return nullcontext()

    def use_allocator(self, settings: AllocatorSettings) -> None:
        """Does nothing: the process was started with these options (`memlab.backends.allocator_environment`)."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._device.blocks is None:
            self._catch_up()
        self._labels.on_change = self._stamps.put
        self._stamps.put()
        try:
            yield
        finally:
            self._labels.on_change = None
            torch.cuda.memory._set_memory_metadata("")

    @contextmanager
    def paused(self) -> Iterator[None]:
        on_change, self._labels.on_change = self._labels.on_change, None
        torch.cuda.memory._record_memory_history(None)
        try:
            yield
        finally:
            self._labels.on_change = on_change
            self._catch_up()

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        self._host.frees.check()
        self.categorise(categories)
        self._replay()
        device = self._device
        label_others(device.live.values(), others)
        assert device.blocks is not None
        found, pending = [*device.live.values(), *self._host.start()], list(device.pending.values())
        reserved = Allocation(device.blocks.reserved_bytes, _RESERVED, 0, _IDLE, 0, False, 0, _WORKSPACE)
        self._opening = Opening([*found, *pending, reserved], dict.fromkeys(map(id, pending), _PENDING))
        torch.cuda.reset_peak_memory_stats()
        self._stamps.start()
        device.start()

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        on_device: dict[int, int] = {}
        for name, tensors in categories.items():
            code = CATEGORIES.index(name)
            for tensor in tensors:
                if not tensor.untyped_storage().nbytes():
                    continue
                if tensor.is_cuda:
                    on_device[tensor.untyped_storage().data_ptr()] = code
                else:
                    self._host.track(tensor).category = code
        self._stamps.put()
        code_of_module = None if module is None else self._labels.code(module)
        self._pending_categories.append((self._stamps.last, on_device, code_of_module))

    def mark(self) -> None:
        self._marks.append(Event.marking(time.time_ns(), self._labels.phase))

    def track_host_tensor(self, tensor: torch.Tensor) -> Allocation:
        return self._host.track(tensor)

    def live_bytes(self, pool: str = "device") -> int:
        if pool == "host":
            return self._host.live_bytes()
        return torch.cuda.memory_allocated()

    def device_bytes(self) -> DeviceBytes:
        counts = torch.cuda.memory_stats()
        return DeviceBytes(
            **{f"{name}_bytes": counts[f"{name}_bytes.all.current"] for name in ("allocated", "active", "reserved")}
        )

    def pool_of(self, tensor: torch.Tensor) -> str:
        return "device" if tensor.is_cuda else "host"

    def untracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        self._replay()
        tracked = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return sum(
            allocation.num_bytes
            for address, allocation in self._device.live.items()
            if address not in tracked and allocation.category != _WORKSPACE
        )

    def reset_peak(self) -> None:
        self._host.reset_peak()

    @property
    def peak_host_bytes(self) -> int:
        return self._host.peak_bytes

    def host_reserved_bytes(self) -> int:
        return pinned_bytes("current")

    def free_cached_pinned_memory(self) -> None:
        torch._C._host_emptyCache()

    def uncategorised_bytes(self) -> int:
        # As of the last time that the history was read.
        on_device = self._device.live.values()
        return sum(allocation.num_bytes for allocation in on_device if allocation.category is None)

    def finish(self) -> Timeline:
        self._host.frees.check()
        events = self._replay()
        events = sorted((*events, *self._host.events, *self._marks), key=lambda event: event.nanoseconds)
        timeline = timeline_of(self._opening, events, self._device.started, self._labels.modules)
        self._stamps_of_events = [self._stamps.since_start(event.stamp) for event in events if event.pool == _DEVICE]
        self._opening = Opening([])
        self._host.events.clear()
        self._marks.clear()
        return timeline

    def drop(self) -> None:
        self.finish()  # the history of the device is to be read in any case

    def close(self) -> None:
        # Also lifts the limit: it is the process's, and would outlive the meter.
        self.device_memory_bytes = None
        self.stop_recording()

    def stop_recording(self) -> None:
        """Stops the allocator's history; unlike `close` it leaves the limit and the allocator's cache as they are."""
        torch.cuda.memory._record_memory_history(None)
        self._device.blocks = None

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        self._stamps.look = (self._stamps_of_events[number - 1], look)
        try:
            yield
        finally:
            self._stamps.look = None

    def _catch_up(self) -> None:
        self._device.catch_up(_snapshot())
        _restart_history()

    def _replay(self) -> list[Event]:
        """Returns the events since the last call, from the allocator's history, and clears the history."""
        torch.cuda.synchronize()
        entries = _snapshot()["device_traces"][torch.cuda.current_device()]
        _restart_history()
        events: list[Event] = []
        allocated_bytes = labelled_bytes = 0
        stamp = self._stamps.of_start(_IDLE)
        for entry in entries:
            own_stamp = self._stamps.find(entry.get("user_metadata"))
            if own_stamp is not None:
                stamp = own_stamp
                self._apply_categories(up_to=stamp.number)
            if entry["action"] == "alloc":
                allocated_bytes += entry["size"]
                if own_stamp is not None:
                    labelled_bytes += entry["size"]
            self._device.replay(entry, stamp, events)
        self._apply_categories(up_to=self._stamps.last + 1)
        self._stamps.forget()
        if allocated_bytes:
            self.labelled_share = labelled_bytes / allocated_bytes
        self._check()
        return events

    def _apply_categories(self, *, up_to: int) -> None:
        """Applies the calls of `categorise` that were made up to a stamp, to what is allocated at this entry."""
        while self._pending_categories and self._pending_categories[0][0] <= up_to:
            _, categories, module = self._pending_categories.pop(0)
            self._device.categorise(categories, module)

    def _check(self) -> None:
        """Reads the allocator's state again if something outside the lab allocated between two readings."""
        allocated = sum(allocation.num_bytes for allocation in self._device.live.values())
        if allocated != torch.cuda.memory_allocated():
            warnings.warn(
                "something outside the lab allocated between two readings: it is missing from this timeline",
                stacklevel=2,
            )
            self._catch_up()


def _restart_history() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)


def _snapshot() -> dict[str, Any]:
    return torch.cuda.memory._snapshot()
