"""What Megatron-Bridge's providers add to Megatron-Core's names, for the frameworks that build models by them.

Names and defaults: ``src/megatron/bridge/models/gpt_provider.py`` and ``models/qwen/`` (0.6.2).
"""

from __future__ import annotations

from typing import Any

from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.families import Family
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import Missing, is_false, is_given
from memlab.jobs.frameworks.megatron_keys import ARCHITECTURE, COMPUTE, OTHER_LOGITS, SIZES
from memlab.jobs.frameworks.without_effect import keys_without_effect
from memlab.jobs.other_models import other_model

PROVIDER_DEFAULTS = {"gradient_accumulation_fusion": True, "moe_permute_fusion": True}
"""Every provider fuses the accumulation of gradients wherever Transformer Engine imports (``utils/fusions.py``), and
those of models with experts the permutation of tokens (``models/qwen/qwen3_moe_bridge.py`` and others)."""
_CORE = {key.field: key.default for key in COMPUTE}
"""Megatron-Core's own defaults: a framework that has another one says it, and the provider does not replace it."""
_TRAINS_EXTRA_LAYERS: tuple[Family, ...] = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")
_OF_DEEPSEEK = {
    "bias_activation_fusion": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_dtype": "fp32",
}
_SET_BY_PROVIDER: dict[Family, dict[str, Any]] = {
    "llama": {"bias_activation_fusion": True, "apply_rope_fusion": True},
    "gpt_oss": {"bias_activation_fusion": True, "moe_router_load_balancing_type": "none"},
    "nemotron": {"apply_rope_fusion": True},
    "olmoe": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32"},
    "nemotron_h": {
        "attention_backend": "flash",
        "apply_rope_fusion": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_overlap": True,
    },
    "qwen3_next": {"moe_router_load_balancing_type": "global_aux_loss", "moe_router_dtype": "fp32"},
    "deepseek_v2": _OF_DEEPSEEK,
    **dict.fromkeys(_TRAINS_EXTRA_LAYERS, _OF_DEEPSEEK | {"moe_shared_expert_overlap": True}),
}
"""What the provider of a family sets otherwise than Megatron-Core (``models/llama/llama_bridge.py``,
``models/deepseek/deepseek_v3_bridge.py``, ``models/nemotronh/nemotron_h_bridge.py``, ``models/glm/glm45_bridge.py``,
``models/nemotron/nemotron_bridge.py``,
``models/olmoe/olmoe_bridge.py``, ``models/qwen/qwen3_next_bridge.py`` and ``models/gpt_oss/gpt_oss_bridge.py``); those
of other families set none of it."""
_DIVIDES_BY_ALL_TOKENS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose providers switch a loss per token on where ranks share a sequence (``finalize`` in
``models/qwen_vl/qwen3_vl_provider.py`` and ``qwen35_vl_provider.py``, 067f987d)."""
_EXTRA_LAYERS = {"deepseek-v3": 1, "glm-4.5": 1, "glm-4.5-air": 1, "glm-4.7-flash": 1}
"""Layers of multi-token prediction of published models (``num_nextn_predict_layers`` of their config.json), which
Megatron-Bridge itself trains by default (``CONFIG_MAPPING`` in ``models/conversion/model_bridge.py``); verl and SkyRL
switch them off."""


def complete_provider(reading: Reading, architecture: Architecture) -> None:
    """Takes what the provider of a family sets otherwise than Megatron-Core, where no key says it."""
    said = {one.field for one in reading.taken if one.place != "default" or one.memlab_value != _CORE.get(one.field)}
    other = other_model(architecture.name)
    if other is None:
        set_by_provider = _SET_BY_PROVIDER.get(architecture.family, {})
    else:
        is_text_alone = bool(reading.entries.get("trainer.policy.language_model_only"))  # of SkyRL
        set_by_provider = other.provider_of(architecture, is_text_alone=is_text_alone)
    reading.values.update({name: value for name, value in set_by_provider.items() if name not in said})
    shares_sequences = (reading.values.get("context_parallel_size") or 1) > 1
    if shares_sequences and other is not None and other.family in _DIVIDES_BY_ALL_TOKENS:
        reading.values["calculate_per_token_loss"] = True
    drop_fused_rope(reading, architecture)


def drop_fused_rope(reading: Reading, architecture: Architecture) -> None:
    """Takes the fused rotary embedding away where Megatron-Bridge switches it off or refuses it."""
    other = other_model(architecture.name)
    if other is None or not other.fuses_no_rope or not reading.values.get("apply_rope_fusion"):
        return
    reading.values["apply_rope_fusion"] = False
    reading.warnings.append(
        "apply_rope_fusion is on, and Megatron-Bridge switches it off or refuses it, since tokens of this model have "
        "positions of images: memlab predicts the job without it"
    )


def complete_trained_provider(reading: Reading, architecture: Architecture) -> None:
    """Takes `complete_provider`, and what decides where the model itself computes its loss."""
    complete_provider(reading, architecture)
    given = _given(reading)
    if "mtp_num_layers" not in given and architecture.name in _EXTRA_LAYERS:
        reading.take("model.mtp_num_layers", "mtp_num_layers", _EXTRA_LAYERS[architecture.name])
    may_have = architecture.family in _TRAINS_EXTRA_LAYERS and architecture.name not in ARCHITECTURES
    if "mtp_num_layers" not in given and may_have:
        reason = "the provider of this family trains the layers of multi-token prediction that config.json has"
        reading.miss("mtp_num_layers", "more", reason)
    if "cross_entropy_loss_fusion" not in given and architecture.family in _TRAINS_EXTRA_LAYERS:
        reason = "the provider of this family fuses the cross entropy, where the model computes it"
        reading.miss("cross_entropy_loss_fusion", "less", reason)


def _given(reading: Reading) -> set[str]:
    """Returns the last names of the keys that a job gives."""
    return {key.rpartition(".")[2] for key in reading.entries.by_key}


PROVIDER_MISSING = (
    *(
        Missing(key, "either", "layers of different shapes are another model", is_given, True)
        for key in ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    ),
    Missing("fp16_lm_cross_entropy", "less", "the loss reads the logits in bf16, without a copy in fp32"),
    OTHER_LOGITS,
    Missing("parallel_output", "more", "each tensor parallel rank gathers whole logits", is_false),
    Missing(
        "scatter_embedding_sequence_parallel", "more", "the embedding of whole sequences is on each rank", is_false
    ),
    Missing("use_transformer_engine_full_layer_spec", "either", "each layer is one of Transformer Engine's"),
    Missing("dense_grouped_gemm", "either", "the MLP's matrices are one group"),
    Missing("restore_modelopt_state", "either", "layers are those of ModelOpt"),
    Missing(
        "transformer_layer_spec",
        "either",
        "layers are of the job's own specification",
        lambda value: value not in (None, "default_layer_spec", "transformer_engine_layer_spec"),
    ),
)
"""A framework reads them under its own prefix, beside `MISSING`."""

_NUMBERS = ("rotary_base", "rotary_percent", "layernorm_epsilon")
_NUMBERS_OF_THE_MODEL = frozenset(
    (*_NUMBERS, "make_vocab_size_divisible_by", "should_pad_vocab", "hf_model_id", "seq_length")
)
"""What replaces a number of a published model and changes no tensor's size; rows are as long as the job's data."""


def model_without_effect(prefix: str) -> frozenset[str]:
    """Returns the keys of Megatron-Core's model that change no memory, where a framework passes them on under a prefix.

    The sizes are those of the published model.
    """
    return keys_without_effect("megatron_core_model", prefix) | {f"{prefix}.{key}" for key in _NUMBERS_OF_THE_MODEL}


REPLACED = (
    *(
        Missing(key.name, "either", "it replaces a size of the published model", is_given, blocks=True)
        for key in ARCHITECTURE
        if key.name not in (*_NUMBERS, "num_layers")
    ),
    *(
        Missing(key.name, "either", "it replaces a size that the framework has a key of its own for", is_given)
        for key in SIZES
    ),
    Missing("sequence_parallel", "more", "norms and residuals keep whole sequences per rank", is_false),
    Missing("bf16", "either", "memlab takes the parameters' type from the framework's own key", is_false),
)
"""What a job replaces of a published model, and of what the framework sets by itself."""
