"""The result of a search as one plotly figure: the two kinds of extra work over the peak, in one panel each.

A setting is in both panels, at the same peak. A line joins what is on the front by one kind of work alone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.recompute_cost import share_text
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.frame import PLOT_HEIGHT, frame
from memlab.views.figures.palette import GRID, INK, series_look
from memlab.views.text.search import limit_line, short_verdict

CHOICE = "choice"
"""The uids of traces whose points are settings begin with this; their customdata is the place in the result."""

_BELOW_ZERO = 0.06
"""Of a cost axis: a mark on its zero line is inside the plot as a whole, where it can be pointed at."""
_GAP = 0.08
"""Between the two panels, as a share of the plot."""
_PLOT_WIDTH = 484
_PANEL_HEIGHT = PLOT_HEIGHT * 1.5 * (1 - _GAP) / 2
"""Pixels of a panel of the narrowest figure that must stay readable."""
_MARK_RADIUS = 5.0
"""Pixels: of two marks whose centers are closer, one hides the other."""
_MOST_NAMED = 6
"""Of the settings that a mark hides."""
_FITS, _BEYOND = series_look(0).colour, series_look(1).colour
_KINDS = ("nothing", "recompute", "transfer", "both")
_SYMBOLS = dict(zip(_KINDS, ("star", "circle", "square", "diamond"), strict=True))


def search_figure(found: SearchResult) -> go.Figure:
    """Draws all settings that were predicted, the front among them.

    Filled marks fit, open ones do not; the shape says which work a setting does; what is not on the front is faint.
    A number beside a mark counts the settings whose marks overlap there, and the mark's hover text names them.

    Returns:
        A figure without a fixed width. Points carry their place in `SearchResult.points` as customdata.
    """
    unit_bytes, unit = binary_unit(max(point.peak_allocated_bytes for point in found.points))
    transfer_unit_bytes, transfer_unit = binary_unit(max(1, *(point.transferred_bytes for point in found.points)))
    lines = [f"{found.scenario}", short_verdict(found) or "a number beside a mark counts the settings in that place"]
    figure = frame("What fits, and the extra work that it costs", lines, "", "", num_legend_lines=3).figure()
    more = PLOT_HEIGHT // 2
    figure.update_layout(height=figure.layout.height + more, hovermode="closest", legend_y=-50 / (PLOT_HEIGHT + more))
    _axes(figure, f"peak allocated on the device ({unit})", f"host copies<br>each way ({transfer_unit})")
    _set_peak_range(figure, found, unit_bytes)
    for panel, axis in enumerate(("y", "y2")):
        heights = [
            point.recomputed_operations / 1e6 if panel == 0 else point.transferred_bytes / transfer_unit_bytes
            for point in found.points
        ]
        top = max(heights) or 1.0
        figure.layout[axis.replace("y", "yaxis")].range = [-_BELOW_ZERO * top, (1 + _BELOW_ZERO) * top]
        _draw_points(figure, found, heights, axis, unit_bytes)
    return figure


def _axes(figure: go.Figure, x_title: str, transfer_title: str) -> None:
    axis: dict[str, Any] = {"gridcolor": GRID, "linecolor": INK, "zeroline": False, "ticks": "outside"}
    middle = (1 + _GAP) / 2
    rise = {"showline": True, "tickformat": ",~f", "zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1}
    figure.update_layout(
        xaxis={"title": {"text": x_title}, "anchor": "y2", "showgrid": True, "range": None},
        yaxis=rise | {"title": {"text": "recomputed<br>(MFLOP per token)"}, "domain": [middle, 1.0]},
        yaxis2=axis | rise | {"title": {"text": transfer_title, "standoff": 8}, "domain": [0.0, middle - _GAP]},
        margin_l=96,
    )


def _draw_points(figure: go.Figure, found: SearchResult, heights: list[float], axis: str, unit_bytes: int) -> None:
    front, cheapest = found.front, found.cheapest
    together = _overlapping(figure, found, heights, axis, unit_bytes)
    own_kind = "recompute" if axis == "y" else "transfer"
    line = [point for point in front if _kind(point) in ("nothing", own_kind)]
    places = {point: number for number, point in enumerate(found.points)}
    figure.add_scatter(
        x=[point.peak_allocated_bytes / unit_bytes for point in line],
        y=[heights[places[point]] for point in line],
        mode="lines",
        line={"color": INK, "width": 1.5, "shape": "vh"},
        yaxis=axis,
        name="front, counting this extra work alone",
        hoverinfo="skip",
        legendgroup="line",
        showlegend=axis == "y",
    )
    groups: dict[tuple[bool, bool, str], list[Point]] = {}
    for point in found.points:
        groups.setdefault((point in front, point.fits, _kind(point)), []).append(point)
    for (on_front, is_fitting, kind), points in sorted(groups.items()):
        symbol = _SYMBOLS[kind] if is_fitting else f"{_SYMBOLS[kind]}-open"
        colour = (_FITS if is_fitting else _BEYOND) if on_front else INK
        figure.add_scatter(
            x=[point.peak_allocated_bytes / unit_bytes for point in points],
            y=[heights[places[point]] for point in points],
            mode="markers",
            # Faint marks on one another are together as faint as one: the panel's ink would add up to plain black.
            marker={"symbol": symbol, "size": 10 if on_front else 6, "color": colour}
            | {"opacity": 1 if on_front else [1 - 0.6 ** (1 / (1 + len(together[point]))) for point in points]}
            | {"line": {"width": 1.5 if not is_fitting else 0.5, "color": colour if not is_fitting else "white"}},
            yaxis=axis,
            uid=f"{CHOICE}-{axis}-{on_front}-{is_fitting}-{kind}",
            name=f"{_NAMES[kind]}, {'fits' if is_fitting else 'does not fit'}"
            if on_front
            else "faint: not on the front",
            legendgroup=f"{is_fitting} {kind}" if on_front else "faint",
            showlegend=axis == "y" and (on_front or all(trace.legendgroup != "faint" for trace in figure.data)),
            customdata=[places[point] for point in points],
            text=[_hover(point, found.recomputed_share(point), together[point]) for point in points],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
        )
    numbered: list[Point] = []
    for point in front:
        if together[point] and not any(point in together[other] for other in numbered):
            numbered.append(point)
    figure.add_scatter(
        x=[point.peak_allocated_bytes / unit_bytes for point in numbered],
        y=[heights[places[point]] for point in numbered],
        mode="markers+text",
        marker={"size": 10, "opacity": 0},  # the number is beside the mark, not on it
        text=[f"{1 + len(together[point])}" for point in numbered],
        textposition="top right",
        textfont={"color": INK},
        yaxis=axis,
        name="settings in one place",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )
    figure.add_scatter(
        x=[point.peak_allocated_bytes / unit_bytes for point in cheapest],
        y=[heights[places[point]] for point in cheapest],
        mode="markers",
        marker={"symbol": "circle-open", "size": 18, "color": INK, "line": {"width": 2}},
        yaxis=axis,
        name="fits with the least extra work",
        legendgroup="cheapest",
        showlegend=axis == "y" and bool(cheapest),
        hoverinfo="skip",
        cliponaxis=False,
    )


def _overlapping(
    figure: go.Figure, found: SearchResult, heights: list[float], axis: str, unit_bytes: int
) -> dict[Point, list[Point]]:
    """Returns the other points whose marks in a panel are on a point's own, those on the front first."""
    left, right = figure.layout.xaxis.range
    low, high = figure.layout[axis.replace("y", "yaxis")].range
    across, down = _PLOT_WIDTH / (right - left), _PANEL_HEIGHT / (high - low)
    places = {
        point: (point.peak_allocated_bytes / unit_bytes * across, height * down)
        for point, height in zip(found.points, heights, strict=True)
    }
    front = found.front
    front_first = sorted(places, key=lambda point: point not in front)
    return {
        point: [other for other in front_first if other != point and math.dist(place, places[other]) < _MARK_RADIUS]
        for point, place in places.items()
    }


