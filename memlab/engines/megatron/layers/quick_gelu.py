"""The activation of experts that are not fused, as torch compiles it: one kernel, of which backward needs the input.

Megatron's is ``quick_gelu`` in ``megatron/core/fusions/fused_bias_geglu.py`` (0.16.1). Without a compiler autograd
would keep its sigmoid too.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel

_SLOPE = 1.702


def quick_gelu(inputs: torch.Tensor) -> torch.Tensor:
    """Returns the input times the sigmoid of 1.702 times the input."""
    result: torch.Tensor = _QuickGelu.apply(inputs)
    return result


class _QuickGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return _activated(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _gradient(*grads, *ctx.saved_tensors)


@one_kernel()
def _activated(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * torch.sigmoid(_SLOPE * inputs)


@one_kernel()
def _gradient(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(_SLOPE * inputs)
    return grad * sigmoid * (1 + _SLOPE * inputs * (1 - sigmoid))
