"""All ranks of a job in one plotly figure: a small timeline for each, on common axes, the stages below each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import binary_unit
from memlab.views.figures.frame import (
    AXIS_TITLES,
    SHARE_AFTER_END,
    Drawing,
    axis_end,
    blank,
    check_choice,
    drawn_values,
    frame,
    messages,
    timeline_of,
)
from memlab.views.figures.palette import GRID, INK, PHASE_OPACITIES, series_look
from memlab.views.figures.resample import AXES, Axis, DrawnPoints, phase_spans, resample
from memlab.views.figures.timeline import HELD, POOL_TITLES, stack_of
from memlab.views.text.columns import MINUS, in_unit
from memlab.views.text.compare import peak_phase
from memlab.views.text.ranks import job_words, missing_ranks
from memlab.vocabulary import POOLS

CHOICE = "area"
"""The uid of each rank's total begins with this; its customdata is the number of the rank."""
MOST_DRAWN = 32
"""Ranks; of a larger job those with the highest peaks are drawn."""

_PINNED = "pinned run, the same rank"
# Pixels.
_SMALL_HEIGHT = 88
_HEAD_HEIGHT = 18
_BAND_HEIGHT = 7
_GAP = 8
_STAGE_GAP = 16

_SPACE_ABOVE = 1.06
_NUM_BINS = 150
_NARROWEST_PHASE = 1 / 150
_COLUMN_GAP = 0.03
_COLUMNS_WITH_PHASES = 2
"""With more columns, the line above a rank has no space for the phase of its peak."""
_WORST = (", highest", ", worst")
"""What is written at the highest rank: of other pools than the device, it decides nothing."""


def ranks_figure(
    job: JobRecord,
    pool: str = "device",
    axis: Axis = "time",
    *,
    above_start: bool = False,
) -> go.Figure:
    """Draws a small timeline of each rank; all have the same axes, and a line shows the worst rank's peak in each.

    Args:
        pool: One of ``"device"``, ``"host"``, ``"on_chip"``.
        axis: ``"time"`` in milliseconds since each rank's own start, or ``"event"``.
        above_start: Starts the bytes axis at the least that a rank holds throughout the step. What the others hold
            throughout above that is grey.

    Returns:
        A figure without a fixed width. The uid of each rank's total is ``area-`` and the number of the rank.

    Raises:
        ValueError: If a rank that finished has no timeline, or pool or axis is none of the choices.
    """
    return ranks_drawing(job, pool, axis, above_start=above_start, pinned=None).figure()


