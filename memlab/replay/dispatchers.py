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

    def allocations(self, unit: Unit) -> set[tuple[Reference, int]]:
        """Returns the references of a unit's dispatchers, and the identities of the allocations that they refer to."""
        return {(each, id(self.meter.storages.allocation_of(tensor))) for each, tensor in self.tensors(unit)}

    def keeps_states(self, unit: Unit, given: torch.Tensor) -> bool:
        """Whether a unit's dispatchers refer to a graph in which one of its checkpoints keeps random states."""
        return have_checkpoint([tensor for _, tensor in self.tensors(unit)], given)

    def have_graph(self, unit: Unit) -> bool:
        """Whether a unit's dispatchers refer to a graph."""
        return any(tensor.grad_fn is not None for _, tensor in self.tensors(unit))

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
        left, places, opening = one.left, _places_of(one.left), one.unit.opening
        missing = set(range(len(left.others))) - left.in_graph
        if left.result is not None and opening is None:
            places[id(left.result)] = len(left.others)
        found = []
        for reference, tensor in self.tensors(one.unit):
            own = places.get(id(self.meter.storages.allocation_of(tensor)), -1)
            leaves = list(_tensors_of_leaves(tensor.grad_fn))
            kept = {own} | {places.get(id(self.meter.storages.allocation_of(each)), -1) for each in leaves}
            kept -= left.in_graph | {-1}
            missing -= kept
            keeps_leaf = opening is not None and bool(leaves)
            if kept or keeps_leaf:
                found.append(Holder(reference, own, frozenset(kept), keeps_leaf))
        if missing or not found:
            return
        left.holders, seen = found, set[int]()
        if opening is not None and opening is not one.unit:
            return  # what they keep in graphs is found at the first layer of the checkpoint
        for place, layer in enumerate(one.unit.layers):
            of_layer = retained_by(self.units.layers[layer].named_modules(), seen)
            left.in_graphs += [(place, each) for each in of_layer]

    def hold(self, one: Pass, result: torch.Tensor, leaf: torch.Tensor | None) -> None:
        """Lets what a replayed pass leaves be freed where the dispatchers replace the tensors that keep it.

        Args:
            one: The pass. The pass that was stepped has shown what keeps it.
            result: The gradient of its input.
            leaf: The input of the opened checkpoint that it is in.
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
        for (number, name, spec), own, kept, keeps_leaf in left.holders:
            tensor = tensors.get(own)
            if tensor is None or spec_of(tensor) != spec:
                tensor = meter.stand_in(*spec)
            if kept != {own} or keeps_leaf or tensor is not tensors.get(own):
                with unobserved():
                    tensor = tensor.detach()  # of the same storage; it must not keep itself
                setattr(tensor, _KEPT, [*(tensors[place] for place in kept), *([leaf] if keeps_leaf else ())])
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

    def kept_in_graphs(self) -> tuple[dict[int, list[Retained]], set[int]]:
        """Returns by layer what its token dispatcher would keep in a graph, where stand-ins keep it.

        Beside it the identities of the storages that stand-ins keep so, which the graphs of other layers may keep too.
        """
        found: dict[int, list[Retained]] = {}
        storages: set[int] = set()
        for unit in self.units:
            one = unit.last_pass
            if one is None or one.source is None:
                continue
            kept = [each for _, tensor in self.tensors(unit) for each in vars(tensor).get(_KEPT, ())]
            for place, each in one.left.in_graphs if kept else ():
                found.setdefault(unit.layers[place], []).append(each)
                storages |= {tensor.untyped_storage()._cdata for tensor in kept}
        return found, storages


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
