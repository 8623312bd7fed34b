"""Several steps' totals as lines on one plotly axis, each peak with its difference from the first's."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import plotly.graph_objects as go

from memlab.analysis.difference import difference_of, obstacles, predicted_and_measured
from memlab.record.step_record import StepRecord
from memlab.units import binary_unit
from memlab.views.figures.frame import (
    AXIS_TITLES,
    LINE_HEIGHT,
    PLOT_HEIGHT,
    axis_end,
    blank_figure,
    check_choice,
    drawn_values,
    figure_frame,
    folded,
    mark_peak,
    messages,
    phase_names,
    set_ranges,
    timeline_of,
)
from memlab.views.figures.palette import series_look
from memlab.views.figures.resample import AXES, Axis, resample
from memlab.views.figures.waterfall import add_waterfall
from memlab.views.text.compare import common_scenario, record_names
from memlab.views.text.difference import difference_lines
from memlab.views.text.layout import in_unit

_LETTERS_IN_LEGEND = 76


def compare_figure(*records: StepRecord, axis: Axis | None = None) -> go.Figure:
    """Draws the device bytes of several steps on one axis, each peak with its difference from the first's.

    Below a predicted and a measured step stand the terms that lead from one peak to the other.

    Args:
        *records: Two steps or more, each with its timeline unless it ran out of memory.
        axis: ``"time"`` in milliseconds, or ``"event"``. None is time, and events for a predicted step beside a
            measured one: how long a simulation took is no time on a GPU.

    Returns:
        A figure without a fixed width.

    Raises:
        ValueError: If there are fewer than two records, one has no timeline, or axis is none of the choices.
    """
    if len(records) < 2:
        raise ValueError(
            f"compare_figure got {len(records)} records, must be at least 2: add a step, or draw one by timeline_figure"
        )
    if axis is None:
        axis = "time" if predicted_and_measured(records) is None else "event"
    check_choice("axis", axis, AXES)
    named = [(name, timeline_of(record)) for name, record in zip(record_names(records), records, strict=True)]
    drawn = [(name, timeline, resample(timeline, "device", axis)) for name, timeline in named if timeline]
    title = "Memory allocated on the device, steps compared"
    lines = [common_scenario(records), *messages(records), *obstacles(records)]
    difference = difference_of(records)
    lines += [] if difference is None else difference_lines(difference)
    peaks = [int(points.total_bytes[points.peak]) for _, _, points in drawn]
    if not any(peaks):
        return blank_figure(title, [*lines, "nothing allocated on the device was seen"])
    unit_bytes, unit = binary_unit(max(peaks))
    lowest = min(int(points.total_bytes.min()) for _, _, points in drawn)
    floor = lowest / unit_bytes if lowest * 4 > max(peaks) else 0.0
    if floor:
        lines.append(f"the axis starts at the lowest bytes of all, {in_unit(lowest, unit_bytes)} {unit}")
    lines.append("in brackets: the difference from the first peak")
    labels = [in_unit(peaks[0], unit_bytes)]
    labels += [f"{in_unit(peak, unit_bytes)} ({_signed(peak - peaks[0], unit_bytes)})" for peak in peaks[1:]]
    entries = [f"{name}: peak {label} {unit}" for (name, _, _), label in zip(drawn, labels, strict=True)]
    legend = [folded(entry, _LETTERS_IN_LEGEND) for entry in entries]
    num_legend_lines = sum(len(rows) for rows in legend)
    y_title = f"allocated on the device ({unit})"
    figure = figure_frame(title, lines, AXIS_TITLES[axis], y_title, num_legend_lines=num_legend_lines)
    end = axis_end([points for _, _, points in drawn])
    set_ranges(figure, end, floor, max(peaks) / unit_bytes, num_lines=min(len(peaks), 5))
    low, high = figure.layout.yaxis.range
    spots = [
        (float(points.position[points.peak]) / end, (peak / unit_bytes - low) / (high - low) * PLOT_HEIGHT)
        for (_, _, points), peak in zip(drawn, peaks, strict=True)
    ]
    for position, (shift, (name, timeline, points)) in enumerate(zip(_label_shifts(spots), drawn, strict=True)):
        look = series_look(position)
        on_axis = slice(points.num_on_axis)
        figure.add_scatter(
            x=drawn_values(points.position[on_axis]),
            y=drawn_values(points.total_bytes[on_axis] / unit_bytes),
            name="<br>".join(legend[position]),
            line={"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
            text=phase_names(timeline, points)[on_axis],
            hovertemplate=f"%{{y:.3f}} {unit}, %{{text}}<extra>{textwrap.shorten(name, 40)}</extra>",
        )
        mark_peak(figure, points, unit_bytes, labels[position], end, shift=shift, colour=look.colour)
    if difference is not None:
        looks = [series_look(0 if side is records[0] else 1) for side in (difference.predicted, difference.measured)]
        add_waterfall(figure, difference, [look.colour for look in looks])
    return figure


def _signed(num_bytes: int, unit_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "") + in_unit(num_bytes, unit_bytes).replace("-", "\N{MINUS SIGN}")


def _label_shifts(spots: Sequence[tuple[float, float]]) -> list[float]:
    """Returns by how many pixels each label moves up, so that none stands on another.

    Args:
        spots: Where the labels would stand: the share of the axis, and pixels above it.
    """
    shifts = [0.0] * len(spots)
    placed: list[tuple[float, float]] = []
    for number in sorted(range(len(spots)), key=lambda number: spots[number][1]):
        across, height = spots[number]
        for _, taken in sorted((spot for spot in placed if abs(spot[0] - across) < 0.2), key=lambda spot: spot[1]):
            if abs(taken - height) < LINE_HEIGHT:
                height = taken + LINE_HEIGHT
        placed.append((across, height))
        shifts[number] = height - spots[number][1]
    return shifts
