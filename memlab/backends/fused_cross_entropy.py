"""Fused cross entropies without a GPU: the values of the real kernels, in tensors of the same sizes and lifetimes.

Megatron's own is a number of functions that torch compiles (``megatron/core/fusions/fused_cross_entropy.py``). Two of
them allocate more than their code shows: `native_predicted_logits` and `native_gradients` replace them. Transformer
Engine's is Triton kernels, which `te_parallel_cross_entropy` replaces. An H200 allocated the same bytes in the same
order (torch 2.11, megatron-core 0.16.1, Transformer Engine 2.12.0).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from megatron.core.fusions import fused_cross_entropy

from memlab.meter.labels import one_kernel

_eager_predicted_logits = one_kernel()(unwrap(fused_cross_entropy.calculate_predicted_logits))
_eager_gradients = one_kernel()(unwrap(fused_cross_entropy.calculate_gradients))

_STATISTICS = 3
"""Values of each token that Transformer Engine's ranks exchange: maximum, sum of exponentials, label's logit."""


def native_predicted_logits(logits: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    """Replaces the compiled ``calculate_predicted_logits``.

    torch.compile writes the exponentials into a tensor of their own, and copies them over the logits at the end.

    Args:
        logits: fp32 [tokens, sequences, vocabulary of this rank], overwritten with the exponentials.
        operands: As in Megatron.

    Returns:
        What Megatron's function returns.
    """
    results: tuple[torch.Tensor, ...] = _eager_predicted_logits(logits, *operands)
    torch.empty_like(logits)
    return results


def native_gradients(softmax: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Replaces the compiled ``calculate_gradients``.

    Megatron's code updates the softmax in place. torch.compile first turns that into an operation that returns a new
    tensor (``index_put``), and makes it an update in place again only if its result goes straight back into the input
    (``torch/_inductor/fx_passes/reinplace.py``). Here it is multiplied first, so it is a tensor of its own.

    Args:
        softmax: fp32 [tokens, sequences, vocabulary of this rank].
        operands: As in Megatron.

    Returns:
        The gradient of the logits: bf16, whatever type the logits have.
    """
    gradient: torch.Tensor = _eager_gradients(softmax.clone(), *operands)
    return gradient


def te_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, is_cg_capturable: bool = False
) -> torch.Tensor:
    """Replaces Megatron's function of this name (``megatron/core/extensions/transformer_engine.py``).

    Args:
        logits: [tokens, sequences, vocabulary of this rank], overwritten with their gradient.
        labels: int64 [tokens, sequences].
        group: The tensor-parallel ranks.
        is_cg_capturable: Whether a CUDA graph captures it, which changes no tensor.

    Returns:
        The losses, fp32 [tokens, sequences].
    """
    losses: torch.Tensor = _CrossEntropyInPlace.apply(logits, labels, group)
    return losses


class _CrossEntropyInPlace(torch.autograd.Function):
    """``CrossEntropyFunction`` (``transformer_engine/pytorch/cross_entropy.py`` and ``triton/``, 2.12.0).

    Forward leaves the gradient where the logits were, in their type; backward multiplies it there.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        ranks, num_tokens = group.size(), labels.numel()
        losses = logits.new_zeros(num_tokens, dtype=torch.float32)
        statistics = logits.new_zeros(num_tokens * _STATISTICS, dtype=torch.float32)
        _fill_statistics(statistics.view(num_tokens, _STATISTICS), logits, labels, group.rank())
        if ranks > 1:
            of_all_ranks = logits.new_zeros(num_tokens * _STATISTICS * ranks, dtype=torch.float32)
            torch.distributed.all_gather_into_tensor(of_all_ranks, statistics, group=group)
        else:
            of_all_ranks = statistics
        _replace_with_gradient(logits, labels, of_all_ranks.view(ranks, num_tokens, _STATISTICS), losses, group.rank())
        ctx.save_for_backward(logits.detach())
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (of_logits,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        with one_kernel():
            of_logits.copy_(of_logits * gradient.unsqueeze(-1))
        return of_logits, None, None


@one_kernel()
def _fill_statistics(statistics: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, rank: int) -> None:
    """Writes each token's statistics over this rank's part of the vocabulary (``online_softmax_kernel``)."""
    rows = logits.view(-1, logits.shape[-1]).float()
    maximum = rows.amax(dim=-1)
    own, mine = _on_this_rank(labels, rows.shape[-1], rank)
    statistics[:, 0] = maximum
    statistics[:, 1] = (rows - maximum.unsqueeze(-1)).exp().sum(dim=-1)
    statistics[:, 2] = rows.gather(1, own).squeeze(1).masked_fill(~mine, -torch.inf)


@one_kernel()
def _replace_with_gradient(
    logits: torch.Tensor, labels: torch.Tensor, statistics: torch.Tensor, losses: torch.Tensor, rank: int
) -> None:
    """Writes each token's loss, and the gradient over its logits (``cross_entropy_kernel``)."""
    maximum = statistics[:, :, 0].amax(dim=0)
    total = (statistics[:, :, 1] * (statistics[:, :, 0] - maximum).exp()).sum(dim=0)
    losses.copy_(maximum + total.log() - statistics[:, :, 2].amax(dim=0))
    rows = logits.view(-1, logits.shape[-1])
    own, mine = _on_this_rank(labels, rows.shape[-1], rank)
    rows.copy_((rows.float() - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1))
    rows.scatter_add_(1, own, -mine.to(rows.dtype).unsqueeze(1))


def _on_this_rank(labels: torch.Tensor, vocabulary: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each label's place in this rank's part of the vocabulary, int64 [tokens, 1], and whether it has one."""
    own = labels.reshape(-1) - rank * vocabulary
    mine = (own >= 0) & (own < vocabulary)
    return own.where(mine, torch.zeros_like(own)).unsqueeze(1), mine
