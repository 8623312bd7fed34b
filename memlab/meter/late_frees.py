"""What torch reserves if the GPU is far behind the program: freed blocks then wait for the other streams that use them.

FSDP1 tells the allocator which other stream uses a block (``Tensor.record_stream``). Nothing is allocated from such a
block before that stream's work of the moment of the free has ended, so that the same requests may reserve more. How far
a GPU is behind depends on the job and the processor: here it has done no more than what the program waited for.
"""

from __future__ import annotations

from memlab.allocator.protocol import Allocator
from memlab.meter.stream_order import Moment, StreamOrder


class LateFrees:
    """A second allocator that serves all requests of a first one, from its first free that waits on.

    Args:
        allocator: The first one, now.
        order: What is known of the order of the streams' work.
    """

    def __init__(self, allocator: Allocator, order: StreamOrder) -> None:
        self._allocator, self._order = allocator.copy(), order
        self._own: dict[int, int] = {}
        """Its block for a block of the first allocator, where that is another one."""
        self._waiting: list[tuple[int, dict[int, Moment]]] = []
        self.most_reserved_bytes = 0
        """Since `begin`."""

    def begin(self) -> None:
        """Begins a step."""
        self.most_reserved_bytes = self._allocator.reserved_bytes

    def take(self, block: int, num_bytes: int, stream: int) -> None:
        """Serves a request, for which the first allocator has given a block."""
        self._free(all_of_them=False)
        self._own[block] = self._allocator.allocate(num_bytes, stream)
        self.most_reserved_bytes = max(self.most_reserved_bytes, self._allocator.reserved_bytes)

    def give_back(self, block: int, users: frozenset[int]) -> None:
        """Frees a block, which waits for the streams that use it beside its own."""
        own = self._own.pop(block, block)
        if users:
            self._waiting.append((own, {stream: self._order.event(stream) for stream in users}))
        else:
            self._allocator.free(own)

    def empty_cache(self) -> None:
        """Waits for all streams, and returns what is cached."""
        self._free(all_of_them=True)
        self._allocator.empty_cache()

    def _free(self, *, all_of_them: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for block, moments in waiting:
            if all_of_them or all(self._order.has_ended(stream, moment) for stream, moment in moments.items()):
                self._allocator.free(block)
            else:
                self._waiting.append((block, moments))
