"""Lets recorded events happen again without tensors: a layer's pass, a micro-batch, or a whole step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from memlab.allocator.protocol import NO_BLOCK, Allocator
from memlab.meter.allocations import Event, StorageAllocation, timeline_of_columns
from memlab.meter.caching_memory import CachingMemory
from memlab.meter.events import EventLog
from memlab.meter.finished_step import FinishedStep, Found
from memlab.meter.labels import Labels
from memlab.meter.recording import FORWARD, Recording, Replay, Role, freed_by, record
from memlab.meter.repetition import Inserted, Period, is_live, repeat, repeated_period
from memlab.meter.storages import Storages
from memlab.record.timeline import Timeline
from memlab.vocabulary import POOLS

_DEVICE, _RESERVED = POOLS.index("device"), POOLS.index("reserved")


_Others = Mapping[Role, StorageAllocation | tuple[Replay, int]]
"""What stands for roles that neither a pass nor its forward pass has allocated: an allocation, or a replay's role."""


class Repeater:
    """Repeats events of one simulated meter."""

    def __init__(self, labels: Labels, log: EventLog, memory: CachingMemory, storages: Storages) -> None:
        self.log, self.memory, self.storages = log, memory, storages
        self._labels = labels
        self._found = Found([], [], [])
        """What the step found allocated."""
        self._finished: FinishedStep | None = None
        self._abandoned: list[StorageAllocation] = []

    def step_begins(self, live: list[StorageAllocation]) -> None:
        """Notes what a step finds, in the order of births."""
        self._found, self._finished = Found.now(live), None

    def step_ended(self, columns: npt.NDArray[np.int64], numbers: dict[int, int]) -> None:
        """Notes a step that may be repeated; its storages have their numbers by the identity of their allocations."""
        self._finished = None if self.memory.is_special else FinishedStep(columns, numbers, self.log.opening)

    @property
    def may_repeat(self) -> bool:
        """Whether the step so far has done nothing that is not repeated."""
        return not self.memory.is_special

    def repeat_step(self) -> Timeline | None:
        """Lets the events of the last step happen again, if it left allocated what it found, storage by storage.

        Who calls this knows that nothing else has changed: settings, workload, and what the model remembers.

        Returns:
            The timeline; None if the step has to be taken.
        """
        finished, left = self._finished, Found.now(self.storages.in_order())
        if finished is None or not finished.leaves_what_it_found(self._found, left):
            return None
        num_opening_events = sum([1 for allocation in left.live if allocation.num_bytes]) + 1
        if num_opening_events != finished.num_opening_events:
            return None
        period = Period(finished.columns[:, num_opening_events:], [finished.columns.shape[1]])
        if not finished.leaves_all(np.flatnonzero(is_live(finished.columns, finished.columns.shape[1]))):
            return None  # garbage collection has freed something since
        used = np.flatnonzero(np.bincount(period.storage[period.on_device]))
        opening, self._found = self.memory.opening(left.live), left
        count, allocator = finished.columns[6].max() + 1, self.memory.trial(len(period.on_device))
        blocks = _blocks_of(count, finished.found_by_number(used))
        served = period.run(allocator, [0], blocks, self.memory.limit_bytes)
        if served is None:
            return None
        rows = period.again(served, [0], len(opening) - 1, is_last=True)
        del period  # a step of many micro-batches has a million rows
        self.storages.num_steps += 1
        self.log.out_of_memory = None
        self._commit(allocator, blocks, int(rows[1] @ (rows[2] == _DEVICE)), finished.left_by_number(used))
        finished.follow(opening, rows)
        return timeline_of_columns(finished.columns, len(opening), self._labels.modules)

    def insert_periods(self, positions: Sequence[int], times: int) -> bool:
        """Lets the last period of the step happen again, if it is known to repeat.

        Args:
            positions: Where periods begin, the last one now; at least two periods have ended.

        Returns:
            Whether they were.
        """
        if self.memory.is_special or self._num_rows(*positions[-3:-1]) != self._num_rows(*positions[-2:]):
            return False
        columns, numbers, ends = self.log.columns(positions)
        period = repeated_period(columns, ends)
        if period is None:
            return False
        objects = {numbers[id(each)]: each for each in self.storages.live.values() if id(each) in numbers}
        live = set(np.flatnonzero(is_live(columns, ends[-1][1])).tolist())
        waiting = [each for each in self._replayed_passes() if not each.is_over]
        of_passes = {each.number + role: (each, role) for each in waiting for role, _ in each.left_allocated()}
        if not objects.keys() | of_passes.keys() >= live:
            return False
        num_operations = times * (len(columns[0]) - ends[-2][0])
        count = ends[-1][1] + times * (ends[-1][1] - ends[-2][1])
        blocks, allocator = _blocks_of(count, objects, of_passes), self.memory.trial(num_operations)
        opening, limit_bytes = self.log.opening, self.memory.limit_bytes
        done = repeat(period, columns, ends, times, allocator, blocks, limit_bytes, len(opening))
        if done is None:
            return False
        objects = {done.moved.get(number, number): each for number, each in objects.items()}
        of_passes = {done.moved.get(number, number): each for number, each in of_passes.items()}
        self._commit(allocator, done.blocks, done.num_bytes, objects, of_passes)
        firsts = {id(each): number - role for number, (each, role) in of_passes.items()}
        assert all(firsts[id(each)] == number - role for number, (each, role) in of_passes.items())
        for each in waiting:
            each.number = firsts.get(id(each), each.number)
        of_opening = dict(enumerate(opening.allocations))
        self.log.events[:] = [Inserted(done.rows, done.categories, objects | of_opening, len(opening), waiting)]
        return True

    def _num_rows(self, first: int, last: int) -> int:
        """Returns how many rows the events between two positions have, without those of reserved bytes."""
        events = self.log.events[first:last]
        return sum(event.pool != _RESERVED if type(event) is Event else event.num_rows for event in events)

    def _replayed_passes(self) -> list[Replay]:
        """Returns the replayed passes of the step, without those that were over when periods were inserted."""
        inserted = [each for event in self.log.events if isinstance(event, Inserted) for each in event.waiting]
        return inserted + [event for event in self.log.events if isinstance(event, Replay)]

    def _commit(
        self,
        allocator: Allocator,
        blocks: npt.NDArray[np.int64],
        num_bytes: int,
        objects: Mapping[int, StorageAllocation],
        of_passes: Mapping[int, tuple[Replay, int]] = MappingProxyType({}),
    ) -> None:
        """Gives allocations, and roles of replayed passes, the blocks that they have after a repetition."""
        self.memory.settle(allocator)
        numbers = np.flatnonzero(blocks != NO_BLOCK)
        for number, block in zip(numbers.tolist(), blocks[numbers].tolist(), strict=True):
            if number in of_passes:
                replay, role = of_passes[number]
                replay.blocks[role] = block
            else:
                self.memory.put(objects[number], block)
        self.log.device_bytes += num_bytes

    def position(self) -> int:
        """Returns the number of events of the step so far; a replay counts as one."""
        return len(self.log.events)

    def record(
        self,
        first: int,
        last: int,
        known: Mapping[int, Role],
        spans: tuple[int, int],
        places: Mapping[int, int],
        buffers: AbstractSet[int] | None = None,
        *,
        left_out: AbstractSet[int] = frozenset(),
        ignores_unknown: bool = False,
    ) -> tuple[Recording, list[StorageAllocation]] | None:
        """Records the events from `position` `first` on and before `last`; for the others see `recording.record`.

        Args:
            spans: The first and the last one.
            buffers: Of a pass that offloads activations: identities of the pinned allocations that whoever replays it
                gives to `pin`.
        """
        return record(
            self.log.events[first:last],
            known,
            *spans,
            places,
            buffers or (),
            left_out=left_out,
            other_streams=buffers is not None,
            ignores_unknown=ignores_unknown,
        )

    def freed_since(self, first: int, known: Mapping[int, Role]) -> list[tuple[int, Role]]:
        """Returns what the events from `position` `first` on free; see `recording.freed_by`."""
        return freed_by(self.log.events[first:], known)

    def replay(
        self,
        recording: Recording,
        modules: npt.NDArray[np.int64],
        forward: Replay | None,
        others: _Others,
    ) -> Replay:
        """Lets the events of a recording happen again: the allocator gets the same requests and frees.

        Args:
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
            of_reserved=self.memory.reserved,
            blocks=[NO_BLOCK] * len(recording.births),
            span=labels.span,
            first_birth=self.storages.num_births,
        )
        self.storages.num_births += len(recording.births)
        self.log.events.append(done)
        is_complete = self._run(done, others)
        done.ended = time.perf_counter_ns()
        if not is_complete:
            self._give_up(done, others)
        labels.span += recording.num_spans
        for role in recording.freed:
            freed = others.get(role)
            if isinstance(freed, StorageAllocation):
                self.forget(freed)
        return done

    def _run(self, done: Replay, others: _Others) -> bool:
        """Sends the requests and frees of a replay to the allocator; returns whether all were served."""
        recording, num_own = done.recording, len(done.blocks)
        owners = [self._owner_of(role, done.forward, others) for role in recording.used]
        blocks = done.blocks + [
            each.block if isinstance(each, StorageAllocation) else each[0].blocks[each[1]] for each in owners
        ]
        served = self.memory.run(recording.operations, blocks)
        done.blocks = blocks[:num_own]
        for each, block in zip(owners, blocks[num_own:], strict=True):
            if isinstance(each, StorageAllocation):
                each.block = block
            else:
                each[0].blocks[each[1]] = block
        done.num_bytes = served.num_bytes
        done.reserved = [(int(recording.on_device[place]), change) for place, change in served.changes]
        num_served, operations = len(served.num_bytes), recording.operations
        signs = np.where(operations.table[:num_served, 1] > 0, 1, -1)
        is_complete = num_served == len(operations)
        on_host = (recording.host_bytes, recording.most_host_bytes) if is_complete else (0, 0)
        self.log.add(num_served, int(signs @ served.num_bytes), *on_host)
        return is_complete

    @staticmethod
    def _owner_of(role: Role, forward: Replay | None, others: _Others) -> StorageAllocation | tuple[Replay, int]:
        """Returns what has the block of a role that a replayed pass finds."""
        if role.owner != FORWARD:
            return others[role]
        assert forward is not None, "only a backward pass has roles of its forward pass"
        return forward, role.number

    def _give_up(self, done: Replay, others: _Others) -> NoReturn:
        """Ends a replay at a request that does not fit, where a step would have ended."""
        recording, labels = done.recording, self._labels
        for role in recording.freed:
            given_up = others.get(role)
            if isinstance(given_up, StorageAllocation):
                if given_up.block == NO_BLOCK:
                    self.forget(given_up)
                else:
                    self.storages.keep(given_up)
                    self._abandoned.append(given_up)
        row = int(recording.on_device[len(done.num_bytes)])
        labels.phase, module = int(recording.phase[row]), int(recording.module[row])
        labels.module = int(done.modules[module]) if module >= 0 else -1 - module
        labels.span += recording.spans_before(row)
        _, requested, stream = recording.operations.rows[len(done.num_bytes)]
        self.memory.refuse(requested, stream)

    def forget(self, allocation: StorageAllocation) -> None:
        """Marks an allocation as freed whose block a replay has freed."""
        self.memory.forget(allocation)
        allocation.freed_in_span, allocation.freed_in_step = self._labels.span, self.storages.num_steps
        allocation.num_bytes = 0

    def pin(self, allocation: StorageAllocation) -> None:
        """Makes a role of a replayed pass, which has become an allocation of its own, pinned host memory."""
        self.memory.pin(allocation, allocation.requested_bytes)

    def separate(self, done: Replay, role: int, requested_bytes: int) -> StorageAllocation:
        """Makes a role of a replayed pass, which is still allocated, an allocation of its own."""
        birth, block = done.recording.births[role], done.blocks[role]
        num_bytes = requested_bytes if block == NO_BLOCK else self.memory.allocator.num_bytes(block)
        allocation = StorageAllocation(
            num_bytes,
            done.recording.last_pools[role],
            int(done.modules[birth.module]) if birth.module >= 0 else -1 - birth.module,
            birth.phase,
            done.span + birth.span,
            birth.recomputed,
            self.storages.num_steps,
            birth.category,
            rounding_bytes=num_bytes - requested_bytes,
            requested_bytes=requested_bytes,
            birth=done.first_birth + role,
            block=block,
        )
        done.attached[role] = allocation
        done.blocks[role] = NO_BLOCK
        return allocation

    @staticmethod
    def stand_in(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a fake tensor that the meter does not count."""
        # As in `paused`, but a layer needs several, and to take the modes off their stack takes longer than all else.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def abandon(self) -> None:
        """Frees what replayed passes of this step have left allocated, after an error."""
        for done in reversed(self._replayed_passes()):
            for role, requested_bytes in done.left_allocated():
                self.storages.let_go(self.separate(done, role, requested_bytes))
        for allocation in self._abandoned:
            self.storages.let_go(allocation)
        self._abandoned.clear()


def _blocks_of(
    count: int,
    by_number: Mapping[int, StorageAllocation],
    of_passes: Mapping[int, tuple[Replay, int]] = MappingProxyType({}),
) -> npt.NDArray[np.int64]:
    """Returns the blocks of storages by their numbers, or `NO_BLOCK`; `of_passes` are roles of replayed passes."""
    blocks = np.full(count, NO_BLOCK, dtype=np.int64)
    blocks[list(by_number)] = [each.block for each in by_number.values()]
    blocks[list(of_passes)] = [each.blocks[role] for each, role in of_passes.values()]
    return blocks
