"""Memory that some CUDA kernels allocate and free inside themselves: an operation on fake tensors allocates none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memlab.backends.cuda_on_cpu import is_on_host

_FEW_INDICES = 3072
"""For at most this many indices one kernel sums the rows in place, without sorting (``Embedding.cu``)."""
_ROWS_PER_THREAD = 10


def embedding(indices: torch.Tensor, weight: torch.Tensor, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
    """Replaces ``torch.nn.functional.embedding``, which Megatron calls without options."""
    assert not any(options.values()), options
    return _Embedding.apply(weight, indices)


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


def summing_for_bias(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """Returns the backward of a fused activation, with what autograd's sum for the gradient of its bias allocates.

    Megatron returns one gradient for the input and for the bias, of which autograd makes the bias's by a sum over all
    tokens, while backward still holds what it was given and had saved.
    """

    def followed_by_sum(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_input, *others = backward(ctx, gradient)
        assert of_input is not None
        if not ctx.needs_input_grad[1]:  # a frozen bias
            return of_input, *others
        outputs = of_input.shape[-1]
        num_bytes = bytes_of_sum(outputs, of_input.numel() // outputs)
        torch.empty(num_bytes, dtype=torch.uint8, device=of_input.device)
        return of_input, *others

    return followed_by_sum


_SMS, _THREADS_OF_SM, _WARP, _ROWS_OF_BLOCK, _OUTPUTS_OF_THREAD = 132, 2048, 32, 4, 4
_LEAST_VALUES_OF_THREAD, _MOST_VALUES_OF_THREAD = 16, 256


def bytes_of_sum(outputs: int, rows: int) -> int:
    """Returns what torch's sum of a matrix [rows, outputs] over its rows allocates beside its result.

    Several blocks share an output where there are too few outputs for all multiprocessors of an H100 or H200, and each
    of their threads leaves its part in fp32, also of a matrix in 16 bits (torch 2.11, ``setReduceConfig`` and
    ``global_memory_size`` in ``aten/src/ATen/native/cuda/Reduce.cuh``; for at least 128 outputs, a multiple of 4).
    """
    width = _WARP * _OUTPUTS_OF_THREAD
    values, blocks = -(-rows // _ROWS_OF_BLOCK), -(-outputs // width)
    all_blocks = _SMS * _THREADS_OF_SM // (_WARP * _ROWS_OF_BLOCK)
    if outputs < width or values < _MOST_VALUES_OF_THREAD or blocks > all_blocks:
        return 0
    shares = min(-(-all_blocks // blocks), -(-values // _LEAST_VALUES_OF_THREAD))
    shares = max(shares, -(-values // _MOST_VALUES_OF_THREAD))
    return 4 * outputs * shares * width if shares > 1 else 0


_VALUES_OF_CHUNK, _BYTES_OF_BLOCK = 65536, 2048


def bytes_of_norms(lengths: Sequence[int]) -> int:
    """Returns what torch's norms of many tensors, such as those of a clipping, allocate beside them.

    Each tensor has as many parts in fp32 as the largest has chunks (``foreach_tensor_norm_cuda`` in
    ``aten/src/ATen/native/cuda/ForeachReduceOp.cu``; as an H200's, torch 2.11).
    """
    return 4 * len(lengths) * -(-max(lengths) // _VALUES_OF_CHUNK)


def bytes_of_joined_chunks(sizes: Sequence[int]) -> int:
    """Returns the tables that torch's ``_chunk_cat`` copies to the device: which tensor each block of threads copies.

    Args:
        sizes: Bytes of each tensor's chunk in the result (``get_chunk_cat_metadata`` in
            ``aten/src/ATen/native/cuda/TensorShape.cu``; as an H200's, torch 2.11).
    """
    return 8 * (sum(-(-size // _BYTES_OF_BLOCK) for size in sizes) + 6 * len(sizes) + 2)


def logsumexp(values: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Replaces ``torch.logsumexp`` over one dimension, with what it computes on the way in tensors of their own.

    These are the maxima, which of them are infinite, and the exponentials (``logsumexp_out_impl`` in
    ``aten/src/ATen/native/ReduceOps.cpp``; request by request as an H200's, torch 2.11).
    """
    return _LogSumExp.apply(values, dim, keepdim)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        maxima = values.amax(dim, keepdim=True)
        of_result = maxima if keepdim else maxima.squeeze(dim)
        of_result.masked_fill_(of_result.abs() == float("inf"), 0)
        exponentials = (values - maxima).exp_()
        result = exponentials.sum(dim, keepdim=keepdim)
        del exponentials
        result.log_().add_(of_result)
        ctx.save_for_backward(values, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        values, result = ctx.saved_tensors
        if not ctx.keepdim:
            gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        # torch computes one expression of C++, whose parts are there until it ends (``logsumexp_backward`` in
        # torch/csrc/autograd/FunctionsManual.cpp, 2.11 and 2.13).
        shifted = values - result
        exponentials = shifted.exp()
        return exponentials.mul(gradient), None, None


_TOPK_THREADS, _TOPK_DIGITS, _TOPK_REGISTERS, _TOPK_MOST_VALUES, _TOPK_LEAST_VALUES = 256, 256, 40, 64, 4
_REGISTERS_OF_SM = 65536
_BYTES_OF_SCAN = 1536
_MULTIBLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (2**32, 400))
"""Rows up to which several blocks share one where it has at least so many values (``should_use_multiblock``)."""


def topk(values: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
    """Replaces ``torch.topk``, with the temporary tensors of its kernel."""
    found = torch.topk(values, k, dim, **options)
    temporaries = [
        torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
        for num_bytes in bytes_of_topk(values.numel() // values.shape[dim], values.shape[dim])
    ]
    del temporaries
    return found


def bytes_of_topk(rows: int, values: int) -> list[int]:
    """Returns the tensors that torch's kernel of ``topk`` allocates beside its result, on an H100 or H200.

    Where several blocks share a row, they count digits of its values in 32 bits (``mbtopk::launch`` and
    ``get_items_per_thread`` in ``aten/src/ATen/native/cuda/TensorTopK.cu``), up to 4,096 results of a row. Equal to an
    H200's with torch 2.11, block by block.
    """
    least = next(least for most, least in _MULTIBLOCK if rows <= most)
    if values < least:
        return []
    blocks_of_sm = _REGISTERS_OF_SM // (_TOPK_REGISTERS * _TOPK_THREADS)
    of_thread = -(-values * rows // (_SMS * blocks_of_sm * _TOPK_THREADS))
    of_thread = max(_TOPK_LEAST_VALUES, min(of_thread, _TOPK_MOST_VALUES))
    blocks = rows * -(-values // (of_thread * _TOPK_THREADS))
    of_rows = [4 * rows, 8 * rows, 8 * rows, 4 * _TOPK_DIGITS * rows]
    return [*of_rows, 2 * _TOPK_DIGITS * blocks, 4 * blocks, 4 * blocks, _BYTES_OF_SCAN]


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Replaces ``Tensor.copy_``: between host and device it converts another dtype on the device.

    The device then has a temporary tensor of the host's dtype, in either direction (torch 2.11,
    ``aten/src/ATen/native/cuda/Copy.cu``). A blocking copy converts on the host.
    """
    if non_blocking and target.dtype != source.dtype and is_on_host(target) != is_on_host(source):
        host = target if is_on_host(target) else source
        torch.empty(target.shape, dtype=host.dtype, device="meta")
    return target.copy_(source)
