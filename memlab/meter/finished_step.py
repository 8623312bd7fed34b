"""A step that has ended, and what it has to do with the next one: which storages took the places of which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import is_not, not_

import numpy as np
import numpy.typing as npt

from memlab.meter.allocations import Allocation, Opening, StorageAllocation


class Found:
    """What is allocated at one moment: the storages in the order of their births, with requested bytes and pools."""

    __slots__ = ("live", "pools", "sizes")

    def __init__(self, live: list[StorageAllocation], sizes: list[int], pools: list[int]) -> None:
        self.live, self.sizes, self.pools = live, sizes, pools

    @classmethod
    def now(cls, live: list[StorageAllocation]) -> Found:
        """Reads sizes and pools, which may be others later."""
        return cls(live, [each.requested_bytes for each in live], [each.pool for each in live])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Found):
            return NotImplemented
        return self.live == other.live and self.sizes == other.sizes and self.pools == other.pools

    __hash__ = None  # type: ignore[assignment]

    def divided(self, other: Found) -> tuple[list[tuple[StorageAllocation, int, int]], Found]:
        """Returns what is not among the others, with requested bytes and pool, and what is."""
        first = _num_same(self.live, other.live)
        known = set(map(id, other.live[first:]))
        is_known = [id(each) in known for each in self.live[first:]]
        rows = zip(self.live[first:], self.sizes[first:], self.pools[first:], strict=True)
        outside = list(compress(rows, map(not_, is_known)))
        live = self.live[:first] + list(compress(self.live[first:], is_known))
        sizes = self.sizes[:first] + list(compress(self.sizes[first:], is_known))
        pools = self.pools[:first] + list(compress(self.pools[first:], is_known))
        return outside, Found(live, sizes, pools)


def _num_same(first: Sequence[Allocation], second: Sequence[Allocation]) -> int:
    """Returns how many storages at the beginning of two lists are the same: nearly all stay from step to step."""
    return next(compress(count(), map(is_not, first, second)), min(len(first), len(second)))


class FinishedStep:
    """A step that has ended. It pairs each storage that the step found with the one that the step left in its place.

    The first storages of the opening stay from step to step: their numbers are their places among what is allocated.
    A large model has 75,000 of them, so nothing else is stored for them. The others are looked up by their numbers.
    """

    def __init__(self, columns: npt.NDArray[np.int64], numbers: dict[int, int], opening: Opening) -> None:
        self.columns = columns
        self.num_opening_events = len(opening)
        self._opened: Sequence[Allocation] = opening.allocations
        self._numbers = numbers
        self._num_first = 0
        """How many storages have their places as numbers."""
        self._stay: dict[int, StorageAllocation] = {}
        """What else exists before and after it, by number."""
        self._replaced: list[tuple[int, int, StorageAllocation]] | None = None
        """Number of a storage that the step found and freed, and that of the one that it left in its place."""
        self._left = Found([], [], [])

    def leaves_what_it_found(self, found: Found, left: Found) -> bool:
        """Whether what is allocated now is, storage by storage, what the step found."""
        if self._replaced is not None:  # of an earlier repetition
            return self._left == left
        numbers = self._numbers
        (freed, before), (new, now) = found.divided(left), left.divided(found)
        if [(_kind(old), *then) for old, *then in freed] != [(_kind(each), *now) for each, *now in new]:
            return False
        if before != now:
            return False
        if not {id(each) for each, _, _ in (*freed, *new)} <= numbers.keys():
            return False
        self._left = left
        first = self._num_first = min(_num_same(before.live, left.live), _num_same(self._opened, left.live))
        of_stay = ((numbers.get(id(each)), each) for each in before.live[first:])
        self._stay = {number: each for number, each in of_stay if number is not None}
        pairs = zip(freed, new, strict=True)
        self._replaced = [(numbers[id(old)], numbers[id(each)], each) for (old, _, _), (each, _, _) in pairs]
        self._numbers, self._opened = {}, []
        return True

    def found_by_number(self, numbers: npt.NDArray[np.int64]) -> dict[int, StorageAllocation]:
        """Returns those of some numbers, the smallest first, that a repetition finds."""
        return self._by_number(numbers, self._stay | {old: each for old, _, each in self._replaced or ()})

    def left_by_number(self, numbers: npt.NDArray[np.int64]) -> dict[int, StorageAllocation]:
        """Returns those of some numbers, the smallest first, that a repetition leaves."""
        return self._by_number(numbers, self._stay | {new: each for _, new, each in self._replaced or ()})

    def _by_number(
        self, numbers: npt.NDArray[np.int64], others: Mapping[int, StorageAllocation]
    ) -> dict[int, StorageAllocation]:
        num_first, live = int(np.searchsorted(numbers, self._num_first)), self._left.live
        first, rest = numbers[:num_first].tolist(), numbers[num_first:]
        keys = np.array(list(others), dtype=np.int64)  # not `np.isin`, which may import numpy's masked arrays
        is_wanted = np.searchsorted(rest, keys, side="right") > np.searchsorted(rest, keys)
        return {number: live[number] for number in first} | dict(compress(others.items(), is_wanted))

    def leaves_all(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Whether a repetition leaves the storages of these numbers."""
        others = numbers[numbers >= self._num_first]
        return len(self.left_by_number(others)) == len(others)

    def follow(self, opening: Opening, rows: npt.NDArray[np.int64]) -> None:
        """Makes this the repetition: what it found has new numbers.

        Args:
            rows: Its other rows, with the numbers of this step; they are changed.
        """
        live = self._left.live
        first = min(self._num_first, _num_same(opening.allocations, live))
        self._stay |= {number: live[number] for number in range(first, self._num_first)}
        self._num_first = first
        places = {id(each): place for place, each in enumerate(opening.allocations[first:], first)}
        found = self._stay | {old: each for old, _, each in self._replaced or ()}
        numbers = np.arange(max(int(rows[6].max(initial=0)), len(opening), *found, 0) + 1)
        numbers[np.array(list(found), dtype=np.int64)] = [
            places.get(id(each), number) for number, each in found.items()
        ]
        rows[6] = numbers[rows[6]]
        renumbered = numbers.tolist()
        self._stay = {renumbered[number]: each for number, each in self._stay.items()}
        self._replaced = [(renumbered[old], new, each) for old, new, each in self._replaced or ()]
        self.columns = rows  # the former ones are freed first: they may be large
        self.columns = np.concatenate([opening.columns(0), rows], axis=1)


def _kind(allocation: StorageAllocation) -> tuple[int, int, bool, int | None]:
    return allocation.module, allocation.phase, allocation.recomputed, allocation.category
