"""Fused attention of Transformer Engine on cuDNN: what its autograd functions save for backward.

Each saves the tensors that TE 2.12.0 saves, and makes the outputs that its kernels make.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.attention.kernel import (
    Dropped,
    attend,
    attend_backward,
    attend_each,
    attend_each_backward,
    new_random_state,
)
from memlab.engines.attention.packed_sequences import lengths_of
from memlab.engines.attention.qkv_layout import in_known_layout


class CausalAttention(torch.autograd.Function):
    """Fused causal attention; saves query, key, value, its output and the log-sum-exp of each row (fp32).

    With dropout it saves the state of the random numbers too, from which backward makes the same ones, and with sinks
    these (``FusedAttnFunc``, ``attention/dot_product_attention/backends.py``, TE 2.16.1); a window saves nothing.
    Shapes are [sequence, batch, heads, channels]; key and value may have fewer heads (grouped queries). The output is
    [sequence, batch, heads * channels].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        drop: float = 0.0,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # A value that is a slice of linear_qkv's output may be copied, and the copy saved.
        query, key, value = in_known_layout(query, key, value)
        random_states = [new_random_state(query)] if drop else []
        dropped = Dropped.of(drop, *random_states)
        output, log_sum_exp = attend(query, key, value, scale, dropped, window=window, sinks=sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, sinks, *random_states)
        ctx.scale, ctx.drop, ctx.window = scale, drop, window
        return output.view(*output.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, sinks, *random_states = ctx.saved_tensors
        saved = grads[0], query, key, value, output, log_sum_exp, ctx.scale, Dropped.of(ctx.drop, *random_states)
        grads_of_inputs = attend_backward(*saved, window=ctx.window, sinks=sinks)
        return *grads_of_inputs[:3], None, None, None, *(grads_of_inputs[3:] or (None,))


class PackedAttention(torch.autograd.Function):
    """`CausalAttention` of sequences that share a row: shapes are [tokens, heads, channels].

    Saves the same tensors, and where the sequences end. cuDNN's log-sum-exp is fp32 [tokens, heads, 1] here
    (``fused_attn_f16_arbitrary_seqlen.cu``, Transformer Engine 2.12); how large cuDNN's workspace for packed sequences
    is, was not measured.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        ends: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        # Backward does not read the places: what is offloaded comes back without values in a simulation.
        ctx.lengths = lengths_of(ends)
        output, log_sum_exp = attend_each(query, key, value, scale, ctx.lengths, window=window, sinks=sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, ends, sinks)
        ctx.scale, ctx.window = scale, window
        return output.view(len(output), -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, _, sinks = ctx.saved_tensors
        saved = grads[0], query, key, value, output, log_sum_exp, ctx.scale, ctx.lengths
        grads_of_inputs = attend_each_backward(*saved, window=ctx.window, sinks=sinks)
        return *grads_of_inputs[:3], None, None, None, *(grads_of_inputs[3:] or (None,))
