"""What makes up the peaks of several steps, one bar each: ranks of a job, layouts, or settings side by side."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping

import plotly.graph_objects as go

from memlab.record.step_record import StepRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.frame import LINE_HEIGHT, PLOT_HEIGHT, frame, messages
from memlab.views.figures.palette import CATEGORY_LOOKS, INK, PATTERN_INK
from memlab.views.text.columns import in_unit
from memlab.views.text.compare import gpu_name, peak_phase

_LETTERS_OF_NAMES = 96
"""Across the plot."""
_SPACE_ABOVE = 1.06
_MOST_ABOVE = 1.35
"""A GPU that leaves more than this times the highest peak is described in words: its line would press the bars flat."""


def peak_figure(records: Mapping[str, StepRecord], limits: Mapping[str, int]) -> go.Figure:
    """Draws each step's allocated peak as a bar of its categories; below it are its name, bytes and phase.

    Args:
        records: At least one, by the name that its bar gets; none needs a timeline.
        limits: Bytes that a GPU leaves for torch, by the GPU's size; each is a line.
    """
    highest = max(record.peak_allocated_bytes for record in records.values())
    unit_bytes, unit = binary_unit(highest)
    drawn = {size: limit for size, limit in limits.items() if limit <= _MOST_ABOVE * highest}
    above = ", ".join(
        f"{gpu_name(size)} ({format_bytes(limit)})" for size, limit in limits.items() if size not in drawn
    )
    left = "dashed: left for torch" if drawn else "left for torch" if above else ""
    line = left + (f"; above all bars: {above}" if drawn and above else f", above all bars: {above}" if above else "")
    title = "What makes up each step's peak of allocated bytes"
    figure = frame(title, [*common_words(records), line, *messages([*records.values()])], "", f"peak ({unit})").figure()
    places = list(range(len(records)))
    for category, look in CATEGORY_LOOKS.items():
        sizes = [record.peak_by_category.get(category, 0) for record in records.values()]
        if any(sizes):
            figure.add_bar(
                x=places,
                y=[size / unit_bytes for size in sizes],
                name=category,
                marker={"color": look.colour, "line": {"width": 0}}
                | {
                    "pattern": {"shape": look.pattern, "bgcolor": look.colour, "fgcolor": PATTERN_INK}
                    | {"size": 7, "solidity": 0.25}
                },
                hovertemplate=f"%{{y:.3f}} {unit}",
            )
    top = max([highest, *drawn.values()]) * _SPACE_ABOVE / unit_bytes or 1.0
    _mark_limits(figure, {size: limit / unit_bytes for size, limit in drawn.items()}, top, unit)
    width = max(10, _LETTERS_OF_NAMES // len(records))
    names = []
    for name, record in records.items():
        peak = f"{in_unit(record.peak_allocated_bytes, unit_bytes)} {unit}"
        peak = f"<b>{peak}</b>" if record.peak_allocated_bytes == highest else peak
        names.append("<br>".join([*_folded(name, width), peak, f"({peak_phase(record)})"]))
    most_lines = max(name.count("<br>") for name in names)
    figure.update_xaxes(range=[-0.6, len(records) - 0.4], tickvals=places, ticktext=names, ticks="", tickangle=0)
    figure.update_yaxes(range=[0.0, top])
    bottom = figure.layout.margin.b + 16 * most_lines
    figure.update_layout(
        barmode="stack", bargap=0.35, height=figure.layout.height + 16 * most_lines, margin={"r": 90, "b": bottom}
    )
    return figure.update_layout(legend={"y": -(45 + 16 * most_lines) / PLOT_HEIGHT})


def common_words(records: Mapping[str, StepRecord]) -> list[str]:
    """Names what all steps have in common: the words of the scenario and the settings that are in every one."""
    every = [[*str(record.scenario).split(", "), f"settings: {record.settings}"] for record in records.values()]
    return [", ".join(word for word in every[0] if all(word in words for words in every))]


def _folded(name: str, letters: int) -> list[str]:
    return [html.escape(line, quote=False) for line in textwrap.wrap(name, letters)]


def _mark_limits(figure: go.Figure, limits: Mapping[str, float], top: float, unit: str) -> None:
    """Draws one line per limit with the GPU's name and the limit at the end, no name over another."""
    line = {"color": INK, "width": 1.5, "dash": "7px,3px"}
    place = {"xref": "paper", "x": 1.0, "xanchor": "left", "xshift": 6, "showarrow": False}
    free = 0.0  # pixels above the axis, above which there is no name
    for size, height in sorted(limits.items(), key=lambda limit: limit[1]):
        figure.add_shape(type="line", xref="paper", x0=0.0, x1=1.0, y0=height, y1=height, line=line)
        at = height / top * PLOT_HEIGHT
        free = max(free, at) + 2 * LINE_HEIGHT
        text = f"{gpu_name(size)}:<br>{height:.1f} {unit} left"
        figure.add_annotation(y=height, yshift=free - 2 * LINE_HEIGHT - at, text=text, align="left", **place)
