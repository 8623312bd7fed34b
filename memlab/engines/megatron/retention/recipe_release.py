"""How NeMo Automodel #2634 releases a trainer between two phases, line by line, on a live Megatron model.

Upstream's ``_release_recipe_memory(recipe)`` clears the state and the parameter groups of each optimizer, sets the
recipe's references to the model and to the optimizers to None, collects garbage and empties the allocator's cache. A
*recipe* is Automodel's name for a trainer. Here the `LiveModel` is the recipe.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.protocol import Held


def objects_held(live: LiveModel, held: Held) -> list[object]:
    """Returns references to what is held, which keep it as long as the list exists."""
    return {"nothing": [], "model": [chunk.module for chunk in live.chunks], "optimizer": [live.optimizer]}[held]


def release_recipe(live: LiveModel, *, clears: bool) -> Iterator[str]:
    """Releases a model, and yields each line of upstream's function after it has run.

    The optimizers are torch's own (TE's on a GPU), as in Automodel. Megatron's ``ChainedOptimizer``, which contains
    them, has neither: its ``state`` is a ``ProxyDict`` without ``clear``, whose AttributeError upstream would ignore,
    and its ``param_groups`` is a new list at each call (megatron/core/optimizer/optimizer.py, 0.16.1).

    Args:
        live: The model; it has neither chunks nor an optimizer afterwards.
        clears: Whether the optimizers are cleared; without, only references are dropped, as ``del trainer`` does.
    """
    if clears:
        for part in live.optimizers:
            part.optimizer.state.clear()
        yield "optimizer.state.clear()"
        for part in live.optimizers:
            part.optimizer.param_groups.clear()
        del part
        yield "optimizer.param_groups.clear()"
    live.chunks, live._modules = [], ()
    yield "recipe.model_parts = None"
    live.optimizer, live.discarded_optimizers = None, []
    yield "recipe.optimizer = None"
    gc.collect()
    yield "gc.collect()"
    torch.cuda.empty_cache()
    yield "torch.cuda.empty_cache()"
