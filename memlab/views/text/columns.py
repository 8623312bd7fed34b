"""How tables are written: columns, units, and lines that no page has to break; as plain text and as HTML.

What a table says is a list of blocks, each a group of sentences or a `Table`; `as_text` and `as_html` write the same
blocks. A column has one unit, the largest that its largest value fills, so that digits are under digits.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from memlab.units import GIB, KIB, MIB

LINE_WIDTH = 118
"""Characters; no line of a table is longer."""
NAME_WIDTH = 64
"""Characters of a table's first column, where it holds names of modules."""
SETTING_WIDTH = 27
"""The same, where it holds settings."""

MINUS = "\N{MINUS SIGN}"
"""Before a negative number on a page; plain text has a hyphen, which a reader can search for and a program can read."""
_NEGATIVE = re.compile(r"(?<![\w.])-(?=\d|&lt;)")

_DECIMALS = {GIB: 3, MIB: 2, KIB: 1, 1: 0}

# The widest table, `compare`, has eleven columns: these paddings fit it into JupyterLab on a screen of 1280 pixels.
_HTML_CELL = "padding:.25em .4em;vertical-align:bottom"
_HTML_NAME = f"{_HTML_CELL};text-align:left;min-width:8em;max-width:36em;overflow-wrap:break-word"
_HTML_NUMBER = f"{_HTML_CELL};text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells: names in the first column, numbers in the others."""

    rows: Sequence[Sequence[str]]
    num_head_rows: int = 1
    first_width: int = NAME_WIDTH
    """Characters; a longer name is wrapped."""


Block = Table | Sequence[str]
"""A table, or sentences that each start a line of their own."""


def as_text(blocks: Sequence[Block]) -> str:
    """Writes blocks with an empty line between them, in lines of at most `LINE_WIDTH` characters."""
    return "\n\n".join("\n".join(_text_lines(block)) for block in blocks)


def _text_lines(block: Block) -> list[str]:
    if isinstance(block, Table):
        return aligned(block.rows, block.first_width)
    return [line for sentence in block for line in wrapped(sentence)]


def as_html(blocks: Sequence[Block]) -> str:
    """Writes blocks as paragraphs and tables, which a page wraps to its own width."""
    return "".join(_html_of(block) for block in blocks)


def _html_of(block: Block) -> str:
    if not isinstance(block, Table):
        return f"<p>{'<br>'.join(html.escape(sentence.strip(), quote=False) for sentence in block)}</p>"
    heads, rows = block.rows[: block.num_head_rows], block.rows[block.num_head_rows :]
    columns = zip(*heads, strict=True)
    titles = ["<br>".join(html.escape(word, quote=False) for word in column if word) for column in columns]
    head = "".join(_html_cell("th", title, is_first=number == 0) for number, title in enumerate(titles))
    body = "".join(
        f"<tr>{''.join(_html_cell('td', html.escape(cell, quote=False), is_first=not n) for n, cell in enumerate(row))}"
        "</tr>"
        for row in rows
    )
    style = "border-collapse:collapse;margin:.6em 0"
    table = f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def _html_cell(tag: str, content: str, *, is_first: bool) -> str:
    # A name is indented by spaces where it is a part of the row above it.
    content = content.replace("  ", "&emsp;").replace("+", "+<wbr>") if is_first else _NEGATIVE.sub(MINUS, content)
    return f'<{tag} style="{_HTML_NAME if is_first else _HTML_NUMBER}">{content}</{tag}>'


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
    """Keeps a long name's end, which says more than its beginning."""
    return name if len(name) <= width else "  ..." + name[len(name) - width + 5 :]


def wrapped(text: str) -> list[str]:
    """Breaks a sentence into lines of at most `LINE_WIDTH` characters; those after the first are indented more."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
