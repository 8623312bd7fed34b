"""Forward passes of plain Megatron-Core beside a language model's: of a head, and of a frozen reference model.

Written after what Megatron-Bridge (models/common/heads.py, 067f987d) and ms-swift (trainers/dpo_trainer.py, 3602360) do
in a step. Imports nothing of memlab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
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
    """Gives a model the weights of a chunk, and takes it out of training."""
    copy.cuda().requires_grad_(False).eval()
    with torch.no_grad():
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
    if state.get("reference_model", "none") == "none":
        return _of_language_model

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
    return chunk(*given, labels=labels), mean_loss


def _of_head(data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
    given, _ = _inputs(data)
    return chunk(*given), lambda values: mean_loss((values - 1).square())


def _mean_of_policy(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return mean_loss(per_token[per_token.shape[0] // 2 :])


def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the mean over the tokens, and what the schedule hands back."""
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place
