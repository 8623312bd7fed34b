"""Replays passes through units: what stands for their tensors, and what their graph would free."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel

from memlab.allocator.protocol import NO_BLOCK
from memlab.meter import collectives
from memlab.meter.allocations import StorageAllocation
from memlab.meter.labels import Labels
from memlab.meter.recording import (
    FORWARD,
    GRADIENT,
    INPUT,
    OWN,
    PREVIOUS,
    RELOADED,
    RETAINED,
    Recording,
    Replay,
    Role,
)
from memlab.meter.repeater import Repeater
from memlab.replay.communication import Communication
from memlab.replay.dispatchers import Dispatchers
from memlab.replay.knowledge import Knowledge
from memlab.replay.offload_calls import Calls, RepeatedCalls
from memlab.replay.passes import Key, Known, NotReplayableError, Pass, PassesOfStep, Unit
from memlab.replay.retention import Retention
from memlab.replay.units import enter_layers
from memlab.vocabulary import POOLS

_HOST = POOLS.index("host")


@dataclass(slots=True, eq=False)
class Replayer:
    """Replays passes of one model."""

    labels: Labels
    meter: Repeater
    step: PassesOfStep
    calls: RepeatedCalls
    retention: Retention
    dispatchers: Dispatchers
    knowledge: Knowledge
    communication: Communication
    num_replayed: int = 0
    """Forward passes through layers that this step has replayed, those of a recompute included."""

    def may_replay(self, one: Pass, key: Key, known: Known, given: torch.Tensor) -> bool:
        """Whether a forward pass may be replayed, and its backward will be known when it begins."""
        unit, step = one.unit, self.step
        if not step.replays or one.input is None:
            return False
        if (given.grad_fn is None and not one.is_leaf) or not torch.is_grad_enabled():
            return False
        if step.frees_masks and unit.is_first:  # its checkpoint keeps the mask, which the stand-ins of others do not
            return False
        if any(self._other(one, role) is None for _, role in known.recording.others):
            return False
        if known.calls.copies and not self.calls.has_buffers_of(known.calls):
            return False
        one.copies_allocated, one.roles_of_forward = known.calls.allocated, known.recording.roles
        if step.refills and step.overlaps and not _replays_throughout(one):
            return False
        # What the last dispatcher of a stage refers to keeps the whole graph: what the stage has received and its
        # gradient, and the random states of all checkpoints. The dispatchers before it must not keep them longer.
        keeps_graph = step.previous(one) is None or True in step.may_be_latest(one)
        if unit.ends_chunk and keeps_graph and self._keeps_others(unit, known):
            return False
        return self.knowledge.presumptions.will_show_backward(one, key) or self.knowledge.will_know_backward(one)

    def _keeps_others(self, unit: Unit, known: Known) -> bool:
        """Whether what a unit's dispatchers refer to, before the pass or after it, keeps what other units have made."""
        # What the dispatchers of MoE layers that follow checkpoints refer to keeps random states of these.
        return self.step.is_moe_stage or self.step.moe_follows_checkpoints or unit.keeps_states or known.keeps_states

    def forward(self, one: Pass, known: Known, given: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
        """Replays a forward pass, and returns its output: the result of a node that replays its backward.

        Args:
            leaf: The input of the opened checkpoint that it is in.
        """
        one.unit.is_replayed = True
        self.num_replayed += len(one.unit.layers)
        self._begin_forward(one.unit)
        one.output = known.result
        source = known.source
        # An input that is copied to the host is freed as soon as the next layer has its own.
        one.saves_input = source.saves_input
        if one.saves_input is None:
            one.saves_input = source.input is not None and source.input.num_bytes > 0
        return _StandIn.apply(given, self, one, known, leaf)

    def forward_without_graph(self, one: Pass, known: Known) -> torch.Tensor:
        """Replays a layer in the forward pass of its checkpoint, and returns its output."""
        self.num_replayed += 1
        self._begin_forward(one.unit)
        replay = self._run(one, known.recording, None)
        replay.is_over = True
        collectives.send_again(known.sent)
        result = self._result(replay, known)
        self._refer(one, replay, known)
        return result

    def _refer(self, one: Pass, replay: Replay, known: Known) -> None:
        """Lets what a pass without a graph leaves, beside its output, stay in what the token dispatchers refer to."""
        unit, referred, totals = one.unit, known.source.left.referred, replay.recording.totals
        self.dispatchers.let_go_of_stand_ins(unit)
        roles = [role for role in replay.recording.live if role != known.result]
        left, unit.held = [], []
        for role, (_, reference) in zip(roles, referred, strict=True):
            tensor = self.meter.stand_in(*reference.spec)
            left.append(self.meter.separate(replay, role, totals[Role(OWN, role)]))
            self.meter.storages.follow(tensor.untyped_storage(), left[-1])
            self.dispatchers.refer(unit, reference, tensor)
            unit.held.append(weakref.ref(tensor.untyped_storage()))
        self.retention.replace(unit, left)

    def _begin_forward(self, unit: Unit) -> None:
        enter_layers(self.labels, unit.layers)
        for layer in unit.layers:
            self.communication.before_forward(layer)

    def output_of(self, one: Pass, known: Known) -> torch.Tensor:
        """Has the events of a forward pass, and returns its output."""
        unit, previous = one.unit, self.step.previous(one)
        references = [] if previous is None else self.dispatchers.references_to(previous)
        self.step.in_flight.append(one)
        one.replay = self._run(one, known.recording, None)
        collectives.send_again(known.sent)
        if self.calls.is_noting:
            one.saved, copies = self.calls.repeat_forward(known.calls)
            self._copied(one.replay, known.calls, copies)
        self.dispatchers.replace(unit, references)
        if unit.is_checkpoint or self._keeps_others(unit, known):
            self.dispatchers.detach(unit)
        self.dispatchers.let_go_of_stand_ins(unit)
        return self._result(one.replay, known)

    def gradient_of(self, one: Pass, gradient: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
        """Has the events of a backward pass, and returns the gradient of the input."""
        unit, meter, forward = one.unit, self.meter, one.replay
        assert forward is not None, "only a replayed pass has this node"
        enter_layers(self.labels, reversed(unit.layers))
        one.gradient = meter.storages.allocation_of(gradient)
        self.retention.take_result(unit)
        key = self.knowledge.backward(one, is_latest=self.step.is_latest(one))
        known, keeps_result = self._known_backward(one, key), self.knowledge.keeps_result(key)
        done = self._run_backward(one, known.recording, forward)
        collectives.send_again(known.sent)
        if self.calls.is_noting:
            self._copied(done, known.calls, self.calls.repeat_backward(known.calls, one.saved))
        result = self._result(done, known)
        if one.is_leaf and known.last_module >= 0:  # what follows, such as what a stage sends, is in it
            self.labels.module = int(unit.modules[known.last_module])
        left = _left_by(forward, done)
        forward.is_over = done.is_over = True
        self.step.end(one)
        others = [meter.separate(replay, role, size) for replay, role, size in left]
        if Role(INPUT, 0) not in known.recording.freed and not one.is_leaf:
            assert one.input is not None, "a pass without a known input is stepped"
            others += [one.input] if one.input.num_bytes else []
        of_source = known.source.left
        one.source, one.kept = known.source, result if keeps_result else None
        one.left = replace(of_source, result=meter.storages.allocation_of(result), others=others)
        self._leave(one, result, leaf)
        for layer in reversed(unit.layers):
            self.communication.after_backward(layer)
        return result

    def _leave(self, one: Pass, result: torch.Tensor, leaf: torch.Tensor | None) -> None:
        """Lets what a replayed backward pass leaves stay where a stepped one would leave it."""
        unit, meter, left = one.unit, self.meter, one.left
        if left.holders:
            one.kept = None  # the holders keep it, or nothing does
            self.dispatchers.hold(one, result, leaf)
            self.retention.add(unit, left.retained())
            return
        is_retained = unit.last_pass is one or self.step.refills
        if is_retained:
            self.dispatchers.refer_to_what_is_left(one)
        for place, allocation in enumerate(left.others):
            if place in left.in_graph:
                meter.storages.hand_over(allocation)
                meter.storages.keep(allocation)
            else:
                self.retention.hold(unit, allocation, place)
        if is_retained:
            self.retention.add(unit, left.retained())

    def _run_backward(self, one: Pass, recording: Recording, forward: Replay) -> Replay:
        """Runs a backward pass, which may free host copies of its own forward pass.

        So it is in the offload manager's first step, in which a layer's own backward brings back what the layer saved.
        """
        freed = [forward.attached.get(role.number) for role in recording.freed if role.owner == FORWARD]
        copies = [copy for copy in freed if isinstance(copy, StorageAllocation)]
        for copy in copies:
            self.meter.storages.hand_over(copy)
        done = self._run(one, recording, forward)
        for copy in copies:
            self.meter.forget(copy)
        return done

    def _known_backward(self, one: Pass, key: Key) -> Known:
        layer, known = one.unit.layers[0], self.knowledge.backward_of(one, key)
        if known is None:
            raise NotReplayableError(f"the backward of layer {layer} is not known")
        one.reloaded, one.host_copies = one.saved.reloaded(self.meter), one.saved.host_copies(self.meter)
        if any(self._other(one, role) is None for _, role in known.recording.others):
            raise NotReplayableError(f"the backward of layer {layer} frees what is not allocated")
        return known

    def at_end_of_graph(self, one: Pass) -> Any:
        """Returns an object whose end frees what a layer would free when its part of the graph is freed."""
        storage = self.meter.stand_in((0,), (1,), torch.uint8).untyped_storage()
        one.end = self.meter.storages.when_freed(storage, self.retention.graph_freed, one)
        return storage

    def _other(self, one: Pass, role: Role) -> Any:
        """Returns what stands for a role of others in a pass: an allocation, or a replay and its role; None if none."""
        if role.owner == INPUT:
            return one.input
        if role.owner == GRADIENT:
            return one.gradient
        if role.owner != PREVIOUS:
            found: list[Any] = self.retention.of(one.unit)
            if role.owner != RETAINED:
                found = one.reloaded if role.owner == RELOADED else one.host_copies
            return found[role.number] if role.number < len(found) else None
        previous = self.step.previous(one)
        if previous is None:
            return None
        if previous.replay is not None:
            has_it = previous.replay.blocks[role.number] != NO_BLOCK
            return (previous.replay, role.number) if has_it else None
        return previous.roles[role.number] if role.number < len(previous.roles) else None

    def _run(self, one: Pass, recording: Recording, forward: Replay | None) -> Replay:
        others = {role: self._other(one, role) for _, role in recording.others}
        for role in recording.freed:
            other = others.get(role)
            if isinstance(other, StorageAllocation):
                self.meter.storages.hand_over(other)
        done = self.meter.replay(recording, one.unit.modules, forward, others)
        if forward is None or self.step.refills:
            self.retention.drop_freed(one.unit, by_pass=True)
        return done

    def _copied(self, replay: Replay, calls: Calls, copies: list[torch.Tensor]) -> None:
        """Lets what a replayed pass has copied to the host or back stay in the offload manager's tensors."""
        if [(each.shape, each.dtype) for each in copies] != [like for _, like in calls.copies]:
            raise NotReplayableError("Megatron's offload manager has made other copies than in an equal layer's pass")
        recording = replay.recording
        for (role, _), tensor in zip(calls.copies, copies, strict=True):
            if role >= 0 and replay.has(role) and role in recording.live:
                made = self.meter.separate(replay, role, recording.totals[Role(OWN, role)])
                self.meter.storages.follow(tensor.untyped_storage(), made)
                if made.pool == _HOST:
                    self.meter.pin(made)

    def _result(self, replay: Replay, known: Known) -> torch.Tensor:
        tensor = self.meter.stand_in(*known.spec)
        allocation = self.meter.separate(replay, known.result, replay.recording.totals[Role(OWN, known.result)])
        self.meter.storages.follow(tensor.untyped_storage(), allocation)
        return tensor


class _StandIn(torch.autograd.Function):
    """Takes the place of a unit."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, replayer: Replayer, one: Pass, known: Known, leaf: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.replayer, ctx.one, ctx.leaf = replayer, one, leaf
        ctx.given = given if one.saves_input else None  # as the layer saves it for backward
        ctx.end = replayer.at_end_of_graph(one)
        # Tensors of the tracker, which the embedding replaces, and not copies: no pass through a layer allocates them.
        ctx.random_states = tensor_parallel.get_cuda_rng_tracker().get_states() if known.has_checkpoint else None
        return replayer.output_of(one, known)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        result = ctx.replayer.gradient_of(ctx.one, gradient, ctx.leaf)
        del ctx.given
        return result, None, None, None, None


def _replays_throughout(one: Pass) -> bool:
    """Whether a pass of an MoE layer that is recomputed on a stage is replayed: all in this step, or none.

    What a recompute frees belongs to another micro-batch's pass, and is freed by a replayed one only if that was
    replayed too. So two equal units at either end of a row are stepped: they have shown every pass, forward or
    backward, before it comes to this unit.
    """
    unit = one.unit
    is_between = unit.num_equal_before >= 2 and unit.num_equal_after >= 2
    return is_between and (unit.is_replayed or one.number == 0)


def _left_by(forward: Replay, done: Replay) -> list[tuple[Replay, int, int]]:
    """Returns what a replayed backward pass leaves allocated: whose role it is, the role, requested bytes."""
    # With what backward has filled again and left: recompute empties the storage of what it will compute again.
    totals = {role: total for (owner, role), total in done.recording.totals.items() if owner == FORWARD}
    of_forward = {role for role in forward.recording.live if totals.get(role, 0) >= 0}
    of_forward |= {role for role, total in totals.items() if total > 0}
    of_pass = forward.recording.totals
    left = [
        (forward, role, of_pass[Role(OWN, role)] + totals.get(role, 0))
        for role in sorted(of_forward)
        if forward.has(role)
    ]
    return left + [
        (done, role, done.recording.totals[Role(OWN, role)]) for role in done.recording.live if done.has(role)
    ]
