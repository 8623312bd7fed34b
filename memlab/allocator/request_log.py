"""The requests of a process to torch's caching allocator, so that an allocator with less memory can get the same ones.

What a program requests does not depend on the limit of its memory, as long as each request is served. So the allocator
alone decides whether a step completes within a limit, and nobody has to take the step again.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

from memlab.allocator.choice import for_operations
from memlab.allocator.protocol import EXCHANGE_POOLS, Allocator, Operations


class RequestLog:
    """The requests and frees since one moment, in order.

    Args:
        allocator: In its state of that moment. It writes the log until its `Allocator.log` is something else.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator.copy()
        self._entries = allocator.log = array("q")

    def completes_within(self, limit_bytes: int) -> bool:
        """Returns whether an allocator that may reserve `limit_bytes` serves each request."""
        table = np.array(self._entries, dtype=np.int64).reshape(-1, 3)
        # A slot is a number of a block at the time of the log: before the first row, of the same block of the copy.
        blocks = list(range(int(table[:, 0].max(initial=-1)) + 1))
        allocator = self._allocator.copy()
        exchanges = np.flatnonzero(table[:, 0] == EXCHANGE_POOLS).tolist()
        for first, last in pairwise([-1, *exchanges, len(table)]):
            operations = Operations(table[first + 1 : last])
            allocator = for_operations(len(operations), allocator)
            if len(allocator.run(operations, blocks, limit_bytes).num_bytes) < len(operations):
                return False
            if last < len(table):
                allocator = python = allocator.in_python()
                python.exchange_pools(of_same_graph=bool(table[last, 2]))
        return True
