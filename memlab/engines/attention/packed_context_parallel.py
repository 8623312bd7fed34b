"""Causal attention over packed sequences, each of which is spread over ranks.

After ``AttnFuncWithCPAndKVP2P`` of Transformer Engine (``context_parallel.py`` in
``transformer_engine/pytorch/attention/dot_product_attention``, 2.12.0) as it goes for bf16 tensors of the format
``thd`` on cuDNN 9.6 or later and on flash-attn: the same buffers are made, and the same tensors saved for backward. It
differs from `context_parallel.RingAttention` in three ways. A rank has an early and a late chunk of each sequence, so
that half of the rows is a copy and not a view. Parts of the output are added up in 16 bits, in a tensor that exists
from the second turn on. cuDNN's sums of exponentials are copied, because the additions order them differently.

Allocated peaks of two ranks of H200s with cuDNN were within 0.00002 % of it (`labs/LOG.md`, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memlab.engines.attention.context_parallel import apart, exchange
from memlab.engines.attention.kernel import attend_each, attend_each_backward
from memlab.engines.attention.packed_sequences import lengths_of
from memlab.meter.labels import one_kernel


class PackedKernel(NamedTuple):
    """What attends from some queries of each sequence to some keys."""

    attend_each: Callable[..., tuple[torch.Tensor, ...]]
    """Returns output, log-sum-exp, and what else it saves for backward."""
    attend_each_backward: Callable[..., tuple[torch.Tensor, ...]]
    has_heads_first: bool
    """Whether its log-sum-exp is [heads, tokens], as it is added up; a copy is reordered otherwise."""

    def reordered(self, log_sum: torch.Tensor) -> torch.Tensor:
        """Returns sums of exponentials as the additions want them, or the other way round."""
        return log_sum if self.has_heads_first else _reordered(log_sum)


FUSED = PackedKernel(attend_each, attend_each_backward, has_heads_first=False)


class PackedRingAttention(torch.autograd.Function):
    """`fused_attention.PackedAttention` over the ranks of a group.

    Shapes are [tokens of the rank, heads, channels]. Saves query, output, the log-sum-exp of each row (fp32), the keys
    and values that arrived last, where the sequences of each turn end, and what the kernel saves in each turn.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        ends: torch.Tensor,
        group: Any,
        kernel: PackedKernel = FUSED,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        size, rank = group.size(), group.rank()
        own_ends = ends // size
        lengths = lengths_of(own_ends)
        visiting = [torch.cat((key.view(-1), value.view(-1)))]
        tiles, outputs, log_sums = list[_Tile](), list[torch.Tensor](), list[torch.Tensor]()
        ends_of_turns, saved = list[torch.Tensor](), list[torch.Tensor]()
        queries_of_two_turns = [query, query]  # the source keeps them so
        for turn in range(size):
            requests = []
            if turn < size - 1:
                visiting.append(torch.empty_like(visiting[turn]))
                requests = exchange(visiting[turn], visiting[turn + 1], group, step=1)
            tile = _Tile.between(rank, (rank - turn) % size)
            tiles.append(tile)
            ends_of_turns += (
                ends // (size * (1 + is_half)) for is_half in (tile.has_late_queries, tile.has_early_keys)
            )
            # The last turn's halves are freed when this turn's exist.
            visitors = apart(visiting[turn], key.shape, value.shape)
            of_query, of_key, of_value = tile.rows(lengths, (query,), visitors)
            queries_of_two_turns[turn % 2] = of_query
            output, log_sum, *others = kernel.attend_each(
                of_query, of_key, of_value, scale, *tile.lengths(lengths), causal=tile.causal
            )
            saved += others
            outputs.append(output)
            log_sums.append(log_sum)
            if turn > 0:
                log_sums[turn - 1] = kernel.reordered(log_sums[turn - 1])
            if turn == 1:
                total, summed = log_sums[0].clone(), query.new_zeros((*query.shape[:-1], value.shape[-1]))
            elif turn > 1:
                _add_log_sum(total, log_sums[turn - 1], lengths, is_late=tiles[turn - 1].has_late_queries)
            for request in requests:
                request.wait()
        log_sums[-1] = kernel.reordered(log_sums[-1])
        _add_log_sum(total, log_sums[-1], lengths, is_late=tiles[-1].has_late_queries)
        for tile, part, part_log_sum in zip(tiles, outputs, log_sums, strict=True):
            _add_weighted(summed, part, part_log_sum, total, lengths, is_late=tile.has_late_queries)
        ctx.save_for_backward(query, visiting[-1], summed, total, own_ends, *ends_of_turns, *saved)
        ctx.scale, ctx.group, ctx.shapes, ctx.lengths = scale, group, (key.shape, value.shape), lengths
        ctx.kernel = kernel
        return summed.view(len(summed), -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key_value, output, total, *_ = ctx.saved_tensors
        size, rank, lengths, kernel = ctx.group.size(), ctx.group.rank(), ctx.lengths, ctx.kernel
        grad = grads[0].contiguous().view(output.shape)
        late_total = None
        if rank < size - 1:  # the last rank never attends with its late queries alone
            late_total = _half(total, lengths, 1, dim=1)
            late_total = kernel.reordered(late_total)
        total = kernel.reordered(total)
        grad_query = torch.empty_like(query).zero_()
        # First row: the visiting keys and values. Second row: the sum of their gradients so far.
        buffers = [key_value.new_empty((2, len(key_value))) for _ in range(2)]
        buffers[0][0].copy_(key_value)
        for turn in range(size):
            here, there = buffers[turn % 2], buffers[(turn + 1) % 2]
            # The first turn sends keys and values only, the last one gradients only, the others both.
            sent = slice(1 if turn == size - 1 else 0, 1 if turn == 0 else 2)
            requests = exchange(here[sent], there[sent], ctx.group, step=-1)
            tile = _Tile.between(rank, (rank + 1 + turn) % size)
            of_query, of_output, of_grad, of_key, of_value = tile.rows(
                lengths, (query, output, grad), apart(here[0], *ctx.shapes)
            )
            parts = kernel.attend_each_backward(
                of_grad,
                of_query,
                of_key,
                of_value,
                of_output,
                late_total if late_total is not None and tile.has_late_queries else total,
                ctx.scale,
                *tile.lengths(lengths),
                causal=tile.causal,
            )
            _add_rows(grad_query, parts[0], lengths, 1 if tile.has_late_queries else None)
            for request in requests:
                request.wait()
            if turn == 0:
                there[1].zero_()
            for whole, part in zip(apart(there[1], *ctx.shapes), parts[1:], strict=True):
                _add_rows(whole, part, lengths, 0 if tile.has_early_keys else None)
            del parts, part
        return grad_query, *apart(there[1], *ctx.shapes), None, None, None, None


class _Tile(NamedTuple):
    """Which of a rank's queries see which of an owner's keys, in each sequence."""

    has_late_queries: bool
    """Only the late chunk of each sequence; all of the rank's rows otherwise."""
    has_early_keys: bool
    causal: bool

    @classmethod
    def between(cls, rank: int, owner: int) -> _Tile:
        """Returns the tile of `rank` and `owner`.

        An earlier rank's early chunk is before both of this rank's, its late one after both; a later rank's chunks both
        lie between this rank's two.
        """
        return cls(owner > rank, owner < rank, owner == rank)

    def rows(
        self, lengths: list[int], queries: tuple[torch.Tensor, ...], keys: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tile's rows of tensors [tokens of the rank, ...], halves copied (``thd_read_half_tensor``)."""
        if self.has_late_queries:
            queries = tuple(_half(tensor, lengths, 1) for tensor in queries)
        if self.has_early_keys:
            keys = tuple(_half(tensor, lengths, 0) for tensor in keys)
        return *queries, *keys

    def lengths(self, lengths: list[int]) -> tuple[list[int], list[int]]:
        """Returns the lengths of the sequences of queries and of keys."""
        halved = [length // 2 for length in lengths]
        return (halved if self.has_late_queries else lengths), (halved if self.has_early_keys else lengths)


def _halves(tensor: torch.Tensor, lengths: list[int], which: int, dim: int = 0) -> list[torch.Tensor]:
    """Returns views of the early (0) or late (1) half of each sequence."""
    return [sequence.chunk(2, dim)[which] for sequence in tensor.split(lengths, dim)]


@one_kernel()
def _half(tensor: torch.Tensor, lengths: list[int], which: int, *, dim: int = 0) -> torch.Tensor:
    return torch.cat(_halves(tensor, lengths, which, dim), dim)


@one_kernel()
def _reordered(log_sum: torch.Tensor) -> torch.Tensor:
    """Copies as from cuDNN's [tokens, heads] to [heads, tokens] or back; here it is always the second."""
    return log_sum.clone()


@one_kernel()
def _add_rows(whole: torch.Tensor, part: torch.Tensor, lengths: list[int], which: int | None) -> None:
    """Adds rows to all of a tensor, or to one half of each sequence (``thd_grad_correction``)."""
    if which is None:
        whole.add_(part)
        return
    halves = _halves(whole, lengths, which)
    for half, added in zip(halves, part.split([len(half) for half in halves]), strict=True):
        half.add_(added)


@one_kernel()
def _add_log_sum(total: torch.Tensor, part: torch.Tensor, lengths: list[int], *, is_late: bool) -> None:
    """Adds sums of exponentials [heads, tokens] (``thd_second_half_lse_correction``)."""
    sums = _halves(total, lengths, 1, 1) if is_late else [total]
    for known, more in zip(sums, part.split([one.shape[1] for one in sums], 1), strict=True):
        known.copy_(torch.logaddexp(known, more))


@one_kernel()
def _add_weighted(
    summed: torch.Tensor,
    part: torch.Tensor,
    log_sum: torch.Tensor,
    total: torch.Tensor,
    lengths: list[int],
    *,
    is_late: bool,
) -> None:
    """Adds a part of the output, weighted by its share of the exponentials (``thd_out_correction``)."""
    of_rows = torch.cat(_halves(total, lengths, 1, 1), 1) if is_late else total
    weighted = (part * (log_sum - of_rows).exp().t().unsqueeze(-1)).to(summed.dtype)
    _add_rows(summed, weighted, lengths, 1 if is_late else None)
