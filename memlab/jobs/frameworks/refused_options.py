"""Rules by which Megatron refuses a job for an option that memlab does not predict, or that the model does not have.

Each is in megatron-core 0.16.1 and in main of August 2026 (d98e8a64), unless the option is newer than 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.option import EngineName
from memlab.jobs.entries import UNKNOWN
from memlab.jobs.frameworks.framework import CannotStartError, Reading

Rule = tuple[Callable[[Reading], object], str, str, str]
"""Whether a job breaks the rule, what it has, what to do, and the field of memlab that decides."""
_ONE_OF_TWO = "leave one of the two out"

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_FSDP = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
_FSDP_OF_BRIDGE = ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp")


def _is_on(reading: Reading, field: str) -> bool:
    # The gradients' config (ddp) has a key delay_wgrad_compute too, without a rule.
    found = [one.key for one in reading.not_modelled if one.key.rpartition(".")[2] == field]
    return any("ddp" not in key and "data_parallel" not in key for key in found)


def _has(reading: Reading, name: str) -> bool:
    return bool(reading.values.get(name) or reading.entries.get(name)) or _is_on(reading, name)


def _needs(name: str, *needed: str) -> Rule:
    return (
        lambda job: _has(job, name) and not any(_has(job, one) for one in needed),
        *(f"{name} without {' or '.join(needed)}", f"give {needed[0]}, or leave {name} out", needed[0]),
    )


def _leaves_type_open(job: Reading) -> bool:
    """Whether a name stands for the type of matrices, as Megatron-Bridge's recipes in FP4 do, or the option is ignored.

    With torch's FSDP2 Megatron-LM itself switches the gathers of parameters in 8 and 4 bits off.
    """
    recipe = job.entries.get("mixed_precision")
    is_named = isinstance(recipe, str) and recipe.replace("-", "_") != "bf16_mixed"
    return is_named or bool(job.entries.get("use_torch_fsdp2"))


def _needs_type(name: str, *needed: str) -> Rule:
    breaks, what, advice, field = _needs(name, *needed)
    return (lambda job: breaks(job) and not _leaves_type_open(job), what, advice, field)


def _excludes(name: str, other: str) -> Rule:
    return (lambda job: _has(job, name) and _has(job, other), f"{name} with {other}", _ONE_OF_TWO, other)


def _offloads_layers(reading: Reading) -> bool:
    """Whether whole layers are offloaded: Megatron-LM's arguments give only a number of them."""
    names = ("cpu_offloading", "cpu_offloading_num_layers")
    return _is_on(reading, names[0]) or any(one.key == names[1] for one in reading.not_modelled)


def _sets_overlaps(reading: Reading) -> bool:
    """Whether Megatron-Bridge's ``comm_overlap`` replaces what the model's config says of these options.

    ``delay_wgrad_compute`` and ``defer_embedding_wgrad_compute`` are then off, unless the section itself asks for them
    (``setup`` in training/comm_overlap.py, 0.6.2).
    """
    keys = [key for key in reading.entries.by_key if key.startswith("comm_overlap.")]
    return any(reading.entries.get(key) is not None for key in keys)


def _selects(reading: Reading, module: str) -> bool:
    values = reading.values
    return values.get("recompute_granularity") == "selective" and module in (values.get("recompute_modules") or ())


def _ranks(reading: Reading, kind: str) -> int:
    return reading.values.get(f"{kind}_parallel_size") or 1