_NAMES = dict(zip(_KINDS, ("no extra work", "recomputes", "copies to the host", "recomputes and copies"), strict=True))


def _kind(point: Point) -> str:
    """The key of the work that a setting does: none, one of the two, or both."""
    if point.recomputed_operations and point.transferred_bytes:
        return "both"
    if point.recomputed_operations:
        return "recompute"
    return "transfer" if point.transferred_bytes else "nothing"


def _hover(point: Point, share: float, together: Sequence[Point]) -> str:
    phase = f" in {point.peak_phase}" if point.peak_phase else ""
    words = [
        html.escape(f"{point.settings}").replace(", ", "<br>"),
        f"peak {format_bytes(point.peak_allocated_bytes)}{phase}{'' if point.fits else ', does not fit'}",
    ]
    if point.recomputed_operations:
        operations = f"{point.recomputed_operations / 1e6:,.3f} MFLOP per token"
        words.append(f"recomputes {share_text(share)} of a step ({operations})")
    if point.transferred_bytes:
        words.append(f"{format_bytes(point.transferred_bytes)} copied to the host, and as many back")
    if together:
        words.append("<i>in the same place:</i>")
        words += [
            html.escape(f"{other.settings}: {format_bytes(other.peak_allocated_bytes)}")
            for other in together[:_MOST_NAMED]
        ]
    if len(together) > _MOST_NAMED:
        words.append(f"and {len(together) - _MOST_NAMED} more")
    return "<br>".join(words)


def _set_peak_range(figure: go.Figure, found: SearchResult, unit_bytes: int) -> None:
    """Gives the peak's axis its range, and draws the limit as a line where it is near enough."""
    peaks = [point.peak_allocated_bytes / unit_bytes for point in found.points]
    low, high = min(peaks), max(peaks)
    spread, limit = (high - low) or high or 1.0, found.limit_bytes / unit_bytes
    is_near = low - spread <= limit <= high + spread
    low, high = min(low, limit) if is_near else low, max(high, limit) if is_near else high
    margin = 0.04 * (high - low or 1.0)
    figure.update_xaxes(range=[low - margin, high + margin])
    words = limit_line(found)
    note: dict[str, Any] = {"showarrow": False, "yref": "paper", "y": 1.0, "yanchor": "bottom", "font": {"color": INK}}
    if is_near:
        figure.add_shape(
            type="line",
            x0=limit,
            x1=limit,
            y0=0,
            y1=1,
            yref="paper",
            line={"color": INK, "width": 2, "dash": "7px,2px"},
        )
        share = (limit - low) / (high - low or 1.0)
        figure.add_annotation(x=limit, text=words, xanchor=("left", "center", "right")[min(2, int(share * 3))], **note)
        return
    is_left = limit < low
    figure.add_annotation(
        x=low - margin if is_left else high + margin,
        xanchor="left" if is_left else "right",
        text=f"{words}, {'left' if is_left else 'right'} of this axis",
        **note,
    )
