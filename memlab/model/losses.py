"""The loss of reinforcement learning: log-probabilities of the labels and the entropy, computed from the logits.

Tensors have the sizes and lifetimes of those in SkyRL's Megatron worker, where `logprobs_chunk_size` comes from
(``skyrl/backends/skyrl_train/distributed/megatron/model_utils.py``, NovaSky-AI/SkyRL 07df484c). SkyRL took its
log-probabilities from NeMo-RL (``DistributedLogprob`` and ``ChunkedDistributedLogprob``), its entropy from verl
(``vocab_parallel_entropy``).

The logits themselves stay in the model's type, as with ``fp32_output=False`` of Megatron's ``Float16Module`` and
NeMo-RL's ``defer_fp32_logits``. Without these, frameworks keep one more copy of all logits, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ReduceOp


class PolicyGradientLoss(torch.nn.Module):
    """The loss -advantage x log-probability of each label, with an advantage of 1, so that it is the cross entropy.

    The entropy has no gradient and is not part of the loss: it is a metric, unless a framework's entropy bonus is on
    (SkyRL's ``use_entropy_loss``, off by default).
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, chunk_size: int | None) -> torch.Tensor:
        """Returns each token's loss, fp32 [sequences, tokens].

        Args:
            logits: [sequences, tokens, vocabulary of this rank].
            labels: int64 [sequences, tokens], in the whole vocabulary.
            chunk_size: Tokens of each sequence that are computed at once; None computes all at once.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        of_labels = log_probabilities(logits, labels, group, chunk_size)
        entropy(logits.detach(), group, chunk_size)
        return -of_labels


def log_probabilities(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None = None
) -> torch.Tensor:
    """Returns the log-probability of each label, fp32 [sequences, tokens].

    All at once, the softmax is saved for backward in fp32. In chunks, only the logits are saved, and backward computes
    each chunk's softmax again.

    Args:
        logits: [sequences, tokens, vocabulary of this rank].
        labels: int64 [sequences, tokens], in the whole vocabulary.
        group: The tensor-parallel ranks, each with an equal part of the vocabulary.
        chunk_size: Tokens of each sequence that are computed at once; None computes all at once.
    """
    of_labels: torch.Tensor
    if chunk_size is None:
        of_labels = _LogProbabilities.apply(logits, labels, group)
    else:
        of_labels = _ChunkedLogProbabilities.apply(logits, labels, group, chunk_size)
    return of_labels


@torch.no_grad()
def entropy(logits: torch.Tensor, group: Any, chunk_size: int | None = None) -> torch.Tensor:
    """Returns each token's entropy, fp32 [sequences, tokens], without a gradient.

    The exponentials have the logits' type, as verl's have. Chunks are slime's (``--log-probs-chunk-size``).

    Args:
        logits: [sequences, tokens, vocabulary of this rank].
        group: The tensor-parallel ranks, each with an equal part of the vocabulary.
        chunk_size: Tokens of each sequence that are computed at once; None computes all at once.
    """
    parts = []
    for tokens in _chunks(logits.shape[1], chunk_size):
        rows = logits[:, tokens]
        maximum = _maximum(rows, group)
        weights = (rows - maximum).exp_()
        total = _summed(weights.sum(dim=-1, dtype=torch.float32), group)
        weighted = _summed(weights.mul_(rows).sum(dim=-1, dtype=torch.float32), group)
        parts.append(maximum.squeeze(-1) + total.log() - weighted / total)
    return torch.cat(parts, dim=1)


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        rows = logits.float()  # upstream keeps them until the end
        log_probs = _log_softmax(rows, group)
        softmax = log_probs.exp()
        log_probs = _of_labels(log_probs, own, elsewhere, group)
        ctx.save_for_backward(softmax, own, elsewhere)
        return log_probs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, own, elsewhere = ctx.saved_tensors
        return _gradient(softmax.neg(), gradient, own, elsewhere), None, None


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        parts = []
        for tokens in _chunks(logits.shape[1], chunk_size):
            rows = logits[:, tokens]  # which frees the last chunk's before the next are allocated
            rows = rows.float()
            log_probs = _log_softmax(rows, group)
            parts.append(_of_labels(log_probs, own[:, tokens], elsewhere[:, tokens], group))
            del log_probs
        ctx.save_for_backward(logits, own, elsewhere)
        ctx.group, ctx.chunk_size = group, chunk_size
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, own, elsewhere = ctx.saved_tensors
        of_logits = torch.empty_like(logits, dtype=torch.float32)
        for tokens in _chunks(logits.shape[1], ctx.chunk_size):
            rows = logits[:, tokens]
            rows = rows.float()
            softmax = _log_softmax(rows, ctx.group)
            softmax = softmax.exp()
            # Upstream keeps a chunk's gradient until the next chunk's is computed.
            of_chunk = _gradient(softmax.neg_(), gradient[:, tokens], own[:, tokens], elsewhere[:, tokens])
            of_logits[:, tokens] = of_chunk
        return of_logits, None, None, None


def _chunks(num_tokens: int, chunk_size: int | None) -> Iterator[slice]:
    size = chunk_size or num_tokens
    return (slice(first, first + size) for first in range(0, num_tokens, size))


def _on_this_rank(labels: torch.Tensor, vocabulary: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each label's place in this rank's part of the vocabulary, 0 if it is elsewhere, and whether it is."""
    own = labels - rank * vocabulary
    elsewhere = (own < 0) | (own >= vocabulary)
    return own.masked_fill_(elsewhere, 0), elsewhere


def _log_softmax(rows: torch.Tensor, group: Any) -> torch.Tensor:
    shifted = rows - _maximum(rows, group)
    total = _summed(shifted.exp().sum(dim=-1, keepdim=True), group)
    return shifted - total.log_()


def _maximum(rows: torch.Tensor, group: Any) -> torch.Tensor:
    maximum = rows.amax(dim=-1, keepdim=True)
    torch.distributed.all_reduce(maximum, op=ReduceOp.MAX, group=group)
    return maximum


def _summed(of_rank: torch.Tensor, group: Any) -> torch.Tensor:
    torch.distributed.all_reduce(of_rank, op=ReduceOp.SUM, group=group)
    return of_rank


def _of_labels(log_probs: torch.Tensor, own: torch.Tensor, elsewhere: torch.Tensor, group: Any) -> torch.Tensor:
    picked = log_probs.gather(-1, own.unsqueeze(-1)).squeeze(-1)
    return _summed(picked.masked_fill_(elsewhere, 0.0), group)


def _gradient(
    negative_softmax: torch.Tensor, gradient: torch.Tensor, own: torch.Tensor, elsewhere: torch.Tensor
) -> torch.Tensor:
    """Turns -softmax into the gradient of the logits, in place: (1 at the label - softmax) x gradient."""
    of_labels = gradient.masked_fill(elsewhere, 0.0).unsqueeze(-1)
    return negative_softmax.mul_(gradient.unsqueeze(-1)).scatter_add_(-1, own.unsqueeze(-1), of_labels)
