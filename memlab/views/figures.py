"""Records as plotly figures: one step's memory by category, or several steps' totals on one axis.

Figures are transparent and written in one grey, so that they read on light and dark pages. At each drawn point
the stack adds up to the pool's bytes, to the seven digits of the single-precision numbers that a notebook stores.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from memlab.record import StepRecord
from memlab.timeline import CATEGORIES, PHASES, POOLS, IntArray, Timeline
from memlab.units import binary_unit, format_bytes
from memlab.views.palette import CATEGORY_LOOKS, GRID, INK, PATTERN_INK, PHASE_LOOKS, TRANSPARENT, series_look
from memlab.views.resample import AXES, Axis, DrawnPoints, PhaseSpan, largest_modules, phase_spans, resample
from memlab.views.tables import in_unit, module_name, record_names

_AXIS_TITLES = {"time": "time since the step's start (ms)", "event": "memory events since the step's start"}
_POOL_TITLES = {
    "device": "allocated on the device",
    "host": "allocated on the host",
    "on_chip": "on chip, not part of the device's bytes",
    "pending_free": "freed on the device, and still in use by another stream",
    "reserved": "reserved by torch's allocator",
}
_STEP_TITLES = {
    "ok": "one step",
    "out_of_memory": "a step that ran out of memory",
    "interrupted": "a step that was stopped",
}
# Pixels. The narrowest figure that must stay readable is 600 wide, its plot 510; a letter takes about 6.5.
_PLOT_HEIGHT = 320
_BAND_HEIGHT = 18
_LINE_HEIGHT = 17
_LETTER_SHARE = 6.5 / 510
# Letters on a line across the figure, in its legend, and beside a peak that stands in its middle.
_LETTERS_ACROSS = 90
_LETTERS_IN_LEGEND = 76
_LETTERS_BESIDE = 42


def timeline_figure(
    record: StepRecord, pool: str = "device", axis: Axis = "time", *, above_start: bool = True
) -> go.Figure:
    """Draws the bytes of one step by category, the phases along the axis, and the peak with what made it up.

    Args:
        record: A step with its timeline; one that ran out of memory needs none.
        pool: One of ``"device"``, ``"host"``, ``"on_chip"``.
        axis: ``"time"`` in milliseconds, or ``"event"``, which gives every event the same room.
        above_start: Starts the bytes axis at what the pool held from the step's start to its end, category by category,
            where that is more than a quarter of the peak: parameters and optimizer state would press the rest flat. The
            subtitle says how much lies below the axis. False starts the axis at 0.

    Returns:
        A figure without a fixed width.

    Raises:
        ValueError: If the record has no timeline, or pool or axis is none of the choices.
    """
    _check_choice("pool", pool, POOLS)
    _check_choice("axis", axis, AXES)
    title = f"Memory {_POOL_TITLES[pool]}, {_STEP_TITLES[record.status]}"
    lines = [f"{record.scenario}, on {record.backend}", f"settings: {record.settings}", *_messages([record])]
    timeline = _timeline_of(record)
    points = resample(timeline, pool, axis) if timeline else None
    if timeline is None or points is None or not points.total_bytes.any():
        return _blank(title, [*lines, f"nothing {_POOL_TITLES[pool]} was seen"])
    peak_bytes = int(points.total_bytes[points.peak])
    unit_bytes, unit = binary_unit(peak_bytes)
    held = points.held_bytes
    if not above_start or held.sum() * 4 <= peak_bytes:
        held = np.zeros_like(held)
    held_bytes = int(held.sum())
    if held_bytes:
        parts = _parts(held, unit_bytes)
        lines.append(f"the axis starts at {in_unit(held_bytes, unit_bytes)} {unit} held throughout: {parts}")
    if axis == "time" and len(points) > 1 and points.position[-1] == 0:
        lines.append("all events have the same time: axis='event' gives each its own place")
    figure = _frame(title, lines, _AXIS_TITLES[axis], f"{_POOL_TITLES[pool]} ({unit})", band_height=_BAND_HEIGHT)
    figure.add_traces(_stack(points, held, unit_bytes, unit))
    figure.add_trace(_total_line(timeline, points, pool, unit_bytes, unit))
    end = _end([points])
    _mark_phases(figure, phase_spans(timeline, axis), end)
    label = _peak_label(timeline, points, held, pool)
    _set_ranges(figure, end, held_bytes / unit_bytes, peak_bytes / unit_bytes, num_lines=len(label))
    _mark_peak(figure, points, unit_bytes, "<br>".join(label), end)
    return figure


def compare_figure(*records: StepRecord, axis: Axis = "time") -> go.Figure:
    """Draws the device bytes of several steps on one axis, each peak with its difference from the first's.

    Args:
        *records: Two steps or more, each with its timeline unless it ran out of memory.
        axis: ``"time"`` in milliseconds, or ``"event"``.

    Returns:
        A figure without a fixed width.

    Raises:
        ValueError: If there are fewer than two records, one has no timeline, or axis is none of the choices.
    """
    if len(records) < 2:
        raise ValueError(
            f"compare_figure got {len(records)} records, must be at least 2: add a step, or draw one by timeline_figure"
        )
    _check_choice("axis", axis, AXES)
    named = [(name, _timeline_of(record)) for name, record in zip(record_names(records), records, strict=True)]
    drawn = [(name, timeline, resample(timeline, "device", axis)) for name, timeline in named if timeline]
    scenarios = {str(record.scenario) for record in records}
    title = "Memory allocated on the device, steps compared"
    lines = [scenarios.pop() if len(scenarios) == 1 else "different scenarios", *_messages(records)]
    peaks = [int(points.total_bytes[points.peak]) for _, _, points in drawn]
    if not any(peaks):
        return _blank(title, [*lines, "nothing allocated on the device was seen"])
    unit_bytes, unit = binary_unit(max(peaks))
    lowest = min(int(points.total_bytes.min()) for _, _, points in drawn)
    floor = lowest / unit_bytes if lowest * 4 > max(peaks) else 0.0
    if floor:
        lines.append(f"the axis starts at the lowest bytes of all, {in_unit(lowest, unit_bytes)} {unit}")
    lines.append("in brackets: the difference from the first peak")
    labels = [in_unit(peaks[0], unit_bytes)]
    labels += [f"{in_unit(peak, unit_bytes)} ({_signed(peak - peaks[0], unit_bytes)})" for peak in peaks[1:]]
    entries = [f"{name}: peak {label} {unit}" for (name, _, _), label in zip(drawn, labels, strict=True)]
    legend = [_folded(entry, _LETTERS_IN_LEGEND) for entry in entries]
    num_legend_lines = sum(len(rows) for rows in legend)
    y_title = f"allocated on the device ({unit})"
    figure = _frame(title, lines, _AXIS_TITLES[axis], y_title, num_legend_lines=num_legend_lines)
    end = _end([points for _, _, points in drawn])
    _set_ranges(figure, end, floor, max(peaks) / unit_bytes, num_lines=min(len(peaks), 5))
    low, high = figure.layout.yaxis.range
    spots = [
        (float(points.position[points.peak]) / end, (peak / unit_bytes - low) / (high - low) * _PLOT_HEIGHT)
        for (_, _, points), peak in zip(drawn, peaks, strict=True)
    ]
    for position, (shift, (name, timeline, points)) in enumerate(zip(_label_shifts(spots), drawn, strict=True)):
        look = series_look(position)
        figure.add_scatter(
            x=_drawn(points.position),
            y=_drawn(points.total_bytes / unit_bytes),
            name="<br>".join(legend[position]),
            line={"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
            text=_phase_names(timeline, points),
            hovertemplate=f"%{{y:.3f}} {unit}, %{{text}}<extra>{textwrap.shorten(name, 40)}</extra>",
        )
        _mark_peak(figure, points, unit_bytes, labels[position], end, shift=shift, colour=look.colour)
    return figure


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}: choose one of them")


def _timeline_of(record: StepRecord) -> Timeline | None:
    """The record's timeline; None if it has no event, or ended before it had a timeline."""
    if record.timeline is None and record.status == "ok":
        raise ValueError(
            f"the record of step {record.step_index} ({record.settings}) has no timeline, which a figure draws: "
            "take the step again, load a folder that has a timeline.npz, or print record_table(record)"
        )
    return record.timeline if record.timeline is not None and len(record.timeline) else None


