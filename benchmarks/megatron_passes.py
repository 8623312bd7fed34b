"""Forward passes of plain Megatron-Core beside a language model's: of a head, a frozen reference model, a teacher.

Written after what Megatron-Bridge (models/common/heads.py, 067f987d), ms-swift (trainers/dpo_trainer.py and
gkd_trainer.py, 3602360) and Model Optimizer (distill/plugins/megatron.py, a2fbac7b) do in a step. Imports nothing of
memlab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed.nn
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

Forward = Callable[[Iterator[dict[str, torch.Tensor]], Any], tuple[torch.Tensor, Any]]
"""Runs one micro-batch through a chunk, as Megatron's schedules ask for it."""


class Head(torch.nn.Linear):
    """A head of a few outputs, which each tensor parallel rank has as a whole."""

    def __init__(self, num_labels: int, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, num_labels, bias=False)
        self.gathers = config.sequence_parallel
        if self.gathers:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Returns the outputs in fp32, and no bias."""
        outputs = super().forward(hidden).float()
        if self.gathers:
            outputs = gather_from_sequence_parallel_region(outputs, tensor_parallel_output_grad=False)
        return outputs, None


def frozen(copy: GPTModel, chunk: Any) -> GPTModel:
    """Takes a model out of training, and gives it the weights of a chunk if there is one."""
    copy.cuda().requires_grad_(False).eval()
    with torch.no_grad():
        if chunk is None:
            return copy
        for own, other in zip(copy.parameters(), chunk.parameters(), strict=True):
            own.copy_(other)
    return copy


def forward_of(state: dict[str, Any], reference: list[GPTModel], chunks: list[Any]) -> Forward:
    """Returns the forward step of a training state.

    Args:
        state: Of the job, with ``num_labels`` or ``reference_model``.
        reference: The frozen copy, if there is one.
        chunks: Those that are trained.
    """
    if state.get("num_labels"):
        return _of_head
    if state.get("loss") == "jsd":
        k, beside = state.get("gkd_logits_topk"), state.get("lm_loss_beside", False)
        return _Distillation(reference[0] if reference else None, k, beside)
    if state.get("reference_model", "none") == "none":
        return _of_language_model
    if state.get("loss") == "logits_kl":
        return partial(_distilled, reference[0], state.get("logit_kl_topk"), state.get("lm_loss_beside", False))

    def with_reference(data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
        given, labels = _inputs(data)
        with torch.no_grad():
            if reference:
                of_reference = reference[0](*given, labels=labels)
            else:
                with adapters_off(chunks):
                    of_reference = chunk.module.module(*given, labels=labels)
        of_policy = chunk(*given, labels=labels)
        return torch.concat([of_reference, of_policy], dim=0), _mean_of_policy

    return with_reference


@contextmanager
def adapters_off(chunks: list[Any]) -> Iterator[None]:
    """Switches the adapters of mcore-bridge off in the block, as PEFT's ``disable_adapter`` does."""
    adapted = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "enable_adapters")]
    for module in adapted:
        module.enable_adapters(False)
    yield
    for module in adapted:
        module.enable_adapters(True)


def _inputs(data: Iterator[dict[str, torch.Tensor]]) -> tuple[tuple[Any, ...], torch.Tensor]:
    # megatron-core 0.18 and 0.19 must be told that all ranks share each sequence.
    shared = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    batch = {name: value.cuda() for name, value in next(data).items()}
    batch = get_batch_on_this_cp_rank(batch, cp_group=parallel_state.get_context_parallel_group(), **shared)
    return (batch["tokens"], batch["position_ids"], None), batch["labels"]


