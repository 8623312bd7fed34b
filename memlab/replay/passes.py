"""Units and passes through them: what is known of one that is under way, of those in flight, and what a pass leaves."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.retained_leaves import Retained
from memlab.meter.allocations import StorageAllocation
from memlab.meter.recording import Recording, Replay
from memlab.replay.offload_calls import Calls, Saved, Spec
from memlab.replay.plan import Plan

NO_UNIT = -1
"""The kind of what is before the first unit, or behind the last one."""


class NotReplayableError(RuntimeError):
    """A pass was replayed whose backward did not turn out like the others."""


class Key(NamedTuple):
    """What decides about one direction of a pass."""

    direction: str
    kind: int
    """Of the unit."""
    circumstances: tuple[Any, ...]
    """What the unit finds."""
    neighbours: tuple[int, ...] = ()
    """Kinds of the units beside it, as far as they decide."""
    groups: tuple[Any, ...] = ()
    """As `RepeatedCalls.next_groups`."""
    roles: int = 0
    """As `Pass.roles_of_forward`, of a backward pass."""


class Mark(NamedTuple):
    """Where one direction of a stepped pass begins."""

    position: int
    """Among the meter's events."""
    span: int
    sent: Counter[str]
    """What the rank had sent."""
    calls: tuple[int, int, int]
    """As `RepeatedCalls.position`."""
    num_unseen: int
    """As `CachingMemory.num_unseen`."""
    logs: set[int]
    """Identities of the storages in which Megatron logs the experts' losses."""


class Reference(NamedTuple):
    """A tensor of a token dispatcher."""

    number: int
    """Of the dispatcher."""
    name: str
    """Of the attribute."""
    spec: Spec


class Holder(NamedTuple):
    """A tensor of a token dispatcher that keeps what a stepped pass has left: as its storage, or in its graph."""

    reference: Reference
    place: int
    """Of the tensor's own storage in what is left, the result last; -1 if it is not there."""
    kept: frozenset[int]
    """Places of all that it keeps."""
    keeps_leaf: bool = False
    """Whether its graph keeps the input of the opened checkpoint that the pass is in, and its gradient."""


@dataclass(slots=True, eq=False)
class Left:
    """What a backward pass leaves allocated."""

    result: StorageAllocation | None = None
    """The gradient of the unit's input."""
    others: list[StorageAllocation] = field(default_factory=list)
    in_graph: frozenset[int] = frozenset()
    """Places in `others` of what is freed with the graph: the random states of checkpoints."""
    referred: list[tuple[int, Reference]] = field(default_factory=list)
    """The tensors of token dispatchers that refer to what is left, each with its place in `others`."""
    holders: list[Holder] = field(default_factory=list)
    """What keeps all of it, without what is freed with the graph; or empty."""
    in_graphs: list[tuple[int, Retained]] = field(default_factory=list)
    """What the dispatchers keep in graphs, with the place of the layer in the unit."""
    freed: frozenset[int] | None = None
    """Places in `others` of what was freed with the graph, of a pass of a model that has started over since."""

    def retained(self) -> list[StorageAllocation]:
        """Returns what the unit's next pass frees."""
        return [each for place, each in enumerate(self.others) if place not in self.in_graph]


@dataclass(slots=True, eq=False)
class Unit:
    """A layer, or the layers of a checkpoint. Units of one kind at equal places have equal passes."""

    layers: tuple[int, ...]
    modules: npt.NDArray[np.int64]
    """The codes of its layers' modules, by place."""
    places: dict[int, int]
    """Places by code."""
    kind: int = NO_UNIT
    """Equal for units with equal layers of one chunk of the model."""
    before: int = NO_UNIT
    """The kind of the unit before it, below 0 if it is the first one."""
    after: int = NO_UNIT
    structure: int = NO_UNIT
    """As `kind`, without the settings but those of selective recompute."""
    place: int = 0
    """In its row of units of one kind."""
    row_length: int = 0
    """Units in its row; 0 if its kind has several rows, or if it is in a checkpoint."""
    num_equal_before: int = 0
    """Units before it that have the same kind and neighbours of the same kinds."""
    num_equal_after: int = 0
    is_checkpoint: bool = False
    """Whether full recompute steps its layers again in backward."""
    is_in_checkpoint: bool = False
    """Whether it is a layer of a checkpoint that is opened: its layers are units, and not the checkpoint."""
    ends_checkpoint: bool = False
    """Whether it is the last layer of such a checkpoint."""
    opening: Unit | None = None
    """The first layer of such a checkpoint."""
    ends_chunk: bool = False
    """Whether no layer of its chunk of the model follows it."""
    last_pass: Pass | None = None
    last_backward: Pass | None = None
    """The pass whose backward has ended last."""
    held: list[weakref.ref[Any] | None] = field(default_factory=list)
    """What stands for what its last backward pass left allocated: the storages, in the order of `Left.others`."""
    keeps_states: bool = False
    """Whether its token dispatchers refer to a graph that keeps random states of checkpoints."""
    is_replayed: bool = False
    """Whether its first pass in this step was replayed."""

    @property
    def is_first(self) -> bool:
        """Whether no other unit is before it in its chunk of the model, or in its checkpoint."""
        return self.before == NO_UNIT


