"""The families of models, a row each: what their ``config.json`` leaves out, and which classes frameworks have of them.

The values of a ``config.json`` are those of transformers 5.24, ``models/*/configuration_*.py`` and ``modeling_*.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memlab.config.config_json import ModelType

Family = Literal[
    "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "granite",
    "olmo2", "glm", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "gpt_oss", "qwen2_moe", "glm4_moe",
    "minimax_m2", "olmoe", "nemotron", "nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt2",
]  # fmt: skip
"""The ``model_type`` of the model's config.json. A model of which only the sizes are known counts as qwen3_moe if it
has experts, as gpt2 if its positions are learned, else as phi3: the layers of the others have the same parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """What memlab has of a family."""

    config: ModelType | None
    """What its ``config.json`` leaves out; None has no such file."""
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
    lacks_of_automodel: str = ""
    """What memlab does not have of NeMo Automodel's class, so that it does not have the class; empty otherwise."""
    norms_of_transformers: bool = False
    """Whether that class has transformers' norms, and not NeMo Automodel's own."""
    fused_linears: tuple[str, ...] = ()
    """Names of linears in transformers' class that others have two or three of."""
    scales_embedding: bool = False
    """Whether a factor scales what the embedding returns."""
    has_soft_caps: bool = False
    """Whether scores have a soft cap, for which transformers refuses sdpa."""


_DELTA_NET: dict[str, Any] = {"qk_layernorm": True, "rotary_percent": 0.25, "has_delta_net": True}
_LATENT: dict[str, Any] = {"experts": "own width", "qk_layernorm": True, "multi_latent_attention": True}
_NO_AUX: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, **_NO_AUX}
_DEEPSEEK_V3 = ModelType(
    first_k_dense_replace=3,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    **_LATENT,
    **_NO_AUX,
)

