"""Megatron's configs of a Scenario: of the model, of DDP and of the optimizer.

Written against megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import activations
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import transformer_config as megatron_transformer_config
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import is_without_checkpoints
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError
from memlab.engines.megatron import megatron_versions
from memlab.engines.routing_draws import RoutingDraws

# Weights stay as they are from step to step: a loss that differs between two settings is then a setting's fault. Adam
# still allocates and updates everything that it does at any other rate.
LEARNING_RATE = 0.0

# Megatron and Transformer Engine's Adam write FP8 moments as uint8 (``map_dtype``, megatron/training/arguments.py).
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "fp8": torch.uint8}


def transformer_config(scenario: Scenario, settings: MemorySettings) -> TransformerConfig:
    """Returns Megatron's config, which checks the settings by Megatron's own rules too."""
    architecture = scenario.architecture
    if is_without_checkpoints(settings, scenario):
        settings = replace(settings, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
    dtype = _DTYPES[scenario.dtype]
    # Other defaults of Megatron's than memlab's, where no part has the field.
    of_parts: dict[str, Any] = {
        name: getattr(architecture, name) for name in ("ffn_hidden_size", "gated_linear_unit", "add_bias_linear")
    }
    for part in (architecture.attention, *architecture.parts):  # a cut model may have no layer with attention
        of_parts |= {**asdict(part), **part.megatron}
    if architecture.hybrid_override_pattern is not None:
        of_parts["is_hybrid_model"] = True
    if isinstance(architecture.window_attn_skip_freq, tuple):
        of_parts["window_attn_skip_freq"] = list(architecture.window_attn_skip_freq)
    every = architecture.linear_attention_freq
    of_parts["linear_attention_freq"] = list(every) if isinstance(every, tuple) else every
    if architecture.moe_layer_freq is not None:
        of_parts["moe_layer_freq"] = list(architecture.moe_layer_freq[: scenario.num_layers])
    kind = MLATransformerConfig if architecture.multi_latent_attention else TransformerConfig
    config = kind(
        num_layers=scenario.num_layers,
        tensor_model_parallel_size=scenario.layout.tensor_model_parallel_size,
        context_parallel_size=scenario.layout.context_parallel_size,
        pipeline_model_parallel_size=scenario.layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=interleaved_chunks(scenario.layout),
        # Two stages would exchange several tensors with each other in one batch (megatron/training/arguments.py).
        overlap_p2p_comm=interleaved_chunks(scenario.layout) is not None,
        batch_p2p_comm=interleaved_chunks(scenario.layout) is None,
        pipeline_model_parallel_layout=scenario.layout.pipeline_model_parallel_layout,
        num_layers_in_first_pipeline_stage=scenario.layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=scenario.layout.num_layers_in_last_pipeline_stage,
        expert_model_parallel_size=scenario.layout.expert_model_parallel_size,
        expert_tensor_parallel_size=scenario.layout.expert_tensor_size,
        sequence_parallel=scenario.layout.sequence_parallel and scenario.layout.tensor_model_parallel_size > 1,
        layernorm_epsilon=architecture.layernorm_epsilon,
        activation_func=_activation(architecture),
        # Megatron's grouped experts refuse it beside biases (``TEGroupedMLP``).
        bias_dropout_fusion=not (architecture.routes and architecture.add_bias_linear),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=scenario.dtype == "bf16",
        use_cpu_initialization=False,
        moe_router_bias_update_rate=0.0,  # as `LEARNING_RATE`
        finalize_model_grads_func=finalize_model_grads,
        **(state_fields(scenario.state) | ({"bias_activation_fusion": False} if architecture.squared_relu else {})),
        **{name: value for name, value in of_parts.items() if name in kind.__dataclass_fields__},
        **settings_fields(settings),
    )
    _check_padding(scenario)
    if architecture.experimental_attention_variant is not None and not megatron_versions.HAS_FORMER_DELTA_NET:
        raise ValueError(
            f"{architecture.name} has gated delta net, which memlab has as Megatron-Core 0.16 and 0.17 compute it, and "
            "a newer one is installed: install megatron-core 0.16.1"
        )
    if architecture.hybrid_override_pattern is not None and not megatron_versions.HAS_FORMER_HYBRID_MODELS:
        raise ValueError(
            f"{architecture.name} has layers of Mamba, which memlab builds with Megatron-Core 0.16, and a newer one is "
            "installed: install megatron-core 0.16.1"
        )
    # What memlab's own dispatcher and FP8 layers read, which get nothing but the config.
    config.memlab_non_tn_fp8_gemm = scenario.state.non_tn_fp8_gemm
    config.memlab_pads_packed_values = scenario.state.pad_packed_values
    config.memlab_versions = scenario.versions
    config.memlab_routing = RoutingDraws(scenario.routing)
    return config


def _check_padding(scenario: Scenario) -> None:
    has_other_sizes = scenario.packed_sequences is not None and not scenario.architecture.has_kernel_of_flash_attn_2
    if megatron_versions.PADS_PACKED_VALUES and has_other_sizes and not scenario.state.pad_packed_values:
        raise RuleError(
            "pad_packed_values is False with packed_sequences, must be True, since the installed megatron-core pads "
            "the values of latent attention: choose True, or install megatron-core 0.17 or older",
            *("pad_packed_values", "packed_sequences"),
        )


def _activation(architecture: Architecture) -> Any:
    if architecture.quick_geglu:
        # The object that the config and the experts compare with: a stand-in for CUDA replaces compiled functions.
        return megatron_transformer_config.quick_gelu
    if architecture.squared_relu:
        return activations.squared_relu
    return torch.nn.functional.silu if architecture.gated_linear_unit else torch.nn.functional.gelu


def state_fields(state: TrainingState) -> dict[str, Any]:
    """Returns the part of a training state that Megatron's TransformerConfig holds."""
    router_dtype = None if state.moe_router_dtype == "params_dtype" else state.moe_router_dtype
    return (
        _options(state, "model")
        | {
            "attention_backend": AttnBackend[state.attention_backend],
            "transformer_impl": state.transformer_impl,
            "moe_router_dtype": router_dtype,
        }
        | _graph_fields(state)
    )