@dataclass(slots=True, eq=False)
class Pass:
    """One pass through a unit: forward, and later backward."""

    unit: Unit
    number: int
    """Of the unit's passes in this step."""
    input: StorageAllocation | None
    groups: tuple[Any, ...] = ()
    """`RepeatedCalls.next_groups` at its start."""
    is_leaf: bool = False
    """Whether its input is a leaf, which keeps its storage and its gradient: a stage has received it, or a checkpoint
    has detached it."""
    output: int = -1
    """The role of its output; -1 if it cannot be recorded."""
    roles: list[StorageAllocation] = field(default_factory=list)
    """The allocations by role, of a pass that is stepped."""
    replay: Replay | None = None
    roles_of_forward: int = 0
    """`Recording.roles` of its forward pass, of which its backward pass frees some by their numbers: a layer that keeps
    angles of an earlier step allocates others than the first time."""
    copies_allocated: tuple[bool, ...] = ()
    """`Calls.allocated` of its forward pass. The roles of its other allocations, which backward frees, depend on it."""
    saved: Saved = field(default_factory=Saved)
    """What it has saved with Megatron's offload manager."""
    buffers: set[int] = field(default_factory=set)
    """Identities of the manager's host buffers that it has taken."""
    offloads_input: bool = False
    """Whether it has had the offload manager copy its input, of a pass that is stepped. The model keeps what it gives
    to the first layer, and no other layer's input."""
    saves_input: bool | None = None
    """Whether its input was still allocated when backward reached it."""
    backward: Mark | None = None
    """Where its backward begins, of a pass that is stepped."""
    gradient: StorageAllocation | None = None
    """Of its output."""
    reloaded: list[StorageAllocation | None] = field(default_factory=list)
    """What backward found on the device of what is saved."""
    host_copies: list[StorageAllocation | None] = field(default_factory=list)
    """What backward found on the host of what earlier layers have saved."""
    end: Any = None
    """Keeps the call of `Replayer.graph_freed` alive."""
    source: Pass | None = None
    """The stepped pass whose backward was replayed."""
    left: Left = field(default_factory=Left)
    kept: torch.Tensor | None = None
    """The gradient of its input, if the layer itself would keep it."""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Known:
    """A recorded pass."""

    recording: Recording
    result: int
    """The role of the output, or of the gradient of the input."""
    spec: Spec
    """Of the result."""
    source: Pass
    calls: Calls
    """To Megatron's offload manager."""
    sent: Counter[str]
    """What the rank has sent, by kind of collective."""
    last_module: int
    """The module that is current at its end, as a place in the unit; -1 for one outside."""
    keeps_states: bool = False
    """As in `Unit`, at the end of a forward pass."""
    has_checkpoint: bool = False
    """Whether a checkpoint in the graph of its output keeps random states, those of Megatron's tracker among them."""
    is_proven: bool = False
    has_unseen: bool = False
    """Whether it has made requests that are not in the recording, since it was the first to need them."""
    is_opening: bool = False
    """Whether the first pass with its key, of a model's first step, had these events and no others."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for equal passes."""
        return self.recording.signature, self.calls, self.sent


class PassesOfStep:
    """The step under way, and its passes in flight: those whose backward has not ended."""

    def __init__(self, live: LiveModel) -> None:
        layout = live.scenario.layout
        self.is_moe = live.scenario.architecture.keeps_graph
        lora = live.scenario.state.lora
        is_leaf = layout.pipeline_model_parallel_size > 1 or (lora is not None and lora.enable_input_require_grads)
        self.is_moe_stage = self.is_moe and is_leaf
        self._num_chunks = len(live.chunks)
        is_followed = layout.pipeline_stage < layout.pipeline_model_parallel_size - 1 or self._num_chunks > 1
        self.overlaps = self.is_moe and is_followed
        """Whether an MoE layer's forward pass may come between those of another micro-batch."""
        self.frees_masks = False
        """Whether the backward pass of a chunk's first unit may free a mask, which its checkpoint keeps longest."""
        self.replays = False
        """Whether passes are replayed, and what they do is learned."""
        self.refills = False
        """Whether backward passes on a stage recompute MoE layers, and give their dispatchers new tensors."""
        self.moe_follows_checkpoints = False
        """Whether MoE layers follow checkpoints: what their dispatchers refer to keeps random states of these."""
        self.num_microbatches = 1
        """How many forward passes of each layer the schedule makes."""
        self.in_flight: list[Pass] = []

    def begin(self, live: LiveModel, plan: Plan) -> None:
        """Begins a step."""
        self.replays, self.refills = plan.passes, self.is_moe_stage and plan.recomputes_moe
        is_full, method = live.config.recompute_granularity == "full", live.config.recompute_method
        has_dense = live.scenario.architecture.moe_layer_freq is not None
        recomputes_dense = has_dense and not is_full and "mlp" in (live.config.recompute_modules or ())
        self.moe_follows_checkpoints = self.is_moe and (recomputes_dense or (is_full and method == "block"))
        is_stage = live.scenario.layout.pipeline_model_parallel_size > 1
        state = live.scenario.state
        self.frees_masks = state.create_attention_mask_in_dataloader or (is_stage and state.create_attention_mask)
        self.num_microbatches = live.scenario.num_microbatches
        self.in_flight.clear()

    def end(self, one: Pass) -> None:
        """Ends the backward of a pass."""
        one.is_over = True
        one.unit.last_backward = one
        self.in_flight = [other for other in self.in_flight if other is not one]

    def previous(self, one: Pass) -> Pass | None:
        """Returns the latest other pass in flight through the same unit."""
        same = (other for other in reversed(self.in_flight) if other.unit is one.unit and other is not one)
        return next(same, None)

    def is_latest(self, one: Pass) -> bool:
        """Whether no other forward pass through the unit has begun since.

        An MoE layer's token dispatcher refers to tensors of the latest one; those of an earlier one are freed by its
        backward.
        """
        return not self.overlaps or one.unit.last_pass is one

    def may_be_latest(self, one: Pass) -> tuple[bool, ...]:
        """Returns whether a pass may be its unit's latest one when its backward begins: yes, no, or both."""
        if not self.overlaps or one.number == self.num_microbatches - 1:
            return (True,)
        return (True, False) if self._num_chunks > 1 else (False,)
