"""Transformer Engine's FusedAdam over a rank's shards, as NeMo Automodel's recipes choose it.

It gets the local tensors of the shards: releases from 2.14 on take them out of the DTensors themselves
(``transformer_engine/pytorch/optimizers/fused_adam.py``), with the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.config.training_state import TrainingState


class FusedAdamOfShards:
    """What the engine asks of an optimizer of torch.

    Raises:
        ValueError: If Transformer Engine is not there.
    """

    def __init__(self, parameters: list[Any], state: TrainingState, learning_rate: float) -> None:
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam
        except ImportError as error:
            raise ValueError(
                "adam_implementation is 'te_fused', which needs Transformer Engine, and it is not installed here: "
                "choose foreach, or predict the step (memlab predict)"
            ) from error
        self._parameters = parameters
        self._shards = [torch.nn.Parameter(each.to_local().detach(), requires_grad=False) for each in parameters]
        self._inner = FusedAdam(
            self._shards,
            lr=learning_rate,
            master_weights=state.master_weights,
            store_param_remainders=state.store_param_remainders,
        )

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Moments and main parameters, by the local tensors of the shards."""
        return self._inner.state

    def step(self) -> None:
        """Updates every shard that has a gradient; a step that fails leaves no state that it has begun."""
        begun = [shard for shard in self._shards if not self._inner.state.get(shard)]
        try:
            for parameter, shard in zip(self._parameters, self._shards, strict=True):
                shard.grad = None if parameter.grad is None else parameter.grad.to_local()
            self._inner.step()
        except BaseException:
            # Transformer Engine adds main parameters before it writes them, and would take these for complete ones.
            for shard in begun:
                self._inner.state.pop(shard, None)
            raise
        finally:
            for shard in self._shards:
                shard.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        assert set_to_none
        for parameter in self._parameters:
            parameter.grad = None
