"""Reads a text file beside a job, such as a version's, in bounded time and memory."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path

_MOST_BYTES = 2 * 2**20
"""More than any source or list of requirements that memlab looks into."""


def text_of(path: Path) -> str | None:
    """Returns the beginning of a file's text; None where it cannot be read or is no file, such as a pipe."""
    if not isfile(path):  # noqa: PTH113  # Path.is_file raises if a folder, such as /root, cannot be entered
        return None
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
