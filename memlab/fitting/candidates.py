"""The settings that a search tries: whatever does all that some settings do, and more of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.config.settings_on_model import check_on_model, checkpoints_moe_layers, without_effect

_NUM_BLOCKS = 8
"""Full recompute of the first layers is tried in so many even shares of the layers."""
_BETWEEN_STEPS: tuple[dict[str, Any], ...] = (
    {"offload_parameters": True},
    {"offload_optimizer": True, "offload_gradients": True},
)
"""What can wait on the host between steps. All of it is back within a step, so each is tried alone, to be seen."""


def candidates(base: MemorySettings, scenario: Scenario) -> list[MemorySettings]:
    """Lists every setting that a search considers, the base first; none is refused or, by structure, without effect.

    Every way to recompute is joined with every set of offload modules. Left out are ``moe_act`` beside ``moe``, which
    contains it, and offload where every layer is recomputed: it would happen inside backward.

    Args:
        base: What each setting does at least. Its remedy for checkpoints' inputs, which is no setting of Megatron's, is
            taken where it acts and is not tried else.
        scenario: The model and its workload.
    """
    found: list[MemorySettings | None] = [base]
    for recompute in ({}, *_recompute_choices(base, scenario)):
        found.append(_allowed(base, recompute, scenario))
        if recompute.get("recompute_method", base.recompute_method) != "uniform":
            found += [_allowed(base, recompute | offload, scenario) for offload in _offload_choices(base, scenario)]
    found += [_allowed(base, values, scenario) for values in _BETWEEN_STEPS]
    return list(dict.fromkeys(settings for settings in found if settings is not None))


def added_offload(settings: MemorySettings, base: MemorySettings) -> tuple[str, ...]:
    """Returns the offload modules that settings have and their base has not."""
    return tuple(name for name in settings.offload_modules or () if name not in (base.offload_modules or ()))


def without_added_offload(settings: MemorySettings, base: MemorySettings) -> MemorySettings:
    """Returns the candidate that recomputes the same and offloads what the base does."""
    return replace(
        settings, offload_modules=base.offload_modules, min_offloaded_tensor_size=base.min_offloaded_tensor_size
    )


def _recompute_choices(base: MemorySettings, scenario: Scenario) -> Iterator[dict[str, Any]]:
    if base.recompute_granularity != "full":
        for modules in supersets(base.recompute_modules, RECOMPUTE_MODULES):
            if not {"moe", "moe_act"} <= set(modules):
                yield {"recompute_granularity": "selective", "recompute_modules": modules}
    if base.recompute_method == "uniform":
        return
    full = {"recompute_granularity": "full", "recompute_modules": None}
    num_layers, least = scenario.num_layers_of_chunk, base.recompute_num_layers or 0
    for count in sorted({round(num_layers * share / _NUM_BLOCKS) for share in range(1, _NUM_BLOCKS)}):
        if least < count < num_layers:
            yield full | {"recompute_method": "block", "recompute_num_layers": count}
    for count in (count for count in range(1, num_layers + 1) if num_layers % count == 0):
        yield full | {"recompute_method": "uniform", "recompute_num_layers": count}


def _offload_choices(base: MemorySettings, scenario: Scenario) -> Iterator[dict[str, Any]]:
    # Megatron's default size is meant for large models; of a small one it would leave everything on the device.
    is_small = scenario.tokens_of_rank * scenario.architecture.hidden_size < base.min_offloaded_tensor_size
    size = 0 if is_small and base.offload_modules is None else base.min_offloaded_tensor_size
    for modules in supersets(base.offload_modules, OFFLOAD_MODULES):
        yield {"offload_modules": modules, "min_offloaded_tensor_size": size}


def supersets(modules: Iterable[str] | None, choices: Iterable[str]) -> Iterator[list[str]]:
    """Yields the modules with one or more of the choices besides, fewer before more."""
    have = list(modules or ())
    further = [name for name in choices if name not in have]
    for count in range(1, len(further) + 1):
        for names in combinations(further, count):
            yield have + list(names)


def _allowed(base: MemorySettings, values: dict[str, Any], scenario: Scenario) -> MemorySettings | None:
    """Returns the base with other values; None where a rule refuses it, or something more would be without effect."""
    model = scenario.architecture
    try:
        settings = replace(base, **values)
        check_on_model(settings, scenario)
    except ValueError:
        return None
    if not checkpoints_moe_layers(settings, model):
        settings = replace(settings, checkpoint_input_remedy=None)
    return None if without_effect(settings, model).keys() - without_effect(base, model).keys() else settings
