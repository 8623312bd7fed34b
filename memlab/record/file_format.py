"""The number that saved records and timelines carry: what a memlab can read, and what it has to refuse."""

from __future__ import annotations

from memlab._version import __version__

FORMAT = 2
"""Raised when an older memlab cannot read, or would misread, what this one writes. Format 2 has the training state.

Files of memlab 0.1.0 have no number, and those of 0.2.0 have number 1. They are read, and what they do not contain has
its default."""


def check_format(number: object, written_by: str) -> None:
    """Refuses a file that a newer memlab wrote.

    Raises:
        ValueError: If the number is above `FORMAT`, or not a format number.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"its format is {number!r}, must be from 1 to {FORMAT}")
    if number > FORMAT:
        raise ValueError(
            f"memlab {written_by} wrote it in format {number}, and this memlab, {__version__}, reads up to format "
            f"{FORMAT}: update memlab"
        )
