"""The families of models, a row each: what their ``config.json`` leaves out, and which classes frameworks have of them.

The values of a ``config.json`` are those of transformers 5.24, ``models/*/configuration_*.py`` and ``modeling_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memlab.config.config_json import ModelType

Family = Literal[
    "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "granite",
    "olmo2", "glm", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "gpt_oss", "qwen2_moe", "glm4_moe",
    "minimax_m2", "olmoe", "nemotron", "nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt2",
    "cohere2", "phi", "seed_oss",
]  # fmt: skip
"""The ``model_type`` of the model's config.json. A model of which only the sizes are known counts as qwen3_moe if it
has experts, as gpt2 if its positions are learned, else as phi3: the layers of the others have the same parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow(ModelType):
    """What memlab has of a family."""

    has_config: bool = True
    """Whether there is a ``config.json`` of it."""
    rotary_base: float = 10000.0
    """Where the file gives none."""
    only_in_transformers: str = ""
    """What memlab has in transformers' model only, and not in Megatron's; empty if nothing."""
    sandwich_norms: bool = False
    """Whether attention and MLP have a norm behind them too."""
    shorter_last_stage: bool = False
    """Whether Megatron-Bridge's recipe gives the last pipeline stage fewer layers, where stages do not divide them."""
    fsdp2: bool = False
    """Whether the engine fsdp2 builds transformers' classes."""
    fsdp2_divides: bool = False
    """Whether it divides them over tensor parallel ranks."""
    automodel: bool = False
    """Whether NeMo Automodel has a class of its own (``_transformers/registry.py``), and memlab this class."""
    weighs_after: bool = False
    """Whether that class multiplies what experts return by the router's weights, and not their activation, and has a
    router in the type of its tokens."""
    norms_of_transformers: bool = False
    """Whether that class has transformers' norms, and not NeMo Automodel's own."""
    returns_whole_norms: bool = False
    """Whether NeMo Automodel's plan for it takes plain tensors from the norms of layers whose sequences are divided."""
    fused_linears: tuple[str, ...] = ()
    """Names of linears in transformers' class that others have two or three of."""
    scales_embedding: bool = False
    """Whether a factor scales what the embedding returns."""
    shares_norm: bool = False
    """Whether attention and MLP of a layer take what one norm returns, side by side."""
    names_head_dim: bool = True
    """Whether transformers' config of it has a field for the channels of a head."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    linears_of_expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's linears that PEFT 0.21.2 adapts, of which the first two share a parameter in transformers;
    empty where it leaves experts out, also with ``all-linear``."""
    own_linears: Mapping[str, str] = field(default_factory=dict)
    """Names of linears in transformers' class, by those that most families have."""


_DELTA_NET: dict[str, Any] = {"qk_layernorm": True, "rotary_percent": 0.25, "has_delta_net": True}
_OWN_EXPERTS: dict[str, Any] = {"experts": "own width", "shared_expert_gate": True}
_LATENT: dict[str, Any] = {"experts": "own width", "qk_layernorm": True, "multi_latent_attention": True}
_NO_AUX: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, **_NO_AUX}
_DEEPSEEK_V3: dict[str, Any] = {
    "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "shorter_last_stage": True, **_LATENT, **_NO_AUX,
}  # fmt: skip
_DIVIDED: dict[str, Any] = {"fsdp2": True, "fsdp2_divides": True}
_GEMMA: dict[str, Any] = {"head_dim": 256, "is_gemma": True, "ties_embeddings": True, "fsdp2": True,
                          "scales_embedding": True}  # fmt: skip
_SANDWICH = _GEMMA | {"num_key_value_heads": 4, "only_in_transformers": "norms behind attention and MLP",
                      "sandwich_norms": True}  # fmt: skip