def ranks_drawing(job: JobRecord, pool: str, axis: Axis, *, above_start: bool, pinned: JobRecord | None) -> Drawing:
    """Draws what `ranks_figure` draws, in plain dictionaries."""
    check_choice("pool", pool, POOLS)
    check_choice("axis", axis, AXES)
    title, lines = _words(job, pool)
    ranks = _drawn_ranks(job)
    if len(ranks) < len(job.ranks):
        title = f"The {len(ranks)} ranks with the highest peaks, of {len(job.ranks)}: memory {POOL_TITLES[pool]}"
    timelines = [timeline_of(record) for record in ranks]
    drawn = [resample(timeline, pool, axis, _NUM_BINS) if timeline else None for timeline in timelines]
    peaks = [int(points.total_bytes[points.peak]) if points else 0 for points in drawn]
    if not any(peaks):
        return blank(title, [*lines, f"nothing {POOL_TITLES[pool]} was seen"])
    over = {} if pinned is None else {record.scenario.layout.rank: record for record in pinned.ranks}
    others = [_points_of(over.get(record.scenario.layout.rank), pool, axis) for record in ranks]
    grid = _Grid([record.scenario.layout.pipeline_stage for record in ranks])
    highest = max([*peaks, *(int(points.total_bytes.max()) for points in others if points)])
    unit_bytes, unit = binary_unit(highest)
    floor = min(int(points.held_bytes.sum()) for points in drawn if points) if above_start else 0
    floor = floor if floor * 4 > max(peaks) else 0
    settings = "no recompute, no offload" if str(job.settings) == "none" else str(job.settings)
    lines[0] += f"; axes from {in_unit(floor, unit_bytes)} {unit}" if floor else ""
    lines.insert(1, f"{settings}; bars from light: forward, backward, optimizer; dashed: highest peak")
    x_title = "time since each rank's start (ms)" if axis == "time" else AXIS_TITLES[axis]
    drawing = frame(title, lines, "", "", plot_height=grid.height)
    end = axis_end([points for points in [*drawn, *others] if points])
    top = floor + (highest - floor) * _SPACE_ABOVE
    axes = _axes(drawing, grid, x_title, unit, end, (floor / unit_bytes, top / unit_bytes))
    worst = ranks.index(job.rank(job.worst_rank)) if pool == "device" else int(np.argmax(peaks))
    legend: set[str] = set()
    for at, (record, timeline, points, other) in enumerate(zip(ranks, timelines, drawn, others, strict=True)):
        place = {"xaxis": f"x{at + 1}" if at else "x", "yaxis": f"y{at + 1}" if at else "y"}
        words = _difference(peaks[at] - peaks[worst], unit_bytes) if at != worst else _WORST[pool == "device"]
        words += f", {peak_phase(record)}" if pool == "device" and grid.columns <= _COLUMNS_WITH_PHASES else ""
        head = f"{_name(record, grid)}: {in_unit(peaks[at], unit_bytes)} {unit}{words}"
        drawing.annotations.append(
            _note(grid, at, f"<b>{head}</b>" if at == worst else head if points else f"{head}, no timeline")
        )
        if points is None or timeline is None:
            continue
        held = points.held_bytes if floor else np.zeros_like(points.held_bytes)
        for area in stack_of(points, held, unit_bytes, unit):
            name = area["name"]
            look = {"fillcolor": GRID} if name == HELD else {"showlegend": name not in legend, "legendgroup": name}
            del area["hovertemplate"]
            drawing.traces.append(area | look | place | {"hoverinfo": "skip"})
            legend.add(name)
        drawing.traces.append(_total(record, points, unit_bytes, unit, place))
        if other is not None:
            drawing.traces.append(_pinned_line(other, unit_bytes, unit, place, is_first=_PINNED not in legend))
            legend.add(_PINNED)
        drawing.traces.append(_mark(points, unit_bytes, place, is_worst=at == worst))
        drawing.shapes.extend([_level(place, peaks[worst] / unit_bytes), *_band(timeline, axis, place)])
    drawing.annotations.extend(grid.stage_notes())
    drawing.layout |= axes | {"hovermode": "x", "showlegend": True}
    return drawing


def _words(job: JobRecord, pool: str) -> tuple[str, list[str]]:
    title = f"All ranks of the job: memory {POOL_TITLES[pool]}"
    missing = missing_ranks(job)
    lines = [f"{job_words(job.scenario)}, on {job.backend}", *messages([job])]
    return title, [*lines, *([missing] if missing else [])]


def _drawn_ranks(job: JobRecord) -> list[StepRecord]:
    """Returns the ranks with the highest peaks, in order; the worst one is always among them."""
    worst = job.rank(job.worst_rank)
    highest = sorted(job.ranks, key=lambda record: (record is not worst, -record.peak_allocated_bytes))[:MOST_DRAWN]
    return [record for record in job.ranks if any(record is one for one in highest)]


def _points_of(record: StepRecord | None, pool: str, axis: Axis) -> DrawnPoints | None:
    timeline = None if record is None else record.timeline
    return resample(timeline, pool, axis, _NUM_BINS) if timeline else None


