"""A dense feed-forward part: one MLP that every token passes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import FeedForward, Normalization, SharedSize, Weight, norm_kept_bytes, norm_weights

_FUSED_NORM = "the norm before the dense MLP is fused into linear_fc1: there is no norm module"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense(FeedForward):
    """An MLP, with SwiGLU or with GELU (``megatron/core/transformer/mlp.py``, 0.16.1)."""

    hidden_size: int
    ffn_hidden_size: int
    normalization: Normalization
    gated_linear_unit: bool
    add_bias_linear: bool
    sandwich_norms: bool
    shares_norm: bool

    most: ClassVar = {"ffn_hidden_size": 2**22}
    formulas: ClassVar = ("none", "mlp", "core_attn", "full")

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The norm is no module."""
        return {
            "offload_modules:mlp_norm": f"{_FUSED_NORM} to offload",
            "recompute_modules:layernorm": (
                "each of the two norms of a dense layer is fused into the linear layer after it"
            ),
        }

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads the width; Qwen3.5's models with experts have none, and no layer that needs one."""
        of_experts = config.values.get("moe_intermediate_size") if kind.has_delta_net else None
        return {"ffn_hidden_size": config.whole("intermediate_size", default=of_experts)}

    def weights(self) -> tuple[Weight, ...]:
        rows = (2 if self.gated_linear_unit else 1) * self.ffn_hidden_size
        biases = (
            Weight("mlp.linear_fc1.bias", (rows,), split=0),
            Weight("mlp.linear_fc2.bias", (self.hidden_size,)),
        )
        norm = norm_weights("mlp.linear_fc1.layer_norm_", self.hidden_size, self.normalization)
        return (
            *(() if self.shares_norm else norm),
            Weight("mlp.linear_fc1.weight", (rows, self.hidden_size), split=0),
            Weight("mlp.linear_fc2.weight", (self.hidden_size, self.ffn_hidden_size), split=1),
            *(biases if self.add_bias_linear else ()),
            *(norm_weights("post_feedforward_layernorm.", self.hidden_size, "RMSNorm") if self.sandwich_norms else ()),
        )

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the width, which tensor parallel ranks share."""
        return (
            SharedSize("ffn_hidden_size", "columns of the MLP", self.ffn_hidden_size, "tensor_model_parallel_size"),
        )

    @property
    def largest_row(self) -> int:
        return self.ffn_hidden_size

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs of the MLP."""
        return {"mlp": self.operations(attended)}

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of the MLP's input, its norm, and the input and output of the activation function."""
        if recompute == "full":
            return 0
        of_residual = 2 * self.hidden_size
        if recompute == "mlp":
            return of_residual * tokens
        of_activation = (6 if self.gated_linear_unit else 4) * self.ffn_hidden_size
        return (of_residual + 2 * self.hidden_size + norm_kept_bytes(self.normalization) + of_activation) * tokens
