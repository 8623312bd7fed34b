"""NeMo-RL with Megatron: its ``config.yaml``, with the files that ``defaults`` names.

Names and defaults: ``examples/configs/grpo_math_1B.yaml`` and ``nemo_rl/models/megatron/setup.py`` (main, August 2026).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.rollout import Sender
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.jobs.frameworks.adapters import OF_BRIDGE, adapter_keys, complete_adapters, lacks_of_section, of_one_kind
from memlab.jobs.frameworks.bridge_keys import REPLACED, drop_fused_rope, model_without_effect
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.keys import (
    ABSENT,
    ALLOCATOR,
    BACKEND,
    COUNT,
    DISPATCHER,
    FLEX_BACKEND,
    LOAD_BALANCING,
    LONG_DTYPE,
    NUMBER,
    ROUTER_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    Key,
    Missing,
    frozen_parts,
    is_false,
    is_given,
    missing_under,
    refusal,
    under,
)
from memlab.jobs.frameworks.lines import yaml_lines
from memlab.jobs.frameworks.megatron_keys import (
    BUCKETS,
    CHUNKS,
    COMPUTE,
    ENDS,
    EXTRA,
    FUSIONS,
    LAYERS,
    MISSING,
    MISSING_OPTIMIZER,
    OFFLOAD,
    OPTIMIZER,
    PIPELINE,
    RECOMPUTE,
    SIZES,
)
from memlab.jobs.frameworks.megatron_lm import (
    ONLY_OF_MEGATRON_LM,
    ONLY_OF_MS_SWIFT,
    ONLY_OF_VERL_AND_SLIME,
    take_sequence_parallel,
)
from memlab.jobs.frameworks.nemo_rl_rules import check_megatron, check_offloaded
from memlab.jobs.frameworks.reinforcement import (
    composed,
    drop_frozen_parts,
    is_packed,
    note_replaced_values,
    row_of_budget,
    sglang_arguments,
    take_rollout,
    take_rows,
    take_sequences,
    vllm_arguments,
)
from memlab.jobs.frameworks.without_effect import keys_without_effect

_MEGATRON = "policy.megatron_cfg"
_PEFT = f"{_MEGATRON}.peft"
_GENERATION = "policy.generation"
_QUANTIZED_ENGINE = "the engine's weights have fewer bytes than in bf16"
_FILTERED_LOGITS = "the loss filters the logits of the whole vocabulary too, without chunks"
"""``DistributedLogprobWithSampling`` in nemo_rl/distributed/model_utils.py (main of August 2026)."""
_OVERRIDES = f"{_MEGATRON}.model_overrides"
_RECOMPUTE_METHOD = tuple(key for key in RECOMPUTE if key.field in ("recompute_granularity", "recompute_modules"))
_FP8 = {"fp8": "fp8_format", "fp8_recipe": "fp8_recipe", "fp8_param": "fp8_param_gather"}
_DECIDED = (*_FP8, "apply_rope_fusion", "calculate_per_token_loss")
_PASSED = tuple(key for key in COMPUTE if key.name not in _DECIDED and key not in FUSIONS)
_FP8_ROWS = {"blockwise": 128, "mxfp8": 32}
"""What each rank's part of a packed row is padded to a multiple of, and 16 with other recipes of FP8
(``_get_pack_sequence_parameters_for_megatron`` in nemo_rl/models/megatron/data.py)."""
_BUCKETS = tuple(key for key in BUCKETS if key.name != "bucket_size")
FIXED = {"calculate_per_token_loss": True}
"""``_validate_training_config`` in nemo_rl/models/megatron/setup.py (7ea279ab)."""

_REFIT_SHARE = 0.3
"""Of the free memory, for the bucket of the weight sync, unless ``NRL_REFIT_BUFFER_MEMORY_RATIO`` says otherwise
(``_compute_buffer_size`` in nemo_rl/weight_sync/ipc_weight_synchronizer.py)."""


_GUIDES = {"docs/guides/deepseek.md": "deepseek-ai/DeepSeek-V3"}
"""In place of a model, some of NeMo-RL's own configurations name the guide that makes its checkpoint in bf16."""
PAIRS = {"dpo", "rm"}
"""Methods whose sequences come in pairs, a chosen and a rejected one, always in the same micro-batch (``policy.train``
in nemo_rl/algorithms/{dpo,rm}.py)."""
WITHOUT_GENERATION = {"sft", *PAIRS}
"""Methods that have no inference engine, so nothing leaves the device for one."""
_TEACHERS_OF_DATA = "teachers"
"""The section of off-policy distillation, which trains on data (``xtoken_off_policy_distillation.py``, 7ea279ab)."""


