"""Passes through layers that memlab does not step, because passes through equal layers have shown what they do.

Layers of one kind with equal shapes and settings allocate and free the same, one after the other. So the first passes
are stepped and recorded. Once two of them in a row had the same events, later passes get these events from the
recording: a stand-in takes the layer's place in Megatron's model. It returns a tensor like the layer's output, and its
backward a tensor like the gradient of the layer's input. The schedule, the embedding, the loss and the optimizer are
Megatron's own, and the allocator gets every request.

What repeats is a *unit*: a layer, or under full recompute the layers of one checkpoint. A checkpoint of many layers is
opened: its layers are units, once in the checkpoint's forward pass, and again in the recompute and the backward that
follows it. A pass is replayed only if

- a pass of a unit at the same kind of place (first, last or between others) has been recorded,
- the recorded pass had the same events as the recorded pass before it,
- every storage that the events are about is known: the layer's own, its input, the gradient of its output, what the
  unit's earlier pass left allocated, what the backward pass before it has copied back from the host, or the host copies
  of the layers before it.

On a pipeline stage, a recomputed MoE layer frees, in the backward pass of one micro-batch, what its token dispatcher
still holds from the pass before it. That pass, forward or backward, belongs to another micro-batch. While several
passes are in flight there, either all passes of such a unit in a step are replayed, or all are stepped.

A pass that may not be replayed is stepped. What autograd's graph keeps (random states of checkpoints) is freed with the
stand-in's node. What an MoE layer's token dispatcher keeps until the layer's next pass, as an attribute or in an
attribute's graph, is kept by a stand-in of that attribute, so that a pass that is stepped later, perhaps in another
unit, frees it too.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import tensor_parallel

from memlab.meter import collectives
from memlab.meter.allocations import Allocation
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
    Replay,
    Role,
)
from memlab.meter.simulated_meter import SimulatedMeter
from memlab.meter.storage_meter import StorageAllocation
from memlab.model.build import LiveModel
from memlab.model.retention.retained_leaves import Retained, retained_by
from memlab.replay.offload_calls import Calls, RepeatedCalls, Saved
from memlab.replay.plan import Plan
from memlab.upstream.patching import patched
from memlab.vocabulary import PHASES, POOLS

_HOST, _BACKWARD = POOLS.index("host"), PHASES.index("backward")
_LAYER = re.compile(r"^decoder\.layers\.\d+")
_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
_MOST_UNOPENED = 2
"""The most layers that a checkpoint may have to be one unit. In a larger checkpoint, each layer is a unit. Recompute
always steps the first layer of a checkpoint, because that layer's input is the result of no node. Of the other layers,
it steps only some in the checkpoints that backward reaches first."""
_KEPT = "memlab_kept"
"""Attribute of a stand-in of a token dispatcher: stand-ins of what its graph would keep."""


class NotReplayableError(RuntimeError):
    """A pass was replayed whose backward did not turn out like the others."""


class _Holder(NamedTuple):
    """A tensor of a token dispatcher that keeps what a stepped pass has left: as its storage, or in its graph."""

    number: int
    """Of the dispatcher."""
    name: str
    spec: _Spec
    place: int
    """Of the tensor's own storage in what is left, the result last; -1 if it is not there."""
    kept: frozenset[int]
    """Places of all that it keeps."""


@dataclass(slots=True, eq=False)
class _Unit:
    """A layer, or the layers of a checkpoint."""

    layers: list[int]
    is_checkpoint: bool = False
    """Whether full recompute steps its layers again in backward."""
    is_first: bool = False
    is_last: bool = False
    start_distance: int = 0
    """Units of its run before it."""
    end_distance: int = 0
    """Units of its run that follow it."""
    ends_chunk: bool = False
    """Whether no layer of its chunk of the model follows it."""
    run: int = 0
    """Which sequence of equal units it is in."""
    modules: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    places: dict[int, int] = field(default_factory=dict)
    kind: Any = None
    last_pass: _Pass | None = None
    last_backward: _Pass | None = None
    """The pass whose backward has ended last."""
    held: list[weakref.ref[Any] | None] = field(default_factory=list)
    """What stands for what its last backward pass left allocated: the storages, in the order of `_Pass.left`."""
    keeps_states: bool = False
    """Whether its token dispatchers refer to a graph that keeps random states of checkpoints."""
    is_replayed: bool = False
    """Whether its first pass in this step was replayed."""
    is_in_checkpoint: bool = False
    """Whether it is a layer of a checkpoint that is opened: its layers are units, and not the checkpoint."""


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass through a unit: forward, and later backward."""

    unit: _Unit
    number: int
    """Of the unit's passes in this step."""
    output: int = -1
    """The role of its output; -1 if it cannot be recorded."""
    roles: list[StorageAllocation] = field(default_factory=list)
    """The allocations by role, of a pass that is stepped."""
    replay: Replay | None = None
    input: StorageAllocation | None = None
    backward_from: int = -1
    """The meter's position when backward reached it."""
    span: int = 0
    sent_before: Counter[str] = field(default_factory=Counter)
    """What the rank had sent when this direction of the pass began."""
    gradient: StorageAllocation | None = None
    end: Any = None
    source: _Pass | None = None
    """The stepped pass whose backward was replayed."""
    result: StorageAllocation | None = None
    """The gradient of its input."""
    left: list[StorageAllocation] = field(default_factory=list)
    """What backward left allocated, without `result`."""
    in_graph: frozenset[int] = frozenset()
    """Places in `left` of what is freed with the graph: the random states of checkpoints."""
    referred: list[tuple[int, int, str, _Spec]] = field(default_factory=list)
    """Of a pass that is stepped, the tensors of token dispatchers that refer to what backward left: place in `left`,
    number of the dispatcher, attribute."""
    holders: list[_Holder] = field(default_factory=list)
    """Of a pass that is stepped: what keeps all that backward left, without what is freed with the graph; or empty."""
    in_graphs: list[tuple[int, Retained]] = field(default_factory=list)
    """Of a pass that is stepped: what its dispatchers keep in graphs, with the place of the layer in the unit."""
    kept: torch.Tensor | None = None
    """`result`, if the layer itself would keep it."""
    groups: tuple[Any, ...] = ()
    """`RepeatedCalls.next_groups` at its start."""
    copies_allocated: tuple[bool, ...] = ()
    """`Calls.allocated` of its forward pass. The roles of its other allocations, which backward frees, depend on it."""
    saved: Saved = field(default_factory=Saved)
    """What it has saved with Megatron's offload manager."""
    calls_from: tuple[int, int] = (0, 0)
    """The numbers of calls and copies of that manager when this direction of the pass began."""
    buffers: set[int] = field(default_factory=set)
    """Identities of the manager's host buffers that it has taken."""
    reloaded: list[StorageAllocation | None] = field(default_factory=list)
    """What backward found on the device of what is saved."""
    host_copies: list[StorageAllocation | None] = field(default_factory=list)
    """What backward found on the host of what earlier layers have saved."""
    saves_input: bool | None = None
    """Whether its input was still allocated when backward reached it."""
    has_checkpoint: bool = False
    """As in `_Known`."""
    is_over: bool = False

    def retained(self) -> list[StorageAllocation]:
        """Returns what backward left to the unit's next pass, which frees it."""
        return [each for place, each in enumerate(self.left) if place not in self.in_graph]