_OF_CORE: tuple[Rule, ...] = (
    (
        lambda job: _offloads_layers(job) and _ranks(job, "pipeline_model") > 1,
        *("cpu_offloading with pipeline stages", _ONE_OF_TWO, "pipeline_model_parallel_size"),
    ),
    *(
        _needs(*names)
        for names in (
            ("ep_overlap_early_attn_memory_release", "overlap_moe_expert_parallel_comm"),
            ("fine_grained_activation_offloading", "offload_modules"),
        )
    ),
    (
        lambda job: (
            _has(job, "delay_wgrad_compute")
            and not _has(job, "overlap_moe_expert_parallel_comm")
            and (job.entries.get("comm_overlap.delay_wgrad_compute") or not _sets_overlaps(job))
        ),
        "delay_wgrad_compute without overlap_moe_expert_parallel_comm",
        "give overlap_moe_expert_parallel_comm, or leave delay_wgrad_compute out",
        "overlap_moe_expert_parallel_comm",
    ),
    (
        lambda job: (
            _has(job, "overlap_moe_expert_parallel_comm")
            and _ranks(job, "expert_model") == 1
            and not _sets_overlaps(job)
        ),
        "overlap_moe_expert_parallel_comm without expert parallel ranks",
        *("leave overlap_moe_expert_parallel_comm out", "expert_model_parallel_size"),
    ),
    (
        lambda job: (
            _has(job, "overlap_moe_expert_parallel_comm")
            and job.values.get("recompute_granularity") == "full"
            and not _sets_overlaps(job)
        ),
        *("overlap_moe_expert_parallel_comm with full recompute", _ONE_OF_TWO, "recompute_granularity"),
    ),
    (
        lambda job: _has(job, "fine_grained_activation_offloading") and _offloads_layers(job),
        *("fine_grained_activation_offloading with cpu_offloading", _ONE_OF_TWO, "fine_grained_activation_offloading"),
    ),
    (
        lambda job: (
            job.values.get("use_precision_aware_optimizer") and _value(job, "optimizer") in ("sgd", "muon", "dist_muon")
        ),
        "use_precision_aware_optimizer with another optimizer than adam",
        *("leave use_precision_aware_optimizer out, or choose adam", "use_precision_aware_optimizer"),
    ),
    *(
        _needs_type(*names)
        for names in (
            ("fp4_param_gather", "fp4", "fp4_format"),
            ("fp8_output_proj", "fp8_format"),
            ("fp8_param_gather", "fp8_format"),
        )
    ),
    (
        lambda job: (
            _is_on(job, "defer_embedding_wgrad_compute")
            and _ranks(job, "pipeline_model") == 1
            and not _sets_overlaps(job)
        ),
        "defer_embedding_wgrad_compute without pipeline stages",
        *("leave defer_embedding_wgrad_compute out", "pipeline_model_parallel_size"),
    ),
    (
        lambda job: (
            job.values.get("use_precision_aware_optimizer") and job.values.get("use_distributed_optimizer") is False
        ),
        "use_precision_aware_optimizer without the distributed optimizer",
        *("switch use_distributed_optimizer on, or leave the other out", "use_distributed_optimizer"),
    ),
    (
        lambda job: _offloads_layers(job) and job.values.get("recompute_granularity"),
        *("cpu_offloading with recompute", _ONE_OF_TWO, "recompute_granularity"),
    ),
    (
        lambda job: (
            _is_on(job, "distribute_saved_activations")
            and job.values.get("recompute_granularity")
            and job.values.get("sequence_parallel")
            and _ranks(job, "tensor_model") > 1  # verl switches it off on one rank
        ),
        *("distribute_saved_activations with sequence parallelism", _ONE_OF_TWO, "sequence_parallel"),
    ),
    (
        lambda job: (
            _is_on(job, "first_last_layers_bf16")
            and job.values.get("fp8_format")
            and job.values.get("fp8_recipe", "delayed") == "delayed"
        ),
        *("first_last_layers_bf16 with FP8 by the delayed recipe", "choose another recipe", "fp8_recipe"),
    ),
)
"""``__post_init__`` of ``TransformerConfig``, ``ModelParallelConfig`` and ``OptimizerConfig``."""


def _value(job: Reading, field: str) -> Any:
    found = [one.value for one in job.not_modelled if one.key.rpartition(".")[2] == field]
    return found[0] if found else None


