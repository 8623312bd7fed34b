"""A meter for a real GPU: the caching allocator's own history, every entry stamped with where the step stood.

torch writes a line for each allocation, each free and each segment, and with it a text that is set for the thread
(``torch.cuda.memory._set_memory_metadata``, torch 2.10 and later). Backward runs on autograd's own thread, where the
hooks of `Labels` set it as well. `Blocks` turns the history into exact bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memlab.meter.allocations import Event, Life, timeline_of
from memlab.meter.cuda.device_storages import DeviceStorages
from memlab.meter.cuda.host_storages import HostStorages, pinned_bytes
from memlab.meter.cuda.stamps import Stamps
from memlab.meter.labels import Labels
from memlab.record.out_of_memory import Refusal
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _PENDING, _RESERVED = (POOLS.index(name) for name in ("device", "pending_free", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
_IDLE = PHASES.index("idle")


class AllocatorMeter:
    """Accounts for the current CUDA device, and for the host tensors that it is told of."""

    def __init__(self, labels: Labels) -> None:
        self.labelled_share = 1.0
        """Of the bytes allocated in the last timeline, how many carried a stamp of the time when they were made."""
        self._labels = labels
        self._stamps = Stamps(labels)
        self._device = DeviceStorages(labels)
        self._host = HostStorages(labels)
        self._named: list[tuple[int, dict[int, int]]] = []
        """Stamp to categories by address: what was alive before the first entry with that stamp is of them."""
        self._opening: list[Event] = []
        self._stamps_of_events: list[int] = []

    @property
    def out_of_memory(self) -> Refusal | None:
        """The last request that was refused in this timeline, since the history was read."""
        return self._device.refusal

    @property
    def device_memory_bytes(self) -> int | None:
        """The most that torch may reserve; None: all there is."""
        return self._device.limit_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.empty_cache()  # what the allocator has cached already is under no limit
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / total))
        self._device.limit_bytes = num_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meters what the block does, on every thread."""
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
    def looking_away(self) -> Iterator[None]:
        """Lets the block run unmetered within `watching`: what is born in it stays without a label."""
        on_change, self._labels.on_change = self._labels.on_change, None
        torch.cuda.memory._record_memory_history(None)
        try:
            yield
        finally:
            self._labels.on_change = on_change
            self._catch_up()

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Begins a timeline: what is alive now becomes its opening events."""
        self.categorise(categories)
        self._replay()
        device = self._device
        assert device.blocks is not None
        self._opening = [Event.opening(life) for life in device.live.values()] + self._host.start()
        self._opening += [Event.opening(life, _PENDING) for life in device.pending.values()]
        reserved = Life(device.blocks.reserved_bytes, _RESERVED, 0, _IDLE, 0, False, 0, _WORKSPACE)
        self._opening.append(Event.opening(reserved))
        torch.cuda.reset_peak_memory_stats()
        self._stamps.start()
        device.start()

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Fixes the category of storages by name; it holds from their birth on. Host tensors are counted from now."""
        on_device: dict[int, int] = {}
        for name, tensors in categories.items():
            code = CATEGORIES.index(name)
            for tensor in tensors:
                if not tensor.untyped_storage().nbytes():
                    continue
                if tensor.is_cuda:
                    on_device[tensor.untyped_storage().data_ptr()] = code
                else:
                    self._host.hold(tensor).category = code
        self._stamps.put()
        self._named.append((self._stamps.last, on_device))

    def hold_on_host(self, tensor: torch.Tensor) -> Life:
        """Counts a host tensor, until its storage dies."""
        return self._host.hold(tensor)

    def live_bytes(self, pool: str = "device") -> int:
        """Returns the bytes alive in a pool now."""
        if pool == "host":
            return self._host.live_bytes()
        return torch.cuda.memory_allocated()

    def pool_of(self, tensor: torch.Tensor) -> str:
        """Returns where a tensor is: ``device`` or ``host``."""
        return "device" if tensor.is_cuda else "host"

    def bytes_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the device bytes alive now that are none of the tensors', nor a workspace that no tensor shows."""
        self._replay()
        named = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return sum(
            life.num_bytes
            for address, life in self._device.live.items()
            if address not in named and life.category != _WORKSPACE
        )

    def restart_peak(self) -> None:
        """Lets `peak_host_bytes` begin anew."""
        self._host.restart_peak()

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes on the host since `restart_peak`, those included that torch pinned and gave up again."""
        return self._host.peak_bytes

    def host_reserved_bytes(self) -> int:
        """Returns what torch really holds of pinned host memory, what it keeps for reuse included."""
        return pinned_bytes("current")

    def uncategorised_bytes(self) -> int:
        """Returns the device bytes alive when the history was last read that `categorise` has given no name."""
        return sum(life.num_bytes for life in self._device.live.values() if life.category is None)

    def finish(self) -> Timeline:
        """Ends the timeline that `start` began, and returns it."""
        events = self._replay()
        events = sorted((*events, *self._host.events), key=lambda event: event.nanoseconds)
        timeline = timeline_of(self._opening, events, self._device.started, self._labels.modules)
        self._stamps_of_events = [self._stamps.since_start(event.stamp) for event in events if event.pool == _DEVICE]
        self._opening = []
        self._host.events.clear()
        return timeline

    def close(self) -> None:
        """Lets the allocator stop writing its history, and lifts the limit."""
        self.device_memory_bytes = None
        torch.cuda.memory._record_memory_history(None)
        self._device.blocks = None

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        """Calls `look` in a repetition of the last step when the module takes over in which event `number` happened."""
        self._stamps.look = (self._stamps_of_events[number - 1], look)
        try:
            yield
        finally:
            self._stamps.look = None

    def _catch_up(self) -> None:
        self._device.catch_up(_snapshot())
        _write_history_anew()

    def _replay(self) -> list[Event]:
        """Reads the history since the last time, and forgets it."""
        torch.cuda.synchronize()
        entries = _snapshot()["device_traces"][torch.cuda.current_device()]
        _write_history_anew()
        events: list[Event] = []
        born_bytes = labelled_bytes = 0
        stamp = self._stamps.of_start(_IDLE)
        for entry in entries:
            own_stamp = self._stamps.find(entry.get("user_metadata"))
            if own_stamp is not None:
                stamp = own_stamp
                self._name_until(stamp.number)
            if entry["action"] == "alloc":
                born_bytes += entry["size"]
                labelled_bytes += entry["size"] * (own_stamp is not None)
            self._device.take_in(entry, stamp, events)
        self._name_until(self._stamps.last + 1)
        self._stamps.forget()
        if born_bytes:
            self.labelled_share = labelled_bytes / born_bytes
        self._check()
        return events

    def _name_until(self, number: int) -> None:
        """Gives their categories to what was alive when `categorise` was called, before stamp `number`."""
        while self._named and self._named[0][0] <= number:
            self._device.name(self._named.pop(0)[1])

    def _check(self) -> None:
        """Takes the allocator's word where something outside the lab allocated between two readings."""
        allocated = sum(life.num_bytes for life in self._device.live.values())
        if allocated != torch.cuda.memory_allocated():
            warnings.warn(
                "something outside the lab allocated between two readings: this timeline lacks it", stacklevel=2
            )
            self._catch_up()


def _write_history_anew() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)


def _snapshot() -> dict[str, Any]:
    return torch.cuda.memory._snapshot()