def _of_language_model(data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
    given, labels = _inputs(data)
    return chunk(*given, labels=labels), sum_and_number if chunk.config.calculate_per_token_loss else mean_loss


def _of_head(data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
    given, _ = _inputs(data)
    return chunk(*given), lambda values: mean_loss((values - 1).square())


def _distilled(
    teacher: GPTModel, k: int | None, beside: bool, data: Iterator[dict[str, torch.Tensor]], chunk: Any
) -> tuple[torch.Tensor, Any]:
    """Takes the output layers' outputs by hooks, as Model Optimizer does; the language model's loss may be zeros."""
    given, labels = _inputs(data)
    student, outputs = chunk.module.module, []
    with hooked((teacher, student), outputs, without_loss=(teacher,) if beside else (teacher, student)):
        with torch.no_grad():
            teacher(*given, labels=labels)
        of_student = chunk(*given, labels=labels)

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        of_teacher, own = outputs
        outputs.clear()
        divergence = logits_kl(own, of_teacher) if k is None else kl_of_largest(own, of_teacher, k)
        of_labels = per_token.float().mean() * (1 if beside else 0)
        return mean_loss(of_labels + divergence.transpose(0, 1).contiguous())

    return of_student, loss


@contextmanager
def hooked(
    models: tuple[GPTModel, ...], outputs: list[torch.Tensor], without_loss: tuple[GPTModel, ...]
) -> Iterator[None]:
    """Notes the logits of each model in the block, in which the own losses of some are zeros."""
    handles = [
        model.output_layer.register_forward_hook(lambda _, __, output: outputs.append(output[0])) for model in models
    ]
    for model in without_loss:
        model.compute_language_model_loss = lambda labels, logits: torch.zeros_like(labels, dtype=logits.dtype)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for model in without_loss:
            del model.compute_language_model_loss


def logits_kl(own: torch.Tensor, of_teacher: torch.Tensor) -> torch.Tensor:
    """Returns each token's divergence, by the operations of Model Optimizer's ``LogitsKLLoss``."""
    of_teacher = of_teacher.float() / 1.0
    own = own.float() / 1.0
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        for logits in (of_teacher, own):
            maximum, _ = torch.max(logits.detach(), dim=-1, keepdim=True)
            torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
            logits.sub_(maximum)
        all_of_teacher, total = (
            torch.distributed.nn.functional.all_reduce(torch.sum(torch.exp(logits), -1, keepdim=True), group=group)
            for logits in (of_teacher, own)
        )
        target, log_probs = of_teacher - torch.log(all_of_teacher), own - torch.log(total)
    else:
        log_probs, target = torch.log_softmax(own, -1), torch.log_softmax(of_teacher, -1)
    return torch.sum(torch.nn.functional.kl_div(log_probs, target, reduction="none", log_target=True), dim=-1)


def kl_of_largest(own: torch.Tensor, of_teacher: torch.Tensor, k: int) -> torch.Tensor:
    """Returns each token's divergence, by the operations of Model Optimizer's ``TopKLogitsKLLoss`` on one rank."""
    own, of_teacher = own.float() / 1.0, of_teacher.float() / 1.0
    values, places = torch.topk(of_teacher, k, dim=-1)
    log_probs = torch.log_softmax(torch.gather(own, dim=-1, index=places), -1)
    target = torch.log_softmax(values, -1)
    return torch.sum(torch.nn.functional.kl_div(log_probs, target, reduction="none", log_target=True), dim=-1)


class _Distillation:
    """ms-swift's GKD: the teacher runs with all micro-batches before the first is trained.

    Args:
        teacher: None stands for a server, which sends the largest logits.
        k: How many of each token are compared; None compares all. On one rank.
        beside: Whether the cross entropy is added (``sft_alpha``).
    """

    def __init__(self, teacher: GPTModel | None, k: int | None, beside: bool) -> None:
        self._teacher, self._k, self._beside = teacher, k, beside

    def begin_step(self, data: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """Returns the micro-batches, each with its teacher's logits."""
        batches = [*data]
        with torch.no_grad():
            for batch in batches:
                given, labels = _inputs(iter([batch]))
                if self._teacher is None:
                    places = torch.arange(self._k, device=labels.device).repeat(*labels.shape, 1)
                    batch["teacher"] = torch.zeros_like(places, dtype=torch.float32), places
                    continue
                logits = self._teacher(*given)
                batch["teacher"] = logits if self._k is None else torch.topk(logits, k=self._k, dim=-1)
                del logits
        return iter(batches)

    def __call__(self, data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
        """Runs one micro-batch, whose logits are copied to fp32."""
        batch = next(data)
        teacher = batch.pop("teacher")
        given, labels = _inputs(iter([batch]))

        def loss_of(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = gkd_loss(logits, teacher, labels) / labels.numel()
            if self._beside:
                by_position = logits.transpose(0, 1).contiguous()
                per_token = chunk.module.module.compute_language_model_loss(labels, by_position)
                mask = labels != -100
                loss = loss + 0.1 * ((per_token * mask).sum() / mask.sum().float())
            return mean_loss(loss)

        return chunk(*given), loss_of


def gkd_loss(
    student: torch.Tensor, teacher: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor
) -> torch.Tensor:
    """Returns the divergence of all tokens together, by the operations of ms-swift's ``gkd_loss`` on one rank."""
    mask = labels != -100
    if isinstance(teacher, tuple):
        active, of_active, places = student[mask], teacher[0][mask], teacher[1][mask]
        if torch.isinf(of_active).all(dim=-1).any():
            raise ValueError("a token has no logit of the teacher: correct the job")
        own, others = torch.gather(active, dim=-1, index=places) / 0.9, of_active / 0.9
    else:
        active, of_active = student[mask], teacher[mask]
        own, others = active / 0.9, of_active / 0.9
    total = own.new_zeros(())
    beta = torch.tensor(0.5, dtype=own.dtype, device=own.device)
    of_teacher, of_own = torch.log(beta), torch.log1p(-beta)
    for start in range(0, own.size(0), 512):
        log_probs = torch.log_softmax(own[start : start + 512], -1)
        target = torch.log_softmax(others[start : start + 512], -1)
        mixture = torch.logsumexp(torch.stack([log_probs + of_own, target + of_teacher]), dim=0)
        part = beta * (torch.exp(target) * (target - mixture)).sum(-1)
        part = part + (1 - beta) * (torch.exp(log_probs) * (log_probs - mixture)).sum(-1)
        total = total + part.sum()
    return total


def _mean_of_policy(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return mean_loss(per_token[per_token.shape[0] // 2 :])


def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the mean over the tokens, and what the schedule hands back."""
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


def sum_and_number(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the sum over the tokens, their number, and what the schedule hands back."""
    loss, number = per_token.float().sum(), torch.tensor(per_token.numel(), dtype=torch.int, device=per_token.device)
    return loss, number, {"loss": loss.detach() / number}
