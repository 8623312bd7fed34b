"""What the device holds of parameters, gradients and optimizer state at several moments: bars, or step lines."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping

import plotly.graph_objects as go

from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import binary_unit
from memlab.views.figures.frame import LINE_HEIGHT, PLOT_HEIGHT, frame
from memlab.views.figures.palette import CATEGORY_LOOKS, PATTERN_INK, series_look
from memlab.views.text.columns import in_unit

_LETTERS_OF_NAMES = 90
"""Across the plot."""
_SPACE_ABOVE = 1.12
"""For the sum above the highest bar."""


def residency_figure(audits: Mapping[str, ResidencyAudit]) -> go.Figure:
    """Draws the device bytes of each audit, by its moment's name, as a bar of its groups, with the sum above it."""
    sums = {name: sum(audit.device_bytes(group) for group in GROUPS) for name, audit in audits.items()}
    unit_bytes, unit = binary_unit(max(sums.values()))
    figure = frame("What the device holds at each moment", [], "", f"allocated ({unit})").figure()
    places = list(range(len(audits)))
    for group in GROUPS:
        look = CATEGORY_LOOKS[group]
        pattern = {"shape": look.pattern, "bgcolor": look.colour, "fgcolor": PATTERN_INK, "size": 7, "solidity": 0.25}
        figure.add_bar(
            x=places,
            y=[audit.device_bytes(group) / unit_bytes for audit in audits.values()],
            name=group,
            marker={"color": look.colour, "line": {"width": 0}, "pattern": pattern},
            hovertemplate=f"%{{y:.3f}} {unit}",
        )
    for place, size in zip(places, sums.values(), strict=True):
        figure.add_annotation(
            x=place, y=size / unit_bytes, text=f"<b>{in_unit(size, unit_bytes)}</b>", yanchor="bottom", showarrow=False
        )
    letters = max(9, _LETTERS_OF_NAMES // len(audits))
    folded = [
        [html.escape(line, quote=False) for line in textwrap.wrap(name, letters, break_long_words=False)]
        for name in audits
    ]
    most_lines = max(map(len, folded))
    figure.update_xaxes(range=[-0.6, len(audits) - 0.4], tickvals=places, ticktext=["<br>".join(n) for n in folded])
    figure.update_xaxes(ticks="", tickangle=0)
    figure.update_yaxes(range=[0.0, max(sums.values()) * _SPACE_ABOVE / unit_bytes or 1.0])
    more = LINE_HEIGHT * (most_lines - 1)
    return figure.update_layout(
        barmode="stack",
        bargap=0.3,
        height=figure.layout.height + more,
        margin={"b": figure.layout.margin.b + more},
        legend={"y": -(45 + more) / PLOT_HEIGHT},
    )


def residency_lines_figure(runs: Mapping[str, Mapping[str, ResidencyAudit]]) -> go.Figure:
    """Draws the device bytes of several versions of a program as step lines over the same moments.

    Args:
        runs: At least one, by the name of the version; each has audits by the same names of moments, in their order.

    Returns:
        A figure without a fixed width. Each step has its sum above it; equal sums of a moment have one label.
    """
    moments = [*next(iter(runs.values()))]
    sums = {
        name: [sum(audits[moment].device_bytes(group) for group in GROUPS) for moment in moments]
        for name, audits in runs.items()
    }
    most = max(max(sizes) for sizes in sums.values())
    unit_bytes, unit = binary_unit(most)
    drawing = frame("What the device holds from moment to moment", [], "", f"allocated ({unit})", num_legend_lines=1)
    figure = drawing.figure()
    for position, (name, sizes) in enumerate(sums.items()):
        look = series_look(position)
        figure.add_scatter(
            x=[end for place in range(len(moments)) for end in (place - 0.5, place + 0.5)],
            y=[size / unit_bytes for size in sizes for _ in range(2)],
            name=name,
            mode="lines",
            line={"color": look.colour, "dash": look.dash, "width": 3},
            hovertemplate=f"%{{y:.3f}} {unit}",
        )
    for place in range(len(moments)):
        for size in sorted({sizes[place] for sizes in sums.values()}):
            label = {"x": place, "y": size / unit_bytes, "text": f"<b>{in_unit(size, unit_bytes)}</b>"}
            figure.add_annotation(label | {"yanchor": "bottom", "showarrow": False})
    names = [html.escape(moment, quote=False) for moment in moments]
    figure.update_xaxes(range=[-0.55, len(moments) - 0.45], tickvals=[*range(len(moments))], ticktext=names, ticks="")
    figure.update_yaxes(range=[-0.02 * most / unit_bytes, most * _SPACE_ABOVE / unit_bytes or 1.0])
    return figure.update_layout(hovermode="closest")
