"""Memory that some CUDA kernels allocate and free inside themselves: an operation on fake tensors allocates none."""

from __future__ import annotations

from typing import Any

import torch

from memlab.backends.cuda_on_cpu import is_on_host

_FEW_INDICES = 3072
"""For at most this many indices one kernel sums the rows in place, without sorting (``Embedding.cu``)."""
_ROWS_PER_THREAD = 10


def embedding(indices: torch.Tensor, weight: torch.Tensor, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
    """Replaces ``torch.nn.functional.embedding``, which Megatron calls without options."""
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
    """Returns the tensors that the kernel allocates in addition to its result, and frees when it ends.

    Indices are sorted; the rows of equal indices are summed in parts, in fp32, and then the parts are summed (torch
    2.11, ``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu``). Equal to an H200's, byte by byte.
    """
    if count <= _FEW_INDICES:
        return []
    num_segments = min(count, num_weights)
    num_parts = count // _ROWS_PER_THREAD + num_segments
    lengths = [count, count, num_segments, num_segments, num_segments, num_parts, 1, 1]
    sorting = [torch.empty(length, dtype=torch.int64, device=gradient.device) for length in lengths]
    return [*sorting, torch.empty(num_parts, gradient.shape[-1], dtype=torch.float32, device=gradient.device)]


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Replaces ``Tensor.copy_``: between host and device it converts another dtype on the device.

    The device then has a temporary tensor of the host's dtype, in either direction (torch 2.11,
    ``aten/src/ATen/native/cuda/Copy.cu``). A blocking copy converts on the host.
    """
    if non_blocking and target.dtype != source.dtype and is_on_host(target) != is_on_host(source):
        host = target if is_on_host(target) else source
        torch.empty(target.shape, dtype=host.dtype, device="meta")
    return target.copy_(source)