class _Grid:
    """Where each rank is drawn: the ranks of a stage next to each other, in at most four columns.

    Args:
        stages: The stage of each rank, in order.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        members = {stage: stages.count(stage) for stage in stages}
        most = max(members.values())
        self.columns = min(most, 2 if len(stages) <= MOST_DRAWN // 2 else 4)
        self._has_stages = len(members) > 1
        self._is_single = most == 1
        row, self._cells, self._first_row = 0, [], {}
        for stage, count in members.items():
            self._first_row[stage] = row
            self._cells += [(row + at // self.columns, at % self.columns, stage) for at in range(count)]
            row += math.ceil(count / self.columns)
        self.height = int(self._top(row - 1, max(members))) + _SMALL_HEIGHT

    @property
    def names_stages(self) -> bool:
        """Whether each rank's own line names its stage; otherwise a line of the stage does."""
        return self._has_stages and self._is_single

    def _top(self, row: int, stage: int) -> float:
        """Pixels from the top of the figure's plot to that of a small one."""
        number = list(self._first_row).index(stage)
        between = 0 if self._is_single else (_STAGE_GAP + _HEAD_HEIGHT) if self._has_stages else 0
        first = between - _STAGE_GAP if between else 0
        return (row + 1) * (_HEAD_HEIGHT + _BAND_HEIGHT + 2) + row * (_SMALL_HEIGHT + _GAP) + number * between + first

    def domain(self, at: int) -> tuple[list[float], list[float]]:
        """Returns the shares of the figure's plot that a rank takes, across and up."""
        row, column, stage = self._cells[at]
        width = (1.0 - _COLUMN_GAP * (self.columns - 1)) / self.columns
        left, top = column * (width + _COLUMN_GAP), self._top(row, stage)
        return [left, left + width], [max(0.0, 1.0 - (top + _SMALL_HEIGHT) / self.height), 1.0 - top / self.height]

    def is_left(self, at: int) -> bool:
        """Whether a rank is in the first column."""
        return self._cells[at][1] == 0

    def is_lowest(self, at: int) -> bool:
        """Whether no rank is below in the same column."""
        row, column, _ = self._cells[at]
        return not any(below > row and other == column for below, other, _ in self._cells)

    def stage_notes(self) -> list[dict[str, Any]]:
        """Returns a line above the ranks of each stage."""
        if not self._has_stages or self._is_single:
            return []
        notes = []
        for stage, row in self._first_row.items():
            above = self._top(row, stage) - _HEAD_HEIGHT - _BAND_HEIGHT - 2
            notes.append(
                {"x": 0.0, "xref": "paper", "xanchor": "left", "y": 1.0 - above / self.height, "yref": "paper"}
                | {"yanchor": "bottom", "showarrow": False, "text": f"<b>Pipeline stage {stage}</b>"}
            )
        return notes


def _axes(
    drawing: Drawing, grid: _Grid, x_title: str, unit: str, end: float, y_range: tuple[float, float]
) -> dict[str, Any]:
    """Returns the axes of all ranks: numbers only at the left and at the bottom."""
    x, y = drawing.layout["xaxis"], drawing.layout["yaxis"]
    axes: dict[str, Any] = {}
    for at in range(len(grid._cells)):
        number = "" if at == 0 else str(at + 1)
        across, up = grid.domain(at)
        bottom, left = grid.is_lowest(at), grid.is_left(at)
        axes[f"xaxis{number}"] = (
            x
            | {
                "domain": across,
                "anchor": f"y{number}",
                "range": [0.0, end * (1 + SHARE_AFTER_END)],
                "showticklabels": bottom,
                "showline": True,
            }
            | {"ticks": "outside" if bottom else "", "title": {"text": x_title if bottom else "", "standoff": 6}}
            | ({"matches": "x"} if at else {})
        )
        axes[f"yaxis{number}"] = (
            y
            | {"domain": up, "anchor": f"x{number}", "range": list(y_range), "nticks": 4, "showticklabels": left}
            | {"ticks": "outside" if left else "", "title": {"text": unit if left else "", "standoff": 8}}
            | ({"matches": "y"} if at else {})
        )
    return axes


def _name(record: StepRecord, grid: _Grid) -> str:
    layout = record.scenario.layout
    return f"stage {layout.pipeline_stage}, rank {layout.rank}" if grid.names_stages else f"rank {layout.rank}"


