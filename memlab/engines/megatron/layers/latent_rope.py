"""Rotary position embedding of multi-latent attention as one kernel for queries and one for keys and values.

After ``megatron/core/fusions/fused_mla_yarn_rope_apply.py`` (0.16.1), whose kernels need Triton. Queries are rotated in
place, keys and values are written into new tensors, and only the cosines and sines are saved, which are views of the
buffers that each layer keeps. As in Megatron's own rotation, pairs lie beside each other in the input, and half the
channels apart in the output.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.attention.packed_sequences import chunks_of_rank, lengths_of
from memlab.meter.labels import one_kernel

_Place = tuple[list[int], int, int]
"""Lengths of packed sequences, or none; the ranks that share each sequence; and the rank among them."""


def fused_apply_mla_rope_for_q(
    query: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Rotates the last `emb_dim` channels of each head of queries in place.

    Args:
        query: Shape [sequence, batch, heads, qk_head_dim + emb_dim], or [tokens, heads, ...] of packed sequences.
        cos: Shape [positions, 1, 1, emb_dim].
        qk_head_dim: Channels without a position.
        emb_dim: Channels with one.
        cu_seqlens_q: Where packed sequences end, with a 0 in front.
        rotary_interleaved: Must be False, as in Megatron.
    """
    assert not rotary_interleaved and query.shape[-1] == qk_head_dim + emb_dim
    return _Queries.apply(query, cos, sin, emb_dim, _place(cu_seqlens_q, cp_size, cp_rank))


def fused_apply_mla_rope_for_kv(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys, whose last `emb_dim` channels are rotated and the same in all heads, and values.

    Args:
        kv: Shape [sequence, batch, heads, k_dim + v_dim], or [tokens, heads, ...] of packed sequences.
        k_pos_emb: The same with one head and `emb_dim` channels.
        cos: Shape [positions, 1, 1, emb_dim].
        emb_dim: Channels with a position.
        k_dim: Channels of a key without one.
        v_dim: Channels of a value.
        cu_seqlens_kv: As above.
        rotary_interleaved: Must be False, as in Megatron.
    """
    assert not rotary_interleaved and kv.shape[-1] == k_dim + v_dim
    place = _place(cu_seqlens_kv, cp_size, cp_rank)
    key, value = _KeysAndValues.apply(kv, k_pos_emb, cos, sin, (k_dim, v_dim, emb_dim), place)
    return key, value


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, channels: int, place: _Place
    ) -> torch.Tensor:
        _rotate_in_place(query, cos, sin, channels, place)
        ctx.save_for_backward(cos, sin)
        ctx.channels, ctx.place = channels, place
        return query.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous()
        cos, sin = ctx.saved_tensors
        _rotate_in_place(grad, cos, sin, ctx.channels, ctx.place, is_backward=True)
        return grad, None, None, None, None


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv: torch.Tensor,
        k_pos_emb: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        channels: tuple[int, int, int],
        place: _Place,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.channels, ctx.place = channels, place
        return _keys_and_values(kv, k_pos_emb, cos, sin, channels, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_key, grad_value = (grad.contiguous() for grad in grads)
        cos, sin = ctx.saved_tensors
        grad_kv, grad_position = _gradients(grad_key, grad_value, cos, sin, ctx.channels, ctx.place)
        return grad_kv, grad_position, None, None, None, None


def _place(ends: torch.Tensor | None, ranks: int, rank: int) -> _Place:
    return ([] if ends is None else lengths_of(ends)), ranks, rank


@one_kernel()
def _rotate_in_place(
    tensor: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    channels: int,
    place: _Place,
    *,
    is_backward: bool = False,
) -> None:
    rotated = tensor[..., -channels:]
    rotated.copy_((_turned_back if is_backward else _turned)(rotated, cos, sin, place))


@one_kernel()
def _keys_and_values(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    channels: tuple[int, int, int],
    place: _Place,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_key, of_value, _ = channels
    position = _turned(k_pos_emb, cos, sin, place).expand(*kv.shape[:-1], -1)
    key, value = kv.split([of_key, of_value], dim=-1)
    return torch.cat((key, position), dim=-1), value.contiguous()


@one_kernel()
def _gradients(
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    channels: tuple[int, int, int],
    place: _Place,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_key, _, with_position = channels
    key, position = grad_key.split([of_key, with_position], dim=-1)
    of_all_heads = position.float().sum(-2, keepdim=True)
    grad_position = _turned_back(of_all_heads, cos, sin, place).to(grad_key.dtype)
    return torch.cat((key, grad_value), dim=-1), grad_position


def _turned(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: _Place) -> torch.Tensor:
    first, second = tensor[..., 0::2].float(), tensor[..., 1::2].float()
    (cos_first, cos_second), (sin_first, sin_second) = (_halves(angles, tensor, place) for angles in (cos, sin))
    halves = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return torch.cat(halves, dim=-1).to(tensor.dtype)


def _turned_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: _Place) -> torch.Tensor:
    first, second = grad.float().chunk(2, dim=-1)
    (cos_first, cos_second), (sin_first, sin_second) = (_halves(angles, grad, place) for angles in (cos, sin))
    pairs = first * cos_first + second * sin_second, second * cos_second - first * sin_first
    return torch.stack(pairs, dim=-1).flatten(-2).to(grad.dtype)


def _halves(angles: torch.Tensor, tensor: torch.Tensor, place: _Place) -> tuple[torch.Tensor, ...]:
    """Returns the cosines or sines of both halves, for the positions of a row or of packed sequences."""
    lengths, ranks, rank = place
    if lengths:
        angles = torch.cat([chunks_of_rank(angles[:length, 0], ranks, rank) for length in lengths])
    return angles[: len(tensor)].float().chunk(2, dim=-1)
