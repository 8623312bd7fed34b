"""What simulates torch's caching allocator: it serves requests and frees, one by one or a whole table of them.

A block is a number, from its request until it is freed; later requests may get the number again. A copy of an allocator
has the same blocks under the same numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from memlab.config.allocator_settings import AllocatorSettings

IntArray = npt.NDArray[np.int64]
NO_BLOCK = -1
"""Stands for a block where there is none."""
EMPTY_CACHE = -1
"""Stands for a slot in a row of `Operations` that returns what the allocator caches."""
MAKE_SPACE = -3
"""Stands for a slot in a row that asks for space, as `Allocator.makes_space` does, and requests nothing."""
EXCHANGE_POOLS = -2
"""Stands for a slot in a row of a log at which a CUDA graph's capture begins or ends; the stream is 1 where it shares
the pools of the last one."""


class Operations:
    """Requests and frees in order, about blocks in numbered slots.

    Args:
        table: int64 of shape [operations, 3]: slot, requested bytes (0 for a free), and the request's stream.
    """

    def __init__(self, table: IntArray) -> None:
        self.table = table

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """The table for Python, which reads tuples faster."""
        return list(zip(*self.table.T.tolist(), strict=True))

    @cached_property
    def last_stream(self) -> int:
        """The largest number of a stream, 0 without requests."""
        return int(self.table[:, 2].max(initial=0))

    def __len__(self) -> int:
        return len(self.table)


class Served(NamedTuple):
    """What an allocator did with a table of operations: with all of it, or with what came before a refused request."""

    num_bytes: IntArray
    """Of the block of each operation."""
    changes: list[tuple[int, int]]
    """The operations that changed the reserved bytes, and by how much."""


class Allocator(Protocol):
    """The blocks of one device."""

    settings: AllocatorSettings
    """The options that the process would be started with."""
    log: array[int] | None
    """If it is set, each request and each free appends its row of `Operations` to it, with the block as the slot."""

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has taken from the device, used or not."""

    def run(self, operations: Operations, blocks: list[int], limit_bytes: int | None = None) -> Served:
        """Serves operations in order, until one does not fit.

        Args:
            blocks: The block in each slot, or `NO_BLOCK`; it is changed.
            limit_bytes: What the allocator may reserve; None is no limit.
        """

    def state(self, blocks: Iterable[int]) -> Hashable:
        """Returns what decides about later requests and about frees of these blocks: equal states answer equally."""

    def copy(self) -> Self:
        """Returns an allocator in the same state, without a log, for requests that may have to be undone."""

    def in_python(self) -> PoolExchanger:
        """Returns an allocator in this state, with this log, that can exchange its pools; blocks keep their numbers."""

    def allocate(self, requested_bytes: int, stream: int = 0) -> int:
        """Returns the block that a request gets.

        Args:
            requested_bytes: The size of the request, at least 1.
            stream: The number of the current stream, 0 for the default one.
        """

    def free(self, block: int) -> None:
        """Frees a block, and merges it with its free neighbours."""

    def num_bytes(self, block: int) -> int:
        """Returns the bytes of an allocated block."""

    def makes_space(self, requested_bytes: int, limit_bytes: int, stream: int = 0) -> bool:
        """Returns whether a request fits within `limit_bytes` reserved, after returning free memory if it must."""

    def largest_free_bytes(self, requested_bytes: int, stream: int = 0) -> int | None:
        """Returns the largest free block that such a request may take; None where segments are expandable."""

    def empty_cache(self) -> None:
        """Returns the segments or pages in which nothing is allocated to the device, but for those of CUDA graphs."""


class PoolExchanger(Allocator, Protocol):
    """An allocator in which CUDA graphs can be captured."""

    def exchange_pools(self, *, of_same_graph: bool = False) -> None:
        """Begins the capture of a CUDA graph, or ends it.

        While it lasts, requests are served from pools of the graph, and nothing is returned to the device. Afterwards
        the graph keeps what its pools have reserved, until the capture of another graph begins.

        Args:
            of_same_graph: Whether what is captured shares the pools of what was captured last.
        """
