"""Steps passes through units, and records what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memlab.engines.megatron.megatron_versions import auxiliary_losses
from memlab.meter.allocations import StorageAllocation
from memlab.meter.labels import Labels
from memlab.meter.recording import (
    FORWARD,
    GRADIENT,
    HOST_COPY,
    INPUT,
    OWN,
    PREVIOUS,
    RELOADED,
    RETAINED,
    Recording,
    Role,
)
from memlab.meter.repeater import Repeater
from memlab.replay.communication import Communication
from memlab.replay.dispatchers import Dispatchers, have_checkpoint
from memlab.replay.knowledge import Freed, Knowledge
from memlab.replay.offload_calls import Calls, RepeatedCalls, spec_of
from memlab.replay.passes import Known, Left, Mark, NotReplayableError, Pass, PassesOfStep
from memlab.replay.retention import Retention, storage_of
from memlab.vocabulary import PHASES, POOLS

_HOST, _BACKWARD = POOLS.index("host"), PHASES.index("backward")


@dataclass(slots=True, eq=False)
class Recorder:
    """Steps passes of one model, and tells what they do."""

    labels: Labels
    meter: Repeater
    step: PassesOfStep
    calls: RepeatedCalls
    retention: Retention
    dispatchers: Dispatchers
    knowledge: Knowledge
    communication: Communication
    is_stepping: bool = False
    """Whether a pass is stepped: what is called then is a part of it."""

    def forward(self, one: Pass, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Steps a forward pass."""
        unit, meter, knowledge = one.unit, self.meter, self.knowledge
        key, known = knowledge.forward(one, given), self._roles_of_others(one)
        in_flight, reference = self.step.previous(one), knowledge.freed(key)
        of_previous = self._left_to_next(in_flight, reference)
        known |= {id(allocation): role for role, allocation in of_previous.items()}
        mark = self._mark()
        if torch.is_grad_enabled() and given.grad_fn is not None:
            given.grad_fn.register_prehook(lambda gradients: self._end_backward(one, gradients[0]))
        unit.held = []
        reference = knowledge.freed_lately(key) if reference is None else reference
        meter.log.after_event = self.retention.letting_go(unit, reference, of_previous)
        try:
            result = self.stepped(step)
        finally:
            if meter.log.after_event is not None:
                meter.log.after_event = None
                self.retention.let_go(unit, of_previous.values())
        # What a pass frees of an earlier one that was stepped, and could not be recorded, has no role.
        if in_flight is None or in_flight.replay is not None or in_flight.roles:
            knowledge.note_freed(key, meter.freed_since(mark.position, known))
        self.retention.drop_freed(unit, by_pass=True)
        unit.keeps_states = self.dispatchers.keeps_states(unit, given)
        has_checkpoint = have_checkpoint([result], given)
        one.buffers = self.calls.copied_since(mark.calls)
        one.offloads_input = self.calls.has_saved(one.input, mark.calls)
        recorded = self._record(one, mark, known)
        if recorded is None:
            knowledge.not_recorded(key, one)
            # The next pass through the unit may free what this one has allocated: it needs the roles.
            if (seen := self._record(one, mark, known, ignores_unknown=True)) is not None:
                one.roles = seen[1]
        else:
            recording, one.roles = recorded
            one.roles_of_forward = recording.roles
            calls, one.saved = self.calls.forward_since(mark.calls, _places_of(one.roles))
            one.copies_allocated = calls.allocated
            one.output = _place_of(meter.storages.allocation_of(result), one.roles)
            if one.output >= 0:
                output = self._known(one, mark, recording, one.output, result, calls)
                output.keeps_states, output.has_checkpoint = unit.keeps_states, has_checkpoint
                knowledge.learn(key, output)
            else:
                knowledge.not_learned(key, one)
        node = result.grad_fn
        if node is not None:
            self.step.in_flight.append(one)
            leaf = given if one.is_leaf else None
            node.register_prehook(lambda gradients: self._begin_backward(one, gradients[0], leaf))
        return result

    def forward_without_graph(self, one: Pass, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Steps a layer in the forward pass of its checkpoint.

        Such a pass leaves its output, and what the layer's token dispatcher refers to.
        """
        unit, meter, key = one.unit, self.meter, self.knowledge.without_graph(one.unit, given)
        known = {id(each): Role(RETAINED, place) for place, each in enumerate(self.retention.of(unit))}
        if one.input is not None:
            known[id(one.input)] = Role(INPUT, 0)
        before, mark = self.dispatchers.allocations(unit), self._mark()
        result = self.stepped(step)
        self.retention.drop_freed(unit, by_pass=True)
        are_all_freed = not self.retention.of(unit)
        recorded = self._record(one, mark, known)
        if recorded is None:
            # The layer's next pass may free what this one has left.
            recorded, are_all_freed = self._record(one, mark, known, ignores_unknown=True), False
        if recorded is None:
            return result
        recording, own = recorded
        output = _place_of(meter.storages.allocation_of(result), own)
        others = [role for role in recording.live if role != output]
        left = one.left = Left(None, [own[role] for role in others])
        self.dispatchers.read_what_refers(one)
        unit.held = [storage_of(each) for each in left.others]
        self.retention.replace(unit, [*self.retention.of(unit), *left.others])
        left.referred.sort(key=lambda each: each[0])
        is_known = output in recording.live and [place for place, _ in left.referred] == list(range(len(others)))
        referred = {reference for _, reference in left.referred}
        is_known &= all(reference in referred for reference, _ in self.dispatchers.allocations(unit) - before)
        if is_known and are_all_freed and not self.dispatchers.have_graph(unit):
            self.knowledge.learn(key, self._known(one, mark, recording, output, result, Calls((), ())))
        return result

    def stepped(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the output of a pass that is stepped, so that nothing that it calls is taken for a pass."""
        self.is_stepping = True
        try:
            return step()
        finally:
            self.is_stepping = False

    def _mark(self) -> Mark:
        position, calls = self.meter.position(), self.calls.position()
        sent, num_unseen = self.communication.sent_without, self.meter.memory.num_unseen
        return Mark(position, self.labels.span, sent, calls, num_unseen, self._logs())

    def _record(
        self, one: Pass, mark: Mark, known: Mapping[int, Role], *, ignores_unknown: bool = False
    ) -> tuple[Recording, list[StorageAllocation]] | None:
        """Records the events since a mark.

        Without replay, and if `ignores_unknown`, only to know what the pass leaves allocated.
        """
        buffers = one.buffers | self.calls.copied_since(mark.calls) if self.calls.is_noting else None
        until, places, spans = self.meter.position(), one.unit.places, (mark.span, self.labels.span)
        return self.meter.record(
            *(mark.position, until, known, spans, places, buffers),
            left_out=self._logged_since(mark),
            ignores_unknown=ignores_unknown or not self.step.replays,
        )

    def _logged_since(self, mark: Mark) -> set[int]:
        """Returns identities of the storages in which Megatron logs the experts' losses, if they are new.

        The first router of a model that is not in a forward pass of a checkpoint allocates them, for all layers.
        """
        return self._logs() - mark.logs

    def _logs(self) -> set[int]:
        logs = auxiliary_losses() if self.step.is_moe else ()
        return {id(self.meter.storages.allocation_of(each)) for each in logs}

    def _known(
        self, one: Pass, mark: Mark, recording: Recording, role: int, result: torch.Tensor, calls: Calls
    ) -> Known:
        last = one.unit.places.get(self.labels.module, -1)
        sent = self.communication.sent_without - mark.sent
        has_unseen = self.meter.memory.num_unseen > mark.num_unseen or bool(self._logged_since(mark))
        return Known(recording, role, spec_of(result), one, calls, sent, last, has_unseen=has_unseen)

    def _roles_of_others(self, one: Pass) -> dict[int, Role]:
        retained = enumerate(self.retention.of(one.unit))
        known = {id(each): Role(RETAINED, place) for place, each in retained}
        previous = self.step.previous(one)
        if previous is not None and previous.replay is None:
            known |= {id(allocation): Role(PREVIOUS, role) for role, allocation in enumerate(previous.roles)}
        if one.input is not None:
            known[id(one.input)] = Role(INPUT, 0)
        return known

    def _left_to_next(self, previous: Pass | None, reference: Freed | None) -> dict[Role, StorageAllocation]:
        """Returns what a replayed pass, whose backward has not ended, has allocated and the unit's next pass frees."""
        if previous is None or previous.replay is None:
            return {}
        if reference is None and self.step.overlaps:
            raise NotReplayableError(f"what layer {previous.unit.layers[0]} frees of its previous pass is not known")
        replay = previous.replay
        roles = [role for _, role in reference or () if role.owner == PREVIOUS]
        totals = replay.recording.totals
        return {role: self.meter.separate(replay, role.number, totals[Role(OWN, role.number)]) for role in roles}

    def _begin_backward(self, one: Pass, gradient: torch.Tensor, leaf: torch.Tensor | None) -> None:
        self.retention.take_result(one.unit)
        one.backward = self._mark()
        one.gradient = self.meter.storages.allocation_of(gradient)
        one.saves_input = one.input is not None and one.input.num_bytes > 0
        one.reloaded, one.host_copies = one.saved.reloaded(self.meter), one.saved.host_copies(self.meter)
        if leaf is not None:
            # No node follows, and autograd may add up the gradients of parameters after that of a leaf.
            def end() -> None:
                assert leaf.grad is not None, "backward has reached it"
                self._end_backward(one, leaf.grad)

            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, one: Pass, gradient: torch.Tensor) -> None:
        mark = one.backward
        if one.is_over or mark is None:
            return
        self.step.end(one)
        key = self.knowledge.backward(one, is_latest=self.step.is_latest(one))
        recorded = None
        if one.output >= 0 and one.gradient is not None:
            recorded = self._record(one, mark, self._roles_in_backward(one))
        if recorded is None:
            self.knowledge.not_recorded(key, one)
            return
        recording, own = recorded
        result = _place_of(self.meter.storages.allocation_of(gradient), own)
        calls = self.calls.backward_since(mark.calls, _places_of(own), one.saved)
        self._read_what_is_left(one, mark, own, result)
        if result >= 0 and calls is not None and self._may_be_repeated(one, recording):
            self.knowledge.learn(key, self._known(one, mark, recording, result, gradient, calls))
        else:
            self.knowledge.not_learned(key, one)

    def _roles_in_backward(self, one: Pass) -> dict[int, Role]:
        known = self._roles_of_others(one) if self.step.refills else {}
        known |= {id(allocation): Role(HOST_COPY, number) for number, allocation in enumerate(one.host_copies)}
        known |= {id(allocation): Role(RELOADED, number) for number, allocation in enumerate(one.reloaded)}
        known |= {id(allocation): Role(FORWARD, role) for role, allocation in enumerate(one.roles)}
        if one.input is not None:
            known[id(one.input)] = Role(INPUT, 0)
        if one.gradient is not None:
            known[id(one.gradient)] = Role(GRADIENT, 0)
        return known

    def _read_what_is_left(self, one: Pass, mark: Mark, own: list[StorageAllocation], result: int) -> None:
        of_manager = one.buffers | self.calls.copied_since(mark.calls)
        others = [each for role, each in enumerate(one.roles) if role != one.output and each.num_bytes]
        others += [each for role, each in enumerate(own) if role != result and each.num_bytes]
        others = [each for each in others if id(each) not in of_manager]
        if one.input is not None and one.input.num_bytes and not one.is_leaf:
            others.append(one.input)
        left = one.left = Left(own[result] if result >= 0 else None, others)
        self.dispatchers.read_what_refers(one)
        unit, on_host = one.unit, {place for place, each in enumerate(others) if each.pool == _HOST}
        left.in_graph = frozenset(on_host - {place for place, _ in left.referred})
        if unit.last_pass is one or self.step.refills:
            self.retention.drop_freed(unit, by_pass=self.step.refills)
            unit.held = [storage_of(each) for each in others]
            self.retention.add(unit, left.retained())
        self.dispatchers.read_holders(one)

    def _may_be_repeated(self, one: Pass, recording: Recording) -> bool:
        """Whether it is known what frees all that a backward pass has left."""
        if Role(FORWARD, one.output) in recording.totals:
            return False
        if any(each is not None and each.phase == _BACKWARD and each.num_bytes for each in one.reloaded):
            return False  # something else keeps a copy that a replay would free
        left = one.left
        if one.unit.is_in_checkpoint:  # the graph of what a dispatcher refers to may keep the checkpoint's input
            return not self.step.is_moe or bool(left.holders)
        return not (self.step.is_moe and one.unit.is_checkpoint and left.retained()) or bool(left.holders)


def _places_of(roles: list[StorageAllocation]) -> dict[int, int]:
    return {id(allocation): role for role, allocation in enumerate(roles)}


def _place_of(allocation: StorageAllocation | None, roles: list[StorageAllocation]) -> int:
    return next((role for role, each in enumerate(roles) if each is allocation), -1)
