"""Which storages are alive, and what they are: every allocation, resize and free of a storage, exact to the byte.

A dispatch mode reports each operation's results, a weak reference each storage's free, and `UntypedStorage.resize_` is
watched, because Megatron frees and refills storages in place with it. What an operation allocates and frees inside
itself is not an event; what several operations do inside one `one_kernel` block goes to the ``on_chip`` pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch

from memlab.meter.allocations import StorageAllocation, label_others
from memlab.meter.caching_memory import CachingMemory
from memlab.meter.events import EventLog
from memlab.meter.labels import Labels
from memlab.meter.memory import PlainMemory
from memlab.meter.observers import Frees, tensors_in
from memlab.record.transfer import GROUPS
from memlab.vocabulary import CATEGORIES, POOLS

_DEVICE, _HOST, _ON_CHIP = (POOLS.index(name) for name in ("device", "host", "on_chip"))
_KEPT = frozenset(CATEGORIES.index(name) for name in (*GROUPS, "workspace"))
"""Categories of what the model keeps from step to step."""
_BIRTH = attrgetter("birth")


class Storages:
    """Follows the storages that it is told of."""

    def __init__(self, labels: Labels, log: EventLog, memory: PlainMemory | CachingMemory) -> None:
        self.live: dict[int, StorageAllocation] = {}
        self.num_births = 0
        """How many storages have been allocated so far."""
        self.num_steps = 0
        """How many timelines have begun."""
        self.frees = Frees()
        self._labels, self.log, self.memory = labels, log, memory
        self._report = self._on_free  # one bound method for all storages
        self._num_categorised = 0
        self._in_kernel: list[StorageAllocation] = []
        labels.on_kernel_end = self._end_kernel
        labels.is_followed = self._is_followed

    def begin(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None) -> None:
        """Begins a timeline; see `Meter.start`."""
        self.frees.check()
        self.categorise(categories)
        label_others(self.live.values(), others)
        self.num_steps += 1

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        """Implements `Meter.categorise`."""
        with torch._C.DisableTorchFunction():  # a function mode would see each look at one of hundreds of tensors
            for name, tensors in categories.items():
                code = CATEGORIES.index(name)
                for tensor in tensors:
                    allocation = self.allocation_of(tensor)
                    if allocation is not None:
                        allocation.category = code
                        if module is not None:
                            allocation.module = self._labels.code(module)
        self._num_categorised = self.num_births

    def allocation_of(self, tensor: torch.Tensor) -> StorageAllocation | None:
        """Returns what is known of a tensor's storage; None for an unknown storage."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def in_order(self) -> list[StorageAllocation]:
        """Returns all storages, the earliest first."""
        return sorted(self.live.values(), key=_BIRTH)

    def in_pool(self, pool: str) -> list[StorageAllocation]:
        """Returns the storages of a pool (`memlab.vocabulary.POOLS`)."""
        code = POOLS.index(pool)
        return [allocation for allocation in self.live.values() if allocation.pool == code]

    @property
    def has_new(self) -> bool:
        """Whether something is allocated that was not when `categorise` was called last."""
        return max(map(_BIRTH, self.live.values()), default=-1) >= self._num_categorised

    def has_residual_before(self, birth: int) -> bool:
        """Whether the device has storages, older than a birth, beside the model's own groups and workspaces.

        Host memory is left out: Megatron keeps its random states there. A graph that keeps others keeps device memory.
        """
        others = [each for each in self.live.values() if each.category not in _KEPT]
        return any(each.birth < birth and each.pool == _DEVICE for each in others)

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether `count` would change nothing."""
        storage = tensor.untyped_storage()
        allocation = self.live.get(storage._cdata)
        return allocation is not None and allocation.requested_bytes == storage.nbytes()

    def after_operation(self, results: Any, arguments: Any = ()) -> None:
        """Counts the storages of an operation's results that are new or that changed their size."""
        if isinstance(results, torch.Tensor):
            results = (results,)
        elif isinstance(results, (tuple, list)):
            results = tensors_in(results)
        else:
            return
        for tensor in results:
            if not hasattr(type(tensor), "__tensor_flatten__"):  # what wraps tensors has no memory beside theirs
                self.count(tensor.untyped_storage(), arguments)

    def count(self, storage: Any, arguments: Any = ()) -> None:
        """Counts a storage, if it is new or has changed its size.

        Args:
            storage: A result's.
            arguments: Of the operation that made it: if all are in host memory, so is the result.
        """
        allocation = self.live.get(storage._cdata)
        if allocation is None:
            self._on_alloc(storage, self._pool_of_new(arguments))
        elif allocation.requested_bytes != storage.nbytes():
            self.before_resize(storage, storage.nbytes())
            self.after_resize(storage)

    def _pool_of_new(self, arguments: Any) -> int:
        if self._labels.host_depth:
            return _HOST
        if self._labels.fused_depth or self._labels.user_buffer_depth:
            return _ON_CHIP
        pool = _DEVICE  # without inputs
        for tensor in tensors_in(arguments):
            allocation = self.allocation_of(tensor)
            if allocation is None or allocation.pool != _HOST:
                return _DEVICE
            pool = _HOST
        return pool

    def _on_alloc(self, storage: Any, pool: int) -> None:
        num_bytes = storage.nbytes()
        if pool == _DEVICE:
            self.memory.require(num_bytes)
        labels = self._labels
        allocation = self._new(num_bytes, pool, self.num_births)
        self.num_births += 1
        allocation.num_bytes = self.memory.take(allocation, num_bytes)
        self.follow(storage, allocation)
        if pool == _HOST:
            storage.memlab_on_host = True  # `Tensor.is_cuda` is read of results, too
        if pool == _ON_CHIP and not labels.user_buffer_depth:
            self._in_kernel.append(allocation)
        self.log.note(allocation.num_bytes, allocation)

    def _new(self, num_bytes: int, pool: int, birth: int) -> StorageAllocation:
        labels = self._labels
        return StorageAllocation(
            num_bytes,
            pool,
            labels.module,
            labels.phase,
            labels.span,
            labels.recomputing,
            self.num_steps,
            labels.known_category,
            requested_bytes=num_bytes,
            birth=birth,
        )

    def begin_temporary(self, num_bytes: int, birth: int) -> StorageAllocation:
        """Counts an allocation on chip that has no storage, until `end_temporary` frees it."""
        allocation = self._new(num_bytes, _ON_CHIP, birth)
        allocation.stream = self._labels.stream
        self.log.note(num_bytes, allocation)
        return allocation

    def end_temporary(self, allocation: StorageAllocation) -> None:
        """Frees what `begin_temporary` has counted."""
        allocation.freed_in_span = self._labels.span
        allocation.freed_in_step = self.num_steps
        self.log.note(-allocation.num_bytes, allocation)
        allocation.num_bytes = 0

    def _on_free(self, allocation: StorageAllocation) -> None:
        if self.live.get(allocation.key) is allocation:
            del self.live[allocation.key]
        allocation.reference = None  # it refers to the allocation: a cycle for each storage that a step frees
        allocation.freed_in_span = self._labels.span
        allocation.freed_in_step = self.num_steps
        self.log.note(-allocation.num_bytes, allocation)
        self.memory.give_back(allocation)
        allocation.num_bytes = 0

    def before_resize(self, storage: Any, num_bytes: int) -> None:
        """Checks the device's capacity before a storage grows in place."""
        allocation = self.live.get(storage._cdata)
        if allocation is not None and allocation.pool == _DEVICE and num_bytes > allocation.requested_bytes:
            self.memory.require(num_bytes)  # torch allocates the new memory before it frees the old

    def after_resize(self, storage: Any) -> None:
        """Counts a storage whose size changed in place."""
        allocation = self.live.get(storage._cdata)
        if allocation is not None:
            self.log.note(-allocation.num_bytes, allocation)
            self.memory.give_back(allocation)
            allocation.num_bytes = allocation.requested_bytes = 0
            allocation.num_bytes = self.memory.take(allocation, storage.nbytes())
            allocation.requested_bytes = storage.nbytes()
            allocation.is_emptied = not allocation.requested_bytes
            self.log.note(allocation.num_bytes, allocation)

    def _end_kernel(self) -> None:
        """Moves the storages that outlive a fused kernel from on chip to the device."""
        survivors = [allocation for allocation in self._in_kernel if allocation.freed_in_span is None]
        self._in_kernel.clear()
        for allocation in survivors:
            self.log.note(-allocation.num_bytes, allocation)
            allocation.pool, allocation.num_bytes = _DEVICE, 0
        for allocation in survivors:
            self.memory.require(allocation.requested_bytes)
            allocation.num_bytes = self.memory.take(allocation, allocation.requested_bytes)
            self.log.note(allocation.num_bytes, allocation)

    def follow(self, storage: Any, allocation: StorageAllocation) -> None:
        """Lets a storage stand for an allocation: the allocation is freed when the storage is."""
        allocation.key = storage._cdata
        allocation.reference = self.frees.watch(storage, self._report, allocation)
        self.live[allocation.key] = allocation

    def hand_over(self, allocation: StorageAllocation) -> None:
        """Stops following an allocation's storage, because a replay will free it."""
        if self.live.get(allocation.key) is allocation:
            del self.live[allocation.key]
        allocation.reference = None

    def keep(self, allocation: StorageAllocation) -> None:
        """Keeps an allocation without a storage, until `let_go` or a replay frees it."""
        allocation.key = -1 - allocation.birth
        self.live[allocation.key] = allocation

    def let_go(self, allocation: StorageAllocation) -> None:
        """Frees an allocation without a storage."""
        self._on_free(allocation)

    def free_all(self, storages: Iterable[Any]) -> None:
        """Counts storages as freed, although something refers to them; `follow` counts them again."""
        for storage in storages:
            allocation = self.live.get(storage._cdata)
            if allocation is not None:
                self._on_free(allocation)

    def when_freed(self, storage: Any, on_free: Callable[[Any], None], argument: Any) -> weakref.ref[Any]:
        """Calls `on_free` with an argument when a storage is freed, as long as the returned reference exists."""
        return self.frees.watch(storage, on_free, argument)