def _wrong_product(job: Reading) -> bool:
    sizes = _value(job, "hierarchical_context_parallel_sizes")
    numbers = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    return all(isinstance(size, int) for size in numbers) and prod(numbers) != _ranks(job, "context")


_OF_RANKS: tuple[Rule, ...] = (
    (
        _wrong_product,
        "hierarchical_context_parallel_sizes with another product than context_parallel_size",
        *("change one of them", "context_parallel_size"),
    ),
    (
        lambda job: (
            "a2a+p2p" in str(_value(job, "cp_comm_type")) and _value(job, "hierarchical_context_parallel_sizes") is None
        ),
        "cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes",
        *("give these sizes", "cp_comm_type"),
    ),
    _excludes("deterministic_mode", "cross_entropy_loss_fusion"),
)
"""Of Megatron-LM's arguments, and of Megatron-Bridge."""
_DISTRIBUTES_ALONE: Rule = (
    lambda job: (
        job.entries.get("distribute_saved_activations")
        and (_ranks(job, "tensor_model") == 1 or job.values.get("recompute_granularity") != "full")
    ),
    "distribute_saved_activations without full recompute over tensor parallel ranks",
    *("leave distribute_saved_activations out", "recompute_granularity"),
)
_LOSS_IN_FP16: Rule = (
    lambda job: job.entries.get("fp16_lm_cross_entropy") and not job.entries.get("fp16"),
    *("fp16_lm_cross_entropy without fp16", "leave fp16_lm_cross_entropy out", "dtype"),
)


def _has_one_connection(job: Reading) -> bool:
    """Whether the job's own environment, or that of its recipe, keeps collectives and kernels in one queue."""
    of_file = [job.entries.get(f"{section}.{_CONNECTIONS}") for section in ("env_vars", "ENV_VARS")]
    return "1" in (job.entries.environment.get(_CONNECTIONS), *map(str, of_file))


def _note_connections(job: Reading, *keys: str) -> None:
    """Warns of FSDP where the script may set the number of connections that refuses it."""
    entries = job.entries
    is_open = UNKNOWN in str(entries.environment.get(_CONNECTIONS, ""))
    if is_open or _CONNECTIONS in entries.undecided:
        for key in (key for key in keys if entries.get(key) is True):
            job.warnings.append(
                f"{key} does not start with {_CONNECTIONS} 1, which it may set: give --set {_CONNECTIONS}=NUMBER"
            )


def _refuses_one_connection(*keys: str) -> tuple[Rule, ...]:
    """Returns the rules of an environment with which FSDP does not start (Megatron-LM since core 0.12)."""
    return tuple(
        (
            lambda job, key=key: (
                job.entries.get(key) is True
                and job.entries.get("ddp.megatron_fsdp_version") != 2
                and _has_one_connection(job)
            ),
            f"{key} with {_CONNECTIONS} 1 in its environment",
            *("leave that variable out, or export another number, such as 32", key),
        )
        for key in keys
    )


def _needs_format(fsdp: str, *formats: str) -> Rule:
    """Returns the rule of the checkpoints of Megatron-LM's FSDP, which it checks of jobs that save nothing too."""
    return (
        lambda job: job.entries.get(fsdp) is True and job.entries.get("ckpt_format", "torch_dist") not in formats,
        f"{fsdp} with checkpoints in another format than {' or '.join(formats)}",
        *(f"give ckpt_format {formats[0]}", "ckpt_format"),
    )


