"""The square of ReLU as torch compiles it: one kernel, of which backward needs the input.

Megatron's is ``squared_relu`` in ``megatron/core/activations.py`` (0.16.1). Without a compiler autograd would keep what
ReLU returns too.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel


def squared_relu(inputs: torch.Tensor) -> torch.Tensor:
    """Returns the square of what is above 0, and 0 for all else."""
    result: torch.Tensor = _SquaredRelu.apply(inputs)
    return result


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return _activated(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _gradient(*grads, *ctx.saved_tensors)


@one_kernel()
def _activated(inputs: torch.Tensor) -> torch.Tensor:
    return torch.relu(inputs).square()


@one_kernel()
def _gradient(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return grad * 2 * torch.relu(inputs)
