"""The blocks of one device as columns: a block is a place in each of them, which is given again after it is gone."""

from __future__ import annotations

from collections.abc import Callable

from memlab.allocator.protocol import NO_BLOCK


class BlockTable:
    """Blocks of segments; those of one segment are linked in the order of their addresses."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        """Of all segments."""
        self.address: list[int] = []
        self.num_bytes: list[int] = []
        self.pool: list[int] = []
        """The number of the pool that a block is of (`memlab.allocator.pools`)."""
        self.is_free: list[bool] = []
        self.before: list[int] = []
        """The neighbour, or `NO_BLOCK`."""
        self.after: list[int] = []
        self.free_since: list[int] = []
        """When a simulated pool got a free block back, on the pool's clock."""
        self.unused: list[int] = []

    def add(self, address: int, num_bytes: int, pool: int, *, is_free: bool = True) -> int:
        """Returns a new block without neighbours."""
        block = self.unused.pop() if self.unused else self._extend()
        self.address[block], self.num_bytes[block], self.pool[block] = address, num_bytes, pool
        self.is_free[block], self.before[block], self.after[block] = is_free, NO_BLOCK, NO_BLOCK
        return block

    def _extend(self) -> int:
        self.is_free.append(True)
        for column in (self.address, self.num_bytes, self.pool, self.before, self.after, self.free_since):
            column.append(0)
        return len(self.address) - 1

    def remove(self, block: int) -> None:
        """Drops a block that has no neighbours."""
        self.unused.append(block)

    def split(self, block: int, num_bytes: int) -> int:
        """Cuts a block after so many bytes, and returns the second part, as free or not as the first."""
        rest, after, sizes = self.unused.pop() if self.unused else self._extend(), self.after[block], self.num_bytes
        self.address[rest], self.pool[rest] = self.address[block] + num_bytes, self.pool[block]
        self.is_free[rest] = self.is_free[block]
        sizes[rest], sizes[block] = sizes[block] - num_bytes, num_bytes
        self.after[block], self.before[rest], self.after[rest] = rest, block, after
        if after != NO_BLOCK:
            self.before[after] = rest
        return rest

    def free(self, block: int, forget: Callable[[int], object]) -> int:
        """Frees a block, joins it with its free neighbours, and returns the whole.

        Args:
            block: It is allocated.
            forget: Called with each of these neighbours before it is joined.
        """
        is_free = self.is_free
        is_free[block] = True
        after, before = self.after[block], self.before[block]
        if after != NO_BLOCK and is_free[after]:
            forget(after)
            self.join(block, after)
        if before != NO_BLOCK and is_free[before]:
            forget(before)
            self.join(before, block)
            return before
        return block

    def join(self, block: int, after: int) -> None:
        """Adds a block's neighbour, which is then gone, to it."""
        self.num_bytes[block] += self.num_bytes[after]
        behind = self.after[block] = self.after[after]
        if behind != NO_BLOCK:
            self.before[behind] = block
        self.unused.append(after)

    def copy(self) -> BlockTable:
        """Returns the same blocks under the same numbers."""
        other = BlockTable()
        for name, column in vars(self).items():
            setattr(other, name, column if name == "reserved_bytes" else column.copy())
        return other
