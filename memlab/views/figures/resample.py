"""Reduces a timeline of up to a million events to the few thousand points that a figure can show.

A point is an event that was kept, never an average: what a figure says at a point is what the pool held right
after that event, to the byte, category by category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from memlab.record.timeline import IntArray, Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

Axis = Literal["time", "event"]
AXES = ("time", "event")
CompareAxis = Literal["phase", "time", "event"]
COMPARE_AXES = ("phase", *AXES)

_NUM_BINS = 300
_NANOSECONDS_PER_MILLISECOND = 1e6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnPoints:
    """The events that are drawn, in order; the first is the step's start."""

    event_index: IntArray
    """Index into the timeline, of shape [points]."""
    position: npt.NDArray[np.float64]
    """Along the axis, of shape [points]: milliseconds, or events since the step's start."""
    category_bytes: IntArray
    """Bytes in use right after each event, of shape [categories, points]."""
    held_bytes: IntArray
    """The least that each category held at any event of the step, drawn or not, of shape [categories]."""
    peak: int
    """Which point is the pool's peak."""
    end: float
    """Where the axis ends: by time with the step itself, before the recovery of one that ended early."""

    def __len__(self) -> int:
        return len(self.event_index)

    @property
    def num_on_axis(self) -> int:
        """How many points are at most at `end`."""
        return int(np.searchsorted(self.position, self.end, side="right"))

    @property
    def total_bytes(self) -> IntArray:
        """Bytes in use in the pool, int64 of shape [points]."""
        totals: IntArray = self.category_bytes.sum(axis=0)
        return totals


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A stretch of the axis that belongs to one phase."""

    phase: str
    start: float
    end: float


def resample(timeline: Timeline, pool: str = "device", axis: Axis = "time", num_bins: int = _NUM_BINS) -> DrawnPoints:
    """Keeps the events that a figure of the timeline needs.

    The axis is cut into equal bins. Of each bin the first and the last event and those with the lowest and the
    highest total are kept, so that a line through them covers the same pixels as a line through all. The peak's
    event is always kept.

    Args:
        timeline: The events; those at its head that opened it count as one point.
        pool: One of `POOLS`.
        axis: Cuts the axis by time, or by the number of the event.
        num_bins: At most four events of each bin are kept, and the peak's.

    Returns:
        The kept events: all of them, if there are no more than fit. None, if the timeline is empty.
    """
    first = timeline.first_step_event
    category_bytes = timeline.category_bytes(pool)[:, first:]
    if category_bytes.shape[1] == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return DrawnPoints(
            event_index=nothing,
            position=nothing.astype(np.float64),
            category_bytes=category_bytes,
            held_bytes=np.zeros(len(CATEGORIES), dtype=np.int64),
            peak=0,
            end=0.0,
        )
    peak = timeline.peak_index(pool) - first
    ticks, last = _ticks(timeline, axis), _last_index(timeline, axis) - first
    kept = _outline(category_bytes.sum(axis=0), np.minimum(ticks, ticks[last]), num_bins)
    kept = np.union1d(kept, peak)
    position = _positions(timeline, axis)
    return DrawnPoints(
        event_index=kept + first,
        position=position[kept],
        category_bytes=category_bytes[:, kept],
        held_bytes=category_bytes.min(axis=1),
        peak=int(np.searchsorted(kept, peak)),
        end=float(position[last]),
    )


def phase_spans(timeline: Timeline, axis: Axis = "time", narrowest: float = 1 / 200) -> list[PhaseSpan]:
    """Finds the stretches of the axis that the phases take.

    Args:
        timeline: The events; those that opened it are left out.
        axis: Places the spans in milliseconds, or in events since the step's start.
        narrowest: A stretch shorter than this share of the axis goes to the one before it. The last one, which is
            often a short update, is drawn at least as wide as this instead.

    Returns:
        The spans from the step's start to its end, without gaps.
    """
    first, stop = timeline.num_opening_events, _last_index(timeline, axis) + 1
    phase = timeline.phase[first:stop]
    if len(phase) == 0:
        return []
    position = _positions(timeline, axis)[first - timeline.first_step_event : stop - timeline.first_step_event]
    end = float(position[-1])
    starts = np.flatnonzero(np.diff(phase, prepend=-1))
    width = np.diff(position[starts], append=end)
    is_wide = width >= end * narrowest
    is_wide[-1] = True
    wide = starts[is_wide]
    wide = wide[np.flatnonzero(np.diff(phase[wide], prepend=-1))]
    edges = [0.0, *np.minimum(position[wide[1:]], end * (1 - narrowest)).tolist(), end]
    return [PhaseSpan(PHASES[phase[start]], *edges[at : at + 2]) for at, start in enumerate(wide)]


def align_phases(timelines: Sequence[Timeline]) -> tuple[list[PhaseSpan], list[npt.NDArray[np.float64]]]:
    """Lays the phases of several steps over each other, each phase as wide as its mean share of the steps' events.

    Two steps of 100 events, 40 of them forward in the first and 60 in the second: forward takes 0 to 50, so event 20
    of the first and event 30 of the second are both at 25. A phase that a step lacks leaves a gap in that step's line.
    Steps whose phases come in different orders, as on the stages of a pipeline, are aligned as a whole.

    Args:
        timelines: At least one, each with events after those that opened it.

    Returns:
        The phases on an axis from 0 to 100, and for each timeline the positions of its events from the step's start on,
        of shape [events].
    """
    spans = [phase_spans(timeline, "event", narrowest=0.0) for timeline in timelines]
    longest = max(spans, key=len)
    slots = [_slots([span.phase for span in mine], [span.phase for span in longest]) for mine in spans]
    common = [span.phase for span in longest]
    if any(mine is None for mine in slots):
        spans = [[PhaseSpan("", 0.0, mine[-1].end)] for mine in spans]
        slots, common = [[0] for _ in spans], [""]
    shares = np.zeros(len(common))
    for mine, at in zip(spans, slots, strict=True):
        assert at is not None
        for span, slot in zip(mine, at, strict=True):
            shares[slot] += (span.end - span.start) / (mine[-1].end or 1.0)
    edges = np.concatenate([[0.0], np.cumsum(shares)])
    edges *= 100 / (edges[-1] or 1.0)
    positions = []
    for timeline, mine, at in zip(timelines, spans, slots, strict=True):
        assert at is not None
        events = np.arange(len(timeline) - timeline.first_step_event, dtype=np.float64)
        number = np.searchsorted([span.start for span in mine[1:]], events, side="right")
        start, end = (np.array([getattr(span, side) for span in mine])[number] for side in ("start", "end"))
        low, high = edges[np.array(at)[number]], edges[np.array(at)[number] + 1]
        positions.append(low + (high - low) * (events - start) / np.maximum(end - start, 1.0))
    aligned = [PhaseSpan(name, edges[slot], edges[slot + 1]) for slot, name in enumerate(common) if name]
    return aligned, positions


def _slots(phases: Sequence[str], common: Sequence[str]) -> list[int] | None:
    """Returns where each phase is in a longer series, in order; None if the longer does not contain them in order."""
    slots: list[int] = []
    for phase in phases:
        start = slots[-1] + 1 if slots else 0
        if phase not in common[start:]:
            return None
        slots.append(common.index(phase, start))
    return slots


def module_growth(timeline: Timeline, index: int, pool: str = "device") -> dict[str, int]:
    """Returns by module the bytes in a pool after an event that were allocated since the step's start, largest first.

    Bytes that were loaded back for the step are left out, as in `largest_modules`.
    """
    since = slice(timeline.num_opening_events, index + 1)
    counts = (timeline.pool[since] == POOLS.index(pool)) & (timeline.phase[since] != PHASES.index("load"))
    sums = np.zeros(len(timeline.modules), dtype=np.int64)
    np.add.at(sums, timeline.module[since][counts], timeline.delta_bytes[since][counts])
    order = np.argsort(-sums, kind="stable")
    return {timeline.modules[module]: int(sums[module]) for module in order if sums[module] > 0}


def largest_modules(
    timeline: Timeline, event_index: IntArray, pool: str = "device", count: int = 2
) -> list[list[tuple[str, int]]]:
    """Names the modules whose bytes, allocated since the step's start, fill a pool most.

    Args:
        timeline: The events; what was alive at the step's start or was loaded back for it is left out: next to
            parameters and optimizer state, which every step has, nothing else would be named.
        event_index: The events after which to look, ascending, of shape [points].
        pool: One of `POOLS`.

    Returns:
        For each of `event_index` the modules with their bytes, the largest first.
    """
    since = timeline.num_opening_events
    loaded = timeline.phase[since:] == PHASES.index("load")
    mine = since + np.flatnonzero((timeline.pool[since:] == POOLS.index(pool)) & ~loaded)
    point = np.searchsorted(event_index, mine)
    num_modules, rows = len(timeline.modules), []
    alive = np.zeros(num_modules, dtype=np.int64)
    # In blocks of points: modules x points would be gigabytes for a model of ten thousand experts.
    block = max(1, 2_000_000 // max(1, num_modules))
    for start in range(0, len(event_index), block):
        stop = min(start + block, len(event_index))
        mask = (point >= start) & (point < stop)
        growth = np.zeros((stop - start, num_modules), dtype=np.int64)
        np.add.at(growth, (point[mask] - start, timeline.module[mine[mask]]), timeline.delta_bytes[mine[mask]])
        growth[0] += alive
        in_use = np.cumsum(growth, axis=0)
        alive = in_use[-1].copy()
        rows += _largest(in_use, timeline.modules, count)
    return rows


def _largest(in_use: IntArray, names: tuple[str, ...], count: int) -> list[list[tuple[str, int]]]:
    rows: list[list[tuple[str, int]]] = [[] for _ in in_use]
    every_row = np.arange(len(in_use))
    for _ in range(min(count, len(names))):
        module = in_use.argmax(axis=1)
        num_bytes = in_use[every_row, module]
        for row in np.flatnonzero(num_bytes > 0):
            rows[row].append((names[module[row]], int(num_bytes[row])))
        in_use[every_row, module] = 0
    return rows


def _last_index(timeline: Timeline, axis: Axis) -> int:
    """The event at which the axis ends. Recovery takes many times the step's time, and few events."""
    first = timeline.num_opening_events
    busy = np.flatnonzero(timeline.phase[first:] != PHASES.index("idle"))
    return first + int(busy[-1]) if axis == "time" and len(busy) else len(timeline) - 1


