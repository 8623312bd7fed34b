"""ms-swift with Megatron: ``args.json``, or the arguments of ``megatron sft``, ``pt`` and ``rlhf`` in a script.

Names and defaults: ``swift/megatron/arguments/megatron_args.py`` (4.6.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memlab.config.architectures import Architecture, find_architecture, published_architecture
from memlab.config.families import FAMILIES
from memlab.config.from_json import parse_json
from memlab.config.lora import JOINING, LINEARS, OF_LATENT_ATTENTION, OF_LINEAR_ATTENTION, LoRA
from memlab.config.pipeline_layout import layers_of_pipeline_chunks
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.entries import UNKNOWN, parse_scalar
from memlab.jobs.frameworks.adapters import (
    ALL_LINEAR,
    PASS_WITHOUT_ADAPTERS,
    TARGETS,
    complete_adapters,
    of_one_kind,
)
from memlab.jobs.frameworks.bridge_keys import REPLACED, model_without_effect
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.keys import (
    ABSENT,
    BACKEND,
    COUNT,
    LOAD_BALANCING,
    NONE_WORD,
    NOT,
    NUMBER,
    ROUTER_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    Conversion,
    Key,
    Missing,
    frozen_parts,
    is_given,
    missing_under,
    other_than,
    refusal,
    under,
    with_defaults,
)
from memlab.jobs.frameworks.lines import removal, shell_words
from memlab.jobs.frameworks.megatron_keys import (
    CHUNKS,
    COMPUTE,
    FUSIONS,
    LAYERS,
    MISSING,
    OFFLOAD,
    PIPELINE,
    RECOMPUTE,
    SIZES,
    STAGES,
)
from memlab.jobs.frameworks.megatron_lm import (
    CANNOT_WRITE,
    FLAGS_MISSING,
    FLAGS_OF_COMPUTING,
    FLAGS_OF_THE_OPTIMIZER,
    ONLY_OF_MEGATRON_LM,
    ONLY_OF_MS_SWIFT,
    check_backend,
    common,
    named,
    take_sequence_parallel,
)
from memlab.jobs.frameworks.refused_options import check_swift
from memlab.jobs.frameworks.reinforcement import (
    drop_frozen_parts,
    longest_sequence,
    pack_micro_batch,
    take_rollout,
)
from memlab.jobs.frameworks.without_effect import keys_without_effect
from memlab.jobs.swift_file import is_command, take_argument_file
from memlab.jobs.text_file import text_of

_OPTIMIZER = tuple(key for key in FLAGS_OF_THE_OPTIMIZER if not key.name.startswith("overlap_cpu"))
_RECOMPUTE = tuple(
    replace(key, conversion=NONE_WORD) if key.field == "recompute_granularity" else key
    for key in with_defaults(RECOMPUTE, recompute_granularity="selective", recompute_modules=("core_attn",))
)

_EXTRA = "megatron_extra_kwargs"
_PASSED_ON = (*LAYERS, *PIPELINE, *OFFLOAD, *COMPUTE, *(replace(key, default=ABSENT) for key in RECOMPUTE))
_FLASH_OF_A_VERSION = Conversion(
    lambda value: "flash" if value in ("flash_2", "flash_3", "flash_4") else BACKEND.read(value), BACKEND.write
)
"""``flash_3`` is ``flash`` with one version of flash-attn only, which keeps the same tensors
(``_init_attention_backend``)."""
_CONVERSIONS = {
    BACKEND: _FLASH_OF_A_VERSION,
    ROUTER_DTYPE: Conversion(ROUTER_DTYPE.read, lambda value: ROUTER_DTYPE.write(value) or "none"),
    # Null stands for the model's own.
    LOAD_BALANCING: replace(
        LOAD_BALANCING, read=lambda value: "aux_loss" if value is None else LOAD_BALANCING.read(value)
    ),
}

KEYS = (
    Key("model", "architecture", TEXT),
    Key("load", "loaded", TEXT, None),
    Key("mcore_model", "loaded", TEXT, None),
    Key("NNODES", "nodes", COUNT, 1),
    Key("NPROC_PER_NODE", "ranks_per_node", COUNT, None),
    Key("world_size", "world_size", WHOLE),
    # Of a job under Ray: all GPUs of the training.
    Key("nnodes", "nodes", COUNT),
    Key("train.gpus", "ranks_of_training", COUNT, None),
    *with_defaults(SIZES, expert_tensor_parallel_size=1),
    CHUNKS,
    Key("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage", WHOLE, None),
    Key("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage", WHOLE, None),
    STAGES,
    # Of ms-swift 3.
    Key("num_layers_per_virtual_pipeline_stage", "num_layers_per_virtual_pipeline_stage", WHOLE),
    Key("num_virtual_stages_per_pipeline_rank", CHUNKS.field, WHOLE),
    Key("num_layers", "num_layers", WHOLE),
    Key("tuner_type", "tuner_type", TEXT, "full"),
    Key("train_type", "tuner_type", TEXT),  # before ms-swift 4
    Key("lora_rank", "lora_rank", WHOLE, 8),
    Key("lora_alpha", "lora_alpha", NUMBER, 32),
    Key("lora_dropout", "lora_dropout", NUMBER, 0.05),
    Key("target_modules", "lora_target_modules", TARGETS, LINEARS),
    Key("max_length", "max_length", COUNT, None),
    Key("seq_length", "given_seq_length", COUNT, None),
    Key("packing_length", "packing_length", WHOLE, None),
    Key("max_completion_length", "max_completion_length", WHOLE, 512),
    Key("rlhf_type", "rlhf_type", TEXT, None),
    Key("teacher_model", "teacher_model", TEXT, None),
    Key("gkd_logits_topk", "gkd_logits_topk", COUNT),
    Key("task_type", "task_type", TEXT, None),
    Key("num_labels", "num_labels", COUNT, None),
    Key("vllm_mode", "vllm_mode", TEXT, None),
    Key("vllm_gpu_memory_utilization", "engine_share", NUMBER, 0.9),
    Key("vllm_tensor_parallel_size", "engine_ranks", COUNT, 1),
    Key("sleep_level", "sleep_level", WHOLE, 0),
    Key("padding_free", "removes_padding", SWITCH, True),
    Key("micro_batch_size", "micro_batch_size", COUNT, 1),
    Key("global_batch_size", "global_batch_size", COUNT, 16),
    *_RECOMPUTE,
    *(
        replace(key, conversion=_CONVERSIONS.get(key.conversion, key.conversion))
        for key in with_defaults(
            FLAGS_OF_COMPUTING,
            cross_entropy_loss_fusion=True,
            attention_backend="flash",
            moe_router_dtype="fp32",
            calculate_per_token_loss=None,
        )
    ),
    *with_defaults(FUSIONS, bias_activation_fusion=True, gradient_accumulation_fusion=True),
    # Of ms-swift 3.
    Key("no_rope_fusion", "apply_rope_fusion", NOT),
    Key("no_bias_swiglu_fusion", "bias_activation_fusion", NOT),
    Key("no_gradient_accumulation_fusion", "gradient_accumulation_fusion", NOT),
    *_OPTIMIZER,
    Key("use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    Key("overlap_grad_reduce", "overlap_grad_reduce", SWITCH, False),
    Key("overlap_param_gather", "overlap_param_gather", SWITCH, False),
    Key("manual_gc", "manual_gc", SWITCH, False),
    Key("offload_model", "offload_parameters", SWITCH, False),
    Key("offload_optimizer", "offload_optimizer", SWITCH, False),
    Key("bf16", "bf16", SWITCH, True),
    *under(_EXTRA, _PASSED_ON),
    *LAYERS,  # of ms-swift 3
)
_CORE_ARGUMENTS = (
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "cp_comm_type", "deterministic_mode", "fp16",
    "fp4_format", "fp4_param_gather", "microbatch_group_size_per_virtual_pipeline_stage",
    "microbatch_group_size_per_vp_stage", "moe_apply_probs_on_input",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "no_rope_freq", "normalization", "optimizer", "optimizer_cuda_graph", "overlap_p2p_comm",
    "overlap_param_gather_with_optimizer_step", "position_embedding_type",
    "qk_l2_norm", "rotary_interleaved", "tp_comm_overlap", "transformer_impl", "use_megatron_fsdp",
)  # fmt: skip
"""Those of Megatron's that ms-swift has too, in 4.6.0 or in 3.12."""
_OF_CORE = {row.name: row for row in MISSING}
_NOT_MODELLED = (*MISSING, *REPLACED)
"""Fields of TransformerConfig, which ``megatron_extra_kwargs`` sets."""


