"""Numbered copies of a step's labels; torch's allocator writes the current number into each entry of its history.

Entries of all threads carry the number (``torch.cuda.memory._set_memory_metadata``). It leads from an entry to the
phase and module in which the allocation was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from memlab.meter.labels import Labels


class Stamp(NamedTuple):
    """The labels at one moment; see `Labels`."""

    phase: int
    module: int
    span: int
    recomputing: bool
    category: int | None
    number: int
    """Counted since the meter was made."""


class Stamps:
    """The stamps since the history was last read."""

    def __init__(self, labels: Labels) -> None:
        self.look: tuple[int, Callable[[], None]] | None = None
        """A number of stamps since `start`, and what is called when that many have been made."""
        self._labels = labels
        self._kept: list[Stamp] = []
        self._first = 0
        self._number_at_start = 0

    @property
    def last(self) -> int:
        """The number of the current stamp."""
        return self._first + len(self._kept) - 1

    def put(self) -> None:
        """Makes a stamp of the current labels; entries carry its number from now on."""
        labels, number = self._labels, self.last + 1
        self._kept.append(
            Stamp(labels.phase, labels.module, labels.span, labels.recomputing, labels.known_category, number)
        )
        torch.cuda.memory._set_memory_metadata(str(number))
        if self.look is not None and self.since_start(number) == self.look[0]:
            self.look[1]()

    def start(self) -> None:
        """Counts `since_start` from the current stamp."""
        self._number_at_start = self.last

    def since_start(self, number: int) -> int:
        """Returns how many stamps were made from `start` to the one of this number."""
        return number - self._number_at_start

    def of_start(self, phase: int) -> Stamp:
        """Returns a stamp of the start, for entries without one."""
        return Stamp(phase, 0, 0, False, None, self._number_at_start)

    def find(self, metadata: str | None) -> Stamp | None:
        """Returns the stamp of an entry; None for an entry without a stamp, or whose stamp is no longer kept."""
        number = int(metadata or -1) - self._first
        return self._kept[number] if 0 <= number < len(self._kept) else None

    def forget(self) -> None:
        """Drops all stamps and makes a new one of the current labels."""
        self._first += len(self._kept)
        self._kept.clear()
        self.put()
