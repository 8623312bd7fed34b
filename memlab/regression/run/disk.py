"""A full disk is a message, not a traceback. What is written goes aside first, so nothing half-written stays."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DiskFullError(Exception):
    """Something could not be written for want of room; the message says what that means and what to do."""


@contextmanager
def full_disk_is_told(folder: Path, consequence: str) -> Iterator[None]:
    """Turns the operating system's error for a full disk, or a full quota, into a `DiskFullError`.

    Args:
        folder: Where the block writes.
        consequence: What is left of its work, and what to do.

    Raises:
        DiskFullError: If there was no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise DiskFullError(f"no room left in {folder} ({error.strerror}): {consequence}") from error