_OF_FSDP: tuple[Rule, ...] = (
    *_refuses_one_connection(*_FSDP),
    _needs_format("use_megatron_fsdp", "fsdp_dtensor"),
    _needs_format("use_torch_fsdp2", "torch_dist", "torch_dcp"),
    *(
        (
            lambda job, name=name, fsdp=fsdp: job.entries.get("ckpt_format") == name and not _has(job, fsdp),
            *(f"ckpt_format {name} without {fsdp}", f"give {fsdp}, or another format", "ckpt_format"),
        )
        for name, fsdp in (("fsdp_dtensor", "use_megatron_fsdp"), ("torch_dcp", "use_torch_fsdp2"))
    ),
    *(_excludes("use_torch_fsdp2", one) for one in ("use_distributed_optimizer", "fp16")),
    (
        lambda job: job.entries.get("use_torch_fsdp2") is True and job.values.get("gradient_accumulation_fusion"),
        "use_torch_fsdp2 with fused accumulation of gradients, which is on by default",
        *("give no_gradient_accumulation_fusion", "gradient_accumulation_fusion"),
    ),
    (
        lambda job: (
            job.entries.get("use_torch_fsdp2") is True
            and job.values.get("share_embeddings_and_output_weights")
            and not job.entries.get("use_checkpoint_args")
        ),
        "use_torch_fsdp2 with shared embeddings, as they are by default",
        *("give untie_embeddings_and_output_weights", "untie_embeddings_and_output_weights"),
    ),
    *(
        (
            lambda job, kind=kind: _has(job, "use_torch_fsdp2") and _ranks(job, kind) > 1,
            *(f"use_torch_fsdp2 with {kind}_parallel_size above 1", _ONE_OF_TWO, f"{kind}_parallel_size"),
        )
        for kind in ("pipeline_model", "expert_model")
    ),
)
"""``validate_args`` (megatron/training/arguments.py, core 0.12 to 0.19; ``use_megatron_fsdp`` since 0.14)."""
_OF_ARGUMENTS: tuple[Rule, ...] = (
    _excludes("group_query_attention", "multi_latent_attention"),
    (
        lambda job: job.entries.get("recompute_modules") is True,
        *("recompute_modules without a module", "name one, such as core_attn, or leave it out", "recompute_modules"),
    ),
    (
        lambda job: (
            "add_bias_linear" not in job.entries.by_key  # a log has the flags' destinations, and the layers twice
            and all(job.entries.get(name) is not None for name in ("num_layers", "encoder_num_layers"))
        ),
        *("num_layers with encoder_num_layers", _ONE_OF_TWO, "num_layers"),
    ),
    (
        lambda job: (
            job.entries.get("num_layers_per_virtual_pipeline_stage") is not None
            and any(job.entries.get(f"decoder_{end}_pipeline_num_layers") is not None for end in ("first", "last"))
        ),
        "num_layers_per_virtual_pipeline_stage with layers of the first or last stage",
        *("give num_virtual_stages_per_pipeline_rank in its place", "virtual_pipeline_model_parallel_size"),
    ),
    (
        lambda job: (
            job.entries.get("no_overlap_p2p_communication")
            and _ranks(job, "pipeline_model") == 2
            and (
                job.entries.get("num_layers_per_virtual_pipeline_stage") is not None
                or job.entries.get("num_virtual_stages_per_pipeline_rank") not in (None, 1)
            )
        ),
        "several model chunks on two stages with no_overlap_p2p_communication",
        *("leave no_overlap_p2p_communication out", "virtual_pipeline_model_parallel_size"),
    ),
    (
        lambda job: (
            job.entries.get("no_position_embedding")
            and job.values.get("position_embedding_type") != "rope"
            and not job.entries.get("use_checkpoint_args")  # a checkpoint's arguments take the place of both
        ),
        "no_position_embedding without rotary positions",
        *("give position_embedding_type rope or none in its place", "position_embedding_type"),
    ),
    (
        lambda job: (
            job.values.get("fp8_param_gather")
            and not job.values.get("use_distributed_optimizer")
            and not job.entries.get("use_torch_fsdp2")
            and not job.entries.get("use_megatron_fsdp")
        ),
        "fp8_param_gather without the distributed optimizer",
        *("switch use_distributed_optimizer on, or leave fp8_param_gather out", "fp8_param_gather"),
    ),
    _DISTRIBUTES_ALONE,
    _LOSS_IN_FP16,
    *_OF_FSDP,
    (
        lambda job: job.entries.get("attention_backend") == "local" and job.entries.get("spec") is None,
        "attention_backend local without --spec local",
        *("give transformer_impl local in its place", "attention_backend"),
    ),
    *_OF_RANKS,
    *(
        _needs(*names)
        for names in (
            ("fsdp_manual_registration", "use_megatron_fsdp"),
            ("hybrid_context_parallel", "calculate_per_token_loss"),
            ("load_main_params_from_ckpt", "no_load_optim"),
            ("moe_use_upcycling", "save"),
            ("replication", "replication_jump"),
            *(
                ("overlap_param_gather_with_optimizer_step", one)
                for one in ("use_distributed_optimizer", "overlap_param_gather")
            ),
        )
    ),
    (
        lambda job: _has(job, "hybrid_context_parallel") and _ranks(job, "pipeline_model") > 1,
        *("hybrid_context_parallel with pipeline stages", _ONE_OF_TWO, "pipeline_model_parallel_size"),
    ),
)
"""``validate_args`` and the parser (megatron/training/arguments.py)."""
_OF_SCHEDULES = (
    *(_excludes("train_iters", one) for one in ("train_samples", "lr_decay_samples", "lr_warmup_samples")),
    *(_excludes("train_samples", one) for one in ("lr_decay_iters", "lr_warmup_iters")),
)
"""The same, of what it completes itself before it prints a log."""
_OF_YAML: tuple[Rule, ...] = (
    *_OF_SCHEDULES,
    _excludes("train_iters", "rampup_batch_size"),
    *(_excludes("lr_warmup_fraction", f"lr_warmup_{unit}") for unit in ("iters", "samples")),
    *(_needs("overlap_param_gather", one) for one in ("use_distributed_optimizer", "overlap_grad_reduce")),
    *(_excludes(one, f"encoder_{one}") for one in ("num_layers", "seq_length")),
    _excludes("bf16", "fp16"),
    _excludes("num_experts", "spec"),
    _needs("tp_comm_overlap", "sequence_parallel"),
    _needs("moe_grouped_gemm", "bf16"),
    _needs("save", "save_interval"),
    _DISTRIBUTES_ALONE,
    _LOSS_IN_FP16,
    (
        lambda job: (
            job.entries.get("num_layers_per_virtual_pipeline_stage") is not None and _ranks(job, "pipeline_model") < 3
        ),
        "num_layers_per_virtual_pipeline_stage with fewer than three pipeline stages",
        *("leave it out, or give more stages", "virtual_pipeline_model_parallel_size"),
    ),
    (
        lambda job: (
            job.entries.get("sequence_parallel")
            and _ranks(job, "tensor_model") > 1
            and job.entries.environment.get(_CONNECTIONS, "1") != "1"
        ),
        f"sequence_parallel with another number than 1 for {_CONNECTIONS}",
        *(f"export {_CONNECTIONS}=1", "sequence_parallel"),
    ),
)
"""``validate_yaml`` (megatron/training/yaml_arguments.py), which takes the place of ``validate_args``."""