_OF_ENGINE = ("speculative_config", "quantization", "cpu_offload_gb", "kv_cache_memory_bytes", "dtype")
"""vLLM's arguments that change how much memory the engine takes apart from its share of the GPU."""
FRAMEWORK_MISSING = (
    *(replace(row, default=ABSENT) for row in FLAGS_MISSING if row.name in _CORE_ARGUMENTS),
    *missing_under(_EXTRA, _NOT_MODELLED),
    *(
        row
        for name in ("tuner_type", "train_type")
        for row in (
            # ``_prepare_full_vit`` in swift/megatron/utils/utils.py.
            Missing(
                name,
                "more",
                "adapters in the language model, which memlab predicts alone: the tower and the aligner are trained "
                "whole, and come on top",
                lambda value: value == "lora_llm",
            ),
        )
    ),
    *(
        Missing(name, "less", "frozen parameters have no gradients and no optimizer state", is_given)
        for name in ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio")
    ),
    Missing(
        "vllm_engine_kwargs",
        "either",
        "memlab does not read the inference engine's own arguments",
        lambda value: any(word in str(value) for word in _OF_ENGINE),
    ),
    *frozen_parts(""),
    Missing("new_special_tokens", "more", "the vocabulary grows by these tokens", is_given),
    Missing("is_multimodal", "more", "memlab has no vision tower and no aligner", blocks=True, of="towers"),
    Missing("colocate_groups", "more", "the teacher's inference engine has the training's GPUs", is_given),
    Missing("teacher_model", "more", "a frozen teacher model on the same ranks", is_given),
    Missing(
        "bridge_backend",
        "either",
        "Megatron-Bridge makes the model, with other defaults",
        other_than("mcore-bridge"),
    ),
    Missing("linear_decoupled_in_proj", "either", "linear attention has two matrices in place of one"),
    Missing("load_args", "either", "arguments that the job does not give come from the checkpoint's args.json"),
    Missing("mlp_padding_free", "less", "MLPs leave the padding of sequences out"),
    Missing("sequence_packing_scheduler", "either", "rows have different lengths", is_given),
    Missing("log_entropy", "more", "the entropy is computed from the logits"),
    Missing("top_entropy_quantile", "more", "the entropy is computed from the logits", other_than(1, 1.0)),
    Missing(
        "router_replay_mode",
        "more",
        "the chosen experts of each token are kept, of all micro-batches",
        other_than("disabled"),
    ),
    Missing("task_type", "either", "the model has a head that computes no logits", other_than("causal_lm", "seq_cls")),
    Missing(
        "torch_dtype", "either", "memlab takes bf16", lambda value: value not in (None, "bfloat16", "torch.bfloat16")
    ),
)

_LIKELIHOOD = ("grpo", "gkd")
"""Methods that compute log-probabilities from logits. DPO and KTO take the language model's loss per token for them
(``get_logps`` in swift/megatron/trainers/rlhf_mixin.py)."""
_COMPARES_IN_THE_STEP = ("dpo", "kto")
"""Methods whose micro-batches run the reference model too: where all parameters are trained, a frozen copy of the model
(``prepare_model`` in swift/megatron/trainers/rlhf_mixin.py), else the model without its adapters. GRPO runs its copy
between the steps, and keeps it with ``--beta 0`` too, although nothing reads it then."""

_WITH_PAIRS = ("dpo", "rm")


_ADAPTERS = ("adapters", "ref_adapters", "mcore_adapter", "mcore_ref_adapter")
"""Keys that make ``tuner_type`` ``lora`` where it is ``full`` (``MegatronArguments.__post_init__``)."""


