"""What every figure of steps has: its text, axes with space for a peak's label, and the peak's mark.

Figures are transparent and written in one grey, which is legible on light and dark pages.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.record.watch_record import WatchRecord
from memlab.views.figures.palette import GRID, INK, PHASE_OPACITIES, SHORT_PHASES, TRANSPARENT
from memlab.views.figures.resample import DrawnPoints, PhaseSpan
from memlab.vocabulary import PHASES

AXIS_TITLES = {
    "time": "time since the step's start (ms)",
    "event": "memory events since the step's start",
    "phase": "memory events, phases aligned",
}
# Pixels.
PLOT_HEIGHT = 320
LINE_HEIGHT = 17
BAND_HEIGHT = 18
FLOOR_HEIGHT = 18
LETTER_SHARE = 6.5 / 510
"""Of the plot's width, for a letter of 6.5 pixels: the narrowest figure that must stay readable is 600 wide, its plot
510."""
_USUAL_LETTER_SHARE = 5.5 / 700
"""The same in a notebook of usual width, where the mean letter has 5.5 pixels."""
_PIXEL_SHARE = 1 / 700
"""Of the plot's width, for a pixel in a notebook of usual width."""
SHARE_AFTER_END = 0.01
"""Of the time axis, beyond the last event: what happens there would otherwise be covered by the figure's border."""
_LETTERS_ACROSS = 96
LABEL_ON_THE_RIGHT: dict[str, Any] = {"xanchor": "left", "align": "left", "xshift": 8}
"""A peak's label is next to its mark, on the side that has more space."""
_LABEL_ON_THE_LEFT: dict[str, Any] = {"xanchor": "right", "align": "right", "xshift": -8}


@dataclass
class Drawing:
    """What plotly draws, as plain dictionaries: the panel sends them to its page as they are.

    `plotly.graph_objects` would look at each value of each trace and shape, which takes longer than to draw them.
    """

    layout: dict[str, Any]
    """Without shapes and annotations."""
    traces: list[dict[str, Any]] = field(default_factory=list)
    """Scatter traces, in their order."""
    shapes: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    labels: list[tuple[float, float, float, float]] = field(default_factory=list)
    """What the label of each peak covers, in the units of the axes: left, right, bottom and top."""

    @classmethod
    def of(cls, figure: go.Figure) -> Self:
        """Returns what a figure of plotly draws."""
        return cls(figure.layout.to_plotly_json(), [trace.to_plotly_json() for trace in figure.data])

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plotly's JSON names its parts: ``data`` and ``layout``."""
        marks = {"shapes": self.shapes, "annotations": self.annotations}
        return {"data": self.traces, "layout": self.layout | {name: each for name, each in marks.items() if each}}

    def figure(self) -> go.Figure:
        """Returns it as plotly's figure, which checks its values."""
        return go.Figure(self.to_dict())


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises a ValueError if a value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}: choose one of them")


def timeline_of(record: StepRecord | WatchRecord) -> Timeline | None:
    """Returns the record's timeline; None if it has no event, or ended before it had a timeline."""
    if isinstance(record, WatchRecord):
        return record.ended_timeline if len(record.ended_timeline) else None
    if record.timeline is None and record.status == "ok":
        raise ValueError(
            f"the record of step {record.step_index} ({record.settings}) has no timeline, which a figure draws: "
            "take the step again, load a folder that has a timeline.npz, or print record_table(record)"
        )
    return record.timeline if record.timeline is not None and len(record.timeline) else None


def messages(records: Sequence[StepRecord | WatchRecord]) -> list[str]:
    """Describes how each step that did not finish ended, and what to do."""
    return [f"{record.status.replace('_', ' ')}: {record.message}" for record in records if record.status != "ok"]


