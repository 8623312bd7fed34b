"""The norm of queries or keys over the channels of all heads together, as MiniMax-M2 has it.

Megatron-Bridge builds it in the place of Megatron's norm of each head, of torch's own operations, of which autograd
keeps a copy in fp32 and the normalised values (``models/minimax_m2/minimax_m2_provider.py``, 0.6.2). Tensor parallel
ranks have some heads each, and add their sums of squares up.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.engines.megatron.layers.torch_layers import device_empty


class _NormOfAllHeads(torch.nn.Module):
    """Normalises [sequence, batch, heads, channels]; `hidden_size` is that of one head."""

    def __init__(self, num_heads: int, hidden_size: int, config: TransformerConfig, epsilon: float) -> None:
        super().__init__()
        self.num_channels, self.epsilon = num_heads * hidden_size, epsilon
        ranks = config.tensor_model_parallel_size
        self.group = parallel_state.get_tensor_model_parallel_group() if ranks > 1 else None
        own = device_empty(self.num_channels // ranks, config=config).fill_(1)
        self.weight = torch.nn.Parameter(own)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs.flatten(2)  # a copy, which lives as long as Megatron-Bridge's variable
        exact = values.to(torch.float32)
        squares = exact.pow(2).sum(-1, keepdim=True)
        if self.group is not None:
            torch.distributed.all_reduce(squares, group=self.group)
        squares = squares / 1  # by how many ranks have the same heads
        variance = squares / self.num_channels
        values = exact * torch.rsqrt(variance + self.epsilon)
        return (self.weight * values.to(inputs.dtype)).view(inputs.shape)


class QueryNorm(_NormOfAllHeads):
    """Of all heads of queries."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config.num_attention_heads, hidden_size, config, eps)


class KeyNorm(_NormOfAllHeads):
    """Of all heads of keys."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float = 1e-6, **_: Any) -> None:
        assert config.num_query_groups is not None
        super().__init__(config.num_query_groups, hidden_size, config, eps)


def fused(norm: type, *, of_queries: bool) -> type:
    """Returns a norm of all heads by one kernel: Transformer Engine's, given all channels as one row.

    ``OLMoESelfAttention`` in models/olmoe/olmoe_provider.py of Megatron-Bridge (main of August 2026).
    """

    class FusedNorm(norm):
        def __init__(self, hidden_size: int, config: TransformerConfig, eps: float = 1e-6, **_: Any) -> None:
            heads = config.num_attention_heads if of_queries else config.num_query_groups
            super().__init__(config=config, hidden_size=hidden_size * heads, eps=eps)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.flatten(2)).view(inputs.shape)

    return FusedNorm