def _tuner(reading: Reading) -> Any:
    """Returns which parameters are trained; ``train_type`` is the key's name before ms-swift 4."""
    given = reading.entries.get("tuner_type", reading.entries.get("train_type", "full"))
    has_adapters = any(is_given(reading.get(key)) for key in _ADAPTERS)
    return "lora" if given == "full" and has_adapters else given


def _complete_adapters(reading: Reading) -> None:
    """Takes ms-swift's own adapters: one for each expert, and one for each linear outside them."""
    values, tuner = reading.values, _tuner(reading)
    del values["tuner_type"]
    lacks = [] if tuner in ("lora", "lora_llm") else [f"adapters of the kind {tuner}"]
    if (values.get("expert_tensor_parallel_size") or 1) > 1:
        lacks.append("adapters of ms-swift under expert tensor parallelism")
    for name, what in (("target_regex", "pattern of ms-swift"), ("modules_to_save", "modules that are trained whole")):
        if is_given(reading.get(name)):
            lacks.append(what)
    if reading.get("lora_bias") not in (None, "none"):
        lacks.append("biases that are trained")
    if reading.get("lora_dtype") not in (None, "bfloat16"):
        lacks.append("adapters of another type than the model's")
    if tuner in (None, "full"):
        values["lora_rank"] = None
        return
    values |= {"lora_library": "mcore_bridge", "lora_enable_input_require_grads": True}
    if _take_saved_adapters(reading).get("bias") not in (None, "none"):
        lacks.append("biases that are trained")
    complete_adapters(reading, "tuner_type", lacks)


_SAVED = {"r": ("lora_rank", WHOLE), "lora_alpha": ("lora_alpha", NUMBER), "lora_dropout": ("lora_dropout", NUMBER)}


def _take_saved_adapters(reading: Reading) -> dict[str, Any]:
    """Takes and returns what the adapters have that a job goes on with; it counts before its own keys.

    ``_load_adapter_config`` of ms-swift reads it.
    """
    named, own = reading.get("adapters"), reading.entries.by_key.get("lora_rank")
    if not is_given(named) or named == []:
        return {}
    folder = str(named[0] if isinstance(named, list) else named)
    files = (up / folder / "adapter_config.json" for up in reading.path.absolute().parents)
    text = next((text for file in files if (text := text_of(file)) is not None), None)
    if text is None and (own is None or own.line is not None):
        reading.warnings.append(
            "adapters: ms-swift takes their rank from the folder's adapter_config.json, which memlab does not see: "
            f"memlab takes {reading.values['lora_rank']}, give --set lora_rank=NUMBER for another"
        )
    read = parse_json(text or "{}", "adapter_config.json", "give the one that peft or ms-swift wrote")
    saved: dict[str, Any] = read if isinstance(read, dict) else {}
    for key, (field, conversion) in _SAVED.items():
        if saved.get(key) is not None:
            reading.take_back(field)
            reading.take("adapters", field, conversion.checked("adapter_config.json", key, saved[key]))
    return saved


def _check(reading: Reading) -> None:
    check_backend(reading, "flash")
    check_swift(reading)
    connections = reading.entries.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if reading.entries.get("use_megatron_fsdp") and connections == "1":
        reading.warnings.append(
            "use_megatron_fsdp is on with CUDA_DEVICE_MAX_CONNECTIONS 1, which ms-swift sets unless the job's "
            "environment does, and refuses: export another number, such as 32"
        )


def _complete_model(reading: Reading, architecture: Architecture) -> None:
    """Drops frozen parts that the model does not have, and takes those of this model for all linears."""
    drop_frozen_parts(reading, architecture)
    if published_architecture(str(reading.values.get("architecture"))) == architecture:
        _check_published(reading, architecture)
    if reading.get("rlhf_type") == "gkd":
        _take_teacher(reading, architecture)
    named, values = WORDS.read(reading.get("target_modules")), reading.values
    if values.get("lora_target_modules") == LINEARS and (named is None or ALL_LINEAR in named):
        owners = [weight.name.split(".")[-2] for part in architecture.parts for weight in part.weights()]
        others = (*OF_LATENT_ATTENTION, *OF_LINEAR_ATTENTION)
        names = (*LINEARS, *(name for name in owners if name in others))
        names += (JOINING,) if values.get("mtp_num_layers") else ()
        values["lora_target_modules"] = tuple(dict.fromkeys(names))
        complete_adapters(reading, "tuner_type")


def _check_published(reading: Reading, architecture: Architecture) -> None:
    """Checks what ``MegatronArguments.__post_init__`` has for some models only (4.6.0), of a model of text.

    Raises:
        CannotStartError: If it refuses the job.
    """
    if _tuner(reading) == "lora_llm":
        raise CannotStartError(
            f"tuner_type is lora_llm with {architecture.name}, which ms-swift takes for multimodal models only: give "
            "lora",
            "lora_rank",
        )
    if reading.get("apply_wd_to_qk_layernorm") and not FAMILIES[architecture.family].has_delta_net:
        raise CannotStartError(
            f"apply_wd_to_qk_layernorm is true with {architecture.name}, which ms-swift takes for models with linear "
            "attention only: leave it out"
        )


def _take_teacher(reading: Reading, student: Architecture) -> None:
    """Takes GKD's teacher, which runs before the micro-batches of a step are trained, where memlab predicts it.

    The teacher is as it is loaded, or the model without its adapters (`_drop_teacher`), or a server sends its largest
    logits (``_compute_teacher_logits`` in swift/megatron/trainers/gkd_trainer.py, 3602360).
    """
    values, get, key = reading.values, reading.get, "teacher_model"
    is_server = is_given(get("teacher_model_server")) and values.get("gkd_logits_topk") is not None
    if not is_server and not _takes_own_teacher(reading, student):
        values.pop("gkd_logits_topk", None)
        reading.take_back("gkd_logits_topk")
        return
    reading.not_modelled = [one for one in reading.not_modelled if one.key not in (key, "rlhf_type")]
    reading.take("rlhf_type", "loss", "jsd")
    if not is_server:
        reading.take("rlhf_type", "reference_model", "without_adapters" if key in reading.without_effect else "copy")
    reading.miss(
        "rlhf_type", "less", "the loss compares the tokens of answers alone, and memlab takes those of prompts too"
    )
    if get("offload_teacher_model"):
        reading.miss("offload_teacher_model", "less", "the teacher leaves the device before the student is trained")
    if get("beta", 0.5) in (0, 1):
        reading.miss("beta", "less", "the loss compares with one distribution in place of a mixture of both")
    if get("sft_alpha"):
        # Not of answers that the student has generated (``loss_func``).
        of_student = get("lmbda", 0.5) == 1 and get("use_vllm", default=True) is not False
        reading.take("sft_alpha", "lm_loss_beside", value=not of_student)
    if (get("steps_per_generation") or 1) > 1 or is_given(get("generation_batch_size")):
        reading.miss("steps_per_generation", "more", "the teacher's logits of several steps are there together")


