"""What has ended early keeps what it has found."""

from __future__ import annotations

from typing import Generic, TypeVar

_Found = TypeVar("_Found")


class Interrupted(KeyboardInterrupt, Generic[_Found]):
    """An end by Ctrl-C, or by the error that is its cause."""

    def __init__(self, found: _Found) -> None:
        super().__init__()
        self.found = found
