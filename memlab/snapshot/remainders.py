"""What the allocator gave beyond the rounded request: free memory behind it that was too small to split off.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``get_pool``, ``should_split``). Requests up
to 1 MiB have segments of their own, in which every remainder is split off. In the other segments a remainder of up to
1 MiB stays with its block, unsplit. A snapshot's history does not contain it, but the next boundary behind the block
does: the start of the next block in use, or the segment's end.

    remainder = next boundary - address - rounded request,    counted if it is from 0 to 1 MiB

For example, in a segment from 0 to 20 MiB: 6 MiB at 0 and 4.5 MiB at 6 MiB are allocated, the second is freed, and
4 MiB are allocated at 6 MiB. If the next block in use starts at 10.5 MiB, that block has 4.5 MiB: 4 MiB and a
remainder of 0.5 MiB. If it starts at 16 MiB, 6 MiB are free behind the 4 MiB: they were split off, and nothing is
added.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np

from memlab.allocator.rules import SMALL_REQUEST_BYTES, splits_remainder
from memlab.snapshot.allocations import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    Allocations,
    Entries,
    IntArray,
)


def add_unsplit_remainders(
    allocations: Allocations, entries: Entries, segment_ends: Iterable[int], unsplit_from_bytes: int | None = None
) -> IntArray:
    """Adds to each block the remainder that was not split off.

    Args:
        allocations: Those of the entries.
        entries: The history, with the segments that were reserved and returned.
        segment_ends: Addresses behind the segments that exist at the end.
        unsplit_from_bytes: The allocator's ``max_split_size``; blocks of this size and larger are never split.

    Returns:
        Bytes by allocation. They are exact except for blocks over 1 MiB that were allocated before the first entry,
        have been freed since, and had free memory behind them all the time: those may be up to 1 MiB larger.
    """
    (large,) = np.nonzero(allocations.num_bytes > SMALL_REQUEST_BYTES)
    is_from_before = allocations.allocated[large] < 0
    starts = allocations.address[large][is_from_before].tolist()
    boundaries = _Boundaries([*_opening_ends(entries, segment_ends), *starts])
    remainders = _Remainders(allocations, large, boundaries, unsplit_from_bytes)
    for row in np.flatnonzero(is_from_before).tolist():
        remainders.on_existing(row)
    for kind, row in _changes(allocations, entries, large):
        if kind == ALLOC:
            remainders.on_alloc(row)
        elif kind == FREE_COMPLETED:
            remainders.on_free(row)
        elif kind == SEGMENT_GROWS:
            boundaries.add(int(entries.address[row] + entries.num_bytes[row]))
        else:
            boundaries.remove(int(entries.address[row] + entries.num_bytes[row]))
    num_bytes = allocations.num_bytes.copy()
    num_bytes[large] += np.array(remainders.num_bytes, dtype=np.int64)
    return num_bytes


class _Remainders:
    """The remainder of each large block, found as boundaries appear behind it. Rows count large blocks only."""

    def __init__(
        self, allocations: Allocations, large: IntArray, boundaries: _Boundaries, unsplit_from_bytes: int | None
    ) -> None:
        self.num_bytes = [0] * len(large)
        self._boundaries = boundaries
        self._address: list[int] = allocations.address[large].tolist()
        self._rounded: list[int] = allocations.num_bytes[large].tolist()
        self._is_known: list[bool] = allocations.is_in_use[large].tolist()
        """The snapshot itself has the bytes of blocks that exist at the end."""
        self._unsplit_from_bytes = unsplit_from_bytes
        self._open: dict[int, int] = {}
        """Rows by address: blocks from before the first entry, with more free memory behind them than a remainder."""

    def on_existing(self, row: int) -> None:
        """Notes a block that was allocated before the first entry."""
        address = self._address[row]
        if not self._add_remainder(row, self._boundaries.after(address)):
            self._open[address] = row

    def on_alloc(self, row: int) -> None:
        """Notes an allocation. Its start is a boundary: it may show where the block before it ends."""
        address = self._address[row]
        self._add_remainder(row, self._boundaries.after(address))
        before = self._boundaries.at_or_before(address)
        self._boundaries.add(address)
        open_row = self._open.get(before) if before is not None else None
        if open_row is not None and self._add_remainder(open_row, address):
            del self._open[self._address[open_row]]

    def on_free(self, row: int) -> None:
        """Notes that a block's memory is free."""
        self._boundaries.remove(self._address[row])
        self._open.pop(self._address[row], None)

    def _add_remainder(self, row: int, boundary: int | None) -> bool:
        """Adds what is between a block and the boundary behind it, if that was too little to split off."""
        if self._is_known[row] or boundary is None:
            return self._is_known[row]
        remainder = boundary - self._address[row] - self._rounded[row]
        is_unsplit = self._unsplit_from_bytes is not None and self._rounded[row] >= self._unsplit_from_bytes
        if remainder < 0 or (splits_remainder(remainder, in_small_segment=False) and not is_unsplit):
            return False
        self.num_bytes[row] = remainder
        return True