FAMILIES: dict[Family, FamilyRow] = {
    "llama": FamilyRow(automodel=True, **_DIVIDED),
    "mistral": FamilyRow(num_key_value_heads=8, has_window=True, window=4096, **_DIVIDED),
    "phi3": FamilyRow(has_window=True, fused_linears=("qkv_proj", "gate_up_proj"), names_head_dim=False,
                      **_DIVIDED),
    "qwen2": FamilyRow(num_key_value_heads=32, add_qkv_bias=True, uses_window=False, automodel=True,
                       returns_whole_norms=True, names_head_dim=False, **_DIVIDED),
    "qwen3": FamilyRow(num_key_value_heads=32, head_dim=128, qk_layernorm=True, uses_window=False, automodel=True,
                       returns_whole_norms=True, norms_of_transformers=True, **_DIVIDED),
    "qwen3_moe": FamilyRow(num_key_value_heads=4, qk_layernorm=True, uses_window=False, experts="own width",
                           normalizes_topk=False, fsdp2=True, automodel=True),
    "mixtral": FamilyRow(num_key_value_heads=8, experts="width of the MLP", rotary_base=1e6, fsdp2=True,
                         linears_of_expert=("w1", "w3", "w2")),
    "gemma": FamilyRow(num_key_value_heads=16, only_in_transformers="GELU gates", **_GEMMA),
    "gemma2": FamilyRow(window_pattern=2, soft_caps=(50.0, 30.0), **_SANDWICH),
    "gemma3_text": FamilyRow(qk_layernorm=True, window_pattern=6, rotary_base=1e6, window_rotary_base=10000.0,
                             **_SANDWICH),
    "granite": FamilyRow(only_in_transformers="multipliers", fsdp2=True, scales_embedding=True),
    "olmo2": FamilyRow(qk_layernorm=True, norms_all_heads=True, fsdp2=True,
                       only_in_transformers="norms behind attention and MLP alone"),
    "glm": FamilyRow(num_key_value_heads=2, head_dim=128, qkv_bias_field="attention_bias", has_qkv_bias=True,
                     rotary_percent=0.5, fsdp2=True, fused_linears=("gate_up_proj",),
                     only_in_transformers="pairs of neighbours in the rotary embedding"),
    "deepseek_v2": FamilyRow(n_shared_experts=2, normalizes_topk=False, **_LATENT),
    "deepseek_v3": FamilyRow(automodel=True, **_DEEPSEEK_V3),
    "kimi_k2": FamilyRow(**_DEEPSEEK_V3),
    "glm4_moe_lite": FamilyRow(first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=1.8,
                               automodel=True, weighs_after=True, **_LATENT, **_GROUPS),
    "gpt_oss": FamilyRow(num_key_value_heads=8, head_dim=64, qkv_bias_field="attention_bias", has_sinks=True,
                         experts="width of the MLP", rotary_base=150000.0, automodel=True,
                         linears_of_expert=()),
    "qwen2_moe": FamilyRow(num_key_value_heads=16, add_qkv_bias=True, uses_window=False, normalizes_topk=False,
                           linears_of_expert=(), **_OWN_EXPERTS),
    "glm4_moe": FamilyRow(num_key_value_heads=8, qkv_bias_field="attention_bias", qk_norm_field="use_qk_norm",
                          rotary_percent=0.5, experts="own width", first_k_dense_replace=1, n_shared_experts=1,
                          automodel=True, weighs_after=True, **_GROUPS),
    "minimax_m2": FamilyRow(num_key_value_heads=8, head_dim=128, qk_layernorm=True, norms_all_heads=True,
                            experts="width of the MLP", expert_bias=True, scoring_func="sigmoid", rotary_base=5e6,
                            linears_of_expert=("w1", "w3", "w2")),
    "olmoe": FamilyRow(qk_layernorm=True, norms_all_heads=True, norms_all_heads_fused=True, normalizes_topk=False,
                       experts="width of the MLP"),
    "nemotron": FamilyRow(rotary_percent=0.5, has_squared_relu=True),
    "nemotron_h": FamilyRow(num_key_value_heads=8, head_dim=128, experts="own width", is_hybrid=True, **_GROUPS),
    "qwen3_next": FamilyRow(num_key_value_heads=2, head_dim=256, **_OWN_EXPERTS, **_DELTA_NET),
    "qwen3_5_text": FamilyRow(num_key_value_heads=4, head_dim=256, **_DELTA_NET),
    "qwen3_5_moe_text": FamilyRow(num_key_value_heads=2, head_dim=256, linears_of_expert=(), **_OWN_EXPERTS,
                                  **_DELTA_NET),
    "gpt2": FamilyRow(has_config=False),
    "cohere2": FamilyRow(epsilon="layer_norm_eps", window_pattern=4, shares_norm=True, fsdp2=True, ties_embeddings=True,
                         only_in_transformers="attention and MLP side by side"),
    "phi": FamilyRow(epsilon="layer_norm_eps", rotary_percent=0.5, has_gelu=True, dropout={"resid_pdrop": 0.1},
                     shares_norm=True, output_bias=True, fsdp2=True,
                     own_linears={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"},
                     only_in_transformers="attention and MLP side by side"),
    "seed_oss": FamilyRow(num_key_value_heads=8, head_dim=128, qkv_bias_field="attention_bias", has_qkv_bias=True,
                          dropout={"attention_dropout": 0.1, "residual_dropout": 0.1}, fsdp2=True,
                          only_in_transformers="dropout that the config.json gives"),
}  # fmt: skip


def families_with(name: str) -> list[Family]:
    """Returns the families whose row says yes to a field of `FamilyRow`."""
    return [family for family, row in FAMILIES.items() if getattr(row, name)]
