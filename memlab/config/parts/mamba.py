"""Mamba 2: a layer that carries a state from token to token, in the place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import Normalization, Part, SharedSize, Weight, norm_kept_bytes, norm_weights

CONVOLVED_TOKENS = 4
"""Tokens that the short convolution sees (``d_conv`` of Megatron's ``MambaMixer``, which no option changes)."""
CHUNK = 128
"""Tokens between two states that backward keeps (``chunk_size`` there)."""
_NOTHING = "Megatron has no module of Mamba to recompute or to offload: its norm is fused into in_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba(Part):
    """A layer of Mamba 2, with the norm of its groups (``megatron/core/ssm/mamba_mixer.py``, 0.16.1)."""

    hidden_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_state_dim: int
    """Numbers of a state for each channel."""
    mamba_num_groups: int
    """Groups of heads that share what is written into the state, and what is read from it."""
    normalization: Normalization

    most: ClassVar = {
        "hidden_size": 2**20,
        "mamba_num_heads": 2**13,
        "mamba_head_dim": 2**12,
        "mamba_state_dim": 2**12,
        "mamba_num_groups": 2**10,
    }

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The norm is no module, and Megatron offloads and recomputes nothing within the mixer."""
        recomputed, offloaded = ("layernorm", "mlp", "shared_experts"), ("mlp_norm", "attn_norm")
        names = (
            *(f"recompute_modules:{name}" for name in recomputed),
            *(f"offload_modules:{name}" for name in offloaded),
        )
        return dict.fromkeys(names, _NOTHING)

    def check(self, name: str) -> None:
        """Checks the fields, and Megatron's and causal_conv1d's rules for them."""
        Part.check(self, name)
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"{name}: mamba_num_heads is {self.mamba_num_heads}, must be a multiple of mamba_num_groups, "
                f"{self.mamba_num_groups}, by a rule of Megatron-Core: correct one of them"
            )

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads heads, groups and states (``NemotronHConfig`` in transformers 5.24)."""
        return {
            "mamba_num_heads": config.whole("mamba_num_heads", default=128),
            "mamba_head_dim": config.whole("mamba_head_dim", default=64),
            "mamba_state_dim": config.whole("ssm_state_size", default=128),
            "mamba_num_groups": config.whole("n_groups", default=8),
        }

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def convolved_width(self) -> int:
        """Channels of the convolution: those of all heads, and what all groups write and read."""
        return self.width + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def projected_width(self) -> int:
        """Columns of ``in_proj``: gates, what is convolved, and a step of time for each head."""
        return self.width + self.convolved_width + self.mamba_num_heads

    def weights(self) -> tuple[Weight, ...]:
        heads, width = self.mamba_num_heads, self.width
        return (
            *norm_weights("mixer.in_proj.layer_norm_", self.hidden_size, self.normalization),
            Weight("mixer.in_proj.weight", (self.projected_width, self.hidden_size), split=0),
            Weight("mixer.conv1d.weight", (self.convolved_width, 1, CONVOLVED_TOKENS), split=0),
            Weight("mixer.conv1d.bias", (self.convolved_width,), split=0),
            *(Weight(f"mixer.{name}", (heads,), split=0) for name in ("dt_bias", "A_log", "D")),
            Weight("mixer.norm.weight", (width,), split=0),
            Weight("mixer.out_proj.weight", (self.hidden_size, width), split=1),
        )

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns heads and groups, of which each tensor parallel rank has at least one."""
        return (
            SharedSize("mamba_num_heads", "heads of Mamba", self.mamba_num_heads, "tensor_model_parallel_size"),
            SharedSize("mamba_num_groups", "groups of Mamba", self.mamba_num_groups, "tensor_model_parallel_size"),
        )

    @property
    def largest_row(self) -> int:
        return self.projected_width

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of a forward pass for one token, with those of the scan.

        In a chunk, each token reads half of the others through products of its group and of its heads; it writes its
        channels into the state and reads them from it (``ssd_combined.py`` of mamba_ssm 2.3).
        """
        of_pairs = CHUNK * (self.mamba_num_groups * self.mamba_state_dim + self.width)
        return Part.operations(self, attended) + of_pairs + 4.0 * self.width * self.mamba_state_dim

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns nothing: Megatron has no module of it to recompute."""
        return {}

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of input, norm, projection, the scan's output before its gate, and what its norm takes.

        The kernel saves its whole input, and computes the convolution, the states and all else again in backward.
        """
        if recompute == "full":
            return 2 * self.hidden_size * tokens
        of_groups = 4 * self.mamba_num_groups
        of_row = 4 * self.hidden_size + norm_kept_bytes(self.normalization)
        return (of_row + 2 * self.projected_width + 3 * 2 * self.width + of_groups) * tokens + 12 * self.mamba_num_heads
