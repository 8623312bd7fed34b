"""Causal attention over a sequence that is spread over ranks: keys and values are passed around a ring of ranks.

After ``AttnFuncWithCPAndKVP2P`` of Transformer Engine (``context_parallel.py`` in
``transformer_engine/pytorch/attention/dot_product_attention``, 2.12.0; 2.16.1 has the same) as it goes for bf16 tensors
[sequence, batch, heads, channels] on cuDNN, and [batch, sequence, heads, channels] on flash-attn: the same buffers are
made, and the same tensors saved for backward. A rank has an early and a late chunk of the sequence
(`training_step.chunks_of_this_rank`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memlab.engines.attention.kernel import attend, attend_backward
from memlab.meter.labels import one_kernel


class Kernel(NamedTuple):
    """What attends from some queries to some keys."""

    attend: Callable[..., tuple[torch.Tensor, ...]]
    """Returns output, log-sum-exp [batch, heads, sequence], and what else it saves for backward."""
    attend_backward: Callable[..., tuple[torch.Tensor, ...]]
    """Returns the gradients of query, key and value."""
    sequence_dim: int
    """Which dimension of its tensors is the sequence: 0 or 1."""
    takes_strides: bool
    """Whether it takes an output's gradient as it lies in memory."""

    def rows(self, tensor: torch.Tensor, chunks: slice) -> torch.Tensor:
        """Returns a view of some tokens."""
        return tensor[chunks] if self.sequence_dim == 0 else tensor[:, chunks]


FUSED = Kernel(attend, attend_backward, sequence_dim=0, takes_strides=False)


class RingAttention(torch.autograd.Function):
    """`fused_attention.CausalAttention` over the ranks of a group.

    Saves query, output, the log-sum-exp of each row (fp32), the keys and values that arrived last, and what the kernel
    saves in each turn.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        group: Any,
        kernel: Kernel = FUSED,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        size, rank = group.size(), group.rank()
        visiting = [torch.cat((key.view(-1), value.view(-1)))]
        outputs, log_sums, places = [], [], []  # these and `visiting` stay until the end: 3 tensors per turn
        saved = list[torch.Tensor]()
        rows = kernel.rows
        for turn in range(size):
            requests = []
            if turn < size - 1:
                visiting.append(torch.empty_like(visiting[turn]))
                requests = exchange(visiting[turn], visiting[turn + 1], group, step=1)
            queries, keys, causal = _tile(rank, (rank - turn) % size, query.shape[kernel.sequence_dim])
            their_key, their_value = apart(visiting[turn], key.shape, value.shape)
            tile = rows(query, queries), rows(their_key, keys), rows(their_value, keys)
            output, log_sum, *others = kernel.attend(*tile, scale, causal=causal)
            saved += others
            outputs.append(output)
            log_sums.append(log_sum)
            places.append(queries)
            for request in requests:
                request.wait()
        total = log_sums[0].clone()
        for part, queries in zip(log_sums[1:], places[1:], strict=True):
            _add_log_sum(total[..., queries], part)
        output = _weighted(outputs[0], log_sums[0], total, kernel.sequence_dim)
        for part, part_log_sum, queries in zip(outputs[1:], log_sums[1:], places[1:], strict=True):
            _add_weighted(rows(output, queries), part, part_log_sum, total[..., queries], kernel.sequence_dim)
        ctx.save_for_backward(query, visiting[-1], output, total, *saved)
        ctx.scale, ctx.group, ctx.shapes, ctx.kernel = scale, group, (key.shape, value.shape), kernel
        return output.view(*output.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key_value, output, total, *_ = ctx.saved_tensors
        size, rank, kernel = ctx.group.size(), ctx.group.rank(), ctx.kernel
        num_tokens = query.shape[kernel.sequence_dim]
        grad = (grads[0] if kernel.takes_strides else grads[0].contiguous()).view(output.shape)
        # The kernels need it contiguous. The last rank never attends with its late queries alone.
        late_total = total[..., num_tokens // 2 :].contiguous() if rank < size - 1 else total
        grad_query = torch.empty_like(query).zero_()
        # First row: the visiting keys and values. Second row: the sum of their gradients so far.
        buffers = [key_value.new_empty((2, len(key_value))) for _ in range(2)]
        buffers[0][0].copy_(key_value)
        for turn in range(size):
            here, there = buffers[turn % 2], buffers[(turn + 1) % 2]
            # The first turn sends keys and values only, the last one gradients only, the others both.
            first, last = (1 if turn == size - 1 else 0), (1 if turn == 0 else 2)
            sent = slice(first, last)
            requests = exchange(here[sent], there[sent], ctx.group, step=-1)
            queries, keys, causal = _tile(rank, (rank + 1 + turn) % size, num_tokens)
            their_key, their_value = apart(here[0], *ctx.shapes)
            parts = kernel.attend_backward(
                kernel.rows(grad, queries),
                kernel.rows(query, queries),
                kernel.rows(their_key, keys),
                kernel.rows(their_value, keys),
                kernel.rows(output, queries),
                late_total if queries.start else total,
                ctx.scale,
                causal=causal,
            )
            for request in requests:
                request.wait()
            if turn == 0:
                there[1].zero_()
            grad_key, grad_value = apart(there[1], *ctx.shapes)
            for whole, chunks, part in zip(
                (grad_query, grad_key, grad_value), (queries, keys, keys), parts, strict=True
            ):
                kernel.rows(whole, chunks).add_(part)
            del parts, part
        return grad_query, grad_key, grad_value, None, None, None


def exchange(send: torch.Tensor, receive: torch.Tensor, group: Any, *, step: int) -> list[Any]:
    """Starts sending to the rank `step` further on and receiving from the one as far behind.

    Returns:
        What to wait for.
    """
    ranks, rank = torch.distributed.get_process_group_ranks(group), group.rank()
    to, source = ranks[(rank + step) % len(ranks)], ranks[(rank - step) % len(ranks)]
    operations = [
        torch.distributed.P2POp(torch.distributed.isend, send, to, group),
        torch.distributed.P2POp(torch.distributed.irecv, receive, source, group),
    ]
    return torch.distributed.batch_isend_irecv(operations)


def _tile(rank: int, owner: int, num_tokens: int) -> tuple[slice, slice, bool]:
    """Returns which of a rank's queries see which keys of an owner, and whether each sees only those before it.

    An earlier rank's early chunk is before both of this rank's, its late one after both; a later rank's chunks both
    lie between this rank's two.
    """
    early, late, both = slice(0, num_tokens // 2), slice(num_tokens // 2, None), slice(0, None)
    if owner == rank:
        return both, both, True
    return (both, early, False) if owner < rank else (late, both, False)


def apart(key_value: torch.Tensor, key_shape: torch.Size, value_shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of keys and values that are sent as one tensor."""
    return key_value[: key_shape.numel()].view(key_shape), key_value[key_shape.numel() :].view(value_shape)


@one_kernel()
def _add_log_sum(total: torch.Tensor, part: torch.Tensor) -> None:
    total.copy_(torch.logaddexp(total, part))


@one_kernel()
def _weighted(output: torch.Tensor, log_sum: torch.Tensor, total: torch.Tensor, sequence_dim: int) -> torch.Tensor:
    return (output * (log_sum - total).exp().movedim(2, sequence_dim).unsqueeze(-1)).to(output.dtype)


@one_kernel()
def _add_weighted(
    output: torch.Tensor, part: torch.Tensor, log_sum: torch.Tensor, total: torch.Tensor, sequence_dim: int
) -> None:
    output.add_(_weighted(part, log_sum, total, sequence_dim))
