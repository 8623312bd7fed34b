"""Which memory settings and which options of a training state do nothing, each with the reason.

What an option's row says of it (`memlab.config.option.Option.needs`) is taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memlab.config.architectures import Architecture
from memlab.config.lora import LINEARS, OUTPUT_LAYER
from memlab.config.model_restrictions import checkpoints_moe_layers, is_without_checkpoints
from memlab.config.option import unread
from memlab.config.scenario import Scenario
from memlab.config.settings import NEWER_SETTINGS, MemorySettings
from memlab.config.training_state import LOSS_OPTIONS, TrainingState
from memlab.config.transformers_linears import adapted_parameters, linears, names_of_experts

_DEFAULT = MemorySettings()
_MODULES = ("recompute_modules", "offload_modules")


def of_settings(settings: MemorySettings, architecture: Architecture) -> dict[str, str]:
    """Names the settings that Megatron accepts and then ignores, as far as the model's structure decides it.

    Returns:
        Setting (``field:module``) to the reason, for each setting that changes nothing on this architecture. What
        only a run can show (tensors under the minimum size, the last group of a name) is added by the step record.
    """
    reasons: dict[str, str] = {}
    if settings.offload_modules is None and settings.min_offloaded_tensor_size != _DEFAULT.min_offloaded_tensor_size:
        reasons["min_offloaded_tensor_size"] = "no offload_modules are named, so no tensor is compared with it"
    if settings.offload_modules is None:
        idle = _given_of_newer(settings)
        reasons |= dict.fromkeys(idle, "no offload_modules are named, so nothing is transferred")
    if settings.offload_optimizer and settings.offload_optimizer_except_update:
        reasons["offload_optimizer"] = "offload_optimizer_except_update already keeps the same state on the host"
    if settings.checkpoint_input_remedy is not None and not checkpoints_moe_layers(settings, architecture):
        reasons["checkpoint_input_remedy"] = (
            "only a checkpoint that contains a router keeps its input after backward: "
            + (
                "choose recompute_granularity 'full', or recompute 'moe'"
                if architecture.keeps_graph
                else f"{architecture.name} is dense and has none"
            )
        )
    if {"core_attn"} <= set(settings.offload_modules or ()) & set(settings.recompute_modules or ()):
        reasons["offload_modules:core_attn"] = "core_attn is recomputed, and then Megatron offloads nothing of it"
    named = {f"{field}:{name}" for field in _MODULES for name in getattr(settings, field) or ()}
    return reasons | {name: reason for name, reason in architecture.without_effect.items() if name in named}


def _given_of_newer(settings: MemorySettings) -> list[str]:
    return [name for name in NEWER_SETTINGS if getattr(settings, name) != getattr(_DEFAULT, name)]


def of_full_recompute(settings: MemorySettings, scenario: Scenario) -> dict[str, str]:
    """Names full recompute where Megatron-Core ignores it."""
    reason = "megatron-core 0.16 and 0.17 ignore full recompute in a model with layers of Mamba, 0.18 has it"
    return {"recompute_granularity": reason} if is_without_checkpoints(settings, scenario) else {}


def on_this_rank(settings: MemorySettings, scenario: Scenario) -> dict[str, str]:
    """Names the modules that other layers of the model have, and no layer of this rank."""
    kinds = scenario.architecture.kinds_of(scenario.layers_of_rank)
    present = {name for kind, count in kinds.items() if count for field in _MODULES for name in getattr(kind, field)}
    reason = "no layer of this rank has this module: layers of other ranks do"
    return {
        f"{field}:{name}": reason
        for kind, count in kinds.items()
        if not count
        for field in _MODULES
        for name in set(getattr(kind, field)) & set(getattr(settings, field) or ()) - present
    }


def beside_cpu_optimizer(settings: MemorySettings, state: TrainingState) -> dict[str, str]:
    """Names what does nothing where the CPU optimizer already keeps the whole state on the host."""
    names = ("offload_optimizer", "offload_optimizer_except_update") if state.keeps_optimizer_on_host else ()
    reason = "optimizer_cpu_offload keeps the whole optimizer state on the host already"
    return {name: reason for name in names if getattr(settings, name)}


def in_forward_only_pass(settings: MemorySettings) -> dict[str, str]:
    """Names what does nothing in a forward-only pass, like `of_settings`: nothing is saved for backward."""
    names = [name for name in ("recompute_granularity", "checkpoint_input_remedy") if getattr(settings, name)]
    names += [f"offload_modules:{name}" for name in settings.offload_modules or ()]
    return dict.fromkeys(names, "a forward-only pass saves nothing that could be recomputed or offloaded")


def of_state(state: TrainingState) -> dict[str, str]:
    """Names the options that Megatron accepts and then ignores, each with the reason."""
    changed, options = state.changed(), state.options()
    reasons = {name: reason for name, reason in unread(TrainingState, options).items() if name in changed}

    def ignored(name: str, reason: str) -> None:
        if name in changed:
            reasons[name] = reason

    if not state.optimizer_cpu_offload:
        ignored("manual_gc", "only optimizer_cpu_offload leaves large tensors for the garbage collector")
    else:
        _on_cpu_optimizer(state, ignored)
    if not state.grad_reduce_in_bf16:
        buffers = (
            "Adam reads the gradients in the type in which they are reduced, which is fp32 without grad_reduce_in_bf16"
        )
        ignored(
            "main_grads_dtype",
            f"{buffers} (Megatron-LM's command line also sets grad_reduce_in_bf16, but Megatron-Core does not)",
        )
    if state.keeps_main_parameters_of_megatron:
        in_megatron = (
            f"with the FP8 recipe {state.fp8_recipe!r} and fp32 main parameters Megatron-Core keeps these, and "
            "copies of the gradients, as without the precision-aware optimizer"
        )
        ignored("main_grads_dtype", in_megatron)
        if state.exp_avg_dtype == state.exp_avg_sq_dtype == "fp32":
            ignored("use_precision_aware_optimizer", f"{in_megatron}; only moments in fewer bytes would be less")
    if not state.use_distributed_optimizer:
        ignored("overlap_param_gather", "only the distributed optimizer leaves parameters that must be gathered")
    if not state.overlap_grad_reduce:
        ignored("ddp_bucket_size", "without overlap_grad_reduce Megatron reduces each buffer as a single bucket")
    if state.overlap_param_gather_with_optimizer_step:
        ignored("ddp_bucket_size", "overlap_param_gather_with_optimizer_step leaves each buffer a single bucket")
    return reasons


def _on_cpu_optimizer(state: TrainingState, ignored: Callable[[str, str], None]) -> None:
    # megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, 0.16.1 and 0.19.2
    ignored(
        "pin_cpu_params",
        "Megatron's CPU optimizer ignores this option, and always pins the parameters when it copies them",
    )
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        ignored(name, "Megatron's CPU optimizer ignores this option: main parameters and moments are fp32")
    if state.optimizer_offload_fraction == 0:
        reason = "optimizer_offload_fraction is 0, so the whole state stays on the device"
        copies = "" if state.manual_gc else ", beside fp32 copies that Megatron discards: manual_gc frees them"
        ignored("optimizer_cpu_offload", reason + copies)
        for name in ("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads"):
            ignored(name, reason)


def of_scenario(job: Scenario) -> dict[str, str]:
    """Names the options of the training state that do nothing on this rank, each with the reason."""
    reasons = of_state(job.state) | _on_fp32(job) | _on_fsdp2(job)
    if _copies_of_parameters(job) == 1:
        alone = "one data-parallel rank exchanges no gradients and no parameters; only the padding of buckets changes"
        names = ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step")
        reasons |= {name: alone for name in names if getattr(job.state, name)}
    if job.state.deallocate_pipeline_outputs and job.layout.pipeline_model_parallel_size == 1:
        reasons["deallocate_pipeline_outputs"] = "only a pipeline stage sends outputs"
    if job.state.cp_comm_type != "p2p" and job.layout.context_parallel_size == 1:
        reasons["cp_comm_type"] = "context_parallel_size is 1, and nobody shares the sequences"
    if job.state.tp_comm_overlap and job.layout.tensor_model_parallel_size == 1:
        reasons["tp_comm_overlap"] = "one tensor parallel rank exchanges nothing"
    model = job.architecture
    if job.state.pad_packed_values and (job.packed_sequences is None or model.has_kernel_of_flash_attn_2):
        reasons["pad_packed_values"] = "only packed rows have it, of attention whose keys are larger than its values"
    shares_sequences = job.packed_sequences is not None or job.layout.context_parallel_size > 1
    if job.state.attention_dropout and shares_sequences:
        reasons["attention_dropout"] = (
            "on the CPU and in predictions, attention drops no probabilities of packed sequences, nor where ranks "
            "share a sequence: what a kernel keeps for it, the state of its random numbers, is left out"
        )
    is_inside = 0 < job.layout.pipeline_stage < job.layout.pipeline_model_parallel_size - 1
    if job.state.create_attention_mask_in_dataloader and is_inside:
        reasons["create_attention_mask_in_dataloader"] = "only the first and the last pipeline stage get masks"
    reasons |= _on_adapters(job) | _on_experts(job)
    if job.layout.pipeline_stage < job.layout.pipeline_model_parallel_size - 1:
        elsewhere = "only the last pipeline stage computes the loss"
        reasons |= {name: elsewhere for name in LOSS_OPTIONS if name in job.state.changed()}
    if job.layout.pipeline_stage > 0 and job.state.ddp_bucket_size is not None:
        reasons["ddp_bucket_size"] = "Megatron splits buffers into buckets only on the first pipeline stage"
    return reasons


def _on_adapters(job: Scenario) -> dict[str, str]:
    lora, reasons = job.state.lora, {}
    if lora is None:
        return {}
    if lora.dropout_position != "pre" and not lora.dropout:
        reasons["lora_dropout_position"] = "lora_dropout is 0"
    every = replace(lora, exclude_modules=())
    if job.engine == "fsdp2":
        linears_of_model = [*linears(job.architecture, job.num_layers)]
        unused = [
            target
            for target in lora.target_modules
            if target not in names_of_experts(job.architecture, lora)
            and not any(replace(lora, target_modules=(target,)).adapts_module(one.name) for one in linears_of_model)
        ]
        if unused:
            reasons["lora_target_modules"] = f"no linear of transformers' model is named {' or '.join(unused)}"
        if lora.fused_experts and not any(True for _ in adapted_parameters(job.architecture, 1, lora)):
            reasons["lora_fused_experts"] = "no target module names experts or routers of the model"
        if lora.exclude_modules and all(map(lora.adapts_module, (one.name for one in linears_of_model))):
            reasons["lora_exclude_modules"] = "no linear of transformers' model has such a name"
        return reasons
    excludes = lora.adapts(OUTPUT_LAYER) != every.adapts(OUTPUT_LAYER) or any(
        [*lora.adapted(number, part.weights())] != [*every.adapted(number, part.weights())]
        for chunk in (job.chunks_of_rank if lora.exclude_modules else ())
        for number, layer in enumerate(chunk)
        for part in job.architecture.parts_of(layer)
    )
    if lora.exclude_modules and not excludes:
        reasons["lora_exclude_modules"] = "no linear of this rank that would have an adapter has such a name"
    names = [name for _, name in job.linears_with_adapters()] + [OUTPUT_LAYER] * lora.adapts(OUTPUT_LAYER)
    unused = lora.unused_targets(names) if lora.target_modules != LINEARS else []
    if unused:
        reasons["lora_target_modules"] = f"no linear of this rank has the name {' or '.join(unused)}"
    if not any(linear.num_experts for linear, _ in job.linears_with_adapters()):
        of_experts = {"lora_share_expert_adapters", "lora_normalize_moe_lora"} & job.state.changed().keys()
        reasons |= dict.fromkeys(of_experts, "no linear of experts has an adapter")
    return reasons


def _on_experts(job: Scenario) -> dict[str, str]:
    changed = job.state.changed()
    if not job.architecture.routes:
        of_experts = [name for name in changed if name.startswith("moe_") or name == "freeze_moe_router"]
        return dict.fromkeys(of_experts, "the model has no experts")
    reasons = {}
    if job.state.freeze_moe_router and job.state.lora is not None:
        reasons["freeze_moe_router"] = "beside adapters the whole model is frozen"
    if "moe_router_load_balancing_type" in changed and job.architecture.moe_aux_loss_coeff == 0:
        reasons["moe_router_load_balancing_type"] = "moe_aux_loss_coeff of the model is 0"
    return reasons


def _on_stages(job: Scenario) -> dict[str, str]:
    if job.layout.pipeline_model_parallel_size > 1:
        always = "torch's schedules reduce gradients at their end in any case"
        return {"defer_fsdp_grad_sync": always} if job.state.defer_fsdp_grad_sync else {}
    names = {"schedule_runs", "return_outputs"} & job.state.changed().keys()
    return dict.fromkeys(names, "one pipeline stage has no schedule")


def _on_fsdp2(job: Scenario) -> dict[str, str]:
    reasons = _on_units(job) | _on_stages(job)
    if job.state.fp32_sharded_params and job.dtype == "fp32":
        reasons["fp32_sharded_params"] = "the parameters are fp32 already"
    if job.state.defer_fsdp_grad_sync and job.num_microbatches == 1:
        reasons["defer_fsdp_grad_sync"] = "the only micro-batch is the last one"
    state = job.state
    if state.store_param_remainders and state.adam_implementation == "te_fused":
        if not state.master_weights:
            reasons["store_param_remainders"] = "only master_weights reads it"
        elif job.dtype == "fp32" or state.fp32_sharded_params:
            reasons["store_param_remainders"] = "the shards are fp32"
        elif state.lora is not None and state.lora.fsdp2_library == "peft":
            reasons["store_param_remainders"] = "PEFT's adapters are fp32"
    if state.use_orig_params and state.fsdp_version == 2:
        reasons["use_orig_params"] = "fully_shard always has the original parameters"
    if job.state.reshard_after_forward_ranks and job.state.reshard_after_forward == "none":
        reasons["reshard_after_forward_ranks"] = "reshard_after_forward is none"
    elif state.reshard_after_forward_ranks == job.ranks_of_shards:
        reasons["reshard_after_forward_ranks"] = "these are all ranks that have shards"
    return reasons


def _on_units(job: Scenario) -> dict[str, str]:
    state, reasons = job.state, {}
    if state.fsdp_version == 1:
        one = "FSDP1 shards layers, and then the model"
        names = ("separate_embeddings", "reshard_root_after_forward")
        return {name: one for name in names if name in state.changed()}
    if state.separate_embeddings != "none" and job.architecture.share_embeddings_and_output_weights:
        reasons["separate_embeddings"] = "they are tied"
    if state.reshard_root_after_forward and state.reshard_after_forward == "none":
        reasons["reshard_root_after_forward"] = "reshard_after_forward is none"
    return reasons


def _on_fp32(job: Scenario) -> dict[str, str]:
    if job.dtype != "fp32" or job.engine == "fsdp2":  # FSDP2 reduces gradients in the type that it is given
        return {}
    same = (
        "the parameters are fp32; gradients are reduced in fp32 or in the type of their parameters, which "
        "is fp32 here too"
    )
    unread = "the parameters are fp32, so Adam updates them, and never reads the main parameters that it allocates"
    reasons = {"grad_reduce_in_bf16": same, "main_grads_dtype": same, "main_params_dtype": unread}
    return {name: reason for name, reason in reasons.items() if name in job.state.changed()}


def _copies_of_parameters(job: Scenario) -> int:
    """The most ranks that hold the same parameters, and so reduce their gradients."""
    layout = job.layout
    if layout.expert_model_parallel_size == 1:
        return layout.copies_of_parameters
    return max(layout.copies_of_parameters, layout.copies_of_experts)
