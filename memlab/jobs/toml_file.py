"""Reads a TOML file as keys with dots, each with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from memlab.config.validation import shortened
from memlab.jobs.entries import Entries

_SECTION = re.compile(r"\s*\[([\w.\-]{1,200})\]")
_KEY = re.compile(r"\s*([\w.\-]{1,200})\s*=")


def read_toml(text: str, name: str) -> Entries:
    """Returns the keys of a file.

    Raises:
        ValueError: If it is no TOML.
    """
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid TOML ({shortened(str(error))}): correct it") from error
    entries, lines = Entries(), _lines(text)
    for key, value in _flat(tree):
        entries.add(key, value, lines.get(key, 1))
    return entries


def _flat(tree: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


def _lines(text: str) -> dict[str, int]:
    """Returns the number of the line on which each key stands by itself; of a key in an inline table there is none."""
    lines, section = dict[str, int](), ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _SECTION.match(line):
            section = f"{found[1]}."
        elif found := _KEY.match(line):
            lines.setdefault(f"{section}{found[1]}", number)
    return lines
