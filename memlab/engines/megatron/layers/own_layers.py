"""Megatron's own layers, ``transformer_impl`` ``local``, where neither Apex nor a GPU is installed.

All of them are megatron-core's classes (``LocalSpecProvider`` in ``models/backends.py``, 0.16.1), apart from what comes
from Apex there: the norm, and the kernel of the causal softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention

from memlab.engines.attention.unfused_attention import MaskedSoftmax
from memlab.engines.megatron.layers.torch_functions import Norm, norm_backward
from memlab.engines.megatron.layers.torch_layers import TorchNorm


class OwnProvider(LocalSpecProvider):
    """Megatron's own layers for a GPT layer spec."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> type:
        return _OwnNorm

    def core_attention(self) -> type:
        return OwnAttention


class _NormOfApex(Norm):
    """A norm whose backward has not the workspace of Transformer Engine's on a simulated GPU."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, *of_rows = ctx.saved_tensors
        return *norm_backward(grads[0], inputs, of_rows, weight), None


class _OwnNorm(TorchNorm):
    """The norm that Megatron takes from Apex."""

    function = _NormOfApex


class OwnAttention(DotProductAttention):
    """Megatron's attention, which multiplies queries and keys into a buffer that it keeps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.scale_mask_softmax = _CausalSoftmax()


class _CausalSoftmax(torch.nn.Module):
    """``ScaledUpperTriangMaskedSoftmax``: one kernel, whose result it saves (``fusions/fused_softmax.py``, 0.16.1)."""

    def forward(self, scores: torch.Tensor, *_: Any) -> torch.Tensor:
        """Returns the probabilities of scores [batch, heads, tokens, tokens]."""
        return MaskedSoftmax.apply(scores, None)
