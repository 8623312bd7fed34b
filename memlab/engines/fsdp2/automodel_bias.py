"""The experts of NeMo Automodel's own class of gpt-oss, which have biases and a clamped gate.

``_apply_bias`` and ``quick_geglu_deepep`` in ``components/moe/experts.py`` of 36044ad3. The release adds biases in
pieces of many rows, and is not here.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel

_SLOPE, _LARGEST = 1.702, 7.0


def multiplied_with_bias(
    rows: torch.Tensor,
    matrices: list[torch.Tensor],
    counts: torch.Tensor,
    ends: torch.Tensor,
    probabilities: torch.Tensor,
) -> torch.Tensor:
    """Maps rows [rows, width], grouped by expert, to the same shape.

    Args:
        rows: Of all experts of the rank.
        matrices: Both matrices of each expert, and then both biases.
        ends: Where those of each expert end, int32.
        probabilities: With which each row counts, fp32 [rows, 1].
    """
    up, down, of_up, of_down = matrices
    inner = torch._grouped_mm(rows, up, offs=ends)
    spread = _Spread.apply(of_up, counts, len(inner))
    inner = (inner + spread).to(inner.dtype)
    del spread
    inner = _Gated.apply(inner, probabilities)
    output = torch._grouped_mm(inner, down, offs=ends)
    spread = _Spread.apply(of_down.to(torch.promote_types(of_down.dtype, probabilities.dtype)), counts, len(output))
    spread = spread * probabilities
    return (output + spread).to(output.dtype)


class _Spread(torch.autograd.Function):
    """The bias of each expert for each of its rows, whose gradients a kernel adds up in fp32."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, counts: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return torch.repeat_interleave(bias, counts, dim=0, output_size=number)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        total = torch.zeros(len(counts), grad.shape[1], dtype=torch.float32, device=grad.device)
        with one_kernel():
            experts = torch.arange(len(counts), device=grad.device)
            total.index_add_(0, torch.repeat_interleave(experts, counts, output_size=len(grad)), grad.float())
        return total.to(grad.dtype), None, None


class _Gated(torch.autograd.Function):
    """The activation as one kernel, compiled: saves its input and the probabilities."""

    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inner, probabilities)
        with one_kernel():
            return _gated(inner, probabilities)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        inner, probabilities = ctx.saved_tensors
        with one_kernel(), torch.enable_grad():
            one, two = leaves = tuple(each.detach().requires_grad_() for each in (inner, probabilities))
            of_inner, of_probabilities = torch.autograd.grad(_gated(one, two), leaves, grads[0])
            del leaves, one, two
        return of_inner, of_probabilities if ctx.needs_input_grad[1] else None


def _gated(inner: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    gate, up = inner[..., ::2], inner[..., 1::2]
    gate, up = gate.clamp(max=_LARGEST), up.clamp(min=-_LARGEST, max=_LARGEST)
    gated = gate * torch.sigmoid(_SLOPE * gate)
    return (gated * (up + 1.0) * probabilities).to(inner.dtype)
