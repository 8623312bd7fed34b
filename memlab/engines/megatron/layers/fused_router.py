"""Transformer Engine's fused router of experts, in torch (``moe_router_fusion``).

Same results and the same tensors saved for backward as ``transformer_engine/pytorch/router.py`` and
``csrc/extensions/router.cpp`` (2.16.1): scores in fp32, whatever the type of the logits, and the map of the chosen
experts. Which experts are chosen, Megatron's own unfused functions say.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from memlab.meter.labels import one_kernel


class _ChosenProbabilities(torch.autograd.Function):
    """Saves the map of the chosen experts [tokens, experts] and the scores from which probabilities are made."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, topk: int, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map, scores = _choose(logits, topk, options)
        ctx.save_for_backward(routing_map, scores)
        ctx.mark_non_differentiable(routing_map)
        ctx.options, ctx.topk, ctx.dtype = options, topk, logits.dtype
        return probs, routing_map

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        routing_map, scores = ctx.saved_tensors
        return _gradient_of_chosen(grads[0], routing_map, scores, ctx.topk, ctx.options, ctx.dtype), None, None


class _ScoresForLoss(torch.autograd.Function):
    """Saves the scores before they are normalised."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor]:
        routing_map, scores, saved = _score(logits, topk, score_function)
        ctx.save_for_backward(saved)
        ctx.mark_non_differentiable(routing_map)
        ctx.score_function, ctx.dtype = score_function, logits.dtype
        return routing_map, scores

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        return _gradient_of_scores(grads[1], scores, ctx.score_function, ctx.dtype), None, None


class _AuxiliaryLoss(torch.autograd.Function):
    """Saves two numbers and how many tokens each expert got."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, tokens_per_expert: torch.Tensor, coefficient: Any) -> torch.Tensor:
        loss, factor = _loss(probs, tokens_per_expert, coefficient)
        ctx.save_for_backward(factor, tokens_per_expert)
        ctx.num_rows = len(probs)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        factor, tokens_per_expert = ctx.saved_tensors
        return _gradient_of_loss(grads[0], factor, tokens_per_expert, ctx.num_rows), None, None


def fused_topk_with_score_function(logits: torch.Tensor, topk: int, *args: Any, **named: Any) -> Any:
    """Returns probabilities [tokens, experts] and the bool map of the chosen experts.

    Args:
        logits: Shape [tokens, experts].
        topk: How many experts a token chooses.
        *args: Those of Megatron's ``topk_routing_with_score_function`` behind these two, in its order.
        **named: The same, by name.
    """
    names = ("use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function", "expert_bias")
    return _ChosenProbabilities.apply(logits, topk, dict(zip(names, args, strict=False)) | named)


def fused_compute_score_for_moe_aux_loss(logits: torch.Tensor, topk: int, score_function: str) -> Any:
    """Returns the map of the chosen experts, and the scores in fp32 of which the auxiliary loss is computed."""
    return _ScoresForLoss.apply(logits, topk, score_function)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: Any,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Any:
    """Returns the auxiliary loss, as Megatron's ``switch_load_balancing_loss_func`` does without the kernel."""
    coefficient = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return _AuxiliaryLoss.apply(probs, tokens_per_expert, coefficient)


@one_kernel()
def _choose(
    logits: torch.Tensor, topk: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    probs, routing_map, *_ = moe_utils.topk_routing_with_score_function(logits, topk, **options, fused=False)
    wide = logits.float()
    if options["score_function"] == "sigmoid":
        scores = wide.sigmoid()
    elif options["use_pre_softmax"]:
        scores = wide.softmax(-1)
    else:
        scores = wide.masked_fill(~routing_map, -torch.inf).softmax(-1)
    return probs.to(logits.dtype), routing_map, scores


@one_kernel()
def _gradient_of_chosen(
    grad: torch.Tensor,
    routing_map: torch.Tensor,
    scores: torch.Tensor,
    topk: int,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    grad = grad.float() * routing_map * (options["scaling_factor"] or 1.0)
    if options["score_function"] == "sigmoid":
        if topk > 1:  # the scores of the chosen ones are divided by their sum
            chosen = scores * routing_map
            total = chosen.sum(-1, keepdim=True) + 1e-20
            grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total * routing_map
        return (grad * scores * (1 - scores)).to(dtype)
    return (scores * (grad - (grad * scores).sum(-1, keepdim=True))).to(dtype)


@one_kernel()
def _score(logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits.float(), topk, score_function)
    saved = logits.float().sigmoid() if score_function == "sigmoid" else scores.clone()
    return routing_map, scores, saved


@one_kernel()
def _gradient_of_scores(
    grad: torch.Tensor, scores: torch.Tensor, score_function: str, dtype: torch.dtype
) -> torch.Tensor:
    if score_function == "sigmoid":
        total = scores.sum(-1, keepdim=True) + 1e-20
        grad = (grad - (grad * scores).sum(-1, keepdim=True) / total) / total
        return (grad * scores * (1 - scores)).to(dtype)
    return (scores * (grad - (grad * scores).sum(-1, keepdim=True))).to(dtype)


@one_kernel()
def _loss(probs: torch.Tensor, tokens_per_expert: torch.Tensor, coefficient: Any) -> tuple[torch.Tensor, torch.Tensor]:
    factor = probs.new_empty(2, dtype=torch.float32)
    factor[:] = coefficient
    return ((probs.sum(dim=0) * tokens_per_expert).sum() * factor[0]).to(probs.dtype), factor


@one_kernel()
def _gradient_of_loss(
    grad: torch.Tensor, factor: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int
) -> torch.Tensor:
    return (grad * factor[0] * tokens_per_expert).to(grad.dtype).expand(num_rows, -1).contiguous()
