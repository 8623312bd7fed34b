"""Bytes over the steps of several runs: a small chart per run, with lines for starts, peaks and residuals."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord
from memlab.units import binary_unit
from memlab.views.figures.frame import frame
from memlab.views.figures.palette import series_look

_COLUMNS = 2
_COLUMN_GAP = 0.09
_SPACE_ABOVE = 1.12
_LINES = {
    "peak of the step": ("peak_allocated_bytes", "diamond"),
    "start of the step": ("static_bytes", "circle"),
    "residual after the step": ("residual_bytes", "square"),
}
"""What is drawn: a field of the record, and the mark of its points."""
# Pixels.
_SMALL_HEIGHT = 130
_ROW_GAP = 62
_HEAD_HEIGHT = 24


def over_steps_figure(runs: Mapping[str, Sequence[StepRecord | WatchRecord]]) -> go.Figure:
    """Draws a small chart per run; each has axes of its own, and its bytes axis starts at 0.

    Args:
        runs: At least one, by its name; the steps of each in their order. No record needs a timeline.
    """
    num_rows = math.ceil(len(runs) / _COLUMNS)
    height = _HEAD_HEIGHT + num_rows * _SMALL_HEIGHT + (num_rows - 1) * _ROW_GAP
    figure = frame(
        "Device memory over the steps of each run", [], "", "", plot_height=height, num_legend_lines=1
    ).figure()
    x, y = figure.layout.xaxis.to_plotly_json(), figure.layout.yaxis.to_plotly_json()
    width = (1.0 - _COLUMN_GAP * (_COLUMNS - 1)) / _COLUMNS if len(runs) > 1 else 1.0
    axes: dict[str, Any] = {}
    notes = []
    for at, (name, records) in enumerate(runs.items()):
        row, column = divmod(at, _COLUMNS)
        left = column * (width + _COLUMN_GAP)
        top = 1.0 - (_HEAD_HEIGHT + row * (_SMALL_HEIGHT + _ROW_GAP)) / height
        number = "" if at == 0 else str(at + 1)
        series = {title: [getattr(record, field) for record in records] for title, (field, _) in _LINES.items()}
        peaks = series[next(iter(_LINES))]
        unit_bytes, unit = binary_unit(max(peaks))
        axes[f"xaxis{number}"] = x | {
            "domain": [left, left + width],
            "anchor": f"y{number}",
            "range": [-0.3, len(records) - 0.7],
            "title": {"text": "step", "standoff": 4},
            "tickformat": "d",
            "nticks": min(13, len(records) + 1),
            "showline": True,
            "hoverformat": "d",
        }
        axes[f"yaxis{number}"] = y | {
            "domain": [max(0.0, top - _SMALL_HEIGHT / height), top],
            "anchor": f"x{number}",
            "range": [0.0, max(peaks) * _SPACE_ABOVE / unit_bytes],
            "nticks": 5,
            "title": {"text": unit, "standoff": 6},
        }
        place = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        for position, (title, sizes) in enumerate(series.items()):
            look = series_look(position)
            figure.add_scatter(
                x=list(range(len(records))),
                y=[size / unit_bytes for size in sizes],
                name=title,
                legendgroup=title,
                showlegend=at == 0,
                mode="lines+markers",
                line={"color": look.colour, "dash": look.dash, "width": 2},
                marker={"symbol": _LINES[title][1], "size": 7, "color": look.colour},
                hovertemplate=f"%{{y:.2f}} {unit}",
                **place,
            )
        head = {"x": left, "xref": "paper", "xanchor": "left", "y": top, "yref": "paper", "yanchor": "bottom"}
        notes.append(head | {"text": f"<b>{html.escape(name, quote=False)}</b>", "showarrow": False, "yshift": 3})
    return figure.update_layout(axes | {"annotations": notes})
