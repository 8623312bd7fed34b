"""NeMo-RL with its DTensor policy, which is FSDP2: the keys of its methods are those of `nemo_rl`.

Names and defaults: ``examples/configs/grpo_math_1B.yaml`` (7ea279ab, main of August 2026), and what they do
``nemo_rl/models/automodel/setup.py`` (version 2) and ``nemo_rl/models/dtensor/parallelize.py`` (version 1). Version 2
builds Automodel's models; of the dense families that memlab has, it takes those of transformers
(``_maybe_set_force_hf``).
"""

from __future__ import annotations

import re
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.rollout import Sender
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import LARGEST_OF_TRANSFORMERS
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    FLASH,
    FOREACH,
    FROZEN,
    OF_SEVERAL_KEYS,
    ONLY_OF_AUTOMODEL,
    OWN_PLAN,
    PARTS_OF_AUTOMODEL,
    Own,
    automodel_keys,
    block,
    check_family,
    composed_of_fsdp2,
    freezes_language,
    of_other_values,
    own_automodel,
    own_checkpoints,
    take_automodel_adapters,
    take_checkpointed_layers,
    take_fused_adam,
    take_kept,
    take_optimizer,
    take_types,
)
from memlab.jobs.frameworks.keys import ALLOCATOR, COUNT, LONG_DTYPE, SWITCH, TEXT, WHOLE, Key, Missing, is_given, under
from memlab.jobs.frameworks.lines import yaml_lines
from memlab.jobs.frameworks.nemo_rl import (
    NEMO_RL,
    PAIRS,
    compares,
    compares_largest,
    complete_ranks,
    has_engine,
    refit_buffers,
    rows_of_pass,
    take_longest,
    take_phases,
)
from memlab.jobs.frameworks.nemo_rl_rules import check_dtensor
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_replaced_values,
    take_rows,
    take_sequences,
)
from memlab.jobs.frameworks.towers import OF_IMAGES, ask_for_images, ask_for_size, drop_images, is_of_tower, put_tower
from memlab.jobs.frameworks.without_effect import keys_without_effect

_DTENSOR = "policy.dtensor_cfg"
_AUTOMODEL = f"{_DTENSOR}.automodel_kwargs"
_MEGATRON = "policy.megatron_cfg."
_PACKING = "policy.sequence_packing.enabled"
_OF_METHODS = (
    "architecture",
    "nodes",
    "ranks_per_node",
    "longest",
    "sequence_multiple",
    "micro_batch_size",
    "sequences",
    "is_packed",
    "packed_tokens",
    "is_dynamic",
    "dynamic_tokens",
    "is_colocated",
    "generation_nodes",
    "generation_ranks",
    *("log_prob_micro_batch_size", "log_prob_packed_tokens", "log_prob_dynamic_tokens"),
    *("engine_share", "engine_ranks", "bucket", "frees_optimizer"),
)
_MISSING_OF_METHODS = (
    *("policy.draft", "policy.reward_model_cfg", "policy.quant_cfg", "policy.is_vlm", "distillation"),
    *("value", "teachers", "on_policy_distillation", "loss_fn", "policy.generation.top_"),
)

