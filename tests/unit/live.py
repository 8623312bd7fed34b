"""What the tests of the live model share: settings at random, and a look at gradients."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import torch

from memlab.config.model_restrictions import check_on_model
from memlab.config.settings import (
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    MemorySettings,
)
from memlab.lab.lab import Lab
from tests.unit.inside import inside

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def recompute(*modules: str) -> MemorySettings:
    return MemorySettings(recompute_granularity="selective", recompute_modules=modules)


def offload(*modules: str) -> MemorySettings:
    return MemorySettings(offload_modules=modules, min_offloaded_tensor_size=0)


def random_settings(lab: Lab, rng: random.Random) -> MemorySettings:
    """Draws settings that are allowed on the lab's model."""
    model = lab.scenario.architecture
    recompute_modules = [name for name in RECOMPUTE_MODULES if name not in model.absent_modules("recompute_modules")]
    offload_modules = [name for name in OFFLOAD_MODULES if name not in model.absent_modules("offload_modules")]
    while True:
        values: dict[str, Any] = {"recompute_granularity": rng.choice([None, "full", "selective"])}
        if values["recompute_granularity"] == "full":
            values["recompute_method"] = rng.choice(["uniform", "block"])
            values["recompute_num_layers"] = rng.randint(1, lab.scenario.num_layers)
        if values["recompute_granularity"] == "selective":
            values["recompute_modules"] = rng.sample(recompute_modules, rng.randint(1, 3))
        if rng.random() < 0.6:
            values["offload_modules"] = rng.sample(offload_modules, rng.randint(1, 4))
            values["min_offloaded_tensor_size"] = rng.choice([0, 5000, 1024 * 1024])
        values["checkpoint_input_remedy"] = rng.choice([None, "detach", "clear_gradient", "release_storage"])
        for name in ("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update"):
            values[name] = rng.random() < 0.3
        try:
            settings = MemorySettings(**values)
            check_on_model(settings, lab.scenario)
        except ValueError:
            continue
        return settings


def settings_with_all_pairs(lab: Lab, rng: random.Random, num_draws: int) -> list[MemorySettings]:
    """Draws settings, and returns a few with all pairs: each value of a field, or module, beside each of another field.

    A draw costs nothing, and a step does. The draw that has the most new pairs is always taken next.
    """
    pairs = {settings: _pairs(settings) for settings in (random_settings(lab, rng) for _ in range(num_draws))}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda settings: len(pairs[settings] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _pairs(settings: MemorySettings) -> set[Any]:
    values: list[tuple[str, Any]] = []
    for name, value in settings.to_dict().items():
        values += [(name, each) for each in value] if isinstance(value, (list, tuple)) else [(name, value)]
    return set(combinations(values, 2))


def gradients_of_step(
    lab: Lab, settings: MemorySettings, *, warm_up: bool = True
) -> tuple[float | None, list[torch.Tensor]]:
    """Takes a step and returns its loss and a copy of every gradient buffer as the optimizer sees it."""
    if warm_up:
        lab.step(settings, warm_up=False)  # before the optimizer is replaced: nothing is copied of it
    optimizer, copies = inside(lab).model.engine.live.optimizer, []
    take_step = optimizer.step

    def copy_then_step() -> Any:
        chunk = inside(lab).model.engine.live.chunk
        copies[:] = [buffer.grad_data.clone() for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return take_step()

    optimizer.step = copy_then_step
    try:
        record = lab.step(settings, warm_up=False)
    finally:
        optimizer.step = take_step
    return record.loss, copies
