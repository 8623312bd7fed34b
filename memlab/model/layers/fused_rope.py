"""Rotary position embedding as one kernel: Transformer Engine's ``FusedRoPEFunc``.

After ``transformer_engine/pytorch/attention/rope.py`` and ``csrc/extensions/apply_rope.cpp`` (2.12.0): forward and
backward each allocate their result, and only the angles are saved. Megatron's own rotation makes cosines, sines and
products as tensors, and saves the cosines and sines.
"""

from __future__ import annotations

from typing import Any

import torch

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
    result: torch.Tensor = _FusedRope.apply(tensor, freqs)
    return result


class _FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        freqs = freqs.float()
        ctx.save_for_backward(freqs)
        return _rotate(tensor, freqs, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (freqs,) = ctx.saved_tensors
        return _rotate(grads[0], freqs, -1), None


@one_kernel()
def _rotate(tensor: torch.Tensor, freqs: torch.Tensor, direction: int) -> torch.Tensor:
    rotated, passed = tensor[..., : freqs.shape[-1]].float(), tensor[..., freqs.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * freqs.cos() + torch.cat((-second, first), dim=-1) * (freqs.sin() * direction)
    return torch.cat((turned.to(tensor.dtype), passed), dim=-1)
