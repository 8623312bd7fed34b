"""A live model as it was when it was built: what its steps have left on it is taken off again."""

from __future__ import annotations

from typing import Any

import torch

from memlab.model.build import LiveModel
from memlab.model.retention import megatron_globals


class AsBuilt:
    """Remembers a model that has not taken a step yet.

    Args:
        live: The model.
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._tensors = [(owner, _tensors_of(owner)) for owner in megatron_globals.owners_of_tensors(live)]

    def restore(self) -> None:
        """Frees what steps have left: the optimizer's state, and what modules and Megatron's caches keep."""
        live = self._live
        for owner, before in self._tensors:
            attributes = vars(owner)
            for name in _tensors_of(owner).keys() - before.keys():
                del attributes[name]
            attributes.update(before)
        for part in live.optimizers:
            part.optimizer.state.clear()
            getattr(part.optimizer, "_scales", {}).clear()
            for group in part.optimizer.param_groups:
                for main_parameter in group["params"]:
                    main_parameter.grad = None
        megatron_globals.empty_caches_of_steps()


def _tensors_of(owner: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
