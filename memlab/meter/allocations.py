"""What a meter records of one storage, and how the allocations and frees of a step become a `Timeline`."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.allocator.protocol import NO_BLOCK
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_ACTIVATIONS, _RECOMPUTED, _TEMPORARY = (CATEGORIES.index(name) for name in ("activations", "recomputed", "temporary"))
_DEVICE = POOLS.index("device")
_BACKWARD, _FORWARD, _IDLE = (PHASES.index(name) for name in ("backward", "forward", "idle"))


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage. Indices are those of `Timeline`'s columns, spans those of `Labels`."""

    num_bytes: int
    pool: int
    module: int
    phase: int
    span: int
    recomputed: bool
    step: int
    """Number of the timeline in which it was allocated."""
    category: int | None = None
    """Set if it is known by construction; `final_category` decides otherwise."""
    freed_in_span: int | None = None
    freed_in_step: int | None = None
    rounding_bytes: int = 0
    """The part of `num_bytes` that the allocator added to the request."""
    stream: int = 0
    """The stream that was current when it was requested, 0 for the default one."""
    other_streams: frozenset[int] = frozenset()
    """Those that use it, too, as ``record_stream`` says."""
    pinned_bytes: int = 0
    """Of the simulated block of pinned host memory that it has, 0 if it has none."""
    is_emptied: bool = False
    """Whether its storage was resized to no bytes, so that its memory is free, until it is filled again."""

    @property
    def final_category(self) -> int:
        """The category, decided by where the storage was allocated and where it was freed.

        A storage that is freed in the span of its allocation never waited for backward: it was temporary. A storage
        that outlives its step waits for something, whatever made it: a retained gradient is not a temporary. One that
        was emptied waits for nothing, however long something refers to it.
        """
        if self.category is not None:
            return self.category
        if self.freed_in_span == self.span:
            return _TEMPORARY
        if self.freed_in_step != self.step and not self.is_emptied:
            return _ACTIVATIONS
        return category_of(self)


@dataclass(slots=True, eq=False)
class StorageAllocation(Allocation):
    """An allocation with what a meter needs to follow its storage."""

    requested_bytes: int = 0
    """The storage's size; `num_bytes` is what it takes of its pool."""
    reference: weakref.ref[Any] | None = None
    key: int = 0
    """Under which the meter has it: its storage's identity, below 0 without a storage."""
    birth: int = 0
    """Its place among the meter's allocations, the earliest first."""
    block: int = NO_BLOCK
    """Of a simulated allocator."""


def category_of(born: Any) -> int:
    """Returns the category of an allocation, or what stands for one, that was freed in a later span of its step."""
    if born.category is not None:
        return int(born.category)
    if born.phase == _FORWARD:
        return _ACTIVATIONS
    if born.phase == _BACKWARD and born.recomputed:
        return _RECOMPUTED
    return _TEMPORARY


def label_others(allocations: Iterable[Allocation], category: str | None) -> None:
    """Gives allocations that have no category this one, if there is one."""
    if category is not None:
        code = CATEGORIES.index(category)
        for allocation in allocations:
            allocation.category = code if allocation.category is None else allocation.category


class Event(NamedTuple):
    """An allocation, a free or a change of size."""

    nanoseconds: int
    """On the clock of its meter."""
    delta_bytes: int
    pool: int
    allocation: Allocation
    phase: int
    rounding_bytes: int
    """The part of `delta_bytes` that is rounding, with the same sign."""
    stamp: int = 0
    """The number of the current stamp; 0 for a meter without stamps."""

    @classmethod
    def marking(cls, nanoseconds: int, phase: int) -> Event:
        """Returns an event of no bytes."""
        nothing = Allocation(0, _DEVICE, 0, phase, 0, recomputed=False, step=0, category=_TEMPORARY)
        return cls.of(nothing, 0, nanoseconds, _DEVICE, phase)

    @classmethod
    def of(
        cls, allocation: Allocation, delta_bytes: int, nanoseconds: int, pool: int, phase: int, stamp: int = 0
    ) -> Event:
        """Returns the event of a storage that was allocated (`delta_bytes` above 0) or freed (below 0)."""
        rounding_bytes = allocation.rounding_bytes if delta_bytes > 0 else -allocation.rounding_bytes
        # What `cls(...)` does, without a call of a function that Python generates: a step has 100,000 events.
        return tuple.__new__(cls, (nanoseconds, delta_bytes, pool, allocation, phase, rounding_bytes, stamp))


