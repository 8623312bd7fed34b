"""Events that repeat: the allocator gets the same requests again, and nothing is stepped.

A step's events without the allocator's part (rounding, reserved bytes) depend on the model, the settings, and on what
is allocated when it begins. If a period, such as a step or a micro-batch, leaves allocated what it found, storage by
storage, then the next period has the same events, about the storages that took the places of the earlier ones.

For example, a period frees what its predecessor left (storage 3 of that period), allocates five storages and frees four
of them. Its rows say so by *places*: ``(1, 3)`` is storage 3 of the period before, ``(0, 2)`` the third of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.allocator.protocol import NO_BLOCK, Allocator, Operations, Served
from memlab.vocabulary import CATEGORIES, POOLS

_DEVICE, _HOST, _RESERVED = (POOLS.index(name) for name in ("device", "host", "reserved"))
_WORKSPACE = CATEGORIES.index("workspace")
Columns = npt.NDArray[np.int64]
"""Of shape [8, events]; the rows are nanoseconds, delta, pool, category, phase, module, storage, rounding."""
_NANOSECONDS, _DELTA, _POOL, _CATEGORY, _PHASE, _MODULE, _STORAGE, _ROUNDING = range(8)
_SAME = (_DELTA, _POOL, _PHASE, _MODULE)


class Period:
    """The rows of a period, without those of reserved bytes, and with places for numbers of storages."""

    def __init__(self, columns: Columns, bases: Sequence[int]) -> None:
        """Reads a period.

        Args:
            bases: The number of the first storage of each period until this one; all numbers below are storages that
                existed before the first.
        """
        self.columns = without_reserved(columns)
        starts, numbers = np.array(bases, dtype=np.int64), self.columns[_STORAGE]
        period = np.searchsorted(starts, numbers, side="right") - 1
        self.distance = np.where(period < 0, -1, len(bases) - 1 - period)
        self.storage = numbers - np.where(period < 0, 0, starts[np.maximum(period, 0)])
        self.on_device = np.flatnonzero(self.columns[_POOL] == _DEVICE)

    @cached_property
    def operations(self) -> tuple[Operations, Columns]:
        """What it sends to the allocator, and the place of each slot: distances and storages."""
        distance, storage = self.distance[self.on_device], self.storage[self.on_device]
        width = int(storage.max(initial=0)) + 1
        keys = (distance + 1) * width + storage
        is_used = np.bincount(keys) > 0  # as `np.unique`, without sorting a million keys
        of_slots, slots = np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[keys]
        requested = np.maximum(self.columns[_DELTA, self.on_device], 0)
        places = np.stack([of_slots // width - 1, of_slots % width])
        return Operations(np.stack([slots, requested, np.zeros_like(requested)], axis=1)), places

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Period):
            return NotImplemented
        return all(np.array_equal(*both) for both in zip(self._compared(), other._compared(), strict=True))

    def _compared(self) -> Iterator[npt.NDArray[np.int64]]:
        """Gives what equal periods have in common.

        Autograd frees the random states of a checkpoint in an order that depends on how deep its graph is nested, so on
        which layers were stepped. They are of one size, on the host: which of them is freed first changes no byte.
        """
        columns, changes = self.columns, np.ones(self.columns.shape[1], dtype=np.bool_)
        yield from (columns[row] for row in _SAME)
        for row in _SAME:
            changes[1:] &= columns[row, 1:] == columns[row, :-1]
        changes = ~(changes & (columns[_POOL] == _HOST) & (columns[_DELTA] < 0))
        changes[:1] = True
        order = np.lexsort((self.storage, self.distance, np.cumsum(changes)))
        yield from (self.distance[order], self.storage[order])

    __hash__ = None  # type: ignore[assignment]

    def emptied(self) -> set[tuple[int, int]]:
        """Returns the places, at the end of the period, of storages that have no bytes until a later period.

        Recompute of a layer's norm empties its output's storage in forward, and fills it again in backward.
        """
        is_filled = (self.columns[_DELTA] > 0) & (self.distance > 0)
        filled = zip(self.distance[is_filled].tolist(), self.storage[is_filled].tolist(), strict=True)
        return {(periods, storage) for distance, storage in filled for periods in range(1, distance + 1)}

    def numbers(self, distance: Columns, storage: Columns, bases: Sequence[int]) -> Columns:
        """Returns the numbers of storages in the repetition that `bases` end with, by their places."""
        starts = np.array(bases, dtype=np.int64)
        of_period = distance >= 0
        return storage + np.where(of_period, starts[len(bases) - 1 - distance * of_period], 0)

    def run(
        self, allocator: Allocator, bases: Sequence[int], blocks: Columns, limit_bytes: int | None
    ) -> Served | None:
        """Sends its requests to the allocator.

        Args:
            bases: As for `Period`, until the repetition.
            blocks: Of all storages, by number, or `NO_BLOCK`; they are changed.
            limit_bytes: The device's; None is no limit.

        Returns:
            What the allocator gave; None if a request exceeds the limit.
        """
        operations, places = self.operations
        numbers = self.numbers(places[0], places[1], bases)
        in_slots = blocks[numbers].tolist()
        served = allocator.run(operations, in_slots, limit_bytes)
        blocks[numbers] = in_slots
        return served if len(served.num_bytes) == len(operations) else None

    def again(self, served: Served, bases: Sequence[int], reserved_number: int, *, is_last: bool = False) -> Columns:
        """Returns the rows of a repetition.

        Args:
            bases: As for `Period`, until the repetition.
            reserved_number: Of the storage that stands for the reserved bytes.
            is_last: Whether it is the last repetition of this period, whose own rows may then be changed.
        """
        columns = self.columns if is_last else self.columns.copy()
        requested = columns[_DELTA].copy()
        columns[_DELTA][self.on_device] = np.sign(requested[self.on_device]) * served.num_bytes
        columns[_ROUNDING] = columns[_DELTA] - requested
        columns[_STORAGE] = self.numbers(self.distance, self.storage, bases)
        changes = [(int(self.on_device[place]), change) for place, change in served.changes]
        return with_reserved(columns, changes, reserved_number)


def without_reserved(columns: Columns) -> Columns:
    """Returns the rows that are requested: without reserved bytes, and without what the allocator added."""
    places = np.flatnonzero(columns[_POOL] == _RESERVED).tolist()
    runs = zip([0, *(place + 1 for place in places)], [*places, columns.shape[1]], strict=True)
    kept = np.concatenate([columns[:, first:last] for first, last in runs], axis=1)  # few: faster than indices
    kept[_DELTA] -= kept[_ROUNDING]
    kept[_ROUNDING] = 0
    return kept


def with_reserved(columns: Columns, changes: Sequence[tuple[int, int]], number: int) -> Columns:
    """Inserts rows of reserved bytes."""
    if not changes:
        return columns
    places = [place for place, _ in changes]
    rows = columns[:, places].copy()
    rows[_DELTA] = [change for _, change in changes]
    rows[_POOL], rows[_CATEGORY], rows[_MODULE] = _RESERVED, _WORKSPACE, 0
    rows[_STORAGE], rows[_ROUNDING] = number, 0
    parts = [columns[:, : places[0]]]
    for turn, (first, last) in enumerate(pairwise([*places, columns.shape[1]])):
        parts += [rows[:, turn : turn + 1], columns[:, first:last]]
    return np.concatenate(parts, axis=1)  # few: faster than `np.insert`


def is_live(columns: Columns, count: int) -> npt.NDArray[np.bool_]:
    """Returns which storages are allocated at the end of a timeline's first rows, by number, of `count`."""
    requested = np.zeros(count, dtype=np.int64)
    np.add.at(
        requested, columns[_STORAGE], np.where(columns[_POOL] == _RESERVED, 0, columns[_DELTA] - columns[_ROUNDING])
    )
    return requested > 0


