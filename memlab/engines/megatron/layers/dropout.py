"""Dropout as a CUDA device computes it: one kernel that keeps a mask of one byte per element.

On a CPU torch keeps its input and a mask in the input's type instead (``native_dropout`` and ``_dropout_impl`` in
``aten/src/ATen/native/Dropout.cpp``, torch 2.11). Where torch compiles dropout with its neighbours, as Megatron's
``bias_dropout_add_fused_train``, the same mask is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel


def dropout(inputs: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replaces ``torch.nn.functional.dropout``."""
    if not training or p == 0:
        return torch.nn.functional.dropout(inputs, p, training, inplace)
    assert not inplace, "Megatron drops in place only in passes without backward"
    return _Dropout.apply(inputs, p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, probability: float) -> torch.Tensor:
        kept = torch.empty_like(inputs, dtype=torch.bool).bernoulli_(1 - probability)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / (1 - probability)
        return _scaled(inputs, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _scaled(grads[0], kept, ctx.scale), None


@one_kernel()
def _scaled(tensor: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor * kept * scale
