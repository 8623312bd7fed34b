"""Ranks that share a row as verl's do with Ulysses, and verl's log-probabilities, for `benchmarks.plain_fsdp2`.

Written after ``verl/utils/ulysses.py``, ``_ulysses_flash_attention_forward`` in
``verl/models/transformers/monkey_patch.py`` and ``logprobs_from_logits`` in ``verl/utils/torch_functional.py`` (0.9.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import distributed

_TOKENS, _HEADS = 1, 2


def part_of_row(job: Any, inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Returns a rank's part of a row, with the tokens that follow as labels, and the group of the ranks."""
    group, tokens = _group(job.num_ranks, job.context_parallel_size, device), inputs["input_ids"]
    whole = {"position_ids": torch.arange(job.seq_length, device=device).unsqueeze(0)} | inputs
    whole["labels"] = tokens.roll(-1, _TOKENS)
    rank = distributed.get_rank(group)
    own = {name: each.chunk(job.context_parallel_size, _TOKENS)[rank].contiguous() for name, each in whole.items()}
    return own | {"context_parallel_group": group}


@cache
def _group(num_ranks: int, ranks_of_row: int, device: str) -> Any:
    shape = (num_ranks // ranks_of_row, ranks_of_row)
    return distributed.init_device_mesh(device, shape, mesh_dim_names=("dp", "sp"))["sp"].get_group()


def attend_over_ranks(attend: Callable[..., Any], group: Any, module: Any, *tensors: Any, **options: Any) -> Any:
    """Attends to whole rows with a share of the heads.

    Args:
        attend: Attention as transformers calls it, with tensors [batch, heads, tokens, channels].
        group: Of the ranks that share the row.
        module: transformers' attention.
        *tensors: Query, key and value, of the rank's tokens.
        **options: Of the attention, with the positions of the rank's tokens.
    """
    copies = max(group.size() // tensors[1].shape[1], 1)
    query, key, value = (each.transpose(1, 2) for each in tensors)
    if copies > 1:
        key, value = (each.repeat_interleave(copies, _HEADS) for each in (key, value))
    whole = [_Exchange.apply(each, _HEADS, _TOKENS, group).transpose(1, 2) for each in (query, key, value)]
    positions = options.pop("position_ids")
    parts = [torch.empty_like(positions) for _ in range(group.size())]
    distributed.all_gather(parts, positions.contiguous(), group=group)
    output, _ = attend(module, *whole, None, position_ids=torch.cat(parts, -1), **options)
    return _Exchange.apply(output, _TOKENS, _HEADS, group), None


class _Exchange(torch.autograd.Function):
    """``SeqAllToAll``: sends each rank its part along one dimension, and joins what arrives along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, scatter: int, gather: int, group: Any) -> Any:
        ctx.back = gather, scatter, group
        return _exchanged(tensor, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchanged(grads[0], *ctx.back), None, None, None


def _exchanged(tensor: Any, scatter: int, gather: int, group: Any) -> Any:
    sent = [each.contiguous() for each in tensor.tensor_split(group.size(), scatter)]
    arrived = [torch.empty_like(sent[0]) for _ in sent]
    if tensor.is_cuda:
        distributed.all_to_all(arrived, sent, group=group)
    else:  # a rehearsal: gloo exchanges one tensor
        joined = torch.stack(sent)
        distributed.all_to_all_single(received := torch.empty_like(joined), joined, group=group)
        arrived = list(received)
    return torch.cat(arrived, gather).contiguous()


def loss_of_logprobs(logits: Any, tokens: Any, *, by_row: bool) -> Any:
    """Returns the mean of the negative log-probabilities of tokens.

    Args:
        logits: [1, tokens, vocabulary].
        tokens: int64 [1, tokens]; those that follow.
        by_row: As ``logprobs_from_logits_v2`` computes them where flash-attn is not installed; else as flash-attn's
            cross entropy with ``inplace_backward``, here with torch's operations, a row at a time.
    """
    rows = logits.squeeze(0)
    if not by_row:
        return _FlashLosses.apply(rows, tokens.squeeze(0)).mean()
    found = []
    for row, token in zip(rows, tokens.squeeze(0), strict=True):
        found.append(row.float().log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1))
    return -torch.stack(found).mean()


class _FlashLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, tokens: Any) -> Any:
        sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        losses = torch.empty_like(sums)
        for row, token, total, loss in zip(logits, tokens, sums, losses, strict=True):
            values = row.float()
            total.copy_(values.logsumexp(-1))
            loss.copy_(total - values.gather(-1, token.unsqueeze(-1)).squeeze(-1))
        ctx.save_for_backward(logits, sums, tokens)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, sums, tokens = ctx.saved_tensors
        minus_one = sums.new_full((1,), -1.0)
        for row, token, total, grad in zip(logits, tokens, sums, grads[0], strict=True):
            values = row.float().sub_(total).exp_()
            values.scatter_add_(-1, token.unsqueeze(-1), minus_one)
            row.copy_(values.mul_(grad))
        return logits, None
