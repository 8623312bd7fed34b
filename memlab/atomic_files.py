"""Files appear whole or not at all: each is written next to its place, and then renamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to a file; it replaces the file if the block succeeds, and is removed if not."""
    aside = path.with_name(f".memlab-{uuid.uuid4().hex[:8]}{path.suffix[:8]}")
    try:
        with named_in_errors(path):
            yield aside
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to an error of the block that has none: a write to a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a number, the text is all that there is
            error.filename = str(path)
        raise