def _ticks(timeline: Timeline, axis: Axis) -> IntArray:
    first = timeline.first_step_event
    return timeline.nanoseconds[first:] if axis == "time" else np.arange(len(timeline) - first)


def _positions(timeline: Timeline, axis: Axis) -> npt.NDArray[np.float64]:
    return _ticks(timeline, axis) / (_NANOSECONDS_PER_MILLISECOND if axis == "time" else 1.0)


def _outline(totals: IntArray, ticks: IntArray, num_bins: int) -> IntArray:
    """Picks of each bin the first, lowest, highest and last event; all, if there are few."""
    if len(totals) <= 4 * num_bins:
        return np.arange(len(totals))
    bins = (ticks - ticks[0]) * num_bins // (ticks[-1] - ticks[0] + 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    lasts = np.append(starts[1:], len(totals)) - 1
    extremes = [_first_match(totals, starts, pick.reduceat(totals, starts)) for pick in (np.minimum, np.maximum)]
    picked: IntArray = np.unique(np.concatenate([starts, lasts, *extremes]))
    return picked


def _first_match(totals: IntArray, starts: IntArray, requested: IntArray) -> IntArray:
    """Finds in each bin the first event whose total is the one given for that bin."""
    lengths = np.diff(starts, append=len(totals))
    matches = np.flatnonzero(totals == np.repeat(requested, lengths))
    bin_of_match = np.searchsorted(starts, matches, side="right")
    return matches[np.flatnonzero(np.diff(bin_of_match, prepend=-1))]
