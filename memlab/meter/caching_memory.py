"""A GPU's memory, simulated: torch's caching allocator, its limit, and the cache of pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from memlab.allocator.choice import for_operations, new_allocator
from memlab.allocator.pinned import PinnedMemory
from memlab.allocator.protocol import NO_BLOCK, Allocator, Operations, Served
from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Allocation, Opening, StorageAllocation
from memlab.meter.events import EventLog
from memlab.meter.kept_gathers import KeptGathers
from memlab.meter.labels import Labels, Product
from memlab.meter.late_frees import LateFrees
from memlab.meter.stream_order import SENDING, STREAM_NUMBERS
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _RESERVED = POOLS.index("device"), POOLS.index("reserved")


class CachingMemory:
    """Device memory in blocks of torch's allocator; for the methods see `memlab.meter.memory.PlainMemory`.

    Args:
        labels: Say on which stream a storage is made, and whether it is pinned.
        log: Gets the events of reserved memory.
    """

    def __init__(self, labels: Labels, log: EventLog) -> None:
        self.allocator = new_allocator(AllocatorSettings())
        self.gathers = KeptGathers(log)
        self.is_special = False
        """Whether the step has done what is not repeated: used pinned memory or a stream of its own, or returned what
        the allocator caches."""
        self.replacements = {"torch.cuda.empty_cache": self._empty_cache, "torch.cuda.graph": self._capture}
        self.reserved = _reserved_allocation()
        """Stands for the reserved bytes in the step's events."""
        self._labels, self._log = labels, log
        self._late: LateFrees | None = None
        """From the first block on that another stream uses, where there is no limit: at one, torch waits for all
        streams before it gives up (``synchronize_and_free_events`` in c10/cuda/CUDACachingAllocator.cpp, 2.11)."""
        self._kept_in_graph: set[int] = set()
        """Identities of allocations whose blocks are freed only when the capture ends."""
        self._waiting_blocks: list[int] = []
        self._sent: set[int] = set()
        """Identities of allocations that were sent to another rank."""
        self._sent_blocks: list[int] = []
        """Blocks of such allocations that were freed since the process has last waited for the device."""
        self._pinned = PinnedMemory()
        self._limit_bytes: int | None = None
        self._requests: RequestLog | None = None
        self._waiting: dict[Product, list[StorageAllocation]] = {}
        """What is allocated at the first matrix product of a kind (`memlab.meter.labels.allocated_at_first`)."""
        self._has_stepped = False
        self.num_unseen = 0
        """How many requests so far came with the first operation of a kind, and are no events of a step."""

    @property
    def reserved_bytes(self) -> int:
        return self.allocator.reserved_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, num_bytes: int | None) -> None:
        if num_bytes != self._limit_bytes:
            self.allocator.empty_cache()  # the limit applies to new segments only
            self._late = None
        self._limit_bytes = num_bytes

    def use_allocator(self, settings: AllocatorSettings) -> None:
        assert not self.allocator.reserved_bytes, "a process has the options that it was started with"
        self.allocator = new_allocator(settings)

    def require(self, num_bytes: int) -> None:
        limit_bytes, stream = self._limit_bytes, self._labels.stream
        if limit_bytes is not None and num_bytes and not self.allocator.makes_space(num_bytes, limit_bytes, stream):
            self.free_sent()  # at a limit, torch waits for all streams before it gives up
            if not self.allocator.makes_space(num_bytes, limit_bytes, stream):
                self.refuse(num_bytes, stream)

    def refuse(self, num_bytes: int, stream: int) -> NoReturn:
        """Raises `torch.OutOfMemoryError` for a request for which the allocator has not found space."""
        assert self._limit_bytes is not None
        largest, reserved = self.allocator.largest_free_bytes(num_bytes, stream), self.allocator.reserved_bytes
        self._log.refuse(num_bytes, self._limit_bytes, reserved_bytes=reserved, largest_free_bytes=largest)

    def take(self, allocation: StorageAllocation, num_bytes: int) -> int:
        stream = allocation.stream = self._labels.stream
        if self._labels.pinned_depth and num_bytes:
            self.pin(allocation, num_bytes)
        if allocation.pool != _DEVICE or not num_bytes:
            return num_bytes
        if self._labels.awaited_product is not None:
            self._waiting.setdefault(self._labels.awaited_product, []).append(allocation)
            self._labels.on_product, self._has_stepped = self._place, False
            return num_bytes
        self.is_special = self.is_special or stream != 0
        block = allocation.block = self.allocator.allocate(num_bytes, stream)
        if self._late is not None:
            self._late.take(block, num_bytes, stream)
        self._update_reserved()
        block_bytes = self.allocator.num_bytes(block)
        allocation.rounding_bytes = block_bytes - num_bytes
        return block_bytes

    def _place(self, product: Product) -> None:
        """Gives what waits for a kind of products its blocks; only what they add to the request is an event."""
        waiting = self._waiting.get(product, [])
        self.num_unseen += len(waiting)
        while waiting:
            allocation = waiting[0]
            counted = allocation.num_bytes
            if counted:  # not freed meanwhile
                self.require(counted)
                self.put(allocation, self.allocator.allocate(counted, allocation.stream))
                self._update_reserved()
                self._log.note(allocation.num_bytes - counted, allocation)
            waiting.pop(0)
        self._waiting.pop(product, None)
        if not self._waiting:
            self._labels.on_product = None

    def pass_through(self, num_bytes: int) -> None:
        """Takes a block and gives it back at once, which leaves nothing but its segment.

        Where the limit leaves no room for it, also after torch has freed its cached segments, nothing is taken. Such a
        limit is one of tiny models: the kernels of others are timed long before they need the most.
        """
        self.num_unseen += 1
        limit_bytes, stream = self._limit_bytes, self._labels.stream
        if limit_bytes is not None and not self.allocator.makes_space(num_bytes, limit_bytes, stream):
            return
        self.allocator.free(self.allocator.allocate(num_bytes, stream))
        self._update_reserved()

    def give_back(self, allocation: StorageAllocation) -> None:
        if allocation.block != NO_BLOCK:
            self.gathers.freed(allocation)
            if self._late is not None:
                self._late.give_back(allocation.block, allocation.other_streams)
            if id(allocation) in self._kept_in_graph:
                self._kept_in_graph.remove(id(allocation))
                self._waiting_blocks.append(allocation.block)
            elif id(allocation) in self._sent:
                self._sent.remove(id(allocation))
                self._sent_blocks.append(allocation.block)
                self.is_special = True
            else:
                self.allocator.free(allocation.block)
        self.forget(allocation)

    def forget(self, allocation: StorageAllocation) -> None:
        """Frees what a storage has, but for its block: that has been freed."""
        allocation.block, allocation.other_streams = NO_BLOCK, frozenset()
        if allocation.pinned_bytes:
            self.is_special = True
            self._pinned.free(allocation.pinned_bytes)
            allocation.pinned_bytes = 0

    def pin(self, allocation: StorageAllocation, num_bytes: int) -> None:
        """Gives a storage pinned host memory."""
        self.is_special = True
        allocation.pinned_bytes = self._pinned.allocate(num_bytes)

    def put(self, allocation: StorageAllocation, block: int) -> None:
        """Gives a storage a block that was allocated for it."""
        allocation.block, allocation.num_bytes = block, self.allocator.num_bytes(block)
        allocation.rounding_bytes = allocation.num_bytes - allocation.requested_bytes

    def run(self, operations: Operations, blocks: list[int]) -> Served:
        """Serves operations that stand for events of the step, until one does not fit; see `Allocator.run`."""
        served = self.allocator.run(operations, blocks, self._limit_bytes)
        self.reserved.num_bytes += sum(change for _, change in served.changes)
        return served

    def trial(self, num_operations: int) -> Allocator:
        """Returns what serves so many operations, a copy if a request may not fit; `settle` keeps what was tried."""
        allocator = for_operations(num_operations, self.allocator)
        return allocator.copy() if allocator is self.allocator and self._limit_bytes is not None else allocator

    def settle(self, allocator: Allocator) -> None:
        """Goes on from the state of what `trial` has returned."""
        self.allocator = allocator
        self.reserved.num_bytes = allocator.reserved_bytes

    def opening(self, live: list[StorageAllocation]) -> Opening:
        self.is_special = False
        if self._waiting and self._has_stepped and self._limit_bytes is None:
            for product in list(self._waiting):  # such as backward's, of passes without it: counted, they are there
                self._place(product)
        if self._requests is not None:
            self._requests.step_begins()
        self._has_stepped = True
        self.gathers.begin()
        if self._late is not None:
            self._late.begin()
        self.reserved = _reserved_allocation()
        self.reserved.num_bytes = self.allocator.reserved_bytes
        return Opening([*(allocation for allocation in live if allocation.num_bytes), self.reserved])

    def kept_gather_bytes(self, columns: npt.NDArray[np.int64]) -> int:
        return self.gathers.most_bytes(columns)

    def late_free_bytes(self, columns: npt.NDArray[np.int64]) -> int:
        if self._late is None:
            return 0
        reserved = np.cumsum(columns[1][columns[2] == _RESERVED])
        return max(0, self._late.most_reserved_bytes - int(reserved.max(initial=0)))

    @contextmanager
    def logging_requests(self) -> Iterator[RequestLog]:
        """Implements `Meter.logging_requests`."""
        assert self._limit_bytes is None, "with a limit, requests are tried on copies of the allocator"
        try:
            self._requests = RequestLog(self.allocator)
            yield self._requests
        finally:
            self._requests = None
            self.allocator.log = None  # it may have taken over from that of the beginning, with the log

    def remember(self, live: Callable[[], list[StorageAllocation]]) -> Callable[[], bool]:
        waiting = {product: list(allocations) for product, allocations in self._waiting.items()}
        remembered = _Remembered.now(self.allocator.copy(), live(), waiting)
        return partial(self._restore, remembered, STREAM_NUMBERS.num_taken, live)

    def _restore(
        self, remembered: _Remembered, num_streams: int, find_live: Callable[[], list[StorageAllocation]]
    ) -> bool:
        live = find_live()
        now = remembered.among(live)
        if now is None or any(each.pinned_bytes for each in live):
            return False
        self._late = None
        self._sent.clear()
        self._sent_blocks.clear()
        self.allocator, self._pinned = remembered.allocator.copy(), PinnedMemory()
        if self._requests is not None:
            self._requests.begin(self.allocator)
        births = sorted(each.birth for each in now)
        for birth, former, allocation, block in zip(births, remembered.live, now, remembered.blocks, strict=True):
            allocation.birth = birth
            if allocation is not former:
                allocation.module, allocation.phase, allocation.span = former.module, former.phase, former.span
                allocation.recomputed, allocation.step = former.recomputed, former.step
            if block != NO_BLOCK:
                self.put(allocation, block)
            elif allocation.block != NO_BLOCK:  # its kind of products came after that moment
                allocation.block, allocation.num_bytes = NO_BLOCK, allocation.requested_bytes
                allocation.rounding_bytes = 0
        self._waiting = {product: list(allocations) for product, allocations in remembered.waiting.items()}
        self._labels.on_product = self._place if self._waiting else None
        self._has_stepped, STREAM_NUMBERS.num_taken = False, num_streams
        self._log.device_bytes = sum(each.num_bytes for each in now if each.pool == _DEVICE)
        return True

    def host_reserved_bytes(self) -> int:
        return self._pinned.reserved_bytes

    def free_cached_pinned_memory(self) -> None:
        self._pinned.empty_cache()

    def _empty_cache(self) -> None:
        self.is_special = True
        self.free_sent()
        self.allocator.empty_cache()
        if self._late is not None:
            self._late.empty_cache()
        self._update_reserved()

    @contextmanager
    def _capture(self, *_: object, pool: object = None, **__: object) -> Iterator[None]:
        """Replaces ``torch.cuda.graph``: what the block allocates is in pools of its own, which stay reserved."""
        self.allocator = python = self.allocator.in_python()
        python.exchange_pools(of_same_graph=pool is not None)
        self._update_reserved()
        try:
            yield
        finally:
            for block in self._waiting_blocks:
                self.allocator.free(block)
            self._kept_in_graph.clear()
            self._waiting_blocks.clear()
            python.exchange_pools()
            self.is_special = True

    def record_stream(self, allocation: StorageAllocation | None, stream: int) -> None:
        """Lets a block, once it is freed, wait for a stream that uses it, where the GPU is behind.

        What was sent waits, without a second allocator, until the process has waited for the device: a stage frees what
        it has just sent, while its GPU is passes behind.
        """
        if allocation is None or allocation.block == NO_BLOCK or stream == allocation.stream:
            return
        if stream == SENDING:
            self._sent.add(id(allocation))
            return
        allocation.other_streams |= {stream}
        if self._late is None and self._limit_bytes is None:
            self._late = LateFrees(self.allocator, self._labels.stream_order)

    def free_sent(self) -> None:
        """Frees what waited for the stream that sends, since the process has waited for the device."""
        for block in self._sent_blocks:
            self.allocator.free(block)
        self._sent_blocks.clear()

    def keep_in_graph(self, allocation: StorageAllocation | None) -> None:
        """Lets the block of a storage be used again only when the graph that is captured now is complete."""
        if allocation is not None and allocation.block != NO_BLOCK:
            self._kept_in_graph.add(id(allocation))

    def _update_reserved(self) -> None:
        delta = self.allocator.reserved_bytes - self.reserved.num_bytes
        if delta:
            self.reserved.num_bytes += delta
            self._log.note(delta, self.reserved)


