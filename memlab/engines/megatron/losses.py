"""The losses that are computed from the logits: each with the tensors that a framework's own function has.

A row of `LOSSES` is a computation, not a framework. Which tensors of the logits' size are made, in which type, and what
of them is kept for backward, is that of the function which the row names; the values are memlab's own, so that each
loss is the cross entropy, but `topk_logits` and those that compare with a teacher. Measured per logit with the
frameworks' functions on a GPU: ``labs/results/h200_loss_bytes.jsonl``.

Megatron's ``Float16Module`` returns logits in fp32 unless a caller says ``fp32_output=False``, which only NeMo-RL with
``defer_fp32_logits`` does (megatron/core/transformer/module.py, 0.16.1; nemo_rl/models/megatron/train.py, 7ea279ab).
`training_step` makes that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ReduceOp
from torch.nn.functional import kl_div

from memlab.config.training_state import TrainingState

_TEMPERATURE_OF_GKD, _CHUNK_OF_GKD, _BETA_OF_GKD = 0.9, 512, 0.5
"""ms-swift's defaults, and the tokens of which its ``jsd_loss`` computes a part of its loss (3602360)."""
_ENTROPY_COEFFICIENT = 0.01
"""Of the entropy in a loss: a usual one."""


Teacher = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The logits of a teacher, or the largest of them and their places."""


class LossFromLogits(torch.nn.Module):
    """The loss -advantage x log-probability of each label, with an advantage of 1, so that it is the cross entropy.

    Of a head in place of the output layer it is the squared error of the outputs, with a return of 1: what critics and
    reward models compute has a few numbers for each token.

    The entropy is a metric without a gradient, unless `TrainingState.entropy_loss` subtracts a part of it from the
    loss, as verl, slime and SkyRL do.
    """

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        state: TrainingState,
        lengths: tuple[int, ...] | None = None,
        teacher: Teacher | None = None,
    ) -> torch.Tensor:
        """Returns each token's loss, fp32 [sequences, tokens].

        Args:
            logits: [sequences, tokens, vocabulary of this rank]. Some losses overwrite them, as upstream does.
            labels: int64 [sequences, tokens], in the whole vocabulary.
            state: Names the loss, and the tokens that are computed at once.
            lengths: Of the packed sequences of a row on this rank; None where rows are not packed.
            teacher: The logits that `COMPARE_WITH_TEACHER` compare with, of the same shape; or the largest of them
                [sequences, tokens, k], with their places in the whole vocabulary.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        if state.num_labels is not None:
            return (logits - 1).square().mean(-1)
        compute, chunk_size = LOSSES[state.loss], state.logprobs_chunk_size or state.entropy_chunk_size
        if state.entropy_loss:
            compute = WITH_ENTROPY[state.loss]
        elif state.loss == "topk_logits":
            compute = partial(_topk_logits, topk=state.topk_logits_k)
        elif state.loss == "logits_kl" and state.logit_kl_topk is not None:
            assert isinstance(teacher, torch.Tensor), "all logits"
            compute = partial(_kl_of_largest, teacher=teacher, topk=state.logit_kl_topk)
        elif teacher is not None:
            compute = partial(compute, teacher=teacher)
        if lengths is None or state.loss not in BY_SEQUENCE or not torch.is_grad_enabled():
            return compute(logits, labels, group, chunk_size)
        sums: list[torch.Tensor] = []
        ends = accumulate(lengths)
        parts = (
            (_Slice.apply(logits, end - length, length, sums), labels[:, end - length : end])
            for end, length in zip(ends, lengths, strict=True)
        )
        return torch.cat([compute(*part, group, chunk_size) for part in parts], dim=1)