FAMILIES: dict[Family, FamilyRow] = {
    "llama": FamilyRow(config=ModelType(), fsdp2=True, fsdp2_divides=True, automodel=True),
    "mistral": FamilyRow(
        config=ModelType(num_key_value_heads=8, has_window=True, window=4096), fsdp2=True, fsdp2_divides=True
    ),
    "phi3": FamilyRow(
        config=ModelType(has_window=True), fsdp2=True, fsdp2_divides=True, fused_linears=("qkv_proj", "gate_up_proj")
    ),
    "qwen2": FamilyRow(
        config=ModelType(num_key_value_heads=32, add_qkv_bias=True, uses_window=False),
        fsdp2=True,
        fsdp2_divides=True,
        automodel=True,
    ),
    "qwen3": FamilyRow(
        config=ModelType(num_key_value_heads=32, head_dim=128, qk_layernorm=True, uses_window=False),
        fsdp2=True,
        fsdp2_divides=True,
        automodel=True,
        norms_of_transformers=True,
    ),
    "qwen3_moe": FamilyRow(
        config=ModelType(
            num_key_value_heads=4, qk_layernorm=True, uses_window=False, experts="own width", normalizes_topk=False
        ),
        fsdp2=True,
        automodel=True,
    ),
    "mixtral": FamilyRow(
        config=ModelType(num_key_value_heads=8, experts="width of the MLP"), rotary_base=1e6, fsdp2=True
    ),
    "gemma": FamilyRow(
        config=ModelType(num_key_value_heads=16, head_dim=256, is_gemma=True),
        only_in_transformers="GELU gates",
        fsdp2=True,
        scales_embedding=True,
    ),
    "gemma2": FamilyRow(
        config=ModelType(num_key_value_heads=4, head_dim=256, is_gemma=True, window_pattern=2, soft_caps=(50.0, 30.0)),
        only_in_transformers="norms behind attention and MLP",
        sandwich_norms=True,
        fsdp2=True,
        scales_embedding=True,
        has_soft_caps=True,
    ),
    "gemma3_text": FamilyRow(
        config=ModelType(num_key_value_heads=4, head_dim=256, is_gemma=True, qk_layernorm=True, window_pattern=6),
        rotary_base=1e6,
        only_in_transformers="norms behind attention and MLP",
        sandwich_norms=True,
        fsdp2=True,
        scales_embedding=True,
    ),
    "granite": FamilyRow(config=ModelType(), only_in_transformers="multipliers", fsdp2=True, scales_embedding=True),
    "olmo2": FamilyRow(
        config=ModelType(qk_layernorm=True, norms_all_heads=True),
        only_in_transformers="norms behind attention and MLP alone",
        fsdp2=True,
    ),
    "glm": FamilyRow(
        config=ModelType(
            num_key_value_heads=2, head_dim=128, qkv_bias_field="attention_bias", has_qkv_bias=True, rotary_percent=0.5
        ),
        only_in_transformers="pairs of neighbours in the rotary embedding",
        fsdp2=True,
        fused_linears=("gate_up_proj",),
    ),
    "deepseek_v2": FamilyRow(config=ModelType(n_shared_experts=2, normalizes_topk=False, **_LATENT)),
    "deepseek_v3": FamilyRow(config=_DEEPSEEK_V3, shorter_last_stage=True, automodel=True),
    "kimi_k2": FamilyRow(config=_DEEPSEEK_V3, shorter_last_stage=True),
    "glm4_moe_lite": FamilyRow(
        config=ModelType(first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=1.8, **_LATENT, **_GROUPS),
        lacks_of_automodel="weights of a router after the experts",
    ),
    "gpt_oss": FamilyRow(
        config=ModelType(
            num_key_value_heads=8,
            head_dim=64,
            qkv_bias_field="attention_bias",
            experts="width of the MLP",
            has_sinks=True,
        ),
        rotary_base=150000.0,
        automodel=True,
    ),
    "qwen2_moe": FamilyRow(
        config=ModelType(
            num_key_value_heads=16,
            add_qkv_bias=True,
            uses_window=False,
            experts="own width",
            shared_expert_gate=True,
            normalizes_topk=False,
        )
    ),
    "glm4_moe": FamilyRow(
        config=ModelType(
            num_key_value_heads=8,
            qkv_bias_field="attention_bias",
            qk_norm_field="use_qk_norm",
            rotary_percent=0.5,
            experts="own width",
            first_k_dense_replace=1,
            n_shared_experts=1,
            **_GROUPS,
        )
    ),
    "minimax_m2": FamilyRow(
        config=ModelType(
            num_key_value_heads=8,
            head_dim=128,
            qk_layernorm=True,
            norms_all_heads=True,
            experts="width of the MLP",
            expert_bias=True,
            scoring_func="sigmoid",
        ),
        rotary_base=5e6,
    ),
    "olmoe": FamilyRow(
        config=ModelType(
            qk_layernorm=True,
            norms_all_heads=True,
            norms_all_heads_fused=True,
            experts="width of the MLP",
            normalizes_topk=False,
        )
    ),
    "nemotron": FamilyRow(config=ModelType(rotary_percent=0.5, has_squared_relu=True)),
    "nemotron_h": FamilyRow(
        config=ModelType(num_key_value_heads=8, head_dim=128, experts="own width", is_hybrid=True, **_GROUPS)
    ),
    "qwen3_next": FamilyRow(
        config=ModelType(
            num_key_value_heads=2, head_dim=256, experts="own width", shared_expert_gate=True, **_DELTA_NET
        )
    ),
    "qwen3_5_text": FamilyRow(config=ModelType(num_key_value_heads=4, head_dim=256, **_DELTA_NET)),
    "qwen3_5_moe_text": FamilyRow(
        config=ModelType(
            num_key_value_heads=2, head_dim=256, experts="own width", shared_expert_gate=True, **_DELTA_NET
        )
    ),
    "gpt2": FamilyRow(config=None),
}


def families_with(name: str) -> list[Family]:
    """Returns the families whose row says yes to a field of `FamilyRow`."""
    return [family for family, row in FAMILIES.items() if getattr(row, name)]
