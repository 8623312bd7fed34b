"""The gradient of an embedding that is also the output layer: autograd adds the two in place.

It does so for gradients that nothing else refers to, but not under a dispatch mode, such as a meter (``accumulate`` in
torch/csrc/autograd/input_buffer.cpp, 2.13): then it makes a third tensor of the weight's size. So the output layer
keeps its gradient from autograd here, and the embedding's, which comes last, is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _OfOutputLayer(torch.autograd.Function):
    """The weight as the output layer reads it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        def add(of_embedding: torch.Tensor) -> torch.Tensor:
            hook.remove()
            return gradient.add_(of_embedding)

        hook = ctx.weight.register_hook(add)


def adding_in_place(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of ``ColumnParallelLinear._forward_impl``.

    Args:
        forward: Megatron's own. With a fused gradient, autograd adds nothing but the unused gradient that it returns.
    """

    def forward_impl(layer: Any, *, weight: torch.Tensor, gradient_accumulation_fusion: bool, **others: Any) -> Any:
        # Megatron writes ``zero_out_wgrad`` on a weight that is both (language_module.py, 0.16.1 and 0.19.2).
        is_both = getattr(weight, "zero_out_wgrad", False) and weight.requires_grad and torch.is_grad_enabled()
        if is_both and not gradient_accumulation_fusion:
            weight = _OfOutputLayer.apply(weight)
        return forward(layer, weight=weight, gradient_accumulation_fusion=gradient_accumulation_fusion, **others)

    return forward_impl