class Opening:
    """What is allocated when a step begins: what an `Event` for each would say, without 100,000 of them.

    Args:
        allocations: In the order of their numbers. Their bytes are those of now, their categories those of later.
        other_pools: The pools of those that are in another than their own, by their identity.
    """

    __slots__ = ("_num_bytes", "_pools", "_rounding_bytes", "allocations")

    def __init__(self, allocations: list[Allocation], other_pools: Mapping[int, int] = MappingProxyType({})) -> None:
        self.allocations = allocations
        self._num_bytes = [each.num_bytes for each in allocations]
        self._pools = [other_pools.get(id(each), each.pool) for each in allocations]
        self._rounding_bytes = [each.rounding_bytes for each in allocations]

    def __len__(self) -> int:
        return len(self.allocations)

    def columns(self, started: int) -> npt.NDArray[np.int64]:
        """Returns their rows of a timeline."""
        columns = np.empty((8, len(self)), dtype=np.int64)
        columns[0], columns[4] = started, _IDLE
        columns[1], columns[2], columns[7] = self._num_bytes, self._pools, self._rounding_bytes
        categories = ((each, each.category) for each in self.allocations)
        columns[3] = [each.final_category if category is None else category for each, category in categories]
        columns[5] = [each.module for each in self.allocations]
        columns[6] = np.arange(len(self))
        return columns


def timeline_of(opening: Opening, events: Iterable[Any], started: int, modules: Sequence[str]) -> Timeline:
    """Writes events as columns.

    Args:
        opening: What existed when the step began.
        events: What happened since, in order: each an `Event`, or something with many events and a method `columns`
            (`memlab.meter.recording.Replay`).
        started: The step's start, in nanoseconds on the events' clock.
        modules: The names by the codes of `Allocation.module`.
    """
    columns, _, _ = columns_of(opening, events, started)
    columns[0] -= started
    return timeline_of_columns(columns, len(opening), modules)


def timeline_of_columns(columns: npt.NDArray[np.int64], num_opening_events: int, modules: Sequence[str]) -> Timeline:
    """Makes a timeline of what `columns_of` returns, in nanoseconds since the step's start."""
    return Timeline(
        nanoseconds=columns[0].copy(),
        delta_bytes=columns[1].copy(),
        pool=columns[2].astype(np.uint8),
        category=columns[3].astype(np.uint8),
        phase=columns[4].astype(np.uint8),
        module=columns[5].astype(np.int32),
        storage=columns[6].astype(np.int32),
        modules=tuple(modules),
        num_opening_events=num_opening_events,
        rounding_bytes=columns[7].copy(),
    )


def columns_of(
    opening: Opening, events: Iterable[Any], started: int, marks: Collection[int] = ()
) -> tuple[npt.NDArray[np.int64], dict[int, int], list[tuple[int, int]]]:
    """Returns the columns of `timeline_of`.

    Args:
        marks: Places among the events.

    Returns:
        The columns, int64 of shape [8, events]; the storages' numbers by the identity of their allocations; and for
        each of the marks how many rows and storages are before it.
    """
    numbers = dict(zip(map(id, opening.allocations), range(len(opening)), strict=True))
    count = num_rows = len(opening)
    parts = [opening.columns(started)]
    rows: list[tuple[int, ...]] = []
    found: list[tuple[int, int]] = []

    def add(event: Event) -> None:
        nonlocal count
        nanoseconds, delta_bytes, pool, allocation, phase, rounding_bytes, _ = event
        number = numbers.get(id(allocation))
        if number is None:
            number = numbers[id(allocation)] = count
            count += 1
        of_storage = (allocation.final_category, phase, allocation.module, number)
        rows.append((nanoseconds, delta_bytes, pool, *of_storage, rounding_bytes))

    def end_part() -> None:
        nonlocal num_rows
        parts.append(np.array(rows, dtype=np.int64).reshape(-1, 8).T)
        num_rows += len(rows)
        rows.clear()

    for place, event in enumerate(events):
        if place in marks:
            found.append((num_rows + len(rows), count))
        if type(event) is Event:
            add(event)
        else:
            end_part()
            parts.append(event.columns(numbers, count))
            num_rows += parts[-1].shape[1]
            count += event.num_roles
    end_part()
    if len(found) < len(marks):  # the last mark is behind the last event
        found.append((num_rows, count))
    return np.concatenate(parts, axis=1), numbers, found
