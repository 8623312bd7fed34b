"""What every colour, pattern and dash means, in all figures, panels and reports.

A category has one colour and one pattern everywhere, so that a reader learns them once; colour is never the
only sign. The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/) without the yellow, which
vanishes on white, and with a grey. Phases are named, not coloured: hue is the categories' own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CategoryLook:
    """How a category is filled."""

    colour: str
    """As ``#RRGGBB``."""
    pattern: str
    """A plotly fill pattern; the empty one is a plain fill."""


@dataclass(frozen=True, slots=True)
class SeriesLook:
    """How one of several compared steps is drawn."""

    colour: str
    """As ``#RRGGBB``."""
    dash: str
    """A plotly line dash."""


CATEGORY_LOOKS: dict[str, CategoryLook] = {
    "parameters": CategoryLook("#009E73", "|"),
    "gradients": CategoryLook("#D55E00", "\\"),
    "optimizer state": CategoryLook("#CC79A7", "-"),
    "workspace": CategoryLook("#6B6B6B", "x"),
    "unlabelled": CategoryLook("#B5B5B5", "+"),
    "activations": CategoryLook("#0072B2", ""),
    "recomputed": CategoryLook("#56B4E9", "/"),
    "temporary": CategoryLook("#E69F00", "."),
}
"""In the order in which they are stacked: what stays longest is at the bottom, so that the top shows the shape of a
step."""

PHASE_OPACITIES = {
    "load": 0.40,
    "forward": 0.14,
    "backward": 0.28,
    "optimizer": 0.40,
    "offload": 0.14,
    "idle": 0.05,
    "save": 0.28,
}
"""Of the ink that fills a phase's band along the axis, 0 to 1."""
SHORT_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
"""Used where a phase's name does not fit. *offload* has none: "off" reads as the opposite of "on"."""

INK = "#757575"
"""Text and lines: a grey of 4.6 : 1 on white, where WCAG requires 4.5 for text, and 4.1 : 1 on a dark theme's page."""
GRID = "rgba(123, 123, 123, 0.22)"
PATTERN_INK = "rgba(255, 255, 255, 0.55)"
TRANSPARENT = "rgba(0, 0, 0, 0)"

_SERIES_COLOURS = ("#0A9396", "#E03C1F", "#8A2BE2", "#7F5A43", "#FF3399")
# Narrower gaps than plotly's own dashes have: a spike of a few pixels must not fall into one.
_SERIES_DASHES = ("solid", "7px,2px", "2px,2px", "9px,2px,2px,2px", "15px,3px", "9px,2px,2px,2px,2px,2px")


def series_look(position: int) -> SeriesLook:
    """Returns how the record at a position of a comparison is drawn.

    Its colours are none of the categories'. Five colours against six dashes: no pair comes twice in thirty records.
    """
    return SeriesLook(_SERIES_COLOURS[position % len(_SERIES_COLOURS)], _SERIES_DASHES[position % len(_SERIES_DASHES)])