def _messages(records: Sequence[StepRecord]) -> list[str]:
    return [f"{record.status.replace('_', ' ')}: {record.message}" for record in records if record.status != "ok"]


def _frame(
    title: str, lines: Sequence[str], x_title: str, y_title: str, *, band_height: int = 0, num_legend_lines: int = 2
) -> go.Figure:
    """An empty figure with its text and axes, and room for a band above the plot and for the legend below."""
    rows = [row for line in lines for row in _folded(line)]
    top, bottom = 48 + 19 * len(rows) + band_height, 55 + 19 * num_legend_lines
    height = top + _PLOT_HEIGHT + bottom
    text = "".join([f"<b>{title}</b>", *(f'<br><span style="font-size:12px">{row}</span>' for row in rows)])
    axis: dict[str, Any] = {"gridcolor": GRID, "linecolor": INK, "zeroline": False, "ticks": "outside", "range": [0, 1]}
    return go.Figure(
        layout={
            "template": go.layout.Template(),
            "title": {"text": text, "font": {"size": 15}, "pad": {"l": 12}}
            | {"x": 0.0, "xanchor": "left", "y": 1.0 - 20 / height, "yanchor": "top"},
            "font": {"color": INK, "size": 12},
            "paper_bgcolor": TRANSPARENT,
            "plot_bgcolor": TRANSPARENT,
            "height": height,
            "margin": {"l": 70, "r": 20, "t": top, "b": bottom},
            "xaxis": axis | {"title": {"text": x_title, "standoff": 6}, "showgrid": False, "hoverformat": ".2~f"},
            "yaxis": axis | {"title": {"text": y_title, "standoff": 8}, "showline": True, "tickformat": "~f"},
            "legend": {"orientation": "h", "x": 0.0, "y": -50 / _PLOT_HEIGHT, "yanchor": "top", "itemwidth": 40}
            | {"traceorder": "normal"},
            "hovermode": "x unified",
            "modebar": {"bgcolor": TRANSPARENT, "color": INK, "activecolor": INK},
            "hoverlabel": {"bgcolor": "white", "bordercolor": INK, "font": {"color": "#333333"}},
        }
    )