@dataclass(slots=True, eq=False)
class Inserted:
    """A step's events until periods were inserted, and these; one item among the events of the step."""

    rows: Columns
    categories: npt.NDArray[np.int64]
    """By number of a storage, except for those in `objects`."""
    objects: dict[int, Any]
    """Allocations that exist, or existed when the step began, by number."""
    first_number: int
    """The first number after those of the opening events."""
    waiting: list[Any]
    """Replayed passes (`memlab.meter.recording.Replay`) whose backward comes after these events."""

    @property
    def num_roles(self) -> int:
        """How many storages it has beside those that existed before."""
        return len(self.categories) - self.first_number

    def columns(self, numbers: dict[int, int], next_number: int) -> Columns:
        """Returns its rows of a timeline; see `memlab.meter.recording.Replay.columns`."""
        assert next_number == self.first_number, "nothing is between the opening events and these"
        categories = self.categories
        for number, allocation in self.objects.items():
            numbers[id(allocation)] = number
            categories[number] = allocation.final_category
        for replay in self.waiting:  # what has become an allocation of its own since
            for role, allocation in replay.attached.items():
                number = numbers.setdefault(id(allocation), replay.number + role)
                categories[number] = allocation.final_category
        self.rows[_CATEGORY] = categories[self.rows[_STORAGE]]
        return self.rows


class Repetition(NamedTuple):
    """Periods that were inserted."""

    rows: Columns
    """Of the step until then, without opening events, and of the repetitions."""
    num_bytes: int
    """By how much the repetitions change the bytes on the device."""
    blocks: Columns
    """Of the storages that the repetitions are about, at the end, by number; `NO_BLOCK` for the others."""
    moved: dict[int, int]
    """New numbers of storages that are in use at the end, by those of the storages whose places they take."""
    categories: npt.NDArray[np.int64]


def repeated_period(columns: Columns, ends: Sequence[tuple[int, int]]) -> Period | None:
    """Returns the last period, if it had the events of the one before; for the arguments see `repeat`."""
    bases = [count for _, count in ends]
    (first, _), (middle, _), (last, _) = ends[-3:]
    before, period = Period(columns[:, first:middle], bases[:-2]), Period(columns[:, middle:last], bases[:-1])
    return period if before == period else None


