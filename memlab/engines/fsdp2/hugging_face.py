"""The model of transformers that an architecture describes: its config and its class."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.config.scenario import Scenario
from memlab.engines.fsdp2 import attention as attentions
from memlab.engines.fsdp2.vision import build_with_tower, freeze


def check_installed() -> None:
    """Checks that transformers is there, and that its models can be imported.

    With pillow and torchvision installed, transformers 5.24 imports torchvision for text models too, and a torchvision
    that was built for another torch fails (Colab, after pip has replaced its torch).

    Raises:
        ValueError: If not.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "engine is 'fsdp2', which needs the package transformers, and it is not installed here: pip install "
            "'memlab[fsdp2]', or choose engine 'megatron'"
        )
    try:
        from transformers import AttentionInterface  # noqa: F401
    except (ImportError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(
            f"engine is 'fsdp2', and the models of the package transformers do not import here ({cause}): take the "
            f"torchvision of torch {torch.__version__} or uninstall it, or pip install 'memlab[fsdp2]'"
        ) from error


def config_of(architecture: Architecture, num_layers: int, longest_sequence: int) -> Any:
    """Returns transformers' config of an architecture's first layers."""
    from transformers import AutoConfig

    sizes, family = architecture, FAMILIES[architecture.family]
    channels = {"head_dim": sizes.kv_channels} if family.names_head_dim else {}
    experts = {}
    if sizes.routes:
        experts = {
            "num_experts": sizes.num_moe_experts,
            "num_experts_per_tok": sizes.moe_router_topk,
            "moe_intermediate_size": sizes.moe_ffn_hidden_size,
            "norm_topk_prob": not sizes.moe_router_pre_softmax,
        }
    if sizes.moe_router_num_groups:
        experts = _of_grouped_experts(sizes)
    if sizes.multi_latent_attention:
        channels = {}
        experts = _of_latent_attention(sizes) | _of_grouped_experts(sizes)
    if family.experts == "width of the MLP":
        experts = {"num_local_experts": sizes.num_moe_experts, "num_experts_per_tok": sizes.moe_router_topk}
    window: dict[str, Any] = {}
    if family.has_window:
        window = {"sliding_window": None if sizes.window_size is None else sizes.window_size[0] + 1}
    if family.has_sinks:
        assert sizes.window_size is not None, "gpt-oss's config.json has it"
        # transformers' own pattern: every second layer has no window.
        window = {"sliding_window": sizes.window_size[0] + 1, "swiglu_limit": sizes.activation_func_clamp_value}
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": sizes.rotary_base,
        "partial_rotary_factor": sizes.rotary_percent,
    }
    if family.window_pattern:
        pattern, tokens = sizes.window_attn_skip_freq, sizes.window_size
        assert isinstance(pattern, tuple) and tokens is not None, "Gemma's config.json has both"
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
        window = {"sliding_window": tokens[0] + 1, "layer_types": kinds[:num_layers]}
    if family.window_rotary_base is not None:  # the base of layers with windows is transformers' default
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    switches = {family.qk_norm_field: sizes.qk_layernorm}
    if not sizes.add_bias_linear:
        switches[family.qkv_bias_field] = sizes.add_qkv_bias
    return AutoConfig.for_model(
        sizes.family,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
        max_position_embeddings=longest_sequence,
        **{family.epsilon: sizes.layernorm_epsilon},
        tie_word_embeddings=sizes.share_embeddings_and_output_weights,
        rope_parameters=rope,
        # Torch's and flash-attn's kernels keep as much with dropout, and those of a CPU have none.
        **{**family.dropout, "attention_dropout": 0.0},
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **channels,
        **window,
        **experts,
        **{name: value for name, value in switches.items() if name},
    )


def _of_latent_attention(sizes: Architecture) -> dict[str, Any]:
    return {
        "q_lora_rank": sizes.q_lora_rank,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_head_dim,
        "qk_rope_head_dim": sizes.qk_pos_emb_head_dim,
        "v_head_dim": sizes.v_head_dim,
    }


def _of_grouped_experts(sizes: Architecture) -> dict[str, Any]:
    return {
        "n_routed_experts": sizes.num_moe_experts,
        "num_experts_per_tok": sizes.moe_router_topk,
        "moe_intermediate_size": sizes.moe_ffn_hidden_size,
        "n_shared_experts": (sizes.moe_shared_expert_intermediate_size or 0) // sizes.moe_ffn_hidden_size,
        "first_k_dense_replace": (sizes.moe_layer_freq or (1,)).index(1),
        "n_group": sizes.moe_router_num_groups,
        "topk_group": sizes.moe_router_group_topk,
        "norm_topk_prob": not sizes.moe_router_pre_softmax,
        "routed_scaling_factor": sizes.moe_router_topk_scaling_factor or 1.0,
    }


def build_model(scenario: Scenario, dtype: torch.dtype, *, attention: str) -> Any:
    """Returns transformers' own model of a scenario, in training mode, on torch's default device.

    Raises:
        ValueError: If the architecture has parts that transformers' model of its family does not have.
    """
    from transformers import AutoModelForCausalLM

    attentions.register()
    config, tower = config_of(scenario.architecture, scenario.num_layers, scenario.seq_length), scenario.vision_tower
    expected = scenario.architecture.with_layers(scenario.num_layers).num_parameters
    if tower is None:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    else:
        model = build_with_tower(tower, config, dtype, attention)
        expected += tower.num_parameters + tower.num_parameters_of_projector
    built = model.num_parameters()
    if built != expected:
        raise ValueError(
            f"{scenario.architecture.name} has {expected:,} parameters, and transformers' {type(model).__name__} of "
            f"these sizes has {built:,}, so it is another model: choose a model as published, or engine 'megatron'"
        )
    attentions.note_sequences(model, attention)
    if tower is not None and scenario.state.freeze_vision_tower:
        freeze(model)
    return model.train()