def _blank(title: str, lines: Sequence[str]) -> go.Figure:
    """A frame whose axes promise no numbers."""
    unmarked = {"showticklabels": False, "ticks": "", "showgrid": False}
    return _frame(title, lines, "", "").update_xaxes(unmarked).update_yaxes(unmarked)


def _folded(text: str, letters: int = _LETTERS_ACROSS) -> list[str]:
    """Breaks a line between its words and after a plus sign, and escapes what plotly would read as HTML."""
    lines = textwrap.wrap(text.replace("+", "+\t"), letters, break_on_hyphens=False, expand_tabs=False, tabsize=1)
    return [html.escape(line.replace("+ ", "+"), quote=False) for line in lines]


def _parts(num_bytes: IntArray, unit_bytes: int, most: int = 3) -> str:
    """Names the largest categories of some bytes, of shape [categories], and how many others there are."""
    largest = [code for code in np.argsort(-num_bytes, kind="stable") if num_bytes[code] > 0]
    # A space that does not break keeps a name and its number on one line.
    named = [
        f"{CATEGORIES[code]}\N{NO-BREAK SPACE}{in_unit(int(num_bytes[code]), unit_bytes)}" for code in largest[:most]
    ]
    return ", ".join([*named, *([f"{len(largest) - most} more"] if len(largest) > most else [])])


def _signed(num_bytes: int, unit_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "") + in_unit(num_bytes, unit_bytes).replace("-", "\N{MINUS SIGN}")


def _end(drawn: Sequence[DrawnPoints]) -> float:
    return max(float(points.position[-1]) for points in drawn) or 1.0


def _set_ranges(figure: go.Figure, end: float, floor: float, peak: float, num_lines: int) -> None:
    """Gives the axes their ranges, with room for a label of some lines above the peak."""
    headroom = _PLOT_HEIGHT / (_PLOT_HEIGHT - 16 - num_lines * _LINE_HEIGHT)
    figure.update_xaxes(range=[0.0, end])
    figure.update_yaxes(range=[floor, floor + ((peak - floor) * headroom or 1.0)])


def _stack(points: DrawnPoints, held: IntArray, unit_bytes: int, unit: str) -> list[go.Scatter]:
    """The filled areas, over a clear one for what lies below the axis."""
    # All traces share one x array: plotly then stacks them point by point, also where times are equal.
    common: dict[str, Any] = {"x": _drawn(points.position), "stackgroup": "pool", "mode": "lines"}
    traces = []
    if held.any():
        base: dict[str, Any] = {"name": "held throughout", "fillcolor": TRANSPARENT, "showlegend": False}
        base |= {"line": {"width": 0, "color": INK, "shape": "hv"}}
        base |= {"y": _drawn(np.full(len(points), held.sum() / unit_bytes))}
        traces.append(go.Scatter(**common, **base, hovertemplate=f"%{{y:.3f}} {unit}"))
    for category, look in CATEGORY_LOOKS.items():
        code = CATEGORIES.index(category)
        above = points.category_bytes[code] - held[code]
        if not above.any():
            continue
        also = f" above the {format_bytes(int(held[code]))} held" if held[code] else ""
        traces.append(
            go.Scatter(
                **common,
                y=_drawn(above / unit_bytes),
                name=category,
                line={"width": 0.5, "color": look.colour, "shape": "hv"},
                fillpattern={"shape": look.pattern, "bgcolor": look.colour, "fgcolor": PATTERN_INK}
                | {"size": 7, "solidity": 0.25},
                fillcolor=look.colour,
                hovertemplate=f"%{{y:.3f}} {unit}{also}",
            )
        )
    return traces


