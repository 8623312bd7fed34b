"""The settings to try next: each does all that the given settings do, and more.

The search for a front, the alternatives of a step that does not fit, and the suggestions for a step that ran out of
memory all try these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from memlab.config import without_effect
from memlab.config.model_restrictions import check_on_model, checkpoints_moe_layers
from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings

_NUM_BLOCKS = 8
"""Full recompute of the first layers is tried in this many even shares of the layers."""
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_modules": None}
_BETWEEN_STEPS: tuple[dict[str, Any], ...] = (
    {"offload_parameters": True},
    {"offload_optimizer": True, "offload_gradients": True},
    {"offload_optimizer_except_update": True},
)
"""What can be on the host between steps, each tried by itself, to be seen."""


def candidates(
    settings: MemorySettings,
    scenario: Scenario,
    *,
    depth: int | None = None,
    with_remedy: bool = False,
    every_block: bool = False,
) -> list[MemorySettings]:
    """Lists the settings themselves, and those that do more; none is refused or, by structure, without effect.

    Left out are ``moe_act`` and ``shared_experts`` added to ``moe``, which contains them, and offload added where every
    layer is recomputed: it would happen inside backward. Of a small model, offload starts at the smallest tensor
    (`smallest_offloaded`).

    Args:
        settings: What each candidate does at least. Their remedy for checkpoints' inputs, which is not a setting of
            Megatron's, is kept where it acts.
        depth: How many modules more each candidate has at most. 1 is one module to recompute or one to offload, or all
            layers. None is every set of modules, every way to recompute whole layers, and every pair of a way to
            recompute and a set to offload.
        with_remedy: Also tries ``checkpoint_input_remedy="detach"`` where checkpoints keep their inputs.
        every_block: Also tries full recompute of the first 1, 2, 3 ... layers; else in even shares of the layers.
    """
    recomputes = list(_recompute_choices(settings, scenario, depth))
    offloads = list(_offload_choices(settings, scenario, depth))
    values: list[dict[str, Any]] = []
    keeps_inputs = checkpoints_moe_layers(settings, scenario.architecture) and settings.checkpoint_input_remedy is None
    if with_remedy and keeps_inputs:
        values.append({"checkpoint_input_remedy": "detach"})
    if settings.recompute_method != "uniform":
        values += offloads
    for recompute in recomputes:
        values.append(recompute)
        if depth is None and recompute.get("recompute_method") != "uniform":
            values += [recompute | offload for offload in offloads]
    if every_block:
        values += list(_blocks(settings, scenario, range(1, scenario.num_layers_of_chunk)))
    if depth is None:
        values += _BETWEEN_STEPS
    return list(dict.fromkeys([settings, *_allowed(settings, values, scenario)]))


def each_alone(settings: MemorySettings, scenario: Scenario) -> list[MemorySettings]:
    """Lists the settings themselves, then with one change each: a module, all layers, or what is on the host."""
    between = _allowed(settings, _BETWEEN_STEPS, scenario)
    return list(dict.fromkeys([*candidates(settings, scenario, depth=1), *between]))


def added_offload(settings: MemorySettings, base: MemorySettings) -> tuple[str, ...]:
    """Returns the offload modules that settings have and their base has not."""
    return tuple(name for name in settings.offload_modules or () if name not in (base.offload_modules or ()))


def without_added_offload(settings: MemorySettings, base: MemorySettings) -> MemorySettings:
    """Returns the candidate that recomputes the same and offloads what the base does."""
    return replace(
        settings, offload_modules=base.offload_modules, min_offloaded_tensor_size=base.min_offloaded_tensor_size
    )


def smallest_offloaded(settings: MemorySettings, scenario: Scenario) -> int:
    """Returns from how many elements on a tensor is offloaded: by the settings, and 0 for a small model.

    Megatron's default, 1,048,576, is meant for large models. If it is more than the tokens x hidden elements of a
    layer's output, it leaves nearly everything on the device: 512 tokens x 128 = 65,536 elements.
    """
    is_small = scenario.tokens_of_rank * scenario.architecture.hidden_size < settings.min_offloaded_tensor_size
    return 0 if is_small else settings.min_offloaded_tensor_size


def _recompute_choices(base: MemorySettings, scenario: Scenario, depth: int | None) -> Iterator[dict[str, Any]]:
    own = set(base.recompute_modules or ())
    if base.recompute_granularity != "full":
        absent = scenario.architecture.absent_modules("recompute_modules")
        for modules in _supersets(base.recompute_modules, _without(absent, RECOMPUTE_MODULES), depth):
            inside = {"moe_act", "shared_experts"} & set(modules) if "moe" in modules else set()
            if inside <= own and ("moe" in own or not inside):
                yield {"recompute_granularity": "selective", "recompute_modules": modules}
    if base.recompute_method == "uniform":
        return
    num_layers = scenario.num_layers_of_chunk
    if depth is None:
        shares = sorted({round(num_layers * share / _NUM_BLOCKS) for share in range(1, _NUM_BLOCKS)})
        yield from _blocks(base, scenario, shares)
    for count in range(1, num_layers + 1 if depth is None else 2):
        if num_layers % count == 0:
            yield _FULL | {"recompute_method": "uniform", "recompute_num_layers": count}


def _blocks(base: MemorySettings, scenario: Scenario, counts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yields full recompute of the first layers, more of them than the base recomputes and fewer than all."""
    if base.recompute_method != "uniform":
        for count in counts:
            if (base.recompute_num_layers or 0) < count < scenario.num_layers_of_chunk:
                yield _FULL | {"recompute_method": "block", "recompute_num_layers": count}


def _offload_choices(base: MemorySettings, scenario: Scenario, depth: int | None) -> Iterator[dict[str, Any]]:
    size = smallest_offloaded(base, scenario)
    absent = scenario.architecture.absent_modules("offload_modules")
    for modules in _supersets(base.offload_modules, _without(absent, OFFLOAD_MODULES), depth):
        yield {"offload_modules": modules, "min_offloaded_tensor_size": size}


def _without(absent: set[str], choices: Iterable[str]) -> list[str]:
    return [name for name in choices if name not in absent]


def _supersets(modules: Iterable[str] | None, choices: Iterable[str], depth: int | None) -> Iterator[list[str]]:
    """Yields the modules with one or more of the choices added, fewer before more."""
    have = list(modules or ())
    further = [name for name in choices if name not in have]
    for count in range(1, (len(further) if depth is None else min(depth, len(further))) + 1):
        for names in combinations(further, count):
            yield have + list(names)


def _allowed(base: MemorySettings, values: Iterable[dict[str, Any]], scenario: Scenario) -> Iterator[MemorySettings]:
    """Yields the base with other values, where no rule refuses it and nothing more would be without effect."""
    model = scenario.architecture
    idle_before = _without_effect(base, scenario).keys()
    for each in values:
        try:
            settings = replace(base, **each)
            check_on_model(settings, scenario)
        except ValueError:
            continue
        if settings.checkpoint_input_remedy is not None and not checkpoints_moe_layers(settings, model):
            settings = replace(settings, checkpoint_input_remedy=None)
        if not _without_effect(settings, scenario).keys() - idle_before:
            yield settings


def _without_effect(settings: MemorySettings, scenario: Scenario) -> dict[str, str]:
    return without_effect.of_settings(settings, scenario.architecture) | without_effect.beside_cpu_optimizer(
        settings, scenario.state
    )
