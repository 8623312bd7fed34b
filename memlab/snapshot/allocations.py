"""The allocations that a snapshot describes: when each was allocated and freed, and how large its block was.

A history entry names an address and the bytes that were requested. To find the allocations, the entries are sorted by
address (and by time within one address), with each block that is still in use at the end added as one more entry. What
happens at one address is then one run of entries, which is cut wherever a new allocation begins. For example, with ten
recorded entries and one block still in use, which is entry 10:

    address   entries, by their numbers                                     allocations
    4096      3 alloc, 5 free_requested, 6 free_completed | 8 alloc         3 to 5; 8 to the end, completed by 9
    8192      4 free_requested, 7 free_completed                            before the first entry (-1) to 4
    9216      10 in use                                                     -1 to never
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.allocator.rules import MIN_BLOCK_BYTES

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_GROWS, SEGMENT_SHRINKS, IN_USE, PENDING_FREE = range(7)
"""What an entry does. The last two stand for a block in use at the end, and one that still waits for a stream then."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """A history as columns, followed by the blocks at its end. All columns have the same length."""

    action: npt.NDArray[np.int8]
    address: IntArray
    num_bytes: IntArray
    """Requested bytes of an allocation; of a segment, and of a block at the end, its actual bytes."""
    num_traced: int
    """How many entries were recorded: the blocks at the end have this number and those after it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Allocations:
    """One row per allocation. Moments are entry numbers: -1 is before the first, `Entries.num_traced` is the end."""

    address: IntArray
    num_bytes: IntArray
    is_in_use: npt.NDArray[np.bool_]
    """Whether the block exists at the end, in use or waiting for a stream."""
    allocated: IntArray
    freed: IntArray
    """When the program freed it; beyond the end if it never did."""
    completed: IntArray
    """When the allocator could use the block again; beyond the end if it never could."""
    source: IntArray
    """Number of the entry that names who allocated it: the allocation, or the block at the end; else its free."""


def find_allocations(entries: Entries, rounding_bytes: int = MIN_BLOCK_BYTES) -> Allocations:
    """Joins the entries of equal addresses to allocations.

    Bytes are the request rounded up, ``max(1, ceil(requested / rounding_bytes)) * rounding_bytes``; for blocks that
    exist at the end they are the snapshot's own.

    Where entries contradict each other (recording was off for a while), the later one counts: a block that is freed
    twice was allocated, unseen, just before the second free; an allocation where a block is in use ends that block; a
    block without a free that does not exist at the end is freed there. So the bytes at the end are always the
    snapshot's.

    Args:
        rounding_bytes: What requests are rounded to.
    """
    is_block = np.isin(entries.action, (ALLOC, FREE_REQUESTED, FREE_COMPLETED, IN_USE, PENDING_FREE))
    number = np.flatnonzero(is_block)
    number = number[np.argsort(entries.address[number], kind="stable")]
    action, address = entries.action[number], entries.address[number]

    # From here on, all arrays of the length of `number` are in the order of addresses, then of time.
    previous = np.roll(action, 1)
    is_new_address = np.diff(address, prepend=-1) != 0
    # An allocation's entries are [alloc] [free_requested] [free_completed | at the end], any part of which may be
    # missing. A new one begins with alloc, after free_completed, and after free_requested unless its end follows.
    begins = is_new_address | (action == ALLOC) | (previous == FREE_COMPLETED)
    begins |= (previous == FREE_REQUESTED) & (action != FREE_COMPLETED) & (action != PENDING_FREE)
    row_of_entry = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(number))[: len(first)] - 1
    end, never = entries.num_traced, entries.num_traced + 1

    # From here on, there is one row per allocation.
    def moment_of(code: int) -> IntArray:
        moments = np.full(len(first), never)
        moments[row_of_entry[action == code]] = number[action == code]
        return moments

    is_in_use = action[last] >= IN_USE
    # The first entry at an address that is not an alloc is about a block from before the recording.
    is_from_before = is_new_address[first] & (action[first] != ALLOC)
    allocated = np.where(is_from_before, -1, np.minimum(number[first], end))
    # Without a free_completed a block ends where the next allocation at its address begins, or at the end.
    next_begin = np.append(np.where(is_new_address[first[1:]], end, np.minimum(number[first[1:]], end)), end)
    completed = moment_of(FREE_COMPLETED)
    completed = np.where((completed == never) & ~is_in_use, next_begin[: len(first)], completed)
    # Without a free_requested it is freed when it is completed; a block that only waits was freed before it was seen.
    freed = np.where(action[last] == IN_USE, never, np.minimum(completed, end))
    freed = np.where(np.isin(action[first], (FREE_COMPLETED, PENDING_FREE)), allocated, freed)
    requested = moment_of(FREE_REQUESTED)
    freed = np.where(requested == never, freed, requested)

    rounded = -(-entries.num_bytes[number[first]] // rounding_bytes) * rounding_bytes
    return Allocations(
        address=address[first],
        num_bytes=np.where(is_in_use, entries.num_bytes[number[last]], np.maximum(rounded, rounding_bytes)),
        is_in_use=is_in_use,
        allocated=allocated,
        freed=freed,
        completed=completed,
        source=np.where(is_in_use & (action[first] != ALLOC), number[last], number[first]),
    )
