"""A feed-forward part of experts: a router sends each token to some of many MLPs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

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
from memlab.config.validation import MOST_LAYERS, check_number, check_whole_number, is_whole_number, shortened

ScoreFunction = Literal["softmax", "sigmoid"]
_MOST_OF_ONE = 2**22
"""Columns of an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(FeedForward):
    """A router, experts with a gate or without, and one MLP beside them that all tokens pass through, if there is one.

    They are in ``megatron/core/transformer/moe/`` (0.16.1): ``router.py``, ``experts.py`` and ``shared_experts.py``.
    """

    hidden_size: int
    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_aux_loss_coeff: float
    moe_router_pre_softmax: bool
    normalization: Normalization
    moe_router_score_function: ScoreFunction
    moe_router_enable_expert_bias: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_latent_size: int | None
    add_bias_linear: bool
    quick_geglu: bool
    glu_linear_offset: float
    activation_func_clamp_value: float | None
    gated_linear_unit: bool

    most: ClassVar = {"num_moe_experts": 2**14, "moe_router_topk": 2**14, "moe_ffn_hidden_size": _MOST_OF_ONE}
    ranges: ClassVar = {"moe_aux_loss_coeff": (None, 1e6), "glu_linear_offset": (None, 1e6)}
    megatron: ClassVar = {"moe_grouped_gemm": True}
    recompute_modules: ClassVar = ("moe", "moe_act", "shared_experts")
    offload_modules: ClassVar = ("expert_fc1", "moe_act")
    offload_groups: ClassVar = ("mlp_norm", "expert_fc1", "moe_act")
    routes: ClassVar = True
    keeps_graph: ClassVar = True  # as the token dispatcher's ``probs`` (`memlab.engines.retained_leaves`)

    @property
    def formulas(self) -> tuple[str, ...]:  # type: ignore[override]
        """None for routers and experts that the cheat sheet does not describe."""
        is_plain = self.moe_router_score_function == "softmax"
        is_plain = is_plain and self.gated_linear_unit and not (self.add_bias_linear or self.quick_geglu)
        is_plain = is_plain and self.moe_router_group_topk is self.moe_router_topk_scaling_factor is None
        is_plain = is_plain and self.moe_latent_size is None
        return ("none", "full") if is_plain and not self.moe_shared_expert_intermediate_size else ()

    @property
    def without_effect(self) -> Mapping[str, str]:
        """What recomputes an MLP that is not there."""
        reasons = {"recompute_modules:mlp": "it recomputes dense MLPs, and every layer of this model is MoE"}
        if not self.moe_shared_expert_intermediate_size:
            reasons["recompute_modules:shared_experts"] = "the model has no shared experts"
        return reasons

    @property
    def megatron_spec(self) -> dict[str, Any]:
        """Arguments of Megatron's specification: grouped experts."""
        return {"num_experts": self.num_moe_experts, "moe_grouped_gemm": True}

    def groups_in_turn(self, offloaded: Collection[str]) -> list[str]:
        """Returns the groups: ``mlp_norm`` spans those of the experts."""
        groups = FeedForward.groups_in_turn(self, offloaded)
        return groups[:1] if "mlp_norm" in groups else groups

    def check(self, name: str) -> None:
        """Checks the fields, and Megatron's rules for them (``TransformerConfig.__post_init__``, 0.16.1 and 0.19.2)."""
        Part.check(self, name)
        factor = self.moe_router_topk_scaling_factor
        for field in ("moe_shared_expert_intermediate_size", "moe_latent_size"):
            if getattr(self, field) is not None:
                check_whole_number(f"{name}: {field}", getattr(self, field), at_most=_MOST_OF_ONE, action="correct it")
        if self.activation_func_clamp_value is not None:
            check_number(
                f"{name}: activation_func_clamp_value", self.activation_func_clamp_value, 0, 1e6, action="correct it"
            )
        if factor is not None:
            check_number(f"{name}: moe_router_topk_scaling_factor", factor, 0, 1e6, action="correct it")
        for rule in (*self._broken_rules(), *self._broken_rules_of_groups()):
            raise ValueError(f"{name}: {rule}")

    def _broken_rules(self) -> Iterator[str]:
        chosen, score = self.moe_router_topk, self.moe_router_score_function
        if chosen > self.num_moe_experts:
            yield (
                f"moe_router_topk is {chosen}, must be at most num_moe_experts, {self.num_moe_experts}: correct one of "
                "them"
            )
        if score not in get_args(ScoreFunction):
            yield f"moe_router_score_function is {shortened(score)}, must be softmax or sigmoid: choose one of them"
        if chosen == 1 and score == "softmax" and not self.moe_router_pre_softmax:
            yield (
                "moe_router_topk is 1 without moe_router_pre_softmax, must be at least 2 there by a rule "
                "of Megatron-Core, because the softmax over one expert has no gradient: set moe_router_pre_softmax "
                "(norm_topk_prob false in a config.json), or choose more experts"
            )
        if self.moe_router_enable_expert_bias and score != "sigmoid":
            yield (
                f"moe_router_enable_expert_bias is True with moe_router_score_function {score!r}, must have sigmoid by "
                "a rule of Megatron-Core: correct one of them"
            )
        if self.glu_linear_offset and not self.quick_geglu:
            yield (
                f"glu_linear_offset is {self.glu_linear_offset:g} without quick_geglu, must be 0 there, since "
                "Megatron-Core's fused SwiGLU adds none: set quick_geglu"
            )
        if self.activation_func_clamp_value is not None and not self.quick_geglu:
            yield (
                f"activation_func_clamp_value is {self.activation_func_clamp_value:g} without quick_geglu, must be "
                "left out there, since Megatron-Core's fused SwiGLU clamps nothing: set quick_geglu"
            )
        if self.add_bias_linear and self.moe_shared_expert_intermediate_size:
            yield (
                "add_bias_linear is True with moe_shared_expert_intermediate_size, must be False there by a rule of "
                "Megatron-Core: correct one of them"
            )
        if self.add_bias_linear and self.moe_latent_size:
            yield (
                "add_bias_linear is True with moe_latent_size, must be False there, since memlab has no biases of what "
                "leads to experts: correct one of them"
            )
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            yield (
                "moe_shared_expert_gate is True without moe_shared_expert_intermediate_size, must be left out there: "
                "correct one of them"
            )

    def _broken_rules_of_groups(self) -> Iterator[str]:
        groups, of_groups = self.moe_router_num_groups, self.moe_router_group_topk
        if of_groups is None and (groups is None or is_whole_number(groups, at_least=1)):
            return  # Megatron's router reads the number of groups only where it chooses some of them
        if not (is_whole_number(groups, at_least=1) and is_whole_number(of_groups, at_least=1)):
            yield (
                f"moe_router_num_groups is {shortened(groups)} and moe_router_group_topk {shortened(of_groups)}, must "
                "be whole numbers of at least 1, or left out, the latter alone or both: correct them"
            )
        elif self.num_moe_experts % (groups or 1):
            yield (
                f"moe_router_num_groups is {groups}, must divide the {self.num_moe_experts} experts by a rule of "
                "Megatron-Core: correct it"
            )
        elif self._takes_too_many_of_a_group():
            yield (
                f"moe_router_group_topk is {of_groups}, must be from 1 to {min(groups or 1, self.moe_router_topk)} of "
                f"{groups} groups, which must hold {self.moe_router_topk} experts: correct it"
            )

    def _takes_too_many_of_a_group(self) -> bool:
        """Whether ``group_limited_topk`` (``moe_utils.py``) finds too few groups or experts."""
        groups, of_groups = self.moe_router_num_groups or 1, self.moe_router_group_topk or 1
        of_a_group = self.num_moe_experts // groups
        too_many = of_groups > min(groups, self.moe_router_topk) or self.moe_router_topk // of_groups > of_a_group
        return too_many or self.moe_router_topk > of_groups * of_a_group

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads router and experts; transformers writes the second name for their number since 5.1 (Qwen3-MoE)."""
        has_own_width = kind.experts == "own width"
        return {
            "num_moe_experts": config.whole_of_either("num_experts", "num_local_experts", "n_routed_experts"),
            "moe_router_topk": config.whole("num_experts_per_tok"),
            "moe_ffn_hidden_size": config.whole("moe_intermediate_size" if has_own_width else "intermediate_size"),
            "moe_aux_loss_coeff": config.number_of_either("router_aux_loss_coef", "aux_loss_alpha", default=0.001),
            # Mixtral and Qwen3.5 have no such field, and always normalise.
            "moe_router_pre_softmax": not config.flag("norm_topk_prob", default=kind.normalizes_topk),
            "moe_layer_freq": _pattern_of_config(config, kind),
            **(_clamped_gate_of_config(config) if kind.has_sinks else {}),
            **_router_of_config(config, kind),
            **_shared_experts_of_config(config, kind),
        }

    @property
    def sent_size(self) -> int:
        """Columns of a token as it is sent to experts."""
        return self.moe_latent_size or self.hidden_size

    @property
    def _rows(self) -> int:
        """Rows of an expert's first matrix for each column of its second one."""
        return 2 if self.gated_linear_unit else 1

    def weights(self) -> tuple[Weight, ...]:
        hidden, width, count = self.hidden_size, self.moe_ffn_hidden_size, self.num_moe_experts
        return (
            *norm_weights("pre_mlp_layernorm.", hidden, self.normalization),
            Weight("mlp.router.weight", (count, hidden)),
            *self._latent_weights(),
            Weight("mlp.experts.linear_fc1.weight", (self._rows * width, self.sent_size), split=0, num_experts=count),
            Weight("mlp.experts.linear_fc2.weight", (self.sent_size, width), split=1, num_experts=count),
            *(self._biases() if self.add_bias_linear else ()),
            *self._shared_weights(),
        )

    def _biases(self) -> tuple[Weight, ...]:
        return (
            Weight("mlp.router.bias", (self.num_moe_experts,)),
            Weight("mlp.experts.linear_fc1.bias", (self._rows * self.moe_ffn_hidden_size,), 0, self.num_moe_experts),
            Weight("mlp.experts.linear_fc2.bias", (self.hidden_size,), None, self.num_moe_experts),
        )

    def _latent_weights(self) -> tuple[Weight, ...]:
        """Each rank has the whole of both (``moe_layer.py``)."""
        hidden, latent = self.hidden_size, self.moe_latent_size
        if latent is None:
            return ()
        return (
            Weight("mlp.fc1_latent_proj.weight", (latent, hidden)),
            Weight("mlp.fc2_latent_proj.weight", (hidden, latent)),
        )

    def _shared_weights(self) -> list[Weight]:
        hidden, width = self.hidden_size, self.moe_shared_expert_intermediate_size
        if width is None:
            return []
        gates = [Weight("mlp.shared_experts.gate_weight", (1, hidden))] if self.moe_shared_expert_gate else []
        return [
            *gates,
            Weight("mlp.shared_experts.linear_fc1.weight", (self._rows * width, hidden), split=0),
            Weight("mlp.shared_experts.linear_fc2.weight", (hidden, width), split=1),
        ]

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the number of experts, and the width of each, which different ranks share."""
        return (
            SharedSize("num_moe_experts", "experts", self.num_moe_experts, "expert_model_parallel_size"),
            SharedSize(
                "moe_ffn_hidden_size", "columns of an expert", self.moe_ffn_hidden_size, "expert_tensor_parallel_size"
            ),
            *self._shared_width(),
        )

    def _shared_width(self) -> list[SharedSize]:
        field, width = "moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size
        if width is None:
            return []
        return [SharedSize(field, "columns of shared experts", width, "tensor_model_parallel_size")]

    @property
    def largest_row(self) -> int:
        """The most elements that one token has in any activation: as rows of its experts, or in shared experts."""
        of_rows = self.moe_router_topk * max(self.moe_ffn_hidden_size, self.sent_size)
        return max(of_rows, self.moe_shared_expert_intermediate_size or 0, self.hidden_size)

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of the router, of shared experts, and of the experts that one token passes through."""
        of_experts = 2.0 * (1 + self._rows) * self.sent_size * self.moe_router_topk * self.moe_ffn_hidden_size
        beside = sum(2.0 * weight.num_elements for weight in self._latent_weights())
        return of_experts + beside + 2.0 * self.hidden_size * self.num_moe_experts + self._operations_of_shared()

    def _operations_of_shared(self) -> float:
        return sum(2.0 * weight.num_elements for weight in self._shared_weights())

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs of the whole part, of the activation function, and of the norm, a module of its own."""
        of_activation = 6.0 * self.moe_router_topk * self.moe_ffn_hidden_size
        return {
            "moe": self.operations(attended),
            "moe_act": of_activation,
            "shared_experts": self._operations_of_shared(),
            "layernorm": 4.0 * self.hidden_size,
        }

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of input, norm, routing, the experts' rows, and what the dispatcher refers to."""
        hidden, width = self.hidden_size, self.moe_ffn_hidden_size
        experts, chosen = self.num_moe_experts, self.moe_router_topk
        if recompute == "full":
            return (13 * experts + 4) * tokens + 8 * experts
        of_rows = (2 * self.sent_size + 6 * width + 24) * chosen + 2 * (self.moe_latent_size or 0)
        of_norm = norm_kept_bytes(self.normalization)
        return (4 * hidden + 4 + of_norm + of_rows + 17 * experts) * tokens + 16 * experts + 4


