"""The simulated backend's meter: a `StorageMeter` whose device bytes are those of torch's allocator on a GPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from itertools import compress, count
from operator import attrgetter, is_not, not_
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.pinned import PinnedMemory
from memlab.allocator.protocol import NO_BLOCK, Allocator
from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Allocation, Event, Opening, columns_of, timeline_of_columns
from memlab.meter.labels import Labels
from memlab.meter.observers import Answer, computed
from memlab.meter.recording import FORWARD, Recording, Replay, Role, freed_by, record
from memlab.meter.repetition import DoesNotFitError, Inserted, Period, is_live, repeat, request
from memlab.meter.storage_meter import StorageAllocation, StorageMeter
from memlab.record.device_bytes import DeviceBytes
from memlab.record.timeline import Timeline
from memlab.record.transfer import GROUPS
from memlab.upstream.patching import patched
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _RESERVED = POOLS.index("device"), POOLS.index("reserved")
_MOST_KEPT_GATHERS = 100
"""Number of collectives whose tensors torch may keep at the same time. On H100s it kept those of up to 83
(`labs/LOG.md`, 2026-11-24, night): torch looks every 100 ms which collectives the GPU has run, and the program is ahead
of the GPU, probably by as many launches as CUDA's queue holds."""
_KEPT = frozenset(CATEGORIES.index(name) for name in (*GROUPS, "workspace"))
"""Categories of what the model keeps from step to step."""


_BIRTH = attrgetter("birth")


class _Found:
    """What is allocated at one moment: the storages in the order of their births, with requested bytes and pools."""

    __slots__ = ("live", "pools", "sizes")

    def __init__(self, live: list[StorageAllocation], sizes: list[int], pools: list[int]) -> None:
        self.live, self.sizes, self.pools = live, sizes, pools

    @classmethod
    def now(cls, live: list[StorageAllocation]) -> _Found:
        """Reads sizes and pools, which may be others later."""
        return cls(live, [each.requested_bytes for each in live], [each.pool for each in live])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Found):
            return NotImplemented
        return self.live == other.live and self.sizes == other.sizes and self.pools == other.pools

    __hash__ = None  # type: ignore[assignment]

    def divided(self, other: _Found) -> tuple[list[tuple[StorageAllocation, int, int]], _Found]:
        """Returns what is not among the others, with requested bytes and pool, and what is."""
        first = _num_same(self.live, other.live)
        known = set(map(id, other.live[first:]))
        is_known = [id(each) in known for each in self.live[first:]]
        rows = zip(self.live[first:], self.sizes[first:], self.pools[first:], strict=True)
        outside = list(compress(rows, map(not_, is_known)))
        live = self.live[:first] + list(compress(self.live[first:], is_known))
        sizes = self.sizes[:first] + list(compress(self.sizes[first:], is_known))
        pools = self.pools[:first] + list(compress(self.pools[first:], is_known))
        return outside, _Found(live, sizes, pools)


class _Remembered(NamedTuple):
    """The allocator at one moment, and all storages in the order of their births."""

    allocator: Allocator
    live: list[StorageAllocation]
    requested_bytes: list[int]
    blocks: list[int]
    """Of the allocator, or `NO_BLOCK`."""

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


def _num_same(first: Sequence[Allocation], second: Sequence[Allocation]) -> int:
    """Returns how many storages at the beginning of two lists are the same: nearly all stay from step to step."""
    return next(compress(count(), map(is_not, first, second)), min(len(first), len(second)))