class LargestLogits(torch.nn.Module):
    """What NeMo-RL's distillation takes of the teacher's logits, in the place of a loss: the k largest of each token.

    See ``distributed_vocab_topk`` in nemo_rl/distributed/model_utils.py and ``TopkLogitsPostProcessor`` in
    nemo_rl/models/megatron/train.py (7ea279ab). Names are kept as long as upstream keeps its own.
    """

    def forward(
        self, logits: torch.Tensor, state: TrainingState, lengths: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values, fp32, and their places in the whole vocabulary, int64: both [sequences, tokens, k].

        Args:
            logits: [rows, tokens of this rank, vocabulary of this rank].
            state: Has k, and the tokens that are computed at once.
            lengths: Of the packed sequences of a row on this rank, which are unpacked; None where rows are not packed.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        found = _largest(logits, state.topk_logits_k, group, state.logprobs_chunk_size)
        if lengths is None:
            return found
        context = parallel_state.get_context_parallel_group()
        whole = lengths if context.size() == 1 else tuple(length * context.size() for length in lengths)
        if context.size() > 1:
            found = _of_all_chunks(found[0], context, lengths), _of_all_chunks(found[1], context, lengths)
        unpacked = [each.new_zeros((len(whole), max(whole), each.shape[-1])) for each in found]
        for number, (length, end) in enumerate(zip(whole, accumulate(whole), strict=True)):
            for row, each in zip(unpacked, found, strict=True):
                row[number, :length] = each[0, end - length : end]
        return unpacked[0], unpacked[1]


def _largest(logits: torch.Tensor, k: int, group: Any, chunk_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    all_values, all_places = [], []
    for tokens in _chunks(logits.shape[1], chunk_size):
        rows = logits[:, tokens].to(torch.float32)
        own, own_places = torch.topk(rows, min(k, rows.shape[-1]), dim=-1)
        places = own_places + group.rank() * logits.shape[-1]
        of_ranks = [[torch.empty_like(each) for _ in range(group.size())] for each in (own, places)]
        for parts, each in zip(of_ranks, (own, places), strict=True):
            torch.distributed.all_gather(parts, each, group=group)
        together, their_places = (torch.cat(parts, dim=-1) for parts in of_ranks)
        values, chosen = torch.topk(together, min(k, logits.shape[-1] * group.size()), dim=-1)
        all_values.append(values)
        all_places.append(their_places.gather(-1, chosen))
    if len(all_values) == 1:
        return all_values[0], all_places[0]
    return torch.cat(all_values, dim=1), torch.cat(all_places, dim=1)


def _of_all_chunks(of_rank: torch.Tensor, group: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    """Returns a packed row of all context parallel ranks, sequence by sequence, each with two chunks on a rank."""
    row = of_rank.new_zeros((1, of_rank.shape[1] * group.size(), of_rank.shape[-1]))
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        own = of_rank[:, end - length : end].contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own, group=group)
        halves = [part.chunk(2, dim=1) for part in parts]
        in_order = [first for first, _ in halves] + [last for _, last in reversed(halves)]
        row[:, (end - length) * group.size() : end * group.size()] = torch.cat(in_order, dim=1)
    return row


class Fp32Output(torch.nn.Module):
    """Copies the logits to fp32, which the loss then reads (``Float16Module.forward``)."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits in fp32."""
        return logits.float()


_Loss = Callable[..., torch.Tensor]
"""Takes logits, labels, the tensor-parallel group, how many tokens are computed at once and, by name, a teacher."""


def _logprobs(logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None) -> torch.Tensor:
    of_labels = log_probabilities(logits, labels, group, chunk_size)
    entropy(logits.detach(), group, chunk_size)
    return -of_labels


_BYTES_OF_ENTROPY = 512 * 2**20
"""SkyRL's default of ``trainer.vocab_entropy_chunk_memory_mb``."""


def _logprobs_and_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None
) -> torch.Tensor:
    """As SkyRL does with ``use_entropy_loss``: the entropy is computed in as many tokens as its budget has room for.

    See ``vocab_parallel_entropy`` and ``_resolve_vocab_entropy_chunk_size``, a9564572.
    """
    if not torch.is_grad_enabled():
        return _logprobs(logits, labels, group, chunk_size)
    tokens = logits.shape[1]
    bytes_of_token = 4 * logits.element_size() * logits.shape[0] * logits.shape[2]
    chunk = 1 << max(1, min(tokens, _BYTES_OF_ENTROPY // bytes_of_token)).bit_length() - 1
    of_entropy, of_labels = _Twice.apply(logits)
    log_probs = log_probabilities(of_labels, labels, group, chunk_size)
    if chunk >= tokens:
        return -log_probs - _ENTROPY_COEFFICIENT * _Entropy.apply(of_entropy, group)
    sums: list[torch.Tensor] = []
    entropies = [
        _Entropy.apply(_Slice.apply(of_entropy, start, min(chunk, tokens - start), sums), group)
        for start in range(0, tokens, chunk)
    ]
    return -log_probs - _ENTROPY_COEFFICIENT * torch.cat(entropies, dim=1)


def _logprobs_one_hot(logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None) -> torch.Tensor:
    # Where nothing is chunked, NeMo-RL copies to fp32 before its function (`get_next_token_logprobs_from_logits`).
    rows = logits.float() if chunk_size is None else logits
    return -log_probabilities(rows, labels, group, chunk_size, one_hot=True)


def _vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None
) -> torch.Tensor:
    logits.div_(torch.ones_like(labels, dtype=logits.dtype).unsqueeze(-1))
    if not torch.is_grad_enabled():
        # A pass for log-probabilities alone has the entropy too (``compute_log_prob``, trainer/ppo/ray_trainer.py).
        kept = logits.clone()
        entropy(logits, group, chunk_size)
        logits = kept
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)


def _cross_entropy_and_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _vocab_parallel_cross_entropy(logits, labels, group, chunk_size)
    logits.div_(torch.ones_like(labels, dtype=logits.dtype).unsqueeze(-1))
    return _CrossEntropyAndEntropy.apply(logits, labels, group)


def _softmax(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Any,
    chunk_size: int | None,
    *,
    is_scaled: bool = False,
    has_entropy: bool = False,
) -> torch.Tensor:
    rows = logits.flatten(0, 1)
    if is_scaled:
        rows = rows / 1.0  # a temperature, by which slime does not divide in place
    own = labels.flatten()
    chunks = [(rows, own)]
    if chunk_size is not None:
        number = -(-rows.shape[0] // chunk_size)
        chunks = list(zip(rows.chunk(number), own.chunk(number), strict=True))
    of_chunks = [_LogProbabilitiesOfSoftmax.apply(*chunk, group, has_entropy) for chunk in chunks]
    return -torch.cat(of_chunks).view_as(labels)


def _kept_log_softmax(logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None) -> torch.Tensor:
    logits.div_(1.0)  # a temperature, 0.9 by default
    if group.size() == 1:
        return -_Picked.apply(torch.log_softmax(logits, dim=-1), labels.unsqueeze(-1)).squeeze(-1)
    return -_LogSoftmaxOfRanks.apply(logits, labels, group)


def _topk_logits(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None, *, topk: int = 64
) -> torch.Tensor:
    own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
    chosen = own.unsqueeze(-1) + torch.zeros(topk, dtype=own.dtype, device=own.device)
    picked = _Picked.apply(logits.float(), chosen)
    picked = picked * (~elsewhere).unsqueeze(-1)
    torch.distributed.all_reduce(picked, op=ReduceOp.SUM, group=group)
    return -torch.log_softmax(picked, dim=-1).mean(-1)


def _logits_kl(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None, *, teacher: torch.Tensor
) -> torch.Tensor:
    of_teacher, own = teacher.float() / 1.0, logits.float() / 1.0  # a temperature
    if group.size() == 1:
        of_student, target = torch.log_softmax(own, dim=-1), torch.log_softmax(of_teacher, dim=-1)
        return kl_div(of_student, target, reduction="none", log_target=True).sum(-1)
    of_teacher -= _maximum(of_teacher, group)
    own -= _maximum(own.detach(), group)
    of_all = _SumOfRanks.apply(torch.exp(of_teacher).sum(-1, keepdim=True), group, True)
    total = _SumOfRanks.apply(torch.exp(own).sum(-1, keepdim=True), group, True)
    target, of_student = of_teacher - of_all.log(), own - total.log()
    of_rank = kl_div(of_student, target, reduction="none", log_target=True).sum(-1)
    return _SumOfRanks.apply(of_rank, group, False)


def _kl_of_largest(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Any,
    chunk_size: int | None,
    *,
    teacher: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    of_teacher, own = teacher.float() / 1.0, logits.float() / 1.0  # a temperature
    values, places = torch.topk(of_teacher, min(topk, of_teacher.shape[-1]), dim=-1)
    of_own = _Picked.apply(own, places)
    if group.size() > 1:
        of_all, of_student = _PartsOfRanks.apply(values, group), _PartsOfRanks.apply(of_own, group)
        values, chosen = torch.topk(of_all, topk, dim=-1)
        of_own = _Picked.apply(of_student, chosen)
    student, target = torch.log_softmax(of_own, dim=-1), torch.log_softmax(values, dim=-1)
    return kl_div(student, target, reduction="none", log_target=True).sum(-1)


def _jsd(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None, *, teacher: Teacher
) -> torch.Tensor:
    every = torch.arange(labels.numel(), device=labels.device)  # the tokens of answers are picked: all of them here
    if isinstance(teacher, tuple):
        return _jsd_of_largest(logits, labels, group, every, *teacher)
    active, of_active = _Rows.apply(logits, every), teacher.flatten(0, 1)[every]
    own, others = ((each / _TEMPERATURE_OF_GKD).unsqueeze(0) for each in (active, of_active))
    beta = torch.tensor(_BETA_OF_GKD, dtype=own.dtype, device=own.device)
    of_own, of_teacher = torch.log1p(-beta), torch.log(beta)
    parts, sums = [], list[torch.Tensor]()
    for start in range(0, labels.numel(), _CHUNK_OF_GKD):
        of_chunk = others[:, start : start + _CHUNK_OF_GKD]
        student = _log_softmax_of_swift(_Slice.apply(own, start, of_chunk.shape[1], sums), group)
        target = _log_softmax_of_swift(of_chunk, group)
        mixture = torch.logsumexp(torch.stack([student + of_own, target + of_teacher]), dim=0)
        of_rank = beta * (torch.exp(target) * (target - mixture)).sum(-1)
        of_rank = of_rank + (1 - beta) * (torch.exp(student) * (student - mixture)).sum(-1)
        parts.append(_SumOfRanks.apply(of_rank, group, False))
    return torch.cat(parts, dim=1).view_as(labels)


def _jsd_of_largest(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Any,
    every: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    active, of_active, chosen = _Rows.apply(logits, every), *(each.flatten(0, 1)[every] for each in (values, places))
    if group.size() > 1:
        chosen, elsewhere = _on_this_rank(chosen, logits.shape[-1], group.rank())
    own = _Picked.apply(active, chosen)
    if group.size() > 1:
        # The ranks' parts are put together by their maximum, where each is -inf elsewhere (``tp_gather_topk``).
        own = own.masked_fill(elsewhere, float("-inf"))
        of_all = own.detach()
        torch.distributed.all_reduce(of_all, op=ReduceOp.MAX, group=group)
        own = torch.where(elsewhere, of_all, own)
    own, others = own / _TEMPERATURE_OF_GKD, of_active / _TEMPERATURE_OF_GKD
    beta = torch.tensor(_BETA_OF_GKD, dtype=own.dtype, device=own.device)
    of_own, of_teacher = torch.log1p(-beta), torch.log(beta)
    parts = []
    for start in range(0, labels.numel(), _CHUNK_OF_GKD):
        student, target = (torch.log_softmax(each[start : start + _CHUNK_OF_GKD], dim=-1) for each in (own, others))
        mixture = torch.logsumexp(torch.stack([student + of_own, target + of_teacher]), dim=0)
        part = beta * (torch.exp(target) * (target - mixture)).sum(-1)
        parts.append(part + (1 - beta) * (torch.exp(student) * (student - mixture)).sum(-1))
    return torch.cat(parts).view_as(labels)


def largest_of_swift(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest logits of each token and their places in the whole vocabulary: [sequences, tokens, k].

    See ``vocab_parallel_topk`` in swift/megatron/trainers/gkd_utils.py (ms-swift 3602360).
    """
    group = parallel_state.get_tensor_model_parallel_group()
    own, places = torch.topk(logits, k, dim=-1)
    if group.size() == 1:
        return own, places
    places = places + group.rank() * logits.shape[-1]
    of_ranks = [[torch.empty_like(each) for _ in range(group.size())] for each in (own, places)]
    for parts, each in zip(of_ranks, (own, places), strict=True):
        torch.distributed.all_gather(parts, each, group=group)
    together, their_places = (torch.cat(parts, dim=-1) for parts in of_ranks)
    values, chosen = torch.topk(together, k, dim=-1)
    return values, their_places.gather(-1, chosen)


def _log_softmax_of_swift(logits: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() == 1:
        return torch.log_softmax(logits, dim=-1)
    maximum = _maximum(logits.detach(), group)
    total = _SumOfRanks.apply(torch.exp(logits - maximum).sum(-1, keepdim=True), group, True)
    return logits - maximum - torch.log(total)


LOSSES: dict[str, _Loss] = {
    # SkyRL (skyrl/backends/skyrl_train/distributed/megatron/model_utils.py, 07df484c and a9564572), with verl's entropy
    # as a metric; NeMo-RL's whole rows have the same tensors.
    "logprobs": _logprobs,
    # NeMo-RL with ``fuse_loss``, or without packing (nemo_rl/distributed/model_utils.py, 7ea279ab).
    "logprobs_one_hot": _logprobs_one_hot,
    # NeMo-RL's packed rows otherwise (``SequencePackingLossWrapper`` in nemo_rl/algorithms/loss/wrapper.py).
    "logprobs_by_sequence": _logprobs_one_hot,
    # verl (``_lm_head_logits_processor`` in verl/workers/engine/megatron/transformer_impl.py, 0.9.1 and 1dda039b).
    "vocab_parallel_cross_entropy": _vocab_parallel_cross_entropy,
    # slime (``_VocabParallelLogProbEntropy`` in slime/utils/ppo_utils.py, 624b824a), without and with a
    # ``rollout_temperature`` other than 1 (slime/backends/megatron_utils/loss.py).
    "softmax": _softmax,
    "scaled_softmax": partial(_softmax, is_scaled=True),
    # ms-swift's GRPO (``vocab_parallel_log_softmax`` in swift/megatron/trainers/vocab_parallel_utils.py, 4.6.0).
    "log_softmax": _kept_log_softmax,
    # NeMo-RL's distillation (``get_distillation_topk_logprobs_from_logits`` in nemo_rl/distributed/model_utils.py).
    "topk_logits": _topk_logits,
    # Model Optimizer's distillation, which Megatron-Bridge runs (``LogitsKLLoss``, and `_kl_of_largest`
    # ``TopKLogitsKLLoss``, in modelopt/torch/distill/plugins/megatron.py, a2fbac7b).
    "logits_kl": _logits_kl,
    # ms-swift's GKD (``gkd_loss`` in swift/rlhf_trainers/gkd_loss.py, 3602360).
    "jsd": _jsd,
}
"""What each loss of `TrainingState` computes, but for Megatron's own, which the model itself computes."""
WITH_ENTROPY: dict[str, _Loss] = {
    "logprobs": _logprobs_and_entropy,
    # With ``entropy_coeff`` and ``calculate_entropy``.
    "vocab_parallel_cross_entropy": _cross_entropy_and_entropy,
    # With ``entropy_coef``: without it, slime's entropy is a metric that keeps nothing.
    "softmax": partial(_softmax, has_entropy=True),
    "scaled_softmax": partial(_softmax, is_scaled=True, has_entropy=True),
}
"""The losses from which the entropy is subtracted, each computed as its framework does."""
BY_SEQUENCE = ("logprobs_by_sequence", "topk_logits")
"""Losses that training computes for one packed sequence after the other."""


def log_probabilities(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int | None = None, *, one_hot: bool = False
) -> torch.Tensor:
    """Returns the log-probability of each label, fp32 [sequences, tokens].

    All at once, the softmax is saved for backward in fp32. In chunks, only the logits are saved, and backward computes
    each chunk's softmax again.

    Args:
        logits: [sequences, tokens, vocabulary of this rank].
        labels: int64 [sequences, tokens], in the whole vocabulary.
        group: The tensor-parallel ranks, each with an equal part of the vocabulary.
        chunk_size: Tokens of each sequence that are computed at once; None computes all at once.
        one_hot: Whether backward spreads a chunk's labels over the vocabulary, in 16 bytes per logit of the chunk, and
            has the gradient in the logits' type.
    """
    of_labels: torch.Tensor
    if chunk_size is None:
        of_labels = _LogProbabilities.apply(logits, labels, group)
    else:
        of_labels = _ChunkedLogProbabilities.apply(logits, labels, group, chunk_size, one_hot)
    return of_labels


@torch.no_grad()
def entropy(logits: torch.Tensor, group: Any, chunk_size: int | None = None) -> torch.Tensor:
    """Returns each token's entropy, fp32 [sequences, tokens], without a gradient.

    The exponentials have the logits' type, as verl's have. Chunks are SkyRL's (``trainer.logprobs_chunk_size``) and
    verl's (``entropy_from_logits_chunk_size``).

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
        del weights  # before the next chunk's
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
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any, chunk_size: int, one_hot: bool
    ) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        parts = []
        for tokens in _chunks(logits.shape[1], chunk_size):
            rows = logits[:, tokens]  # which frees the last chunk's before the next are allocated
            rows = rows.float()
            log_probs = _log_softmax(rows, group)
            parts.append(_of_labels(log_probs, own[:, tokens], elsewhere[:, tokens], group))
            del log_probs
        ctx.save_for_backward(logits, own, elsewhere)
        ctx.group, ctx.chunk_size, ctx.one_hot = group, chunk_size, one_hot
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, own, elsewhere = ctx.saved_tensors
        make, dtype = (torch.zeros_like, logits.dtype) if ctx.one_hot else (torch.empty_like, torch.float32)
        of_logits = make(logits, dtype=dtype)
        for tokens in _chunks(logits.shape[1], ctx.chunk_size):
            rows = logits[:, tokens]
            rows = rows.float()
            softmax = _log_softmax(rows, ctx.group)
            softmax = softmax.exp()
            if ctx.one_hot:
                of_chunk = _gradient_of_one_hot(softmax, gradient[:, tokens], own[:, tokens], elsewhere[:, tokens])
                of_logits[:, tokens] = of_chunk
                del rows, softmax, of_chunk
            else:
                # Upstream keeps a chunk's gradient until the next chunk's is computed.
                of_chunk = _gradient(softmax.neg_(), gradient[:, tokens], own[:, tokens], elsewhere[:, tokens])
                of_logits[:, tokens] = of_chunk
        return of_logits, None, None, None, None


class _Picked(torch.autograd.Function):
    """torch's ``gather`` in the last dimension, which keeps its input.

    Under a dispatch mode, such as a meter, the backward of torch's own makes one tensor of all logits more
    (``areAnyTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp, 2.13).
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, places)
        return values.gather(-1, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        values, places = ctx.saved_tensors
        return torch.zeros_like(values).scatter_add_(-1, places, gradient), None


class _Rows(torch.autograd.Function):
    """Tokens of all sequences by their numbers, as torch's indexing picks them.

    Under a dispatch mode the backward of torch's own makes one tensor of all logits more (``index_backward`` in
    torch/csrc/autograd/FunctionsManual.cpp, 2.13).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(every)
        ctx.shape = logits.shape
        return logits.flatten(0, 1)[every]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (every,) = ctx.saved_tensors
        of_logits = gradient.new_zeros(ctx.shape)
        of_logits.flatten(0, 1).index_put_((every,), gradient, accumulate=True)
        return of_logits, None


class _Slice(torch.autograd.Function):
    """Tokens of the logits, whose gradient is a tensor of all logits that is added to those of the other slices.

    Autograd adds gradients in place, but not under a dispatch mode (``accumulate`` in
    torch/csrc/autograd/input_buffer.cpp, 2.13). So the slices add them here, and the one whose backward is last, the
    first, returns the sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, start: int, length: int, sums: list[torch.Tensor]) -> torch.Tensor:
        ctx.shape, ctx.start, ctx.length, ctx.sums = logits.shape, start, length, sums
        return logits.narrow(1, start, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        of_logits = gradient.new_zeros(ctx.shape)
        of_logits.narrow(1, ctx.start, ctx.length).copy_(gradient)
        if ctx.sums:
            ctx.sums[0].add_(of_logits)
        else:
            ctx.sums.append(of_logits)
        return ctx.sums.pop() if ctx.start == 0 else None, None, None, None


class _Twice(torch.autograd.Function):
    """The logits for two readers, whose gradients are added in place, as `_Slice` says."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.view_as(logits), logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.add_(second)


class _Entropy(torch.autograd.Function):
    """Each token's entropy, as ``_VocabParallelEntropy`` of SkyRL computes it (a9564572): it keeps the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: Any) -> torch.Tensor:
        maximum = _maximum(logits, group)
        softmax = (logits - maximum).exp_()
        total = _summed(softmax.sum(dim=-1, keepdim=True), group)
        softmax.div_(total)
        weighted = _weighted(softmax, logits, group)
        ctx.save_for_backward(logits, softmax, weighted)
        return (maximum + total.log() - weighted).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, softmax, weighted = ctx.saved_tensors
        return softmax.mul_(weighted - logits).mul_(gradient.unsqueeze(-1)), None


class _LogSoftmaxOfRanks(torch.autograd.Function):
    """Log-probabilities of labels from a log-softmax of torch's operations, in one node.

    The exponentials and the log-softmax are kept, as autograd keeps them. In nodes of their own, the gradients would
    be added up as `_Slice` says.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        maximum = _maximum(logits, group)
        exponentials = (logits - maximum).exp()
        total = _summed(exponentials.sum(dim=-1, keepdim=True), group)
        log_probs = logits - maximum - total.log()
        ctx.save_for_backward(exponentials, log_probs, total, own, elsewhere)
        return _of_labels(log_probs, own, elsewhere, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        exponentials, log_probs, total, own, elsewhere = ctx.saved_tensors
        of_labels = gradient.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        of_logits = torch.zeros_like(log_probs).scatter_add_(-1, own.unsqueeze(-1), of_labels)
        return of_logits.sub_(exponentials.div_(total).mul_(gradient.unsqueeze(-1))), None, None


class _LogProbabilitiesOfSoftmax(torch.autograd.Function):
    """Log-probabilities [tokens] of labels, in one copy of the logits, which is the softmax and then the gradient.

    With the entropy, a part of which is added, the logits are kept too, and its gradient is one more tensor.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any, has_entropy: bool) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        rows = logits.float()
        maximum = _maximum(rows, group)
        softmax = rows - maximum
        picked = softmax.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        total = _summed(softmax.exp_().sum(dim=-1), group)
        softmax.div_(total.unsqueeze(-1))
        log_probs = _summed(picked.masked_fill_(elsewhere, 0.0), group) - total.log()
        if not has_entropy:
            ctx.save_for_backward(softmax, own, elsewhere)
            return log_probs
        weighted = _weighted(softmax, rows, group)
        ctx.save_for_backward(softmax, own, elsewhere, rows, weighted)
        return log_probs + _ENTROPY_COEFFICIENT * (maximum.squeeze(-1) + total.log() - weighted.squeeze(-1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, own, elsewhere, *of_entropy = ctx.saved_tensors
        if not of_entropy:
            return _gradient(softmax.neg_(), gradient, own, elsewhere), None, None, None
        rows, weighted = of_entropy
        more = (weighted - rows).mul_(softmax).mul_((_ENTROPY_COEFFICIENT * gradient).unsqueeze(-1))
        return _gradient(softmax.neg_(), gradient, own, elsewhere).add_(more), None, None, None


class _CrossEntropyAndEntropy(torch.autograd.Function):
    """Cross entropy less a part of the entropy, as verl computes both: the one in a copy of the logits.

    It keeps that copy, the logits and the entropy's softmax. In nodes of their own, as in verl, the gradients would be
    added up as `_Slice` says.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        own, elsewhere = _on_this_rank(labels, logits.shape[-1], group.rank())
        copy = logits.clone()
        maximum = _maximum(logits, group)
        softmax = (logits - maximum).exp_()
        total = _summed(softmax.sum(dim=-1, keepdim=True), group)
        softmax.div_(total)
        weighted = _weighted(softmax, logits, group)
        copy.sub_(maximum)
        picked = _of_labels(copy, own, elsewhere, group)
        copy.exp_().div_(total)
        ctx.save_for_backward(logits, softmax, copy, weighted, own, elsewhere)
        of_labels = total.log().squeeze(-1) - picked
        return of_labels - _ENTROPY_COEFFICIENT * (maximum + total.log() - weighted).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, softmax, copy, weighted, own, elsewhere = ctx.saved_tensors
        logits.sub_(weighted)
        softmax.mul_(logits).mul_((_ENTROPY_COEFFICIENT * gradient).unsqueeze(-1))
        logits.add_(weighted)
        return softmax.sub_(_gradient(copy.neg_(), gradient, own, elsewhere)), None, None


class _SumOfRanks(torch.autograd.Function):
    """The sum over the ranks, of which each rank's part has the gradients of all ranks, if each uses the sum.

    Where each has the same use of it, as of a loss, its gradient is there already.
    """

    @staticmethod
    def forward(ctx: Any, of_rank: torch.Tensor, group: Any, differ: bool) -> torch.Tensor:
        ctx.group, ctx.differ = group, differ
        return _summed(of_rank.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed(gradient.clone(), ctx.group) if ctx.differ else gradient, None, None


class _PartsOfRanks(torch.autograd.Function):
    """What all ranks have, in the last dimension; the gradient is that of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, of_rank: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(of_rank) for _ in range(group.size())]
        torch.distributed.all_gather(parts, of_rank, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


def _weighted(softmax: torch.Tensor, rows: torch.Tensor, group: Any) -> torch.Tensor:
    # As one product of matrices it makes no tensor of the logits' size, like the frameworks' own kernels.
    return _summed(torch.einsum("...v,...v->...", softmax, rows), group).unsqueeze(-1)


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


def _gradient_of_one_hot(
    softmax: torch.Tensor, gradient: torch.Tensor, own: torch.Tensor, elsewhere: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the logits as `_gradient` does, from labels that are spread over the vocabulary."""
    one_hot = torch.zeros(softmax.shape, dtype=torch.int64, device=softmax.device).scatter_(-1, own.unsqueeze(-1), 1)
    chosen = (~elsewhere).unsqueeze(-1) * one_hot
    del one_hot
    return chosen.float().sub_(softmax).mul_(gradient.unsqueeze(-1))
