"""The requests of a process to torch's caching allocator, so that an allocator with less memory can get the same ones.

What a program requests does not depend on the limit of its memory, as long as each request is served. So the allocator
alone decides whether a step completes within a limit, and nobody has to take the step again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlab.allocator.replay import Block
    from memlab.allocator.simulator import CachingAllocator

_EMPTY_CACHE = 0


class RequestLog:
    """The requests and frees since one moment, in order.

    Args:
        allocator: In its state of that moment; it is copied.
        blocks: All that are allocated then.
    """

    def __init__(self, allocator: CachingAllocator, blocks: Iterable[Block]) -> None:
        allocated = list(blocks)
        self._allocator, copies = allocator.copy(allocated)
        self._blocks = [copies[id(block)] for block in allocated]
        for number, block in enumerate(allocated):
            block.number = number
        self._num_blocks = len(allocated)
        self._entries = array("q")
        """For a request, its bytes; for a free, -1 minus the number of the block; else `_EMPTY_CACHE`."""
        self._streams: dict[int, int] = {}
        """The streams of the requests that are not on the default one, by the numbers of their blocks."""

    def allocated(self, block: Block, requested_bytes: int, stream: int) -> None:
        """Notes a request, and numbers the block that it got."""
        number = block.number = self._num_blocks
        self._num_blocks = number + 1
        self._entries.append(requested_bytes)
        if stream:
            self._streams[number] = stream

    def freed(self, block: Block) -> None:
        """Notes that a block is freed."""
        assert block.number >= 0, "the block was allocated before the log began, and the log was not told of it"
        self._entries.append(-1 - block.number)

    def emptied(self) -> None:
        """Notes that the program has returned what the allocator caches."""
        self._entries.append(_EMPTY_CACHE)

    def completes_within(self, limit_bytes: int) -> bool:
        """Returns whether an allocator that may reserve `limit_bytes` serves each request."""
        allocator, copies = self._allocator.copy(self._blocks)
        blocks = [copies[id(block)] for block in self._blocks]
        streams = self._streams
        for entry in self._entries:
            if entry > 0:
                stream = streams.get(len(blocks), 0)
                if not allocator.makes_space(entry, limit_bytes, stream):
                    return False
                blocks.append(allocator.allocate(entry, stream))
            elif entry < 0:
                allocator.free(blocks[-1 - entry])
            else:
                allocator.empty_cache()
        return True