def _router_of_config(config: ConfigJson, kind: ModelType) -> dict[str, Any]:
    """Returns how a router of DeepSeek's kind chooses (``DeepseekV3TopkRouter`` in transformers 5.24)."""
    method = config.values.get("topk_method") or kind.topk_method
    score = config.values.get("scoring_func") or kind.scoring_func
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(
            f"topk_method {shortened(method)} is not modelled: memlab has greedy, group_limited_greedy, noaux_tc"
        )
    factor = config.number("routed_scaling_factor", default=kind.routed_scaling_factor)
    read: dict[str, Any] = {
        "moe_router_score_function": score,
        "moe_router_enable_expert_bias": method == "noaux_tc" or kind.expert_bias,
        "moe_router_topk_scaling_factor": factor if factor != 1 else None,
    }
    if method in ("group_limited_greedy", "noaux_tc"):
        read["moe_router_num_groups"] = config.whole("n_group", default=kind.n_group)
        read["moe_router_group_topk"] = config.whole("topk_group", default=kind.topk_group)
    return read


def _shared_experts_of_config(config: ConfigJson, kind: ModelType) -> dict[str, Any]:
    """Returns the width of all shared experts together, and whether they have a gate, as Qwen's have."""
    if kind.shared_expert_gate:  # left out, transformers takes 5632 (5.24), whatever the model's other sizes are
        width = config.whole("shared_expert_intermediate_size")
    elif config.values.get("n_shared_experts", kind.n_shared_experts):
        number = config.whole("n_shared_experts", default=kind.n_shared_experts or None)
        width = number * config.whole("moe_intermediate_size")
    else:
        return {}
    return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": kind.shared_expert_gate}