def _takes_own_teacher(reading: Reading, student: Architecture) -> bool:
    """Takes a teacher that the training's ranks have; False where there is none, or memlab does not predict it."""
    values, get, key = reading.values, reading.get, "teacher_model"
    is_student = key in reading.without_effect
    if not is_given(get(key)) or _has_more_than_a_frozen_model(reading):
        return False
    try:
        teacher = student if is_student else find_architecture(str(get(key)))
    except ValueError:
        return False
    if teacher.vocab_size != student.vocab_size or (is_student and values.get("lora_rank") is None):
        return False
    if not is_student:
        is_other = teacher.name != student.name or is_given(get("num_layers"))
        reading.take(key, key, str(get(key)) if is_other else None)
    return True


def _complete_trained(reading: Reading) -> None:
    """Takes which parameters are trained, and what the optimizer's name decides."""
    _complete_adapters(reading)
    if "muon" in str(reading.get("optimizer", "adam")):
        reading.take("optimizer", "use_distributed_optimizer", value=False)
    reading.values["is_thd"] = reading.values.pop("removes_padding") or bool(reading.get("packing"))
    if not reading.values["is_thd"]:
        # ``_data_collator`` in swift/template/base.py.
        reading.miss("padding_free", "more", "rows that are not packed have a mask of 1 byte for each pair of tokens")


def _note_history(reading: Reading) -> None:
    """Notes the history of scales, which FP8 with delayed scaling has, and for which ms-swift has its own default."""
    length = reading.get("fp8_amax_history_len", 1024)
    row = _OF_CORE["fp8_amax_history_len"]
    if reading.values.get("fp8_format") and reading.values.get("fp8_recipe") == "delayed" and row.is_on(length):
        reading.miss("fp8_amax_history_len", row.effect, row.reason)


def _note_fusion(reading: Reading) -> None:
    """Says on which machines the accumulation of gradients is fused (``megatron_args.py``, 4.6.0)."""
    if reading.values.get("gradient_accumulation_fusion"):
        reading.warnings.append(
            "gradient_accumulation_fusion is on, and ms-swift switches it off where Apex cannot be imported: for such "
            "a machine give --set gradient_accumulation_fusion=false"
        )


_OF_VERSION_3 = (
    "train_type", "load", "save", "ref_load", "adapter_load", "max_epochs", "save_interval", "log_interval",
    "eval_interval", "num_workers", "no_bias_dropout_fusion", "no_rope_fusion", "initialize_embedding",
    "load_safetensors",
)  # fmt: skip
"""Arguments that ms-swift 4 renamed or left out, and refuses."""
_DEFAULTS_OF_VERSION_3 = {"cross_entropy_loss_fusion": False, "apply_rope_fusion": True}
"""Where they are others than in 4.0.0 to 4.6.0 (swift/megatron/argument/megatron_args.py, 3.12.0)."""


def _complete_version(reading: Reading) -> None:
    """Takes the defaults of ms-swift 3 where the job has an argument of it."""
    found = [key for key in _OF_VERSION_3 if key in reading.entries.by_key]
    if not found:
        return
    given = {one.field for one in reading.taken if one.place != "default"}
    for name, value in _DEFAULTS_OF_VERSION_3.items():
        if name not in given:
            reading.take(name, name, value)
    reading.warnings.append(
        f"{found[0]} is an argument of ms-swift 3, so memlab takes the defaults of 3.12 where they are others"
    )


def complete(reading: Reading) -> None:
    """Derives ranks, workload, loss and gradients."""
    values = reading.values
    _complete_version(reading)
    loaded = values.pop("loaded", None)
    if values.get("architecture") is None and loaded:
        values["architecture"] = loaded
    values["dtype"] = "bf16" if values.pop("bf16") else "fp32"
    values["grad_reduce_in_bf16"] = values.get("main_grads_dtype") == "bf16"
    per_node = _complete_ranks(reading)
    _complete_extra(reading)
    kind, generated = values.pop("rlhf_type"), values.pop("max_completion_length")
    if kind in _LIKELIHOOD:
        values["loss"], values["fp32_output"] = "log_softmax", True
    if kind == "gkd":
        reading.miss("rlhf_type", "more", "the loss compares whole distributions of teacher and student")
    elif values.pop("gkd_logits_topk", None) is not None:
        reading.take_back("gkd_logits_topk", "only --rlhf_type gkd reads it")
    # With this probability GKD trains on answers of the student, where an engine makes them
    # (``_determine_data_source`` in swift/megatron/trainers/gkd_trainer.py).
    is_on_policy = reading.get("lmbda", 0.5) != 0 and reading.get("use_vllm", default=True) is not False
    generates = kind == "grpo" or (kind == "gkd" and is_on_policy)
    _complete_offload(reading, is_generating=generates)
    length = _length(reading, generated if generates else 0)
    values["seq_length"] = length
    if kind in _WITH_PAIRS:
        _complete_pairs(reading)
    _complete_task(reading, kind)
    _drop_teacher(reading, kind)
    del values["teacher_model"]  # `_take_teacher` takes it, where the model is known
    reading.take_back("teacher_model")
    has_reference_model = kind == "grpo" and _tuner(reading) == "full"
    _complete_rollout(reading, per_node, kind, is_generating=generates, has_reference_model=has_reference_model)
    rows = values["micro_batch_size"]
    # The language model's loss needs the same memory either way: it is computed in the layout of its logits.
    is_one_row = values["removes_padding"] and values["global_batch_size"] % rows == 0
    if kind in _LIKELIHOOD and length and is_one_row:
        pack_micro_batch(reading, "micro_batch_size")
        values["global_batch_size"] //= rows
    take_sequence_parallel(reading)
    _pad_rows(reading)
    _complete_trained(reading)
    if kind in _COMPARES_IN_THE_STEP:
        _take_reference_model(reading)
    if kind == "kto":
        reading.miss(
            "rlhf_type", "more", "two passes more without gradients, for the divergence that KTO compares with"
        )
    _note_history(reading)
    _note_fusion(reading)


