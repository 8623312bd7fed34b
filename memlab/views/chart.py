"""The panel's chart as data: the shown run stacked by category, the pinned run as a line, the moment looked at.

It has the same traces whatever it shows, so that a widget can take over the next picture in place of the last.
"""

from __future__ import annotations

import html
import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from memlab.timeline import Timeline
from memlab.units import binary_unit, format_bytes
from memlab.views.figures import timeline_figure
from memlab.views.palette import CATEGORY_LOOKS, INK, series_look
from memlab.views.resample import Axis, resample
from memlab.views.run import Run

BASE, TOTAL, PEAK, PINNED, MOMENT = "held throughout", "total", "peak", "pinned", "moment"
TRACES = (BASE, *CATEGORY_LOOKS, TOTAL, PEAK, PINNED, MOMENT)
"""Names of the chart's traces, in their order."""


def first_event(timeline: Timeline) -> int:
    """Returns the index of the event after which the step starts: moment 0."""
    return max(timeline.num_opening_events - 1, 0)


def chart_figure(
    shown: Run | None, pinned: Run | None, pool: str = "device", axis: Axis = "time", moment: int | None = None
) -> go.Figure:
    """Draws the panel's chart.

    Args:
        shown: The run whose memory is stacked by category; None says that there is none.
        pinned: A run whose total is laid over it as a line, or None.
        pool: ``"device"`` or ``"host"``.
        axis: ``"time"`` or ``"event"``.
        moment: Number of the event to mark, counted from the step's start; None marks none.

    Returns:
        A figure with exactly the traces of `TRACES`; those with nothing to show are invisible and empty.
    """
    other = pinned if pinned is not shown and _timeline_of(pinned) is not None else None
    if shown is None or (shown.record is not None and shown.is_ok and shown.record.timeline is None):
        return _with_all_traces(_words("No run is shown", "press Run, or choose a run in the table"), {})
    if shown.record is None:
        return _with_all_traces(_words(f"Run {shown.number} ended in an error", shown.message), {})
    figure = timeline_figure(shown.record, pool, axis)
    timeline = _timeline_of(shown)
    if timeline is None or not figure.data:
        return _with_all_traces(figure, {})
    unit_bytes, unit = binary_unit(timeline.peak_bytes(pool))
    if other is not None and _starts_below(other, figure.layout.yaxis.range[0] * unit_bytes, pool):
        figure = timeline_figure(shown.record, pool, axis, above_start=False)
    traces = {trace.name or PEAK: trace.to_plotly_json() for trace in figure.data}
    if other is not None:
        traces[PINNED] = _overlay(figure, other, pool, axis, unit_bytes, unit)
    if moment is not None:
        traces[MOMENT] = moment_trace(timeline, moment, pool, axis)
    return _with_all_traces(figure, traces)


def moment_trace(timeline: Timeline, moment: int, pool: str, axis: Axis) -> dict[str, Any]:
    """Returns the mark at a moment: a dashed line down from the total at that event."""
    index = first_event(timeline) + moment
    unit_bytes, _ = binary_unit(timeline.peak_bytes(pool))
    x = moment if axis == "event" else timeline.nanoseconds[index] / 1e6
    y = timeline.bytes_at(index, pool) / unit_bytes
    return {
        "x": np.array([x, x]),
        "y": np.array([0.0, y]),
        "mode": "lines+markers",
        "line": {"color": INK, "width": 1.5, "dash": "4px,3px"},
        "marker": {"symbol": ["line-ew", "circle-open"], "size": [0, 11], "color": INK, "line": {"width": 2}},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def event_at(timeline: Timeline, point: int, pool: str, axis: Axis) -> int:
    """Returns the moment of a drawn point, which is what a click on the chart names."""
    return int(resample(timeline, pool, axis).event_index[point]) - first_event(timeline)


def _timeline_of(run: Run | None) -> Timeline | None:
    if run is None or run.record is None or run.record.timeline is None or not len(run.record.timeline):
        return None
    return run.record.timeline


def _starts_below(run: Run, floor_bytes: float, pool: str) -> bool:
    timeline = _timeline_of(run)
    assert timeline is not None
    return bool(timeline.total_bytes(pool)[first_event(timeline) :].min() < floor_bytes)


def _overlay(figure: go.Figure, run: Run, pool: str, axis: Axis, unit_bytes: int, unit: str) -> dict[str, Any]:
    """The pinned run's total; the figure's axes grow to hold it."""
    timeline = _timeline_of(run)
    assert timeline is not None
    points = resample(timeline, pool, axis)
    totals = points.total_bytes / unit_bytes
    low, high = figure.layout.yaxis.range
    figure.layout.xaxis.range = [0.0, max(figure.layout.xaxis.range[1], float(points.position[-1]))]
    figure.layout.yaxis.range = [low, max(high, low + (float(totals.max()) - low) * 1.05)]
    look = series_look(2)
    name = f"pinned: run {run.number}, {textwrap.shorten(str(run.settings), 40)}, peak {format_bytes(int(points.total_bytes[points.peak]))}"
    return {
        "x": points.position,
        "y": totals,
        "text": name,
        "mode": "lines",
        "line": {"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
        "hovertemplate": f"%{{y:.3f}} {unit}<extra>pinned: run {run.number}</extra>",
    }


def _words(title: str, text: str) -> go.Figure:
    """An empty chart that says why it is empty."""
    lines = "".join(f"<br>{html.escape(line, quote=False)}" for line in textwrap.wrap(text, 80))
    words = {"text": f"<b>{title}</b>{lines}", "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    hidden = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False, "range": [0, 1]}
    figure = go.Figure(layout={"template": go.layout.Template(), "height": 300, "xaxis": hidden, "yaxis": hidden})
    figure.update_layout(annotations=[words | {"showarrow": False, "font": {"size": 14}}], title_text="")
    transparent = "rgba(0, 0, 0, 0)"
    return figure.update_layout(font_color=INK, paper_bgcolor=transparent, plot_bgcolor=transparent)


def _with_all_traces(figure: go.Figure, traces: dict[str, dict[str, Any]]) -> go.Figure:
    """The figure's layout over the traces of `TRACES`, in their order."""
    nothing: dict[str, Any] = {"x": np.zeros(0), "y": np.zeros(0), "visible": False}
    shown = []
    for name in TRACES:
        # A legend tells a run's own name, and a slot is known by the trace's uid.
        trace = {"visible": True, **traces[name]} if name in traces else nothing
        stacked = {"stackgroup": "pool"} if name in (BASE, *CATEGORY_LOOKS) else {}
        legend = {"name": trace.get("text") if name == PINNED and name in traces else name, "uid": name}
        shown.append(go.Scatter(**{**stacked, **trace, **legend}))
    return go.Figure(data=shown, layout=figure.layout)
