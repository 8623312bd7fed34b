"""Names that Megatron-Core's own configs have, which most frameworks pass on under a prefix.

Sources: ``megatron/core/model_parallel_config.py``, ``transformer/transformer_config.py``,
``optimizer/optimizer_config.py`` and ``distributed/distributed_data_parallel_config.py``, 0.16.1.
"""

from __future__ import annotations

from dataclasses import MISSING as MISSING_VALUE
from dataclasses import fields, replace
from typing import Any

from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.option import options_of
from memlab.config.parts.dense import Dense
from memlab.config.parts.gdn import GatedDeltaNet
from memlab.config.parts.gqa import GroupedQueryAttention
from memlab.config.parts.mla import LatentAttention
from memlab.config.parts.moe import Experts
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.frameworks.keys import (
    BACKEND,
    CAPACITY,
    CONVERSIONS,
    CP_COMM_TYPE,
    CUDA_GRAPHS,
    DEEP_EP_SMS,
    DISPATCHER,
    EXTRA_LAYERS,
    FLEX_BACKEND,
    LOAD_BALANCING,
    LONG_DTYPE,
    NOT,
    NUMBER,
    PIPELINE_LAYOUT,
    ROUTER_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    WINDOW,
    Conversion,
    Key,
    Missing,
    exchange_of,
    is_false,
    is_given,
    other_than,
)
from memlab.jobs.layer_pattern import layer_pattern

SIZES = (
    Key("tensor_model_parallel_size", "tensor_model_parallel_size", WHOLE, 1),
    Key("context_parallel_size", "context_parallel_size", WHOLE, 1),
    Key("pipeline_model_parallel_size", "pipeline_model_parallel_size", WHOLE, 1),
    Key("expert_model_parallel_size", "expert_model_parallel_size", WHOLE, 1),
    Key("expert_tensor_parallel_size", "expert_tensor_parallel_size", WHOLE, None),
)
CHUNKS = Key("virtual_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", WHOLE, None)
STAGES = Key("pipeline_model_parallel_layout", "pipeline_model_parallel_layout", PIPELINE_LAYOUT, None)
ENDS = (
    Key("num_layers_in_first_pipeline_stage", "num_layers_in_first_pipeline_stage", WHOLE, None),
    Key("num_layers_in_last_pipeline_stage", "num_layers_in_last_pipeline_stage", WHOLE, None),
    STAGES,
)


def _keys(cls: type, config: str, **defaults: Any) -> tuple[Key, ...]:
    """Returns the keys of the options that one of Megatron's configs has, with its defaults where memlab has others."""
    keys = []
    for one in options_of(cls).values():
        if one.config == config:
            conversion = LONG_DTYPE if one.name.endswith("_dtype") else CONVERSIONS[one.kind]
            keys.append(Key(one.name_in(config) or "", one.name, conversion, defaults.get(one.name, one.default)))
    return tuple(keys)


_SETTINGS = _keys(MemorySettings, "model")
# The providers of Megatron-Bridge (``models/gpt_provider.py``, 0.6.2) and mcore-bridge (1.6.5) build models from
# Megatron-Core's configs with ``deallocate_pipeline_outputs`` on. Megatron-LM has no argument for it: its
# ``core_transformer_config_from_args`` always sets True.
_STATE = _keys(
    TrainingState,
    "model",
    deallocate_pipeline_outputs=True,
    bias_activation_fusion=False,
    moe_router_dtype="params_dtype",
    moe_permute_fusion=False,
)
RECOMPUTE = (
    *(key for key in _SETTINGS if key.field.startswith("recompute_")),
    Key("moe_layer_recompute", "moe_layer_recompute", SWITCH, False),
)
OFFLOAD = (
    Key("fine_grained_activation_offloading", "fine_grained_activation_offloading", SWITCH, False),
    *(key for key in _SETTINGS if not key.field.startswith("recompute_")),
)
PIPELINE = tuple(key for key in _STATE if key.field == "deallocate_pipeline_outputs")
_CONVERSIONS = {
    "attention_backend": BACKEND,
    "moe_router_dtype": ROUTER_DTYPE,
    "moe_router_load_balancing_type": LOAD_BALANCING,
    "moe_token_dispatcher_type": DISPATCHER,
    "moe_flex_dispatcher_backend": FLEX_BACKEND,
    "moe_deepep_num_sms": DEEP_EP_SMS,
    "cp_comm_type": CP_COMM_TYPE,
    "cuda_graph_impl": CUDA_GRAPHS,
    "moe_expert_capacity_factor": CAPACITY,
    "mtp_num_layers": EXTRA_LAYERS,
}
USER_BUFFERS = tuple(key for key in _STATE if key.field.startswith("tp_comm_"))
"""What Megatron-LM and Megatron-Bridge read, whose start makes the buffers; memlab does not know whether others do."""
COMPUTE = tuple(
    replace(key, conversion=_CONVERSIONS.get(key.field, key.conversion))
    for key in _STATE
    if key not in (*PIPELINE, *USER_BUFFERS)
)
FUSIONS = tuple(key for key in COMPUTE if key.field in ("gradient_accumulation_fusion", "bias_activation_fusion"))
EXTRA = tuple(key for key in COMPUTE if key.field == "mtp_num_layers")
TRANSFORMER = (*ENDS, *PIPELINE, *RECOMPUTE, *OFFLOAD, *COMPUTE)
"""Megatron-Core's configuration of the model, apart from what `SIZES`, `CHUNKS` and `ARCHITECTURE` have."""
OPTIMIZER = _keys(TrainingState, "optimizer", optimizer_offload_fraction=0.0)
BUCKETS = tuple(
    replace(key, conversion=NOT, default=True) if key.field == "grad_reduce_in_bf16" else key
    for key in _keys(TrainingState, "ddp")
    if key.field != "use_distributed_optimizer"
)