def _reserved_allocation() -> Allocation:
    return Allocation(0, _RESERVED, 0, PHASES.index("idle"), 0, False, 0, CATEGORIES.index("workspace"))


class _Remembered(NamedTuple):
    """The allocator at one moment, and all storages in the order of their births."""

    allocator: Allocator
    live: list[StorageAllocation]
    requested_bytes: list[int]
    blocks: list[int]
    """Of the allocator, or `NO_BLOCK`."""
    waiting: dict[Product, list[StorageAllocation]]
    """As `CachingMemory` has them."""

    @classmethod
    def now(
        cls, allocator: Allocator, live: list[StorageAllocation], waiting: dict[Product, list[StorageAllocation]]
    ) -> _Remembered:
        """Reads sizes and blocks, which may be others later."""
        return cls(allocator, live, [each.requested_bytes for each in live], [each.block for each in live], waiting)

    def among(self, live: list[StorageAllocation]) -> list[StorageAllocation] | None:
        """Returns what takes the place of each storage now: itself, or new host memory of its size.

        Args:
            live: What is allocated now, in the order of births.

        Returns:
            The storages in the remembered order; None if something else is allocated, or something remembered is not.
        """
        known, alive = {id(each) for each in self.live}, {id(each) for each in live}
        others = [each for each in live if id(each) not in known]
        gone = [each for each in self.live if id(each) not in alive]
        if len(gone) != len(others) or any(each.pool == _DEVICE for each in (*gone, *others)):
            return None
        following = iter(others)
        now = [each if id(each) in alive else next(following) for each in self.live]
        return now if [each.requested_bytes for each in now] == self.requested_bytes else None
