"""Passes through layers that memlab does not step, because passes through equal layers have shown what they do.

Layers of one kind with equal shapes, settings and neighbours allocate and free the same. So the first passes are
stepped and recorded. Once two of them had the same events, later passes get these events from the recording: a stand-in
takes the layer's place in Megatron's model. It returns a tensor like the layer's output, and its backward a tensor like
the gradient of the layer's input. The schedule, the embedding, the loss and the optimizer are Megatron's own, and the
allocator gets every request.

What repeats is a *unit* (`memlab.replay.units`). A pass is replayed only if

- a pass of a unit of its kind between units of the same kinds has been recorded,
- the recorded pass had the same events as one recorded before or after it, or a pass at each end of its row of equal
  layers shows that in the same step (`memlab.replay.presumptions`),
- every storage that the events are about is known: the layer's own, its input, the gradient of its output, what the
  unit's earlier pass left allocated, what the backward pass before it has copied back from the host, or the host copies
  of the layers before it.

On a pipeline stage, a recomputed MoE layer frees, in the backward pass of one micro-batch, what its token dispatcher
still holds from the pass before it. That pass, forward or backward, belongs to another micro-batch. While several
passes are in flight there, either all passes of such a unit in a step are replayed, or all are stepped.

A pass that may not be replayed is stepped. What autograd's graph keeps (random states of checkpoints) is freed with the
stand-in's node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel

from memlab.config.settings import MemorySettings
from memlab.engines.megatron.build import LiveModel
from memlab.meter.labels import Labels
from memlab.meter.repeater import Repeater
from memlab.replay.communication import Communication
from memlab.replay.dispatchers import Dispatchers
from memlab.replay.forward_only import ForwardOnlyPasses
from memlab.replay.knowledge import Knowledge
from memlab.replay.offload_calls import RepeatedCalls
from memlab.replay.passes import NotReplayableError, Pass, PassesOfStep, Unit
from memlab.replay.plan import Plan
from memlab.replay.presumptions import Presumptions
from memlab.replay.recorder import Recorder
from memlab.replay.replayer import Replayer
from memlab.replay.retention import Retention
from memlab.replay.units import Units
from memlab.upstream.patching import patched


class LayerReplay:
    """Steps a layer, or replays what equal layers did."""

    def __init__(self, live: LiveModel, labels: Labels, meter: Repeater) -> None:
        self._live, self._labels, self._meter, self._units = live, labels, meter, Units(live, labels)
        self.step, self._calls = PassesOfStep(live), RepeatedCalls(meter)
        self.retention = Retention(labels, meter, self._units, self.step)
        self.dispatchers = Dispatchers(self._units, meter, self.step)
        self.presumptions = Presumptions()
        self._knowledge = Knowledge(self.step, self.retention, self.presumptions)
        self._communication = Communication(live, meter)
        knows = self.step, self._calls, self.retention, self.dispatchers, self._knowledge, self._communication
        self._recorder, self._replayer = Recorder(labels, meter, *knows), Replayer(labels, meter, *knows)
        self._forward_only = ForwardOnlyPasses(labels, meter, self._units, self.dispatchers)
        self._replays_forward_only = False
        self._in_checkpoint = False
        """Whether the forward pass of an opened checkpoint runs."""
        self._leaf: torch.Tensor | None = None
        """The input of the opened checkpoint whose layers are stepped again."""

    @property
    def num_replayed(self) -> int:
        """Forward passes through layers that the last step replayed, those of a recompute included."""
        return self._replayer.num_replayed + self._forward_only.num_replayed

    @contextmanager
    def during_step(self, plan: Plan) -> Iterator[None]:
        """Replays in the block, which takes one step.

        Args:
            plan: If it replays no passes, each is stepped, and nothing is learned of them: a tap may keep what they
                would free. The block is then needed only if an earlier step has replayed passes.
        """
        self.step.begin(self._live, plan)
        self._units.divide(self._live, opens=plan.opens)
        self._knowledge.begin_step(may_presume=self._may_presume(plan))
        self._in_checkpoint, self._replayer.num_replayed = False, 0
        self._replays_forward_only = plan.forward_only_passes
        self._forward_only.begin()
        for unit in self._units:
            unit.last_pass = unit.last_backward = None
            unit.is_replayed = False
            self.retention.drop_freed(unit)  # by what is no step
        originals = [(layer, layer.forward) for layer in self._units.layers]
        checkpoint = self._checkpoint(tensor_parallel.checkpoint)
        try:
            for layer, forward in originals:
                layer.forward = self._layer_forward(layer, forward)
            num_passes = len(originals) + self._units.num_recomputed
            noting = self._calls.noting(num_passes) if plan.offloads else nullcontext()
            following = self._communication.followed() if plan.passes else nullcontext()
            with patched({"megatron.core.tensor_parallel.checkpoint": checkpoint}), noting, following:
                yield
            self.presumptions.end_step()
            for unit in self._units:
                self.retention.take_result(unit)
        finally:
            self._leaf = None
            for layer, _ in originals:
                del layer.forward

    def _may_presume(self, plan: Plan) -> bool:
        """Whether passes of a step may be replayed before they are proven: not if it may run out of memory before."""
        scenario = self._live.scenario
        is_stage = scenario.layout.pipeline_model_parallel_size > 1
        return plan.passes and not is_stage and scenario.state.lora is None and self._meter.memory.limit_bytes is None

    def forget(self) -> None:
        """Forgets what was recorded: the workload changes, or something unknown has happened."""
        self._knowledge.forget()
        self.retention.forget()

    def apply(self, settings: MemorySettings) -> None:
        """Forgets what was recorded under other settings than these."""
        self._units.apply(settings)
        self._knowledge.settings_change()
        self.retention.forget()

    def start_over(self) -> None:
        """Keeps what holds for a model that is as it was when it was built."""
        self._knowledge.start_over()

    def release(self) -> None:
        """Frees what replayed passes retain, and drops the model."""
        self.retention.release()
        self.forget()
        self.step.in_flight.clear()
        self._units.release()
        self._communication.release()
        del self._live

    def abandon(self) -> None:
        """Frees what replayed passes have allocated, after an error."""
        self._meter.abandon()
        self.step.in_flight.clear()
        for unit in self._units:
            self.dispatchers.let_go_of_stand_ins(unit)

    def _layer_forward(self, layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            def step() -> torch.Tensor:
                output: torch.Tensor = original(*args, **kwargs)[0]
                return output

            unit = self._units.of_layer(layer)
            hidden_states: Any = kwargs.get("hidden_states", args[0] if args else None)
            if self._recorder.is_stepping or kwargs.get("context") is not None:
                return original(*args, **kwargs)
            if self._replays_forward_only and not self._forward_only.is_first(layer):
                return self._forward_only.take(layer, hidden_states, lambda: self._recorder.stepped(step)), None
            take = self._pass
            if unit is None:
                return original(*args, **kwargs)
            if self._in_checkpoint and unit.is_in_checkpoint:
                take = self._pass_without_graph
            elif self._labels.recomputing != unit.is_in_checkpoint:
                return original(*args, **kwargs)
            return take(unit, hidden_states, step), None

        return forward

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any, distribute: bool, *args: Any) -> Any:
            is_within = self._recorder.is_stepping or self._labels.recomputing
            unit = None if is_within else self._units.of_checkpoint(function)
            if unit is None:
                return original(function, distribute, *args)
            if not self._units.is_opened(unit):
                return self._pass(unit, args[0], lambda: original(function, distribute, *args)[0]), None
            self._in_checkpoint = True
            try:
                return original(function, distribute, *args)
            finally:
                self._in_checkpoint = False

        return checkpoint

    def _pass(self, unit: Unit, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.retention.take_result(unit)
        number = 0 if unit.last_pass is None else unit.last_pass.number + 1
        # Of a recomputed MoE layer, its dispatcher's graph keeps the input too.
        is_leaf = given.requires_grad and given.grad_fn is None and not self.step.refills
        one = Pass(unit, number, self._meter.storages.allocation_of(given), self._calls.next_groups(), is_leaf)
        unit.last_pass = one
        if unit.opening is unit:
            self._leaf = given
        leaf = self._leaf
        if unit.ends_checkpoint:
            self._leaf = None
        key = self._knowledge.forward(one, given)
        known = self._knowledge.forward_of(one, key)
        if known is not None and self._replayer.may_replay(one, key, known, given):
            self._knowledge.begin_forward(one, key, known)
            return self._replayer.forward(one, known, given, leaf)
        if unit.is_replayed and self.step.refills and self.step.overlaps:
            raise NotReplayableError(f"a later forward pass of layer {unit.layers[0]} is not known")
        return self._recorder.forward(one, given, step)

    def _pass_without_graph(self, unit: Unit, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.retention.take_result(unit)
        one = Pass(unit, 0, self._meter.storages.allocation_of(given))
        known = self._knowledge.get(self._knowledge.without_graph(unit, given))
        if known is not None and known.is_proven and one.input is not None:
            return self._replayer.forward_without_graph(one, known)
        return self._recorder.forward_without_graph(one, given, step)
