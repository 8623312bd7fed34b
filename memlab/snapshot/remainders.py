"""What the allocator gave beyond the rounded request: a rest of free memory that is too small to split off.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``get_pool``, ``should_split``). Requests up
to 1 MiB have segments of their own, in which any rest is split off. In the other segments a rest of up to 1 MiB stays
with its block: whatever is free there is larger, and what seems to be a smaller gap is the block's before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np

from memlab.allocator.rules import SMALL_REQUEST_BYTES, splits_remainder
from memlab.snapshot.allocations import ALLOC, FREE_COMPLETED, SEGMENT_GROWS, SEGMENT_SHRINKS, Entries, IntArray, Lives


def bytes_with_rests(
    lives: Lives, entries: Entries, segment_ends: Iterable[int], unsplit_from_bytes: int | None = None
) -> IntArray:
    """Adds to each block the rest that was not split off.

    Args:
        lives: Of the entries.
        entries: The history, with the segments that came and went.
        segment_ends: Where the segments end that are there at the end.
        unsplit_from_bytes: What the allocator's ``max_split_size`` was; blocks as large are never split.

    Returns:
        Bytes by life. They are exact but for blocks over 1 MiB that were there before the first entry, died since, and
        had free memory behind them from the first entry to their death: those may be up to 1 MiB larger.
    """
    (large,) = np.nonzero(lives.num_bytes > SMALL_REQUEST_BYTES)
    is_unborn = lives.born[large] < 0
    starts = lives.address[large][is_unborn].tolist()
    rests = _Rests(lives, large, [*_opening_ends(entries, segment_ends), *starts], unsplit_from_bytes)
    for row in np.flatnonzero(is_unborn).tolist():
        rests.open(row)
    for kind, row in _changes(lives, entries, large):
        if kind == ALLOC:
            rests.bear(row)
        elif kind == FREE_COMPLETED:
            rests.end(row)
        elif kind == SEGMENT_GROWS:
            insort(rests.fences, int(entries.address[row] + entries.num_bytes[row]))
        else:
            _remove(rests.fences, int(entries.address[row] + entries.num_bytes[row]))
    num_bytes = lives.num_bytes.copy()
    num_bytes[large] += np.array(rests.rests, dtype=np.int64)
    return num_bytes


class _Rests:
    """Follows where free memory ends: at the next block in use, or at the segment's end."""

    def __init__(self, lives: Lives, large: IntArray, fences: Iterable[int], unsplit_from_bytes: int | None) -> None:
        self.fences = sorted(fences)
        self.rests = [0] * len(large)
        self._address: list[int] = lives.address[large].tolist()
        self._rounded: list[int] = lives.num_bytes[large].tolist()
        self._is_known: list[bool] = lives.is_there[large].tolist()
        self._unsplit_from_bytes = unsplit_from_bytes
        self._unsettled: dict[int, int] = {}
        """Blocks by address that were there before the first entry, with much behind them that is free now."""

    def open(self, row: int) -> None:
        """Takes in a block that was there before the first entry."""
        behind = bisect_right(self.fences, self._address[row])
        if not self._settle(row, behind):
            self._unsettled[self._address[row]] = row

    def bear(self, row: int) -> None:
        """Takes in a birth; it also tells where the block before it ended."""
        address = self._address[row]
        behind = bisect_right(self.fences, address)
        self._settle(row, behind)
        self.fences.insert(behind, address)
        before = self._unsettled.get(self.fences[behind - 1]) if behind else None
        if before is not None and self._settle(before, behind):
            del self._unsettled[self._address[before]]

    def end(self, row: int) -> None:
        """Gives a block's memory back."""
        _remove(self.fences, self._address[row])
        self._unsettled.pop(self._address[row], None)

    def _settle(self, row: int, behind: int) -> bool:
        """Adds what lies between a block and the fence behind it, if that was too little to split off."""
        if self._is_known[row] or behind == len(self.fences):
            return self._is_known[row]
        rest = self.fences[behind] - self._address[row] - self._rounded[row]
        is_unsplit = self._unsplit_from_bytes is not None and self._rounded[row] >= self._unsplit_from_bytes
        if rest < 0 or (splits_remainder(rest, in_small_segment=False) and not is_unsplit):
            return False
        self.rests[row] = rest
        return True


def _opening_ends(entries: Entries, segment_ends: Iterable[int]) -> list[int]:
    """Walks back from the segments at the end to those before the first entry."""
    ends = set(segment_ends)
    for number in np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))[::-1].tolist():
        end = int(entries.address[number] + entries.num_bytes[number])
        (ends.discard if entries.action[number] == SEGMENT_GROWS else ends.add)(end)
    return sorted(ends)


def _changes(lives: Lives, entries: Entries, large: IntArray) -> list[tuple[int, int]]:
    """Returns in order what happened: births and ends of large blocks by their row, segments by their entry."""
    born, completed = lives.born[large], lives.completed[large]
    segments = np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))
    births, ends = np.flatnonzero(born >= 0), np.flatnonzero(completed < entries.num_traced)
    moment = np.concatenate([born[births], completed[ends], segments])
    order = np.argsort(moment, kind="stable")
    kind = np.repeat([ALLOC, FREE_COMPLETED], [len(births), len(ends)])
    kind = np.concatenate([kind, entries.action[segments]])[order].tolist()
    return list(zip(kind, np.concatenate([births, ends, segments])[order].tolist(), strict=True))


def _remove(fences: list[int], fence: int) -> None:
    at = bisect_left(fences, fence)
    if at < len(fences) and fences[at] == fence:
        del fences[at]
