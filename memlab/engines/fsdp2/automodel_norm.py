"""The norm of NeMo Automodel's own classes (``Float32RMSNorm`` in ``components/models/common/utils.py``).

Its kinds ``te`` and ``torch`` are kernels of Transformer Engine and of torch, which keep the same: the input, and a
number in fp32 for each row.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel


class Norm(torch.nn.Module):
    """RMSNorm whose backward is one kernel.

    Args:
        norm: transformers' own, whose weight it takes.
        is_released: Whether it is that of the release.
    """

    def __init__(self, norm: Any, *, is_released: bool) -> None:
        super().__init__()
        self.weight, self.epsilon, self.is_released = norm.weight, norm.variance_epsilon, is_released

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., channels] to the same shape and type."""
        return _Normalized.apply(inputs, self.weight, self.epsilon, self.is_released)


class _Normalized(torch.autograd.Function):
    """``_float32_rms_norm_fwd``: compiled in August 2026, which keeps one number for each token beside the input.

    The release keeps none, and its forward is eager, with tensors in fp32 (``_float32_rms_norm_impl``).
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, is_released: bool
    ) -> torch.Tensor:
        ctx.epsilon = epsilon
        if is_released:
            ctx.save_for_backward(inputs, weight)
            return _eagerly_normalized(inputs.float(), weight.float(), epsilon)[0].to(inputs.dtype)
        output, scales = _normalized(inputs, weight, epsilon)
        ctx.save_for_backward(inputs, weight, scales)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, *_ = ctx.saved_tensors
        of_inputs, of_weight = _gradients(grads[0], inputs, weight, ctx.epsilon)
        return of_inputs, of_weight if ctx.needs_input_grad[1] else None, None, None


@one_kernel()
def _eagerly_normalized(
    inputs: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _scales(inputs, epsilon)
    return inputs * scales * weight, scales


@one_kernel()
def _normalized(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _scales(inputs.float(), epsilon)
    return (weight * (inputs.float() * scales)).to(inputs.dtype), scales


@one_kernel()
def _gradients(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _scales(inputs.float(), epsilon)
    normalized, of_normalized = inputs.float() * scales, grad.float() * weight
    mean = (of_normalized * normalized).mean(-1, keepdim=True)
    of_inputs = ((of_normalized - normalized * mean) * scales).to(inputs.dtype)
    of_weight = (grad.float() * normalized).flatten(0, -2).sum(0).to(weight.dtype)
    return of_inputs, of_weight


def _scales(inputs: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + epsilon)
