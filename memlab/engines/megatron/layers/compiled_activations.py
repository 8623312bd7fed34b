"""Activations that Megatron compiles: each is one kernel, of which backward needs the input alone.

Without a compiler autograd would keep what is computed on the way too. The originals of megatron-core 0.16.1 are
``quick_gelu`` in ``fusions/fused_bias_geglu.py`` and ``squared_relu`` in ``activations.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.meter.labels import one_kernel

_SLOPE = 1.702


def quick_gelu(inputs: torch.Tensor) -> torch.Tensor:
    """Returns the input times the sigmoid of 1.702 times the input."""
    return _Compiled.apply(inputs, _quick_gelu, _gradient_of_quick_gelu)


def squared_relu(inputs: torch.Tensor) -> torch.Tensor:
    """Returns the square of what is above 0, and 0 for all else."""
    return _Compiled.apply(inputs, _squared_relu, _gradient_of_squared_relu)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.gradient = gradient
        return activate(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradient(*grads, *ctx.saved_tensors), None, None


@one_kernel()
def _quick_gelu(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * torch.sigmoid(_SLOPE * inputs)


@one_kernel()
def _gradient_of_quick_gelu(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(_SLOPE * inputs)
    return grad * sigmoid * (1 + _SLOPE * inputs * (1 - sigmoid))


@one_kernel()
def _squared_relu(inputs: torch.Tensor) -> torch.Tensor:
    return torch.relu(inputs).square()


@one_kernel()
def _gradient_of_squared_relu(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return grad * 2 * torch.relu(inputs)