def _has_local_graphs_of_layers(job: Reading) -> bool:
    section = next((one.key for one in job.not_modelled if one.key.rpartition(".")[2] == "cuda_graph_impl"), "")
    section = section.removesuffix("cuda_graph_impl")
    scopes = [job.entries.get(f"{section}cuda_graph_{name}") for name in ("scope", "modules")]
    is_other = "full_iteration" in str(scopes) or job.entries.get(f"{section}inference_cuda_graph_scope")
    return _value(job, "cuda_graph_impl") == "local" and not is_other


def _saves_or_loads(job: Reading) -> bool:
    """Whether a job of Megatron-Bridge has a folder of checkpoints, as each of its recipes does (recipes/common.py)."""
    keys = [f"checkpoint.{name}" for name in ("save", "load")]
    given = [job.entries.by_key[key].value is not None for key in keys if key in job.entries.by_key]
    return any(given) or (bool(job.entries.recipe) and len(given) < len(keys))


_OF_BRIDGE: tuple[Rule, ...] = (
    *_OF_RANKS,
    (
        lambda job: (
            job.values.get("use_precision_aware_optimizer")
            and job.entries.get("optimizer.use_distributed_optimizer") is False
        ),
        "use_precision_aware_optimizer with optimizer.use_distributed_optimizer false",
        *("switch the latter on, or leave the other out", "use_distributed_optimizer"),
    ),
    (
        lambda job: (
            job.entries.get("dist.use_decentralized_pg")
            and job.entries.get("dist.use_gloo_process_groups") is not False
        ),
        "dist.use_decentralized_pg with Gloo's process groups",
        *("give dist.use_gloo_process_groups false", "use_gloo_process_groups"),
    ),
    (
        lambda job: (
            any(job.entries.get(f"{section}.use_megatron_fsdp") for section in ("ddp", "dist"))
            and _saves_or_loads(job)
            and job.entries.get("checkpoint.ckpt_format") != "fsdp_dtensor"
        ),
        "use_megatron_fsdp with checkpoints in another format",
        *("give checkpoint.ckpt_format fsdp_dtensor", "ckpt_format"),
    ),
    *_refuses_one_connection(*_FSDP_OF_BRIDGE),
    (
        _has_local_graphs_of_layers,
        "cuda_graph_impl local for graphs of layers",
        *("choose transformer_engine or full_iteration", "cuda_graph_impl"),
    ),
)
"""``ConfigContainer.validate`` (src/megatron/bridge/training/config.py, 0.6.2): ``local`` may have a graph of the whole
iteration, or graphs of inference."""