KEYS = (
    *(key for key in NEMO_RL.keys if key.field in _OF_METHODS and not key.name.startswith(_MEGATRON)),
    Key("policy.hf_config_overrides.num_hidden_layers", "num_layers", WHOLE),
    Key("policy.precision", "compute", LONG_DTYPE, "bf16"),
    Key(f"{_DTENSOR}.enabled", "is_dtensor", SWITCH, False),
    Key(f"{_DTENSOR}._v2", "is_version_2", SWITCH, False),
    Key(f"{_DTENSOR}.cpu_offload", "fsdp_cpu_offload", SWITCH, False),
    Key(f"{_DTENSOR}.activation_checkpointing", "is_checkpointing", SWITCH, False),
    Key(f"{_DTENSOR}.tensor_parallel_size", "tensor_model_parallel_size", COUNT, 1),
    Key(f"{_DTENSOR}.context_parallel_size", "context_parallel_size", COUNT, 1),
    Key(f"{_DTENSOR}.expert_parallel_size", "expert_model_parallel_size", COUNT, 1),
    Key(f"{_DTENSOR}.sequence_parallel", "sequence_parallel", SWITCH, False),
    Key(f"{_DTENSOR}.dp_replicate_size", "dp_replicate_size", COUNT, 1),
    Key(f"{_DTENSOR}.defer_fsdp_grad_sync", "defer_fsdp_grad_sync", SWITCH, True),
    *under(f"{_DTENSOR}.env_vars", ALLOCATOR),
    Key(f"{_DTENSOR}.lora_cfg.enabled", "has_adapters", SWITCH, False),
    *automodel_keys(f"{_DTENSOR}.lora_cfg", match_all_linear=True),
    Key("policy.optimizer.name", "optimizer", TEXT, "torch.optim.AdamW"),
    Key("policy.optimizer.kwargs.foreach", "is_foreach", FOREACH),
    Key("policy.optimizer.kwargs.fused", "is_fused", SWITCH),
    *OF_IMAGES,
)
FRAMEWORK_MISSING = (
    *(row for row in NEMO_RL.missing if row.name.startswith((*_MISSING_OF_METHODS, "policy.generation."))),
    *refit_buffers(_DTENSOR),
    Missing("policy.reward_model_cfg.enabled", "either", "a head of one number replaces the output layer"),
    Missing(
        "teacher.model_name",
        "more",
        "the teacher's passes run between the steps, in processes of its own",
        is_given,
    ),
    Missing(f"{_AUTOMODEL}.use_liger_kernel", "less", "Liger's norms and MLPs keep less"),
    *(Missing(f"{_AUTOMODEL}.freeze_config.freeze_{part}", "less", FROZEN) for part in PARTS_OF_AUTOMODEL),
    Missing("policy.logprob_chunk_size", "less", "log-probabilities are computed in chunks of tokens", is_given),
)
_OF_CLASSES = (f"{_AUTOMODEL}.backend.", f"{_DTENSOR}.moe_parallelizer.")
_READ_BY_CLASSES = (
    *("attn", "linear", "rms_norm", "rope_fusion", "rope", "experts", "dispatcher", "dispatcher_num_sms"),
    *("enable_deepep", "gate_precision", "enable_fsdp_optimizations"),
    *("ignore_router_for_ac", "reshard_after_forward", "lm_head_precision"),
)
"""Keys that only Automodel's own classes read and that change memory: of ``BackendConfig`` and of
``MoEParallelizerConfig`` (36044ad3)."""
_OF_THIS_POLICY = ("policy.dtensor_cfg.*", "policy.optimizer.kwargs.*")
"""Patterns of keys that have no effect on a job with Megatron, and are read here."""


def chooses_dtensor(values: dict[str, Any]) -> bool:
    """Whether a job trains with the DTensor policy: it names no Megatron (``Policy`` in models/policy/lm_policy.py).

    Where a job says nothing of either, its configuration is not known, and those that NeMo-RL's programs read by
    themselves have the DTensor policy (``grpo_math_1B.yaml``, ``sft.yaml``, ...; 7ea279ab).
    """
    dtensor, megatron = (str(values.get(f"policy.{name}.enabled")).lower() for name in ("dtensor_cfg", "megatron_cfg"))
    if megatron == "none" and _switch_of_a_fork(values) is not None:
        return True
    if dtensor == "none":
        return not any(key.startswith("policy.megatron_cfg.") for key in values)
    return dtensor == "true" and megatron != "true"


def _switch_of_a_fork(values: dict[str, Any]) -> str | None:
    """Returns the key that chooses an engine like DTensor's which NVIDIA's NeMo-RL does not have, None if none does."""
    return next((key for key, value in values.items() if _FORKED.fullmatch(key) and value is True), None)


def _ask_for_keys_of_a_fork(reading: Reading) -> None:
    forked = _switch_of_a_fork({key: entry.value for key, entry in reading.entries.by_key.items()})
    if forked is not None:
        section = forked.removesuffix(".enabled")
        reading.questions.append(
            f"{forked} is true, a key that NVIDIA's NeMo-RL does not have: memlab reads {_DTENSOR} in its place; give "
            f"--set {_DTENSOR}.enabled=true, and the values of {section} under {_DTENSOR}"
        )