_OWN_OF_LAYERS = ("moe_router_group_topk", "moe_router_num_groups")
KEYS = (
    Key("policy.model_name", "architecture", TEXT),
    Key("cluster.num_nodes", "nodes", WHOLE, 1),
    Key("cluster.gpus_per_node", "ranks_per_node", WHOLE, 1),
    *under(_MEGATRON, (*SIZES, *ENDS), expert_tensor_parallel_size=1),
    Key(f"{_OVERRIDES}.{CHUNKS.name}", CHUNKS.field, CHUNKS.conversion, None),
    Key(f"{_MEGATRON}.activation_checkpointing", "is_checkpointing", SWITCH, False),
    *under(_MEGATRON, _RECOMPUTE_METHOD, recompute_granularity="full"),
    *under(_MEGATRON, OFFLOAD[:2]),
    *under(_OVERRIDES, OFFLOAD[2:]),
    Key(f"{_MEGATRON}.apply_rope_fusion", "apply_rope_fusion", SWITCH, True),
    *under(_MEGATRON, FUSIONS, bias_activation_fusion=True),
    Key(f"{_MEGATRON}.moe_router_dtype", "moe_router_dtype", ROUTER_DTYPE, "fp64"),
    # ``examples/configs/grpo_math_1B.yaml``
    Key(f"{_MEGATRON}.freeze_moe_router", "freeze_moe_router", SWITCH, True),
    Key(f"{_MEGATRON}.moe_permute_fusion", "moe_permute_fusion", SWITCH, True),
    Key(f"{_MEGATRON}.moe_shared_expert_overlap", "moe_shared_expert_overlap", SWITCH),
    Key(f"{_MEGATRON}.moe_token_dispatcher_type", "moe_token_dispatcher_type", DISPATCHER, "alltoall"),
    Key(f"{_MEGATRON}.moe_flex_dispatcher_backend", "moe_flex_dispatcher_backend", FLEX_BACKEND, "deepep"),
    Key(f"{_MEGATRON}.moe_router_load_balancing_type", "moe_router_load_balancing_type", LOAD_BALANCING, "none"),
    *under(_MEGATRON, (key for key in LAYERS if key.field in _OWN_OF_LAYERS)),
    *under(_MEGATRON, EXTRA),
    *under(_OVERRIDES, (*LAYERS, *PIPELINE, *_PASSED)),
    Key(f"{_MEGATRON}.attention_backend", "attention_backend", BACKEND),
    *under(_OVERRIDES, (replace(key, default=ABSENT) for key in RECOMPUTE if key.field != "recompute_granularity")),
    Key(f"{_OVERRIDES}.num_layers", "num_layers", WHOLE),
    Key(f"{_MEGATRON}.fp8_cfg.enabled", "is_fp8", SWITCH, False),
    *under(
        f"{_MEGATRON}.fp8_cfg",
        (key for key in COMPUTE if key.name in _FP8),
        fp8_format="e4m3",
        fp8_recipe="blockwise",
    ),
    *under(f"{_MEGATRON}.optimizer", OPTIMIZER, use_precision_aware_optimizer=True),
    Key(f"{_MEGATRON}.optimizer.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    *under(
        f"{_MEGATRON}.distributed_data_parallel_config",
        _BUCKETS,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    *under(f"{_MEGATRON}.env_vars", ALLOCATOR),
    Key("policy.precision", "dtype", LONG_DTYPE, "bf16"),
    Key("policy.max_total_sequence_length", "longest", COUNT, 512),
    Key("policy.make_sequence_length_divisible_by", "sequence_multiple", COUNT, 1),
    Key("policy.train_micro_batch_size", "micro_batch_size", COUNT, 4),
    Key("policy.train_global_batch_size", "sequences", COUNT, 512),
    Key("policy.sequence_packing.enabled", "is_packed", SWITCH, True),
    Key("policy.sequence_packing.train_mb_tokens", "packed_tokens", WHOLE),
    Key("policy.sequence_packing.fuse_loss", "is_fused", SWITCH, False),
    Key("policy.dynamic_batching.enabled", "is_dynamic", SWITCH, False),
    Key("policy.dynamic_batching.train_mb_tokens", "dynamic_tokens", WHOLE),
    Key("distillation.topk_logits_k", "topk_logits_k", COUNT),
    Key("policy.logprob_chunk_size", "logprobs_chunk_size", COUNT, None),
    Key(f"{_MEGATRON}.defer_fp32_logits", "is_deferred", SWITCH, False),
    Key("policy.logprob_batch_size", "log_prob_micro_batch_size", COUNT, None),
    Key("policy.sequence_packing.logprob_mb_tokens", "log_prob_packed_tokens", COUNT),
    Key("policy.dynamic_batching.logprob_mb_tokens", "log_prob_dynamic_tokens", COUNT),
    Key("policy.generation.vllm_cfg.gpu_memory_utilization", "engine_share", NUMBER, 0.6),
    Key("policy.generation.vllm_cfg.tensor_parallel_size", "engine_ranks", COUNT, 1),
    Key("policy.refit_buffer_size_gb", "bucket", NUMBER),
    Key("policy.offload_optimizer_for_refit", "moves_optimizer", SWITCH, True),
    Key("policy.offload_optimizer_for_logprob", "frees_optimizer", SWITCH, False),
    Key("policy.generation.colocated.enabled", "is_colocated", SWITCH, True),
    Key("policy.generation.colocated.resources.num_nodes", "generation_nodes", WHOLE, None),
    Key("policy.generation.colocated.resources.gpus_per_node", "generation_ranks", WHOLE, None),
    Key(f"{_PEFT}.enabled", "has_adapters", SWITCH, False),
    # As in ``examples/configs/grpo_math_1B.yaml``; the engine itself has no defaults (``setup.py``).
    *adapter_keys(
        _PEFT, "dim", rank=8, alpha=32, dropout=0.0, dropout_position="post", target_modules=(), exclude_modules=()
    ),
)
_OWN_ARGUMENTS = (
    "cuda_graph_impl", "moe_flex_dispatcher_backend", "moe_grouped_gemm",
    "moe_token_dispatcher_type", "transformer_impl",
)  # fmt: skip
"""Fields of Megatron's TransformerConfig that NeMo-RL reads beside its own keys, and not among the overrides."""
_OF_SGLANG_CFG = ("cpu_offload_gb", "enable_dp_attention")
"""What NeMo-RL's ``SGLangConfig`` has of SGLang's arguments that change memory; ``sglang_kwargs`` has all."""
_REFIT_BUFFERS = ("NRL_REFIT_BUFFER_MEMORY_RATIO", "NRL_REFIT_NUM_BUFFERS")


def refit_buffers(section: str) -> tuple[Missing, ...]:
    """Returns the rows of the buffers from which the workers of a policy send weights to other GPUs.

    See ``get_target_packed_tensor_size`` in nemo_rl/utils/packed_tensor.py (7ea279ab).
    """
    reason = "weights are sent to other GPUs in so many buffers, each of a part of the GPU's memory"
    return tuple(Missing(f"{section}.env_vars.{name}", "either", reason, is_given) for name in _REFIT_BUFFERS)


FRAMEWORK_MISSING = (
    Missing("policy.megatron_cfg.enabled", "either",
            "NeMo-RL asks for one of policy.megatron_cfg and policy.dtensor_cfg that is enabled, and memlab reads no "
            "fork's section in their place", is_false, blocks=True, of="job"),
    Missing(f"{_MEGATRON}.moe_layer_recompute", "less", f"memlab reads it under {_OVERRIDES}, as NeMo-RL does"),
    Missing("policy.draft.enabled", "more", "a draft model is trained beside the policy"),
    *frozen_parts(f"{_MEGATRON}.", f"{_MEGATRON}.freeze_config."),
    Missing(f"{_MEGATRON}.use_fused_linear_logprobs", "less", "log-probabilities without whole logits"),
    Missing(f"{_MEGATRON}.use_linear_ce_fusion_loss", "less", "log-probabilities without whole logits"),
    Missing("loss_fn.zero_outside_topk", "more",
            "distillation computes log-probabilities over the whole vocabulary, in chunks"),
    *missing_under(_MEGATRON, (row for row in MISSING if row.name in _OWN_ARGUMENTS)),
    *missing_under(_OVERRIDES, (*MISSING, *REPLACED)),
    *missing_under(f"{_MEGATRON}.optimizer", MISSING_OPTIMIZER),
    Missing(
        f"{_MEGATRON}.empty_unused_memory_level",
        "less",
        "each step frees torch's cached memory, so fewer bytes stay reserved",
        default=1,
    ),
    Missing(f"{_GENERATION}.vllm_cfg.precision", "less", _QUANTIZED_ENGINE, lambda value: "fp8" in str(value)),
    Missing(f"{_GENERATION}.refit_transport", "more",
            "weights are sent from buffers of this transport, which may stay on the training's GPUs", is_given),
    *refit_buffers(_MEGATRON),
    Missing(f"{_GENERATION}.real_quant", "less", _QUANTIZED_ENGINE),
    *vllm_arguments(f"{_GENERATION}.vllm_kwargs"),
    *(row for row in sglang_arguments(f"{_GENERATION}.sglang_cfg.") if row.name.endswith(_OF_SGLANG_CFG)),
    *sglang_arguments(f"{_GENERATION}.sglang_kwargs."),
    Missing("policy.quant_cfg", "either", "ModelOpt's fake quantization adds tensors to each matrix", is_given),
    Missing("policy.router_replay.enabled", "more", "the chosen experts of each token are kept, of all micro-batches"),
    Missing(f"{_GENERATION}.top_k", "either", _FILTERED_LOGITS, lambda value: value not in (None, -1, 0)),
    Missing(f"{_GENERATION}.top_p", "either", _FILTERED_LOGITS, lambda value: value not in (None, 1)),
    Missing("policy.is_vlm", "more", "memlab has no vision tower", blocks=True, of="towers"),
    # `memlab.jobs.frameworks.nemo_rl_teacher` predicts them where it can.
    Missing("teacher.model_name", "more", "the teacher's passes run between the steps, in processes of its own",
            is_given),
    Missing(_TEACHERS_OF_DATA, "more", "the teachers' passes run between the steps, in processes of their own, and the "
            "loss compares logits of the whole vocabularies", is_given),
    Missing("value.model_name", "either", "the value model's steps, in turn with the policy's, are not predicted",
            is_given),
    Missing("on_policy_distillation.enabled", "either", "the teachers' forward passes are not predicted"),
)  # fmt: skip


def _complete_model(reading: Reading, architecture: Architecture) -> None:
    drop_frozen_parts(reading, architecture)
    drop_fused_rope(reading, architecture)
    check_offloaded(reading, architecture)


def complete(reading: Reading) -> None:
    """Derives ranks, workload, recompute and what leaves the device around generation."""
    values = reading.values
    values |= FIXED
    dtensor, megatron = "policy.dtensor_cfg.enabled", f"{_MEGATRON}.enabled"
    if reading.get(dtensor) is False and reading.get(megatron) is None:
        # ``Policy`` in models/policy/lm_policy.py asks for one of the two.
        reading.questions.append(
            f"{dtensor} is false and {megatron} is not given, and NeMo-RL asks for one that is true: give --set "
            f"{megatron}=true or {dtensor}=true"
        )
    if not values.pop("has_adapters"):
        values["lora_rank"] = None
    _take_model_of_guide(reading)
    note_replaced_values(reading, "policy.hf_config_overrides")
    sections = {key.partition(".")[0] for key in reading.entries.by_key}
    generates = has_engine(sections)
    per_node = complete_ranks(reading)
    if not values.pop("is_checkpointing"):
        values["recompute_granularity"] = None
    elif values.get("recompute_granularity") == "full":
        # setup.py sets both whenever activations are checkpointed as a whole.
        values["recompute_method"], values["recompute_num_layers"] = "uniform", 1
    if not values.pop("is_fp8"):
        values |= {"fp8_format": None, "fp8_param_gather": False}
    is_colocated = values.pop("is_colocated")
    _take_offload(reading, is_colocated=is_colocated, generates=generates)
    values["fp32_output"] = not values.pop("is_deferred")
    take_sequence_parallel(reading, f"{_MEGATRON}.sequence_parallel", default=True)
    complete_adapters(reading, f"{_PEFT}.enabled", lacks_of_section(reading, _PEFT))
    longest, sequences = take_longest(reading), values.pop("sequences")
    if not generates and sections & PAIRS:
        reading.take("policy.train_micro_batch_size", "micro_batch_size", 2 * values["micro_batch_size"])
        sequences *= 2
    is_packed_row, is_dynamic = values.pop("is_packed"), values.pop("is_dynamic")
    is_fused = values.pop("is_fused") or not is_packed_row
    values["loss"] = "logprobs_one_hot" if is_fused else "logprobs_by_sequence"
    if compares_largest(sections):
        values["loss"], values["logprobs_chunk_size"] = "topk_logits", None
        _drop_filters(reading)
    if not is_packed_row:
        _take_mask(reading, is_dynamic=is_dynamic)
    per_micro_batch = longest * values["micro_batch_size"]
    packed, dynamic = values.pop("packed_tokens", None), values.pop("dynamic_tokens", None)
    of_log_probs, rows = rows_of_pass(reading, longest, is_packed=is_packed_row, is_dynamic=is_dynamic)
    take_phases(reading, per_node, of_log_probs, rows, is_colocated=is_colocated, generates=generates)
    if is_packed_row or is_dynamic:
        key = f"policy.{'sequence_packing' if is_packed_row else 'dynamic_batching'}.train_mb_tokens"
        tokens = (packed if is_packed_row else dynamic) or per_micro_batch
        # The budget counts tokens before context parallel ranks share them.
        context = values.get("context_parallel_size") or 1
        take_rows(reading, key, -(-tokens // context), longest, sequences, is_refused=is_packed_row)
        return
    take_sequences(reading, longest, sequences)


def _take_model_of_guide(reading: Reading) -> None:
    key, name = "policy.model_name", str(reading.values.get("architecture"))
    for guide, model in _GUIDES.items():
        if name.endswith(guide):
            reading.taken = [one for one in reading.taken if one.key != key]
            reading.take(key, "architecture", model)
            reading.warnings.append(
                f"{key} names the guide {guide} in place of a checkpoint; memlab takes {model}, of which that guide "
                f"makes one in bf16: give another with --set {key}=NAME"
            )


def _take_mask(reading: Reading, *, is_dynamic: bool) -> None:
    """Takes the causal mask of rows that are not packed (``process_microbatch`` in nemo_rl/models/megatron/data.py).

    How long the rows of dynamic batches are, the data decide. Attention that is not fused makes further masks of it.
    """
    key, values = "policy.sequence_packing.enabled", reading.values
    is_fused = values.get("attention_backend") not in ("unfused", "local") and values["dtype"] == "bf16"
    if is_dynamic or not is_fused or (values.get("context_parallel_size") or 1) > 1:
        reading.miss(key, "more", "rows that are not packed have a causal mask")
    else:
        reading.take(key, "create_attention_mask", value=True)


def rows_of_pass(reading: Reading, longest: int, *, is_packed: bool, is_dynamic: bool) -> tuple[int, int]:
    """Returns the tokens of a row, and the rows, of a pass for log-probabilities.

    All sequences of a generation are in one pass, and a row may have any of them (``get_logprobs`` in
    nemo_rl/models/policy/lm_policy.py, 7ea279ab).
    """
    values = reading.values
    rows = values.pop("log_prob_micro_batch_size") or values["micro_batch_size"]
    of_packed, of_dynamic = values.pop("log_prob_packed_tokens", None), values.pop("log_prob_dynamic_tokens", None)
    if not is_packed and not is_dynamic:
        return longest, rows
    # The budget counts tokens before context parallel ranks share them.
    context = values.get("context_parallel_size") or 1
    tokens = -(-((of_packed if is_packed else of_dynamic) or longest * rows) // context)
    counts = [reading.get(f"grpo.num_{kind}") for kind in ("prompts_per_step", "generations_per_prompt")]
    sequences = math.prod(counts) if all(is_whole_number(count) for count in counts) else None
    return row_of_budget(reading, tokens, longest, sequences, is_refused=is_packed)[1], 1


def compares(reading: Reading) -> bool:
    """Whether a penalty compares the policy with a reference model."""
    return bool(reading.get("loss_fn.reference_policy_kl_penalty", 0.01) != 0)


def has_engine(sections: set[str]) -> bool:
    """Whether a method, by the sections of its file, has an inference engine."""
    return "grpo" in sections or not sections & {_TEACHERS_OF_DATA, *WITHOUT_GENERATION}


def compares_largest(sections: set[str]) -> bool:
    """Whether a method's loss compares the largest logits of each token with a teacher's."""
    return "distillation" in sections and _TEACHERS_OF_DATA not in sections


def take_phases(
    reading: Reading,
    per_node: int,
    seq_length: int,
    rows: int,
    *,
    is_colocated: bool,
    generates: bool,
    sender: Sender | None = None,
) -> None:
    """Takes what the job does between training steps.

    Args:
        per_node: Ranks of the training on a node.
        seq_length: Tokens of a row for log-probabilities.
        is_colocated: Whether the inference engine has the training's GPUs.
    """
    values = reading.values
    bucket = values.pop("bucket", None)
    if is_colocated:
        reason = "the process that starts the workers reads it for an engine on their GPUs"
        reading.model(lambda key: key.endswith(_REFIT_BUFFERS), reason)
    if bucket and not is_colocated:
        reading.take_back("bucket", "only an engine on the training's GPUs has this buffer")
    if not generates:
        for name in ("engine_share", "engine_ranks", "frees_optimizer", "moves_for_teacher"):
            values.pop(name, None)
        return
    engine = _take_engine(reading)
    _note_skipped_passes(reading)
    # ``prepare_for_lp_inference`` in nemo_rl/models/policy/workers/megatron_policy_worker.py frees the gradients, also
    # those that stay on the device while other GPUs generate.
    on_device = {"gradients": not values["offload_gradients"], "optimizer state": not values["offload_optimizer"]}
    # ``offload_before_refit``, which ``distillation_train`` calls before a teacher's passes where other GPUs generate.
    moves = values.pop("moves_for_teacher", False)
    for_teacher = [name for name, is_there in on_device.items() if is_there and (moves or name == "gradients")]
    on_device["optimizer state"] &= values.pop("frees_optimizer")
    freed = [] if _trains_in_parts(reading) else [name for name, is_freed in on_device.items() if is_freed]
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        seq_length=seq_length,
        micro_batch_size=rows,
        # Megatron copies weights from tensor to tensor.
        bucket_bytes=0 if engine[1] == "megatron" else int(bucket * 2**30) if bucket and is_colocated else None,
        bucket_share=_REFIT_SHARE if is_colocated else None,
        sender=sender,
        freed_for_log_probabilities=tuple(freed),
        engine=engine,
        quantization=f"{_GENERATION}.{'sglang' if engine[1] == 'sglang' else 'vllm'}_kwargs.quantization",
    )
    assert reading.rollout is not None, "it was taken"
    reading.rollout = replace(reading.rollout, freed_for_teacher=tuple(for_teacher))


def _drop_filters(reading: Reading) -> None:
    """Moves what filters the logits of a policy gradient to what has no effect, for a loss that reads others."""
    filters = [one.key for one in reading.not_modelled if one.reason == _FILTERED_LOGITS]
    reading.model(filters.__contains__, "the loss of distillation reads the logits as they are")


def _note_skipped_passes(reading: Reading) -> None:
    """Notes where a job trains without a pass for log-probabilities before.

    Distillation has only the teacher's (``distillation_train`` in nemo_rl/algorithms/distillation.py). A step that is
    on-policy takes its own in place of the policy's, and without a penalty there is no reference model
    (``_resolve_logprob_skip_flags`` in nemo_rl/algorithms/grpo.py, main of August 2026).
    """
    get, key = reading.get, "loss_fn.force_on_policy_ratio"
    if any(name.startswith("distillation.") for name in reading.entries.by_key):
        reading.values["computes_log_probabilities"] = False
    skips_reference = get("grpo.skip_reference_policy_logprobs_calculation") is True or not compares(reading)
    if get(key) is True and get("grpo.seq_logprob_error_threshold") is None and skips_reference:
        reading.take(key, "computes_log_probabilities", value=False)


def _take_offload(reading: Reading, *, is_colocated: bool, generates: bool) -> None:
    """Derives what leaves the device between a weight sync and the next step (``offload_before_refit``).

    Parameters leave it where an engine generates on it. The rest also does where Megatron's engine has other GPUs
    (``sync_weights`` in nemo_rl/weight_sync/megatron_weight_synchronizer.py). ``move_optimizer`` moves the state of
    torch's optimizer alone, where Megatron does not move it by itself.
    """
    values, optimizer = reading.values, f"{_MEGATRON}.optimizer"
    values["offload_parameters"] = is_colocated and generates
    values["offload_gradients"] = generates and (is_colocated or _engine_of(reading) == "megatron")
    is_moved = values.pop("moves_optimizer") and not values.get("optimizer_cpu_offload")
    values["moves_for_teacher"] = is_moved
    values["offload_optimizer"] = values["offload_gradients"] and is_moved
    if values["offload_optimizer"] and values.get("use_precision_aware_optimizer") is False:
        reading.warnings.append(
            f"{optimizer}.use_precision_aware_optimizer is false, so the fp32 main parameters are no state of the "
            "optimizer, and NeMo-RL leaves them on the device between steps; memlab offloads them: the phases without "
            "training need 4 bytes per parameter of the rank's optimizer more"
        )


def _trains_in_parts(reading: Reading) -> bool:
    """Whether a step computes log-probabilities again after it has begun, so that its gradients have to stay.

    See ``keep_train_buffers`` in nemo_rl/algorithms/single_controller.py; the others do not have the section.
    """
    if not any(key.startswith("async_rl.") for key in reading.entries.by_key):
        return False
    keys = ("async_rl.min_groups_for_streaming_train", "grpo.num_prompts_per_step")
    part, prompts = (reading.get(key, 32) for key in keys)
    return isinstance(part, int) and isinstance(prompts, int) and part < prompts


_TENSOR = "vllm_cfg.tensor_parallel_size"
_KEYS_OF_ENGINE: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "engine_ranks": (_TENSOR, "vllm_cfg.pipeline_parallel_size"),
        "engine_expert_ranks": ("vllm_cfg.expert_parallel_size",),
    },
    "sglang": {
        "engine_share": ("sglang_cfg.mem_fraction_static",),
        "engine_ranks": ("sglang_cfg.tp_size", "sglang_cfg.pp_size"),
    },
    "trtllm": {"engine_ranks": ("trtllm_cfg.tensor_parallel_size",)},
    "megatron": {},
}
"""For each engine the keys of its share of the GPU's memory, and of the GPUs that share its weights, as factors."""


def _engine_of(reading: Reading) -> str:
    return str(reading.get(f"{_GENERATION}.backend") or "vllm")


def _take_engine(reading: Reading) -> tuple[str, str]:
    """Takes the inference engine's share of the memory, and its ranks, from the keys of the engine that is used.

    Returns:
        The key that chooses the engine, and the engine.
    """
    values = reading.values
    key, backend = f"{_GENERATION}.backend", _engine_of(reading)
    if backend != "vllm":
        values["engine_ranks"] = 1  # those of the table are vLLM's
    for field_name, names in _KEYS_OF_ENGINE.get(backend, {}).items():
        given = [f"{_GENERATION}.{name}" for name in names if reading.entries.get(f"{_GENERATION}.{name}") is not None]
        for name in given:
            number = NUMBER if field_name == "engine_share" else COUNT
            value = reading.converted(name, number)
            reading.take(name, field_name, value * (values[field_name] if name != given[0] else 1))
    # vLLM's expert parallel ranks are its tensor parallel ranks times its data parallel ones (vllm_generation.py).
    experts, tensor = (
        values.pop("engine_expert_ranks", None),
        reading.get(f"{_GENERATION}.vllm_cfg.tensor_parallel_size"),
    )
    values["engine_data_ranks"] = max(1, (experts or 1) // (tensor if isinstance(tensor, int) and tensor > 0 else 1))
    if backend == "megatron":
        _take_megatron_engine(reading)
    elif backend == "sglang":
        if f"{_GENERATION}.sglang_cfg.mem_fraction_static" not in reading.entries.by_key:
            values["engine_share"] = None
        # ``finish_generation`` in nemo_rl/models/generation/sglang/sglang_generation.py does nothing without it.
        server = f"{_GENERATION}.sglang_cfg.sglang_server_config"
        values["engine_sleeps"] = reading.get(f"{server}.needs_offload") is not False
    return key, backend


_MCORE = f"{_GENERATION}.mcore_generation_config"
_SHARES = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "context")
_OWN_LAYOUT = {f"{name}_parallel_size": 1 for name in _SHARES} | {"transformer_impl": None}
"""Keys with which Megatron's engine has another model than the training, with the training's defaults."""


def _take_megatron_engine(reading: Reading) -> None:
    """Takes Megatron's own engine, which generates with the training's model unless its layout is another one.

    See ``dedicated_inference_megatron_cfg`` in nemo_rl/models/generation/megatron/config.py. Its buffer of keys and
    values stays on the device while the model trains if ``kv_cache_management_mode`` is ``persist``
    (``deallocate_inference_state_buffers`` in megatron/core/inference/contexts/dynamic_context.py).
    """
    values, key = reading.values, f"{_GENERATION}.backend"
    del values["engine_share"]
    size = f"{_MCORE}.buffer_size_gb"
    try:
        gibibytes = NUMBER.read(reading.get(size, 10))
    except ValueError as error:
        entry = reading.entries.by_key[size]
        raise refusal(entry.place, size, entry.value, error) from error
    reading.take(size, "engine_bytes", int((gibibytes or 0) * 2**30))
    frees_buffer = reading.get(f"{_MCORE}.kv_cache_management_mode", "persist") != "persist"
    rebuilds = reading.get("grpo.async_grpo.recompute_kv_cache_after_weight_updates", default=False) is True
    values["engine_sleeps"] = frees_buffer or rebuilds
    reading.miss(key, "more", "beside its buffer of keys and values, Megatron's engine has CUDA graphs and activations")
    of_training = {name: reading.entries.get(f"{_MEGATRON}.{name}", default) for name, default in _OWN_LAYOUT.items()}
    of_engine = {name: reading.get(f"{_MCORE}.{name}", value) for name, value in of_training.items()}
    of_engine["context_parallel_size"] = 1
    values["engine_has_own_weights"] = of_engine != of_training
    if of_engine == of_training:
        return
    tensor, stages, experts, expert_tensor = (
        size if isinstance(size, int) and size > 0 else 1 for size in list(of_engine.values())[:4]
    )
    values["engine_ranks"] = tensor * stages
    values["engine_data_ranks"] = max(1, experts * expert_tensor // tensor)


def complete_ranks(reading: Reading) -> int:
    """Takes the ranks of the training, and returns those of a node."""
    values = reading.values
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    other_nodes, other_ranks = values.pop("generation_nodes"), values.pop("generation_ranks")
    is_one_node = nodes == 1
    nodes, of_node = nodes - _take_nodes_of_teachers(reading), per_node
    if "reward_model" in {entry.value for key, entry in reading.entries.by_key.items() if _ENVIRONMENT.fullmatch(key)}:
        nodes -= 0 if is_one_node else _whole(reading, "env.reward_model.resources.num_nodes")
        of_node -= _whole(reading, "env.reward_model.resources.gpus_per_node") if is_one_node else 0
    if not values["is_colocated"] and nodes > 1 and other_nodes:
        nodes -= other_nodes
    elif not values["is_colocated"]:
        of_node -= other_ranks or 0
    if of_node == per_node:
        nodes -= _nodes_of_gym(reading, nodes, per_node)
    if nodes * of_node < 1:
        reading.questions.append(
            "the inference engine has all of cluster.num_nodes x cluster.gpus_per_node GPUs, and the policy none: give "
            "what the job is started with, as in --set cluster.num_nodes=2"
        )
        nodes, of_node = 1, per_node
    values.setdefault("world_size", nodes * of_node)
    return int(per_node)


def _nodes_of_gym(reading: Reading, nodes: int, per_node: int) -> int:
    """Returns how many of the nodes that are left NeMo-Gym has for its own models.

    Main (7ea279ab) and 0.7.0 give Gym nodes beside those of the cluster; the branches ``super-v3`` and ``ultra-v3``,
    of which the containers of Nemotron 3 are, take them away (``setup`` in nemo_rl/algorithms/grpo.py).
    """
    key = "env.nemo_gym.num_gpu_nodes"
    of_gym = reading.get(key) if reading.get("env.should_use_nemo_gym") is True else 0
    if not isinstance(of_gym, int) or not 0 < of_gym < nodes:
        return 0
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    tensor, context, stages = (reading.values.get(name) or 1 for name in names)
    experts, of_expert = (
        reading.values.get(name) or 1 for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
    )
    fits, fits_without = (
        not number * per_node % (tensor * context * stages) and not number * per_node % (experts * of_expert * stages)
        for number in (nodes, nodes - of_gym)
    )
    is_within = fits_without and not fits
    reading.warnings.append(
        f"{key} {of_gym}: NeMo-RL's main and 0.7.0 give NeMo-Gym nodes beside cluster.num_nodes, and the branches of "
        f"Nemotron 3 (super-v3, ultra-v3) take them from it; memlab "
        + ("takes them from it, as the layout fits the other nodes only" if is_within else "counts them beside it")
        + f": give --set {key}=0, with another cluster.num_nodes, for the other"
    )
    return of_gym if is_within else 0


_ENVIRONMENT = re.compile(r"data\.(?:\w+\.)?env_name")
"""Where the data name the environments that a job has (``extract_necessary_env_names`` in nemo_rl/data/utils.py)."""
_TEACHERS = "on_policy_distillation"


def _nodes_of_teachers(reading: Reading) -> int:
    """Returns the nodes that teachers have for themselves (``create_teacher_configs_from_opd_config``)."""
    section = f"{_TEACHERS}.non_colocated_teachers"
    if not (reading.get(f"{_TEACHERS}.enabled") and reading.get(f"{section}.enabled")):
        return 0
    start = f"{_TEACHERS}.teacher_model_by_agent_name."
    models = {key.removeprefix(start): reading.get(key) for key in reading.entries.by_key if key.startswith(start)}
    names = list(models)
    if reading.get(f"{_TEACHERS}.deduplicate_shared_teacher_checkpoints", default=True):
        names = list({model: name for name, model in reversed(models.items())}.values())
    of_all = _whole(reading, f"{section}.default_teacher_cfg.num_nodes", 1)
    return sum(_whole(reading, f"{section}.teacher_overrides.{name}.num_nodes", of_all) for name in names)


def _take_nodes_of_teachers(reading: Reading) -> int:
    """Returns the nodes of teachers, and says what they are where there are some.

    The training gets a log-probability of each token from them (``OPDAdvantageEstimator``, 7ea279ab).
    """
    nodes, key = _nodes_of_teachers(reading), f"{_TEACHERS}.enabled"
    if nodes:
        reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
        reading.without_effect[key] = (
            f"the teachers have {nodes} of the job's nodes for themselves, and send the training one number for each "
            "token: memlab predicts the ranks of the other nodes"
        )
    return nodes


def _whole(reading: Reading, key: str, default: int = 0) -> int:
    """Returns a number of nodes or GPUs, which changes how many are left for the training."""
    value = reading.converted(key, COUNT)
    return default if value is None else int(value)


def take_longest(reading: Reading) -> int:
    """Returns the tokens of the longest sequence, which ``batched_message_log_to_flat_message`` pads to a multiple.

    See ``nemo_rl/data/llm_message_utils.py`` (7ea279ab); rows that are packed are full at any multiple.
    """
    values = reading.values
    longest, multiple = values.pop("longest"), values.pop("sequence_multiple")
    return int(longest if values["is_packed"] else -(-longest // multiple) * multiple)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    values = composed(scenario, settings)
    del values["recompute_method"], values["recompute_num_layers"]  # `complete` sets both
    is_row, is_away = values["is_packed"] or scenario.layout.context_parallel_size > 1, settings.offload_parameters
    return values | {
        "is_packed": is_row,
        "overlap_cpu_optimizer_d2h_h2d": (
            scenario.state.optimizer_cpu_offload and scenario.state.overlap_cpu_optimizer_d2h_h2d
        ),
        "expert_tensor_parallel_size": scenario.layout.expert_tensor_size,
        "is_checkpointing": settings.recompute_granularity is not None,
        "is_fp8": scenario.state.fp8_format is not None,
        "is_deferred": not scenario.state.fp32_output,
        "is_fused": is_row and scenario.state.loss == "logprobs_one_hot",
        "is_dynamic": False,
        "has_adapters": scenario.state.lora is not None,
        "packed_tokens": scenario.micro_batch_size * scenario.seq_length if is_row else None,
        "longest": values["longest"] if is_row else scenario.seq_length,
        "sequence_multiple": 1,
        "is_colocated": is_away,
        "moves_optimizer": settings.offload_optimizer or not is_away or scenario.state.optimizer_cpu_offload,
        "frees_optimizer": False,
    }


def check(reading: Reading) -> None:
    """Checks rules of ``nemo_rl/models/megatron/setup.py`` (main of August 2026).

    Raises:
        CannotStartError: If it refuses the job.
    """
    check_megatron(reading)
    if reading.get("policy.reward_model_cfg.enabled"):
        raise CannotStartError(
            "policy.reward_model_cfg.enabled is true with Megatron, which NeMo-RL refuses: train the reward model with "
            "DTensor, or leave it out"
        )
    fused = f"{_MEGATRON}.use_fused_linear_logprobs"
    if reading.entries.get(fused) and reading.values.get("overlap_param_gather"):
        raise CannotStartError(
            f"{fused} is on with overlap_param_gather, which NeMo-RL refuses: set {_MEGATRON}."
            "distributed_data_parallel_config.overlap_param_gather to false, or leave use_fused_linear_logprobs out",
            "overlap_param_gather",
        )
    deferred = f"{_MEGATRON}.defer_fp32_logits"
    chunk = reading.get("policy.logprob_chunk_size")
    if isinstance(chunk, int) and chunk > 0 and not reading.entries.get(deferred):
        raise CannotStartError(
            f"policy.logprob_chunk_size is {chunk} without {deferred}, which NeMo-RL "
            f"refuses: set {deferred} to true, or leave policy.logprob_chunk_size out",
            *("is_deferred", "logprobs_chunk_size"),
        )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what NeMo-RL cannot express of these settings."""
    reasons = {}
    if scenario.state.lora is not None and scenario.state.lora.is_canonical:
        reasons["lora_target_modules"] = "NeMo-RL's adapters are not in the canonical form"
    packed_losses = ("logprobs_by_sequence", "logprobs_one_hot") if is_packed(scenario) else ("logprobs_one_hot",)
    if scenario.state.loss not in packed_losses:
        reasons["loss"] = f"NeMo-RL's policy gradient computes the loss {' or '.join(packed_losses)}"
    if not is_packed(scenario) and scenario.layout.context_parallel_size > 1:
        reasons["micro_batch_size"] = "NeMo-RL packs a micro-batch's sequences into one row with context parallelism"
    if not is_packed(scenario) and not scenario.state.create_attention_mask:
        reasons["create_attention_mask"] = "NeMo-RL gives rows that are not packed a causal mask"
    if scenario.state.logprobs_chunk_size is not None and scenario.state.fp32_output:
        reasons["logprobs_chunk_size"] = "NeMo-RL takes chunks only of logits that stay in bf16 (defer_fp32_logits)"
    if settings.recompute_granularity == "full" and (settings.recompute_method, settings.recompute_num_layers) != (
        "uniform",
        1,
    ):
        reasons["recompute_method"] = "NeMo-RL recomputes whole layers only one by one (uniform 1)"
    if settings.offload_gradients != settings.offload_parameters:
        reasons["offload_gradients"] = "NeMo-RL offloads gradients where it offloads parameters, with vLLM's engine"
    if settings.offload_optimizer and (not settings.offload_parameters or scenario.state.optimizer_cpu_offload):
        reasons["offload_optimizer"] = (
            "NeMo-RL offloads the optimizer state only where it offloads parameters, and no CPU optimizer"
        )
    return reasons


_PROGRAM = re.compile(r"(?:.*/)?run_(?:\w+_)?(?:grpo|sft|dpo|ppo|rm|distillation)(?:_\w+)?\.py")


def _is_a_job(words: list[str]) -> bool:
    """Whether a command starts one of NeMo-RL's ``examples/run_*.py`` with a file, or with keys of its own."""
    files = [f"{word.replace('.', '/')}.py" if before == "-m" else word for before, word in pairwise(["", *words])]
    programs = [word for word in files if _PROGRAM.fullmatch(word)]
    has_keys = any(word.lstrip("+~").startswith(("policy.", "cluster.")) for word in words)
    return bool(programs) and (has_keys or ("--config" in words and "examples/" in programs[0]))


_OF_8B = {
    "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "policy.train_micro_batch_size": 1,
    "policy.logprob_batch_size": 4,
    "policy.max_total_sequence_length": 4096,
    "grpo.num_prompts_per_step": 64,
    "grpo.num_generations_per_prompt": 32,
    "cluster.gpus_per_node": 8,
}
_OF_MEGATRON = {"policy.dtensor_cfg.enabled": False, "policy.megatron_cfg.enabled": True}
_OF_70B = {
    **_OF_8B,
    **_OF_MEGATRON,
    "policy.model_name": "meta-llama/Llama-3.3-70B-Instruct",
    "policy.logprob_batch_size": 1,
    "policy.megatron_cfg.tensor_model_parallel_size": 4,
    "policy.megatron_cfg.pipeline_model_parallel_size": 4,
    "policy.make_sequence_length_divisible_by": 4,
    "policy.generation.vllm_cfg.tensor_parallel_size": 8,
    "cluster.num_nodes": 8,
}
_OF_30B = {
    **_OF_8B,
    **_OF_MEGATRON,
    "policy.model_name": "Qwen/Qwen3-30B-A3B",
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.megatron_cfg.expert_model_parallel_size": 8,
    "policy.megatron_cfg.sequence_parallel": True,
    "policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "policy.sequence_packing.enabled": False,
    "policy.make_sequence_length_divisible_by": 2,
    "policy.generation.vllm_cfg.tensor_parallel_size": 4,
    "policy.generation.vllm_cfg.gpu_memory_utilization": 0.7,
    "cluster.num_nodes": 8,
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "grpo_math_1B": {"policy.model_name": "Qwen/Qwen2.5-1.5B"},
    "grpo_math_1B_megatron": {"policy.model_name": "Qwen/Qwen2.5-1.5B"} | _OF_MEGATRON,
    "grpo_math_8B": _OF_8B | {"policy.logprob_batch_size": 2},
    "grpo_math_8B_megatron": _OF_8B | _OF_MEGATRON | {"policy.megatron_cfg.pipeline_model_parallel_size": 2},
    "grpo_math_70B_megatron": _OF_70B,
    "grpo_math_qwen30ba3b_megatron": _OF_30B,
}
"""``examples/configs`` of 7ea279ab, beside the defaults of the keys, which are those of grpo_math_1B.yaml."""

NEMO_RL = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    source="main of August 2026",
    transformer_engine="2.15",  # release_v2.15 in pyproject.toml
    signs=Signs(
        looked_for="policy.megatron_cfg",
        key="policy.megatron_cfg.",
        of_command=_is_a_job,
        of_tree=lambda begins: begins("policy.dtensor_cfg.") or (begins("policy.") and begins("defaults")),
    ),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("nemo_rl")
    | keys_without_effect("environment", f"{_MEGATRON}.env_vars")
    | model_without_effect(_OVERRIDES)
    | keys_without_effect("megatron_core_optimizer", f"{_MEGATRON}.optimizer"),
    complete=complete,
    complete_of_model=_complete_model,
    check=check,
    compose=compose,
    file_in_source=re.compile(r'args\.config = os\.path\.join\(([^=]{1,200}\.yaml")'),
    fixed=FIXED,
    packs=is_packed,
    padding_in_fp8=lambda unit, _, recipe: (unit, unit * _FP8_ROWS.get(recipe, 16)),
    cannot_write=OF_BRIDGE
    | ONLY_OF_MS_SWIFT
    | ONLY_OF_VERL_AND_SLIME
    | ONLY_OF_MEGATRON_LM
    | of_one_kind("NeMo-RL")
    | {
        "checkpoint_input_remedy": "NeMo-RL has no remedy for the inputs that checkpoints of MoE layers keep",
        "offload_optimizer_except_update": "NeMo-RL loads the optimizer state before the step",
        "ddp_bucket_size": "NeMo-RL has no such key",
        "manual_gc": "NeMo-RL has no such key",
        "calculate_per_token_loss": "NeMo-RL always divides gradients by the tokens of the whole batch",
    },
    without_own_key=frozenset(
        (
            *("offload_parameters", "offload_gradients", "offload_optimizer"),
            *("loss", "fp32_output", "create_attention_mask"),
        )
    ),
    cannot_write_of=cannot_write,
    render=yaml_lines,
    examples=EXAMPLES,
    configuration_of={"run_grpo": "grpo_math_1B", "run_grpo_math": "grpo_math_1B"},
)
