"""The panel's chart as data: the shown run stacked by category, the pinned run as a line, the selected moment.

Its traces are always the same, in the same order; those with nothing to show are empty. A run on several ranks is drawn
as one small timeline per rank instead, until one of them is chosen.
"""

from __future__ import annotations

import html
import textwrap
from typing import Any

import numpy as np

from memlab.record.timeline import Timeline
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.frame import LABEL_ON_THE_RIGHT, Drawing
from memlab.views.figures.palette import CATEGORY_LOOKS, INK, TRANSPARENT, series_look
from memlab.views.figures.ranks import ranks_drawing
from memlab.views.figures.resample import Axis, resample
from memlab.views.figures.timeline import timeline_drawing
from memlab.views.panel.run import Run

BASE, TOTAL, PEAK, PINNED, MOMENT = "held throughout", "total", "peak", "pinned", "moment"
TRACES = (BASE, *CATEGORY_LOOKS, TOTAL, PEAK, PINNED, MOMENT)
"""Names of the chart's traces, in their order."""


_NOTHING: dict[str, Any] = {"x": np.zeros(0), "y": np.zeros(0), "visible": False}


def chart_drawing(
    shown: Run | None,
    pinned: Run | None,
    pool: str = "device",
    axis: Axis = "time",
    rank: int | None = None,
    pinned_rank: int | None = None,
    *,
    above_start: bool = True,
    is_bare: bool = False,
) -> Drawing:
    """Draws the panel's chart, without the mark of a moment.

    Args:
        shown: The run whose memory is stacked by category; None draws a text that no run is shown.
        pinned: A run whose total is drawn over it as a line, or None.
        pool: ``"device"`` or ``"host"``.
        axis: ``"time"`` or ``"event"``.
        rank: The rank to draw of a run on several ranks; None draws a small timeline of each.
        pinned_rank: The rank of the pinned run; None is the same as `rank`.
        above_start: Starts the bytes axis at what is held throughout the step, as `timeline_figure` does.
        is_bare: Leaves out what the panel shows next to the chart: title, legend and parts of the peak.

    Returns:
        Of one rank, exactly the traces of `TRACES`; those with nothing to show are invisible and empty.
        Of all ranks, what `memlab.views.figures.ranks.ranks_figure` draws.
    """
    if shown is not None and shown.job is not None and not shown.has_rank(rank):
        over = pinned.job if pinned is not None and pinned is not shown else None
        drawing, rank = ranks_drawing(shown.job, pool, axis, above_start=above_start, pinned=over), None
    else:
        other = pinned_rank if pinned_rank is not None else rank
        is_same = pinned is shown and other == rank
        has_other = pinned is not None and not is_same and not pinned.lacks(other)
        of_rank = shown.of_rank(rank) if shown is not None else None
        over_it = pinned.of_rank(other) if pinned is not None and has_other else None
        drawing = _picture(of_rank, over_it, pool, axis, above_start=above_start, is_bare=is_bare)
    # As long as this stays the same, the chart keeps what a reader zoomed to, or hid by its legend.
    view = f"{rank} {pool} {axis} {above_start}"
    drawing.layout["uirevision"] = f"{shown.number} {view}" if shown is not None else "no run"
    return drawing


def _picture(
    shown: Run | None, pinned: Run | None, pool: str, axis: Axis, *, above_start: bool, is_bare: bool
) -> Drawing:
    other = pinned if _timeline_of(pinned) is not None else None
    if shown is None or (shown.record is not None and shown.is_ok and shown.record.timeline is None):
        return _with_all_traces(_words("No run is shown", "press Run, or choose a run in the table"), {})
    if shown.record is None:
        return _with_all_traces(_words(f"Run {shown.number} ended in an error", shown.message), {})
    drawing = timeline_drawing(shown.record, pool, axis, above_start=above_start, is_bare=is_bare)
    timeline = _timeline_of(shown)
    if timeline is None or not drawing.traces:
        return _with_all_traces(drawing, {})
    unit_bytes, unit = binary_unit(timeline.peak_bytes(pool))
    if other is not None and _is_far_below(other, drawing.layout["yaxis"]["range"], unit_bytes, pool):
        drawing = timeline_drawing(shown.record, pool, axis, above_start=False, is_bare=is_bare)
    traces = {trace.get("name", PEAK): trace for trace in drawing.traces}
    if other is not None:
        traces[PINNED] = _overlay(drawing, other, pool, axis, unit_bytes, unit)
    return _with_all_traces(drawing, traces)


