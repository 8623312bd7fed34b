"""What some CUDA kernels allocate for themselves and give back when they end: no fake tensor shows it by itself."""

from __future__ import annotations

from typing import Any

import torch

_FEW_INDICES = 3072
"""Up to so many, one kernel adds the rows up where they belong, without sorting (``Embedding.cu``)."""
_ROWS_PER_THREAD = 10


def embedding(indices: torch.Tensor, weight: torch.Tensor, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
    """Stands for ``torch.nn.functional.embedding``, which Megatron calls without options."""
    assert not any(options.values()), options
    result: torch.Tensor = _Embedding.apply(weight, indices)
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.num_weights = weight.shape[0]
        return torch.embedding(weight, indices)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        of_weight = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.num_weights, -1, False)
        _embedding_backward_temporaries(gradient, indices.numel(), ctx.num_weights)
        return of_weight, None


def _embedding_backward_temporaries(gradient: torch.Tensor, count: int, num_weights: int) -> list[torch.Tensor]:
    """Returns what the kernel holds beside its result, and drops when it ends.

    Indices are sorted, rows of the same one are summed up in parts, in fp32, and then the parts (torch 2.11,
    ``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu``). An H200 showed these bytes, to the last one.
    """
    if count <= _FEW_INDICES:
        return []
    num_segments = min(count, num_weights)
    num_parts = count // _ROWS_PER_THREAD + num_segments
    lengths = [count, count, num_segments, num_segments, num_segments, num_parts, 1, 1]
    held = [torch.empty(length, dtype=torch.int64, device=gradient.device) for length in lengths]
    return [*held, torch.empty(num_parts, gradient.shape[-1], dtype=torch.float32, device=gradient.device)]
