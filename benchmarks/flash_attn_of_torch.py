"""Stands in for flash-attn 2.8.3 where that is not installed: the same kernels, which torch has a copy of.

Transformer Engine finds the package by its version and imports functions of ``flash_attn.flash_attn_interface``. The
buffers of ``mha_fwd`` and ``mha_bwd`` in torch's copy (``aten/src/ATen/native/transformers/cuda/flash_attn``, 2.11) are
those of the package. Torch returns new gradients where the package fills tensors that it is given: these are freed
before, and then take the place of the new ones, so that as much is allocated at each moment as with the package.

Dropout, windows and packed sequences outside a ring are not here: they raise an error.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import torch

VERSION = "2.8.3"
_Results = tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]


def stand_in() -> None:
    """Lets Transformer Engine, which is not imported yet, find flash-attn, unless it is installed."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return
    interface: Any = ModuleType("flash_attn.flash_attn_interface")
    interface.flash_attn_func, interface.flash_attn_varlen_func = _attention, None
    interface._flash_attn_forward, interface._flash_attn_backward = _forward, _backward
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = _forward_of_rows, _backward_of_rows
    extension: Any = ModuleType("flash_attn_2_cuda")
    extension.varlen_bwd = None
    sys.modules |= {
        "flash_attn": ModuleType("flash_attn"),
        "flash_attn.flash_attn_interface": interface,
        "flash_attn_2_cuda": extension,
    }
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name == "flash-attn" else installed(name)


def _check(dropout_p: float, left: int, right: int, others: dict[str, Any]) -> None:
    is_other = dropout_p or left != -1 or right not in (0, -1) or others.get("softcap")
    if is_other or others.get("alibi_slopes") is not None or others.get("block_table") is not None:
        raise NotImplementedError("flash-attn's stand-in has neither dropout nor windows, caps, slopes or blocks")


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    ends: tuple[torch.Tensor, torch.Tensor, int, int] | None = None,
    **others: Any,
) -> _Results:
    _check(dropout_p, window_size_left, window_size_right, others)
    where = ends or (None, None, query.shape[1], key.shape[1])
    flash = torch.ops.aten._flash_attention_forward
    output, log_sum_exp, state, _, _ = flash(query, key, value, *where, 0.0, causal, False, scale=softmax_scale)
    return output, log_sum_exp, None, state


def _forward_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> _Results:
    return _forward(query, key, value, ends=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), **options)


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *given: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    rng_state: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor, int, int] | None = None,
    **others: Any,
) -> None:
    _check(dropout_p, window_size_left, window_size_right, others)
    for each in given:
        each.untyped_storage().resize_(0)
    where = ends or (None, None, query.shape[1], key.shape[1])
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    flash = torch.ops.aten._flash_attention_backward
    saved = (grad, query, key, value, output, log_sum_exp)
    new = flash(*saved, *where, 0.0, causal, rng_state, unused, scale=softmax_scale)
    for each, gradient in zip(given, new, strict=True):
        each.set_(gradient)


def _backward_of_rows(*tensors: Any, **options: Any) -> None:
    *others, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = tensors
    _backward(*others, ends=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), **options)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    **others: Any,
) -> torch.Tensor:
    _check(dropout_p, *window_size, others)
    result: torch.Tensor = _Attention.apply(query, key, value, softmax_scale, causal)
    return result


class _Attention(torch.autograd.Function):
    """``FlashAttnFunc``."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        ctx.options = {
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
        }
        output, log_sum_exp, _, state = _forward(query, key, value, **ctx.options)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, state)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, state = ctx.saved_tensors
        results = [torch.empty_like(each) for each in tensors[:3]]
        _backward(*grads, *tensors, *results, rng_state=state, **ctx.options)
        return *results, None, None
