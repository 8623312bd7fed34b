"""What backward passes through layers leave allocated until the layers' next passes free it."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab.meter.allocations import Allocation, StorageAllocation
from memlab.meter.labels import Labels
from memlab.meter.recording import RETAINED, Role
from memlab.meter.repeater import Repeater
from memlab.replay.offload_calls import Saved
from memlab.replay.passes import Pass, PassesOfStep, Unit
from memlab.replay.units import Units

_LAYER = re.compile(r"^decoder\.layers\.\d+")


@dataclass(slots=True, eq=False)
class Retention:
    """Follows what each layer's last backward pass has left allocated, as far as no later pass has freed it."""

    labels: Labels
    meter: Repeater
    units: Units
    step: PassesOfStep
    _of_layers: defaultdict[int, list[StorageAllocation]] = field(default_factory=lambda: defaultdict(list))
    _freed_by_pass: dict[int, StorageAllocation] = field(default_factory=dict)
    """What a unit's next pass freed, by its identity."""

    def of(self, unit: Unit) -> list[StorageAllocation]:
        """Returns what a unit retains."""
        return [each for layer in unit.layers for each in self._of_layers[layer]]

    def replace(self, unit: Unit, left: list[StorageAllocation]) -> None:
        """Says what a unit retains from now on."""
        for layer in unit.layers:
            self._of_layers[layer] = []
        for each in left:
            self._of_layers[self.units.layer_of(unit, each)].append(each)

    def add(self, unit: Unit, left: list[StorageAllocation]) -> None:
        """Says what a unit retains beside what no pass has freed, such as the angles that its first pass has made."""
        kept = [each for each in self.of(unit) if each.num_bytes]
        self.replace(unit, [*kept, *(each for each in left if not any(each is other for other in kept))])

    @property
    def has_orphans(self) -> bool:
        """Whether a replayed pass has left something allocated that no storage stands for."""
        return any(each.key < 0 for of_layer in self._of_layers.values() for each in of_layer)

    def forget(self) -> None:
        """Forgets what passes have freed."""
        self._freed_by_pass.clear()

    def release(self) -> None:
        """Frees what replayed passes retain."""
        for allocation in [each for of_layer in self._of_layers.values() for each in of_layer]:
            if allocation.key < 0 and allocation.num_bytes:
                self.meter.storages.let_go(allocation)
        self._of_layers.clear()

    def categorise(self) -> None:
        """Gives what replayed passes left allocated the category of what stepped passes of equal layers left."""
        known: dict[Any, int | None] = {}
        kinds = self.units.kinds_of_layers
        retained = [(kinds[layer], each) for layer, of_layer in self._of_layers.items() for each in of_layer]
        for kind, allocation in retained:
            if allocation.key >= 0:
                known[kind, self._label(allocation)] = allocation.category
        for kind, allocation in retained:
            if allocation.key < 0:
                allocation.category = known.get((kind, self._label(allocation)))

    def _label(self, allocation: StorageAllocation) -> tuple[str, int, int]:
        """Returns what a retained storage has in common with those of equal layers."""
        module = _LAYER.sub("", self.labels.modules[allocation.module])
        return module, allocation.phase, allocation.requested_bytes

    def take_result(self, unit: Unit) -> None:
        """Counts what a unit's last pass returned as retained, if it is still allocated: a checkpoint's leaf has it."""
        self.drop_freed(unit)
        self._take_leaf(unit)
        one = unit.last_backward
        if one is None or one.is_leaf or not (one is unit.last_pass or self.step.refills):
            return
        retained, result = self.of(unit), one.left.result
        if result is not None and result.num_bytes and not any(result is known for known in retained):
            place = len(one.left.others)
            if one.kept is None:
                unit.held[place:] = [storage_of(result)]
            else:
                self.hold(unit, result, place)
            retained.append(result)
        one.kept = None
        self.replace(unit, retained)

    def _take_leaf(self, unit: Unit) -> None:
        """Counts the input of an opened checkpoint, and its gradient, as retained by its last layer.

        The graph of each of its layers may keep them, and the last layer is the last one whose next pass drops it.
        """
        first = unit.opening.last_backward if unit.opening is not None and unit.ends_checkpoint else None
        if first is None:
            return
        retained = self.of(unit)
        for each in (first.input, first.left.result):
            if each is not None and each.num_bytes and not any(each is known for known in retained):
                retained.append(each)
        self.replace(unit, retained)

    def hold(self, unit: Unit, allocation: StorageAllocation, place: int) -> None:
        """Keeps what a replayed pass leaves, in the storage that stands for it, if there is one."""
        meter = self.meter
        meter.storages.hand_over(allocation)
        held = unit.held[place] if place < len(unit.held) else None
        storage = None if held is None else held()
        if storage is not None and storage.nbytes() == allocation.requested_bytes:
            meter.storages.follow(storage, allocation)
        else:
            meter.storages.keep(allocation)

    def drop_freed(self, unit: Unit, *, by_pass: bool = False) -> None:
        """Drops what is not allocated any more; `by_pass` says whether the unit's own pass has freed it."""
        for each in self.of(unit) if by_pass else ():
            if not each.num_bytes:
                self._freed_by_pass[id(each)] = each
        for layer in unit.layers:
            self._of_layers[layer] = [each for each in self._of_layers[layer] if each.num_bytes]

    def let_go(self, unit: Unit, of_previous: Iterable[StorageAllocation]) -> None:
        """Frees what replayed passes have left that no storage stands for."""
        for each in [*self.of(unit), *of_previous]:
            if each.key < 0 and each.num_bytes:
                self.meter.storages.let_go(each)

    def letting_go(
        self, unit: Unit, reference: list[tuple[int, Role]], of_previous: Mapping[Role, StorageAllocation]
    ) -> Callable[[int, Allocation], None] | None:
        """Returns what frees, in a stepped pass, what a replayed one left: at the places of an equal layer's pass."""
        orphans = {Role(RETAINED, place): each for place, each in enumerate(self.of(unit)) if each.key < 0}
        orphans.update(of_previous)
        if not orphans:
            return None
        waiting = [(number, orphans[role]) for number, role in reversed(reference) if role in orphans]
        num_allocated = 0

        def let_go() -> None:
            while waiting and waiting[-1][0] <= num_allocated:
                self.meter.storages.let_go(waiting.pop()[1])

        def after_event(delta: int, allocation: Allocation) -> None:
            nonlocal num_allocated
            num_allocated += delta > 0 and allocation.stream == 0
            let_go()

        let_go()
        return after_event

    def graph_freed(self, one: Pass) -> None:
        """Frees what a layer would free when its part of the graph is freed."""
        if one.source is None:  # backward did not reach it
            return
        freed = self._freed_with_graph(one.source) | one.left.in_graph
        for allocation in [one.left.others[place] for place in sorted(freed)]:
            if allocation.num_bytes:
                self.meter.storages.let_go(allocation)

    def settle(self, source: Pass) -> None:
        """Notes what the graph of a stepped pass has freed, before a model starts over, and drops the rest of it."""
        source.left.freed = self._freed_with_graph(source)
        source.saved, source.kept = Saved(), None
        source.roles.clear()

    def _freed_with_graph(self, source: Pass) -> frozenset[int]:
        """Returns places in what a stepped pass has left."""
        if source.left.freed is not None:
            return source.left.freed
        others = enumerate(source.left.others)
        return frozenset(place for place, each in others if not each.num_bytes and id(each) not in self._freed_by_pass)


def storage_of(allocation: StorageAllocation) -> weakref.ref[Any] | None:
    """Returns the storage that stands for an allocation, if there is one."""
    storage = None if allocation.reference is None else allocation.reference()
    return None if storage is None else weakref.ref(storage)