def repeat(
    period: Period,
    columns: Columns,
    ends: Sequence[tuple[int, int]],
    times: int,
    allocator: Allocator,
    blocks: Columns,
    limit_bytes: int | None,
    num_opening_events: int,
) -> Repetition | None:
    """Inserts repetitions of the last period, if it left what it found.

    Once the allocator is in a state that it has been in after an earlier repetition, its answers repeat too.

    Args:
        period: As `repeated_period` returns it.
        columns: The step's rows so far, opening events included.
        ends: Where periods begin, the last one now: rows before, and storages before.
        allocator: Is changed.
        blocks: Of all storages, those of the repetitions included, by number, or `NO_BLOCK`; are changed.
        limit_bytes: The device's; None is no limit.
        num_opening_events: Of the step; the last one is that of the reserved bytes.

    Returns:
        The repetitions; None if it is not known that the period repeats, or if a request exceeds the limit.
    """
    bases = [count for _, count in ends]
    (middle, start), (last, count) = ends[-2:]
    live = is_live(columns, count)
    of_now, of_start = _places(live, bases), _places(is_live(columns[:, :middle], start), bases[:-1])
    places = sorted(of_now & of_start)
    # What an early period has allocated for good, such as rotary angles, is one period further back.
    if {(distance - 1, storage) for distance, storage in of_now - of_start} != of_start - of_now:
        return None
    own, num_bases = count - start, len(bases)
    categories = np.zeros(count, dtype=np.int64)
    categories[columns[_STORAGE]] = columns[_CATEGORY]
    standing = _numbers({*places, *period.emptied()}, bases)
    is_in_use = live.copy()
    is_in_use[list(standing.values())] = True
    of_own = _categories_of_own(categories, is_in_use, bases)
    if (of_own < 0).any():
        return None
    for (_, of_storage), number in standing.items():  # a later repetition frees it
        categories[number] = of_own[of_storage]
    back, storage = np.array(places, dtype=np.int64).reshape(-1, 2).T
    answers: list[Served] = []
    seen: dict[Any, int] = {}
    while len(answers) < times:
        numbers = np.array(bases)[-1 - back] + storage
        state = allocator.state(blocks[numbers].tolist())
        if state in seen:
            cycle = answers[seen[state] :]
            skipped = (times - len(answers)) // len(cycle) * len(cycle)
            answers += [cycle[turn % len(cycle)] for turn in range(skipped)]
            bases += [bases[-1] + own * turn for turn in range(1, skipped + 1)]
            of_places = blocks[numbers]
            blocks[numbers] = NO_BLOCK
            blocks[numbers + own * skipped] = of_places
            seen.clear()
        else:
            seen[state] = len(answers)
            served = period.run(allocator, bases, blocks, limit_bytes)
            if served is None:
                return None
            answers.append(served)
            bases.append(bases[-1] + own)
    reserved_number = num_opening_events - 1
    parts = [period.again(each, bases[: num_bases + turn], reserved_number) for turn, each in enumerate(answers)]
    num_rows = last - num_opening_events
    rows = np.concatenate([columns[:, num_opening_events:], *parts], axis=1)
    rows[_NANOSECONDS, num_rows:] = columns[_NANOSECONDS, -1]
    moved = {standing[place]: number for place, number in _numbers(standing, bases).items()}
    distance, of_place = period.operations[1]
    is_unchanged = np.ones(bases[0], dtype=np.bool_)
    is_unchanged[of_place[distance < 0]] = False
    blocks[: bases[0]][is_unchanged] = NO_BLOCK
    num_bytes = sum(int(each[_DELTA] @ (each[_POOL] == _DEVICE)) for each in parts)
    return Repetition(rows, num_bytes, blocks, moved, np.concatenate([categories, *[of_own] * times]))


def _places(live: npt.NDArray[np.bool_], bases: Sequence[int]) -> set[tuple[int, int]]:
    """Returns periods back and place, for the storages of periods that are allocated at the end of the last one."""
    numbers = np.flatnonzero(live[bases[0] :]) + bases[0]
    starts = np.array(bases, dtype=np.int64)
    period = np.searchsorted(starts, numbers, side="right") - 1
    return set(zip((len(bases) - 1 - period).tolist(), (numbers - starts[period]).tolist(), strict=True))


def _numbers(places: Iterable[tuple[int, int]], bases: Sequence[int]) -> dict[tuple[int, int], int]:
    """Returns the numbers of the storages at places."""
    return {place: bases[-1 - place[0]] + place[1] for place in places}


def _categories_of_own(
    categories: npt.NDArray[np.int64], live: npt.NDArray[np.bool_], bases: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Returns the category of each storage of a period, from the last period that has freed it; -1 if none has."""
    found = np.full(bases[-1] - bases[-2], -1, dtype=np.int64)
    for start, end in zip(reversed(bases[:-1]), reversed(bases[1:]), strict=True):
        width = min(end - start, len(found))
        of_period = np.where(live[start : start + width], -1, categories[start : start + width])
        found[:width] = np.where(found[:width] < 0, of_period, found[:width])
    return found
