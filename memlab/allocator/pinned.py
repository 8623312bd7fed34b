"""The pinned host memory that torch's host allocator holds.

It rounds each request up to a power of two, and keeps every freed block for later requests of the same rounded size
(torch 2.11, ``aten/src/ATen/core/CachingHostAllocator.h``: ``allocate``, ``get_free_block``). Megatron never empties
this cache.
"""

from __future__ import annotations

from collections import Counter


class PinnedMemory:
    """A simulation of the host allocator."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        """Bytes of all blocks, in use or kept for reuse."""
        self._num_free: Counter[int] = Counter()

    def allocate(self, num_bytes: int) -> int:
        """Takes a block, new if none of its size is free.

        Args:
            num_bytes: The request, at least 1.

        Returns:
            The block's bytes, which `free` takes.
        """
        block_bytes = 1 << (num_bytes - 1).bit_length()
        if self._num_free[block_bytes]:
            self._num_free[block_bytes] -= 1
        else:
            self.reserved_bytes += block_bytes
        return block_bytes

    def free(self, block_bytes: int) -> None:
        """Keeps a block for reuse."""
        self._num_free[block_bytes] += 1

    def empty_cache(self) -> None:
        """Releases the blocks that are kept for reuse."""
        self.reserved_bytes -= sum(block_bytes * count for block_bytes, count in self._num_free.items())
        self._num_free.clear()
