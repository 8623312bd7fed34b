"""A meter for a real GPU: the caching allocator's own history, every entry stamped with where the step stood.

torch writes a line for each allocation, each free and each segment, and with it a text that is set for the thread
(``torch.cuda.memory._set_memory_metadata``, torch 2.10 and later). Backward runs on autograd's own thread, where the
hooks of `Labels` set it as well. `Blocks` turns the history into exact bytes.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memlab.meter.blocks import Blocks
from memlab.meter.labels import Labels
from memlab.meter.lives import Event, Life, timeline_of
from memlab.out_of_memory import Refusal
from memlab.timeline import CATEGORIES, PHASES, POOLS, Timeline

_DEVICE, _HOST, _PENDING, _RESERVED = (POOLS.index(name) for name in ("device", "host", "pending_free", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
_IDLE = PHASES.index("idle")


class _Stamp(NamedTuple):
    phase: int
    module: int
    span: int
    recomputing: bool
    category: int | None
    number: int
    """Stamps since the meter began."""


class AllocatorMeter:
    """Accounts for the current CUDA device, and for the host tensors that it is told of."""

    def __init__(self, labels: Labels) -> None:
        self.labelled_share = 1.0
        """Of the bytes allocated in the last timeline, how many carried a stamp of the time when they were made."""
        self._labels = labels
        self._stamps: list[_Stamp] = []
        self._first_stamp = 0
        self._named: list[tuple[int, dict[int, int]]] = []
        """Stamp to categories by address: what was alive before the first entry with that stamp is of them."""
        self._live: dict[int, Life] = {}
        self._host: dict[int, Life] = {}
        self._host_references: dict[int, weakref.ref[Any]] = {}
        self._host_events: list[Event] = []
        self._host_bytes = self._peak_host_bytes = 0
        self._pinned_before = 0
        self._blocks: Blocks | None = None
        self._num_starts = 0
        self._opening: list[Event] = []
        self._pending: dict[int, Life] = {}
        self._started = 0
        self._stamp_at_start = 0
        self._stamps_of_events: list[int] = []
        self._look: tuple[int, Callable[[], None]] | None = None
        self._device_memory_bytes: int | None = None
        self.out_of_memory: Refusal | None = None

    @property
    def device_memory_bytes(self) -> int | None:
        """The most that torch may reserve; None: all there is."""
        return self._device_memory_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.empty_cache()  # what the allocator has cached already is under no limit
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / total))
        self._device_memory_bytes = num_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meters what the block does, on every thread."""
        if self._blocks is None:
            self._catch_up()
        self._labels.on_change = self._stamp
        self._stamp()
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
        self._num_starts += 1
        self.out_of_memory = None
        assert self._blocks is not None
        self._opening = [Event.opening(life) for life in (*self._live.values(), *self._host.values())]
        self._opening += [Event.opening(life, _PENDING) for life in self._pending.values()]
        reserved = Life(self._blocks.reserved_bytes, _RESERVED, 0, _IDLE, 0, False, 0, _WORKSPACE)
        self._opening.append(Event.opening(reserved))
        self._host_events.clear()
        torch.cuda.reset_peak_memory_stats()
        self._stamp_at_start = self._first_stamp + len(self._stamps) - 1
        self._started = time.time_ns()

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
                    self.hold_on_host(tensor).category = code
        self._stamp()
        self._named.append((self._first_stamp + len(self._stamps) - 1, on_device))

    def hold_on_host(self, tensor: torch.Tensor) -> Life:
        """Counts a host tensor, until its storage dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self._host.get(key)
        if life is None:
            labels = self._labels
            life = Life(storage.nbytes(), _HOST, labels.module, labels.phase, labels.span, False, self._num_starts)
            self._host[key] = life
            self._host_event(life.num_bytes, life)
            self._host_references[key] = weakref.ref(storage, lambda _: self._host_died(key, life))
        return life

    def _host_died(self, key: int, life: Life) -> None:
        del self._host[key], self._host_references[key]
        life.died_in_span, life.died_in_step = self._labels.span, self._num_starts
        self._host_event(-life.num_bytes, life)

    def _host_event(self, delta: int, life: Life) -> None:
        if delta:
            self._host_bytes += delta
            self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
            stamp = self._first_stamp + len(self._stamps) - 1 - self._stamp_at_start
            self._host_events.append(Event.of(life, delta, time.time_ns(), _HOST, self._labels.phase, stamp))

    def live_bytes(self, pool: str = "device") -> int:
        """Returns the bytes alive in a pool now."""
        if pool == "host":
            return sum(life.num_bytes for life in self._host.values())
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
            for address, life in self._live.items()
            if address not in named and life.category != _WORKSPACE
        )

    def restart_peak(self) -> None:
        """Lets `peak_host_bytes` begin anew."""
        torch.cuda.reset_peak_host_memory_stats()
        self._peak_host_bytes = self._host_bytes = self.live_bytes("host")
        self._pinned_before = self._pinned_bytes("current")

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes on the host since `restart_peak`, those included that torch pinned and gave up again."""
        return self._peak_host_bytes + max(0, self._pinned_bytes("peak") - self._pinned_before)

    def host_reserved_bytes(self) -> int:
        """Returns what torch really holds of pinned host memory, what it keeps for reuse included."""
        return self._pinned_bytes("current")

    @staticmethod
    def _pinned_bytes(when: str) -> int:
        return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{when}", 0))

    def uncategorised_bytes(self) -> int:
        """Returns the device bytes alive when the history was last read that `categorise` has given no name."""
        return sum(life.num_bytes for life in self._live.values() if life.category is None)

    def finish(self) -> Timeline:
        """Ends the timeline that `start` began, and returns it."""
        events = self._replay()
        events = sorted((*events, *self._host_events), key=lambda event: event.nanoseconds)
        timeline = timeline_of(self._opening, events, self._started, self._labels.modules)
        self._stamps_of_events = [event.stamp for event in events if event.pool == _DEVICE]
        self._opening = []
        self._host_events.clear()
        return timeline

    def close(self) -> None:
        """Lets the allocator stop writing its history, and lifts the limit."""
        self.device_memory_bytes = None
        torch.cuda.memory._record_memory_history(None)
        self._blocks = None

    @contextmanager
    def at_event(self, number: int, look: Callable[[], None]) -> Iterator[None]:
        """Calls `look` in a repetition of the last step when the module takes over in which event `number` happened."""
        self._look = (self._stamps_of_events[number - 1], look)
        try:
            yield
        finally:
            self._look = None

    def _stamp(self) -> None:
        labels = self._labels
        number = self._first_stamp + len(self._stamps)
        self._stamps.append(
            _Stamp(labels.phase, labels.module, labels.span, labels.recomputing, labels.known_category, number)
        )
        torch.cuda.memory._set_memory_metadata(str(number))
        if self._look is not None and number - self._stamp_at_start == self._look[0]:
            self._look[1]()

    def _catch_up(self) -> None:
        """Takes the allocator's state as it is: what the history does not tell keeps what is known of its address."""
        snapshot = _snapshot()
        expandable = bool(snapshot.get("allocator_settings", {}).get("expandable_segments", False))
        segments = _segments(snapshot)
        self._blocks = Blocks(segments, expandable=expandable)
        requested = {part["address"]: part["requested_size"] for each in segments for part in each["blocks"]}
        known, self._live, self._pending = self._live, {}, {}
        for block in self._blocks:
            if not block.is_free:
                life = known.get(block.address)
                if life is None or life.num_bytes != block.num_bytes:
                    life = Life(block.num_bytes, _DEVICE, 0, _IDLE, 0, False, self._num_starts)
                life.rounding_bytes = block.num_bytes - requested[block.address]
                (self._pending if block.address in self._blocks.waiting else self._live)[block.address] = life
        _write_history_anew()

    def _replay(self) -> list[Event]:
        """Reads the history since the last time, and forgets it."""
        torch.cuda.synchronize()
        entries = _snapshot()["device_traces"][torch.cuda.current_device()]
        _write_history_anew()
        events: list[Event] = []
        born_bytes = labelled_bytes = 0
        stamp = _Stamp(_IDLE, 0, 0, False, None, self._stamp_at_start)
        for entry in entries:
            number = int(entry.get("user_metadata") or -1) - self._first_stamp
            is_stamped = 0 <= number < len(self._stamps)
            if is_stamped:
                self._name(number)
                stamp = self._stamps[number]
            if entry["action"] == "alloc":
                born_bytes += entry["size"]
                labelled_bytes += entry["size"] * is_stamped
            self._take_in(entry, stamp, events)
        self._name(len(self._stamps))
        self._first_stamp += len(self._stamps)
        self._stamps.clear()
        self._stamp()
        if born_bytes:
            self.labelled_share = labelled_bytes / born_bytes
        self._check()
        return events

    def _take_in(self, entry: Mapping[str, Any], stamp: _Stamp, events: list[Event]) -> None:
        """Turns one entry into the events that it stands for."""
        assert self._blocks is not None
        if entry["action"] == "oom":
            self._remember_refusal(entry, stamp)
            return
        change = self._blocks.replay(entry)
        if change is None:
            return
        kind, address, num_bytes = change

        def note(delta_bytes: int, pool: int, life: Life) -> None:
            when = max(entry["time_us"] * 1000, self._started)
            number = stamp.number - self._stamp_at_start
            events.append(Event.of(life, delta_bytes, when, pool, stamp.phase, number))

        if kind == "allocated":
            life = self._live[address] = self._born(num_bytes, _DEVICE, stamp)
            life.rounding_bytes = num_bytes - entry["size"]
            note(num_bytes, _DEVICE, life)
        elif kind == "freed":
            life = self._pending[address] = self._live.pop(address)
            life.died_in_span, life.died_in_step = stamp.span, self._num_starts
            note(-num_bytes, _DEVICE, life)
            note(num_bytes, _PENDING, life)
        elif kind == "completed":
            life = self._pending.pop(address)
            if events and events[-1].pool == _PENDING and events[-1].life is life:
                events.pop()  # nothing had to wait
            else:
                note(-num_bytes, _PENDING, life)
        else:
            note(num_bytes if kind == "reserved" else -num_bytes, _RESERVED, self._born(num_bytes, _RESERVED, stamp))

    def _born(self, num_bytes: int, pool: int, stamp: _Stamp) -> Life:
        category = _WORKSPACE if pool == _RESERVED else stamp.category
        return Life(
            num_bytes, pool, stamp.module, stamp.phase, stamp.span, stamp.recomputing, self._num_starts, category
        )

    def _name(self, number: int) -> None:
        """Gives their categories to what was alive when `categorise` was called, before stamp `number`."""
        while self._named and self._named[0][0] - self._first_stamp <= number:
            _, categories = self._named.pop(0)
            for address, code in categories.items():
                life = self._live.get(address)
                if life is not None:
                    life.category = code

    def _remember_refusal(self, entry: Mapping[str, Any], stamp: _Stamp) -> None:
        assert self._blocks is not None
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        self.out_of_memory = Refusal(
            phase=PHASES[stamp.phase],
            module=self._labels.modules[stamp.module],
            nanoseconds=max(0, entry["time_us"] * 1000 - self._started),
            requested_bytes=entry["size"],
            allocated_bytes=sum(life.num_bytes for life in self._live.values()),
            limit_bytes=min(total, self._device_memory_bytes or total),
            pending_free_bytes=sum(life.num_bytes for life in self._pending.values()),
            reserved_bytes=self._blocks.reserved_bytes,
            largest_free_bytes=self._blocks.largest_free_bytes,
            device_free_bytes=entry.get("device_free", entry.get("addr", 0)),
            device_total_bytes=total,
        )

    def _check(self) -> None:
        """Takes the allocator's word where something outside the lab allocated between two readings."""
        allocated = sum(life.num_bytes for life in self._live.values())
        if allocated != torch.cuda.memory_allocated():
            warnings.warn(
                "something outside the lab allocated between two readings: this timeline lacks it", stacklevel=2
            )
            self._catch_up()


def _write_history_anew() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)


def _snapshot() -> dict[str, Any]:
    return torch.cuda.memory._snapshot()


def _segments(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    device = torch.cuda.current_device()
    return [segment for segment in snapshot["segments"] if segment["device"] == device]