def _drawn(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Halves what a notebook stores of a figure; seven digits are more than a hover shows."""
    return values.astype(np.float32)


def _phase_names(timeline: Timeline, points: DrawnPoints) -> list[str]:
    return [PHASES[code] for code in timeline.phase[points.event_index]]


def _total_line(timeline: Timeline, points: DrawnPoints, pool: str, unit_bytes: int, unit: str) -> go.Scatter:
    """The outline of the stack, which carries what a reader sees when pointing at a moment."""
    texts = []
    modules = largest_modules(timeline, points.event_index, pool)
    for phase, largest in zip(_phase_names(timeline, points), modules, strict=True):
        names = "".join(f"<br>{html.escape(module_name(name))} +{format_bytes(size)}" for name, size in largest)
        texts.append(phase + names)
    return go.Scatter(
        x=_drawn(points.position),
        y=_drawn(points.total_bytes / unit_bytes),
        name="total",
        text=texts,
        mode="lines",
        line={"width": 0.8, "color": INK, "shape": "hv"},
        showlegend=False,
        hovertemplate=f"%{{y:.3f}} {unit}, %{{text}}",
    )


def _mark_phases(figure: go.Figure, spans: Sequence[PhaseSpan], end: float) -> None:
    """Draws a band above the plot with the phases' names, where they fit, and a line between two phases."""
    shapes, names = [], []
    band = {"type": "rect", "yref": "paper", "ysizemode": "pixel", "yanchor": 1.0, "y0": 3, "y1": 3 + _BAND_HEIGHT}
    line = {"type": "line", "yref": "paper", "y0": 0.0, "y1": 1.0, "layer": "below"}
    for number, span in enumerate(spans):
        look = PHASE_LOOKS[span.phase]
        shapes.append(
            band | {"x0": span.start, "x1": span.end, "fillcolor": INK, "opacity": look.opacity, "line": {"width": 0}}
        )
        if number:
            shapes.append(
                line | {"x0": span.start, "x1": span.start, "line": {"color": INK, "width": 1, "dash": "dot"}}
            )
        share = (span.end - span.start) / end
        for text in (span.phase, look.short_name):
            if share > (len(text) + 1) * _LETTER_SHARE:
                place = {"x": (span.start + span.end) / 2, "yref": "paper", "y": 1.0, "yshift": 3 + _BAND_HEIGHT / 2}
                names.append(place | {"text": text, "yanchor": "middle", "showarrow": False})
                break
    figure.update_layout(shapes=shapes, annotations=names)


def _peak_label(timeline: Timeline, points: DrawnPoints, held: IntArray, pool: str) -> list[str]:
    """The lines beside the peak: how much, what it is made of above the axis' start, and the module that holds most."""
    total = int(points.total_bytes[points.peak])
    unit_bytes, unit = binary_unit(total)
    head = f"<b>peak {in_unit(total, unit_bytes)} {unit}</b>"
    if held.any():
        held_bytes = int(held.sum())
        head += f" = {in_unit(held_bytes, unit_bytes)} held + {in_unit(total - held_bytes, unit_bytes)}"
    lines = [head, *_folded(_parts(points.category_bytes[:, points.peak] - held, unit_bytes), _LETTERS_BESIDE)]
    for name, size in largest_modules(timeline, points.event_index[[points.peak]], pool, count=1)[0]:
        size_text = format_bytes(size).replace(" ", "\N{NO-BREAK SPACE}")
        lines += _folded(f"grew most: {module_name(name)}, {size_text}", _LETTERS_BESIDE)
    return lines


def _mark_peak(
    figure: go.Figure,
    points: DrawnPoints,
    unit_bytes: int,
    text: str,
    end: float,
    *,
    shift: float = 0.0,
    colour: str = INK,
) -> None:
    """Marks a peak and writes beside it, on the side that has more room."""
    x, y = float(points.position[points.peak]), int(points.total_bytes[points.peak]) / unit_bytes
    marker = {"symbol": "diamond", "size": 10, "color": colour, "line": {"color": "white", "width": 1.5}}
    figure.add_scatter(
        x=[x], y=[y], mode="markers", marker=marker, cliponaxis=False, showlegend=False, hoverinfo="skip"
    )
    side, xshift = ("left", 8) if x < end / 2 else ("right", -8)
    place = {"xanchor": side, "align": side, "xshift": xshift, "yanchor": "bottom", "yshift": shift}
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, font={"color": colour}, **place)


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
            if abs(taken - height) < _LINE_HEIGHT:
                height = taken + _LINE_HEIGHT
        placed.append((across, height))
        shifts[number] = height - spots[number][1]
    return shifts
