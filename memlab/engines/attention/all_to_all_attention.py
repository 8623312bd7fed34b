"""Causal attention over a sequence that is spread over ranks: each rank gets the whole sequence of some heads.

After ``AttnFuncWithCPAndQKVOA2A`` and ``flash_attn_a2a_communicate`` of Transformer Engine (``context_parallel.py`` in
``transformer_engine/pytorch/attention/dot_product_attention``, 2.16.1) as they go for bf16 tensors [sequence, batch,
heads, channels] on cuDNN, and [batch, sequence, heads, channels] on flash-attn: the same buffers are made, and the same
tensors saved for backward. A rank has an early and a late chunk of the sequence (`training_step.chunks_of_this_rank`).
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.attention.context_parallel import FUSED, Kernel


class AllToAllAttention(torch.autograd.Function):
    """`fused_attention.CausalAttention` of a rank's share of the heads.

    Saves query, key, value and output of whole sequences, the log-sum-exp of each row (fp32), and what else the kernel
    saves. The output that the layer returns is another tensor, of the rank's own tokens and all heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        group: Any,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        kernel: Kernel = FUSED,
    ) -> torch.Tensor:
        inputs, dim = [query.contiguous(), key.contiguous(), value.contiguous()], kernel.sequence_dim
        query, key, value = _to_heads(inputs, group, dim)
        own_sinks = None if sinks is None else sinks.chunk(group.size(), 1)[group.rank()].contiguous()
        ctx.options = {"window": window} if kernel is FUSED else {"causal": True}  # flash-attn has neither of the two
        of_sinks = {} if own_sinks is None else {"sinks": own_sinks}
        output, log_sum_exp, *others = kernel.attend(query, key, value, scale, **ctx.options, **of_sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, own_sinks, *others)
        ctx.scale, ctx.group, ctx.kernel = scale, group, kernel
        (of_rank,) = _to_tokens([output], group, dim)
        return of_rank.view(*of_rank.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, sinks, *_ = ctx.saved_tensors
        ranks, dim = ctx.group.size(), ctx.kernel.sequence_dim
        grad = grads[0].view(*grads[0].shape[:2], ranks * output.shape[2], output.shape[3])
        (of_heads,) = _to_heads([grad], ctx.group, dim)
        of_sinks = {} if sinks is None else {"sinks": sinks}
        of_inputs = ctx.kernel.attend_backward(
            of_heads, query, key, value, output, log_sum_exp, ctx.scale, **ctx.options, **of_sinks
        )
        grad_sinks = _of_all_heads(of_inputs[3], ctx.group) if sinks is not None else None
        return *_to_tokens(list(of_inputs[:3]), ctx.group, dim), None, None, None, grad_sinks, None


def _to_heads(tensors: list[torch.Tensor], group: Any, dim: int) -> list[torch.Tensor]:
    """Sends the rank's tokens of all heads, and returns whole sequences of the rank's heads.

    Dimension `dim` of two is the sequence. Transformer Engine compiles what orders the chunks: no copy is between.
    """
    ranks = group.size()
    order = [(rank, 0) for rank in range(ranks)] + [(rank, 1) for rank in reversed(range(ranks))]
    sent, received = [], []
    for tensor in tensors:
        by_rank = tensor.view(*tensor.shape[:2], ranks, -1, tensor.shape[3]).movedim(2, 0)
        sent.append(by_rank.contiguous())  # all of them stay until the last one has arrived
        arrived = _exchanged(sent[-1], group)
        received.append(torch.cat([arrived[rank].chunk(2, dim)[half] for rank, half in order], dim))
        del arrived
    return received


def _to_tokens(tensors: list[torch.Tensor], group: Any, dim: int) -> list[torch.Tensor]:
    """Sends whole sequences of the rank's heads, and returns the rank's tokens of all heads."""
    ranks = group.size()
    order = [number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)]
    sent, received = [], []
    for tensor in tensors:
        chunks = tensor.unsqueeze(0).chunk(2 * ranks, 1 + dim)
        in_order = torch.cat([chunks[number] for number in order])
        sent.append(in_order.view(ranks, 2, *in_order.shape[1:]))
        arrived = _exchanged(sent[-1], group).movedim(0, 3).movedim(0, dim).contiguous()
        received.append(arrived.flatten(dim, dim + 1).flatten(2, 3))
        del arrived
    return received


def _exchanged(sent: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return received


def _of_all_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers the gradients of the sinks, [1, heads, 1, 1]."""
    whole = part.new_empty(group.size() * part.numel())
    torch.distributed.all_gather_into_tensor(whole, part.reshape(-1), group=group)
    return whole.view(1, -1, 1, 1)