def _listed(pattern: Any) -> Any:
    return list(pattern) if isinstance(pattern, tuple) else pattern


_OF_A_MODEL = {
    "int": WHOLE,
    "int | None": WHOLE,
    "float": NUMBER,
    "float | None": NUMBER,
    "bool": SWITCH,
    "ScoreFunction": TEXT,
    "RopeType": TEXT,
    "SoftmaxType": TEXT,
    "str | None": TEXT,
    "AttentionVariant | None": TEXT,
    "tuple[int, int] | None": WINDOW,
    "int | tuple[int, ...] | None": Conversion(lambda value: None if value is None else layer_pattern(value), _listed),
}
OF_CLASSIC_GPT = (
    "normalization", "gated_linear_unit", "add_bias_linear", "position_embedding_type", "max_position_embeddings",
    "quick_geglu", "norms_all_heads", "norms_all_heads_fused", "squared_relu",
)  # fmt: skip
"""What Megatron-LM's flags give, and Megatron-Core's config has by another name or not at all."""
_OF_MODELS = tuple(
    Key(field.name, field.name, _OF_A_MODEL[str(field.type)])
    for field in fields(Architecture)
    if field.name not in ("name", "family", "moe_layer_freq", "default_seq_length", *OF_CLASSIC_GPT)
)
SAID_OF_LAYERS = (
    *("add_qkv_bias", "multi_latent_attention", "moe_aux_loss_coeff", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "softmax_type", "window_size", "window_attn_skip_freq"),
    *("glu_linear_offset", "activation_func_clamp_value", "attention_output_gate", "moe_latent_size"),
    *("experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
"""Fields of an architecture that a job may say of a model of any name: they replace the model's own."""
ARCHITECTURE = tuple(key for key in _OF_MODELS if key.field not in SAID_OF_LAYERS)
SAID_OF_MODELS = tuple(key.field for key in _OF_MODELS)
"""Fields that a job gives for a model that it names otherwise: they replace the published ones."""
_SAID = tuple(key for key in _OF_MODELS if key.field in SAID_OF_LAYERS)
LAYERS = (*_SAID, Key("moe_layer_freq", "moe_layer_freq", Conversion(layer_pattern, _listed)))
"""What a job may say about the layers of a model of any name."""
_DEFAULTS_OF_MODELS = {
    field.name: field.default for field in fields(Architecture) if field.default is not MISSING_VALUE
}
_NEW = frozenset(
    {field.name for kind in (LatentAttention, GatedDeltaNet, Experts) for field in fields(kind)}
    - {field.name for kind in (GroupedQueryAttention, Dense) for field in fields(kind)}
    - {"num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_aux_loss_coeff", "moe_router_pre_softmax"}
    | {"softmax_type", "window_size", "window_attn_skip_freq", "attention_output_gate", "linear_attention_freq"}
)
"""Fields whose defaults are Megatron-Core's own, so that a job says them only where a model has another value."""


def fields_of(architecture: Architecture) -> dict[str, Any]:
    """Returns the values of `ARCHITECTURE` and `LAYERS`, without the pattern; None for what no part has."""
    values = {key.field: getattr(architecture, key.field) for key in _OF_MODELS}
    unsaid = {name for name in _NEW & values.keys() if values[name] == _DEFAULTS_OF_MODELS[name]}
    if not architecture.routes:
        unsaid |= {name for name in values if "moe" in name}
    if architecture.hybrid_override_pattern is None:
        unsaid |= {name for name in values if name.startswith("mamba_")}
    return values | dict.fromkeys(unsaid)


def said_of_layers(architecture: Architecture) -> dict[str, Any]:
    """Returns the values of `SAID_OF_LAYERS` that differ from those of the published model of the same name."""
    published = ARCHITECTURES.get(architecture.name, architecture)
    values = {name: getattr(architecture, name) for name in SAID_OF_LAYERS}
    return {name: value for name, value in values.items() if value != getattr(published, name)}


MISSING = (
    Missing("normalization", "either", "memlab has RMSNorm only", other_than("RMSNorm"), True),
    Missing("add_bias_linear", "more", "memlab's linears have no biases", blocks=True),
    Missing("gated_linear_unit", "either", "memlab's MLPs are gated", is_false, blocks=True),
    Missing(
        "experimental_attention_variant",
        "either",
        "another kind of attention is another model",
        other_than("gated_delta_net"),
        True,
        parts=("dsa_", "csa_", "apply_dsa_"),
    ),
    Missing("heterogeneous_block_specs", "either", "layers of different shapes are another model", blocks=True),
    Missing("enable_mhc_connections", "more", "layers with several residual streams are another model", blocks=True),
    Missing("mtp_hsm", "more", "layers of multi-token prediction keep a mixture of all hidden states before them"),
    Missing("use_mamba_mem_eff_path", "more", "Mamba's convolution and scan keep their own inputs", is_false),
    Missing("mamba_chunk_size", "either", "Mamba's kernel takes chunks of another length than 128", other_than(128)),
    Missing(
        "mamba_training_ssm_states_dtype", "either", "the kernel of Mamba makes its states in another type", is_given
    ),
    Missing(
        "activation_func",
        "either",
        "memlab's MLPs use SiLU",
        lambda value: value is not None and not any(name in str(value).lower() for name in ("silu", "swiglu", "swish")),
    ),
    Missing("position_embedding_type", "either", "memlab has rotary positions only", other_than("rope", "yarn"), True),
    Missing("activation_func_fp8_input_store", "less", "the MLP's activation keeps its input in FP8"),
    Missing("use_te_activation_func", "either", "Transformer Engine's activation keeps other tensors"),
    Missing("use_transformer_engine_op_fuser", "either", "Transformer Engine's fused MLP keeps other tensors"),
    Missing("use_kitchen", "either", "layers are Kitchen's instead of Transformer Engine's"),
    Missing("quant_recipe", "either", "matrices are quantized one by one"),
    Missing("mlp_chunks_for_training", "less", "MLPs compute tokens in parts", other_than(1)),
    Missing("fp32_residual_connection", "more", "residuals are fp32: 4 bytes per element instead of 2"),
    Missing("qk_l2_norm", "more", "queries and keys are normalized, so a second copy of them is kept for backward"),
    Missing(
        "cp_comm_type",
        "either",
        "memlab's context parallel ranks exchange keys and values (p2p) or heads (a2a)",
        lambda value: exchange_of(value) is None,
    ),
    Missing("mla_down_proj_fusion", "either", "latent attention has one linear for two, with the norm before it"),
    Missing("fp8_dot_product_attention", "either", "attention computes in FP8"),
    Missing("fp8_multi_head_attention", "either", "attention computes in FP8"),
    Missing("fp8_wgrad", "more", "weight gradients in bf16 keep the matrices' inputs in bf16", is_false),
    Missing("first_last_layers_bf16", "more", "under FP8, the first and last layers stay in bf16"),
    Missing("disable_parameter_transpose_cache", "less", "FP8 parameters are transposed again in each backward"),
    Missing("defer_embedding_wgrad_compute", "more", "inputs of the output layer stay until the pipeline is empty"),
    Missing(
        "clone_scatter_output_in_embedding", "more", "the embedding of whole sequences stays until backward", is_false
    ),
    Missing("moe_use_legacy_grouped_gemm", "either", "another kernel for the experts"),
    Missing("moe_router_padding_for_fp8", "more", "each expert's tokens are padded to a multiple of 16 or 32"),
    Missing("moe_router_padding_for_quantization", "more", "each expert's tokens are padded to a multiple of 16 or 32"),
    Missing("moe_input_jitter_eps", "more", "the router's input is multiplied by noise, which keeps a copy"),
    Missing("qk_clip", "more", "the largest attention logit of each head is kept until the optimizer's step"),
    Missing(
        "moe_token_dispatcher_type",
        "either",
        "memlab dispatches tokens with alltoall, allgather or flex",
        other_than("alltoall", "allgather", "flex"),
    ),
    Missing(
        "moe_flex_dispatcher_backend",
        "either",
        "memlab exchanges tokens by DeepEP or HybridEP",
        other_than("deepep", "hybridep"),
    ),
    Missing("moe_flex_dispatcher_num_sms", "either", "DeepEP's buffers outside torch grow with it", is_given),
    Missing("moe_permute_fusion_into_hybridep", "either", "HybridEP keeps other maps of the experts' rows"),
    Missing("moe_grouped_gemm", "either", "experts are computed one by one", is_false),
    Missing("overlap_moe_expert_parallel_comm", "more", "two micro-batches are in flight at once"),
    Missing("delay_wgrad_compute", "more", "inputs of weight gradients stay until these are computed"),
    Missing(
        "cuda_graph_impl",
        "more",
        "CUDA graphs of layers keep their own pool of memory",
        lambda value: value not in (None, "none", "full_iteration"),
    ),
    Missing("enable_cuda_graph", "more", "CUDA graphs of layers keep their own pool of memory"),
    Missing("external_cuda_graph", "more", "CUDA graphs of layers keep their own pool of memory"),
    Missing("cpu_offloading", "less", "Transformer Engine offloads whole layers"),
    Missing("cpu_offloading_num_layers", "less", "Transformer Engine offloads whole layers"),
    Missing("distribute_saved_activations", "less", "checkpoint inputs are split over the tensor parallel ranks"),
    Missing("account_for_embedding_in_pipeline_split", "either", "the embedding counts as a layer of the first stage"),
    Missing("account_for_loss_in_pipeline_split", "either", "the loss counts as a layer of the last stage"),
    Missing("tp_comm_overlap", "more", "user buffers of Transformer Engine's overlap of tensor parallel communication"),
    Missing("fp4", "either", "matrices are multiplied in FP4"),
    Missing("fp16", "either", "memlab computes in bf16 or fp32", blocks=True, of="precision"),
    Missing("deterministic_mode", "either", "deterministic kernels have other temporaries"),
    Missing("apply_residual_connection_post_layernorm", "either", "the norm's output is the residual"),
    Missing("rotary_interleaved", "either", "other pairs of elements are rotated, with other temporaries"),
    Missing("no_rope_freq", "less", "some layers do not rotate queries and keys", is_given),
    Missing("log_max_attention_logit", "more", "the largest attention logit of each head is kept"),
    Missing("use_mup", "more", "embeddings and logits are multiplied by a number, which makes a copy of each"),
    Missing("fused_single_qkv_rope", "either", "queries, keys and values are rotated in one tensor"),
    Missing("fused_residual_rmsnorm", "either", "residual and norm are one kernel, which keeps other tensors"),
    Missing("fp8_quantizer_factory", "either", "the job's own recipe quantizes matrices", is_given),
    Missing("fp8_amax_history_len", "more", "FP8 keeps 4 bytes per matrix and step of this history", other_than(0, 1)),
    Missing("fp8_output_proj", "either", "the output layer multiplies in FP8 too"),
    Missing("moe_router_quantile_balancing_ema", "either", "the router balances experts by quantiles"),
    Missing("moe_router_topk_limited_devices", "either", "the router chooses devices first", is_given),
    Missing("moe_router_force_biased", "either", "the router adds a random bias to its logits", is_given),
    Missing("moe_enable_routing_replay", "more", "the chosen experts of each token are kept, of all micro-batches"),
    Missing("moe_apply_probs_on_input", "either", "probabilities multiply the experts' inputs, not their activations"),
    Missing("use_grouped_gemm_for_dense_mlp", "either", "the MLP's matrices are one group"),
    Missing("moe_single_grouped_weight", "either", "the experts' weights are one tensor"),
    Missing("moe_single_grouped_bias", "either", "the experts' biases are one tensor"),
    Missing("moe_use_grouped_tensor", "more", "the rows of each expert are padded"),
    *(
        Missing(name, "either", "the dispatcher exchanges tokens or their gradients in MXFP8", other_than("bf16"))
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    ),
    Missing(
        "moe_paged_stash",
        "either",
        "the experts' activations are kept in the pages of a buffer of fixed size",
        parts=("moe_paged_stash_",),
    ),
    Missing("moe_expert_rank_capacity_factor", "either", "a rank's experts take no more tokens than this", is_given),
    Missing("batch_invariant_mode", "either", "kernels that do not depend on the batch have other temporaries"),
    Missing("symmetric_ar_type", "more", "buffers of symmetric memory for sums over ranks", is_given),
    Missing("use_inference_optimized_layers", "either", "layers are those of Megatron's inference"),
    Missing(
        "transformer_impl", "either", "memlab has the layers of Transformer Engine", other_than("transformer_engine")
    ),
    *(
        Missing(name, "less", "weights are sharded over more ranks", other_than(1))
        for name in (
            "gtp_weight_remat_size",
            "expert_gtp_weight_remat_size",
            "tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_num_weight_shards",
        )
    ),
    Missing("hierarchical_context_parallel_sizes", "either", "memlab's context parallel ranks are one group", is_given),
    Missing("hybrid_context_parallel", "either", "sequences are spread over more or fewer ranks by their length"),
    Missing("enable_autocast", "more", "weights and activations are cast in each layer"),
    Missing(
        "num_microbatches_with_partial_activation_checkpoints",
        "more",
        "some micro-batches in flight are not recomputed",
        is_given,
    ),
    Missing(
        "overlap_dispatch_backward_with_experts_wgrad", "more", "inputs of the experts' weight gradients stay longer"
    ),
    Missing(
        "overlap_p2p_comm",
        "less",
        "in memlab, stages of an interleaved pipeline receive the next input while they compute",
        is_false,
    ),
    Missing("overlap_p2p_comm_warmup_flush", "more", "a stage receives its next input while it computes"),
)
"""Of TransformerConfig; a framework reads them under its own prefix."""
OTHER_LOGITS = Missing(
    "logit_dtype",
    "either",
    "the output layer writes logits of another type",
    other_than("bf16", "bfloat16", "torch.bfloat16"),
)
"""Of the model's configuration of main of August 2026, not of TransformerConfig."""


def _is_16_bits(value: Any) -> bool:
    return str(value).rpartition(".")[2] in ("bf16", "fp16", "bfloat16", "float16")


MISSING_DDP = (
    Missing("use_megatron_fsdp", "less", "Megatron-FSDP shards parameters and gradients too"),
    Missing("use_custom_fsdp", "less", "Megatron-FSDP shards parameters and gradients too"),
    Missing(
        "num_distributed_optimizer_instances", "more", "the optimizer state is sharded over fewer ranks", other_than(1)
    ),
    Missing("nccl_ub", "either", "NCCL's user buffers hold gradients and parameters, outside torch's pools"),
    Missing("reduce_scatter_with_fp32_accumulation", "more", "gradients are exchanged before they are added in fp32"),
    Missing("fsdp_double_buffer", "more", "Megatron-FSDP keeps buffers of two layers, between steps too"),
    Missing("megatron_fsdp_main_grads_dtype", "less", "Megatron-FSDP keeps gradients in 16 bits", _is_16_bits),
    Missing(
        "megatron_fsdp_main_params_dtype",
        "less",
        "Megatron-FSDP keeps a rank's main parameters in 16 bits",
        _is_16_bits,
    ),
    Missing("num_buckets", "either", "it decides how large the buckets are", is_given),
    Missing("pad_buckets_for_high_nccl_busbw", "more", "buckets are padded to a multiple of 2**16 elements"),
    Missing("fp4_param_gather", "either", "parameters are FP4"),
    Missing(
        "param_name_patterns_for_fp32_local_accumulation",
        "more",
        "gradients of these parameters are added in fp32 before they are reduced",
        is_given,
    ),
    Missing("delay_wgrad_compute", "more", "inputs of weight gradients stay until these are computed"),
)
MISSING_OPTIMIZER = (
    Missing("optimizer", "either", "memlab models Adam", other_than("adam")),
    Missing(
        "store_param_remainders",
        "more",
        "main parameters are kept whole: 2 more bytes per parameter, sharded",
        is_false,
    ),
    Missing("optimizer_cuda_graph", "more", "CUDA graphs keep their own pool of memory"),
    Missing("offload_optimizer_states", "less", "the optimizer's states are on the host between updates"),
    Missing("use_layer_wise_distributed_optimizer", "either", "each rank updates whole layers"),
    Missing("use_torch_optimizer_for_cpu_offload", "either", "torch's Adam updates what is on the host"),
)