_OF_SWIFT: tuple[Rule, ...] = (
    (
        lambda job: job.entries.get("group_by_length") and job.entries.get("padding_free") is not False,
        *("group_by_length with padding_free", "switch padding_free off, which is on by default", "group_by_length"),
    ),
    (
        lambda job: (
            _has(job, "tp_comm_overlap") and not (_has(job, "sequence_parallel") and _ranks(job, "tensor_model") > 1)
        ),
        "tp_comm_overlap without tensor parallel ranks that split sequences",
        *("switch sequence_parallel on, or leave tp_comm_overlap out", "sequence_parallel"),
    ),
    (
        lambda job: (
            job.values.get("moe_token_dispatcher_type") == "allgather"
            and job.entries.get("megatron_extra_kwargs.variable_seq_lengths") is not False
        ),
        "moe_token_dispatcher_type allgather with sequences of variable length",
        *("choose alltoall, since mcore-bridge always has such sequences", "moe_token_dispatcher_type"),
    ),
    _needs("mtp_shared_weights", "mtp_num_layers"),
    (
        lambda job: (
            job.entries.get("recompute_method") is not None
            and job.entries.get("recompute_granularity", "selective") == "selective"
        ),
        "recompute_method with selective recompute, which is ms-swift's default",
        *("leave it out, or choose full recompute", "recompute_granularity"),
    ),
    (
        lambda job: (
            job.entries.get("freeze_parameters_ratio") not in (None, 0, 1) and _ranks(job, "pipeline_model") > 1
        ),
        *("freeze_parameters_ratio with pipeline stages", _ONE_OF_TWO, "pipeline_model_parallel_size"),
    ),
    (
        lambda job: job.entries.get("save_total_limit") is not None and _has(job, "async_save"),
        *("async_save with save_total_limit", _ONE_OF_TWO, "save_total_limit"),
    ),
    *(
        (
            lambda job, name=name: job.entries.get(name) is not None and not _is_on(job, "optimizer"),
            *(f"{name} with another optimizer than muon", f"leave {name} out", "optimizer"),
        )
        for name in ("muon_lr", "muon_min_lr")
    ),
)
"""swift/megatron/arguments/megatron_args.py (4.6.0) and mcore-bridge's ``ModelConfig`` (1.6.5)."""


