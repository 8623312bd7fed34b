"""The simulated backend's meter: a `StorageMeter` whose device bytes are those of torch's allocator on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from memlab.allocator.pinned import PinnedMemory
from memlab.allocator.replay import Block
from memlab.allocator.simulator import CachingAllocator
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Allocation, Event
from memlab.meter.labels import Labels
from memlab.meter.storage_meter import StorageAllocation, StorageMeter
from memlab.upstream.patching import patched
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _RESERVED = POOLS.index("device"), POOLS.index("reserved")


class SimulatedMeter(StorageMeter):
    """Counts fake tensors as if they were on a GPU; see `memlab.meter.protocol.Meter`."""

    def __init__(self, labels: Labels) -> None:
        self._limit_bytes: int | None = None
        self._allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}
        self._pinned = PinnedMemory()
        self._pinned_blocks: dict[int, int] = {}
        self._reserved = self._reserved_allocation()
        super().__init__(labels)

    @property
    def device_memory_bytes(self) -> int | None:
        return self._limit_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        self._allocator.empty_cache()  # the limit applies to new segments only
        self._limit_bytes = num_bytes

    def use_allocator(self, settings: AllocatorSettings) -> None:
        assert not self._allocator.reserved_bytes, "a process has the options that it was started with"
        self._allocator = CachingAllocator(settings)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), patched({"torch.cuda.empty_cache": self._empty_cache}):
            yield

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        super().start(categories, others)
        self._reserved = self._reserved_allocation()
        self._reserved.num_bytes = self._allocator.reserved_bytes
        self._opening.append(Event.opening(self._reserved))

    @staticmethod
    def _reserved_allocation() -> Allocation:
        return Allocation(0, _RESERVED, 0, PHASES.index("idle"), 0, False, 0, CATEGORIES.index("workspace"))

    def require_capacity(self, num_bytes: int) -> None:
        """Checks nothing: `_take` tries the allocator, block by block."""

    def _take(self, allocation: StorageAllocation, num_bytes: int) -> int:
        if self._labels.pinned_depth and num_bytes:
            self._pinned_blocks[id(allocation)] = self._pinned.allocate(num_bytes)
        if allocation.pool != _DEVICE or not num_bytes:
            return num_bytes
        allocator, limit = self._allocator, self.device_memory_bytes
        if limit is not None and not allocator.makes_space(num_bytes, limit):
            largest, reserved = allocator.largest_free_bytes, allocator.reserved_bytes
            self._fail_allocation(num_bytes, limit, reserved_bytes=reserved, largest_free_bytes=largest)
        block = self._blocks[id(allocation)] = allocator.allocate(num_bytes)
        self._update_reserved()
        allocation.rounding_bytes = block.num_bytes - num_bytes
        return block.num_bytes

    def _give_back(self, allocation: StorageAllocation) -> None:
        block = self._blocks.pop(id(allocation), None)
        if block is not None:
            self._allocator.free(block)
        pinned = self._pinned_blocks.pop(id(allocation), None)
        if pinned is not None:
            self._pinned.free(pinned)

    def host_reserved_bytes(self) -> int:
        return self._pinned.reserved_bytes

    def free_cached_pinned_memory(self) -> None:
        self._pinned.empty_cache()

    def _empty_cache(self) -> None:
        self._allocator.empty_cache()
        self._update_reserved()

    def _update_reserved(self) -> None:
        delta = self._allocator.reserved_bytes - self._reserved.num_bytes
        self._reserved.num_bytes += delta
        self._event(delta, self._reserved)
