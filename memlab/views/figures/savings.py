"""What is on the device between two steps, and what each step adds up to its peak: one horizontal bar per step."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping

import plotly.graph_objects as go

from memlab.record.step_record import StepRecord
from memlab.units import binary_unit
from memlab.views.figures.frame import PLOT_HEIGHT, frame, messages
from memlab.views.figures.palette import GRID, INK, series_look
from memlab.views.figures.peaks import common_words
from memlab.views.text.columns import in_unit
from memlab.views.text.compare import peak_phase

_BAR_HEIGHT = 34
_LETTERS_OF_A_NAME = 24
_PIXELS_OF_A_LETTER = 6.5
_LETTERS_OF_A_PEAK = 19
"""To the right of the bars are their peaks and phases, such as ``335.955 (optimizer)``."""
_SPACE_BEHIND = 1.02


def savings_figure(records: Mapping[str, StepRecord]) -> go.Figure:
    """Draws each step as a bar of two parts, the first step at the top, with lines at its start and its peak.

    Args:
        records: At least one, by the name that its bar gets; none needs a timeline.
    """
    every = [*records.values()]
    highest = max(record.peak_allocated_bytes for record in every)
    unit_bytes, unit = binary_unit(highest)
    title = "Allocated between two steps, and at the peak of a step"
    lines = [*common_words(records), "dotted: start and peak of the first row", *messages(every)]
    figure = frame(title, lines, f"allocated on the device ({unit})", "", num_legend_lines=1).figure()
    places = list(range(len(records)))
    starts = [record.static_bytes / unit_bytes for record in every]
    added = [(record.peak_allocated_bytes - record.static_bytes) / unit_bytes for record in every]
    colour = series_look(0).colour
    bar = {"y": places, "orientation": "h", "hovertemplate": f"%{{x:.3f}} {unit}"}
    figure.add_bar(x=starts, name="when the step starts", marker={"color": colour, "line": {"width": 0}}, **bar)
    pattern = {"shape": "/", "bgcolor": "rgba(10, 147, 150, 0.25)", "fgcolor": colour, "size": 7, "solidity": 0.25}
    figure.add_bar(
        x=added,
        name="added up to the peak",
        marker={"color": colour, "pattern": pattern, "line": {"color": colour, "width": 1}},
        **bar,
    )
    names = [textwrap.wrap(name, _LETTERS_OF_A_NAME) for name in records]
    for place, record in zip(places, every, strict=True):
        phase = peak_phase(record)
        text = in_unit(record.peak_allocated_bytes, unit_bytes) + ("" if phase == "-" else f" ({phase})")
        where = {"xref": "paper", "x": 1.0, "xanchor": "left", "xshift": 6}
        figure.add_annotation(y=place, text=text, showarrow=False, **where)
    for at in (starts[0], starts[0] + added[0]):
        line = {"color": INK, "width": 1.5, "dash": "dot"}
        figure.add_shape(type="line", yref="paper", x0=at, x1=at, y0=0.0, y1=1.0, line=line)
    height = _BAR_HEIGHT * len(records)
    letters = max(len(line) for lines_of_name in names for line in lines_of_name)
    figure.update_xaxes(
        range=[0.0, highest * _SPACE_BEHIND / unit_bytes or 1.0], showgrid=True, gridcolor=GRID, tickformat="~f"
    )
    ticks = ["<br>".join(html.escape(line, quote=False) for line in lines_of_name) for lines_of_name in names]
    figure.update_yaxes(range=[len(records) - 0.5, -0.5], tickvals=places, ticktext=ticks, ticks="", showgrid=False)
    return figure.update_layout(
        barmode="stack",
        bargap=0.35,
        hovermode="y unified",
        height=figure.layout.height - PLOT_HEIGHT + height,
        margin={"l": 24 + _PIXELS_OF_A_LETTER * letters, "r": _PIXELS_OF_A_LETTER * _LETTERS_OF_A_PEAK},
        legend={"y": -50 / height},
    )
