"""Gated delta net: linear attention, whose state has one size however long a sequence is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import Normalization, Part, SharedSize, Weight, norm_kept_bytes, norm_weights

AttentionVariant = Literal["gated_delta_net"]
_CHUNK = 64
_MOST_CHANNELS = 256
"""Of a head, by a rule of the kernels (``chunk_gated_delta_rule_fwd_h`` in flash-linear-attention 0.4.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNet(Part):
    """A layer's first part in the place of attention (``megatron/core/ssm/gated_delta_net.py``, 0.16.1).

    Queries, keys and values pass a short convolution along the sequence. Heads of values may share a head of queries
    and keys, which are repeated. A norm of each head and a gate follow.
    """

    hidden_size: int
    experimental_attention_variant: AttentionVariant
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    normalization: Normalization

    most: ClassVar = {
        "hidden_size": 2**20,
        "linear_conv_kernel_dim": 2**8,
        "linear_key_head_dim": _MOST_CHANNELS,
        "linear_value_head_dim": _MOST_CHANNELS,
        "linear_num_key_heads": 2**13,
        "linear_num_value_heads": 2**13,
    }

    def check(self, name: str) -> None:
        """Checks the fields, and that heads of values divide into heads of keys."""
        Part.check(self, name)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"{name}: linear_num_value_heads is {self.linear_num_value_heads}, must be a multiple of "
                f"linear_num_key_heads, {self.linear_num_key_heads}: correct one of them"
            )

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads heads and channels (``Qwen3NextConfig`` in transformers 5.24)."""
        return {
            "experimental_attention_variant": "gated_delta_net",
            "linear_conv_kernel_dim": config.whole("linear_conv_kernel_dim", default=4),
            "linear_key_head_dim": config.whole("linear_key_head_dim", default=128),
            "linear_value_head_dim": config.whole("linear_value_head_dim", default=128),
            "linear_num_key_heads": config.whole("linear_num_key_heads", default=16),
            "linear_num_value_heads": config.whole("linear_num_value_heads", default=32),
        }

    @property
    def key_width(self) -> int:
        """Channels of all heads of keys together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all heads of values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved_width(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.key_width + self.value_width

    @property
    def entering_width(self) -> int:
        """Channels that the first matrix makes: those, the gates of values, and two numbers of each head of values."""
        return self.convolved_width + self.value_width + 2 * self.linear_num_value_heads

    def weights(self) -> tuple[Weight, ...]:
        heads = self.linear_num_value_heads
        return (
            Weight("self_attention.dt_bias", (heads,), split=0),
            Weight("self_attention.A_log", (heads,), split=0),
            *norm_weights("self_attention.in_proj.layer_norm_", self.hidden_size, self.normalization),
            Weight("self_attention.in_proj.weight", (self.entering_width, self.hidden_size), split=0),
            Weight("self_attention.conv1d.weight", (self.convolved_width, 1, self.linear_conv_kernel_dim), split=0),
            *norm_weights("self_attention.out_norm.", self.linear_value_head_dim, self.normalization),
            Weight("self_attention.out_proj.weight", (self.hidden_size, self.value_width), split=1),
        )

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the heads, which tensor parallel ranks share."""
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        return (
            SharedSize("linear_num_key_heads", "heads of linear keys", keys, "tensor_model_parallel_size"),
            SharedSize("linear_num_value_heads", "heads of linear values", values, "tensor_model_parallel_size"),
        )

    @property
    def largest_row(self) -> int:
        return max(self.hidden_size, self.entering_width)

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of a forward pass for one token, with those of the rule within and between chunks."""
        heads, keys, values = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        within = _CHUNK * (3 * keys + 2 * values) + _CHUNK**2 / 3
        between = 3 * keys * values
        convolved = self.convolved_width * self.linear_conv_kernel_dim
        return Part.operations(self, attended) + 2.0 * (convolved + heads * (within + between))

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns nothing: Megatron-Core 0.16.1 recomputes none of its modules alone."""
        return {}

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of input, norm, and what convolution, norms, rule and gate keep."""
        if recompute == "full":
            return 2 * self.hidden_size * tokens
        heads, of_row = self.linear_num_value_heads, norm_kept_bytes(self.normalization)
        entered = 2 * self.hidden_size + of_row
        convolved = (2 + 2) * self.convolved_width  # the convolution's input and output
        keys = 2 * 2 * self.key_width + 2 * 4 * self.linear_num_key_heads  # normalised queries and keys
        repeated = heads // self.linear_num_key_heads
        keys += 2 * 2 * self.key_width * repeated if repeated > 1 else 0
        of_head = 4 + 4 + 4 + 2 + 2 * _CHUNK + of_row  # time steps, decays and their sums, beta, a chunk's matrix
        values = 2 * 5 * self.value_width  # value, output, norm, gate and the gated output
        padding = 2 * self.convolved_width * (self.linear_conv_kernel_dim - 1)
        of_row_of_layer = 2 * self.hidden_size + entered + convolved + keys + of_head * heads + values
        return of_row_of_layer * tokens + padding + 2 * 2 * heads  # decay rates, and what they are made of