def _pad_rows(reading: Reading) -> None:
    """Pads rows to a multiple of what `_multiple_of_rows` says."""
    length, multiple = reading.values["seq_length"], _multiple_of_rows(reading.values)
    if length and length % multiple:
        padded = -(-length // multiple) * multiple
        reading.values["seq_length"] = padded
        reading.warnings.append(f"rows of {length:,} tokens are padded to {padded:,}, as ms-swift does")


def _multiple_of_rows(values: Mapping[str, Any]) -> int:
    """Returns what rows are padded to a multiple of: for the ranks that share them, FP8 and cuDNN's attention.

    See ``get_padding_to`` in swift/megatron/utils/utils.py (3602360).
    """
    tensor = (values.get("tensor_model_parallel_size") or 1) if values.get("sequence_parallel") else 1
    ranks = tensor * (values.get("context_parallel_size") or 1)
    recipe = _ROWS_OF_RECIPES.get(str(values.get("fp8_recipe")))
    of_fp8 = ranks * (recipe or (16 if values.get("fp8_format") else 1))
    return max(of_fp8, 64 * ranks if values.get("attention_backend") == "fused" else 1)


_ROWS_OF_RECIPES = {"blockwise": 128, "mxfp8": 32}
"""Tokens of each rank, also where no matrix is multiplied in FP8."""


def _complete_pairs(reading: Reading) -> None:
    """Takes two sequences, the chosen and the rejected, for each of a batch (``_rlhf_data_collator``).

    Packing fills a row with pairs, up to its length (``create_packed_idx`` in swift/dataset/packing.py).
    """
    if reading.get("packing"):
        reading.miss("rlhf_type", "more", "a pair of answers that is longer than a row makes a row of its own")
    else:
        _double_batch(reading, "rlhf_type")


def _double_batch(reading: Reading, key: str) -> None:
    for name in ("micro_batch_size", "global_batch_size"):
        reading.take(key, name, 2 * reading.values[name])


def _complete_task(reading: Reading, kind: str | None) -> None:
    """Takes the head of reward models and classifiers, and how many sequences each of a batch stands for.

    Of embeddings these are an anchor and its positive, which negatives may follow. A reranker has a positive and
    negatives for each (``_embedding_data_collator`` and ``_reranker_data_collator`` in swift/template/base.py, ms-swift
    3602360).
    """
    task = "seq_cls" if kind == "rm" else reading.get("task_type")
    del reading.values["task_type"]
    if reading.values["calculate_per_token_loss"] is None:
        reading.values["calculate_per_token_loss"] = _divides_by_all_tokens(kind, task)
    if kind == "rm":  # ``MegatronRLHFArguments.__post_init__``
        reading.take("rlhf_type", "num_labels", 1)
    elif task != "seq_cls":
        reading.values["num_labels"] = None
    elif reading.values["num_labels"] is None:  # ``get_model_info_meta`` in swift/model/model_meta.py
        raise CannotStartError("task_type is seq_cls without num_labels, which ms-swift refuses: give num_labels")
    if reading.values["num_labels"] is not None and reading.values.get("mtp_num_layers"):
        reading.values["mtp_num_layers"] = None
        reading.take_back("mtp_num_layers")
        reading.miss(
            "mtp_num_layers", "more", "layers of multi-token prediction beside a head, which memlab leaves out"
        )
    if task == "embedding":
        _double_batch(reading, "task_type")
        reading.miss("task_type", "more", "each negative of the data is a sequence of the micro-batch too")
    if task in ("reranker", "generative_reranker"):
        negatives = _variable(reading, "MAX_NEGATIVE_SAMPLES", 7)
        reading.miss("task_type", "more", f"each of a batch is a positive and up to {negatives} negatives of the data")


def _divides_by_all_tokens(kind: str | None, task: str | None) -> bool:
    """Whether the loss is one per token by default (``_set_default`` in swift/megatron/arguments/megatron_args.py)."""
    return kind is None and task in (None, "causal_lm")


def _has_more_than_a_frozen_model(reading: Reading) -> bool:
    """Whether a job has what memlab does not predict beside a frozen model in the step."""
    values = reading.values
    has_more = any(values.get(name) for name in ("mtp_num_layers", "offload_modules"))
    has_more |= bool(values.get("fp8_param_gather")) and values.get("fp8_recipe") == "mxfp8"
    stages = values.get("pipeline_model_parallel_size") or 1
    text, chunks = values.get("pipeline_model_parallel_layout"), values.get("virtual_pipeline_model_parallel_size") or 1
    if text:
        chunks = len(layers_of_pipeline_chunks(text)) / stages
    return has_more or chunks > 1 or (stages > 1 and values.get("num_layers_per_virtual_pipeline_stage") is not None)


def _take_reference_model(reading: Reading) -> None:
    """Takes the reference model of a step, where memlab predicts it.

    Stages of a pipeline send what it computed too (``forward_step`` in swift/megatron/trainers/dpo_trainer.py).
    """
    values = reading.values
    kind = "copy" if _tuner(reading) == "full" else "without_adapters" if values.get("lora_rank") else None
    has_own_adapters = any(is_given(reading.get(key)) for key in ("ref_adapters", "mcore_ref_adapter"))
    if kind and not (_has_more_than_a_frozen_model(reading) or has_own_adapters):
        reading.take("rlhf_type", "reference_model", kind)
        return
    if (values.get("pipeline_model_parallel_size") or 1) > 1:
        reading.miss("rlhf_type", "more", "pipeline stages send and keep the reference model's outputs too")
    if has_own_adapters:
        reading.miss("rlhf_type", "more", "the reference model has adapters of its own")
    elif kind == "copy":
        reading.miss("ref_model", "more", "a frozen copy of the model in bf16, on the device during training too")
    else:
        reading.miss("rlhf_type", "more", PASS_WITHOUT_ADAPTERS)


def _complete_offload(reading: Reading, *, is_generating: bool) -> None:
    """Takes what leaves the device: gradients with the parameters (``offload_megatron_model_to_cpu``).

    Nothing does without an engine, nor for one with a server of its own (``_init_rollout_engine`` in
    swift/megatron/trainers/rollout_mixin.py). Under Ray a server changes nothing; parameters leave the device too where
    anything else does, and for an engine on the same GPUs in any case (``_generation_context`` in
    swift/ray/megatron/base_trainer.py).
    """
    values = reading.values
    is_under_ray = "train.gpus" in reading.entries.by_key
    is_colocated = "rollout.gpus" in reading.entries.by_key and values.get("vllm_mode") == "colocate"
    if is_under_ray and (is_colocated or values.get("offload_optimizer")):
        values["offload_parameters"] = True
    if not is_under_ray and not (is_generating and values.get("vllm_mode") != "server"):
        for key in ("offload_model", "offload_optimizer"):
            name = "offload_parameters" if key == "offload_model" else key
            if values.get(name):
                reading.take(key, name, value=False)
                reading.warnings.append(
                    f"{key} has no effect: ms-swift offloads only around generation on the training's own GPUs "
                    "(vllm_mode colocate)"
                )
    values["offload_gradients"] = values.get("offload_parameters")


def _length(reading: Reading, generated: int) -> int | None:
    """Returns the tokens of the longest sequence, with the tokens of an answer where the job generates some."""
    lengths = [reading.values.pop(name) for name in ("packing_length", "given_seq_length", "max_length")]
    length = next((number for number in lengths if number), None)
    if length is None:
        taken = "the architecture's usual length"
        if generated:
            taken = f"sequences as long as an answer, {generated:,} tokens: give --set max_length=TOKENS"
        reading.assumed.append("how long sequences are")
        reading.warnings.append(f"max_length is not in the file, so memlab takes {taken}")
    return _length_with_answers(reading, length or 0, generated) if generated else length


def _length_with_answers(reading: Reading, prompt: int, generated: int) -> int:
    """Returns the tokens of the longest sequence with its answers.

    Each turn generates as many tokens (``run_multi_turn`` in swift/rollout/agent_loop.py), after messages of the
    scheduler that only the job knows. An engine on the same GPUs ends a sequence at its own longest length
    (``set_default_max_tokens`` in swift/infer_engine/infer_engine.py), and under Ray any engine. A server has arguments
    of its own.
    """
    scheduler, turns = reading.get("multi_turn_scheduler"), reading.get("max_turns")
    of_engine = reading.get("vllm_max_model_len")
    is_own = reading.values.get("vllm_mode") != "server" or "rollout.gpus" in reading.entries.by_key
    limit: int | None = of_engine if is_own and isinstance(of_engine, int) else None
    if not scheduler:
        together = prompt + generated
        return together if limit is None else max(prompt, min(together, limit))
    if limit is not None:
        reading.take("vllm_max_model_len", "seq_length", limit)
        return max(prompt, limit)
    if not isinstance(turns, int) or turns < 1:
        reading.questions.append(
            "multi_turn_scheduler generates turn after turn, and neither max_turns nor vllm_max_model_len ends a "
            "sequence: give --set max_turns=NUMBER"
        )
        return prompt + generated
    reading.warnings.append(
        f"multi_turn_scheduler: memlab takes sequences of a prompt with {turns} answers of {generated:,} tokens, but "
        "the messages that the scheduler adds between turns come on top"
    )
    return prompt + turns * generated


def _drop_teacher(reading: Reading, kind: str | None) -> None:
    """Drops the teacher where ms-swift loads none (``_check_teacher`` in swift/megatron/arguments/megatron_args.py)."""
    key, teacher = "teacher_model", reading.get("teacher_model")
    if teacher is None:
        return
    if reading.get("offload_teacher_model"):
        reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
        reading.miss(key, "more", "a frozen teacher model on the same ranks, on the device in its own pass alone")
    reasons = {
        "only --rlhf_type gkd and grpo read it": kind not in _LIKELIHOOD,
        "of adapters, the model without them is the teacher": _tuner(reading) == "lora"
        and teacher == reading.get("model"),
    }
    for reason in [reason for reason, holds in reasons.items() if holds]:
        reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
        reading.without_effect[key] = reason


def _complete_rollout(
    reading: Reading, per_node: int, kind: str | None, *, is_generating: bool, has_reference_model: bool
) -> None:
    """Takes what GRPO and GKD do between training steps.

    Parameters, gradients and optimizer state are offloaded around generation alone, after the weights went to the
    engine (``_generate_completions`` and ``offload_context`` in swift/megatron/trainers/rollout_mixin.py); under Ray,
    with an engine on the same GPUs, while the weights are sent too (``_sync_weights_naive`` in
    swift/ray/megatron/checkpoint_engine/manager.py, main of August 2026).
    """
    values = reading.values
    mode, sleep_level = values.pop("vllm_mode"), values.pop("sleep_level")
    if not is_generating:
        del values["engine_share"], values["engine_ranks"]
        return
    is_colocated, engine_is_under_ray = mode != "server", "rollout.gpus" in reading.entries.by_key
    kept, bucket = 0, 0  # an engine in the training's own process takes the weights one by one
    if engine_is_under_ray:
        kept = _variable(reading, "SWIFT_RAY_WEIGHT_BUCKET_MB", 2048) * 2**20 if is_colocated else _BUFFERS_OF_NCCL
    elif not is_colocated:
        bucket = _variable(reading, "SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE", 512) * 2**20
    if values.get("lora_rank") is not None and reading.get("vllm_enable_lora") and sleep_level != 2:
        # ``_move_model_to_vllm`` in swift/megatron/trainers/rollout_mixin.py.
        reading.warnings.append(
            "vllm_enable_lora is on: the first weight sync sends the whole model, as memlab predicts it, and later "
            "ones only the adapters"
        )
    values["engine_sleeps"] = bool(sleep_level)
    values["computes_log_probabilities"] = kind == "grpo"  # GKD has the teacher's pass alone
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        seq_length=values["seq_length"],
        micro_batch_size=values.get("micro_batch_size"),
        bucket_bytes=bucket,
        # ``_load_weights_to_server_in_buckets`` collects more than the size and makes one tensor of it.
        bucket_copies=2 if bucket else 1,
        bucket_overflows=bucket > 0,
        kept_buffer_bytes=kept,
        has_reference_model=has_reference_model,
        offloads_for_generation_only=True,
        syncs_from_host=engine_is_under_ray and is_colocated,
        quantization="vllm_engine_kwargs",
    )