class _Finished:
    """A step that has ended. It pairs each storage that the step found with the one that the step left in its place.

    The first storages of the opening stay from step to step: their numbers are their places among what is allocated.
    A large model has 75,000 of them, so nothing else is stored for them. The others are looked up by their numbers.
    """

    def __init__(self, columns: npt.NDArray[np.int64], numbers: dict[int, int], opening: Opening) -> None:
        self.columns = columns
        self.num_opening_events = len(opening)
        self._opened: Sequence[Allocation] = opening.allocations
        self._numbers = numbers
        self._num_first = 0
        """How many storages have their places as numbers."""
        self._stay: dict[int, StorageAllocation] = {}
        """What else exists before and after it, by number."""
        self._replaced: list[tuple[int, int, StorageAllocation]] | None = None
        """Number of a storage that the step found and freed, and that of the one that it left in its place."""
        self._left = _Found([], [], [])

    def leaves_what_it_found(self, found: _Found, left: _Found) -> bool:
        """Whether what is allocated now is, storage by storage, what the step found."""
        if self._replaced is not None:  # of an earlier repetition
            return self._left == left
        numbers = self._numbers
        (freed, before), (new, now) = found.divided(left), left.divided(found)
        if [(_kind(old), *then) for old, *then in freed] != [(_kind(each), *now) for each, *now in new]:
            return False
        if before != now:
            return False
        if not {id(each) for each, _, _ in (*freed, *new)} <= numbers.keys():
            return False
        self._left = left
        first = self._num_first = min(_num_same(before.live, left.live), _num_same(self._opened, left.live))
        of_stay = ((numbers.get(id(each)), each) for each in before.live[first:])
        self._stay = {number: each for number, each in of_stay if number is not None}
        pairs = zip(freed, new, strict=True)
        self._replaced = [(numbers[id(old)], numbers[id(each)], each) for (old, _, _), (each, _, _) in pairs]
        self._numbers, self._opened = {}, []
        return True

    def found_by_number(self, numbers: Iterable[int]) -> dict[int, StorageAllocation]:
        """Returns those of some numbers that a repetition finds."""
        return self._by_number(numbers, self._stay | {old: each for old, _, each in self._replaced or ()})

    def left_by_number(self, numbers: Iterable[int]) -> dict[int, StorageAllocation]:
        """Returns those of some numbers that a repetition leaves."""
        return self._by_number(numbers, self._stay | {new: each for _, new, each in self._replaced or ()})

    def _by_number(
        self, numbers: Iterable[int], others: Mapping[int, StorageAllocation]
    ) -> dict[int, StorageAllocation]:
        first, live = self._num_first, self._left.live
        of_numbers = ((each, live[each] if each < first else others.get(each)) for each in numbers)
        return {number: allocation for number, allocation in of_numbers if allocation is not None}

    def leaves_all(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Whether a repetition leaves the storages of these numbers."""
        others = numbers[numbers >= self._num_first].tolist()
        return len(self.left_by_number(others)) == len(others)

    def follow(self, opening: Opening, rows: npt.NDArray[np.int64]) -> None:
        """Makes this the repetition: what it found has new numbers.

        Args:
            opening: Its opening.
            rows: Its other rows, with the numbers of this step; they are changed.
        """
        live = self._left.live
        first = min(self._num_first, _num_same(opening.allocations, live))
        self._stay |= {number: live[number] for number in range(first, self._num_first)}
        self._num_first = first
        places = {id(each): place for place, each in enumerate(opening.allocations[first:], first)}
        found = self._stay | {old: each for old, _, each in self._replaced or ()}
        numbers = np.arange(max(int(rows[6].max(initial=0)), len(opening), *found, 0) + 1)
        numbers[np.array(list(found), dtype=np.int64)] = [
            places.get(id(each), number) for number, each in found.items()
        ]
        rows[6] = numbers[rows[6]]
        renumbered = numbers.tolist()
        self._stay = {renumbered[number]: each for number, each in self._stay.items()}
        self._replaced = [(renumbered[old], new, each) for old, new, each in self._replaced or ()]
        self.columns = np.concatenate([opening.columns(0), rows], axis=1)


def _kind(allocation: StorageAllocation) -> tuple[int, int, bool, int | None]:
    return allocation.module, allocation.phase, allocation.recomputed, allocation.category


class SimulatedMeter(StorageMeter):
    """Counts fake tensors as if they were on a GPU; see `memlab.meter.protocol.Meter`."""

    def __init__(self, labels: Labels, answer: Answer = computed) -> None:
        self._limit_bytes: int | None = None
        self._allocator: Allocator = CachingAllocator()
        self._blocks: dict[int, int] = {}
        self._pinned = PinnedMemory()
        self._pinned_blocks: dict[int, int] = {}
        self._abandoned: list[StorageAllocation] = []
        self.after_event: Callable[[int, Allocation], None] | None = None
        """Called after each event with its bytes, below 0 for a free, if it is set."""
        self._reserved = self._reserved_allocation()
        self._is_special = False
        """Whether the step has done what is not repeated: used pinned memory or a stream of its own, or returned what
        the allocator caches."""
        self._found = _Found([], [], [])
        """What the step found allocated."""
        self._finished: _Finished | None = None
        self._num_categorised = 0
        self._gathers: list[int] = []
        """For each collective of which torch may keep tensors, the number of events before it."""
        self._may_be_kept: dict[int, int] = {}
        """The collective of such tensors, by the identity of their allocations."""
        self._kept: list[tuple[int, int, int]] = []
        """Of those that the step has freed: the number of events then, their bytes, and their collective."""
        self._kept_gather_bytes = 0
        super().__init__(labels, answer)
        labels.on_kept = self._note_kept

    @property
    def device_memory_bytes(self) -> int | None:
        return self._limit_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        self._allocator.empty_cache()  # the limit applies to new segments only
        self._limit_bytes = num_bytes

    @contextmanager
    def logging_requests(self) -> Iterator[RequestLog]:
        assert self._limit_bytes is None, "with a limit, requests are tried on copies of the allocator"
        allocator = self._allocator
        try:
            yield RequestLog(allocator)
        finally:
            allocator.log = None

    @property
    def repeater(self) -> SimulatedMeter:
        return self

    @property
    def kept_gather_bytes(self) -> int:
        return self._kept_gather_bytes

    def remember(self) -> Callable[[], bool]:
        live, allocator = self._in_order(), self._allocator.copy()
        blocks = [self._blocks.get(id(allocation), NO_BLOCK) for allocation in live]
        return partial(self._restore, _Remembered(allocator, live, [each.requested_bytes for each in live], blocks))

    def _restore(self, remembered: _Remembered) -> bool:
        """Gives each storage the block that it had at `remember`, in an allocator that is in the state of that time.

        Returns:
            Whether it was possible. If other device storages exist now than then, or host memory of other sizes,
            nothing has changed.
        """
        live = remembered.among(self._in_order())
        if live is None or self._pinned_blocks:
            return False
        allocator = remembered.allocator.copy()
        self._allocator, self._blocks, self._pinned = allocator, {}, PinnedMemory()
        self._device_bytes = 0
        births = sorted(each.birth for each in live)
        for birth, former, allocation, block in zip(births, remembered.live, live, remembered.blocks, strict=True):
            allocation.birth = birth
            if allocation is not former:
                allocation.module, allocation.phase, allocation.span = former.module, former.phase, former.span
                allocation.recomputed, allocation.step = former.recomputed, former.step
            if block != NO_BLOCK:
                self._blocks[id(allocation)] = block
                allocation.num_bytes = allocator.num_bytes(block)
                allocation.rounding_bytes = allocation.num_bytes - allocation.requested_bytes
                self._device_bytes += allocation.num_bytes
        self._finished = None
        return True

    def use_allocator(self, settings: AllocatorSettings) -> None:
        assert not self._allocator.reserved_bytes, "a process has the options that it was started with"
        self._allocator = CachingAllocator(settings)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), patched({"torch.cuda.empty_cache": self._empty_cache}):
            yield

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        super().start(categories, others)
        self._is_special, self._finished = False, None
        self._gathers.clear()
        self._may_be_kept.clear()
        self._kept.clear()

    def _open(self, live: list[StorageAllocation]) -> Opening:
        return self._open_with(_Found.now(live))

    def _open_with(self, found: _Found) -> Opening:
        self._found = found
        self._reserved = self._reserved_allocation()
        self._reserved.num_bytes = self._allocator.reserved_bytes
        return Opening([*(allocation for allocation in found.live if allocation.num_bytes), self._reserved])

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        super().categorise(categories, module)
        self._num_categorised = self._num_births

    @property
    def has_new(self) -> bool:
        """Whether something is allocated that was not when `categorise` was called last."""
        return max(map(_BIRTH, self._live.values()), default=-1) >= self._num_categorised

    @property
    def may_repeat(self) -> bool:
        """Whether the step so far has done nothing that is not repeated."""
        return not self._is_special

    @property
    def num_births(self) -> int:
        """How many storages have been allocated so far."""
        return self._num_births

    @property
    def num_live(self) -> int:
        """How many storages are allocated."""
        return len(self._live)

    def has_residual_before(self, birth: int) -> bool:
        """Whether the device has storages, older than a birth, beside the model's own groups and workspaces.

        Host memory is left out: Megatron keeps its random states there. A graph that keeps others keeps device memory.
        """
        of_device = self._in_pool(_DEVICE)
        return any(each.birth < birth and each.category not in _KEPT for each in of_device)

    @staticmethod
    def _reserved_allocation() -> Allocation:
        return Allocation(0, _RESERVED, 0, PHASES.index("idle"), 0, False, 0, CATEGORIES.index("workspace"))

    def require_capacity(self, num_bytes: int) -> None:
        """Checks that the allocator finds a block for a request within the limit.

        Raises:
            torch.OutOfMemoryError: If it does not, after it has returned what it caches.
        """
        allocator, limit = self._allocator, self.device_memory_bytes
        stream = self._labels.stream
        if limit is not None and num_bytes and not allocator.makes_space(num_bytes, limit, stream):
            self._refuse(num_bytes, stream)

    def _refuse(self, num_bytes: int, stream: int) -> NoReturn:
        assert self._limit_bytes is not None
        largest, reserved = self._allocator.largest_free_bytes(num_bytes, stream), self._allocator.reserved_bytes
        self._fail_allocation(num_bytes, self._limit_bytes, reserved_bytes=reserved, largest_free_bytes=largest)

    def _take(self, allocation: StorageAllocation, num_bytes: int) -> int:
        if self._labels.pinned_depth and num_bytes:
            self._is_special = True
            self._pinned_blocks[id(allocation)] = self._pinned.allocate(num_bytes)
        stream = allocation.stream = self._labels.stream
        if allocation.pool != _DEVICE or not num_bytes:
            return num_bytes
        self._is_special = self._is_special or stream != 0
        block = self._blocks[id(allocation)] = self._allocator.allocate(num_bytes, stream)
        self._update_reserved()
        block_bytes = self._allocator.num_bytes(block)
        allocation.rounding_bytes = block_bytes - num_bytes
        return block_bytes

    def _give_back(self, allocation: StorageAllocation) -> None:
        block = self._blocks.pop(id(allocation), NO_BLOCK)
        if block != NO_BLOCK:
            gather = self._may_be_kept.pop(id(allocation), None)
            if gather is not None:
                self._kept.append((len(self._events), allocation.num_bytes, gather))
            self._allocator.free(block)
        self._unpin(allocation)

    def _note_kept(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            allocation = self.allocation_of(tensor)
            assert allocation is not None, "every tensor of a simulated step is metered"
            self._may_be_kept[id(allocation)] = len(self._gathers)
        self._gathers.append(len(self._events))

    def _most_kept(self, columns: npt.NDArray[np.int64], num_opening_events: int) -> int:
        """Returns how much higher the step's peak is if torch always keeps the last `_MOST_KEPT_GATHERS` gathers."""
        if not self._kept:
            return 0
        assert all(type(event) is Event for event in self._events), "steps in FP8 are not replayed"
        kept = np.zeros(columns.shape[1], dtype=np.int64)
        for num_events, num_bytes, gather in self._kept:
            dropped_by = gather + _MOST_KEPT_GATHERS
            dropped = self._gathers[dropped_by] if dropped_by < len(self._gathers) else None
            if dropped is None or dropped >= num_events:
                kept[num_opening_events + num_events - 1] += num_bytes
                if dropped is not None:
                    kept[num_opening_events + dropped - 1] -= num_bytes
        in_step = slice(max(num_opening_events - 1, 0), None)
        allocated = np.cumsum(np.where(columns[2] == _DEVICE, columns[1], 0))
        return int((allocated + np.cumsum(kept))[in_step].max() - allocated[in_step].max())

    def _unpin(self, allocation: StorageAllocation) -> None:
        pinned = self._pinned_blocks.pop(id(allocation), None)
        if pinned is not None:
            self._is_special = True
            self._pinned.free(pinned)

    def finish(self) -> Timeline:
        self._frees.check()
        columns, numbers, _ = columns_of(self._opening, self._events, self._started)
        columns[0] -= self._started
        self._kept_gather_bytes = self._most_kept(columns, len(self._opening))
        self._finished = None if self._is_special else _Finished(columns, numbers, self._opening)
        timeline = timeline_of_columns(columns, len(self._opening), self._labels.modules)
        self._events.clear()
        self._opening = Opening([])
        return timeline

    def repeat_step(self) -> Timeline | None:
        """Lets the events of the last step happen again, if it left allocated what it found, storage by storage.

        Who calls this knows that nothing else has changed: settings, workload, and what the model remembers.

        Returns:
            The timeline; None if the step has to be taken.
        """
        finished, left = self._finished, _Found.now(self._in_order())
        if finished is None or not finished.leaves_what_it_found(self._found, left):
            return None
        num_opening_events = sum([1 for allocation in left.live if allocation.num_bytes]) + 1
        if num_opening_events != finished.num_opening_events:
            return None
        period = Period(finished.columns[:, num_opening_events:], [finished.columns.shape[1]])
        if not finished.leaves_all(np.flatnonzero(is_live(finished.columns, finished.columns.shape[1]))):
            return None  # garbage collection has freed something since
        used = np.unique(period.storage[period.on_device]).tolist()
        opening = self._open_with(left)
        blocks, allocator = self._blocks_of(finished.found_by_number(used)), self._for_trial()
        try:
            answer = request(allocator, period, [0], blocks, self._limit_bytes)
        except DoesNotFitError:
            return None
        rows = period.again(answer, [0], len(opening) - 1)
        self._num_starts += 1
        self.out_of_memory = None
        self._commit(allocator, blocks, rows, finished.left_by_number(used))
        finished.follow(opening, rows)
        return timeline_of_columns(finished.columns, len(opening), self._labels.modules)

    def insert_periods(self, positions: Sequence[int], times: int) -> bool:
        """Lets the last period of the step happen again, if it is known to repeat.

        Args:
            positions: Where periods begin, the last one now; at least two periods have ended.
            times: How many periods are inserted.

        Returns:
            Whether they were.
        """
        if self._is_special or self._num_rows(*positions[-3:-1]) != self._num_rows(*positions[-2:]):
            return False
        columns, numbers, ends = columns_of(self._opening, self._events, self._started, positions)
        objects = {numbers[id(each)]: each for each in self._live.values() if id(each) in numbers}
        live = set(np.flatnonzero(is_live(columns, ends[-1][1])).tolist())
        waiting = [each for each in self._replayed_passes() if not each.is_over]
        of_passes = {each.number + role: (each, role) for each in waiting for role, _ in each.left_allocated()}
        if not objects.keys() | of_passes.keys() >= live:
            return False
        blocks, allocator = self._blocks_of(objects, of_passes), self._for_trial()
        try:
            done = repeat(columns, ends, times, allocator, blocks, self._limit_bytes, len(self._opening) - 1)
        except DoesNotFitError:
            return False
        if done is None:
            return False
        objects = {done.moved.get(number, number): each for number, each in objects.items()}
        of_passes = {done.moved.get(number, number): each for number, each in of_passes.items()}
        self._commit(allocator, done.blocks, done.rows, objects, of_passes)
        firsts = {id(each): number - role for number, (each, role) in of_passes.items()}
        assert all(firsts[id(each)] == number - role for number, (each, role) in of_passes.items())
        for each in waiting:
            each.number = firsts.get(id(each), each.number)
        of_opening = dict(enumerate(self._opening.allocations))
        rows = np.concatenate([columns[:, len(self._opening) :], done.rows], axis=1)
        self._events[:] = [Inserted(rows, done.categories, objects | of_opening, len(self._opening), waiting)]
        return True

    def _num_rows(self, first: int, last: int) -> int:
        """Returns how many rows the events between two positions have, without those of reserved bytes."""
        events = self._events[first:last]
        return sum(event.pool != _RESERVED if type(event) is Event else event.num_rows for event in events)

    def _replayed_passes(self) -> list[Replay]:
        """Returns the replayed passes of the step, without those that were over when periods were inserted."""
        inserted = [each for event in self._events if isinstance(event, Inserted) for each in event.waiting]
        return inserted + [event for event in self._events if isinstance(event, Replay)]

    def _for_trial(self) -> Allocator:
        """Returns the allocator; a copy, if a request may not fit."""
        return self._allocator if self._limit_bytes is None else self._allocator.copy()

    def _blocks_of(
        self,
        by_number: Mapping[int, StorageAllocation],
        of_passes: Mapping[int, tuple[Replay, int]] = MappingProxyType({}),
    ) -> dict[int, int]:
        """Returns the blocks of storages by their numbers.

        Args:
            by_number: The allocations.
            of_passes: Storages that are roles of replayed passes.
        """
        blocks = {number: self._blocks.get(id(each), NO_BLOCK) for number, each in by_number.items()}
        blocks |= {number: each.blocks[role] for number, (each, role) in of_passes.items()}
        return {number: block for number, block in blocks.items() if block != NO_BLOCK}

    def _commit(
        self,
        allocator: Allocator,
        blocks: Mapping[int, int],
        rows: npt.NDArray[np.int64],
        objects: Mapping[int, StorageAllocation],
        of_passes: Mapping[int, tuple[Replay, int]] = MappingProxyType({}),
    ) -> None:
        """Gives allocations, and roles of replayed passes, the blocks that they have after a repetition."""
        self._allocator = allocator
        for number, block in blocks.items():
            if number in of_passes:
                replay, role = of_passes[number]
                replay.blocks[role] = block
                continue
            allocation = objects[number]
            self._blocks[id(allocation)] = block
            allocation.num_bytes = allocator.num_bytes(block)
            allocation.rounding_bytes = allocation.num_bytes - allocation.requested_bytes
        self._device_bytes += int(rows[1][rows[2] == _DEVICE].sum())
        self._reserved.num_bytes = allocator.reserved_bytes

    def position(self) -> int:
        """Returns the number of events of the step so far; a replay counts as one."""
        return len(self._events)

    def record(
        self,
        first: int,
        last: int,
        known: Mapping[int, Role],
        spans: tuple[int, int],
        places: Mapping[int, int],
        buffers: AbstractSet[int] | None = None,
        *,
        ignores_unknown: bool = False,
    ) -> tuple[Recording, list[StorageAllocation]] | None:
        """Records the events from `position` `first` on and before `last`; for the others see `recording.record`.

        Args:
            first: As above.
            last: As above.
            known: As for `recording.record`.
            spans: The first and the last one.
            places: As for `recording.record`.
            buffers: Of a pass that offloads activations: identities of the pinned allocations that whoever replays it
                gives to `pin`.
            ignores_unknown: As for `recording.record`.
        """
        events, offloads = self._events[first:last], buffers is not None
        forgotten = self._pinned_blocks.keys() - (buffers or ())
        return record(events, known, *spans, places, forgotten, other_streams=offloads, ignores_unknown=ignores_unknown)

    def freed_since(self, first: int, known: Mapping[int, Role]) -> list[tuple[int, Role]]:
        """Returns what the events from `position` `first` on free; see `recording.freed_by`."""
        return freed_by(self._events[first:], known)

    def replay(
        self,
        recording: Recording,
        modules: npt.NDArray[np.int64],
        forward: Replay | None,
        others: Mapping[Role, StorageAllocation | tuple[Replay, int]],
    ) -> Replay:
        """Lets the events of a recording happen again: the allocator gets the same requests and frees.

        Args:
            recording: What happens.
            modules: The codes of the layer's modules, by place.
            forward: The forward pass of a backward pass.
            others: What stands for the roles that neither of the two allocated.

        Raises:
            torch.OutOfMemoryError: If a request exceeds the device's limit.
        """
        labels = self._labels
        done = Replay(
            recording=recording,
            modules=modules,
            forward=forward,
            others=[(row, others[role]) for row, role in recording.others],
            started=time.perf_counter_ns(),
            ended=0,
            num_bytes=np.zeros(0, dtype=np.int64),
            reserved=[],
            of_reserved=self._reserved,
            blocks=[NO_BLOCK] * len(recording.births),
            span=labels.span,
            first_birth=self._num_births,
        )
        self._num_births += len(recording.births)
        before = [self._block_of(role, forward, others) for role in recording.used]
        self._events.append(done)
        after = dict(zip(recording.used, self._run(done, before), strict=True))
        done.ended = time.perf_counter_ns()
        self._num_device_events += len(done.num_bytes)
        if len(done.num_bytes) < len(recording.operations):
            for role in recording.freed:
                given_up = others.get(role)
                if isinstance(given_up, StorageAllocation):
                    if after.get(role, NO_BLOCK) == NO_BLOCK:
                        self.forget(given_up)
                    else:
                        self.keep(given_up)
                        self._abandoned.append(given_up)
            self._fail_replay(done)
        self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes + recording.most_host_bytes)
        self._host_bytes += recording.host_bytes
        labels.span += recording.num_spans
        for role in recording.freed:
            freed = others.get(role)
            if isinstance(freed, tuple):
                freed[0].blocks[freed[1]] = NO_BLOCK
            elif freed is not None:
                self.forget(freed)
        return done

    def _block_of(
        self, role: Role, forward: Replay | None, others: Mapping[Role, StorageAllocation | tuple[Replay, int]]
    ) -> int:
        """Returns the block of a role that a replayed pass finds."""
        if role.owner == FORWARD:
            assert forward is not None
            return forward.blocks[role.number]
        other = others[role]
        return other[0].blocks[other[1]] if isinstance(other, tuple) else self._blocks.get(id(other), NO_BLOCK)

    def _run(self, done: Replay, before: list[int]) -> list[int]:
        """Sends the requests and frees of a replay to the allocator, until one does not fit.

        Args:
            done: The replay.
            before: The blocks of the roles that it finds, in the order of `Recording.used`.

        Returns:
            These roles' blocks after it.
        """
        recording, allocator, reserved_bytes = done.recording, self._allocator, self._allocator.reserved_bytes
        blocks = done.blocks + before
        served = allocator.run(recording.operations, blocks, self._limit_bytes)
        done.blocks, after = blocks[: len(done.blocks)], blocks[len(done.blocks) :]
        if done.forward is not None:
            for role, block in zip(recording.used, after, strict=True):
                if role.owner == FORWARD:
                    done.forward.blocks[role.number] = block
        done.num_bytes, changes = served.num_bytes, served.changes(reserved_bytes)
        done.reserved = [(int(recording.on_device[place]), change) for place, change in changes]
        allocates = recording.operations.table[: len(served.num_bytes), 1] > 0
        self._device_bytes += int(np.where(allocates, served.num_bytes, -served.num_bytes).sum())
        self._reserved.num_bytes += allocator.reserved_bytes - reserved_bytes
        return after

    def _fail_replay(self, done: Replay) -> NoReturn:
        recording, labels = done.recording, self._labels
        row = int(recording.on_device[len(done.num_bytes)])
        labels.phase, module = int(recording.phase[row]), int(recording.module[row])
        labels.module = int(done.modules[module]) if module >= 0 else -1 - module
        _, requested, stream = recording.operations.rows[len(done.num_bytes)]
        self._refuse(requested, stream)

    def forget(self, allocation: StorageAllocation) -> None:
        """Marks an allocation as freed whose block a replay has freed."""
        self._blocks.pop(id(allocation), None)
        self._unpin(allocation)
        allocation.freed_in_span, allocation.freed_in_step = self._labels.span, self._num_starts
        allocation.num_bytes = 0

    def separate(self, done: Replay, role: int, requested_bytes: int) -> StorageAllocation:
        """Makes a role of a replayed pass, which is still allocated, an allocation of its own."""
        birth, block = done.recording.births[role], done.blocks[role]
        num_bytes = requested_bytes if block == NO_BLOCK else self._allocator.num_bytes(block)
        allocation = StorageAllocation(
            num_bytes,
            done.recording.last_pools[role],
            int(done.modules[birth.module]) if birth.module >= 0 else -1 - birth.module,
            birth.phase,
            done.span + birth.span,
            birth.recomputed,
            self._num_starts,
            birth.category,
            rounding_bytes=num_bytes - requested_bytes,
            requested_bytes=requested_bytes,
            birth=done.first_birth + role,
        )
        if block != NO_BLOCK:
            self._blocks[id(allocation)] = block
        done.attached[role] = allocation
        done.blocks[role] = NO_BLOCK
        return allocation

    def pin(self, allocation: StorageAllocation) -> None:
        """Makes a role of a replayed pass, which has become an allocation of its own, pinned host memory."""
        self._is_special = True
        self._pinned_blocks[id(allocation)] = self._pinned.allocate(allocation.requested_bytes)

    def hand_over(self, allocation: StorageAllocation) -> weakref.ref[Any] | None:
        """Stops following an allocation's storage, because a replay will free it; returns the storage, if it exists."""
        if self._live.get(allocation.key) is allocation:
            del self._live[allocation.key]
        storage = None if allocation.reference is None else allocation.reference()
        allocation.reference = None
        return None if storage is None else weakref.ref(storage)

    def free_all(self, storages: Iterable[Any]) -> None:
        """Counts storages as freed, although something refers to them; `follow` counts them again."""
        for storage in storages:
            allocation = self._live.get(storage._cdata)
            if allocation is not None:
                self._on_free(allocation)

    def follow(self, storage: Any, allocation: StorageAllocation) -> None:
        """Lets a storage stand for an allocation: the allocation is freed when the storage is."""
        self._watch(storage, allocation)

    def when_freed(self, storage: Any, on_free: Callable[[Any], None], argument: Any) -> weakref.ref[Any]:
        """Calls `on_free` with an argument when a storage is freed, as long as the returned reference exists."""
        return self._frees.watch(storage, on_free, argument)

    @staticmethod
    def stand_in(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a fake tensor that the meter does not count."""
        # As in `paused`, but a layer needs several, and to take the modes off their stack takes longer than all else.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def keep(self, allocation: StorageAllocation) -> None:
        """Keeps an allocation without a storage, until `let_go` or a replay frees it."""
        allocation.key = -1 - allocation.birth
        self._live[allocation.key] = allocation

    def let_go(self, allocation: StorageAllocation) -> None:
        """Frees an allocation without a storage."""
        self._on_free(allocation)

    def abandon(self) -> None:
        """Frees what replayed passes of this step have left allocated, after an error."""
        for done in reversed(self._replayed_passes()):
            for role, requested_bytes in done.left_allocated():
                self.let_go(self.separate(done, role, requested_bytes))
        for allocation in self._abandoned:
            self.let_go(allocation)
        self._abandoned.clear()

    def device_bytes(self) -> DeviceBytes:
        allocated = self.live_bytes()
        return DeviceBytes(
            allocated_bytes=allocated,
            active_bytes=allocated + self.live_bytes("pending_free"),
            reserved_bytes=self._allocator.reserved_bytes,
        )

    def host_reserved_bytes(self) -> int:
        return self._pinned.reserved_bytes

    def free_cached_pinned_memory(self) -> None:
        self._pinned.empty_cache()

    def _empty_cache(self) -> None:
        self._is_special = True
        self._allocator.empty_cache()
        self._update_reserved()

    def _event(self, delta: int, allocation: Allocation) -> None:
        super()._event(delta, allocation)
        if self.after_event is not None and delta and allocation is not self._reserved:
            self.after_event(delta, allocation)

    def _update_reserved(self) -> None:
        delta = self._allocator.reserved_bytes - self._reserved.num_bytes
        if delta:
            self._reserved.num_bytes += delta
            self._event(delta, self._reserved)
