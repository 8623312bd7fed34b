"""A live model as it was when it was built: memlab removes what its steps have left on it."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.megatron_versions import forget_norm_groups
from memlab.engines.megatron.recover_failed_step import forget_discarded_outputs
from memlab.engines.megatron.retention import megatron_globals


def remember(live: LiveModel) -> Callable[[], None]:
    """Remembers a model that has not taken a step yet.

    Returns:
        A function that frees the optimizer's state, and what modules and Megatron's caches keep since a step.
    """
    remembered = [(owner, dict(vars(owner))) for owner in megatron_globals.owners_of_tensors(live)]

    def restore() -> None:
        for owner, before in remembered:
            attributes = vars(owner)
            if len(attributes) == len(before) and all(map(is_, attributes.values(), before.values())):
                continue  # nine of ten modules: no step gives them anything
            for name in [name for name, value in attributes.items() if isinstance(value, torch.Tensor)]:
                if name in before:
                    attributes[name] = before[name]
                else:
                    del attributes[name]
            forget_discarded_outputs(owner)
        forget_norm_groups(live.optimizer)
        for part in live.optimizers:
            forget_norm_groups(part)
            part.optimizer.state.clear()
            getattr(part.optimizer, "_scales", {}).clear()
            for group in part.optimizer.param_groups:
                for main_parameter in group["params"]:
                    main_parameter.grad = None
        live.drop_graphs()
        megatron_globals.empty_caches_of_steps()

    return restore