def _graph_fields(state: TrainingState) -> dict[str, Any]:
    """Returns what a model knows of CUDA graphs: nothing of one that captures the schedule (`graph_capture`)."""
    if state.cuda_graph_impl != "transformer_engine":
        return {"cuda_graph_impl": "none"}
    names = ("cuda_graph_modules", "cuda_graph_scope")  # the first since megatron-core 0.18
    name = next(name for name in names if name in TransformerConfig.__dataclass_fields__)
    return {"cuda_graph_impl": state.cuda_graph_impl, name: list(state.cuda_graph_modules or ())}


def distributed_data_parallel_config(scenario: Scenario) -> DistributedDataParallelConfig:
    """Returns the config of Megatron's DDP."""
    state = scenario.state
    given = _options(state, "ddp") | {"grad_reduce_in_fp32": not state.grad_reduce_in_bf16}
    # All stages gather at once, but only where they are interleaved (megatron/training/arguments.py).
    gathers_at_once = state.overlap_param_gather and interleaved_chunks(scenario.layout) is not None
    return DistributedDataParallelConfig(align_param_gather=gathers_at_once, **given)


def optimizer_config(scenario: Scenario) -> OptimizerConfig:
    """Returns the config of Megatron's optimizer, which checks it by Megatron's own rules too."""
    state, given = scenario.state, _options(scenario.state, "optimizer")
    given |= {name: _DTYPES[value] for name, value in given.items() if name.endswith("_dtype")}
    return OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        bf16=scenario.dtype == "bf16",
        params_dtype=_DTYPES[scenario.dtype],
        fp8_recipe=None if state.fp8_format is None else state.fp8_recipe,
        **given,
    )


def settings_fields(settings: MemorySettings) -> dict[str, Any]:
    """Returns the settings as fields of Megatron's TransformerConfig."""
    given = _options(settings, "model")
    given |= {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    offload = settings.offload_modules
    return given | {"fine_grained_activation_offloading": offload is not None, "offload_modules": list(offload or ())}


def _options(values: TrainingState | MemorySettings, config: str) -> dict[str, Any]:
    """Returns the options that one of Megatron's configs has, by its names; no older one has the newer options."""
    return {
        name: getattr(values, one.name)
        for one in options_of(type(values)).values()  # type: ignore[arg-type]  # a class is hashable
        if (name := one.name_in(config)) is not None
        and (one.since is None or name in TransformerConfig.__dataclass_fields__)
    }


def interleaved_chunks(layout: Layout) -> int | None:
    """Returns the chunks of a pipeline stage as Megatron expects them: None if stages are not interleaved."""
    chunks = layout.virtual_pipeline_model_parallel_size
    return chunks if chunks > 1 else None