_FORKED = re.compile(r"policy[.]dtensor_\w+_cfg[.]enabled")


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards, what leaves the device, and rows."""
    values = reading.values
    note_replaced_values(reading, "policy.hf_config_overrides")
    sections = {key.partition(".")[0] for key in reading.entries.by_key}
    generates = has_engine(sections)
    del values["is_dtensor"]
    _ask_for_keys_of_a_fork(reading)
    if is_of_tower(reading):
        _take_tower(reading, generates=generates)
    else:
        drop_images(reading)
    if every := reading.get(key := f"{_DTENSOR}.clear_cache_every_n_steps"):
        reading.warnings.append(
            f"{key} {every}: torch gives its cached memory back to CUDA before each of so many micro-batches, so that "
            "less may be reserved than memlab says; what is allocated is the same"
        )
    per_node = complete_ranks(reading)
    _take_groups(reading)
    _note_classes(reading)
    # ``from_pretrained`` makes fp32 parameters in both versions.
    take_types(reading, shards="fp32", compute=values.pop("compute"), reduced="fp32")
    if values["dtype"] != "fp32":
        reading.miss("policy.precision", "more", "each layer returns its hidden states in fp32")
    _take_optimizer(reading)
    is_colocated = values.pop("is_colocated")
    moves = is_colocated and generates and not values["fsdp_cpu_offload"]
    values |= dict.fromkeys(("offload_parameters", "offload_gradients", "offload_optimizer"), moves)
    is_version_2 = values.pop("is_version_2")
    if is_version_2 and values["world_size"] == 1:
        # ``FSDP2Manager.parallelize`` in distributed/fsdp2.py of Automodel
        reading.miss(f"{_DTENSOR}._v2", "either", "Automodel does not shard a model on a single rank")
    values["defer_fsdp_grad_sync"] &= is_version_2
    values["reshard_after_forward"] = "all_but_last" if is_version_2 else "all"
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)
        if not is_version_2:
            key = f"{_DTENSOR}.activation_checkpointing"
            reading.miss(key, "either", "NeMo-RL checkpoints the parts of a layer, each")
    if compares_largest(sections):
        values["loss_of_transformers"] = "topk_logits"
        number = reading.get("distillation.topk_logits_k")
        if isinstance(number, int) and number > LARGEST_OF_TRANSFORMERS:
            reason = f"memlab compares the {LARGEST_OF_TRANSFORMERS} largest logits of each token with this policy"
            reading.miss("distillation.topk_logits_k", "more", reason)
    else:
        reading.miss("loss_fn", "either", "NeMo-RL computes log-probabilities in fp32, in another order")
    longest, is_packed, is_dynamic = take_longest(reading), values["is_packed"], values["is_dynamic"]
    of_log_probs, rows = rows_of_pass(reading, longest, is_packed=is_packed, is_dynamic=is_dynamic)
    # ``unshard_fsdp2_model`` in dtensor_policy_worker.py, and ``use_reference_model`` in both versions.
    values["gathers_model_for_passes"] = generates and not is_version_2
    values["host_copies_of_shards"] = 2 * (generates and compares(reading))
    sender: Sender = "nemo_rl" if is_version_2 else "nemo_rl_v1"
    take_phases(reading, per_node, of_log_probs, rows, is_colocated=is_colocated, generates=generates, sender=sender)
    _take_rows(reading, longest, pairs=bool(sections & PAIRS) and not generates)


def _take_tower(reading: Reading, *, generates: bool) -> None:
    """Takes the tower of a model that is built as a whole, and trained unless a section freezes it.

    Version 2 builds ``NeMoAutoModelForImageTextToText`` (nemo_rl/models/automodel/setup.py); version 1 shards and
    checkpoints the layers of towers by rules of its own.
    """
    values, freezes = reading.values, f"{_AUTOMODEL}.freeze_config"
    if not values["is_version_2"]:
        block(reading, f"{_DTENSOR}._v2", "a vision tower in version 1 of the policy", of="model")
    if videos := [key for key in reading.entries.by_key if key.startswith("policy.tokenizer.video.")]:
        block(reading, videos[0], "videos in place of images", of="model")
    model = reading.values["architecture"]
    tower = put_tower(reading)
    has_section = any(key.startswith(f"{freezes}.") for key in reading.entries.by_key)
    key = f"{freezes}.freeze_vision_tower"
    reading.take(key, "freeze_vision_tower", values["has_adapters"] or bool(reading.get(key, default=has_section)))
    reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
    if generates:
        reading.miss("policy.model_name", "more", f"the weight sync sends the tower of {model} too")
    ask_for_images(reading)
    ask_for_size(reading, tower)


def _take_groups(reading: Reading) -> None:
    """Takes the ranks that share matrices or sequences, as Automodel's plans have it, which version 1 copies."""
    values = reading.values
    given = [one for one in reading.taken if one.field == "expert_model_parallel_size"]
    if given[-1].memlab_value not in (None, 1):
        block(reading, given[-1].key, "Automodel's own experts", of="model")
    values["dp_replicate_size"] = values["dp_replicate_size"] or 1
    if values["tensor_model_parallel_size"] in (None, 1):
        del values["sequence_parallel"]
        return
    if not any(key.startswith("distillation.") for key in reading.entries.by_key):
        reading.miss(
            f"{_DTENSOR}.tensor_parallel_size", "less", "NeMo-RL's loss does not gather logits of the whole vocabulary"
        )
    if is_given(reading.get(f"{_DTENSOR}.custom_parallel_plan")):
        reading.miss(f"{_DTENSOR}.custom_parallel_plan", "either", OWN_PLAN)