def _difference(num_bytes: int, unit_bytes: int) -> str:
    text = f" ({'+' if num_bytes > 0 else ''}{in_unit(num_bytes, unit_bytes)})" if num_bytes else ""
    return text.replace("-", MINUS)


def _note(grid: _Grid, at: int, text: str) -> dict[str, Any]:
    (left, _), (_, top) = grid.domain(at)
    place = {"x": left, "xref": "paper", "xanchor": "left", "y": top, "yref": "paper", "yanchor": "bottom"}
    return place | {"yshift": _BAND_HEIGHT + 1, "text": text, "showarrow": False, "align": "left"}


def _total(
    record: StepRecord, points: DrawnPoints, unit_bytes: int, unit: str, place: dict[str, str]
) -> dict[str, Any]:
    rank = record.scenario.layout.rank
    on_axis = slice(points.num_on_axis)
    return {
        "x": drawn_values(points.position[on_axis]),
        "y": drawn_values(points.total_bytes[on_axis] / unit_bytes),
        "uid": f"{CHOICE}-{rank}",
        "customdata": [rank],
        "mode": "lines",
        "line": {"width": 0.8, "color": INK, "shape": "hv"},
        "showlegend": False,
        "hovertemplate": f"%{{y:.3f}} {unit}<extra>rank {rank}</extra>",
        **place,
    }


def _pinned_line(
    points: DrawnPoints, unit_bytes: int, unit: str, place: dict[str, str], *, is_first: bool
) -> dict[str, Any]:
    look, on_axis = series_look(4), slice(points.num_on_axis)
    return {
        "x": drawn_values(points.position[on_axis]),
        "y": drawn_values(points.total_bytes[on_axis] / unit_bytes),
        "name": _PINNED,
        "legendgroup": _PINNED,
        "showlegend": is_first,
        "mode": "lines",
        "line": {"color": look.colour, "dash": look.dash, "width": 1.5, "shape": "hv"},
        "hovertemplate": f"%{{y:.3f}} {unit}<extra>pinned</extra>",
        **place,
    }


def _mark(points: DrawnPoints, unit_bytes: int, place: dict[str, str], *, is_worst: bool) -> dict[str, Any]:
    """The peak's mark: filled for the worst rank, hollow for the others."""
    size, fill = (11, INK) if is_worst else (8, "white")
    return {
        "x": [float(points.position[points.peak])],
        "y": [int(points.total_bytes[points.peak]) / unit_bytes],
        "mode": "markers",
        "marker": {"symbol": "diamond", "size": size, "color": fill, "line": {"color": INK, "width": 1.5}},
        "cliponaxis": False,
        "showlegend": False,
        "hoverinfo": "skip",
        **place,
    }


def _level(place: dict[str, str], height: float) -> dict[str, Any]:
    """The line at the worst rank's peak."""
    line = {"color": INK, "width": 1, "dash": "dash"}
    across: dict[str, Any] = {"xref": f"{place['xaxis']} domain", "x0": 0.0, "x1": 1.0}
    return across | {"type": "line", "yref": place["yaxis"], "y0": height, "y1": height, "line": line}


def _band(timeline: Timeline, axis: Axis, place: dict[str, str]) -> list[dict[str, Any]]:
    """The phases of a rank, as a bar above it."""
    common: dict[str, Any] = {
        "type": "rect",
        "xref": place["xaxis"],
        "yref": f"{place['yaxis']} domain",
        "fillcolor": INK,
    }
    common |= {"ysizemode": "pixel", "yanchor": 1.0, "y0": 1, "y1": 1 + _BAND_HEIGHT, "line": {"width": 0}}
    spans = phase_spans(timeline, axis, _NARROWEST_PHASE)
    return [common | {"x0": span.start, "x1": span.end, "opacity": _opacity(span.phase)} for span in spans]


def _opacity(phase: str) -> float:
    # The bar is thin, so it needs more ink than a band with words.
    return min(1.0, 2 * PHASE_OPACITIES[phase])