@dataclass(slots=True, eq=False)
class _Known:
    """A recorded pass."""

    recording: Recording
    result: int
    """The role of the output, or of the gradient of the input."""
    spec: _Spec
    """Of the result."""
    is_proven: bool
    source: _Pass
    keeps_states: bool
    """As in `_Unit`, at the end of a forward pass."""
    calls: Calls
    """To Megatron's offload manager."""
    sent: Counter[str]
    """What the rank has sent, by kind of collective."""
    has_checkpoint: bool
    """Whether a checkpoint in the graph of its output keeps random states, those of Megatron's tracker among them."""


class LayerReplay:
    """Steps a layer, or replays what equal layers did.

    Args:
        live: The model.
        labels: Its labels.
        meter: Its meter.
    """

    def __init__(self, live: LiveModel, labels: Labels, meter: SimulatedMeter) -> None:
        self._live, self._labels, self._meter = live, labels, meter
        layout = live.scenario.layout
        self._is_moe = live.scenario.architecture.is_moe
        self._is_moe_stage = self._is_moe and layout.pipeline_model_parallel_size > 1
        followed = layout.pipeline_stage < layout.pipeline_model_parallel_size - 1 or len(live.chunks) > 1
        self._overlaps = self._is_moe and followed
        """Whether an MoE layer's forward pass may come between those of another micro-batch."""
        kinds: dict[Any, int] = {}
        self._kinds = [kinds.setdefault(_kind(layer), len(kinds)) for layer in live.layers]
        self._numbers = {id(layer): number for number, layer in enumerate(live.layers)}
        self._names: dict[str, int] = {}
        self._places = [self._places_of(number) for number in range(len(live.layers))]
        self._units: dict[tuple[int, ...], _Unit] = {}
        self._retained: list[list[StorageAllocation]] = [[] for _ in live.layers]
        """What the last backward pass through each layer left allocated, as far as no later pass has freed it."""
        self._learns = self._replays = False
        self._refills = False
        """Whether backward passes on a stage recompute MoE layers, and give their dispatchers new tensors."""
        self._calls = RepeatedCalls(meter)
        self._num_recomputed = 0
        """Layers of checkpoints."""
        self._is_behind_checkpoints = False
        """Whether MoE layers follow checkpoints: what their dispatchers refer to keeps random states of these."""
        self._num_microbatches = 1
        self._reference: dict[tuple[Any, ...], list[tuple[int, Role]]] = {}
        """What the forward pass that was stepped last has freed, by its key without the unit's place."""
        self._latest_of_run: dict[int, list[tuple[int, Role]]] = {}
        """What the forward pass that was stepped last in this step has freed, whatever its key."""
        self._inside = False
        self._in_checkpoint = False
        """Whether the forward pass of an opened checkpoint runs."""
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._freed_by_pass: dict[int, StorageAllocation] = {}
        """What a unit's next pass freed, by its identity."""
        self._last_signature: dict[tuple[str, int, bool], Any] = {}
        self._in_flight: list[_Pass] = []
        self.num_replayed = 0
        """Forward passes through layers that the last step replayed, those of a recompute included."""

    @contextmanager
    def during_step(self, plan: Plan) -> Iterator[None]:
        """Replays in the block, which takes one step.

        Args:
            plan: If it replays no passes, each is stepped, and nothing is learned of them: a tap may keep what they
                would free. The block is then needed only if an earlier step has replayed passes.
        """
        self._learns, self._num_microbatches = plan.passes, self._live.scenario.num_microbatches
        self._replays, self._refills = plan.passes, self._is_moe_stage and plan.recomputes_moe
        self._plan(opens=plan.passes and not plan.offloads and not self._is_moe)
        self._in_flight.clear()
        self._latest_of_run.clear()
        self._inside, self._in_checkpoint, self.num_replayed = False, False, 0
        for unit in self._units.values():
            unit.last_pass = unit.last_backward = None
            unit.is_replayed = False
            self._drop_freed(unit)  # by what is no step
        originals = [(layer, layer.forward) for layer in self._live.layers]
        checkpoint = self._checkpoint(tensor_parallel.checkpoint)
        try:
            for layer, forward in originals:
                layer.forward = self._layer_forward(layer, forward)
            num_passes = len(self._live.layers) + self._num_recomputed
            noting = self._calls.noting(num_passes) if plan.offloads else nullcontext()
            with patched({"megatron.core.tensor_parallel.checkpoint": checkpoint}), noting:
                yield
            for unit in self._units.values():
                self._retain_result(unit)
        finally:
            for layer, _ in originals:
                del layer.forward

    def leave_out(self, num_microbatches: int) -> None:
        """Says that the schedule will make so many forward passes fewer: they are inserted."""
        self._num_microbatches -= num_microbatches

    def forget(self) -> None:
        """Forgets what was recorded: the settings or the workload change."""
        for known in (self._known, self._last_signature, self._reference, self._freed_by_pass):
            known.clear()

    def release(self) -> None:
        """Frees what replayed passes retain, and drops the model."""
        for allocation in [each for of_layer in self._retained for each in of_layer]:
            if allocation.key < 0 and allocation.num_bytes:
                self._meter.let_go(allocation)
        self.forget()
        self._units.clear()
        self._retained.clear()
        self._in_flight.clear()
        del self._live

    @property
    def has_orphans(self) -> bool:
        """Whether a replayed pass has left something allocated that no storage stands for."""
        return any(each.key < 0 for of_layer in self._retained for each in of_layer)

    def abandon(self) -> None:
        """Frees what replayed passes have allocated, after an error."""
        self._meter.abandon()
        self._in_flight.clear()
        for unit in self._units.values():
            self._let_go_of_stand_ins(unit)

    def kept_in_graphs(self) -> dict[int, list[Retained]]:
        """Returns by layer what its token dispatcher would keep in a graph, where stand-ins keep it."""
        found: dict[int, list[Retained]] = {}
        for unit in self._units.values():
            one = unit.last_pass
            if one is None or one.source is None:
                continue
            if any(_KEPT in vars(tensor) for _, _, tensor in self._tensors_of_dispatchers(unit)):
                for place, each in one.source.in_graphs:
                    found.setdefault(unit.layers[place], []).append(each)
        return found

    def categorise_retained(self) -> None:
        """Gives what replayed passes left allocated the category of what stepped passes of equal layers left."""
        known: dict[Any, int | None] = {}
        by_layer = zip(self._kinds, self._retained, strict=True)
        retained = [(kind, each) for kind, of_layer in by_layer for each in of_layer]
        for kind, allocation in retained:
            if allocation.key >= 0:
                known[kind, self._label(allocation)] = allocation.category
        for kind, allocation in retained:
            if allocation.key < 0:
                allocation.category = known.get((kind, self._label(allocation)))

    def _label(self, allocation: StorageAllocation) -> tuple[str, int, int]:
        """Returns what a retained storage has in common with those of equal layers."""
        module = _LAYER.sub("", self._labels.modules[allocation.module])
        return module, allocation.phase, allocation.requested_bytes

    def _places_of(self, layer: int) -> dict[int, int]:
        """Returns the places of a layer's modules in the names of all layers' modules, by code."""
        prefix = f"decoder.layers.{layer}"
        places = {}
        for code, name in enumerate(self._labels.modules):
            if name == prefix or name.startswith(prefix + "."):
                places[code] = self._names.setdefault(name[len(prefix) :], len(self._names))
        return places

    def _plan(self, *, opens: bool) -> None:
        """Divides the layers into units, as Megatron's transformer block does under the current settings.

        Args:
            opens: Whether checkpoints of many layers are opened.
        """
        config, first = self._live.config, 0
        self._is_behind_checkpoints = (
            self._is_moe and config.recompute_granularity == "full" and config.recompute_method == "block"
        )
        former, self._units = self._units, {}
        run = 0
        for chunk in self._live.chunks:
            num_layers = len(chunk.module.decoder.layers)
            size = 1
            if config.recompute_granularity == "full" and config.recompute_method == "uniform":
                size = config.recompute_num_layers
            units = [list(range(at, min(at + size, num_layers))) for at in range(0, num_layers, size)]
            kinds = []
            for layers in units:
                is_checkpoint = config.recompute_granularity == "full" and (
                    config.recompute_method == "uniform" or layers[0] < config.recompute_num_layers
                )
                kinds.append((is_checkpoint, *(self._kinds[first + layer] for layer in layers)))
            started = 0
            for place, layers in enumerate(units):
                starts = place == 0 or kinds[place] != kinds[place - 1]
                ends = place == len(units) - 1 or kinds[place] != kinds[place + 1]
                run += starts
                started = place if starts else started
                after = next((n for n, kind in enumerate(kinds[place:]) if kind != kinds[place]), len(kinds) - place)
                key = tuple(first + layer for layer in layers)
                unit = self._units[key] = self._unit(key, former, run, starts, ends, after - 1)
                unit.start_distance = place - started
                unit.ends_chunk, unit.is_checkpoint = place == len(units) - 1, kinds[place][0]
                unit.is_in_checkpoint = False
                if opens and unit.is_checkpoint and len(layers) > _MOST_UNOPENED and len(set(kinds[place][1:])) == 1:
                    self._open(key, former, -run)
            first += num_layers
        self._num_recomputed = sum(len(unit.layers) for unit in self._units.values() if unit.is_checkpoint)

    def _open(self, layers: tuple[int, ...], former: dict[tuple[int, ...], _Unit], run: int) -> None:
        """Makes the layers of a checkpoint units of their own.

        They are the same run in each checkpoint: what the layers of one have shown holds for those of the next one.
        """
        last = len(layers) - 1
        for place, layer in enumerate(layers):
            unit = self._units[layer,] = self._unit((layer,), former, run, place == 0, place == last, last - place)
            unit.start_distance, unit.ends_chunk, unit.is_checkpoint = place, False, False
            unit.is_in_checkpoint = True

    def _unit(
        self, key: tuple[int, ...], former: dict[tuple[int, ...], _Unit], run: int, starts: bool, ends: bool, after: int
    ) -> _Unit:
        unit = former.get(key)
        if unit is None:
            unit = _Unit(list(key))
            width = len(self._names)
            unit.modules = np.zeros(width * len(key), dtype=np.int64)
            for number, layer in enumerate(key):
                for code, place in self._places[layer].items():
                    unit.places[code] = number * width + place
                    unit.modules[number * width + place] = code
        unit.is_first, unit.is_last, unit.end_distance, unit.run = starts, ends, after, run
        return unit

    def _layer_forward(self, layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        key = (self._numbers[id(layer)],)

        def forward(*args: Any, **kwargs: Any) -> Any:
            unit = self._units.get(key)
            hidden_states: Any = kwargs.get("hidden_states", args[0] if args else None)
            if self._inside or unit is None or kwargs.get("context") is not None:
                return original(*args, **kwargs)
            if unit.is_in_checkpoint:
                if self._in_checkpoint:
                    return self._pass_without_graph(unit, hidden_states, lambda: original(*args, **kwargs)[0]), None
                if not self._labels.recomputing:
                    return original(*args, **kwargs)
            elif self._labels.recomputing:
                return original(*args, **kwargs)
            result = self._pass(unit, hidden_states, lambda: original(*args, **kwargs)[0])
            return result, None

        return forward

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any, distribute: bool, *args: Any) -> Any:
            unit = None if self._inside or self._labels.recomputing else self._unit_of_checkpoint(function)
            if unit is None:
                return original(function, distribute, *args)
            if self._units.get((unit.layers[0],), unit).is_in_checkpoint:
                self._in_checkpoint = True
                try:
                    return original(function, distribute, *args)
                finally:
                    self._in_checkpoint = False
            return self._pass(unit, args[0], lambda: original(function, distribute, *args)[0]), None

        return checkpoint

    def _unit_of_checkpoint(self, function: Any) -> _Unit | None:
        """Returns the unit that ``TransformerBlock._checkpointed_forward`` checkpoints; None for another checkpoint."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names = {name: cell.cell_contents for name, cell in cells if name in ("self", "start", "end")}
        if len(names) < 3 or not hasattr(names["self"], "layers"):
            return None
        layers = names["self"].layers
        return self._units.get(tuple(self._numbers[id(layers[at])] for at in range(names["start"], names["end"])))

    def _pass(self, unit: _Unit, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        previous = unit.last_pass
        self._retain_result(unit)
        one = _Pass(unit, 0 if previous is None else previous.number + 1)
        one.input = self._meter.allocation_of(given)
        one.groups = self._calls.next_groups()
        unit.last_pass = one
        known = self._known.get(self._key(one, given))
        if known is not None and self._can_replay(one, known, given):
            unit.is_replayed = True
            return self._replay_forward(one, known, given)
        if unit.is_replayed and self._refills and self._overlaps:
            raise NotReplayableError(f"a later forward pass of layer {unit.layers[0]} is not known")
        return self._step_forward(one, previous, given, step)

    def _pass_without_graph(self, unit: _Unit, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Steps or replays a layer in the forward pass of its checkpoint, which leaves nothing but its output."""
        one = _Pass(unit, 0, input=self._meter.allocation_of(given))
        key = "without graph", unit.run, *_spec(given)
        known = self._known.get(key)
        if known is not None and known.is_proven and one.input is not None:
            self.num_replayed += 1
            self._enter(unit.layers)
            replay = self._run(one, known.recording, None)
            replay.is_over = True
            collectives.send_again(known.sent)
            return self._result(replay, known)
        at, span, one.sent_before = self._meter.position(), self._labels.span, collectives.sent_bytes.copy()
        self._inside = True
        try:
            result = step()
        finally:
            self._inside = False
        roles = {} if one.input is None else {id(one.input): Role(INPUT, 0)}
        recorded = self._record(one, at, roles, (span, self._labels.span))
        if recorded is not None:
            recording, allocations = recorded
            of_result = self._meter.allocation_of(result)
            if [allocations[role] for role in recording.live] == [of_result]:
                calls = Calls((), ())
                self._learn(key, one, recording, recording.live[0], result, calls)
        return result

    def _backward_key(self, one: _Pass, *, is_latest: bool) -> tuple[Any, ...]:
        """Returns what decides about a backward pass beside the model and the settings.

        Args:
            one: The pass.
            is_latest: Whether no other forward pass through the unit has begun since. An MoE layer's token dispatcher
                refers to tensors of the latest one; those of an earlier one are freed by its backward.
        """
        unit = one.unit
        return "backward", unit.run, unit.is_first, unit.is_last, *self._of_backward(one, is_latest=is_latest)

    def _of_backward(self, one: _Pass, *, is_latest: bool) -> tuple[Any, ...]:
        """Returns that part of the key that does not depend on the unit's place."""
        follows_backward = self._refills and self._overlaps and bool(self._retained_by(one.unit))
        return one.number > 0, is_latest, follows_backward, one.groups, one.copies_allocated

    def _is_latest(self, one: _Pass) -> bool:
        return not self._overlaps or one.unit.last_pass is one

    def _may_be_latest(self, one: _Pass) -> tuple[bool, ...]:
        """Returns whether a pass may be its unit's latest one when its backward begins: yes, no, or both."""
        if not self._overlaps or one.number == self._num_microbatches - 1:
            return (True,)
        return (True, False) if len(self._live.chunks) > 1 else (False,)

    def _key(self, one: _Pass, given: torch.Tensor) -> tuple[Any, ...]:
        """Returns what decides about a forward pass beside the model and the settings."""
        unit = one.unit
        # By places in this list the pass frees what an earlier one has left, maybe under other settings.
        retained = tuple(
            (unit.places.get(each.module, 0), each.phase, each.requested_bytes) for each in self._retained_by(unit)
        )
        earlier = retained, self._previous(one) is not None
        of_given = _spec(given), given.requires_grad
        return "forward", unit.run, unit.is_first, one.number > 0, earlier, *of_given, one.groups

    def _retained_by(self, unit: _Unit) -> list[StorageAllocation]:
        return [each for layer in unit.layers for each in self._retained[layer]]

    def _retain(self, unit: _Unit, left: list[StorageAllocation]) -> None:
        for layer in unit.layers:
            self._retained[layer] = []
        for each in left:
            at = unit.places.get(each.module, 0) // len(self._names)
            self._retained[unit.layers[at]].append(each)

    def _can_replay(self, one: _Pass, known: _Known, given: torch.Tensor) -> bool:
        unit = one.unit
        if not self._replays or not known.is_proven or one.input is None:
            return False
        # What a stage has received from another one is the result of no node, which would report its gradient.
        if given.grad_fn is None or not torch.is_grad_enabled():
            return False
        if any(self._other(one, role) is None for _, role in known.recording.others):
            return False
        if known.calls.copies and not self._calls.has_buffers_of(known.calls):
            return False
        one.copies_allocated = known.calls.allocated
        if self._refills and self._overlaps and not self._replays_throughout(one):
            return False
        # What the last dispatcher of a stage refers to keeps the whole graph: what the stage has received and its
        # gradient, and the random states of all checkpoints. The dispatchers before it must not keep them longer.
        keeps_graph = self._previous(one) is None or True in self._may_be_latest(one)
        if unit.ends_chunk and keeps_graph and self._keeps_others(unit, known):
            return False
        return all(self._will_know_backward(one, is_latest=is_latest) for is_latest in self._may_be_latest(one))

    @staticmethod
    def _replays_throughout(one: _Pass) -> bool:
        """Whether a pass of an MoE layer that is recomputed on a stage is replayed: all in this step, or none.

        What a recompute frees belongs to another micro-batch's pass, and is freed by a replayed one only if that was
        replayed too. So the three units at either end of a run are stepped: of them, two between others have shown
        every pass, forward or backward, before it comes to this unit.
        """
        unit = one.unit
        is_between = unit.start_distance >= 3 and unit.end_distance >= 3
        return is_between and (unit.is_replayed or one.number == 0)

    def _keeps_others(self, unit: _Unit, known: _Known) -> bool:
        """Whether what a unit's dispatchers refer to, before the pass or after it, keeps what other units have made."""
        return self._is_moe_stage or self._is_behind_checkpoints or unit.keeps_states or known.keeps_states

    def _will_know_backward(self, one: _Pass, *, is_latest: bool) -> bool:
        """Whether two equal backward passes will have been stepped before that of a pass which begins now."""
        unit, key = one.unit, self._backward_key(one, is_latest=is_latest)
        backward = self._known.get(key)
        if backward is not None and backward.is_proven:
            return True
        # Backward begins at the last unit, with the earliest micro-batch. Until it has ended there, a pass of the first
        # or last unit may still turn out to free what has no role.
        waiting = [each for each in self._in_flight if each.unit is unit and each.replay is None and each.output >= 0]
        equal = [each for each in waiting if self._may_be_latest(each) == (is_latest,)]
        if backward is not None and any(self._backward_key(each, is_latest=is_latest) == key for each in equal):
            return True
        return not unit.is_first and not unit.is_last and unit.end_distance >= 3

    def _other(self, one: _Pass, role: Role) -> Any:
        """Returns what stands for a role of others in a pass: an allocation, or a replay and its role; None if none."""
        unit = one.unit
        if role.owner == INPUT:
            return one.input
        if role.owner == GRADIENT:
            return one.gradient
        if role.owner in (RELOADED, HOST_COPY):
            found = one.reloaded if role.owner == RELOADED else one.host_copies
            return found[role.number] if role.number < len(found) else None
        if role.owner == RETAINED:
            retained = self._retained_by(unit)
            return retained[role.number] if role.number < len(retained) else None
        previous = self._previous(one)
        if role.owner != PREVIOUS or previous is None:
            return None
        if previous.replay is not None:
            has_it = previous.replay.blocks[role.number] is not None
            return (previous.replay, role.number) if has_it else None
        return previous.roles[role.number] if role.number < len(previous.roles) else None

    def _previous(self, one: _Pass) -> _Pass | None:
        return next((other for other in reversed(self._in_flight) if other.unit is one.unit and other is not one), None)

    def _roles_of_others(self, one: _Pass) -> dict[int, Role]:
        retained = enumerate(self._retained_by(one.unit))
        known = {id(each): Role(RETAINED, place) for place, each in retained}
        previous = self._previous(one)
        if previous is not None and previous.replay is None:
            known |= {id(allocation): Role(PREVIOUS, role) for role, allocation in enumerate(previous.roles)}
        if one.input is not None:
            known[id(one.input)] = Role(INPUT, 0)
        return known

    def _step_forward(
        self, one: _Pass, previous: _Pass | None, given: torch.Tensor, step: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        key, known = self._key(one, given), self._roles_of_others(one)
        of_equal = key[:2] + key[3:-1]
        reference = self._reference.get(of_equal)
        in_flight = self._previous(one)
        of_previous = self._left_to_next(in_flight, reference)
        known |= {id(allocation): role for role, allocation in of_previous.items()}
        at, span, one.calls_from = self._meter.position(), self._labels.span, self._calls.position()
        if torch.is_grad_enabled() and given.grad_fn is not None:
            given.grad_fn.register_prehook(lambda gradients: self._end_backward(one, gradients[0]))
        one.unit.held, one.sent_before = [], collectives.sent_bytes.copy()
        self._inside = True
        reference = self._latest_of_run.get(one.unit.run, []) if reference is None else reference
        self._meter.after_event = self._frees_of_orphans(one.unit, reference, of_previous)
        try:
            result = step()
        finally:
            self._inside = False
            if self._meter.after_event is not None:
                self._meter.after_event = None
                self._let_go(one.unit, of_previous.values())
        # What a pass frees of an earlier one that was stepped, and could not be recorded, has no role.
        if in_flight is None or in_flight.replay is not None or in_flight.roles:
            self._reference[of_equal] = self._latest_of_run[one.unit.run] = self._meter.freed_since(at, known)
        self._drop_freed(one.unit, by_pass=True)
        one.unit.keeps_states = self._keeps_states(one.unit, given)
        one.has_checkpoint = self._have_checkpoint([result], given)
        one.buffers, spans = self._calls.copied_since(one.calls_from), (span, self._labels.span)
        recorded = self._record(one, at, known, spans)
        if recorded is not None:
            recording, one.roles = recorded
            calls, one.saved = self._calls.forward_since(one.calls_from, _places_of(one.roles))
            one.copies_allocated = calls.allocated
            of_result = self._meter.allocation_of(result)
            one.output = next((role for role, each in enumerate(one.roles) if each is of_result), -1)
            if one.output >= 0:
                self._learn(key, one, recording, one.output, result, calls)
        else:
            self._last_signature.pop((*key[:2], True), None)
        node = result.grad_fn
        if node is not None:
            self._in_flight.append(one)
            node.register_prehook(lambda gradients: self._begin_backward(one, gradients[0]))
        return result

    def _keeps_states(self, unit: _Unit, given: torch.Tensor) -> bool:
        """Whether a unit's dispatchers refer to a graph in which one of its checkpoints keeps random states."""
        tensors = [tensor for _, _, tensor in self._tensors_of_dispatchers(unit)]
        return self._have_checkpoint(tensors, given)

    @staticmethod
    def _have_checkpoint(tensors: Iterable[torch.Tensor], given: torch.Tensor) -> bool:
        """Whether the graph of tensors, as far as a unit's input, has a checkpoint that keeps random states."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
        seen: set[Any] = {None, given.grad_fn}
        while waiting:
            node = waiting.pop()
            if node not in seen:
                if hasattr(node, "rng_states"):
                    return True
                seen.add(node)
                waiting += [before for before, _ in node.next_functions]
        return False

    def _retain_result(self, unit: _Unit) -> None:
        """Counts what a unit's last pass returned as retained, if it is still allocated: a checkpoint's leaf has it."""
        self._drop_freed(unit)
        one = unit.last_backward
        if one is None or not (one is unit.last_pass or self._refills):
            return
        retained = self._retained_by(unit)
        result = one.result
        if result is not None and result.num_bytes and not any(result is known for known in retained):
            if one.kept is None:
                unit.held[len(one.left) :] = [_storage_of(result)]
            else:
                self._hold(unit, result, len(one.left))
            retained.append(result)
        one.kept = None
        self._retain(unit, retained)

    def _hold(self, unit: _Unit, allocation: StorageAllocation, place: int) -> None:
        """Keeps what a replayed pass leaves, in the storage that stands for it, if there is one."""
        meter = self._meter
        meter.hand_over(allocation)
        held = unit.held[place] if place < len(unit.held) else None
        storage = None if held is None else held()
        if storage is not None and storage.nbytes() == allocation.requested_bytes:
            meter.follow(storage, allocation)
        else:
            meter.keep(allocation)

    def _drop_freed(self, unit: _Unit, *, by_pass: bool = False) -> None:
        for each in self._retained_by(unit) if by_pass else ():
            if not each.num_bytes:
                self._freed_by_pass[id(each)] = each
        for layer in unit.layers:
            self._retained[layer] = [each for each in self._retained[layer] if each.num_bytes]

    def _let_go(self, unit: _Unit, of_previous: Iterable[StorageAllocation]) -> None:
        for each in [*self._retained_by(unit), *of_previous]:
            if each.key < 0 and each.num_bytes:
                self._meter.let_go(each)

    def _left_to_next(
        self, previous: _Pass | None, reference: list[tuple[int, Role]] | None
    ) -> dict[Role, StorageAllocation]:
        """Returns what a replayed pass, whose backward has not ended, has allocated and the unit's next pass frees."""
        if previous is None or previous.replay is None:
            return {}
        if reference is None and self._overlaps:
            raise NotReplayableError(f"what layer {previous.unit.layers[0]} frees of its previous pass is not known")
        replay = previous.replay
        roles = [role for _, role in reference or () if role.owner == PREVIOUS]
        totals = replay.recording.totals
        return {role: self._meter.separate(replay, role.number, totals[Role(OWN, role.number)]) for role in roles}

    def _frees_of_orphans(
        self, unit: _Unit, reference: list[tuple[int, Role]], of_previous: Mapping[Role, StorageAllocation]
    ) -> Callable[[int, Allocation], None] | None:
        """Returns what frees, in a stepped pass, what a replayed one left: at the places of an equal layer's pass."""
        retained = enumerate(self._retained_by(unit))
        orphans = {Role(RETAINED, place): each for place, each in retained if each.key < 0}
        orphans.update(of_previous)
        if not orphans:
            return None
        waiting = [(number, orphans[role]) for number, role in reversed(reference) if role in orphans]
        num_allocated = 0

        def let_go() -> None:
            while waiting and waiting[-1][0] <= num_allocated:
                self._meter.let_go(waiting.pop()[1])

        def after_event(delta: int, allocation: Allocation) -> None:
            nonlocal num_allocated
            num_allocated += delta > 0 and allocation.stream == 0
            let_go()

        let_go()
        return after_event

    def _record(
        self, one: _Pass, first: int, known: Mapping[int, Role], spans: tuple[int, int]
    ) -> tuple[Recording, list[StorageAllocation]] | None:
        """Records the events since a position; without replay, only to know what the pass leaves allocated."""
        buffers = one.buffers | self._calls.copied_since(one.calls_from) if self._calls.is_noting else None
        until, places = self._meter.position(), one.unit.places
        return self._meter.record(first, until, known, spans, places, buffers, ignores_unknown=not self._learns)

    def _learn(
        self,
        key: tuple[Any, ...],
        one: _Pass,
        recording: Recording,
        result: int,
        tensor: Any,
        calls: Calls,
    ) -> None:
        if not self._learns:
            return
        former = self._known.get(key)
        of_run = *key[:2], self._is_latest(one)
        sent = collectives.sent_since(one.sent_before)
        signature = recording.signature, calls, sent
        same = self._last_signature.get(of_run) == signature
        same |= former is not None and (former.recording.signature, former.calls, former.sent) == signature
        self._last_signature[of_run] = signature
        self._known[key] = _Known(
            recording, result, _spec(tensor), same, one, one.unit.keeps_states, calls, sent, one.has_checkpoint
        )

    def _begin_backward(self, one: _Pass, gradient: torch.Tensor) -> None:
        self._retain_result(one.unit)
        one.backward_from, one.span = self._meter.position(), self._labels.span
        one.sent_before = collectives.sent_bytes.copy()
        one.gradient = self._meter.allocation_of(gradient)
        one.saves_input = one.input is not None and one.input.num_bytes > 0
        one.calls_from, one.reloaded = self._calls.position(), one.saved.reloaded(self._meter)
        one.host_copies = one.saved.host_copies(self._meter)

    def _end_backward(self, one: _Pass, gradient: torch.Tensor) -> None:
        """Records the backward of a pass that was stepped."""
        meter, unit = self._meter, one.unit
        if one.is_over or one.backward_from < 0:
            return
        one.is_over = True
        unit.last_backward = one
        self._in_flight = [other for other in self._in_flight if other is not one]
        key = self._backward_key(one, is_latest=self._is_latest(one))
        known = self._roles_of_others(one) if self._refills else {}
        known |= {id(allocation): Role(HOST_COPY, number) for number, allocation in enumerate(one.host_copies)}
        known |= {id(allocation): Role(RELOADED, number) for number, allocation in enumerate(one.reloaded)}
        known |= {id(allocation): Role(FORWARD, role) for role, allocation in enumerate(one.roles)}
        if one.input is not None:
            known[id(one.input)] = Role(INPUT, 0)
        if one.gradient is not None:
            known[id(one.gradient)] = Role(GRADIENT, 0)
        spans = one.span, self._labels.span
        recorded = None
        if one.output >= 0 and one.gradient is not None:
            recorded = self._record(one, one.backward_from, known, spans)
        if recorded is None:
            self._last_signature.pop((*key[:2], self._is_latest(one)), None)
            return
        recording, own = recorded
        of_result = meter.allocation_of(gradient)
        result = next((role for role, each in enumerate(own) if each is of_result), -1)
        one.result = own[result] if result >= 0 else None
        calls = self._calls.backward_since(one.calls_from, _places_of(own), one.saved)
        of_manager = one.buffers | self._calls.copied_since(one.calls_from)
        left = [each for role, each in enumerate(one.roles) if role != one.output and each.num_bytes]
        left += [each for role, each in enumerate(own) if role != result and each.num_bytes]
        left = [each for each in left if id(each) not in of_manager]
        if one.input is not None and one.input.num_bytes:
            left.append(one.input)
        one.left = left
        one.referred = self._references_to_left(one)
        on_host = {place for place, each in enumerate(left) if each.pool == _HOST}
        one.in_graph = frozenset(on_host - {place for place, *_ in one.referred})
        if unit.last_pass is one or self._refills:
            self._drop_freed(unit, by_pass=self._refills)
            unit.held = [_storage_of(each) for each in one.left]
            self._retain(unit, one.retained())
        one.holders = self._holders(one)
        if one.holders:
            modules = [(place, self._live.layers[layer].named_modules()) for place, layer in enumerate(unit.layers)]
            seen: set[int] = set()
            one.in_graphs = [(place, each) for place, of_layer in modules for each in retained_by(of_layer, seen)]
        if result < 0 or calls is None or not self._may_be_repeated(one, recording):
            return
        self._learn(key, one, recording, result, gradient, calls)

    def _may_be_repeated(self, one: _Pass, recording: Recording) -> bool:
        """Whether it is known what frees all that a backward pass has left."""
        if Role(FORWARD, one.output) in recording.totals:
            return False
        if any(each is not None and each.phase == _BACKWARD and each.num_bytes for each in one.reloaded):
            return False  # something else keeps a copy that a replay would free
        return not (self._is_moe and one.unit.is_checkpoint and one.retained()) or bool(one.holders)

    def _replay_forward(self, one: _Pass, known: _Known, given: torch.Tensor) -> torch.Tensor:
        self.num_replayed += len(one.unit.layers)
        self._enter(one.unit.layers)
        one.output = known.result
        source = known.source
        # An input that is copied to the host is freed as soon as the next layer has its own.
        one.saves_input = source.saves_input
        if one.saves_input is None:
            one.saves_input = source.input is not None and source.input.num_bytes > 0
        result: torch.Tensor = _StandIn.apply(given, self, one, known)
        return result

    def forward_of(self, one: _Pass, known: _Known) -> torch.Tensor:
        """Replays a forward pass, and returns its output."""
        previous = self._previous(one)
        references = [] if previous is None else self._references_to(previous)
        dispatchers = self._dispatchers(one.unit)
        self._in_flight.append(one)
        one.replay = self._run(one, known.recording, None)
        collectives.send_again(known.sent)
        if self._calls.is_noting:
            one.saved, copies = self._calls.repeat_forward(known.calls)
            self._copied(one.replay, known.calls, copies)
        for number, name, spec in references:
            setattr(dispatchers[number], name, self._stand_in(spec))
        if one.unit.is_checkpoint or self._keeps_others(one.unit, known):
            self._detach(one.unit)
        self._let_go_of_stand_ins(one.unit)
        return self._result(one.replay, known)

    def _references_to(self, previous: _Pass) -> list[tuple[int, str, _Spec]]:
        """Returns what the unit's token dispatchers refer to of a stepped pass whose backward has not ended."""
        roles = {id(allocation) for allocation in previous.roles}
        tensors = self._tensors_of_dispatchers(previous.unit)
        return [
            (number, name, _spec(tensor))
            for number, name, tensor in tensors
            if id(self._meter.allocation_of(tensor)) in roles
        ]

    def _references_to_left(self, one: _Pass) -> list[tuple[int, int, str, _Spec]]:
        """Returns `_Pass.referred`."""
        places = {id(each): place for place, each in enumerate(one.left)}
        found = []
        for number, name, tensor in self._tensors_of_dispatchers(one.unit):
            place = places.get(id(self._meter.allocation_of(tensor)))
            if place is not None:
                found.append((place, number, name, _spec(tensor)))
        return found

    def _dispatchers(self, unit: _Unit) -> list[Any]:
        found = [getattr(self._live.layers[layer].mlp, "token_dispatcher", None) for layer in unit.layers]
        managed = [each for one in found for each in (one, getattr(one, "_comm_manager", None))]
        return [each for each in managed if each is not None]

    def _tensors_of_dispatchers(self, unit: _Unit) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yields the number of the dispatcher, the attribute and the tensor."""
        for number, dispatcher in enumerate(self._dispatchers(unit)):
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, torch.Tensor):
                    yield number, name, value

    def _detach(self, unit: _Unit) -> None:
        """Drops the graph of an earlier pass from a unit's dispatchers, as a forward pass does that is not replayed."""
        unit.keeps_states = False
        dispatchers = self._dispatchers(unit)
        with self._meter.paused():
            for number, name, tensor in self._tensors_of_dispatchers(unit):
                if tensor.grad_fn is not None:
                    setattr(dispatchers[number], name, tensor.detach())

    def _let_go_of_stand_ins(self, unit: _Unit) -> None:
        """Drops what a unit's dispatchers keep of a replayed pass, as the unit's next forward pass does."""
        for _, _, tensor in self._tensors_of_dispatchers(unit):
            vars(tensor).pop(_KEPT, None)

    def _holders(self, one: _Pass) -> list[_Holder]:
        """Returns `_Pass.holders`; none if something else keeps a part of what is left, as on a stage.

        The graph of a recompute ends at the checkpoint's input, and nothing else keeps that.
        """
        if (self._is_moe_stage and not self._refills) or not self._learns:
            return []
        meter, places = self._meter, {id(each): place for place, each in enumerate(one.left)}
        missing = set(range(len(one.left))) - one.in_graph
        if one.result is not None:
            places[id(one.result)] = len(one.left)
        found = []
        for number, name, tensor in self._tensors_of_dispatchers(one.unit):
            own = places.get(id(meter.allocation_of(tensor)), -1)
            kept = {places.get(id(meter.allocation_of(each)), -1) for each in _tensors_of_leaves(tensor.grad_fn)}
            kept = (kept | {own}) - one.in_graph - {-1}
            missing -= kept
            if kept:
                found.append(_Holder(number, name, _spec(tensor), own, frozenset(kept)))
        return [] if missing else found

    def _hold_in_dispatchers(self, one: _Pass, source: _Pass, result: torch.Tensor) -> None:
        """Lets what a replayed pass leaves be freed where the dispatchers replace the tensors that keep it."""
        meter, dispatchers = self._meter, self._dispatchers(one.unit)
        specs = {holder.place: holder.spec for holder in source.holders}
        tensors: dict[int, torch.Tensor] = {len(one.left): result}
        for place, allocation in enumerate(one.left):
            meter.hand_over(allocation)
            if place in one.in_graph:
                meter.keep(allocation)
                continue
            of_bytes = torch.Size([allocation.requested_bytes]), (1,), torch.uint8
            tensors[place] = self._stand_in(specs.get(place, of_bytes))
            meter.follow(tensors[place].untyped_storage(), allocation)
        one.unit.held = []
        for number, name, spec, own, kept in source.holders:
            tensor: Any = tensors[own] if own in tensors and _spec(tensors[own]) == spec else self._stand_in(spec)
            if kept != {own} or tensor is not tensors.get(own):
                with meter.paused():
                    tensor = tensor.detach()  # of the same storage; it must not keep itself
                setattr(tensor, _KEPT, [tensors[place] for place in kept])
            setattr(dispatchers[number], name, tensor)

    def _refer_to_what_is_left(self, one: _Pass, source: _Pass) -> None:
        """Lets what a replayed pass leaves stay in the tensors that the dispatchers refer to, or else in stand-ins.

        A pass that is stepped later, perhaps under other settings, frees each of them where it replaces the reference.
        """
        dispatchers, held = self._dispatchers(one.unit), dict(enumerate(one.unit.held))
        tensors: dict[int, torch.Tensor] = {}
        for place, number, name, spec in source.referred:
            tensor = getattr(dispatchers[number], name, None)
            if not isinstance(tensor, torch.Tensor) or _spec(tensor) != spec:
                tensor = tensors.get(place)
                tensor = self._stand_in(spec) if tensor is None else tensor
                setattr(dispatchers[number], name, tensor)
            tensors[place] = tensor
            held[place] = weakref.ref(tensor.untyped_storage())
        one.unit.held = [held.get(place) for place in range(max(held, default=-1) + 1)]

    def _stand_in(self, spec: _Spec) -> torch.Tensor:
        return self._meter.stand_in(*spec)

    def backward_of(self, one: _Pass, gradient: torch.Tensor) -> torch.Tensor:
        """Replays a backward pass, and returns the gradient of the input."""
        unit, meter, forward = one.unit, self._meter, one.replay
        assert forward is not None
        self._enter(reversed(unit.layers))
        one.gradient = meter.allocation_of(gradient)
        is_latest = self._is_latest(one)
        self._retain_result(unit)
        of_backward = self._of_backward(one, is_latest=is_latest)
        known = self._known_backward(one, is_latest=is_latest)
        done = self._run_backward(one, known.recording, forward)
        collectives.send_again(known.sent)
        if self._calls.is_noting:
            self._copied(done, known.calls, self._calls.repeat_backward(known.calls, one.saved))
        result = self._result(done, known)
        one.result = meter.allocation_of(result)
        between = self._known.get(("backward", unit.run, False, False, *of_backward))
        if between is not None and Role(GRADIENT, 0) not in between.recording.freed:
            one.kept = result
        left = self._left_by(forward, done)
        forward.is_over = done.is_over = one.is_over = True
        unit.last_backward = one
        self._in_flight = [other for other in self._in_flight if other is not one]
        for replay, role, size in left:
            one.left.append(meter.separate(replay, role, size))
        if Role(INPUT, 0) not in known.recording.freed:
            assert one.input is not None
            one.left += [one.input] if one.input.num_bytes else []
        one.source, one.in_graph = known.source, known.source.in_graph
        if known.source.holders:
            one.kept = None  # the holders keep it, or nothing does
            self._hold_in_dispatchers(one, known.source, result)
            self._retain(unit, one.retained())
            return result
        is_retained = unit.last_pass is one or self._refills
        if is_retained:
            self._refer_to_what_is_left(one, known.source)
        for place, allocation in enumerate(one.left):
            if place in one.in_graph:
                meter.hand_over(allocation)
                meter.keep(allocation)
            else:
                self._hold(unit, allocation, place)
        if is_retained:
            self._retain(unit, one.retained())
        return result

    def _run_backward(self, one: _Pass, recording: Recording, forward: Replay) -> Replay:
        """Runs a backward pass, which may free host copies of its own forward pass.

        So it is in the offload manager's first step, in which a layer's own backward brings back what the layer saved.
        """
        freed = [forward.attached.get(role.number) for role in recording.freed if role.owner == FORWARD]
        copies = [copy for copy in freed if isinstance(copy, StorageAllocation)]
        for copy in copies:
            self._meter.hand_over(copy)
        done = self._run(one, recording, forward)
        for copy in copies:
            self._meter.forget(copy)
        return done

    def _known_backward(self, one: _Pass, *, is_latest: bool) -> _Known:
        layer, known = one.unit.layers[0], self._known.get(self._backward_key(one, is_latest=is_latest))
        if known is None or not known.is_proven:
            raise NotReplayableError(f"the backward of layer {layer} is not known")
        one.reloaded, one.host_copies = one.saved.reloaded(self._meter), one.saved.host_copies(self._meter)
        if any(self._other(one, role) is None for _, role in known.recording.others):
            raise NotReplayableError(f"the backward of layer {layer} frees what is not allocated")
        return known

    def _left_by(self, forward: Replay, done: Replay) -> list[tuple[Replay, int, int]]:
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

    def at_end_of_graph(self, one: _Pass) -> Any:
        """Returns an object with which `graph_freed` is called when it is freed."""
        storage = self._meter.stand_in((0,), (1,), torch.uint8).untyped_storage()
        one.end = self._meter.when_freed(storage, self.graph_freed, one)
        return storage

    def graph_freed(self, one: _Pass) -> None:
        """Frees what a layer would free when its part of the graph is freed."""
        source = one.source
        if source is None:  # backward did not reach it
            return
        for place, allocation in enumerate(source.left):
            has_freed = not allocation.num_bytes and id(allocation) not in self._freed_by_pass
            if (has_freed or place in one.in_graph) and one.left[place].num_bytes:
                self._meter.let_go(one.left[place])

    def _run(self, one: _Pass, recording: Recording, forward: Replay | None) -> Replay:
        others = {role: self._other(one, role) for _, role in recording.others}
        for role in recording.freed:
            other = others.get(role)
            if isinstance(other, StorageAllocation):
                self._meter.hand_over(other)
        done = self._meter.replay(recording, one.unit.modules, forward, others)
        if forward is None or self._refills:
            self._drop_freed(one.unit, by_pass=True)
        return done

    def _copied(self, replay: Replay, calls: Calls, copies: list[torch.Tensor]) -> None:
        """Lets what a replayed pass has copied to the host or back stay in the offload manager's tensors."""
        if [(each.shape, each.dtype) for each in copies] != [like for _, like in calls.copies]:
            raise NotReplayableError("Megatron's offload manager has made other copies than in an equal layer's pass")
        recording = replay.recording
        for (role, _), tensor in zip(calls.copies, copies, strict=True):
            if role >= 0 and replay.has(role) and role in recording.live:
                made = self._meter.separate(replay, role, recording.totals[Role(OWN, role)])
                self._meter.follow(tensor.untyped_storage(), made)
                if made.pool == _HOST:
                    self._meter.pin(made)

    def _result(self, replay: Replay, known: _Known) -> torch.Tensor:
        tensor = self._stand_in(known.spec)
        allocation = self._meter.separate(replay, known.result, replay.recording.totals[Role(OWN, known.result)])
        self._meter.follow(tensor.untyped_storage(), allocation)
        return tensor

    def _enter(self, layers: Any) -> None:
        """Reports the layers to whoever follows the step."""
        labels, outer = self._labels, self._labels.module
        for layer in layers:
            labels.enter_module(labels.code(f"decoder.layers.{layer}"))
        labels.module = outer


class _StandIn(torch.autograd.Function):
    """Takes the place of a unit."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, replay: LayerReplay, one: _Pass, known: _Known) -> torch.Tensor:
        ctx.replay, ctx.one = replay, one
        ctx.given = given if one.saves_input else None  # as the layer saves it for backward
        ctx.end = replay.at_end_of_graph(one)
        # Tensors of the tracker, which the embedding replaces, and not copies: no pass through a layer allocates them.
        ctx.random_states = tensor_parallel.get_cuda_rng_tracker().get_states() if known.has_checkpoint else None
        return replay.forward_of(one, known)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        result = ctx.replay.backward_of(ctx.one, gradient)
        del ctx.given
        return result, None, None, None


def _tensors_of_leaves(root: Any) -> Iterator[torch.Tensor]:
    """Yields the leaves of a graph that are no parameters, and their gradients."""
    waiting, seen = [root], {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            yield leaf
            if leaf.grad is not None:
                yield leaf.grad


def _places_of(roles: list[StorageAllocation]) -> dict[int, int]:
    return {id(allocation): role for role, allocation in enumerate(roles)}


def _storage_of(allocation: StorageAllocation) -> weakref.ref[Any] | None:
    storage = None if allocation.reference is None else allocation.reference()
    return None if storage is None else weakref.ref(storage)


def _spec(tensor: torch.Tensor) -> _Spec:
    return tensor.shape, tensor.stride(), tensor.dtype


def _kind(layer: Any) -> Any:
    """Returns what two equal layers have in common: the shapes of all parameters, and the classes of all modules."""
    classes = tuple(type(module).__name__ for module in layer.modules())
    return classes, tuple((name, value.shape, value.dtype) for name, value in layer.named_parameters())