def _note_classes(reading: Reading) -> None:
    """Names what decides how Automodel's own class of a model computes, since memlab builds transformers' here."""
    for key, entry in reading.entries.by_key.items():
        if not key.startswith(_OF_CLASSES) or key.rpartition(".")[2] not in _READ_BY_CLASSES:
            continue
        reading.known.add(key)
        if entry.value not in (None, False, {}):
            reading.miss(key, "either", "it decides what Automodel's own class of this model computes and keeps")


def _take_optimizer(reading: Reading) -> None:
    values = reading.values
    is_adam = take_optimizer(reading, "policy.optimizer.name", str(values.pop("optimizer")))
    trains_all = not values.pop("has_adapters")
    take_automodel_adapters(reading, f"{_DTENSOR}.lora_cfg", is_on=not trains_all)
    trains_all = trains_all and not freezes_language(reading, f"{_AUTOMODEL}.freeze_config")
    take_kept(reading, trains_all=trains_all, is_torch_adam=is_adam)


def _take_rows(reading: Reading, longest: int, *, pairs: bool) -> None:
    values = reading.values
    sequences = values.pop("sequences")
    if pairs:
        reading.take("policy.train_micro_batch_size", "micro_batch_size", 2 * values["micro_batch_size"])
        sequences *= 2
    is_packed, is_dynamic = values.pop("is_packed"), values.pop("is_dynamic")
    packed, dynamic = values.pop("packed_tokens", None), values.pop("dynamic_tokens", None)
    if is_packed or is_dynamic:
        key = f"policy.{'sequence_packing' if is_packed else 'dynamic_batching'}.train_mb_tokens"
        tokens = (packed if is_packed else dynamic) or longest * values["micro_batch_size"]
        # The budget counts tokens before context parallel ranks share them (``shard_by_batch_size``).
        context = values["context_parallel_size"] or 1
        take_rows(reading, key, -(-tokens // context), longest, sequences, is_refused=is_packed)
    else:
        take_sequences(reading, longest, sequences)
        if values["micro_batch_size"] > 1:
            reading.miss(_PACKING, "more", "rows are padded, and attention then has a mask")
    if is_packed:
        has_flash = values["dtype"] == "bf16"
        values["attn_implementation"] = FLASH if has_flash else "sdpa"
        if not has_flash:
            reading.miss(_PACKING, "either", "memlab predicts torch's attention (sdpa): flash-attn takes 16 bits only")
    elif values.pop("packed_sequences", None):
        reading.miss(_PACKING, "more", "rows are padded, and attention then has a mask")
    _take_own_attention(reading)


def _take_own_attention(reading: Reading) -> None:
    """Takes the function of attention that a job names (nemo_rl/models/automodel/setup.py, version 2 alone)."""
    key = f"{_AUTOMODEL}.attn_implementation"
    own = reading.get(key) if reading.get(f"{_DTENSOR}._v2") else None
    if own in ("sdpa", "eager") or (own == FLASH and reading.values["dtype"] == "bf16"):
        reading.take(key, "attn_implementation", own)
    elif own is not None:
        reading.miss(key, "either", f"memlab predicts torch's attention (sdpa), not {own}")


def complete_of_model(reading: Reading, architecture: Architecture) -> None:
    """Checks that the engine builds the family, and that its experts are not Automodel's own.

    Raises:
        ValueError: If not.
    """
    check_family(reading, architecture)
    is_transformers_own = reading.get(f"{_AUTOMODEL}.force_hf") is True
    if architecture.routes and not is_transformers_own and reading.get(f"{_DTENSOR}._v2"):
        reading.lacks.append("Automodel's own experts")
        raise ValueError(
            f"{architecture.name} has experts, of which Automodel has classes of its own, and memlab only those of "
            f"transformers: set {_DTENSOR}.automodel_kwargs.force_hf to true, or leave the job out"
        )


def complete_refused(reading: Reading) -> None:
    """Takes the types of FusedAdam, of a job that memlab cannot predict."""
    if str(reading.get("policy.optimizer.name")).endswith("FusedAdam"):
        take_fused_adam(reading, "policy.optimizer.kwargs")


def _is_version_2(scenario: Scenario) -> bool:
    """Whether a job is written for version 2 of the policy, which alone has adapters."""
    return scenario.state.reshard_after_forward == "all_but_last" or scenario.state.lora is not None


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    values = composed(scenario, settings) | composed_of_fsdp2(scenario, settings, "automodel")
    is_row, shares = values["is_packed"], scenario.layout.tensor_model_parallel_size > 1
    return values | {
        "is_dtensor": True,
        "is_version_2": _is_version_2(scenario),
        "optimizer": "torch.optim.AdamW",
        "is_dynamic": False,
        "packed_tokens": scenario.seq_length if is_row else None,
        "longest": values["longest"] if is_row else scenario.seq_length,
        "sequence_multiple": 1,
        "sequence_parallel": scenario.layout.sequence_parallel and shares,
        "is_colocated": settings.offload_parameters or scenario.state.fsdp_cpu_offload,
    }


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what NeMo-RL's DTensor policy cannot express of a job."""
    state, title = scenario.state, "NeMo-RL"
    is_version_2 = _is_version_2(scenario)
    moves = settings.offload_parameters and not state.fsdp_cpu_offload
    is_flash = is_packed(scenario) and scenario.packed_sequences is not None and scenario.dtype == "bf16"
    together = "NeMo-RL offloads parameters, gradients and optimizer state together, for generation"
    own: Own = {
        "fp32_sharded_params": (scenario.dtype != "fp32", "NeMo-RL's shards are fp32"),
        "reshard_after_forward": (
            "all_but_last" if is_version_2 else "all",
            "the DTensor policy shards all layers again, in version 2 all but the last",
        ),
        "defer_fsdp_grad_sync": (
            state.defer_fsdp_grad_sync and is_version_2,
            "only version 2 of the DTensor policy reads it, which shards all layers but the last again",
        ),
        "attn_implementation": (FLASH if is_flash else "sdpa", "NeMo-RL takes flash-attn for packed rows only"),
        "offload_parameters": (moves, "its cpu_offload keeps parameters and optimizer state on the host in any case"),
        "offload_gradients": (moves, together),
        "offload_optimizer": (moves, together),
    }
    if state.adam_implementation == "te_fused":
        own["adam_implementation"] = ("foreach", "memlab reads torch's Adam from NeMo-RL's files, and no FusedAdam")
    return of_other_values(scenario, settings, own | own_checkpoints(settings, title) | own_automodel(scenario, title))


_SHARDS = "the DTensor policy shards with torch's fully_shard, and has no key for it"
_DECIDED = (
    *("fsdp_version", "use_orig_params", "reshard_after_forward_ranks", "separate_embeddings"),
    *("reshard_root_after_forward", "fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth"),
)
NEMO_RL_DTENSOR = Framework(
    name="nemo-rl-dtensor",
    title="NeMo-RL's DTensor policy",
    source="main of August 2026",
    signs=Signs(looked_for="policy.dtensor_cfg.enabled=true"),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=(NEMO_RL.without_effect - set(_OF_THIS_POLICY))
    | keys_without_effect("nemo_rl_dtensor")
    | keys_without_effect("environment", f"{_DTENSOR}.env_vars")
    | {key.name for key in NEMO_RL.keys if not key.name.startswith(_MEGATRON)}
    | {row.name for row in NEMO_RL.missing if not row.name.startswith(_MEGATRON)},
    complete=complete,
    complete_of_model=complete_of_model,
    complete_refused=complete_refused,
    check=check_dtensor,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
    compose=compose,
    packs=is_packed,
    cannot_write=dict.fromkeys(_DECIDED, _SHARDS)
    | ONLY_OF_AUTOMODEL
    | {
        "grad_reduce_in_bf16": "NeMo-RL reduces gradients in fp32",
        "cp_comm_type": "torch's context_parallel, which NeMo-RL calls, exchanges keys and values",
        "model_classes": "NeMo-RL builds transformers' classes of dense models",
        "loss_of_transformers": "a method's configuration decides it, and memlab writes GRPO's",
        "offload_optimizer_except_update": "NeMo-RL loads the optimizer state before the step",
    },
    cannot_write_of=cannot_write,
    without_own_key=OF_SEVERAL_KEYS.union(
        ("adam_implementation", "reshard_after_forward", "attn_implementation"),
        ("offload_parameters", "offload_gradients", "offload_optimizer"),
    ),
    render=yaml_lines,
)
"""`memlab.jobs.frameworks.registry` says which jobs are its."""
