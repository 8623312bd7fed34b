"""The device memory of several steps as lines on one plotly axis, each peak with its difference from the first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

import plotly.graph_objects as go

from memlab.analysis.difference import difference_of, obstacles
from memlab.config.backend_kind import KINDS
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.record.watch_record import WatchRecord
from memlab.units import binary_unit
from memlab.views.figures.frame import (
    AXIS_TITLES,
    BAND_HEIGHT,
    LETTER_SHARE,
    LINE_HEIGHT,
    PLOT_HEIGHT,
    axis_end,
    blank,
    check_choice,
    drawn_values,
    folded,
    frame,
    interrupt_lines,
    mark_peak,
    mark_phases,
    messages,
    phase_names,
    set_ranges,
    timeline_of,
)
from memlab.views.figures.palette import series_look
from memlab.views.figures.resample import (
    COMPARE_AXES,
    CompareAxis,
    DrawnPoints,
    PhaseSpan,
    align_phases,
    resample,
)
from memlab.views.figures.waterfall import add_waterfall
from memlab.views.text.columns import MINUS, in_unit
from memlab.views.text.compare import common_scenario, record_names
from memlab.views.text.difference import difference_lines
from memlab.views.text.watch import watch_names, watched_models

_LETTERS_IN_LEGEND = 76
_MARK_HEIGHT = 7
"""Pixels from a peak to the upper end of its mark."""


def compare_figure(*records: StepRecord | WatchRecord, axis: CompareAxis | None = None) -> go.Figure:
    """Draws the device bytes of several steps on one axis, each peak with its difference from the first's.

    For a predicted and a measured step, the terms that lead from one peak to the other are drawn below.

    Args:
        *records: Two steps or more, each with its timeline unless it ran out of memory; or two watched blocks or more.
        axis: ``"phase"`` lays the phases of all steps over each other (`align_phases`): how many events or milliseconds
            a phase takes differs between settings, and hides where their bytes differ. ``"time"`` is in milliseconds,
            ``"event"`` gives every event the same width. None is ``"phase"``; for ranks of different pipeline stages,
            whose phases alternate differently, it is ``"time"``, or ``"event"`` in a prediction.

    Raises:
        ValueError: If there are fewer than two records, one has no timeline, or axis is none of the choices.
    """
    if len(records) < 2:
        raise ValueError(
            f"compare_figure got {len(records)} records, must be at least 2: add a step, or draw one by timeline_figure"
        )
    watched = [record for record in records if isinstance(record, WatchRecord)]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert not (watched and steps), "one kind of record"
    axis = axis or (_usual_axis(steps) if steps else "phase")
    check_choice("axis", axis, COMPARE_AXES)
    names = record_names(steps) if steps else watch_names(watched)
    named = [(name, timeline_of(record)) for name, record in zip(names, records, strict=True)]
    title = "Memory allocated on the device, steps compared"
    lines = [common_scenario(steps) if steps else watched_models(watched), *messages(records), *obstacles(steps)]
    difference = difference_of(steps)
    lines += [] if difference is None else difference_lines(difference)[:1]  # the table above the figure has all
    if any(len(timeline) == timeline.num_opening_events for _, timeline in named if timeline):
        axis = "event" if axis == "phase" else axis  # a block in which nothing was allocated has no phases
    drawn, spans = _drawn([(name, timeline) for name, timeline in named if timeline], axis)
    peaks = [int(points.total_bytes[points.peak]) for _, _, points in drawn]
    if not any(peaks):
        return blank(title, [*lines, "nothing allocated on the device was seen"]).figure()
    unit_bytes, unit = binary_unit(max(peaks))
    lowest = min(int(points.total_bytes.min()) for _, _, points in drawn)
    floor = lowest / unit_bytes if lowest * 4 > max(peaks) else 0.0
    labels = [in_unit(peaks[0], unit_bytes)]
    labels += [f"{in_unit(peak, unit_bytes)} ({_signed(peak - peaks[0], unit_bytes)})" for peak in peaks[1:]]
    entries = [f"{name}: peak {label} {unit}" for (name, _, _), label in zip(drawn, labels, strict=True)]
    legend = [folded(entry, _LETTERS_IN_LEGEND) for entry in entries]
    y_title = f"allocated on the device ({unit}" + (f", from {in_unit(lowest, unit_bytes)})" if floor else ")")
    drawing = frame(
        title,
        lines,
        AXIS_TITLES[axis],
        y_title,
        band_height=BAND_HEIGHT if spans else 0,
        num_legend_lines=sum(len(rows) for rows in legend),
    )
    if axis == "phase":
        drawing.layout["xaxis"] |= {"showticklabels": False, "ticks": ""}
    end = axis_end([points for _, _, points in drawn])
    set_ranges(drawing, end, floor, max(peaks) / unit_bytes, num_lines=min(len(peaks), 5))
    mark_phases(drawing, spans, end)
    low, high = drawing.layout["yaxis"]["range"]
    units_per_pixel = (high - low) / PLOT_HEIGHT
    shifts = _label_shifts([points for _, _, points in drawn], labels, end, unit_bytes * units_per_pixel)
    for position, (shift, (name, timeline, points)) in enumerate(zip(shifts, drawn, strict=True)):
        look = series_look(position)
        on_axis = slice(points.num_on_axis)
        line = {
            "x": drawn_values(points.position[on_axis]),
            "y": drawn_values(points.total_bytes[on_axis] / unit_bytes),
            "name": "<br>".join(legend[position]),
            "line": {"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
            "text": phase_names(timeline, points)[on_axis],
            "hovertemplate": f"%{{y:.3f}} {unit}, %{{text}}<extra>{textwrap.shorten(name, 40)}</extra>",
        }
        drawing.traces.append(line)
        mark_peak(drawing, points, unit_bytes, labels[position], end, shift=shift, colour=look.colour)
        if shift > LINE_HEIGHT:  # so far from its mark, the label is joined to it
            x, y = float(points.position[points.peak]), peaks[position] / unit_bytes
            ends = {"x0": x, "x1": x, "y0": y, "y1": y + shift * units_per_pixel}
            drawing.shapes.append(ends | {"type": "line", "line": {"color": look.colour, "width": 0.8}})
    interrupt_lines(drawing)
    figure = drawing.figure()
    if difference is not None:
        looks = [series_look(0 if side is records[0] else 1) for side in (difference.predicted, difference.measured)]
        add_waterfall(figure, difference, [look.colour for look in looks])
    return figure


def _usual_axis(records: Sequence[StepRecord]) -> CompareAxis:
    if len({record.scenario.layout.pipeline_stage for record in records}) == 1:
        return "phase"
    return "event" if any(KINDS[record.backend].is_prediction for record in records) else "time"


_Drawn = tuple[str, Timeline, DrawnPoints]


def _drawn(named: Sequence[tuple[str, Timeline]], axis: CompareAxis) -> tuple[list[_Drawn], list[PhaseSpan]]:
    """Returns what is drawn of each step, and the phases where all steps share them."""
    if axis != "phase":
        return [(name, timeline, resample(timeline, "device", axis)) for name, timeline in named], []
    drawn = [(name, timeline, resample(timeline, "device", "event")) for name, timeline in named]
    if not drawn:
        return [], []
    spans, positions = align_phases([timeline for _, timeline, _ in drawn])
    aligned = [
        (name, timeline, replace(points, position=every[points.event_index - timeline.first_step_event], end=100.0))
        for (name, timeline, points), every in zip(drawn, positions, strict=True)
    ]
    return aligned, spans


def _signed(num_bytes: int, unit_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "") + in_unit(num_bytes, unit_bytes).replace("-", MINUS)


def _label_shifts(
    drawn: Sequence[DrawnPoints], labels: Sequence[str], end: float, bytes_per_pixel: float
) -> list[float]:
    """Returns by how many pixels each label is above its peak, so that it covers no line, no mark and no other label.

    The lowest peak's label is placed first, so that labels that are above one another are in the order of their peaks.

    Args:
        drawn: The lines, in the order of the labels.
        labels: The text at each line's peak.
    """
    shifts = [0.0] * len(drawn)
    placed: list[tuple[float, float, float]] = []  # left and right as shares of the axis, and pixels above 0 bytes
    peaks = [int(points.total_bytes[points.peak]) for points in drawn]
    shares = [points.position / end for points in drawn]
    for number in sorted(range(len(drawn)), key=peaks.__getitem__):
        across = float(shares[number][drawn[number].peak])
        width = (len(labels[number]) + 2) * LETTER_SHARE
        left, right = (across, across + width) if across < 1 / 2 else (across - width, across)
        below = [
            points.total_bytes[(share >= left) & (share <= right)] for points, share in zip(drawn, shares, strict=True)
        ]
        height = max(int(totals.max()) for totals in below if len(totals)) / bytes_per_pixel
        marks = [
            peak / bytes_per_pixel + _MARK_HEIGHT
            for other, (peak, share) in enumerate(zip(peaks, shares, strict=True))
            if other != number and left <= share[drawn[other].peak] <= right and peak != peaks[number]
        ]
        height = max([height, *(mark for mark in marks if mark - height < 2 * _MARK_HEIGHT)])
        for other_left, other_right, taken in sorted(placed, key=lambda other: other[2]):
            if other_left < right and left < other_right and abs(taken - height) < LINE_HEIGHT:
                height = taken + LINE_HEIGHT
        placed.append((left, right, height))
        shifts[number] = height - peaks[number] / bytes_per_pixel
    return shifts