def frame(
    title: str,
    lines: Sequence[str],
    x_title: str,
    y_title: str,
    *,
    plot_height: int = PLOT_HEIGHT,
    band_height: int = 0,
    floor_height: int = 0,
    num_legend_lines: int = 2,
) -> Drawing:
    """Returns a drawing without traces: text, axes, and space for the legend and for bands above and below the plot."""
    rows = [row for line in lines for row in folded(line)]
    top, bottom = 48 + 19 * len(rows) + band_height, 55 + 19 * num_legend_lines + floor_height
    text = "".join([f"<b>{title}</b>", *(f'<br><span style="font-size:13px">{row}</span>' for row in rows)])
    axis: dict[str, Any] = {"gridcolor": GRID, "linecolor": INK, "zeroline": False, "ticks": "outside", "range": [0, 1]}
    return Drawing(
        layout={
            "template": {},
            "title": {"text": text, "font": {"size": 15}, "pad": {"l": 12, "t": 20}}
            | {"x": 0.0, "xanchor": "left", "y": 1.0, "yanchor": "top"},
            "font": {"color": INK, "size": 12},
            "paper_bgcolor": TRANSPARENT,
            "plot_bgcolor": TRANSPARENT,
            "height": top + plot_height + bottom,
            "margin": {"l": 70, "r": 20, "t": top, "b": bottom},
            "xaxis": axis
            | {"title": {"text": x_title, "standoff": 6}, "showgrid": False, "hoverformat": ".2~f"}
            | ({"ticks": "", "ticklabelstandoff": floor_height} if floor_height else {}),
            "yaxis": axis | {"title": {"text": y_title, "standoff": 8}, "showline": True, "tickformat": "~f"},
            "legend": {"orientation": "h", "x": 0.0, "y": -(50 + floor_height) / plot_height, "yanchor": "top"}
            | {"itemwidth": 40, "traceorder": "normal"},
            "hovermode": "x unified",
            "modebar": {"bgcolor": TRANSPARENT, "color": INK, "activecolor": INK},
            "hoverlabel": {"bgcolor": "white", "bordercolor": INK, "font": {"color": "#333333"}},
        }
    )


def blank(title: str, lines: Sequence[str]) -> Drawing:
    """Returns a frame whose axes promise no numbers."""
    drawing = frame(title, lines, "", "")
    for axis in ("xaxis", "yaxis"):
        drawing.layout[axis] |= {"showticklabels": False, "ticks": "", "showgrid": False}
    return drawing


def folded(text: str, letters: int = _LETTERS_ACROSS) -> list[str]:
    """Breaks a line between its words and after a plus sign, and escapes what plotly would read as HTML."""
    lines = textwrap.wrap(text.replace("+", "+\t"), letters, break_on_hyphens=False, expand_tabs=False, tabsize=1)
    return [html.escape(line.replace("+ ", "+"), quote=False) for line in lines]


def axis_end(drawn: Sequence[DrawnPoints]) -> float:
    """Returns where the axis of some steps ends; above 0."""
    return max(points.end for points in drawn) or 1.0


def set_ranges(
    drawing: Drawing, end: float, floor: float, highest: float, num_lines: int, plot_height: int = PLOT_HEIGHT
) -> float:
    """Gives the axes their ranges, with space for a label of some lines above the highest point, and after the last.

    Returns:
        Pixels for one unit of the bytes axis.
    """
    space = plot_height - 16 - num_lines * LINE_HEIGHT
    headroom = plot_height / space
    drawing.layout["xaxis"]["range"] = [0.0, end * (1 + SHARE_AFTER_END)]
    drawing.layout["yaxis"]["range"] = [floor, floor + ((highest - floor) * headroom or 1.0)]
    return space / ((highest - floor) or 1.0)