def _clamped_gate_of_config(config: ConfigJson) -> dict[str, Any]:
    """Returns the gate of gpt-oss (``GptOssExperts`` in transformers 5.24), trained without an auxiliary loss."""
    slope = config.number("swiglu_alpha", default=1.702)
    if slope != 1.702:
        raise ValueError(f"swiglu_alpha {slope:g} is not modelled: memlab has Megatron-Core's, 1.702")
    return {
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.number("swiglu_limit", default=7.0),
        "moe_aux_loss_coeff": 0.0,
    }


def _pattern_of_config(config: ConfigJson, kind: ModelType) -> tuple[int, ...] | None:
    """Returns which layers have experts.

    After ``Glm4MoeLiteConfig``, ``Qwen3MoeDecoderLayer`` and ``DeepseekV3DecoderLayer`` in transformers 5.24.
    """
    listed = config.values.get("mlp_layer_types")  # of glm4_moe_lite
    if listed is not None:
        if not isinstance(listed, list) or not {*map(str, listed)} <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types is {shortened(listed)}, must be a list of dense and sparse: correct it")
        return tuple(int(kind == "sparse") for kind in listed)
    every, dense = config.whole("decoder_sparse_step", default=1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_whole_number(layer, at_least=0) for layer in dense):
        raise ValueError(f"mlp_only_layers is {shortened(dense)}, must be a list of numbers of layers: correct it")
    first_dense = config.values.get("first_k_dense_replace", kind.first_k_dense_replace) or 0
    if not is_whole_number(first_dense, at_least=0):
        raise ValueError(f"first_k_dense_replace is {shortened(first_dense)}, must be a number of layers: correct it")
    frequency = config.values.get("moe_layer_freq", 1)
    if frequency not in (1, None):
        raise ValueError(f"moe_layer_freq {shortened(frequency)} is not modelled: memlab has 1 only")
    if every == 1 and not dense and not first_dense:
        return None
    num_layers = config.whole("num_hidden_layers")
    check_whole_number("num_hidden_layers", num_layers, at_most=MOST_LAYERS, action="correct it")
    return tuple(
        int((layer + 1) % every == 0 and layer not in dense and layer >= first_dense) for layer in range(num_layers)
    )
