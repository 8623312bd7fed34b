"""Transformer Engine's fused MoE permutations, in torch.

Same results and the same tensors saved for backward as ``transformer_engine/pytorch/permutation.py`` (2.12.0): the
map from rows to experts and nothing else, so that only the experts save permuted tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.megatron.layers.kernel_timing import time_kernel
from memlab.meter.labels import one_kernel


class _PermuteWithMask(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        row_id_map = _row_id_map(routing_map)
        permuted, permuted_probs = _gather(tokens, probs, row_id_map, num_out_tokens)
        time_kernel("permute", tokens, probs)
        assert len(permuted) == num_out_tokens, f"{len(permuted)} rows routed, {num_out_tokens} expected"
        ctx.save_for_backward(row_id_map)
        ctx.mark_non_differentiable(row_id_map)
        return permuted, row_id_map, permuted_probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_permuted, _, grad_permuted_probs = grads
        (row_id_map,) = ctx.saved_tensors
        grad_tokens, grad_probs = _scatter(grad_permuted, grad_permuted_probs, row_id_map)
        time_kernel("unpermute", grad_permuted, grad_permuted_probs)
        return grad_tokens, None, None, grad_probs


class _UnpermuteWithMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, permuted: torch.Tensor, row_id_map: torch.Tensor, restore_shape: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(row_id_map)
        ctx.num_rows = len(permuted)
        restored = _scatter(permuted, None, row_id_map)[0]
        time_kernel("unpermute", permuted, None)
        return restored

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (row_id_map,) = ctx.saved_tensors
        of_rows = _gather(grads[0], None, row_id_map, ctx.num_rows)[0]
        time_kernel("permute", grads[0], None)
        return of_rows, None, None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, split_sizes: torch.Tensor, order: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        row_id_map = _chunk_rows(split_sizes, order, tokens)
        sorted_tokens = tokens.index_select(0, row_id_map)
        sorted_probs = None if probs is None else probs.index_select(0, row_id_map)
        ctx.save_for_backward(row_id_map)
        time_kernel("sort chunks", tokens, probs)
        return sorted_tokens, sorted_probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_tokens, grad_probs = grads
        (row_id_map,) = ctx.saved_tensors
        restored = _put_back(grad_tokens, row_id_map)
        restored_probs = _put_back(grad_probs, row_id_map) if ctx.needs_input_grad[3] else None
        time_kernel("sort chunks", grad_tokens, restored_probs)
        return restored, None, None, restored_probs


def permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups tokens by expert.

    Args:
        tokens: Shape [tokens, hidden].
        probs: Shape [tokens, experts].
        routing_map: Bool, shape [tokens, experts].
        num_out_tokens: Rows that come out: tokens x experts per token.

    Returns:
        Permuted tokens [rows, hidden], their probabilities [rows], and the map that `unpermute` takes.
    """
    permuted, row_id_map, permuted_probs = _PermuteWithMask.apply(tokens, routing_map, int(num_out_tokens), probs)
    return permuted, permuted_probs, row_id_map


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups tokens by expert without their probabilities, as `permute_with_probs` does with them."""
    permuted, row_id_map, _ = _PermuteWithMask.apply(tokens, routing_map, int(num_out_tokens), None)
    return permuted, row_id_map


def unpermute(
    permuted: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums permuted rows [rows, hidden] into their tokens [tokens, hidden]."""
    assert merging_probs is None and restore_shape is not None, "Megatron weighs tokens in the experts' activation"
    assert pad_offsets is None, "rows are padded only for 8-bit training"
    return _UnpermuteWithMask.apply(permuted, row_id_map, restore_shape)


def sort_chunks_by_index(tokens: torch.Tensor, split_sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorders chunks of rows: `split_sizes` rows each, in the given order."""
    result: torch.Tensor = _SortChunks.apply(tokens, split_sizes, order, None)[0]
    return result


def sort_chunks_by_index_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorders chunks of rows, and their probabilities in the same way."""
    sorted_tokens, sorted_probs = _SortChunks.apply(tokens, split_sizes, order, probs)
    return sorted_tokens, sorted_probs


@one_kernel()
def _row_id_map(routing_map: torch.Tensor) -> torch.Tensor:
    # TE's map is int32 [tokens, 2 * experts + 1]; only the places of the routed rows are read here.
    num_tokens, num_experts = routing_map.shape
    row_id_map = routing_map.new_empty((num_tokens, 2 * num_experts + 1), dtype=torch.int32)
    row_id_map[:, :num_experts] = routing_map
    return row_id_map


def _routed(row_id_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the expert and the token of every permuted row, expert by expert."""
    if row_id_map.is_meta:  # a fake map has no values; the number of rows is known
        return row_id_map.new_empty(num_rows), row_id_map.new_empty(num_rows)
    num_experts = (row_id_map.shape[1] - 1) // 2
    experts, rows = row_id_map[:, :num_experts].T.nonzero(as_tuple=True)
    return experts, rows


@one_kernel()
def _gather(
    tokens: torch.Tensor, probs: torch.Tensor | None, row_id_map: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    experts, rows = _routed(row_id_map, num_rows)
    return tokens.index_select(0, rows), None if probs is None else probs[rows, experts]


@one_kernel()
def _scatter(
    permuted: torch.Tensor, permuted_probs: torch.Tensor | None, row_id_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    experts, rows = _routed(row_id_map, len(permuted))
    num_tokens = len(row_id_map)
    # TE's kernel adds in fp32 and rounds once.
    total = permuted.new_zeros((num_tokens, permuted.shape[1]), dtype=torch.float32)
    total.index_add_(0, rows, permuted.float())
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros((num_tokens, (row_id_map.shape[1] - 1) // 2))
        probs[rows, experts] = permuted_probs
    return total.to(permuted.dtype), probs


@one_kernel()
def _put_back(rows: torch.Tensor, row_id_map: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows).index_copy_(0, row_id_map.long(), rows)


@one_kernel()
def _chunk_rows(split_sizes: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if tokens.is_meta:
        return tokens.new_empty(len(tokens), dtype=torch.int32)
    sizes = split_sizes.tolist()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return torch.cat(
        [
            torch.arange(starts[index], starts[index] + sizes[index], dtype=torch.int32, device=split_sizes.device)
            for index in order.tolist()
        ]
    )
