"""Where a step stood, each change of it under a number that torch's allocator writes beside its entries.

Entries of all threads carry the number (``torch.cuda.memory._set_memory_metadata``), and the stamp is found by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from memlab.meter.labels import Labels


class Stamp(NamedTuple):
    """The labels of one moment, as `Labels` has them."""

    phase: int
    module: int
    span: int
    recomputing: bool
    category: int | None
    number: int
    """Stamps since the meter began."""


class Stamps:
    """The stamps since the history was last read."""

    def __init__(self, labels: Labels) -> None:
        self.look: tuple[int, Callable[[], None]] | None = None
        """A number of stamps since `start`, and what is called when so many have been put."""
        self._labels = labels
        self._kept: list[Stamp] = []
        self._first = 0
        self._number_at_start = 0

    @property
    def last(self) -> int:
        """The number of the stamp that stands."""
        return self._first + len(self._kept) - 1

    def put(self) -> None:
        """Stamps what comes from now on with the labels as they are."""
        labels, number = self._labels, self.last + 1
        self._kept.append(
            Stamp(labels.phase, labels.module, labels.span, labels.recomputing, labels.known_category, number)
        )
        torch.cuda.memory._set_memory_metadata(str(number))
        if self.look is not None and self.since_start(number) == self.look[0]:
            self.look[1]()

    def start(self) -> None:
        """Counts `since_start` from the stamp that stands."""
        self._number_at_start = self.last

    def since_start(self, number: int) -> int:
        """Returns how many stamps were put from `start` to the one of this number."""
        return number - self._number_at_start

    def of_start(self, phase: int) -> Stamp:
        """Returns a stamp of the start, for entries that carry none."""
        return Stamp(phase, 0, 0, False, None, self._number_at_start)

    def find(self, metadata: str | None) -> Stamp | None:
        """Returns the stamp that an entry carries; None for one that is no longer kept, and for an entry without."""
        number = int(metadata or -1) - self._first
        return self._kept[number] if 0 <= number < len(self._kept) else None

    def forget(self) -> None:
        """Drops all, and stamps anew."""
        self._first += len(self._kept)
        self._kept.clear()
        self.put()