class _Boundaries:
    """Sorted addresses, in buckets, so that a million of them can be added and removed in a short time."""

    _BUCKET = 1000

    def __init__(self, addresses: Iterable[int]) -> None:
        self._buckets: list[list[int]] = [[]]
        self._first = [0]
        """The lowest address that belongs into each bucket; that of the first bucket is not used."""
        for address in sorted(addresses):
            self.add(address)

    def add(self, address: int) -> None:
        """Adds a boundary; one that exists gets a second entry."""
        number = self._bucket_of(address)
        bucket = self._buckets[number]
        bucket.insert(bisect_right(bucket, address), address)
        if len(bucket) > 2 * self._BUCKET:
            # Entries of one address stay in one bucket.
            cut = bisect_left(bucket, bucket[self._BUCKET]) or self._BUCKET
            self._buckets[number : number + 1] = [bucket[:cut], bucket[cut:]]
            self._first.insert(number + 1, bucket[cut])

    def remove(self, address: int) -> None:
        """Removes one entry of a boundary, if there is one."""
        bucket = self._buckets[self._bucket_of(address)]
        at = bisect_left(bucket, address)
        if at < len(bucket) and bucket[at] == address:
            del bucket[at]

    def after(self, address: int) -> int | None:
        """Returns the lowest boundary above an address."""
        number = self._bucket_of(address)
        at = bisect_right(self._buckets[number], address)
        if at < len(self._buckets[number]):
            return self._buckets[number][at]
        return next((bucket[0] for bucket in self._buckets[number + 1 :] if bucket), None)

    def at_or_before(self, address: int) -> int | None:
        """Returns the highest boundary that is not above an address."""
        number = self._bucket_of(address)
        at = bisect_right(self._buckets[number], address)
        if at:
            return self._buckets[number][at - 1]
        return next((bucket[-1] for bucket in self._buckets[:number][::-1] if bucket), None)

    def _bucket_of(self, address: int) -> int:
        return max(0, bisect_right(self._first, address) - 1)


def _opening_ends(entries: Entries, segment_ends: Iterable[int]) -> list[int]:
    """Returns where segments ended before the first entry: those at the end, with every change undone in reverse."""
    ends = set(segment_ends)
    for number in np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))[::-1].tolist():
        end = int(entries.address[number] + entries.num_bytes[number])
        if entries.action[number] == SEGMENT_GROWS:
            ends.discard(end)
        else:
            ends.add(end)
    return sorted(ends)


def _changes(allocations: Allocations, entries: Entries, large: IntArray) -> list[tuple[int, int]]:
    """Returns in order what happened: allocations and frees of large blocks by row, segments by entry number."""
    allocated, completed = allocations.allocated[large], allocations.completed[large]
    segments = np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))
    allocs, frees = np.flatnonzero(allocated >= 0), np.flatnonzero(completed < entries.num_traced)
    order = np.argsort(np.concatenate([allocated[allocs], completed[frees], segments]), kind="stable")
    kind = np.repeat([ALLOC, FREE_COMPLETED], [len(allocs), len(frees)])
    kind = np.concatenate([kind, entries.action[segments]])[order].tolist()
    return list(zip(kind, np.concatenate([allocs, frees, segments])[order].tolist(), strict=True))
