"""Megatron-LM: the arguments of ``pretrain_gpt.py``, in a script, a log, or the ``model_config.yaml`` of a test.

Names and defaults: ``megatron/training/arguments.py``, core 0.16.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memlab.config.architectures import HUGGING_FACE_NAMES, published_architecture
from memlab.config.option import unread
from memlab.config.scenario import LONGEST_OF_SOFTMAX_KERNEL, Scenario, has_softmax_kernel
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened
from memlab.jobs.frameworks.adapters import no_adapters
from memlab.jobs.frameworks.batch_schedule import check_schedule, take_batch
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs, flags_of
from memlab.jobs.frameworks.keys import (
    ABSENT,
    BACKEND,
    COUNT,
    DTYPE,
    IMPLEMENTATION,
    NOT,
    POSITIONS,
    SWITCH,
    TEXT,
    WHOLE,
    Conversion,
    Key,
    Missing,
    is_given,
    with_defaults,
)
from memlab.jobs.frameworks.kinds_of_layers import is_of_hybrids, says_kinds_of_layers, take_kinds_of_layers
from memlab.jobs.frameworks.lines import removal, shell_words
from memlab.jobs.frameworks.megatron_keys import (
    ARCHITECTURE,
    BUCKETS,
    CHUNKS,
    COMPUTE,
    FUSIONS,
    LAYERS,
    MISSING,
    MISSING_DDP,
    MISSING_OPTIMIZER,
    OF_CLASSIC_GPT,
    OFFLOAD,
    OPTIMIZER,
    OTHER_LOGITS,
    RECOMPUTE,
    SIZES,
    STAGES,
    USER_BUFFERS,
    fields_of,
    said_of_layers,
)
from memlab.jobs.frameworks.refused_options import check_flags, note_single_experts
from memlab.jobs.frameworks.user_buffers import NO_FLAGS, NOT_WRITTEN, OPTION
from memlab.jobs.frameworks.without_effect import keys_without_effect
from memlab.jobs.megatron_file import take_file_for_flags
from memlab.jobs.model_args import is_started_by_a_launcher

FLAGS_OF_COMPUTING = tuple(replace(key, name=key.field) for key in COMPUTE if key not in FUSIONS)
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
"""Megatron-LM's defaults."""
_FLAGS_OF_BUCKETS = tuple(
    replace(key, name=key.field, conversion=SWITCH, default=False)
    if key.conversion is NOT
    else replace(key, name=key.field)
    for key in BUCKETS
)
FLAGS_OF_THE_OPTIMIZER = tuple(
    replace(key, conversion=DTYPE) if key.name.endswith("_dtype") else key
    for key in with_defaults(OPTIMIZER, optimizer_offload_fraction=1.0)
    if not key.name.startswith("pin_cpu")
)

