"""The attention of NeMo Automodel's own classes of models with experts, around torch's or Transformer Engine's kernel.

``models/qwen3_moe/layers.py``, ``models/gpt_oss/rope_utils.py`` and ``attention/utils.py`` of 36044ad3 and 0.7.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memlab.config.scenario import Scenario
from memlab.engines.attention.flash_attention import flash_attention_of_torch
from memlab.engines.attention.fused_attention import PackedAttention
from memlab.engines.attention.kernel import attend, attend_backward
from memlab.engines.attention.packed_sequences import ends_of
from memlab.engines.attention.qkv_layout import in_known_layout
from memlab.engines.attention.workspace import bytes_of_workspace
from memlab.engines.fsdp2.automodel_norm import Norm
from memlab.engines.fsdp2.selective_checkpoint import as_one_operation
from memlab.meter.labels import one_kernel

_NOT_KEPT = partial(as_one_operation, is_kept=False)


class Rotations(torch.nn.Module):
    """Cosines and sines of a pass's positions in fp32, side by side, for each row of the batch."""

    def __init__(self, of_transformers: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", of_transformers.inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Returns [batch, tokens, channels] of positions [1, tokens]."""
        positions = position_ids.expand(len(hidden_states), -1).to(torch.float32)
        angles = torch.einsum("bt,d->btd", positions, self.inv_freq.float())
        return torch.cat([torch.cos(angles) * 1.0, torch.sin(angles) * 1.0], dim=-1)


class Attention(torch.nn.Module):
    """Queries and keys are rotated, and in some models normalized by head before; they lie token by token.

    Args:
        of_transformers: transformers' attention, whose matrices it takes.
        scenario: Says which kernel attends, and which release rotates.
    """

    def __init__(self, of_transformers: Any, scenario: Scenario) -> None:
        super().__init__()
        is_released = scenario.state.model_classes == "automodel_0.7.0"
        self.q_proj, self.k_proj = of_transformers.q_proj, of_transformers.k_proj
        self.v_proj, self.o_proj = of_transformers.v_proj, of_transformers.o_proj
        self.has_norms = hasattr(of_transformers, "q_norm")
        if self.has_norms:
            self.q_norm, self.k_norm = (
                Norm(each, is_released=is_released) for each in (of_transformers.q_norm, of_transformers.k_norm)
            )
        self.sinks: torch.nn.Parameter | None = getattr(of_transformers, "sinks", None)
        self.window: int | None = getattr(of_transformers, "sliding_window", None)
        self.channels, self.scale = of_transformers.head_dim, of_transformers.scaling
        self.is_released, self.is_of_te = is_released, scenario.state.attn_implementation == "te"
        self.on_gpu_kernel = getattr(of_transformers.config, "_attn_implementation", None) == "sdpa"

    def forward(self, inputs: torch.Tensor, rotations: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Maps [batch, tokens, width] to the same shape; rotations are [batch, tokens, channels]."""
        query, key, value = (each(inputs) for each in (self.q_proj, self.k_proj, self.v_proj))
        shape = (*inputs.shape[:2], -1, self.channels)
        query, key, value = query.view(shape), key.view(shape), value.view(shape)
        if self.has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_ReleasedRotation.apply if self.is_released else _rotated_both)(query, key, rotations)
        if self.is_of_te:
            # As cuDNN takes them (``DotProductAttention.forward`` of Transformer Engine 2.16.1).
            sinks = None if self.sinks is None else self.sinks.reshape(1, -1, 1, 1).to(torch.float32)
            output = attend_as_te(query, key, value, self.scale, options.get("packed_lengths"), self.window, sinks)
        else:
            output = self._attend_as_torch(query, key, value)
        return self.o_proj(output.flatten(2))

    def _attend_as_torch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.transpose(1, 2).contiguous() for each in (query, key, value))
        if self.on_gpu_kernel:
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
            )
            return attended.transpose(1, 2).contiguous()
        return flash_attention_of_torch(query, key, value, self.scale, _NOT_KEPT)


def attend_as_te(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lengths: tuple[int, ...] | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends causally with Transformer Engine.

    Args:
        query: Shape [batch, tokens, heads, channels].
        key: The same, of as many or fewer heads.
        value: As `key`, of as many or fewer channels.
        lengths: Of packed sequences, which then have a batch of 1.
        window: How many keys before its own place a query sees; None is all.
        sinks: A further score of each head, which has no value; fp32 [1, heads, 1, 1].

    Returns:
        Shape [batch, tokens, heads, the values' channels].
    """
    if lengths is None:
        return _FusedAttention.apply(query, key, value, scale, window, sinks)
    rows = (each.flatten(0, 1) for each in (query, key, value))
    packed: torch.Tensor = PackedAttention.apply(*rows, scale, ends_of(lengths), window, sinks)
    return packed.view(*query.shape[:-1], value.shape[-1])


class _FusedAttention(torch.autograd.Function):
    """cuDNN's kernel as Transformer Engine calls it, of tensors [batch, tokens, heads, channels] that lie so.

    Saves them, its output, the log-sum-exp of each row (fp32) and a state of random numbers (``FusedAttnFunc``). Values
    may have fewer channels; a part of a wider tensor is copied, and the copy saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        query, key, value = in_known_layout(query, key, value)

        def compute() -> tuple[torch.Tensor, ...]:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
            with one_kernel():
                turned = _tokens_first(query, key, value)
                attended, log_sums = attend(turned[0], turned[1], turned[2], scale, window=window, sinks=sinks)
                output.copy_(attended.transpose(0, 1))
            return output, log_sums, query.new_empty(2, dtype=torch.int64)

        output, *others = _NOT_KEPT(compute)
        ctx.save_for_backward(query, key, value, output, sinks, *others)
        ctx.scale, ctx.window = scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sinks, log_sums, _ = ctx.saved_tensors
        results = tuple(torch.empty_like(each) for each in (query, key, value))
        shapes = (each.shape for each in _tokens_first(query, key, value))
        workspace = query.new_empty(bytes_of_workspace(*shapes), dtype=torch.uint8)
        with one_kernel():
            grad, q, k, v, out = _tokens_first(grads[0].view(output.shape), query, key, value, output)
            parts = attend_backward(grad.flatten(2), q, k, v, out, log_sums, ctx.scale, window=ctx.window, sinks=sinks)
            of_sinks = None if sinks is None else parts[3]
            for result, part in zip(results, parts, strict=False):
                result.copy_(part.transpose(0, 1))
            del parts, part, grad, q, k, v, out
        del workspace
        return *results, None, None, of_sinks


def _tokens_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.transpose(0, 1) for each in tensors]


def _rotated_both(query: torch.Tensor, key: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = rotations.split(rotations.shape[-1] // 2, dim=-1)
    return _rotated(query, cosines, sines), _rotated(key, cosines, sines)


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    cosines, sines = (each.unsqueeze(-2).to(heads.dtype) for each in (cosines, sines))
    turned, rest = heads.tensor_split((2 * cosines.shape[-1],), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    one = first * cosines - second * sines
    two = second * cosines + first * sines
    return torch.cat((one, two, rest) if rest.shape[-1] else (one, two), dim=-1)


class _ReleasedRotation(torch.autograd.Function):
    """``_compiled_apply_rotary_emb_qk`` of the release: one kernel forward and one backward.

    Of cosines and sines it keeps those in the heads' type, half the bytes of what all layers share (seen on an H200).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = (each.to(query.dtype) for each in rotations.split(rotations.shape[-1] // 2, dim=-1))
        ctx.save_for_backward(cosines, sines)
        with one_kernel():
            return _rotated(query, cosines, sines), _rotated(key, cosines, sines)

    @staticmethod
    @one_kernel()
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grads[0], cosines, -sines), _rotated(grads[1], cosines, -sines), None