def mark_moment(drawing: Drawing, shown: Run | None, moment: int | None, pool: str, axis: Axis) -> Drawing:
    """Draws a line across the chart at a moment, with a mark on the total; None removes them.

    Args:
        drawing: The result of `chart_drawing` for the same run and one rank; it is changed.
        shown: The run, as that of the rank.
        moment: Number of the event, counted from the step's start.

    Returns:
        The same drawing.
    """
    timeline, trace = _timeline_of(shown), drawing.traces[TRACES.index(MOMENT)]
    if timeline is None or moment is None:
        trace.update(_NOTHING)
        return drawing
    index = timeline.first_step_event + moment
    unit_bytes, _ = binary_unit(timeline.peak_bytes(pool))
    low, high = drawing.layout["yaxis"]["range"]
    position = float(moment) if axis == "event" else timeline.nanoseconds[index] / 1e6
    trace.update(
        x=np.full(3, min(position, drawing.layout["xaxis"]["range"][1])),  # a moment of the recovery is past the axis
        y=np.array([low, timeline.bytes_at(index, pool) / unit_bytes, high]),
        visible=True,
        mode="lines+markers",
        line={"color": INK, "width": 2},
        marker={"size": [0, 11, 0], "opacity": 1, "color": INK, "line": {"color": "white", "width": [0, 1.5, 0]}},
        showlegend=False,
        hoverinfo="skip",
    )
    return drawing


def event_at(timeline: Timeline, point: int, pool: str, axis: Axis) -> int:
    """Returns the moment of a drawn point, by its number in the trace ``total``."""
    return int(resample(timeline, pool, axis).event_index[point]) - timeline.first_step_event


def _timeline_of(run: Run | None) -> Timeline | None:
    if run is None or run.record is None or run.record.timeline is None or not len(run.record.timeline):
        return None
    return run.record.timeline


def _is_far_below(run: Run, y_range: list[float], unit_bytes: int, pool: str) -> bool:
    """Whether a run goes below the axis by more than the length of the axis; less than that is cut off."""
    timeline = _timeline_of(run)
    assert timeline is not None
    lowest = float(timeline.total_bytes(pool)[timeline.first_step_event :].min()) / unit_bytes
    return lowest < y_range[0] - (y_range[1] - y_range[0])


def _overlay(drawing: Drawing, run: Run, pool: str, axis: Axis, unit_bytes: int, unit: str) -> dict[str, Any]:
    """The pinned run's total; the drawing's axes grow to hold it."""
    timeline = _timeline_of(run)
    assert timeline is not None
    points = resample(timeline, pool, axis)
    totals = points.total_bytes / unit_bytes
    x_axis, y_axis = drawing.layout["xaxis"], drawing.layout["yaxis"]
    low, high = y_axis["range"]
    label = drawing.annotations[-1]  # of the shown run's peak: it moves above the line
    growth = max(1.0, (float(totals.max()) - low) / (label["y"] - low or 1.0))
    if growth > 1:  # a thin line leads from the label to its mark
        label.update(
            showarrow=True, arrowhead=0, arrowwidth=1, arrowcolor=INK, axref="x", ayref="y", ax=label["x"], xshift=0
        )
        label["ay"] = low + (label["y"] - low) * growth
    y_axis["range"] = [low, low + (high - low) * growth]
    end = max(x_axis["range"][1], points.end)
    x_axis["range"] = [0.0, end]
    if label["x"] < end / 2:
        label.update(
            LABEL_ON_THE_RIGHT | ({"xshift": 0} if label["showarrow"] else {})
        )  # a shift would move the line too
    look = series_look(4)
    peak = format_bytes(int(points.total_bytes[points.peak]))
    who = f"run {run.number}" if run.rank is None else f"run {run.number}, rank {run.rank}"
    name = f"pinned: {who}, {textwrap.shorten(str(run.settings), 40)}, peak {peak}"
    return {
        "x": points.position[: points.num_on_axis],
        "y": totals[: points.num_on_axis],
        "text": name,
        "mode": "lines",
        "line": {"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
        "hovertemplate": f"pinned: %{{y:.2f}} {unit}<extra></extra>",
    }


def _words(title: str, text: str) -> Drawing:
    """An empty chart that says why it is empty."""
    lines = "".join(f"<br>{html.escape(line, quote=False)}" for line in textwrap.wrap(text, 80))
    words = {"text": f"<b>{title}</b>{lines}", "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    hidden = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False, "range": [0, 1]}
    drawing = Drawing({"template": {}, "title": {"text": ""}, "xaxis": hidden, "yaxis": hidden})
    drawing.annotations.append(words | {"showarrow": False, "font": {"size": 14}})
    drawing.layout |= {"font": {"color": INK}, "paper_bgcolor": TRANSPARENT, "plot_bgcolor": TRANSPARENT}
    return drawing


def _with_all_traces(drawing: Drawing, traces: dict[str, dict[str, Any]]) -> Drawing:
    """The drawing's layout over the traces of `TRACES`, in their order."""
    shown = []
    for name in TRACES:
        # The name of the pinned run's trace changes, its uid does not. A space in a uid would paint its pattern black.
        trace = {"visible": True, **traces[name]} if name in traces else _NOTHING
        stacked = {"stackgroup": "pool"} if name in (BASE, *CATEGORY_LOOKS) else {}
        legend = {
            "name": trace.get("text") if name == PINNED and name in traces else name,
            "uid": name.replace(" ", "-"),
        }
        shown.append({**stacked, **trace, **legend})
    drawing.traces = shown
    return drawing
