"""The requests of a process to torch's caching allocator, so that an allocator with less memory can get the same ones.

What a program requests does not depend on the limit of its memory, as long as each request is served. So the allocator
alone decides whether a step completes within a limit, and nobody has to take the step again.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memlab.allocator.choice import for_operations
from memlab.allocator.protocol import EMPTY_CACHE, EXCHANGE_POOLS, NO_BLOCK, Allocator, IntArray, Operations
from memlab.allocator.rules import rounded_bytes


class RequestLog:
    """The requests and frees since one moment, in order.

    Args:
        allocator: In its state of that moment. It writes the log until its `Allocator.log` is something else.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.begin(allocator)

    def begin(self, allocator: Allocator) -> None:
        """Forgets what was logged, and logs what this allocator is asked for from now on."""
        self._allocator = allocator.copy()
        self._entries = allocator.log = array("q")
        self._first_of_step = 0
        """The row with which the last step begins."""
        self._most_reserved: tuple[tuple[int, int], int] | None = None
        """What is reserved at most without a limit, after the length of the log and the further steps it is of."""

    def step_begins(self) -> None:
        """Notes that what follows is a step, until the next one begins."""
        self._first_of_step = len(self._entries) // 3

    def completes_within(self, limit_bytes: int, further_steps: int = 0) -> bool:
        """Returns whether an allocator that may reserve `limit_bytes` serves each request.

        Args:
            further_steps: How often the last step is repeated. With a limit, what earlier steps have left in the
                allocator differs from step to step. A step that does not leave as many blocks of each size as it found
                is not repeated.
        """
        return (
            self._most_reserved_bytes(further_steps) <= limit_bytes
            or self._served(limit_bytes, further_steps) is not None
        )

    def _most_reserved_bytes(self, further_steps: int) -> float:
        """Returns with which limit no request makes torch return memory: what it reserves at most without a limit.

        Infinity where a limit does more than refuse: with a threshold torch collects garbage before, and with
        expandable segments it compares whole segments with the limit.
        """
        settings = self._allocator.settings
        if settings.expandable_segments or settings.garbage_collection_threshold is not None:
            return math.inf
        if self._most_reserved is None or self._most_reserved[0] != (len(self._entries), further_steps):
            most = self._served(None, further_steps)
            assert most is not None, "nothing is refused without a limit"
            self._most_reserved = (len(self._entries), further_steps), most
        return self._most_reserved[1]

    def _served(self, limit_bytes: int | None, further_steps: int) -> int | None:
        """Sends the requests to an allocator, and returns what it reserves at most; None if a request did not fit."""
        table = np.array(self._entries, dtype=np.int64).reshape(-1, 3)
        # A slot is a number of a block at the time of the log: before the first row, of the same block of the copy.
        blocks = list(range(int(table[:, 0].max(initial=-1)) + 1))
        served = _served(self._allocator.copy(), table, blocks, limit_bytes)
        most_reserved_bytes = 0 if served is None else served[1]
        moves = self._moves(table) if further_steps and served is not None else None
        for _ in range(further_steps if moves is not None else 0):
            if served is None:
                break
            assert moves is not None, "the step can be repeated"
            moved = [blocks[now] for _, now in moves]
            for _, now in moves:
                blocks[now] = NO_BLOCK
            for (before, _), block in zip(moves, moved, strict=True):
                blocks[before] = block
            served = _served(served[0], table[self._first_of_step :], blocks, limit_bytes)
            most_reserved_bytes = max(most_reserved_bytes, 0 if served is None else served[1])
        return None if served is None else most_reserved_bytes

    def _moves(self, table: IntArray) -> list[tuple[int, int]] | None:
        """Returns which slot of the beginning of the last step has which slot's block when the step begins again.

        None if the step does not end with as many blocks of each size and stream as it began with.
        """
        live: dict[int, tuple[int, int]] = {}
        found: dict[int, tuple[int, int]] = {}
        made: set[int] = set()
        for number, (slot, num_bytes, stream) in enumerate(table.tolist()):
            if number == self._first_of_step:
                found = dict(live)
            if slot in (EMPTY_CACHE, EXCHANGE_POOLS):
                continue
            if num_bytes:
                live[slot] = (rounded_bytes(num_bytes), stream)
                made |= {slot} if number >= self._first_of_step else set()
            else:
                if slot not in live:  # it is older than the log
                    if number >= self._first_of_step:
                        return None
                    continue
                del live[slot]
                made.discard(slot)
        left = {slot: kind for slot, kind in live.items() if slot in made}
        gone = {slot: kind for slot, kind in found.items() if slot in made or slot not in live}
        if Counter(left.values()) != Counter(gone.values()):
            return None
        return [
            (before, now)
            for kind in sorted(set(left.values()))
            for before, now in zip(_slots(gone, kind), _slots(left, kind), strict=True)
        ]


def _slots(blocks: dict[int, tuple[int, int]], kind: tuple[int, int]) -> Iterator[int]:
    return (slot for slot, each in blocks.items() if each == kind)


def _served(
    allocator: Allocator, table: IntArray, blocks: list[int], limit_bytes: int | None
) -> tuple[Allocator, int] | None:
    """Serves a part of a log.

    Returns:
        The allocator that then has the blocks, and what it reserved at most; None if a request did not fit.
    """
    most_reserved_bytes = allocator.reserved_bytes
    exchanges = np.flatnonzero(table[:, 0] == EXCHANGE_POOLS).tolist()
    for first, last in pairwise([-1, *exchanges, len(table)]):
        operations = Operations(table[first + 1 : last])
        allocator = for_operations(len(operations), allocator)
        reserved_bytes = allocator.reserved_bytes
        served = allocator.run(operations, blocks, limit_bytes)
        if len(served.num_bytes) < len(operations):
            return None
        for _, change in served.changes:
            reserved_bytes += change
            most_reserved_bytes = max(most_reserved_bytes, reserved_bytes)
        if last < len(table):
            allocator = python = allocator.in_python()
            python.exchange_pools(of_same_graph=bool(table[last, 2]))
    return allocator, most_reserved_bytes