def check_core(reading: Reading, architecture: Architecture | None, engine: EngineName) -> None:
    """Checks rules of ``TransformerConfig``, which only jobs of Megatron have.

    Args:
        architecture: The job's own; None if another one takes its place.

    Raises:
        CannotStartError: If one refuses the job.
    """
    if engine != "megatron":
        return
    check_rules(reading, _OF_CORE, "Megatron-Core refuses")
    if architecture is not None:
        check_rules(reading, _OF_EXPERTS, "Megatron-Core refuses")
    if architecture is not None and not architecture.moe_router_num_groups:
        check_rules(reading, (_OF_GROUPS,), "Megatron-Core refuses")
    if architecture is not None and not architecture.multi_latent_attention:
        check_rules(reading, (_LATENT,), "Megatron-Core refuses")


def check_flags(reading: Reading) -> None:
    """Checks rules of the arguments of Megatron-LM.

    Raises:
        CannotStartError: If one refuses the job.
    """
    if reading.entries.file_for_flags:
        check_rules(reading, _OF_YAML, "Megatron-LM refuses with --yaml-cfg")
        return
    is_log = "add_bias_linear" in reading.entries.by_key  # which has the flags' destinations
    rules = _OF_ARGUMENTS if is_log else (*_OF_ARGUMENTS, *_OF_SCHEDULES)
    check_rules(reading, rules, "the arguments of Megatron-LM refuse")
    _note_connections(reading, *_FSDP)


def check_bridge(reading: Reading) -> None:
    """Checks rules of Megatron-Bridge.

    Raises:
        CannotStartError: If one refuses the job.
    """
    check_rules(reading, _OF_BRIDGE, "Megatron-Bridge refuses")
    _note_connections(reading, *_FSDP_OF_BRIDGE)


def check_swift(reading: Reading) -> None:
    """Checks rules of ms-swift.

    Raises:
        CannotStartError: If one refuses the job.
    """
    check_rules(reading, _OF_SWIFT, "ms-swift refuses")


def note_single_experts(reading: Reading) -> None:
    """Warns of ``moe_act`` where only a flag groups experts, in Megatron-LM: ``TransformerConfig`` refuses it then."""
    if _selects(reading, "moe_act") and not reading.entries.get("moe_grouped_gemm"):
        reading.warnings.append(
            "recompute_modules has moe_act without moe_grouped_gemm, which Megatron-Core refuses: memlab predicts the "
            "job with moe_grouped_gemm; switch it on"
        )


_OF_EXPERTS = (
    _needs("moe_paged_stash", "moe_expert_rank_capacity_factor"),
    _needs("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor"),
    *(
        _needs_type(f"moe_router_padding_for_{name}", "fp8_format", "fp4", "fp4_format")
        for name in ("fp8", "quantization")
    ),
)
"""``TransformerConfig`` has these rules for dense models too."""
_OF_GROUPS = _needs("moe_router_group_topk", "moe_router_num_groups")
"""The model's own config.json may have the number of groups."""
_LATENT = (
    lambda job: _selects(job, "mla_up_proj"),
    *("mla_up_proj in recompute_modules without multi-latent attention", "leave mla_up_proj out", "recompute_modules"),
)


def check_rules(reading: Reading, rules: tuple[Rule, ...], refuses: str) -> None:
    """Checks rules in turn.

    Args:
        reading: Of the job.
        rules: Those that concern it.
        refuses: Who refuses a job that breaks one, with the verb.

    Raises:
        CannotStartError: If one refuses the job.
    """
    for breaks, what, advice, field in rules:
        if breaks(reading):
            # Of a field that is a text, an unknown value is not among the guesses.
            keys = {key for key, entry in reading.entries.by_key.items() if entry.is_unknown}
            reading.guessed += sorted(key for key in keys - {*reading.guessed} if key.rpartition(".")[2] == field)
            raise CannotStartError(f"the job has {what}, which {refuses}: {advice}", field)