_FLAGS = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
"""What Megatron-LM's arguments call a field of its TransformerConfig."""
_ARGUMENT_DEFAULTS = {
    "rotary_base": 10000, "rotary_percent": 1.0, "layernorm_epsilon": 1e-5, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_BESIDE = {
    "hidden_size": (
        Key("swiglu", "gated_linear_unit", SWITCH, False),
        Key("quick_geglu", "quick_geglu", SWITCH, False),
        Key("squared_relu", "squared_relu", SWITCH, False),
        Key("hybrid_layer_pattern", "hybrid_override_pattern", TEXT),
        Key("normalization", "normalization", TEXT, "LayerNorm"),
        Key("disable_bias_linear", "add_bias_linear", NOT, True),
        Key("position_embedding_type", "position_embedding_type", POSITIONS, "learned_absolute"),
        Key("max_position_embeddings", "max_position_embeddings", WHOLE),
    ),
    "num_attention_heads": (Key("group_query_attention", "group_query_attention", SWITCH, False),),
    "vocab_size": (
        Key("padded_vocab_size", "padded_vocab_size", WHOLE),
        Key("make_vocab_size_divisible_by", "make_vocab_size_divisible_by", COUNT, 128),
    ),
}
"""By the field that they concern."""


def _as_text(value: int | tuple[int, ...] | None) -> int | str | None:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value


def _as_pair(window: tuple[int, int] | None) -> str | None:
    return None if window is None else ",".join(map(str, window))


def _argument(key: Key) -> Key:
    if key.field == "share_embeddings_and_output_weights":
        return Key("untie_embeddings_and_output_weights", key.field, NOT, True)
    if key.field in ("moe_layer_freq", "window_attn_skip_freq", "window_size"):
        write = _as_pair if key.field == "window_size" else _as_text
        return replace(key, conversion=Conversion(key.conversion.read, write))
    default = _ARGUMENT_DEFAULTS.get(key.field, False if key.conversion is SWITCH else ABSENT)
    return replace(key, name=_FLAGS.get(key.name, key.name), default=default)


SIZES_OF_THE_MODEL = tuple(
    one for key in (*ARCHITECTURE, *LAYERS) for one in (_argument(key), *_BESIDE.get(key.field, ()))
)
KEYS = (
    Key("world_size", "world_size", WHOLE),
    *SIZES,
    CHUNKS,
    Key("num_layers_per_virtual_pipeline_stage", "num_layers_per_virtual_pipeline_stage", WHOLE),
    Key("num_virtual_stages_per_pipeline_rank", "num_virtual_stages_per_pipeline_rank", COUNT),
    Key("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage", WHOLE, None),
    Key("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage", WHOLE, None),
    STAGES,
    Key("seq_length", "seq_length", COUNT),
    Key("micro_batch_size", "micro_batch_size", COUNT),
    Key("global_batch_size", "global_batch_size", COUNT),
    Key("bf16", "bf16", SWITCH, False),
    *SIZES_OF_THE_MODEL,
    # Older names of two sizes, which `validate_args` takes where the newer ones are not given.
    Key("encoder_num_layers", "num_layers", WHOLE),
    Key("encoder_seq_length", "seq_length", COUNT),
    *RECOMPUTE,
    Key("recompute_activations", "recompute_activations", SWITCH, False),
    *OFFLOAD,
    *with_defaults(FLAGS_OF_COMPUTING, apply_rope_fusion=True, moe_token_dispatcher_type="allgather", **DROPOUT),
    Key("no_bias_swiglu_fusion", "bias_activation_fusion", NOT, True),
    Key("no_gradient_accumulation_fusion", "gradient_accumulation_fusion", NOT, True),
    # A log has the flags' destinations.
    Key("bias_swiglu_fusion", "bias_activation_fusion", SWITCH),
    Key("gradient_accumulation_fusion", "gradient_accumulation_fusion", SWITCH),
    Key("fp8", "fp8_format", TEXT),
    Key("no_rope_fusion", "no_rope_fusion", SWITCH, False),
    Key("use_distributed_optimizer", "use_distributed_optimizer", SWITCH, False),
    *FLAGS_OF_THE_OPTIMIZER,
    *_FLAGS_OF_BUCKETS,
    Key("no_create_attention_mask_in_dataloader", "create_attention_mask_in_dataloader", NOT, True),
    Key("create_attention_mask_in_dataloader", "create_attention_mask_in_dataloader", SWITCH),
    Key("no_pin_cpu_grads", "pin_cpu_grads", NOT, True),
    Key("no_pin_cpu_params", "pin_cpu_params", NOT, True),
    Key("pin_cpu_grads", "pin_cpu_grads", SWITCH),
    Key("pin_cpu_params", "pin_cpu_params", SWITCH),
    Key("manual_gc", "manual_gc", SWITCH, False),
    Key("transformer_impl", "transformer_impl", IMPLEMENTATION, "transformer_engine"),
)

_NOT_ARGUMENTS = (
    "activation_func", "activation_func_fp8_input_store", "deallocate_pipeline_outputs",
    "disable_parameter_transpose_cache", "enable_autocast", "expert_gtp_weight_remat_size",
    "fp8_dot_product_attention", "fp8_multi_head_attention", "fused_single_qkv_rope", "gated_linear_unit",
    "gtp_weight_remat_size", "heterogeneous_block_specs", "moe_router_topk_limited_devices", "num_buckets",
    "num_microbatches_with_partial_activation_checkpoints", "offload_optimizer_states",
    "pad_buckets_for_high_nccl_busbw", "param_name_patterns_for_fp32_local_accumulation",
    "position_embedding_type", "quant_recipe",
    "reduce_scatter_with_fp32_accumulation", "store_param_remainders", "transformer_impl",
    "use_inference_optimized_layers", "use_kitchen", "use_layer_wise_distributed_optimizer",
)  # fmt: skip
"""Fields of Megatron-Core's configs that no argument of Megatron-LM sets under this name, or to the same effect."""
_OTHER_NAMES = {
    "ddp_num_buckets": "num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "param_name_patterns_for_fp32_local_accumulation",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "fp4_format": "fp4",
    "fp4_param": "fp4_param_gather",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "te_precision_config_file": "quant_recipe",
    "use_kitchen_attention": "use_kitchen",
    "kitchen_config_file": "use_kitchen",
    "kitchen_recipe_number": "use_kitchen",
    "use_nccl_ub": "nccl_ub",
}
"""Arguments by other names than the fields that they set."""
_SWITCHED_OFF = {
    "no_clone_scatter_output_in_embedding": "clone_scatter_output_in_embedding",
    "disable_clone_scatter_output_in_embedding": "clone_scatter_output_in_embedding",
    "no_fp8_wgrad": "fp8_wgrad",
    "disable_fp8_wgrad": "fp8_wgrad",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
}
"""Switches that set a field to false."""
_DEFAULTS = {"moe_grouped_gemm": False}
"""What Megatron-LM does unless told otherwise, and memlab does not model."""
_ROW = {row.name: row for row in (*MISSING, *MISSING_DDP, *MISSING_OPTIMIZER)}
"""By the field of Megatron-Core's configs, of which two may have one that a single argument sets."""
FLAGS_MISSING = (
    *(replace(row, default=_DEFAULTS.get(row.name, ABSENT)) for row in _ROW.values() if row.name not in _NOT_ARGUMENTS),
    *(replace(_ROW[field], name=flag) for flag, field in _OTHER_NAMES.items()),
    *(replace(_ROW[field], name=flag, is_on=bool) for flag, field in _SWITCHED_OFF.items()),
    Missing("skip_train", "less", "the job evaluates and does not train", blocks=True, of="job"),
    Missing("use_legacy_models", "either", "legacy models are not those of Megatron-Core", blocks=True),
    Missing(
        "spec", "either", "layers of the job's own specification are another model",
        lambda value: bool(value) and not is_of_hybrids(value), blocks=True,
    ),
    Missing(
        "attention_head_type",
        "less",
        "BigCode's fork has one head of keys and values for all heads of queries, and memlab takes one for each",
        lambda value: value == "multiquery",
    ),
    Missing("disable_mamba_mem_eff_path", "more", "Mamba's convolution and scan keep their own inputs"),
    *(
        Missing(name, "either", "layers of different shapes are another model", is_given, blocks=True)
        for name in ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    ),
    *(
        Missing(name, "more", "memlab has no vision tower (examples/multimodal)", is_given, blocks=True)
        for name in ("language_model_type", "vision_model_type")
    ),
    Missing("decoder_num_layers", "either", "an encoder with a decoder is another model", is_given, blocks=True),
    Missing("use_tp_pp_dp_mapping", "either", "ranks are numbered in another order, but are of the same kinds"),
    Missing("use_torch_fsdp2", "less", "torch's FSDP shards parameters and gradients too"),
    Missing("decoder_seq_length", "either", "the rows of a decoder have another length than seq_length", is_given),
    Missing("freeze_all_layers", "less", "frozen parameters have no gradients and no optimizer state"),
    Missing(
        "empty_unused_memory_level", "less", "each step frees torch's cached memory, so fewer bytes stay reserved"
    ),
    Missing("disable_jit_fuser", "more", "functions of elements are not compiled, so backward keeps their steps"),
    Missing("sft", "either", "a row has several sequences, which memlab predicts as one"),
    *(
        Missing(name, "either", "an interleaved pipeline has another order of micro-batches", is_given)
        for name in ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage")
    ),
    Missing("use_checkpoint_args", "either", "the checkpoint's sizes of the model replace those of the flags"),
    Missing(
        "use_mp_args_from_checkpoint_args", "either", "the checkpoint's parallel sizes replace those of the flags"
    ),
    OTHER_LOGITS,
    replace(OTHER_LOGITS, name="output_logit_dtype"),
    Missing("logits_load_dir", "more", "a teacher's logits are loaded beside the model's own", is_given),
    Missing("logits_save_dir", "more", "logits are copied to be saved", is_given),
    Missing("moe_routing_trace_path", "more", "the routing of each layer is recorded", is_given),
    Missing("moe_extended_tp", "either", "experts are split over other ranks"),
    Missing("create_all_gather_group", "more", "NCCL has one more communicator, outside torch's pools"),
    Missing(
        "nccl_communicator_config_path", "either", "NCCL's communicators have other buffers, outside torch's pools",
        is_given,
    ),
)  # fmt: skip


def complete(reading: Reading) -> None:
    """Derives what several arguments decide together, as ``validate_args`` does."""
    _ask_for_the_program(reading)
    complete_model(reading)
    complete_state(reading)
    complete_chunks(reading)
    values = reading.values
    if values.get("world_size") is None:
        _world_size_of_launcher(reading)
    take_sequence_parallel(reading)
    take_batch(reading)
    note_single_experts(reading)
    entries = reading.entries  # what memlab does not follow of a file may give them
    warn_of_offload(reading, "Megatron-LM")
    has_sizes = "num_layers" in entries.by_key and not (entries.get("use_checkpoint_args") or entries.warnings)
    if has_sizes and "max_position_embeddings" not in entries.by_key:
        reading.warnings.append(
            "max_position_embeddings is not in the file, and Megatron-LM refuses a job without it: give "
            "--set max_position_embeddings=NUMBER, at least seq_length; with rope it changes no memory"
        )


def warn_of_offload(reading: Reading, title: str) -> None:
    """Warns of offloaded activations beside which Transformer Engine offloads weights too."""
    name, entries = "NVTE_CPU_OFFLOAD_V1", reading.entries
    of_file = (entries.get(f"{section}.{name}") for section in ("env_vars", "ENV_VARS"))
    if reading.values.get("fine_grained_activation_offloading") and "1" not in (
        *(entries.environment.get(name), *map(str, of_file)),
    ):
        reading.warnings.append(
            f"fine_grained_activation_offloading is on without {name}=1 in the job's environment, which {title} "
            "refuses with Transformer Engine 2.10 or later: export it"
        )


def check_arguments(reading: Reading) -> None:
    """Checks the rules of ``validate_args`` (megatron/training/arguments.py, core 0.16.1).

    Raises:
        CannotStartError: If one refuses the job.
    """
    values = reading.values
    if reading.entries.file_for_flags:
        check_flags(reading)
        return
    for name, instead in _NO_LONGER_TAKEN.items():
        if reading.get(name):
            raise CannotStartError(
                f"{name} ({reading.entries.by_key[name].place}) is an argument that Megatron-LM no longer takes: give "
                f"{instead}"
            )
    is_split = (values.get("tensor_model_parallel_size") or 1) > 1 and values.get("sequence_parallel")
    if values.get(OPTION) and not is_split:
        raise CannotStartError(
            f"{OPTION} is on without tensor parallel ranks that split sequences, which the arguments of Megatron-LM "
            f"require: switch sequence_parallel on, or leave {OPTION} out",
            *(OPTION, "sequence_parallel"),
        )
    if values.get("overlap_param_gather") and not reading.entries.get("use_megatron_fsdp"):
        for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not values.get(name):
                raise CannotStartError(
                    f"overlap_param_gather is on without {name}, which the arguments of Megatron-LM require: switch "
                    f"{name} on, or leave overlap_param_gather out",
                    *(name, "overlap_param_gather"),
                )
    check_schedule(reading)
    check_flags(reading)


def refused_overlap(scenario: Scenario) -> dict[str, str]:
    """Names the overlap that `check_arguments` would refuse."""
    state = scenario.state
    if not state.overlap_param_gather or (state.use_distributed_optimizer and state.overlap_grad_reduce):
        return {}
    needed = "the arguments of Megatron-LM refuse it without use_distributed_optimizer and overlap_grad_reduce"
    return {"overlap_param_gather": needed}


_NO_LONGER_TAKEN = {
    "batch_size": "micro_batch_size",
    "checkpoint_activations": "recompute_granularity",
    "model_parallel_size": "tensor_model_parallel_size",
    "warmup": "lr_warmup_fraction",
}
"""Arguments that `validate_args` refuses, each with the one that it names instead."""


def complete_refused(reading: Reading) -> None:
    """Names arguments that Megatron-LM refuses, of a job that memlab refuses before it checks them."""
    for name, instead in _NO_LONGER_TAKEN.items():
        if reading.get(name):
            place = reading.entries.by_key[name].place
            reading.entries.causes.append(f"{place}: Megatron-LM no longer takes {name}: give {instead}")


def complete_chunks(reading: Reading) -> None:
    """Takes the model chunks of a stage, where Megatron-LM's flags do not give them in layers."""
    values = reading.values
    chunks = values.pop("num_virtual_stages_per_pipeline_rank", None)
    if values.get("virtual_pipeline_model_parallel_size") is None:
        values["virtual_pipeline_model_parallel_size"] = chunks
    else:  # of a log, where Megatron has derived it
        values.pop("num_layers_per_virtual_pipeline_stage", None)


def complete_state(reading: Reading) -> None:
    """Derives precision, gradients, recompute and rope fusion."""
    values = reading.values
    is_bf16 = values.pop("bf16")
    if "fp16" not in reading.entries.by_key or not reading.entries.get("fp16"):
        values.setdefault("dtype", "bf16" if is_bf16 else "fp32")
    # Other kinds of positions than rope switch the fusion off.
    if values.pop("no_rope_fusion", False) or reading.entries.get("position_embedding_type", "rope") != "rope":
        values["apply_rope_fusion"] = False
    if values.pop("recompute_activations", False):  # whatever recompute_granularity says
        reading.take("recompute_activations", "recompute_granularity", "selective")
    _complete_attention(reading)
    if reading.entries.get("use_megatron_fsdp") and "data_parallel_sharding_strategy" in reading.entries.by_key:
        reading.without_effect["data_parallel_sharding_strategy"] = (
            "the bound of use_megatron_fsdp covers each strategy"
        )
    # Without --accumulate-allreduce-grads-in-fp32, bf16 main gradients are reduced in bf16 (validate_args).
    if values.get("main_grads_dtype") == "bf16":
        values["grad_reduce_in_bf16"] = True
    if values.get("optimizer_cpu_offload") and not values.get("use_precision_aware_optimizer"):
        reading.warnings.append(
            "optimizer_cpu_offload is on without use_precision_aware_optimizer, which the arguments of Megatron-LM "
            "(core 0.16.1) refuse; memlab predicts what Megatron-Core's optimizer does without it"
        )


_OTHER_PROGRAMS = {
    "trains a model of another kind": (
        "pretrain_bert.py", "pretrain_hybrid.py", "pretrain_hybrid_flex.py", "pretrain_ict.py", "pretrain_mamba.py",
        "pretrain_mimo.py", "pretrain_retro.py", "pretrain_t5.py", "pretrain_vision_classify.py",
        "pretrain_vision_dino.py", "pretrain_vision_inpaint.py", "pretrain_vlm.py",
    ),
    "trains by reinforcement learning": ("train_rl.py",),
    "prepares data and does not train": ("merge_datasets.py", "preprocess_data.py", "preprocess_mmdata.py"),
    "generates and does not train": (
        "generate.py", "generate_samples_gpt.py", "gpt_dynamic_inference.py",
        "gpt_dynamic_inference_with_coordinator.py", "gpt_static_inference.py", "launch_inference_server.py",
        "offline_inference.py", "run_dynamic_text_generation_server.py", "run_inference_performance_test.py",
        "run_mamba_text_generation_server.py", "run_mamba_text_generation_server_completions.py",
        "run_text_generation.py", "run_text_generation_server.py", "run_vlm_text_generation.py",
        "simple_t5_batch_inference.py",
    ),
    "converts or examines a checkpoint": (
        "checkpoint_inspector.py", "convert.py", "convert_model.py", "export.py", "mmlu.py", "prepare_cache.py",
        "prune.py", "quantize.py", "report_theoretical_memory.py", "validate.py",
    ),
}  # fmt: skip
"""Programs of Megatron-LM's repository that take its arguments, in core 0.16.1 and main of August 2026."""


def _ask_for_the_program(reading: Reading) -> None:
    """Asks what to predict where the step is not that of ``pretrain_gpt.py`` with these arguments."""
    predicted = "memlab predicts the step of pretrain_gpt.py"
    program, causes = reading.entries.program, reading.entries.causes
    if program is not None and program.key == "MODE":
        reading.blocked["job"].append(f"MODE {program.value} ({program.place}): it generates and does not train")
        return
    name = "pretrain_gpt.py" if program is None else program.value
    if name in ("pretrain_hybrid.py", "pretrain_mamba.py") and says_kinds_of_layers(reading):
        name = "pretrain_gpt.py"  # they take its step with these layers
    what = next((what for what, names in _OTHER_PROGRAMS.items() if name in names), None)
    is_asked = name == "train_rl.py" and "perform_rl_step" in reading.entries.by_key  # by its key, which can be set
    if program is not None and what is not None and not is_asked:
        causes.append(f"{program.place}: the job is {name}, which {what}")
        reading.questions.append(f"{predicted}, not of {name}: give a job that starts it, or its log")
    elif name != "pretrain_gpt.py" and not reading.get("perform_rl_step"):
        reading.other_program = f"{name}, a program of the job's own,"
        notes = reading.warnings if "num_layers" in reading.entries.by_key else causes
        notes.append(
            f"the script starts {name}, a program that memlab does not know: memlab takes it for Megatron-LM's "
            "pretrain_gpt.py, with its arguments, defaults and loss"
        )
    if (file := reading.get("yaml_cfg")) is not None:
        place = reading.entries.by_key["yaml_cfg"].place
        causes.append(f"{place}: Megatron-LM takes all arguments from yaml_cfg {shortened(file)}, and none from flags")
        reading.questions.append(
            "memlab has not found the file of yaml_cfg: put it beside the script, give the log of a run, or --set "
            "yaml_cfg=null to predict what the flags say"
        )
    if reading.get("perform_rl_step"):
        place = reading.entries.by_key["perform_rl_step"].place
        causes.append(f"{place}: perform_rl_step makes this a job of GRPO, which generates and has another loss")
        reading.questions.append(
            f"{predicted}, not of perform_rl_step: give --set perform_rl_step=false to predict this model's step with "
            "the language-model loss"
        )


def _complete_attention(reading: Reading) -> None:
    """Takes Megatron's own layers, or of them the scores of attention only, where memlab does not have the rest."""
    values = reading.values
    if reading.entries.get("transformer_impl") not in (None, "transformer_engine", "local"):
        reading.miss("transformer_impl", "either", _ROW["transformer_impl"].reason)
    if values.get("transformer_impl") != "local":
        return
    heads, ranks = values.get("num_attention_heads") or 4, values.get("tensor_model_parallel_size") or 1
    matrices = (values.get("micro_batch_size") or 1) * heads // ranks
    has_kernel = has_softmax_kernel(values.get("seq_length") or LONGEST_OF_SOFTMAX_KERNEL, matrices)
    is_fused = has_kernel and not reading.get("no_masked_softmax_fusion")
    has_more = any(values.get(name) not in (None, False, 1) for name in _NOT_WITH_OWN_LAYERS)
    has_more |= values.get("num_labels") is not None
    if is_fused and not has_more and (values.get("dtype"), values.get("normalization")) == ("bf16", "LayerNorm"):
        values["attention_backend"] = "auto"  # it is Transformer Engine's
        return
    values["transformer_impl"] = "transformer_engine"
    reading.take("transformer_impl", "attention_backend", "unfused")
    reading.miss(
        "transformer_impl",
        "either",
        "Megatron's own layers: memlab takes Transformer Engine's unfused attention, which keeps as many scores for "
        "backward, but has no buffer of the scores that stays between steps; norms and matrices are Transformer "
        "Engine's too",
    )
    key = "attention_softmax_in_fp32"
    if not is_fused and (reading.get(key) or reading.get("apply_query_key_layer_scaling")):
        reading.miss(key, "more", "Megatron's own softmax keeps 4 bytes for each score instead of 2")


_NOT_WITH_OWN_LAYERS = (
    *("num_moe_experts", "multi_latent_attention", "fp8_format", "context_parallel_size", "mtp_num_layers"),
    "window_size",
)


def check_backend(reading: Reading, default: str) -> None:
    """Checks that the environment chooses no other attention than the arguments do.

    Megatron sets these variables for Transformer Engine, and asserts that they are unset or the same
    (``_set_attention_backend`` in models/common/language_module/language_module.py, 0.16.1 and 0.19.2). Those of
    ``local`` are all 0.

    Args:
        default: The framework's backend if the job gives none.

    Raises:
        CannotStartError: If one differs.
    """
    backend = BACKEND.read(reading.entries.get("attention_backend", default)).partition("_")[0]
    for name in ("flash", "fused", "unfused"):
        variable = f"NVTE_{name.upper()}_ATTN"
        given, expected = reading.entries.environment.get(variable), "1" if backend in ("auto", name) else "0"
        if given in ("0", "1") and given != expected:
            raise CannotStartError(
                f"{variable} is {given} in the environment, must be {expected} or unset with attention_backend "
                f"{backend} (Megatron-Core): unset it, or choose another attention_backend",
                "attention_backend",
            )


_READ_WITH_OTHERS = {
    *("vocab_file", "tokenizer_type", "bias_gelu_fusion", "no_bias_gelu_fusion"),
    *("bias_dropout_fusion", "no_bias_dropout_fusion", "squared_relu", "openai_gelu"),
}
"""Keys that decide something only beside other keys, or only where the job gives the sizes of its model."""


def complete_model(reading: Reading) -> None:
    """Derives the model's sizes, with Megatron-LM's defaults, and notes what another model has."""
    values, entries = reading.values, reading.entries
    take_kinds_of_layers(reading)
    hidden = values.get("hidden_size")
    if not values.pop("group_query_attention", False):
        values.pop("num_query_groups", None)
    elif values.get("num_query_groups") is None:
        reading.take("group_query_attention", "num_query_groups", 1)
    is_gated = bool(entries.get("swiglu") or entries.get("quick_geglu"))
    if hidden and values.get("ffn_hidden_size") is None:
        values["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    if hidden is None:
        for name in OF_CLASSIC_GPT:
            values.pop(name, None)
    else:
        _take_layers(reading, is_gated=is_gated)
    if hidden is not None and not values.get("num_moe_experts"):
        reading.not_modelled = [
            one for one in reading.not_modelled if one.place != "default" or not one.key.startswith("moe_")
        ]
    _complete_vocabulary(reading)
    reading.known |= _READ_WITH_OTHERS


def _complete_vocabulary(reading: Reading) -> None:
    """Takes the number of tokens, padded as Megatron-LM pads it."""
    values = reading.values
    divisor = values.pop("make_vocab_size_divisible_by", 128) * (values.get("tensor_model_parallel_size") or 1)
    if padded := values.pop("padded_vocab_size", None):
        values["vocab_size"] = padded
        return
    if not values.get("vocab_size"):
        _take_vocabulary_of_tokenizer(reading)
    elif reading.get("tokenizer_type") == "NullTokenizer":
        # One more, for the end of a document, in 0.16.1 and 0.17.1; not from 0.18 on (0.18.2 and main of August 2026,
        # megatron/core/tokenizers/text/libraries/null_tokenizer.py).
        own = values["vocab_size"]
        reading.take("tokenizer_type", "vocab_size", own + 1)
        newer, older = (-(-tokens // divisor) * divisor for tokens in (own, own + 1))
        if newer != older:
            reading.warnings.append(
                f"tokenizer_type: NullTokenizer has one token more than vocab_size up to Megatron-Core 0.17, so memlab "
                f"takes {older:,} tokens: for 0.18 or later give --set padded_vocab_size={newer}"
            )
    if values.get("vocab_size"):
        values["vocab_size"] = -(-values["vocab_size"] // divisor) * divisor


_GPT2_TOKENS = 50257
"""In https://huggingface.co/openai-community/gpt2/blob/main/vocab.json."""


_TOKENS = {"nemotron_2_256k.model": 256000}
"""Of tokenizers by the names of their files. The first is Nemotron-4's (``vocab_size`` in
https://huggingface.co/nvidia/Nemotron-4-340B-Base), with which Megatron-LM's release tests train."""


def _take_vocabulary_of_tokenizer(reading: Reading) -> None:
    """Takes the vocabulary of a published model's tokenizer, where the job leaves its size to the tokenizer.

    Without ``tokenizer_type``, ``pretrain_gpt.py`` takes ``GPT2BPETokenizer`` (core 0.16.1).
    """
    is_gpt2 = reading.get("tokenizer_type") in (None, "GPT2BPETokenizer") and "vocab_file" in reading.entries.by_key
    if is_gpt2 and reading.entries.get("hidden_size"):
        reading.take("vocab_file", "vocab_size", _GPT2_TOKENS)
        reading.warnings.append(
            f"vocab_size is not in the file, so Megatron-LM counts the tokens in vocab_file, and memlab takes GPT-2's "
            f"{_GPT2_TOKENS}: give --set vocab_size=TOKENS"
        )
        return
    name = reading.entries.get("tokenizer_model")
    given = reading.entries.by_key.get("tokenizer_model")  # its folder may be known only when the job runs
    known = None if given is None else _TOKENS.get(str(given.value).rpartition("/")[2])
    if (
        known is None
        and reading.get("tokenizer_type") == "Llama2Tokenizer"
        and published_architecture(str(name)) is None
    ):
        known = 32000
    if known is not None:
        reading.take("tokenizer_model", "vocab_size", known)
        reading.warnings.append(
            f"vocab_size is not in the file, so Megatron-LM counts the tokens in tokenizer_model, and memlab takes "
            f"{known:,}, as its name or tokenizer_type says: give --set vocab_size=TOKENS"
        )
        return
    model = published_architecture(str(name)) if name else None
    if model is not None:
        reading.take("tokenizer_model", "vocab_size", model.vocab_size)
        reading.warnings.append(
            f"vocab_size is not in the file, so Megatron-LM takes the tokenizer's own number of tokens, and memlab the "
            f"published model's {model.vocab_size}, which may be larger: give --set vocab_size=TOKENS"
        )


def _take_layers(reading: Reading, *, is_gated: bool) -> None:
    """Takes what layers consist of, as ``core_transformer_config_from_args`` does."""
    values, entries = reading.values, reading.entries
    values["gated_linear_unit"] = is_gated
    if "add_bias_linear" in entries.by_key:  # of a log, which has the flags' destinations
        reading.take("add_bias_linear", "add_bias_linear", bool(entries.get("add_bias_linear")))
    if reading.get("use_rotary_position_embeddings", False) and "position_embedding_type" not in entries.by_key:
        reading.take("use_rotary_position_embeddings", "position_embedding_type", "rope")
    if values["position_embedding_type"] == "yarn":
        values["position_embedding_type"] = "rope"
    if values["position_embedding_type"] != "learned_absolute":
        values.pop("max_position_embeddings", None)
    has_bias = values["add_bias_linear"]
    if not entries.get("swiglu"):
        fuses = bool(reading.get("bias_gelu_fusion", not reading.get("no_bias_gelu_fusion", False)))
        reading.take("bias_gelu_fusion", "bias_activation_fusion", fuses and has_bias)
    is_fused = reading.get("bias_dropout_fusion", not reading.get("no_bias_dropout_fusion", False))
    if (has_bias or values.get("hidden_dropout")) and not is_fused:
        reading.miss("no_bias_dropout_fusion", "more", "biases and dropout before residuals have temporaries")
    _note_other_layers(reading, is_gated=is_gated)


def _note_other_layers(reading: Reading, *, is_gated: bool) -> None:
    """Notes the layers that memlab does not have."""
    values = reading.values
    positions, normalization = values["position_embedding_type"], values["normalization"]
    if positions not in ("rope", "learned_absolute", "none"):
        reading.blocked["model"].append(
            f"positions {positions}: memlab has rope, learned_absolute and none (--position-embedding-type)"
        )
    if normalization not in ("RMSNorm", "LayerNorm"):
        reading.blocked["model"].append(f"normalization {normalization}: memlab has RMSNorm and LayerNorm")
    if reading.get("openai_gelu"):
        reading.blocked["model"].append("--openai-gelu: memlab's MLPs have SwiGLU, GELU or squared ReLU")
    if values.get("num_moe_experts") and not (is_gated or values["squared_relu"]):
        reading.blocked["model"].append("no --swiglu: memlab's experts have a gate (--swiglu or --quick-geglu)")
    if values["quick_geglu"] and not values.get("num_moe_experts"):
        reading.blocked["model"].append("--quick-geglu: memlab's dense MLPs have SwiGLU or GELU")


def take_sequence_parallel(reading: Reading, key: str = "sequence_parallel", *, default: bool = False) -> None:
    """Takes whether tensor parallel ranks split the sequences between matrices."""
    reading.take(key, "sequence_parallel", bool(reading.get(key, default)))


def _world_size_of_launcher(reading: Reading) -> None:
    """Takes the ranks from torchrun's flags, where the script has them."""
    per_node, nodes = reading.get("nproc_per_node"), reading.get("nnodes", 1)
    if isinstance(per_node, int) and isinstance(nodes, int):
        reading.take("nproc_per_node", "world_size", per_node * nodes)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    architecture, layout = scenario.architecture, scenario.layout
    padding = 128 if architecture.vocab_size % (128 * layout.tensor_model_parallel_size) == 0 else 1
    values = common(scenario, settings) | fields_of(architecture)
    values |= {name: getattr(architecture, name) for name in OF_CLASSIC_GPT}
    return values | {
        "num_layers": scenario.num_layers,
        "group_query_attention": architecture.num_query_groups != architecture.num_attention_heads,
        "make_vocab_size_divisible_by": padding,
        "padded_vocab_size": None,
        "bf16": scenario.dtype == "bf16",
        "overlap_param_gather": scenario.state.overlap_param_gather and not refused_overlap(scenario),
        "no_rope_fusion": not scenario.state.apply_rope_fusion,
        "apply_rope_fusion": True,
        "virtual_pipeline_model_parallel_size": None,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_pipeline_model_parallel_size
        if layout.virtual_pipeline_model_parallel_size > 1
        else None,
    }


def common(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns all fields of a job by their names, as every framework's `compose` starts from."""
    layout = scenario.layout
    chunks = layout.virtual_pipeline_model_parallel_size
    state = scenario.state.options()
    left_out = {*unread(TrainingState, state)}
    if layout.pipeline_model_parallel_size == 1:
        left_out.add("deallocate_pipeline_outputs")
    if not scenario.architecture.routes:
        left_out |= {name for name in state if name.startswith("moe_")}
    model = scenario.architecture.with_layers(scenario.num_layers)
    return {
        **{name: getattr(layout, name) for name in layout.__slots__},
        **{name: value for name, value in state.items() if name not in left_out},
        **{name: getattr(settings, name) for name in settings.__slots__},
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "fine_grained_activation_offloading": settings.offload_modules is not None,
        "moe_layer_freq": model.moe_layer_freq if model.routes else None,
        "seq_length": scenario.seq_length,
        "micro_batch_size": scenario.micro_batch_size,
        "num_microbatches": scenario.num_microbatches,
        "global_batch_size": scenario.micro_batch_size * scenario.num_microbatches * layout.data_parallel_size,
        "world_size": layout.world_size,
        "dtype": scenario.dtype,
        "allocator": str(scenario.allocator) if str(scenario.allocator) != "default allocator" else None,
    }


def named(scenario: Scenario) -> dict[str, Any]:
    """Returns model and ranks as those frameworks have them that name a published model and count nodes."""
    world_size, model = scenario.layout.world_size, scenario.architecture
    return {
        **said_of_layers(model),
        "architecture": HUGGING_FACE_NAMES.get(model.name, model.name),
        "num_layers": None if scenario.num_layers == model.num_layers else scenario.num_layers,
        "nodes": world_size // 8 if world_size % 8 == 0 else 1,
        "ranks_per_node": 8 if world_size % 8 == 0 else world_size,
    }


def leaves_out(value: Any) -> bool:
    """Whether leaving the flag out expresses a value."""
    return value is None or value is False


def render(values: dict[str, Any]) -> list[str]:
    """Writes flags, one a line."""
    removed = ["--" + _flag(name, value=True) for name, value in values.items() if value is ABSENT]
    values = {name: value for name, value in values.items() if value is not ABSENT}
    ranks = values.pop("world_size", None)
    if values.get("hybrid_override_pattern"):
        values["is_hybrid_model"], values["spec"] = (
            True,
            ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        )
    lines = [*removal(removed), *("--" + _flag(name, value) for name, value in values.items())]
    if (values.get("tensor_model_parallel_size") or 1) > 1:
        lines.append("--sequence-parallel")
    if "num_experts" in values:
        lines.append("--moe-grouped-gemm")
    return [*([f"# torchrun --nnodes 1 --nproc-per-node {ranks}"] if ranks else []), *lines]


def _flag(name: str, value: Any) -> str:
    return name.replace("_", "-") + ("" if value is True else " " + shell_words(value))


def _check(reading: Reading) -> None:
    check_arguments(reading)
    _check_positions(reading)
    check_backend(reading, "auto")


def _check_positions(reading: Reading) -> None:
    """Checks what ``validate_args`` asserts of the positions (core 0.16.1).

    Raises:
        CannotStartError: If it refuses them.
    """
    values = reading.values
    positions, longest = reading.get("max_position_embeddings"), values.get("seq_length")
    if isinstance(positions, int) and longest and positions < longest:
        raise CannotStartError(
            f"max_position_embeddings is {positions}, must be at least seq_length, {longest}, also with rope, "
            "by a rule of Megatron-LM's arguments: give a larger one",
            "seq_length",
        )
    if values.get("mtp_num_layers") and values.get("position_embedding_type") not in (None, "rope", "none"):
        raise CannotStartError(
            f"mtp_num_layers is {values['mtp_num_layers']} with position_embedding_type "
            f"{values['position_embedding_type']}, which the arguments of Megatron-LM refuse: choose rope or none, or "
            "leave mtp_num_layers out",
            *("mtp_num_layers", "position_embedding_type"),
        )


ONLY_OF_MS_SWIFT = {
    "num_labels": "of the training jobs that memlab reads, only ms-swift's have a head",
    "reference_model": "of the training jobs that memlab reads, only ms-swift's run a reference model in the step",
    "teacher_model": "of the training jobs that memlab reads, only ms-swift's name a teacher that is in the step",
    "gkd_logits_topk": "only ms-swift's GKD compares with the largest logits of a teacher that is in the step",
    "lm_loss_beside": "of the training jobs that memlab reads, only ms-swift's add the cross entropy to another loss",
}
ONLY_OF_VERL_AND_SLIME = {
    "entropy_loss": "memlab has this entropy in the losses of verl, slime and SkyRL only",
    "entropy_chunk_size": "memlab has these chunks in the loss of verl only",
}
_ONLY_OF_NEMO_RL = {
    "create_attention_mask": "only NeMo-RL gives all rows of a micro-batch one mask",
    "topk_logits_k": "only NeMo-RL's distillation compares with a teacher's logits",
}
NO_MASK_OF_DATA_LOADER = {"create_attention_mask_in_dataloader": "only Megatron-LM's data loader makes these masks"}
_OWN_LAYERS = {"transformer_impl": "memlab writes Megatron's own layers into jobs of Megatron-LM and slime only"}
ONLY_OF_PROGRAMS = {"logit_kl_topk": "only programs that use Model Optimizer's distillation say it"}
ONLY_OF_MEGATRON_LM = NO_MASK_OF_DATA_LOADER | _OWN_LAYERS | NOT_WRITTEN | ONLY_OF_PROGRAMS
OF_OTHER_FRAMEWORKS = ONLY_OF_MS_SWIFT | ONLY_OF_VERL_AND_SLIME | _ONLY_OF_NEMO_RL | ONLY_OF_MEGATRON_LM
CANNOT_WRITE = (
    ONLY_OF_MS_SWIFT
    | ONLY_OF_VERL_AND_SLIME
    | _ONLY_OF_NEMO_RL
    | ONLY_OF_PROGRAMS
    | {
        "freeze_moe_router": "no argument freezes routers: freeze their weights in the model provider",
        "checkpoint_input_remedy": "Megatron-LM has no remedy for the inputs that checkpoints of MoE layers keep",
        "offload_parameters": "Megatron-LM keeps its parameters on the device between steps",
        "offload_gradients": "Megatron-LM keeps its gradient buffers between steps",
        "offload_optimizer": "Megatron-LM keeps its optimizer state where it is between steps",
        "offload_optimizer_except_update": "Megatron-LM keeps its optimizer state where it is between steps",
        "loss": "Megatron-LM trains with the language-model loss only",
        "fp32_output": "Megatron-LM trains with the language-model loss only",
        "logprobs_chunk_size": "Megatron-LM trains with the language-model loss only",
        "deallocate_pipeline_outputs": "Megatron-LM always frees what a pipeline stage has sent",
        "allocator": "set the environment variable PYTORCH_CUDA_ALLOC_CONF",
    }
)

SWITCHES = (
    "swiglu", "disable_bias_linear", "use_rotary_position_embeddings", "sequence_parallel", "fp16", "moe_grouped_gemm",
    "moe_permute_fusion", "no_gradient_accumulation_fusion", "no_create_attention_mask_in_dataloader",
    "no_bias_swiglu_fusion", "use_mcore_models", "use_flash_attn", "use_megatron_fsdp", "use_custom_fsdp",
    "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "multi_latent_attention", "moe_enable_deepep",
    "overlap_moe_expert_parallel_comm", "tp_comm_overlap", "finetune", "mock_data", "no_load_optim", "no_load_rng",
    "no_save_optim", "no_save_rng", "log_throughput", "auto_detect_ckpt_format",
)  # fmt: skip
"""Flags without a value that memlab reads, or that end many scripts."""

_USER_BUFFERS = tuple(
    one
    for key in USER_BUFFERS
    if "_disable_" not in key.name  # for which there are no flags
    for one in (
        (
            Key(f"disable_{key.name}", key.field, NOT, default=True),
            Key(f"no_{key.name}", key.field, NOT),
            replace(key, default=ABSENT),  # a log has the flags' destinations
        )
        if key.default
        else (key,)
    )
)
_USUAL_FLAGS = {
    "--tensor-model-parallel-size", "--num-layers", "--hidden-size", "--micro-batch-size", "--yaml-cfg",
}  # fmt: skip

_WITHOUT_FLAG = (
    "_cpu_offloading_context", "adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_moment2_method",
    "autocast_dtype", "average_in_collective", "batch_p2p_comm", "batch_p2p_sync", "beta_fast", "beta_slow", "bf16",
    "bias_dropout_fusion", "check_for_nan_in_grad", "cpu_offloading_activations", "cpu_offloading_double_buffering",
    "cpu_offloading_weights", "cuda_graph_retain_backward_graph", "cuda_graph_use_single_mempool",
    "decoupled_weight_decay", "embedding_init_method", "experimental_attention_variant_loss_scale_func",
    "finalize_model_grads_func", "fp16", "fp4_param", "fp8_param_gather", "fp8_recipe",
    "fsdp_all_gather_in_start_param_sync", "grad_norm_skip_threshold", "grad_scale_func", "grad_sync_func",
    "hetereogenous_dist_checkpoint", "inference_sampling_seed", "init_method", "is_hybrid_model",
    "megatron_fsdp_cuda_graph_mode", "megatron_fsdp_use_decoupled_grad", "memory_efficient_layer_norm",
    "microbatch_group_size_per_vp_stage", "moe_extended_tp", "moe_grad_scale_func", "moe_token_dropping",
    "mtp_grad_scale_func", "no_sync_func", "original_max_position_embeddings", "output_layer_init_method",
    "overlap_param_gather", "param_sync_func", "persist_layer_norm", "pipeline_dtype", "preserve_fp32_weights",
    "soap_precondition_frequency", "soap_shampoo_beta", "soap_use_kl_shampoo", "softmax_scale", "timers",
    "tp_comm_atomic_ag", "tp_comm_atomic_rs", "tp_comm_overlap_disable_fc1", "tp_comm_overlap_disable_qkv",
    "tp_only_amax_red", "use_kitchen_attention", "use_te_rng_tracker",
)  # fmt: skip
"""Fields of Megatron-Core's configs without effect for which Megatron-LM has no flag, or another meaning."""
FLAGS_WITHOUT_EFFECT = (
    keys_without_effect("megatron_lm")
    .union(*(keys_without_effect(f"megatron_core_{config}") for config in ("model", "optimizer", "ddp")))
    .difference(_WITHOUT_FLAG)
)
MEGATRON_LM = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    source="core 0.16.1 and 0.19.2",
    signs=Signs(
        looked_for="a block '--- arguments ---', the key MODEL_ARGS, or flags such as --tensor-model-parallel-size",
        of_command=lambda words: is_started_by_a_launcher(words) or not _USUAL_FLAGS.isdisjoint(flags_of(words)),
    ),
    style="flags",
    keys=(*KEYS, *_USER_BUFFERS),
    missing=tuple(row for row in FLAGS_MISSING if row.name != OPTION),
    without_effect=FLAGS_WITHOUT_EFFECT - {key.name for key in _USER_BUFFERS},
    take_files=take_file_for_flags,
    complete=complete,
    complete_refused=complete_refused,
    check=_check,
    compose=compose,
    fixed={"loss": "cross_entropy", "deallocate_pipeline_outputs": True},
    switches=SWITCHES,
    leaves_out=leaves_out,
    without_own_key=frozenset(("dtype",)),
    cannot_write=CANNOT_WRITE | NO_FLAGS | no_adapters("Megatron-LM"),
    cannot_write_of=lambda scenario, _: refused_overlap(scenario),
    render=render,
)
