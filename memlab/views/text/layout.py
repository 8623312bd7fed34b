"""How every table of text is laid out: columns, units, and lines that no page has to break.

A column is written in one unit, the largest that its largest value fills, so that digits stand under digits.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from memlab.units import GIB, KIB, MIB

LINE_WIDTH = 118
"""Characters; no line of a table is longer."""
NAME_WIDTH = 64
"""Characters of a table's first column, where it holds names of modules."""
SETTING_WIDTH = 27
"""The same, where it holds settings."""

_DECIMALS = {GIB: 3, MIB: 2, KIB: 1, 1: 0}


def in_unit(num_bytes: int, unit_bytes: int) -> str:
    """Writes bytes as a number of a unit, without the unit's name.

    Args:
        num_bytes: A number of bytes, of either sign.
        unit_bytes: As `binary_unit` gives it.

    Returns:
        Such as ``"3.447"``; ``"<0.001"`` for what is there and too little for the unit's decimals.
    """
    decimals = _DECIMALS[unit_bytes]
    text = f"{num_bytes / unit_bytes:.{decimals}f}"
    if num_bytes and not float(text):
        return f"{'-' if num_bytes < 0 else ''}<{10**-decimals:.{decimals}f}"
    return text


def aligned(rows: Sequence[Sequence[str]], first_width: int = NAME_WIDTH) -> list[str]:
    """Sets rows in columns, the first to the left and wrapped, the others to the right."""
    folded = [_folded(row[0], first_width) for row in rows]
    name_width = max(len(line) for lines in folded for line in lines)
    widths = [max(len(cell) for cell in column) for column in list(zip(*rows, strict=True))[1:]]
    lines = []
    for (name, *rest), row in zip(folded, rows, strict=True):
        numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True))
        lines.append("  ".join([f"{name:<{name_width}}", *numbers]).rstrip())
        lines += rest
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Breaks a setting's name between its words and after its plus signs; continued lines are indented."""
    lines = [""]
    for word in re.findall(r"\s*[^\s+]*\+?", text):
        if len(lines[-1] + word) > width and lines[-1].strip():
            lines.append("  " + word.strip())
        else:
            lines[-1] += word
    return lines


def ending(name: str, width: int) -> str:
    """Keeps a long name's end, which tells more than its beginning."""
    return name if len(name) <= width else "  ..." + name[len(name) - width + 5 :]


def wrapped(text: str) -> list[str]:
    """Breaks a sentence into lines of at most `LINE_WIDTH` characters."""
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
