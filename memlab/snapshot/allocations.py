"""The lives of the blocks that a snapshot tells of: when each was born and freed, and how large it was.

An entry names an address and the bytes that were asked for. Lives are found by sorting the entries by address, with the
blocks that are there at the end as one more entry each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.allocator.rules import MIN_BLOCK_BYTES

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_GROWS, SEGMENT_SHRINKS, STAYS, STAYS_PENDING = range(7)
"""What an entry does. The last two stand for a block that is there at the end, in use or waiting for a stream."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """A history as columns, what is there at the end behind it. All have the same length."""

    action: npt.NDArray[np.int8]
    address: IntArray
    num_bytes: IntArray
    """As asked for; of segments and of what is there at the end, as they are."""
    num_traced: int
    """How many entries were recorded: what is there at the end has this number and those after it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lives:
    """One row a block. Moments are numbers of entries: -1 is before the first, `Entries.num_traced` after the last."""

    address: IntArray
    num_bytes: IntArray
    is_there: npt.NDArray[np.bool_]
    """Whether it is there at the end, in use or waiting for a stream."""
    born: IntArray
    freed: IntArray
    """When the program gave it back; beyond the end if it never did."""
    completed: IntArray
    """When the allocator had it back; beyond the end if it never had."""
    source: IntArray
    """Number of the entry that tells who made it: its birth, or its place at the end; else what freed it."""


def lives_of(entries: Entries, rounding_bytes: int = MIN_BLOCK_BYTES) -> Lives:
    """Joins births and deaths of equal addresses; bytes are rounded, or as the end has them.

    Where entries contradict each other (recording was off for a while), the later one is believed: what is freed a
    second time was born unseen just before, and a birth where a block is in use ends that block. What has no death and
    is not there at the end dies there. The bytes at the end are those of the snapshot in any case.
    """
    is_block = np.isin(entries.action, (ALLOC, FREE_REQUESTED, FREE_COMPLETED, STAYS, STAYS_PENDING))
    number = np.flatnonzero(is_block)
    number = number[np.argsort(entries.address[number], kind="stable")]
    action, address = entries.action[number], entries.address[number]
    before = np.roll(action, 1)
    is_new_address = np.diff(address, prepend=-1) != 0
    begins = is_new_address | (action == ALLOC) | (before == FREE_COMPLETED)
    begins |= (before == FREE_REQUESTED) & (action != FREE_COMPLETED) & (action != STAYS_PENDING)
    life = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(number)) - 1
    end, never = entries.num_traced, entries.num_traced + 1

    def moment_of(code: int) -> IntArray:
        moments = np.full(len(first), never)
        moments[life[action == code]] = number[action == code]
        return moments

    is_there = action[last] >= STAYS
    born = np.where(is_new_address[first] & (action[first] != ALLOC), -1, np.minimum(number[first], end))
    completed = moment_of(FREE_COMPLETED)
    superseded = np.append(np.where(is_new_address[first[1:]], end, np.minimum(number[first[1:]], end)), end)
    completed = np.where((completed == never) & ~is_there, superseded[: len(first)], completed)
    freed = np.where(action[last] == STAYS, never, np.minimum(completed, end))
    freed = np.where(np.isin(action[first], (FREE_COMPLETED, STAYS_PENDING)), born, freed)
    requested = moment_of(FREE_REQUESTED)
    rounded = -(-entries.num_bytes[number[first]] // rounding_bytes) * rounding_bytes
    return Lives(
        address=address[first],
        num_bytes=np.where(is_there, entries.num_bytes[number[last]], np.maximum(rounded, rounding_bytes)),
        is_there=is_there,
        born=born,
        freed=np.where(requested == never, freed, requested),
        completed=completed,
        source=np.where(is_there & (action[first] != ALLOC), number[last], number[first]),
    )
