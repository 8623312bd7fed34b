"""Megatron's TransformerConfig of a Scenario, and the fields of it that are memory settings.

Written against megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformer_config(scenario: Scenario, settings: MemorySettings) -> TransformerConfig:
    """Returns Megatron's config, which checks the settings by Megatron's own rules too."""
    architecture = scenario.architecture
    dtype = _DTYPES[scenario.dtype]
    moe: dict[str, Any] = {}
    if architecture.is_moe:
        moe = {
            "num_moe_experts": architecture.num_moe_experts,
            "moe_router_topk": architecture.moe_router_topk,
            "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
            "moe_aux_loss_coeff": architecture.moe_aux_loss_coeff,
            "moe_router_pre_softmax": architecture.moe_router_pre_softmax,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
        }
    return TransformerConfig(
        num_layers=scenario.num_layers,
        tensor_model_parallel_size=scenario.layout.tensor_model_parallel_size,
        context_parallel_size=scenario.layout.context_parallel_size,
        pipeline_model_parallel_size=scenario.layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=interleaved_chunks(scenario.layout),
        # Two stages would exchange several tensors with each other in one batch (megatron/training/arguments.py).
        overlap_p2p_comm=interleaved_chunks(scenario.layout) is not None,
        batch_p2p_comm=interleaved_chunks(scenario.layout) is None,
        num_layers_in_first_pipeline_stage=scenario.layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=scenario.layout.num_layers_in_last_pipeline_stage,
        expert_model_parallel_size=scenario.layout.expert_model_parallel_size,
        expert_tensor_parallel_size=scenario.layout.expert_tensor_size,
        sequence_parallel=scenario.layout.sequence_parallel,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.layernorm_epsilon,
        qk_layernorm=architecture.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=scenario.dtype == "bf16",
        use_cpu_initialization=False,
        finalize_model_grads_func=finalize_model_grads,
        **moe,
        **settings_fields(settings),
    )


def settings_fields(settings: MemorySettings) -> dict[str, Any]:
    """Returns the settings as fields of Megatron's TransformerConfig."""
    return {
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
        "recompute_modules": None if settings.recompute_modules is None else list(settings.recompute_modules),
        "fine_grained_activation_offloading": settings.offload_modules is not None,
        "offload_modules": list(settings.offload_modules or ()),
        "min_offloaded_tensor_size": settings.min_offloaded_tensor_size,
    }


def interleaved_chunks(layout: Layout) -> int | None:
    """Returns the chunks of a pipeline stage as Megatron expects them: None if stages are not interleaved."""
    chunks = layout.virtual_pipeline_model_parallel_size
    return chunks if chunks > 1 else None
