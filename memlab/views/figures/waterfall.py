"""Bars that lead from the predicted to the measured peak, below the two timelines."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from memlab.analysis.difference import PeakDifference
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.frame import PLOT_HEIGHT
from memlab.views.figures.palette import CATEGORY_LOOKS, GRID, INK, PATTERN_INK, TRANSPARENT
from memlab.views.text.columns import MINUS, ending, in_unit
from memlab.views.text.difference import Row, difference_rows

# Pixels.
_ROW_HEIGHT = 38
_GAP = 12
_BOTTOM = 55
_LETTERS_IN_LABEL = 50
_LABEL_SHARE = 0.46
_BAR_SHARE = 0.5


def add_waterfall(figure: go.Figure, difference: PeakDifference, colours: Sequence[str]) -> None:
    """Adds bars that lead from the predicted peak to the measured one, one per row of the table.

    Args:
        figure: Of the two timelines; it grows downwards.
        difference: Nothing is added where it has no term other than 0.
        colours: Of the predicted and the measured line.
    """
    rows = difference_rows(difference)
    if not rows:
        return
    _grow_downwards(figure, (len(rows) + 2) * _ROW_HEIGHT)
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + row.difference_bytes)
    unit_bytes, unit = binary_unit(max(abs(end) for end in ends))
    space = (max(ends) - min(ends)) * 0.04 / unit_bytes
    figure.update_layout(
        xaxis2={
            **figure.layout.xaxis.to_plotly_json(),
            "anchor": "y2",
            "domain": [_LABEL_SHARE, 1.0],
            "title": {"text": f"allocated above the predicted peak ({unit})", "standoff": 6},
            "range": [min(ends) / unit_bytes - space, max(ends) / unit_bytes + space],
            "showgrid": True,
            "zeroline": True,
            "zerolinecolor": GRID,
        },
        yaxis2={**figure.layout.yaxis2.to_plotly_json(), "anchor": "x2", "range": [len(rows) + 1.7, -0.7]}
        | {"showticklabels": False, "showgrid": False, "ticks": "", "zeroline": False},
    )
    for number, (row, start) in enumerate(zip(rows, ends, strict=False), start=1):
        _add_bar(figure, row, start, number, unit_bytes)
        sign = "+" if row.difference_bytes > 0 else MINUS
        size = f"{sign}{in_unit(abs(row.difference_bytes), unit_bytes)} {unit}"
        words = [row.name, *([ending(row.label, _LETTERS_IN_LABEL).strip()] if row.label else [])]
        _write(figure, number, size, words, INK)
    _add_steps(figure, ends, unit_bytes)
    for side, record, number, end, colour in (
        ("predicted", difference.predicted, 0, 0, colours[0]),
        ("measured", difference.measured, len(rows) + 1, ends[-1], colours[1]),
    ):
        marker = {"symbol": "diamond", "size": 10, "color": colour, "line": {"color": "white", "width": 1.5}}
        figure.add_scatter(
            x=[end / unit_bytes], y=[number], mode="markers", marker=marker, showlegend=False, hoverinfo="skip",
            cliponaxis=False, xaxis="x2", yaxis="y2",
        )  # fmt: skip
        _write(figure, number, format_bytes(record.peak_allocated_bytes), [f"{side} peak"], colour)


def _grow_downwards(figure: go.Figure, height: int) -> None:
    """Lets a figure grow downwards; what is measured in shares of its plot keeps its pixels."""
    margin = figure.layout.margin
    below = int(margin.b) + _GAP
    plots = PLOT_HEIGHT + below + height
    figure.update_layout(
        height=int(margin.t) + plots + _BOTTOM,
        margin={"b": _BOTTOM},
        legend={"y": 1.0 - (PLOT_HEIGHT * (1.0 - figure.layout.legend.y)) / plots},
        yaxis={"domain": [1.0 - PLOT_HEIGHT / plots, 1.0]},
        yaxis2={"domain": [0.0, height / plots]},
    )


def _add_bar(figure: go.Figure, row: Row, start: int, number: int, unit_bytes: int) -> None:
    """Draws a category in its colour and pattern, and what is of none hollow."""
    look = CATEGORY_LOOKS.get(row.name)
    fill = {"color": TRANSPARENT, "line": {"color": INK, "width": 1.5}}
    if look is not None:
        fill = {"color": look.colour, "pattern": {"shape": look.pattern, "fgcolor": PATTERN_INK, "fillmode": "overlay"}}
        fill["line"] = {"color": look.colour, "width": 1}
    figure.add_bar(
        x=[row.difference_bytes / unit_bytes],
        base=[start / unit_bytes],
        y=[number],
        width=[_BAR_SHARE],
        orientation="h",
        marker=fill,
        name=row.name,
        showlegend=False,
        hoverinfo="skip",
        xaxis="x2",
        yaxis="y2",
    )


def _add_steps(figure: go.Figure, ends: Sequence[int], unit_bytes: int) -> None:
    """Joins where one row ends to where the next begins."""
    x: list[float | None] = []
    y: list[float | None] = []
    for number, end in enumerate(ends):
        x += [end / unit_bytes, end / unit_bytes, None]
        y += [number, number + 1, None]
    figure.add_scatter(
        x=x, y=y, mode="lines", line={"color": INK, "width": 1}, showlegend=False, hoverinfo="skip",
        cliponaxis=False, xaxis="x2", yaxis="y2",
    )  # fmt: skip


def _write(figure: go.Figure, number: int, size: str, words: Sequence[str], colour: str) -> None:
    figure.add_annotation(
        x=0.0,
        xref="paper",
        xanchor="left",
        y=number,
        yref="y2",
        yanchor="middle",
        text=f"<b>{html.escape(size)}</b>  {'<br>'.join(html.escape(line, quote=False) for line in words)}",
        showarrow=False,
        align="left",
        font={"color": colour},
    )
