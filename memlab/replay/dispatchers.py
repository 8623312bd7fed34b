"""What the token dispatchers of MoE layers refer to, and stand-ins of it where passes are replayed.

A dispatcher keeps tensors of a pass until the layer's next pass: as an attribute, or in an attribute's graph. A
stand-in of that attribute keeps what a replayed pass leaves, so that a pass that is stepped later, perhaps in another
unit or under other settings, frees it where it replaces the attribute.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.engines.retained_leaves import Retained, retained_by
from memlab.meter.observers import unobserved
from memlab.meter.repeater import Repeater
from memlab.replay.offload_calls import spec_of
from memlab.replay.passes import Holder, Left, Pass, PassesOfStep, Reference, Unit
from memlab.replay.units import Units

_KEPT = "memlab_kept"
"""Attribute of a stand-in: stand-ins of what its graph would keep."""


@dataclass(slots=True, eq=False)
class Dispatchers:
    """Reads and replaces what the token dispatchers of a model refer to."""

    units: Units
    meter: Repeater
    step: PassesOfStep

    def _of(self, unit: Unit) -> list[Any]:
        parts = [getattr(self.units.layers[layer], "mlp", None) for layer in unit.layers]  # Mamba has no MLP
        found = [getattr(part, "token_dispatcher", None) for part in parts]
        managed = [each for one in found for each in (one, getattr(one, "_comm_manager", None))]
        return [each for each in managed if each is not None]

    def tensors(self, unit: Unit) -> Iterator[tuple[Reference, torch.Tensor]]:
        """Yields the tensors that a unit's dispatchers refer to."""
        for number, dispatcher in enumerate(self._of(unit)):
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, torch.Tensor):
                    yield Reference(number, name, spec_of(value)), value

    def keeps_states(self, unit: Unit, given: torch.Tensor) -> bool:
        """Whether a unit's dispatchers refer to a graph in which one of its checkpoints keeps random states."""
        return have_checkpoint([tensor for _, tensor in self.tensors(unit)], given)

    def detach(self, unit: Unit) -> None:
        """Drops the graph of an earlier pass, as a forward pass does that is not replayed."""
        unit.keeps_states = False
        dispatchers = self._of(unit)
        with unobserved():
            for reference, tensor in self.tensors(unit):
                if tensor.grad_fn is not None:
                    setattr(dispatchers[reference.number], reference.name, tensor.detach())

    def let_go_of_stand_ins(self, unit: Unit) -> None:
        """Drops what is kept of a replayed pass, as the unit's next forward pass does."""
        for _, tensor in self.tensors(unit):
            vars(tensor).pop(_KEPT, None)

    def references_to(self, previous: Pass) -> list[Reference]:
        """Returns what refers to a stepped pass whose backward has not ended."""
        roles = {id(allocation) for allocation in previous.roles}
        tensors = self.tensors(previous.unit)
        return [each for each, tensor in tensors if id(self.meter.storages.allocation_of(tensor)) in roles]

    def replace(self, unit: Unit, references: Iterable[Reference]) -> None:
        """Refers to other stand-ins, as a forward pass does."""
        for each in references:
            self.refer(unit, each, self.meter.stand_in(*each.spec))

    def refer(self, unit: Unit, reference: Reference, tensor: torch.Tensor) -> None:
        """Refers to another tensor."""
        setattr(self._of(unit)[reference.number], reference.name, tensor)

    def refer_to_all(self, unit: Unit, references: Iterable[Reference]) -> bool:
        """Whether the attributes of references are tensors."""
        dispatchers = self._of(unit)
        return all(isinstance(getattr(dispatchers[number], name), torch.Tensor) for number, name, _ in references)

    def read_what_refers(self, one: Pass) -> None:
        """Notes which tensors refer to what a stepped backward pass has left."""
        left, places = one.left, _places_of(one.left)
        for reference, tensor in self.tensors(one.unit):
            place = places.get(id(self.meter.storages.allocation_of(tensor)))
            if place is not None:
                left.referred.append((place, reference))

    def read_holders(self, one: Pass) -> None:
        """Notes which tensors keep what a stepped backward pass has left.

        None, if something else keeps a part of it, as on a stage. There, the graph of a recompute ends at the
        checkpoint's input, and nothing else keeps that.
        """
        if (self.step.is_moe_stage and not self.step.refills) or not self.step.replays:
            return
        left, places = one.left, _places_of(one.left)
        missing = set(range(len(left.others))) - left.in_graph
        if left.result is not None:
            places[id(left.result)] = len(left.others)
        found = []
        for reference, tensor in self.tensors(one.unit):
            own = places.get(id(self.meter.storages.allocation_of(tensor)), -1)
            leaves = _tensors_of_leaves(tensor.grad_fn)
            kept = {own} | {places.get(id(self.meter.storages.allocation_of(each)), -1) for each in leaves}
            kept -= left.in_graph | {-1}
            missing -= kept
            if kept:
                found.append(Holder(reference, own, frozenset(kept)))
        if missing or not found:
            return
        left.holders, seen = found, set[int]()
        for place, layer in enumerate(one.unit.layers):
            of_layer = retained_by(self.units.layers[layer].named_modules(), seen)
            left.in_graphs += [(place, each) for each in of_layer]

    def hold(self, one: Pass, result: torch.Tensor) -> None:
        """Lets what a replayed pass leaves be freed where the dispatchers replace the tensors that keep it.

        Args:
            one: The pass. The pass that was stepped has shown what keeps it.
            result: The gradient of its input.
        """
        meter, dispatchers, left = self.meter, self._of(one.unit), one.left
        specs = {holder.place: holder.reference.spec for holder in left.holders}
        tensors: dict[int, torch.Tensor] = {len(left.others): result}
        for place, allocation in enumerate(left.others):
            meter.storages.hand_over(allocation)
            if place in left.in_graph:
                meter.storages.keep(allocation)
                continue
            of_bytes = torch.Size([allocation.requested_bytes]), (1,), torch.uint8
            tensors[place] = meter.stand_in(*specs.get(place, of_bytes))
            meter.storages.follow(tensors[place].untyped_storage(), allocation)
        one.unit.held = []
        for (number, name, spec), own, kept in left.holders:
            tensor = tensors.get(own)
            if tensor is None or spec_of(tensor) != spec:
                tensor = meter.stand_in(*spec)
            if kept != {own} or tensor is not tensors.get(own):
                with unobserved():
                    tensor = tensor.detach()  # of the same storage; it must not keep itself
                setattr(tensor, _KEPT, [tensors[place] for place in kept])
            setattr(dispatchers[number], name, tensor)

    def refer_to_what_is_left(self, one: Pass) -> None:
        """Lets what a replayed pass leaves stay in the tensors that the dispatchers refer to, or else in stand-ins.

        A pass that is stepped later, perhaps under other settings, frees each of them where it replaces the reference.
        """
        dispatchers, held = self._of(one.unit), dict(enumerate(one.unit.held))
        tensors: dict[int, torch.Tensor] = {}
        for place, (number, name, spec) in one.left.referred:
            tensor = getattr(dispatchers[number], name, None)
            if not isinstance(tensor, torch.Tensor) or spec_of(tensor) != spec:
                tensor = tensors.get(place)
                tensor = self.meter.stand_in(*spec) if tensor is None else tensor
                setattr(dispatchers[number], name, tensor)
            tensors[place] = tensor
            held[place] = weakref.ref(tensor.untyped_storage())
        one.unit.held = [held.get(place) for place in range(max(held, default=-1) + 1)]

    def kept_in_graphs(self) -> dict[int, list[Retained]]:
        """Returns by layer what its token dispatcher would keep in a graph, where stand-ins keep it."""
        found: dict[int, list[Retained]] = {}
        for unit in self.units:
            one = unit.last_pass
            if one is None or one.source is None:
                continue
            if any(_KEPT in vars(tensor) for _, tensor in self.tensors(unit)):
                for place, each in one.left.in_graphs:
                    found.setdefault(unit.layers[place], []).append(each)
        return found


def have_checkpoint(tensors: Iterable[torch.Tensor], given: torch.Tensor) -> bool:
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


def _places_of(left: Left) -> dict[int, int]:
    return {id(each): place for place, each in enumerate(left.others)}


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
