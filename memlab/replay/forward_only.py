"""Passes through layers without gradients, which memlab does not step once equal layers have shown what they do.

Such a pass leaves its output and what the layer's token dispatcher refers to, and frees what the dispatcher referred to
before. There is no graph: what keeps a storage is known. The first pass of each layer in a step is stepped, because it
may free what training has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.meter import collectives
from memlab.meter.allocations import StorageAllocation
from memlab.meter.labels import Labels
from memlab.meter.recording import INPUT, OWN, RETAINED, Recording, Replay, Role
from memlab.meter.repeater import Repeater
from memlab.replay.dispatchers import Dispatchers
from memlab.replay.offload_calls import Spec, spec_of
from memlab.replay.passes import Reference, Unit
from memlab.replay.units import Units, enter_layers


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a stepped pass has done."""

    recording: Recording
    result: int
    """The role of the output."""
    spec: Spec
    """Of the output."""
    referred: dict[Reference, int]
    """The roles of what the dispatchers refer to since."""
    sent: Counter[str]

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.recording.signature, self.result, self.spec, self.referred, self.sent


@dataclass(slots=True, eq=False)
class ForwardOnlyPasses:
    """Steps or replays the passes of one model, in steps without backward."""

    labels: Labels
    meter: Repeater
    units: Units
    dispatchers: Dispatchers
    num_replayed: int = 0
    """How many passes this step has replayed."""
    _units: dict[int, Unit] = field(default_factory=dict)
    """Those that have had a pass in this step, by the identity of their layers."""
    _shown: dict[Any, tuple[_Shown, bool]] = field(default_factory=dict)
    """The last pass by what decides about it, and whether the one before it did the same."""

    def begin(self) -> None:
        """Begins a step: it may run under other settings, and find what others have left."""
        self.num_replayed = 0
        self._units.clear()
        self._shown.clear()

    def is_first(self, layer: Any) -> bool:
        """Whether a pass that begins now is the layer's first one in this step."""
        if id(layer) in self._units:
            return False
        self._units[id(layer)] = self.units.alone(layer)
        return True

    def take(self, layer: Any, given: torch.Tensor, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Steps or replays a pass that is not the layer's first one, and returns its output."""
        # Megatron adds what a layer computes, and its bias, to the layer's input under ``torch.enable_grad``
        # (transformer_layer.py, 0.16.1). So there is a graph after all behind a bias, and on a stage, which receives
        # tensors that require gradients; it keeps what the stage has received.
        if given.requires_grad:
            return step()
        unit, storages = self._units[id(layer)], self.meter.storages
        found = [(each, storages.allocation_of(tensor)) for each, tensor in self.dispatchers.tensors(unit)]
        held = {id(allocation): allocation for _, allocation in found if allocation is not None}
        known = {identity: Role(RETAINED, place) for place, identity in enumerate(held)}
        refers = tuple((each, known.get(id(allocation))) for each, allocation in found)
        key = unit.kind, spec_of(given), refers, tuple(each.requested_bytes for each in held.values())
        shown, is_proven = self._shown.get(key, (None, False))
        of_input = storages.allocation_of(given)
        if shown is not None and is_proven and of_input is not None:
            return self._replay(unit, shown, of_input, list(held.values()))
        if of_input is not None:
            known[id(of_input)] = Role(INPUT, 0)
        position, span, sent = self.meter.position(), self.labels.span, collectives.sent_bytes.copy()
        result = step()
        recorded = self.meter.record(position, self.meter.position(), known, (span, self.labels.span), unit.places)
        now = None if recorded is None else self._read(unit, *recorded, result, found, sent)
        self._shown.pop(key, None)
        if now is not None:
            self._shown[key] = now, shown is not None and shown.signature == now.signature
        return result

    def _read(
        self,
        unit: Unit,
        recording: Recording,
        own: list[StorageAllocation],
        result: torch.Tensor,
        before: list[tuple[Reference, StorageAllocation | None]],
        sent: Counter[str],
    ) -> _Shown | None:
        """Returns what a stepped pass has done; None if it is not known what keeps all that it has left."""
        roles = {id(each): role for role, each in enumerate(own)}
        after = {each: self.meter.storages.allocation_of(tensor) for each, tensor in self.dispatchers.tensors(unit)}
        referred = {each: roles[id(allocation)] for each, allocation in after.items() if id(allocation) in roles}
        are_as_before = all(each in referred or (each, allocation) in before for each, allocation in after.items())
        output = roles.get(id(self.meter.storages.allocation_of(result)), -1)
        if result.requires_grad or not are_as_before or sorted([output, *referred.values()]) != sorted(recording.live):
            return None
        if not self.dispatchers.refer_to_all(unit, [each for each, _ in before]):
            return None
        return _Shown(recording, output, spec_of(result), referred, collectives.sent_since(sent))

    def _replay(
        self, unit: Unit, shown: _Shown, of_input: StorageAllocation, held: list[StorageAllocation]
    ) -> torch.Tensor:
        meter, recording = self.meter, shown.recording
        self.num_replayed += 1
        enter_layers(self.labels, unit.layers)
        others = {role: of_input if role.owner == INPUT else held[role.number] for _, role in recording.others}
        for role in recording.freed:
            meter.storages.hand_over(others[role])
        done = meter.replay(recording, unit.modules, None, others)
        done.is_over = True
        collectives.send_again(shown.sent)
        for reference, made in shown.referred.items():
            self.dispatchers.refer(unit, reference, self._stand_in(done, made, reference.spec))
        return self._stand_in(done, shown.result, shown.spec)

    def _stand_in(self, done: Replay, role: int, spec: Spec) -> torch.Tensor:
        """Returns a tensor that keeps what a replayed pass has left."""
        tensor = self.meter.stand_in(*spec)
        left = self.meter.separate(done, role, done.recording.totals[Role(OWN, role)])
        self.meter.storages.follow(tensor.untyped_storage(), left)
        return tensor
