"""Rotary position embedding as one kernel: Transformer Engine's ``FusedRoPEFunc``.

After ``transformer_engine/pytorch/attention/rope.py`` and ``csrc/extensions/apply_rope.cpp`` (2.12.0): forward and
backward each allocate their result, and only the angles are saved. Megatron's own rotation makes cosines, sines and
products as tensors, and saves the cosines and sines.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.attention.packed_sequences import chunks_of_rank, lengths_of
from memlab.meter.labels import one_kernel


def fused_apply_rotary_pos_emb(
    tensor: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> torch.Tensor:
    """Replaces Megatron's function of this name, which needs Transformer Engine.

    Args:
        tensor: Shape [sequence, batch, heads, channels], with any strides.
        freqs: Angles of the first channels in fp32, shape [sequence, 1, 1, rotated channels].
        transpose_output_memory: Ignored, as Megatron does with TE.
        interleaved: Must be False: both families rotate halves.

    Returns:
        The rotated tensor, contiguous.
    """
    assert not interleaved, "both families rotate halves"
    return _FusedRope.apply(tensor, freqs)


def fused_apply_rotary_pos_emb_thd(
    tensor: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Replaces Megatron's function of this name: rotates packed sequences, each from position 0 on.

    Args:
        tensor: Shape [tokens of the rank, heads, channels].
        cu_seqlens: Where the whole sequences end, int32 [sequences + 1] with a 0 in front.
        freqs: As above, for at least as many positions as the longest sequence has tokens.
        cp_size: Ranks that share each sequence.
        cp_rank: The rank among them; it has an early and a late chunk of each sequence.
        interleaved: Must be False, as above (megatron-core 0.19 gives it).

    Returns:
        The rotated tensor, contiguous.
    """
    assert not interleaved, "both families rotate halves"
    return _FusedRope.apply(tensor, freqs, cu_seqlens, cp_size, cp_rank)


class _FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        freqs: torch.Tensor,
        ends: torch.Tensor | None = None,
        ranks: int = 1,
        rank: int = 0,
    ) -> torch.Tensor:
        freqs = freqs.float()
        ctx.save_for_backward(freqs, ends)
        ctx.place = ([] if ends is None else lengths_of(ends)), ranks, rank
        return _rotate(tensor, freqs, ctx.place, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        freqs, _ = ctx.saved_tensors
        return _rotate(grads[0], freqs, ctx.place, -1), None, None, None, None


@one_kernel()
def _rotate(
    tensor: torch.Tensor, freqs: torch.Tensor, place: tuple[list[int], int, int], direction: int
) -> torch.Tensor:
    """Rotates by the angles of a row, or of the part that a rank has of each packed sequence of these lengths."""
    lengths, ranks, rank = place
    if lengths:
        freqs = torch.cat([chunks_of_rank(freqs[:length, 0], ranks, rank) for length in lengths])
    rotated, passed = tensor[..., : freqs.shape[-1]].float(), tensor[..., freqs.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * freqs.cos() + torch.cat((-second, first), dim=-1) * (freqs.sin() * direction)
    return torch.cat((turned.to(tensor.dtype), passed), dim=-1)
