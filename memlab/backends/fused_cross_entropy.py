"""Fused cross entropies without a GPU: the values of the real kernels, in tensors of the same sizes and lifetimes.

Megatron's own is a number of functions that torch compiles (``megatron/core/fusions/fused_cross_entropy.py``). Two of
them allocate more than their code shows: `native_predicted_logits` and `native_gradients` replace them. Transformer
Engine's is Triton kernels, which `te_parallel_cross_entropy` replaces. An H200 allocated the same bytes in the same
order (torch 2.11, megatron-core 0.16.1, Transformer Engine 2.12.0), and the same peaks with the cross entropies of
2.18.0 and 2.20.2.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from megatron.core.fusions import fused_cross_entropy

from memlab.backends.simulated_version import imitated
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

    Returns:
        The gradient of the logits: bf16, whatever type the logits have.
    """
    return _eager_gradients(softmax.clone(), *operands)


def te_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, is_cg_capturable: bool = False
) -> torch.Tensor:
    """Replaces Megatron's function of this name (``megatron/core/extensions/transformer_engine.py``).

    Args:
        logits: [tokens, sequences, vocabulary of this rank], overwritten with their gradient.
        labels: int64 [tokens, sequences].
        is_cg_capturable: Whether a CUDA graph captures it, which changes no tensor.

    Returns:
        The losses, fp32 [tokens, sequences].
    """
    function = _CrossEntropyOfCopy if imitated().cross_entropy == "copies logits" else _CrossEntropyWithGradient
    return function.apply(logits, labels, group)


class _CrossEntropyWithGradient(torch.autograd.Function):
    """``CrossEntropyFunction`` (``transformer_engine/pytorch/cross_entropy.py`` and ``triton/``) up to 2.18.0.

    Forward computes the gradient, up to 2.17 where the logits were and in their type, in 2.18 in fp32 beside them.
    Backward multiplies it there.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        ranks, num_tokens = group.size(), labels.numel()
        losses = logits.new_zeros(num_tokens, dtype=torch.float32)
        statistics = logits.new_zeros(num_tokens * _STATISTICS, dtype=torch.float32)
        is_in_place = imitated().cross_entropy == "overwrites logits"
        gradient = logits.detach() if is_in_place else torch.empty_like(logits, dtype=torch.float32)
        _fill_statistics(statistics.view(num_tokens, _STATISTICS), logits, labels, group.rank())
        if ranks > 1:
            of_all_ranks = logits.new_zeros(num_tokens * _STATISTICS * ranks, dtype=torch.float32)
            torch.distributed.all_gather_into_tensor(of_all_ranks, statistics, group=group)
        else:
            of_all_ranks = statistics
        of_ranks = of_all_ranks.view(ranks, num_tokens, _STATISTICS)
        _fill_losses_and_gradient(losses, gradient, logits, labels, of_ranks, group.rank())
        ctx.save_for_backward(gradient)
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (of_logits,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        with one_kernel():
            of_logits.copy_(of_logits * gradient.unsqueeze(-1))
        return of_logits, None, None


class _CrossEntropyOfCopy(torch.autograd.Function):
    """``CrossEntropyFunction`` since 2.19.0: forward copies the logits, backward writes the gradient over the copy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        ranks, num_tokens = group.size(), labels.numel()
        copied = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        losses = logits.new_empty(num_tokens, dtype=torch.float32)
        total = logits.new_empty((num_tokens, 2), dtype=torch.float32)
        if ranks > 1:
            # The fourth value of a token is for label smoothing.
            statistics = logits.new_empty((num_tokens, _STATISTICS + 1), dtype=torch.float32)
            _copy_and_fill_statistics(copied, statistics, logits, labels, group.rank())
            of_all_ranks = logits.new_empty((ranks * num_tokens, _STATISTICS + 1), dtype=torch.float32)
            torch.distributed.all_gather_into_tensor(of_all_ranks, statistics, group=group)
            _fill_losses(losses, total, of_all_ranks.view(ranks, num_tokens, -1))
        else:
            _copy_and_fill_losses(copied, losses, total, logits, labels)
        ctx.save_for_backward(copied, total, labels)
        ctx.rank = group.rank()
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of_logits, total, labels = ctx.saved_tensors
        gradient = gradient.contiguous()
        with one_kernel():
            _fill_gradient(of_logits, of_logits, labels, total, ctx.rank)
            of_logits.mul_(gradient.unsqueeze(-1))
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
def _copy_and_fill_statistics(
    copied: torch.Tensor, statistics: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, rank: int
) -> None:
    """Copies the logits and writes each token's statistics (``cross_entropy_tp_pre_kernel``)."""
    copied.copy_(logits)
    _fill_statistics(statistics, logits, labels, rank)


@one_kernel()
def _copy_and_fill_losses(
    copied: torch.Tensor, losses: torch.Tensor, total: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor
) -> None:
    """Does for one rank what several do in two steps (``cross_entropy_forward_kernel``)."""
    statistics = losses.new_empty((len(losses), _STATISTICS))
    _copy_and_fill_statistics(copied, statistics, logits, labels, 0)
    _fill_losses(losses, total, statistics.unsqueeze(0))


@one_kernel()
def _fill_losses_and_gradient(
    losses: torch.Tensor,
    gradient: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    statistics: torch.Tensor,
    rank: int,
) -> None:
    """Writes each token's loss, and the gradient, which may be over its logits (``cross_entropy_kernel``)."""
    total = losses.new_empty((len(losses), 2))
    _fill_losses(losses, total, statistics)
    _fill_gradient(gradient, logits, labels, total, rank)


@one_kernel()
def _fill_losses(losses: torch.Tensor, total: torch.Tensor, statistics: torch.Tensor) -> None:
    """Writes each token's loss, and the maximum and the sum of exponentials of all ranks into `total` [tokens, 2]."""
    maximum = statistics[:, :, 0].amax(dim=0)
    sums = (statistics[:, :, 1] * (statistics[:, :, 0] - maximum).exp()).sum(dim=0)
    losses.copy_(maximum + sums.log() - statistics[:, :, 2].amax(dim=0))
    total.copy_(torch.stack((maximum, sums), dim=1))


@one_kernel()
def _fill_gradient(
    gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, total: torch.Tensor, rank: int
) -> None:
    """Writes the gradient of each token's loss by its logits, which may be where the gradient goes."""
    maximum, sums = total.unbind(dim=1)
    rows, inputs = gradient.view(-1, gradient.shape[-1]), logits.view(-1, logits.shape[-1])
    own, mine = _on_this_rank(labels, rows.shape[-1], rank)
    rows.copy_((inputs.float() - maximum.unsqueeze(-1)).exp() / sums.unsqueeze(-1))
    rows.scatter_add_(1, own, -mine.to(rows.dtype).unsqueeze(1))


def _on_this_rank(labels: torch.Tensor, vocabulary: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each label's place in this rank's part of the vocabulary, int64 [tokens, 1], and whether it has one."""
    own = labels.reshape(-1) - rank * vocabulary
    mine = (own >= 0) & (own < vocabulary)
    return own.where(mine, torch.zeros_like(own)).unsqueeze(1), mine
