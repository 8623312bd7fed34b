"""The units of a model that replay steps or repeats: a layer, or under full recompute the layers of one checkpoint.

A checkpoint of many layers is opened: its layers are units, once in the checkpoint's forward pass, and again in the
recompute and the backward that follows it. The token dispatchers of MoE layers keep the graph of the recompute, and
with it the checkpoint's input and its gradient, until the last layer of the checkpoint has its next pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from memlab.config.settings import MemorySettings
from memlab.engines.megatron.build import LiveModel
from memlab.meter.allocations import StorageAllocation
from memlab.meter.labels import Labels
from memlab.replay.passes import NO_UNIT, Unit

MOST_UNOPENED = 2
"""The most layers that a checkpoint may have to be one unit. In a larger checkpoint, each layer is a unit, of which
recompute steps only some in the checkpoints that backward reaches first."""


class Units:
    """Divides the layers of a model into units."""

    def __init__(self, live: LiveModel, labels: Labels) -> None:
        self._labels, self.layers = labels, live.layers
        self._kinds: dict[Any, int] = {}
        self.kinds_of_layers = [self._kinds.setdefault(_kind(layer), len(self._kinds)) for layer in self.layers]
        self._numbers = {id(layer): number for number, layer in enumerate(self.layers)}
        self._names: dict[str, int] = {}
        self._places = [self._places_of(number) for number in range(len(self.layers))]
        self._without_gradient = [_without_gradient(chunk.module) for chunk in live.chunks]
        self._units: dict[tuple[int, ...], Unit] = {}
        self._seen = {is_checkpoint: MemorySettings() for is_checkpoint in (False, True)}
        """What units see of the settings: those that are checkpoints, and the others."""
        self.num_recomputed = 0
        """Layers of checkpoints."""

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())

    def of_layer(self, layer: Any) -> Unit | None:
        """Returns the unit that is one layer; None if the layer is in a larger one."""
        return self._units.get((self._numbers[id(layer)],))

    def alone(self, layer: Any) -> Unit:
        """Returns a unit of one layer, whatever checkpoint it is in: without gradients, nothing is checkpointed."""
        unit = self._new((self._numbers[id(layer)],))
        unit.kind = self.kinds_of_layers[unit.layers[0]]
        return unit

    def of_checkpoint(self, function: Any) -> Unit | None:
        """Returns the unit that ``TransformerBlock._checkpointed_forward`` checkpoints; None for another checkpoint."""
        if not hasattr(function, "__code__"):
            return None  # a partial, with which a layer of multi-token prediction checkpoints its MLP
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names = {name: cell.cell_contents for name, cell in cells if name in ("self", "start", "end")}
        if len(names) < 3 or not hasattr(names["self"], "layers"):
            return None
        layers = names["self"].layers
        return self._units.get(tuple(self._numbers[id(layers[at])] for at in range(names["start"], names["end"])))

    def is_opened(self, checkpoint: Unit) -> bool:
        """Whether the layers of a checkpoint are units, and not the checkpoint."""
        return self._units.get(checkpoint.layers[:1], checkpoint).is_in_checkpoint

    def layer_of(self, unit: Unit, allocation: StorageAllocation) -> int:
        """Returns the layer of a unit that an allocation belongs to."""
        return unit.layers[unit.places.get(allocation.module, 0) // len(self._names)]

    def release(self) -> None:
        """Drops the model."""
        self._units.clear()
        del self.layers

    def apply(self, settings: MemorySettings) -> None:
        """Notes the settings, without what decides which units there are, but not what one does."""
        self._seen = {is_checkpoint: _seen_by(settings, is_checkpoint) for is_checkpoint in (False, True)}

    def divide(self, live: LiveModel, *, opens: bool) -> None:
        """Divides the layers as Megatron's transformer block does under the current settings.

        Args:
            live: The model, with these settings.
            opens: Whether checkpoints of many layers are opened.
        """
        config, first = live.config, 0
        is_full = config.recompute_granularity == "full"
        is_uniform = is_full and config.recompute_method == "uniform"
        former, self._units = self._units, {}
        for chunk, model in enumerate(live.chunks):
            end = first + len(model.module.decoder.layers)
            num_recomputed = config.recompute_num_layers if is_full and not is_uniform else 0
            size = config.recompute_num_layers if is_uniform else 1
            units = []
            for at in range(first, end, size):
                unit = self._unit(tuple(range(at, min(at + size, end))), former)
                unit.is_checkpoint, unit.is_in_checkpoint = is_uniform or at - first < num_recomputed, False
                unit.ends_checkpoint, unit.opening = False, None
                unit.ends_chunk = unit.layers[-1] == end - 1
                units.append(unit)
                if opens and unit.is_checkpoint and len(unit.layers) > MOST_UNOPENED:
                    self._open(unit, chunk, former)
            self._place(units, chunk)
            first = end
        self.num_recomputed = sum(len(unit.layers) for unit in self if unit.is_checkpoint)

    def _open(self, checkpoint: Unit, chunk: int, former: dict[tuple[int, ...], Unit]) -> None:
        """Makes the layers of a checkpoint units of their own: those of one show what those of the next one do."""
        units = [self._unit((layer,), former) for layer in checkpoint.layers]
        for unit in units:
            unit.is_checkpoint, unit.is_in_checkpoint, unit.ends_chunk = False, True, False
            unit.ends_checkpoint, unit.opening = unit is units[-1], units[0]
        self._place(units, chunk)

    def _place(self, units: list[Unit], chunk: int) -> None:
        """Says of units in a row what decides about their passes."""
        for unit in units:
            of_layers = (self.kinds_of_layers[layer] for layer in unit.layers)
            is_in_front = unit.layers[0] < self._without_gradient[chunk]
            seen = self._seen[unit.is_checkpoint or unit.is_in_checkpoint]
            kind = chunk, unit.is_in_checkpoint, unit.is_checkpoint, is_in_front, seen, *of_layers
            unit.kind = self._kinds.setdefault(kind, len(self._kinds))
            structure = "structure", *kind[:4], seen.recompute_granularity, seen.recompute_modules, *kind[5:]
            unit.structure = self._kinds.setdefault(structure, len(self._kinds))
            unit.row_length = 0
        kinds = [NO_UNIT, *(unit.kind for unit in units), NO_UNIT]
        num_equal = Counter[tuple[int, int, int]]()
        for place, unit in enumerate(units):
            unit.before, unit.after = kinds[place], kinds[place + 2]
            unit.num_equal_before = num_equal[unit.before, unit.kind, unit.after]
            num_equal[unit.before, unit.kind, unit.after] += 1
        for unit in units:
            unit.num_equal_after = num_equal[unit.before, unit.kind, unit.after] - unit.num_equal_before - 1
        if units and not units[0].is_in_checkpoint:  # a stage may have no layer
            _number_rows(units)

    def _unit(self, layers: tuple[int, ...], former: dict[tuple[int, ...], Unit]) -> Unit:
        unit = self._units[layers] = former.get(layers) or self._new(layers)
        return unit

    def _new(self, layers: tuple[int, ...]) -> Unit:
        width, places = len(self._names), {}
        modules = np.zeros(width * len(layers), dtype=np.int64)
        for number, layer in enumerate(layers):
            for code, place in self._places[layer].items():
                places[code] = number * width + place
                modules[places[code]] = code
        return Unit(layers, modules, places)

    def _places_of(self, layer: int) -> dict[int, int]:
        """Returns the places of a layer's modules in the names of all layers' modules, by code."""
        prefix = f"decoder.layers.{layer}"
        places = {}
        for code, name in enumerate(self._labels.modules):
            if name == prefix or name.startswith(prefix + "."):
                places[code] = self._names.setdefault(name[len(prefix) :], len(self._names))
        return places


def enter_layers(labels: Labels, layers: Iterable[int]) -> None:
    """Reports layers whose passes are replayed to whoever follows the step."""
    outer = labels.module
    for layer in layers:
        labels.enter_module(labels.code(f"decoder.layers.{layer}"))
    labels.module = outer


def _seen_by(settings: MemorySettings, is_full: bool) -> MemorySettings:
    """Returns what a unit sees of the settings: not how Megatron's block divides its layers into checkpoints.

    Nor does it see what is on the host between two steps, or until the update. Where a step offloads activations, the
    recompute of checkpoints adds groups to those of all layers, and decides when their copies are brought back.
    """
    seen = replace(
        settings,
        offload_parameters=False,
        offload_gradients=False,
        offload_optimizer=False,
        offload_optimizer_except_update=False,
    )
    if settings.recompute_granularity != "full":
        return seen
    if settings.offload_modules:
        return replace(seen, recompute_num_layers=1)
    if is_full:
        return replace(seen, recompute_method="uniform", recompute_num_layers=1)
    return replace(seen, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)


def _number_rows(units: list[Unit]) -> None:
    """Gives each unit its place in its row of units of one kind, if its kind has only one row."""
    rows = [list(row) for _, row in groupby(units, key=lambda unit: unit.kind)]
    num_rows = Counter(row[0].kind for row in rows)
    for row in rows:
        for place, unit in enumerate(row):
            unit.place, unit.row_length = place, len(row) if num_rows[unit.kind] == 1 else 0


def _without_gradient(model: Any) -> int:
    """Returns how many layers get an input that requires no gradient, beside a frozen embedding.

    They are those before the first adapter, and the one that has it: they save less for backward, and offload less.
    """
    embedding = getattr(model, "embedding", None)
    if embedding is None or _is_trained(embedding):
        return 0
    trained = [_is_trained(layer) for layer in model.decoder.layers]
    return trained.index(True) + 1 if True in trained else len(trained)


def _is_trained(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _kind(layer: Any) -> Any:
    """Returns what two equal layers have in common: the shapes of all parameters, and the classes of all modules."""
    classes = tuple(type(module).__name__ for module in layer.modules())
    return classes, tuple((name, value.shape, value.dtype) for name, value in layer.named_parameters())