_BUFFERS_OF_NCCL = 2 * 3072 * 2**20
"""To an engine on other GPUs, every rank sends with two buffers that it never frees (``prepare`` and ``finalize`` in
swift/ray/megatron/checkpoint_engine/nccl.py, main of August 2026; the size is that of ``CheckpointEngineMixin``)."""


def _variable(reading: Reading, name: str, default: int) -> int:
    """Returns a number from the environment of the launch.

    Raises:
        ValueError: If it is no whole number of at least 1.
    """
    text = reading.entries.environment.get(name, "")
    if not text:
        return default
    if UNKNOWN in text:
        reading.warnings.append(
            f"{name} is known only when the job runs, so memlab takes {default}: replace it in the file by its value"
        )
        return default
    return int(COUNT.checked("environment", name, parse_scalar(text)))


def _complete_ranks(reading: Reading) -> int:
    """Takes ranks from the environment of the launch, where the script sets it, and returns those of a node."""
    values, environment = reading.values, reading.entries.environment
    is_unknown = False
    for name, field in (("NNODES", "nodes"), ("NPROC_PER_NODE", "ranks_per_node")):
        text = environment.get(name, "")
        if name in reading.entries.by_key or not text:
            continue
        if UNKNOWN in text:
            is_unknown = True
            reading.warnings.append(
                f"{name} is known only when the job runs, so memlab takes the smallest number of ranks: give it with "
                f"--set {name}=VALUE"
            )
        else:
            values[field] = COUNT.checked("environment", name, parse_scalar(text))
    nodes, per_node, ranks = (values.pop(name) for name in ("nodes", "ranks_per_node", "ranks_of_training"))
    if ranks:
        values.setdefault("world_size", ranks)
        return max(1, int(ranks) // int(nodes))
    if is_unknown:
        return per_node or values.get("world_size") or 1
    devices = environment.get("CUDA_VISIBLE_DEVICES", "")
    if per_node is None and re.fullmatch(r"\d+(,\d+)*", devices):
        per_node = len(devices.split(","))
    if per_node:
        values.setdefault("world_size", nodes * per_node)
    return per_node or values.get("world_size") or 1


def _complete_extra(reading: Reading) -> None:
    """Takes TransformerConfig's fields out of the JSON text of ``megatron_extra_kwargs``."""
    text = reading.get(_EXTRA)
    if text is None:
        return
    extra = parse_json(text, _EXTRA, "correct it") if isinstance(text, str) else text
    known = {key.name: key for key in _PASSED_ON}
    entry = reading.entries.by_key.pop(_EXTRA)
    if not isinstance(extra, dict):
        raise refusal(entry.place, _EXTRA, entry.value, "must be a JSON object")
    for name, value in extra.items():
        key = f"{_EXTRA}.{name}"
        reading.entries.add(key, value, entry.line)
        if name in known:
            reading.take(key, known[name].field, known[name].conversion.checked(entry.place, key, value))
        for row in (row for row in _NOT_MODELLED if row.name == name):
            reading.known.add(key)
            try:
                is_on = row.is_on(value)
            except ValueError as error:
                raise refusal(entry.place, key, value, error) from error
            if is_on:
                reading.miss(key, row.effect, row.reason)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    values = common(scenario, settings)
    is_likelihood, length = scenario.state.loss in ("log_softmax", "jsd"), longest_sequence(scenario)
    rows = scenario.micro_batch_size if scenario.packed_sequences is None else scenario.packed_sequences
    has_teacher = scenario.state.loss == "jsd"
    is_pairs = scenario.state.reference_model != "none" and not has_teacher and scenario.micro_batch_size % 2 == 0
    rows = rows // 2 if is_pairs else rows
    kind = "gkd" if has_teacher else "grpo" if is_likelihood else "dpo" if is_pairs else None
    task = None if scenario.state.num_labels is None else "seq_cls"
    own = scenario.state.calculate_per_token_loss
    if values.get("moe_token_dispatcher_type") == "allgather":
        values["moe_token_dispatcher_type"] = "alltoall"  # `cannot_write` names it
    return (
        values
        | named(scenario)
        | {
            "loaded": None,
            "world_size": None,
            "ranks_of_training": None,
            "expert_tensor_parallel_size": scenario.layout.expert_tensor_size,
            "removes_padding": not is_likelihood or scenario.micro_batch_size == 1,
            "micro_batch_size": rows,
            "global_batch_size": rows * scenario.num_microbatches * scenario.layout.data_parallel_size,
            "max_length": length // 2 if is_likelihood else length,
            "max_completion_length": length - length // 2 if is_likelihood else 512,
            "rlhf_type": kind,
            "calculate_per_token_loss": None if own == _divides_by_all_tokens(kind, task) else own,
            "teacher_model": (scenario.state.teacher_model or named(scenario)["architecture"])
            if has_teacher and scenario.state.reference_model != "none"
            else None,
            "task_type": task,
            "tuner_type": "full" if scenario.state.lora is None else "lora",
            "bf16": scenario.dtype == "bf16",
            "recompute_modules": settings.recompute_modules or ("core_attn",),
        }
    )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what ms-swift cannot express of a job."""
    reasons = {}
    if settings.offload_gradients != settings.offload_parameters:
        reasons["offload_gradients"] = "ms-swift frees the gradients where it offloads the parameters"
    if scenario.state.loss not in ("log_softmax", "jsd"):
        offloaded = [name for name in ("offload_parameters", "offload_optimizer") if getattr(settings, name)]
        reasons |= dict.fromkeys(offloaded, "ms-swift offloads only around the generation of answers")
    if scenario.state.reference_model != "none" and scenario.state.loss != "jsd" and scenario.micro_batch_size % 2:
        reasons["reference_model"] = "ms-swift's DPO takes pairs of sequences, so an even number of them"
    if scenario.state.grad_reduce_in_bf16 != (scenario.state.main_grads_dtype == "bf16"):
        reasons["grad_reduce_in_bf16"] = "ms-swift reduces gradients in the type of main_grads_dtype"
    if scenario.state.lora is not None:
        reasons |= _cannot_write_of_adapters(scenario.state.lora)
    layout, state = scenario.layout, scenario.state
    of_rows = {"fp8_recipe": state.fp8_recipe, "fp8_format": state.fp8_format, "sequence_parallel": True}
    of_rows |= {name: getattr(layout, name) for name in ("tensor_model_parallel_size", "context_parallel_size")}
    multiple = _multiple_of_rows(of_rows | {"attention_backend": state.attention_backend})
    if scenario.seq_length % multiple:
        reasons["seq_length"] = f"ms-swift pads rows to a multiple of {multiple} tokens"
    if scenario.state.moe_token_dispatcher_type == "allgather":
        reasons["moe_token_dispatcher_type"] = "ms-swift refuses allgather, since its sequences have any length"
    return reasons | _cannot_write_of_loss(scenario)


_LOSSES = (("cross_entropy", False), ("log_softmax", True), ("jsd", True))


def _cannot_write_of_loss(scenario: Scenario) -> dict[str, str]:
    reasons = {}
    if (scenario.state.loss, scenario.state.fp32_output) not in _LOSSES:
        reasons["loss"] = "ms-swift computes the losses cross_entropy, and log_softmax and jsd of logits in fp32"
    if scenario.state.lm_loss_beside:
        reasons["lm_loss_beside"] = "the cross entropy beside GKD's loss has a factor: add --sft_alpha NUMBER"
    if scenario.state.loss == "jsd" and scenario.state.reference_model == "none":
        reasons["loss"] = "a teacher that is a server has an address: add --teacher_model_server ADDRESS"
    return reasons


def _cannot_write_of_adapters(lora: LoRA) -> dict[str, str]:
    reasons = {}
    if lora.library != "mcore_bridge":
        reasons["lora_library"] = "ms-swift's adapters are those of mcore-bridge"
    if not lora.enable_input_require_grads:
        reasons["lora_enable_input_require_grads"] = "the embedding's output always requires a gradient in ms-swift"
    if lora.dropout_position != "pre":
        reasons["lora_dropout_position"] = "ms-swift drops the inputs of adapters"
    if not lora.target_modules:
        reasons["lora_target_modules"] = "ms-swift has no list that stands for all linears with the output layer"
    elif lora.is_canonical:
        reasons["lora_target_modules"] = "ms-swift's adapters are those of whole linears"
    return reasons


def _packs(scenario: Scenario) -> bool:
    """Whether the sequences of a row are those of a micro-batch, equally long and more than one."""
    lengths = scenario.sequence_lengths or ()
    return scenario.state.loss in ("log_softmax", "jsd") and len(lengths) > 1 and len(set(lengths)) == 1


def render(values: dict[str, Any]) -> list[str]:
    """Writes arguments, one a line, each with its value; variables of the environment come first."""
    text = _EXTRA
    parts = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{text}.")}
    extra = {name: value for name, value in parts.items() if value is not ABSENT}
    removed = [name for name, value in values.items() if value is ABSENT and "." not in name]
    removed += [text] if parts and not extra else []
    values = {name: value for name, value in values.items() if value is not ABSENT}
    lines = removal([f"--{name}" for name in removed])
    lines += [f"{name}={shell_words(value)}" for name, value in values.items() if name.isupper()]
    for name, value in values.items():
        if not name.isupper() and "." not in name:
            lines.append(f"--{name} {shell_words(str(value).lower() if isinstance(value, bool) else value)}")
    if (values.get("tensor_model_parallel_size") or 1) > 1:
        lines.append("--sequence_parallel true")
    if extra:
        lines.append(f"--{text} {shell_words(json.dumps(extra))}")
    return lines


_NEVER = {
    name: reason
    for name, reason in CANNOT_WRITE.items()
    if not name.startswith(("offload", "loss", "fp32_output", *ONLY_OF_MS_SWIFT))
}

_LETTERS = {"t": True, "y": True, "f": False, "n": False}
"""Further truths of a switch: ``string_to_bool`` in transformers/hf_argparser.py, which ms-swift's parser has."""
MS_SWIFT = Framework(
    name="ms-swift",
    title="ms-swift",
    source="4.6.0",
    transformer_engine="2.16",
    signs=Signs(looked_for="args.json, 'megatron sft', or YAML with its arguments", of_command=is_command),
    style="flags",
    value_of=lambda value: _LETTERS.get(value.lower(), value) if isinstance(value, str) else value,
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("ms_swift") | model_without_effect(_EXTRA),
    take_files=take_argument_file,
    complete=complete,
    complete_of_model=_complete_model,
    compose=compose,
    cannot_write=_NEVER
    | ONLY_OF_MEGATRON_LM
    | {
        "offload_optimizer_except_update": "ms-swift loads the optimizer state before the step",
        "logprobs_chunk_size": "ms-swift has no such key",
        "ddp_bucket_size": "ms-swift has no such key",
        "reuse_grad_buf_for_mxfp8_param_ag": "ms-swift has no such key",
        "lora_exclude_modules": "ms-swift has no such key",
        **of_one_kind("ms-swift"),
        "overlap_cpu_optimizer_d2h_h2d": "ms-swift has no such key",
        "pin_cpu_grads": "ms-swift has no such key",
        "pin_cpu_params": "ms-swift has no such key",
    },
    without_own_key=frozenset(("lora_library", "lora_enable_input_require_grads", "lora_dropout_position"))
    | frozenset(("dtype", "offload_gradients", "grad_reduce_in_bf16", "loss", "fp32_output", "reference_model"))
    | frozenset(("lm_loss_beside",)),
    cannot_write_of=cannot_write,
    packs=_packs,
    check=_check,
    leaves_out=lambda value: value is None,
    render=render,
)
