"""A feed-forward part of experts: a router sends each token to some of many MLPs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import (
    FeedForward,
    Normalization,
    Part,
    SharedSize,
    Weight,
    norm_kept_bytes,
    norm_weights,
)
from memlab.config.validation import MOST_LAYERS, check_whole_number, is_whole_number, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(FeedForward):
    """A router and SwiGLU experts without biases (``megatron/core/transformer/moe/``, 0.16.1)."""

    hidden_size: int
    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_aux_loss_coeff: float
    moe_router_pre_softmax: bool
    normalization: Normalization

    most: ClassVar = {"num_moe_experts": 2**14, "moe_router_topk": 2**14, "moe_ffn_hidden_size": 2**22}
    ranges: ClassVar = {"moe_aux_loss_coeff": (None, 1e6)}
    megatron: ClassVar = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }
    recompute_modules: ClassVar = ("moe", "moe_act")
    offload_modules: ClassVar = ("expert_fc1", "moe_act")
    without_effect: ClassVar = {
        "recompute_modules:mlp": "it recomputes dense MLPs, and every layer of this model is MoE"
    }
    offload_groups: ClassVar = ("mlp_norm", "expert_fc1", "moe_act")
    routes: ClassVar = True
    keeps_graph: ClassVar = True  # as the token dispatcher's ``probs`` (`memlab.engines.retained_leaves`)
    formulas: ClassVar = ("none", "full")

    @property
    def megatron_spec(self) -> dict[str, Any]:
        """Arguments of Megatron's specification: grouped experts."""
        return {"num_experts": self.num_moe_experts, "moe_grouped_gemm": True}

    def groups_in_turn(self, offloaded: Collection[str]) -> list[str]:
        """Returns the groups: ``mlp_norm`` spans those of the experts."""
        groups = FeedForward.groups_in_turn(self, offloaded)
        return groups[:1] if "mlp_norm" in groups else groups

    def check(self, name: str) -> None:
        """Checks the fields, and Megatron's rules for the experts of a token."""
        Part.check(self, name)
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"{name}: moe_router_topk is {self.moe_router_topk}, must be at most num_moe_experts, "
                f"{self.num_moe_experts}: correct one of them"
            )
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            # ``TransformerConfig.__post_init__`` of megatron-core 0.16.1 and 0.19.2.
            raise ValueError(
                f"{name}: moe_router_topk is 1 without moe_router_pre_softmax, must be at least 2 there by a rule "
                "of Megatron-Core, because the softmax over one expert has no gradient: set moe_router_pre_softmax "
                "(norm_topk_prob false in a config.json), or choose more experts"
            )

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads router and experts; transformers writes the second name for their number since 5.1 (Qwen3-MoE)."""
        has_own_width = kind.experts == "own width"
        return {
            "num_moe_experts": config.whole_of_either("num_experts", "num_local_experts"),
            "moe_router_topk": config.whole("num_experts_per_tok"),
            "moe_ffn_hidden_size": config.whole("moe_intermediate_size" if has_own_width else "intermediate_size"),
            "moe_aux_loss_coeff": config.number("router_aux_loss_coef", default=0.001),
            # Mixtral has no such field, and always normalises.
            "moe_router_pre_softmax": not config.flag("norm_topk_prob", default=not has_own_width),
            "moe_layer_freq": _pattern_of_config(config),
        }

    def weights(self) -> tuple[Weight, ...]:
        """Returns the parameters of one layer."""
        hidden, width, count = self.hidden_size, self.moe_ffn_hidden_size, self.num_moe_experts
        return (
            *norm_weights("pre_mlp_layernorm.", hidden, self.normalization),
            Weight("mlp.router.weight", (count, hidden)),
            Weight("mlp.experts.linear_fc1.weight", (2 * width, hidden), split=0, num_experts=count),
            Weight("mlp.experts.linear_fc2.weight", (hidden, width), split=1, num_experts=count),
        )

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the number of experts, and the width of each, which different ranks share."""
        return (
            SharedSize("num_moe_experts", "experts", self.num_moe_experts, "expert_model_parallel_size"),
            SharedSize(
                "moe_ffn_hidden_size", "columns of an expert", self.moe_ffn_hidden_size, "expert_tensor_parallel_size"
            ),
        )

    @property
    def largest_row(self) -> int:
        """The most elements that one token has in any activation: as rows of its experts."""
        return self.moe_router_topk * max(self.moe_ffn_hidden_size, self.hidden_size)

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of the router, and of the experts that one token passes through."""
        of_experts = 6.0 * self.hidden_size * self.moe_router_topk * self.moe_ffn_hidden_size
        return of_experts + 2.0 * self.hidden_size * self.num_moe_experts

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs of the whole part, of the activation function, and of the norm, a module of its own."""
        of_activation = 6.0 * self.moe_router_topk * self.moe_ffn_hidden_size
        return {"moe": self.operations(attended), "moe_act": of_activation, "layernorm": 4.0 * self.hidden_size}

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of input, norm, routing, the experts' rows, and what the dispatcher refers to."""
        hidden, width = self.hidden_size, self.moe_ffn_hidden_size
        experts, chosen = self.num_moe_experts, self.moe_router_topk
        if recompute == "full":
            return (13 * experts + 4) * tokens + 8 * experts
        of_rows = (2 * hidden + 6 * width + 24) * chosen
        of_norm = norm_kept_bytes(self.normalization)
        return (4 * hidden + 4 + of_norm + of_rows + 17 * experts) * tokens + 16 * experts + 4


def _pattern_of_config(config: ConfigJson) -> tuple[int, ...] | None:
    """Returns which layers have experts (``Qwen3MoeDecoderLayer`` in transformers 5.24)."""
    every, dense = config.whole("decoder_sparse_step", default=1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_whole_number(layer, at_least=0) for layer in dense):
        raise ValueError(f"mlp_only_layers is {shortened(dense)}, must be a list of numbers of layers: correct it")
    if every == 1 and not dense:
        return None
    num_layers = config.whole("num_hidden_layers")
    check_whole_number("num_hidden_layers", num_layers, at_most=MOST_LAYERS, action="correct it")
    return tuple(int((layer + 1) % every == 0 and layer not in dense) for layer in range(num_layers))
