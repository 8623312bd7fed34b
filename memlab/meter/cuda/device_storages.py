"""The device side of a GPU's meter: what is allocated, followed entry by entry in the caching allocator's history."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from memlab.allocator.replay import Blocks
from memlab.meter.allocations import Allocation, Event
from memlab.meter.cuda.history_labels import Stamp
from memlab.meter.labels import Labels
from memlab.record.out_of_memory import FailedAllocation
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _PENDING, _RESERVED = (POOLS.index(name) for name in ("device", "pending_free", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
_IDLE = PHASES.index("idle")


class DeviceStorages:
    """What is allocated on the current device, by address."""

    def __init__(self, labels: Labels) -> None:
        self.live: dict[int, Allocation] = {}
        self.pending: dict[int, Allocation] = {}
        """Freed, but not yet available: another stream still uses it."""
        self.blocks: Blocks | None = None
        self.started = 0
        """When `start` was called last, in nanoseconds since the epoch."""
        self.limit_bytes: int | None = None
        """The most that torch may reserve; None: the whole device."""
        self.refusal: FailedAllocation | None = None
        """The last failed allocation since `start`."""
        self._labels = labels
        self._num_starts = 0

    def start(self) -> None:
        """Begins a timeline."""
        self._num_starts += 1
        self.refusal = None
        self.started = time.time_ns()

    def catch_up(self, snapshot: Mapping[str, Any]) -> None:
        """Reads the allocator's state from a snapshot; a block that was known at its address keeps its labels."""
        settings = snapshot.get("allocator_settings", {})
        unsplit_from = settings.get("max_split_size", -1)  # -1 where blocks of any size are split
        segments = _segments(snapshot)
        self.blocks = Blocks(
            segments,
            expandable=bool(settings.get("expandable_segments", False)),
            unsplit_from_bytes=unsplit_from if unsplit_from > 0 else sys.maxsize,
        )
        requested = {part["address"]: part["requested_size"] for each in segments for part in each["blocks"]}
        known, self.live, self.pending = self.live, {}, {}
        for address, num_bytes in self.blocks.allocated().items():
            allocation = known.get(address)
            if allocation is None or allocation.num_bytes != num_bytes:
                allocation = Allocation(num_bytes, _DEVICE, 0, _IDLE, 0, False, self._num_starts)
            allocation.rounding_bytes = num_bytes - requested[address]
            (self.pending if address in self.blocks.waiting else self.live)[address] = allocation

    def replay(self, entry: Mapping[str, Any], stamp: Stamp, events: list[Event]) -> None:
        """Appends the events of one entry of the history."""
        assert self.blocks is not None
        if entry["action"] == "oom":
            self._record_failed_allocation(entry, stamp)
            return
        change = self.blocks.replay(entry)
        if change is None:
            return
        kind, address, num_bytes = change

        def note(delta_bytes: int, pool: int, allocation: Allocation) -> None:
            when = max(entry["time_us"] * 1000, self.started)
            events.append(Event.of(allocation, delta_bytes, when, pool, stamp.phase, stamp.number))

        if kind == "allocated":
            allocation = self.live[address] = self._allocation(num_bytes, _DEVICE, stamp)
            allocation.rounding_bytes = num_bytes - entry["size"]
            note(num_bytes, _DEVICE, allocation)
        elif kind == "freed":
            allocation = self.pending[address] = self.live.pop(address)
            allocation.freed_in_span, allocation.freed_in_step = stamp.span, self._num_starts
            note(-num_bytes, _DEVICE, allocation)
            note(num_bytes, _PENDING, allocation)
        elif kind == "completed":
            allocation = self.pending.pop(address)
            if events and events[-1].pool == _PENDING and events[-1].allocation is allocation:
                events.pop()  # no stream still used it
            else:
                note(-num_bytes, _PENDING, allocation)
        else:
            note(
                num_bytes if kind == "reserved" else -num_bytes,
                _RESERVED,
                self._allocation(num_bytes, _RESERVED, stamp),
            )

    def categorise(self, categories: Mapping[int, int], module: int | None) -> None:
        """Sets the categories, by address, of what is allocated, and its module unless that is None."""
        for address, code in categories.items():
            allocation = self.live.get(address)
            if allocation is not None:
                allocation.category = code
                allocation.module = allocation.module if module is None else module

    def _allocation(self, num_bytes: int, pool: int, stamp: Stamp) -> Allocation:
        category = _WORKSPACE if pool == _RESERVED else stamp.category
        return Allocation(
            num_bytes, pool, stamp.module, stamp.phase, stamp.span, stamp.recomputing, self._num_starts, category
        )

    def _record_failed_allocation(self, entry: Mapping[str, Any], stamp: Stamp) -> None:
        assert self.blocks is not None
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        self.refusal = FailedAllocation(
            phase=PHASES[stamp.phase],
            module=self._labels.modules[stamp.module],
            nanoseconds=max(0, entry["time_us"] * 1000 - self.started),
            requested_bytes=entry["size"],
            allocated_bytes=sum(allocation.num_bytes for allocation in self.live.values()),
            limit_bytes=min(total, self.limit_bytes or total),
            pending_free_bytes=sum(allocation.num_bytes for allocation in self.pending.values()),
            reserved_bytes=self.blocks.reserved_bytes,
            largest_free_bytes=self.blocks.largest_free_bytes(entry["size"]),
            device_free_bytes=entry.get("device_free", entry.get("addr", 0)),
            device_total_bytes=total,
        )


def _segments(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    device = torch.cuda.current_device()
    return [segment for segment in snapshot["segments"] if segment["device"] == device]
