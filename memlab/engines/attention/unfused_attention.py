"""Attention that keeps its scores: Transformer Engine's ``UnfusedDotProductAttention``, step by step.

After ``backends.py`` and ``softmax.py`` of ``transformer_engine/pytorch/attention/dot_product_attention`` (2.12.0 to
2.20.2) as they go for a causal mask, tensors [sequence, batch, heads, channels]. It is made of torch's own
operations there too, so autograd saves here what it saves there: for each head the probabilities of every pair of
tokens, and the keys and values repeated for each head. Only the softmax is TE's own kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.attention.qkv_layout import in_known_layout
from memlab.engines.transformer_engine_caches import simulated_causal_masks
from memlab.meter.labels import one_kernel

_MASKED = -10000.0


def unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    drop: float = 0.0,
    *,
    overwrites_gradients: bool = True,
) -> torch.Tensor:
    """Attends causally from [sequence, batch, heads, channels].

    The scores and the probabilities have sequence x sequence elements for each head and sequence. Variables keep
    tensors until the function returns, as TE's do.

    Args:
        query: Of all heads.
        key: Of as many heads or fewer.
        drop: Probability of attention dropout.
        overwrites_gradients: Whether backward writes the scores' gradient over that of the probabilities
            (`Versions.overwrites_gradients_of_scores`).

    Returns:
        Shape [sequence, batch, heads * channels].
    """
    query, key, value = in_known_layout(query, key, value)
    copied = value
    tokens, batch, heads, _ = query.shape
    mask = _causal_mask(tokens, query.device)
    if key.shape[2] != heads:
        key = key.repeat_interleave(heads // key.shape[2], dim=2)
        value = value.repeat_interleave(heads // value.shape[2], dim=2)
    query = query.reshape(tokens, batch * heads, -1)
    key = key.reshape(tokens, batch * heads, -1)
    scores = query.new_empty(batch * heads, tokens, tokens)
    scores = torch.baddbmm(
        scores, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=scale
    ).view(batch, heads, tokens, tokens)
    probabilities = torch.nn.functional.dropout(_softmax(scores, mask, overwrites_gradients), drop)
    value = value.reshape(tokens, batch * heads, -1)
    probabilities = probabilities.view(batch * heads, tokens, tokens)
    context = torch.bmm(probabilities, value.transpose(0, 1)).view(batch, heads, tokens, -1)
    context = context.permute(2, 0, 1, 3).contiguous()
    del copied
    return context.view(tokens, batch, -1)


def _causal_mask(tokens: int, device: torch.device) -> torch.Tensor:
    """Returns where a query must not see a key, bool [1, 1, tokens, tokens] (``get_full_mask`` in utils.py).

    TE makes it for each layer anew, from distances between tokens in int32.
    """
    rows = torch.arange(tokens, dtype=torch.int32, device=device).view(1, 1, tokens, 1)
    distance = rows - torch.arange(tokens, dtype=torch.int32, device=device).view(1, 1, 1, tokens)
    too_old, future = distance - tokens, distance + 0
    return torch.logical_not((too_old <= 0) & ~(future < 0))


def _softmax(scores: torch.Tensor, mask: torch.Tensor, overwrites_gradients: bool) -> torch.Tensor:
    """Returns the probabilities [batch, heads, tokens, tokens] (``FusedScaleMaskSoftmax`` in softmax.py)."""
    if has_fused_softmax(scores.dtype, scores.shape[0] * scores.shape[1], scores.shape[-1]):
        return MaskedSoftmax.apply(scores, mask, overwrites_gradients)
    exact = scores.float()  # in fp32 these are the scores themselves
    mask = torch.logical_or(mask, _kept_causal_mask(scores.shape[-1], scores.device))
    return torch.nn.functional.softmax(exact.masked_fill_(mask, _MASKED), dim=-1).to(scores.dtype)


def has_fused_softmax(dtype: torch.dtype, num_heads: int, tokens: int) -> bool:
    """Whether TE's kernel takes scores of this type and shape (``is_kernel_available``); else torch's, in fp32.

    Args:
        num_heads: Heads of this rank, times sequences of a micro-batch.
        tokens: Of a sequence.
    """
    rows_per_block = 8 if tokens <= 128 else 4
    return (
        dtype == torch.bfloat16 and 16 < tokens < 16384 and tokens % 8 == num_heads % 4 == tokens % rows_per_block == 0
    )


class MaskedSoftmax(torch.autograd.Function):
    """``ScaledMaskedSoftmax``: saves its result, and may overwrite the gradient of it (csrc/extensions/softmax.cpp).

    Without a mask it is the kernel that knows which keys come later, ``ScaledUpperTriangMaskedSoftmax``.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None, overwrites_gradients: bool = True
    ) -> torch.Tensor:
        probabilities = _softmax_kernel(scores, mask)
        ctx.save_for_backward(probabilities)
        ctx.overwrites_gradients = overwrites_gradients
        return probabilities

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (probabilities,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_scores = grad if ctx.overwrites_gradients else torch.empty_like(grad)
        _softmax_kernel_backward(of_scores, grad, probabilities)
        return of_scores, None, None


@one_kernel()
def _softmax_kernel(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.float().masked_fill(mask, _MASKED), dim=-1).to(scores.dtype)


@one_kernel()
def _softmax_kernel_backward(of_scores: torch.Tensor, grad: torch.Tensor, probabilities: torch.Tensor) -> None:
    weighted = grad.float() * probabilities.float()
    of_scores.copy_(weighted - probabilities.float() * weighted.sum(-1, keepdim=True))


def _kept_causal_mask(tokens: int, device: torch.device) -> torch.Tensor:
    """Returns the mask that TE keeps for each length until the process ends (``_default_causal_mask``)."""
    if tokens not in simulated_causal_masks:
        simulated_causal_masks[tokens] = torch.triu(
            torch.ones(tokens, tokens, dtype=torch.bool, device=device), diagonal=1
        )
    return simulated_causal_masks[tokens]
