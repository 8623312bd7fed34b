"""The device's side of a GPU's meter: what is alive, entry by entry of the caching allocator's history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from memlab.allocator.replay import Blocks
from memlab.meter.allocations import Event, Life
from memlab.meter.cuda.stamps import Stamp
from memlab.meter.labels import Labels
from memlab.record.out_of_memory import Refusal
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _PENDING, _RESERVED = (POOLS.index(name) for name in ("device", "pending_free", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
_IDLE = PHASES.index("idle")


class DeviceStorages:
    """What is alive on the current device, by address."""

    def __init__(self, labels: Labels) -> None:
        self.live: dict[int, Life] = {}
        self.pending: dict[int, Life] = {}
        """Freed, and not yet to be used again: another stream is not done with it."""
        self.blocks: Blocks | None = None
        self.started = 0
        """When `start` was called last, in nanoseconds since the epoch."""
        self.limit_bytes: int | None = None
        """The most that torch may reserve; None: all there is."""
        self.refusal: Refusal | None = None
        """The last request since `start` that was refused."""
        self._labels = labels
        self._num_starts = 0

    def start(self) -> None:
        """Begins a timeline."""
        self._num_starts += 1
        self.refusal = None
        self.started = time.time_ns()

    def catch_up(self, snapshot: Mapping[str, Any]) -> None:
        """Takes the allocator's state as it is: what the history does not tell keeps what is known of its address."""
        expandable = bool(snapshot.get("allocator_settings", {}).get("expandable_segments", False))
        segments = _segments(snapshot)
        self.blocks = Blocks(segments, expandable=expandable)
        requested = {part["address"]: part["requested_size"] for each in segments for part in each["blocks"]}
        known, self.live, self.pending = self.live, {}, {}
        for block in self.blocks:
            if not block.is_free:
                life = known.get(block.address)
                if life is None or life.num_bytes != block.num_bytes:
                    life = Life(block.num_bytes, _DEVICE, 0, _IDLE, 0, False, self._num_starts)
                life.rounding_bytes = block.num_bytes - requested[block.address]
                (self.pending if block.address in self.blocks.waiting else self.live)[block.address] = life

    def take_in(self, entry: Mapping[str, Any], stamp: Stamp, events: list[Event]) -> None:
        """Turns one entry into the events that it stands for."""
        assert self.blocks is not None
        if entry["action"] == "oom":
            self._remember_refusal(entry, stamp)
            return
        change = self.blocks.replay(entry)
        if change is None:
            return
        kind, address, num_bytes = change

        def note(delta_bytes: int, pool: int, life: Life) -> None:
            when = max(entry["time_us"] * 1000, self.started)
            events.append(Event.of(life, delta_bytes, when, pool, stamp.phase, stamp.number))

        if kind == "allocated":
            life = self.live[address] = self._born(num_bytes, _DEVICE, stamp)
            life.rounding_bytes = num_bytes - entry["size"]
            note(num_bytes, _DEVICE, life)
        elif kind == "freed":
            life = self.pending[address] = self.live.pop(address)
            life.died_in_span, life.died_in_step = stamp.span, self._num_starts
            note(-num_bytes, _DEVICE, life)
            note(num_bytes, _PENDING, life)
        elif kind == "completed":
            life = self.pending.pop(address)
            if events and events[-1].pool == _PENDING and events[-1].life is life:
                events.pop()  # nothing had to wait
            else:
                note(-num_bytes, _PENDING, life)
        else:
            note(num_bytes if kind == "reserved" else -num_bytes, _RESERVED, self._born(num_bytes, _RESERVED, stamp))

    def name(self, categories: Mapping[int, int]) -> None:
        """Gives categories, by address, to what is alive."""
        for address, code in categories.items():
            life = self.live.get(address)
            if life is not None:
                life.category = code

    def _born(self, num_bytes: int, pool: int, stamp: Stamp) -> Life:
        category = _WORKSPACE if pool == _RESERVED else stamp.category
        return Life(
            num_bytes, pool, stamp.module, stamp.phase, stamp.span, stamp.recomputing, self._num_starts, category
        )

    def _remember_refusal(self, entry: Mapping[str, Any], stamp: Stamp) -> None:
        assert self.blocks is not None
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        self.refusal = Refusal(
            phase=PHASES[stamp.phase],
            module=self._labels.modules[stamp.module],
            nanoseconds=max(0, entry["time_us"] * 1000 - self.started),
            requested_bytes=entry["size"],
            allocated_bytes=sum(life.num_bytes for life in self.live.values()),
            limit_bytes=min(total, self.limit_bytes or total),
            pending_free_bytes=sum(life.num_bytes for life in self.pending.values()),
            reserved_bytes=self.blocks.reserved_bytes,
            largest_free_bytes=self.blocks.largest_free_bytes,
            device_free_bytes=entry.get("device_free", entry.get("addr", 0)),
            device_total_bytes=total,
        )


def _segments(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    device = torch.cuda.current_device()
    return [segment for segment in snapshot["segments"] if segment["device"] == device]
