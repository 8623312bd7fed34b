"""Log-probabilities that frameworks compute from the logits of transformers' models, and their loss.

Written after ``logprobs_from_logits`` in ``verl/utils/torch_functional.py`` (0.9.1), of which SkyRL has a copy: with
the package flash-attn its cross entropy, whose backward writes over the logits; without it one token after the other,
in fp32 under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from memlab.config.training_state import LARGEST_OF_TRANSFORMERS
from memlab.meter.labels import one_kernel

_unbind_copy: Any = torch.unbind_copy
"""By torch's stub it returns None; it returns a tensor alone for each row."""


def loss_of_logprobs(logits: torch.Tensor, tokens: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """Returns the mean of the negative log-probabilities of tokens.

    Args:
        logits: [batch, sequence, vocabulary].
        tokens: int64 [batch, sequence]; those that follow.
        by_row: Whether flash-attn is not there.
    """
    if by_row and not torch.is_grad_enabled():  # then each token's log-probabilities are freed before the next one's
        return -_chosen(logits.flatten(0, 1), tokens.flatten()).mean()
    function = _RowLogProbs if by_row else _FlashLogProbs
    return -function.apply(logits.flatten(0, 1), tokens.flatten()).mean()


def loss_of_largest(logits: torch.Tensor) -> torch.Tensor:
    """Returns the mean negative log-probability of as many logits as a teacher sends; without a graph, finds them.

    Of ranks that share the vocabulary, each does so with its part (``get_distillation_topk_logprobs_from_logits`` in
    nemo_rl/distributed/model_utils.py and ``TopkLogitsPostProcessor`` in nemo_rl/models/automodel/train.py, NeMo-RL
    7ea279ab).

    Args:
        logits: [batch, sequence, vocabulary of the rank].
    """
    rows, k = logits.float(), min(LARGEST_OF_TRANSFORMERS, logits.shape[-1])
    if not torch.is_grad_enabled():
        return -torch.topk(rows, k, dim=-1).values.log_softmax(-1).mean()
    places = torch.arange(k, device=logits.device).expand(*logits.shape[:-1], k)
    chosen: torch.Tensor = _Chosen.apply(rows, places)
    return -chosen.log_softmax(-1).mean()


class _Chosen(torch.autograd.Function):
    """torch's ``gather``, which keeps its input: its own backward makes one tensor more under a dispatch mode."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, places)
        return values.gather(-1, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        values, places = ctx.saved_tensors
        return torch.zeros_like(values).scatter_add_(-1, places, grads[0]), None


class _RowLogProbs(torch.autograd.Function):
    """``logprobs_from_logits_v2``: each token's log-probabilities in fp32, and then its gradient, are tensors alone."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.rows, chosen = _rows(logits, tokens)
        ctx.dtype, ctx.tokens = logits.dtype, tokens
        return chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.stack(_gradients_of_rows(ctx.rows, ctx.tokens, grads[0], ctx.dtype)), None


class _FlashLogProbs(torch.autograd.Function):
    """``CrossEntropyLoss`` in ``flash_attn/ops/triton/cross_entropy.py`` (2.8.3), with ``inplace_backward``."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        log_sums, chosen = _log_sums(logits, tokens)
        ctx.save_for_backward(logits, log_sums, tokens)
        return chosen - log_sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, log_sums, tokens = ctx.saved_tensors
        _write_gradient(logits, log_sums, tokens, grads[0])
        return logits, None


@one_kernel()
def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    values = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@one_kernel()
def _rows(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    values = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    return list(_unbind_copy(values)), values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@one_kernel()
def _gradients_of_rows(
    rows: list[torch.Tensor], tokens: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns the gradients of rows, which it frees."""
    values = torch.stack(rows).exp().neg().mul(grad.unsqueeze(-1))
    values.scatter_add_(-1, tokens.unsqueeze(-1), grad.unsqueeze(-1))
    rows.clear()
    return list(_unbind_copy(values.to(dtype)))


@one_kernel()
def _log_sums(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = logits.float()
    return torch.logsumexp(values, dim=-1), values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@one_kernel()
def _write_gradient(logits: torch.Tensor, log_sums: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor) -> None:
    values = -torch.exp(logits.float() - log_sums.unsqueeze(-1))
    values.scatter_add_(-1, tokens.unsqueeze(-1), torch.ones_like(log_sums).unsqueeze(-1))
    logits.copy_(values * grad.unsqueeze(-1))