def drawn_values(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Halves what a notebook stores of a figure; seven digits are more than a hover shows."""
    return values.astype(np.float32)


def phase_names(timeline: Timeline, points: DrawnPoints) -> list[str]:
    """Returns the phase of each drawn point."""
    return [PHASES[code] for code in timeline.phase[points.event_index]]


def mark_peak(
    drawing: Drawing,
    points: DrawnPoints,
    unit_bytes: int,
    text: str,
    end: float,
    *,
    shift: float = 0.0,
    colour: str = INK,
    plot_height: int = PLOT_HEIGHT,
) -> None:
    """Marks a peak and writes next to it, on the side that has more space."""
    x, y = float(points.position[points.peak]), int(points.total_bytes[points.peak]) / unit_bytes
    marker = {"symbol": "diamond", "size": 10, "color": colour, "line": {"color": "white", "width": 1.5}}
    hidden = {"cliponaxis": False, "showlegend": False, "hoverinfo": "skip"}
    drawing.traces.append({"x": [x], "y": [y], "mode": "markers", "marker": marker} | hidden)
    below = _bytes_beside(points, end) / unit_bytes
    if below < y:  # the mark's white border covers so narrow a peak
        ends = {"x0": x, "x1": x, "y0": below, "y1": y}
        drawing.shapes.append(ends | {"type": "line", "line": {"color": colour, "width": 1.2}})
    is_right = x < end / 2
    place = (LABEL_ON_THE_RIGHT if is_right else _LABEL_ON_THE_LEFT) | {"yanchor": "bottom", "yshift": shift}
    drawing.annotations.append({"x": x, "y": y, "text": text, "showarrow": False, "font": {"color": colour}} | place)
    lines = [html.unescape(re.sub("<[^>]+>", "", line)) for line in text.split("<br>")]
    width = (max(map(len, lines)) + 2) * _USUAL_LETTER_SHARE * end
    low, high = drawing.layout["yaxis"]["range"]
    bottom, top = (y + pixels * (high - low) / plot_height for pixels in (shift, shift + len(lines) * LINE_HEIGHT))
    drawing.labels.append((x, x + width, bottom, top) if is_right else (x - width, x, bottom, top))


def _bytes_beside(points: DrawnPoints, end: float) -> int:
    """Returns the bytes of the curve right beside its peak; less than the peak's if that is narrower than a pixel."""
    totals, peak = points.total_bytes, points.peak
    x = points.position[peak]
    before = int(np.searchsorted(points.position, x - _PIXEL_SHARE * end)) - 1
    after = int(np.searchsorted(points.position, x + _PIXEL_SHARE * end, side="right")) - 1
    return max(int(totals[max(before, 0)]), int(totals[after]))


def interrupt_lines(drawing: Drawing) -> None:
    """Leaves out of each vertical line what would strike through the label of a peak."""
    drawing.shapes = [part for shape in drawing.shapes for part in _around_labels(drawing, shape)]


def _around_labels(drawing: Drawing, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if shape["type"] != "line" or shape["x0"] != shape["x1"]:
        yield shape
        return
    low, high = drawing.layout["yaxis"]["range"] if shape.get("yref") == "paper" else (0.0, 1.0)
    start = shape["y0"]
    for left, right, *across in sorted(drawing.labels, key=lambda label: label[2]):
        bottom, top = ((y - low) / (high - low) for y in across)
        if left < shape["x0"] < right and start < top and bottom < shape["y1"]:
            if start < bottom:
                yield shape | {"y0": start, "y1": bottom}
            start = top
    if start < shape["y1"]:
        yield shape | {"y0": start}


def mark_floor(drawing: Drawing, text: str) -> None:
    """Draws a band below the plot that says what is below the start of the bytes axis."""
    band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "paper", "ysizemode": "pixel", "yanchor": 0.0}
    drawing.shapes.append(
        band | {"y0": 0, "y1": -FLOOR_HEIGHT, "fillcolor": INK, "opacity": 0.14, "line": {"width": 0}}
    )
    place = {"xref": "paper", "x": 0.0, "xanchor": "left", "yref": "paper", "y": 0.0, "yanchor": "middle"}
    shift = {"xshift": 4, "yshift": -FLOOR_HEIGHT / 2}
    drawing.annotations.append({"text": text, "showarrow": False, "font": {"size": 11}} | place | shift)


def mark_phases(drawing: Drawing, spans: Sequence[PhaseSpan], end: float) -> None:
    """Draws a band above the plot with the phases' names, where they fit, and a line between two phases."""
    band = {"type": "rect", "yref": "paper", "ysizemode": "pixel", "yanchor": 1.0, "y0": 3, "y1": 3 + BAND_HEIGHT}
    line = {"type": "line", "yref": "paper", "y0": 0.0, "y1": 1.0, "layer": "below"}
    for number, span in enumerate(spans):
        drawing.shapes.append(
            band
            | {"x0": span.start, "x1": span.end, "line": {"width": 0}}
            | {"fillcolor": INK, "opacity": PHASE_OPACITIES[span.phase]}
        )
        if number:
            drawing.shapes.append(
                line | {"x0": span.start, "x1": span.start, "line": {"color": INK, "width": 1, "dash": "dot"}}
            )
        share = (span.end - span.start) / end
        for text in (span.phase, SHORT_PHASES.get(span.phase, span.phase)):
            if share > (len(text) + 1) * LETTER_SHARE:
                place = {"x": (span.start + span.end) / 2, "yref": "paper", "y": 1.0, "yshift": 3 + BAND_HEIGHT / 2}
                drawing.annotations.append(place | {"text": text, "yanchor": "middle", "showarrow": False})
                break
