"""Causal attention over a sequence that is spread over ranks: each rank gets the whole sequence of some heads.

After ``AttnFuncWithCPAndQKVOA2A`` and ``flash_attn_a2a_communicate`` of Transformer Engine (``context_parallel.py`` in
``transformer_engine/pytorch/attention/dot_product_attention``, 2.16.1) as they go for bf16 tensors [sequence, batch,
heads, channels] on cuDNN: the same buffers are made, and the same tensors saved for backward. A rank has an early and a
late chunk of the sequence (`training_step.chunks_of_this_rank`).
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.megatron.layers.torch_functions import attend, attend_backward


class AllToAllAttention(torch.autograd.Function):
    """`torch_functions.CausalAttention` of a rank's share of the heads.

    Saves query, key, value and output of whole sequences, and the log-sum-exp of each row (fp32). The output that the
    layer returns is another tensor, of the rank's own tokens and all heads.
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
    ) -> torch.Tensor:
        query, key, value = _to_heads([query.contiguous(), key.contiguous(), value.contiguous()], group)
        own_sinks = None if sinks is None else sinks.chunk(group.size(), 1)[group.rank()].contiguous()
        output, log_sum_exp = attend(query, key, value, scale, window=window, sinks=own_sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, own_sinks)
        ctx.scale, ctx.group, ctx.window = scale, group, window
        (of_rank,) = _to_tokens([output], group)
        return of_rank.view(*of_rank.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, sinks = ctx.saved_tensors
        ranks = ctx.group.size()
        grad = grads[0].view(len(output) // ranks, output.shape[1], ranks * output.shape[2], output.shape[3])
        (of_heads,) = _to_heads([grad], ctx.group)
        of_inputs = attend_backward(
            of_heads, query, key, value, output, log_sum_exp, ctx.scale, window=ctx.window, sinks=sinks
        )
        grad_sinks = _of_all_heads(of_inputs[3], ctx.group) if sinks is not None else None
        return *_to_tokens(list(of_inputs[:3]), ctx.group), None, None, None, grad_sinks


def _to_heads(tensors: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Sends [tokens of the rank, batch, heads, channels], and returns whole sequences of the rank's heads."""
    ranks = group.size()
    order = [2 * rank for rank in range(ranks)] + [2 * rank + 1 for rank in reversed(range(ranks))]
    sent, received = [], []
    for tensor in tensors:
        by_rank = tensor.view(*tensor.shape[:2], ranks, -1, tensor.shape[3]).movedim(2, 0)
        sent.append(by_rank.contiguous())  # all of them stay until the last one has arrived
        arrived = _exchanged(sent[-1], group)
        chunks = arrived.view(2 * ranks, -1, *arrived.shape[2:])
        received.append(_in_order(chunks, order).view(-1, *arrived.shape[2:]))
        del arrived, chunks
    return received


def _to_tokens(tensors: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Sends whole sequences of the rank's heads, and returns [tokens of the rank, batch, heads, channels]."""
    ranks = group.size()
    order = [number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)]
    sent, received = [], []
    for tensor in tensors:
        chunks = tensor.view(2 * ranks, -1, *tensor.shape[1:])
        sent.append(_in_order(chunks, order).view(ranks, -1, *tensor.shape[1:]))
        arrived = _exchanged(sent[-1], group).movedim(0, 2).contiguous()
        received.append(arrived.view(*arrived.shape[:2], -1, arrived.shape[-1]))
    return received


def _in_order(chunks: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.cat([chunks[number : number + 1] for number in order])


def _exchanged(sent: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return received


def _of_all_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers the gradients of the sinks, [1, heads, 1, 1]."""
    whole = part.new_empty(group.size() * part.numel())
    torch.distributed.all_gather_into_tensor(whole, part.reshape(-1), group=group)
    return whole.view(1, -1, 1, 1)
