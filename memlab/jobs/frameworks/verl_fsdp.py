"""verl with FSDP, which is its default: the keys of its trainer are those of `verl`.

Names and defaults: ``verl/trainer/config/engine/fsdp.yaml`` and ``model/hf_model.yaml``, and what they do
``verl/workers/engine/fsdp/transformer_impl.py`` (1dda039b, August 2026; 0.9.1, of September, has the same but for the
micro-batch in which gradients are reduced).
"""

from __future__ import annotations

from typing import Any

from memlab.config.rollout import ReferencePass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.balanced_rows import take_rows_of_verl
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    FLASH,
    FOREACH,
    OF_SEVERAL_KEYS,
    ONLY_OF_AUTOMODEL,
    RESHARDING,
    Own,
    attention_key,
    block,
    check_family,
    check_shards,
    composed_of_fsdp2,
    of_other_values,
    own_checkpoints,
    own_transformers,
    peft_keys,
    take_attention,
    take_checkpointed_layers,
    take_kept,
    take_logprobs,
    take_optimizer,
    take_peft,
    take_resharding,
    take_shards,
    take_types,
    take_ulysses,
    take_units,
)
from memlab.jobs.frameworks.keys import COUNT, LONG_DTYPE, SWITCH, TEXT, WHOLE, Key, Missing, is_false, is_given
from memlab.jobs.frameworks.lines import hydra_lines
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_other_reference,
    note_replaced_values,
    only_segments,
    sequences_of_a_step,
    take_rollout,
    take_sequences,
)
from memlab.jobs.frameworks.verl import (
    VERL,
    check_policy_loss,
    check_sequences,
    compares,
    copies_of_bucket,
    note_critic,
    note_lengths,
    note_program,
    note_reward_model,
    note_workers,
    refuse_without_training,
    rows_of_passes,
    skip_passes,
    take_allocator,
    take_gpus_of_the_engine,
    take_rows_of_all_ranks,
    take_turns,
)
from memlab.jobs.frameworks.verl_checkout import BEFORE, FP32_SINCE, RELEASE, version_around
from memlab.jobs.frameworks.verl_rules import check_fsdp, check_rollout

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_FSDP, _REF = f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = {
    "actor_rollout_ref.ref.strategy": (f"{_ACTOR}.strategy", "the kind of FSDP", "fsdp", None),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (
        f"{_ACTOR}.ulysses_sequence_parallel_size", "the parts of a sequence", 1, None,
    ),
}  # fmt: skip
"""What a reference model can have otherwise than the actor (``config/ref/dp_ref.yaml``, 0.9.1)."""
_TURBO = {
    "distributed.fully_shard_parallel_size": ("ranks_of_shards", WHOLE),
    "distributed.tensor_parallel_size": ("tensor_model_parallel_size", COUNT),
    "distributed.expert_parallel_size": ("expert_model_parallel_size", COUNT),
    "distributed.ulysses_parallel_size": ("ulysses", COUNT),
    "memory.recompute": ("is_checkpointing", SWITCH),
}
"""What FSDP-Turbo reads in place of FSDP's keys, below ``turbo_config`` (``fsdp_turbo_impl.py``), each with memlab's
field and how it is read."""
_SYNC = "use_no_sync_for_gradient_accumulation"
_PREFIXES = (_FSDP, f"{_ACTOR}.optim", _MODEL)
"""Of the engine, the optimizer and the model."""
OF_ENGINE = (f"{_FSDP}.", f"{_ACTOR}.optim.", f"{_MODEL}.", f"{_REF}.")
"""How keys begin that are FSDP's own, or its optimizer's and its model's."""
_OF_MEGATRON = (f"{_ACTOR}.megatron.", f"{_ACTOR}.optim.", f"{_MODEL}.", "actor_rollout_ref.ref.megatron.")
_TRAINER = (
    "nodes",
    "ranks_per_node",
    "is_dynamic",
    "tokens_per_rank",
    "micro_batch_size",
    "prompts",
    "responses_per_prompt",
    "allocator",
    "is_colocated",
    "prompt_length",
    "response_length",
    *(f"{model}_{field}" for model in ("policy", "reference") for field in ("is_dynamic", "tokens", "rows")),
    *("engine_share", "engine_sleeps", "engine_ranks", "engine_stages", "engine_data_ranks", "bucket"),
)


def engine_keys(engine: str, optim: str, model: str) -> tuple[Key, ...]:
    """Returns the keys of FSDP, its optimizer and its model, below their prefixes."""
    return (
        Key(f"{engine}.model_dtype", "shards", LONG_DTYPE, "fp32"),
        Key(f"{engine}.mixed_precision.param_dtype", "compute", LONG_DTYPE, "bf16"),
        Key(f"{engine}.mixed_precision.reduce_dtype", "reduced", LONG_DTYPE, "fp32"),
        Key(f"{engine}.param_offload", "offload_parameters", SWITCH, False),
        Key(f"{engine}.optimizer_offload", "offload_optimizer", SWITCH, False),
        Key(f"{engine}.offload_policy", "fsdp_cpu_offload", SWITCH, False),
        Key(f"{engine}.reshard_after_forward", "reshard_after_forward", RESHARDING, "all"),
        Key(f"{engine}.forward_prefetch", "gathers_ahead", SWITCH, False),
        Key(f"{engine}.fsdp_size", "ranks_of_shards", WHOLE, -1),
        Key(f"{engine}.{_SYNC}", "defer_fsdp_grad_sync", SWITCH, False),
        Key(f"{engine}.ulysses_sequence_parallel_size", "ulysses", COUNT, 1),
        Key(f"{engine}.use_orig_params", "use_orig_params", SWITCH, False),
        Key(f"{optim}.optimizer", "optimizer", TEXT, "AdamW"),
        Key(f"{optim}.optimizer_impl", "library", TEXT, "torch.optim"),
        Key(f"{optim}.override_optimizer_config.foreach", "is_foreach", FOREACH),
        Key(f"{optim}.override_optimizer_config.fused", "is_fused", SWITCH),
        Key(f"{model}.path", "architecture", TEXT),
        Key(f"{model}.override_config.num_hidden_layers", "num_layers", WHOLE),
        attention_key(f"{model}.override_config.attn_implementation"),
        Key(f"{model}.enable_gradient_checkpointing", "is_checkpointing", SWITCH, True),
        Key(f"{model}.use_remove_padding", "removes_padding", SWITCH, True),
        *peft_keys(model, "lora_"),
    )


def engine_missing(engine: str, model: str) -> tuple[Missing, ...]:
    """Returns what of FSDP and its model changes memory and is not modelled, below the prefixes."""
    return (
        Missing(f"{engine}.qat.enable", "either", "weights are quantized in forward"),
        Missing(f"{engine}.pad_to_length", "more", "rows are padded to a multiple of pad_to_length_bucket"),
        Missing(f"{model}.enable_activation_offload", "less", "activations leave the device in forward"),
        Missing(f"{model}.use_liger", "less", "Liger's norms and MLPs keep less"),
        Missing(f"{model}.use_fused_kernels", "less", "log-probabilities without whole logits"),
        Missing(f"{model}.use_remove_padding", "more", "rows are padded, and attention then has a mask", is_false),
        Missing(f"{model}.tiled_mlp.enabled", "less", "MLPs work on a part of the tokens at a time"),
        Missing(f"{model}.mtp.enable", "more", "multi-token prediction: one more layer and set of logits"),
    )


KEYS = (
    *(key for key in VERL.keys if key.field in _TRAINER and not key.name.startswith(_OF_MEGATRON)),
    Key("model_engine", "model_engine", TEXT),
    Key(f"{_ACTOR}.strategy", "strategy", TEXT, "fsdp"),
    *engine_keys(*_PREFIXES),
    Key(f"{_ACTOR}.ulysses_sequence_parallel_size", "ulysses", COUNT),
    Key(f"{_FSDP}.use_torch_compile", "is_compiled", SWITCH, True),
    *(Key(f"{section}.entropy_from_logits_with_chunking", "has_chunks_of_entropy", SWITCH, False)
      for section in (_ACTOR, _FSDP)),
    *(Key(f"{section}.entropy_from_logits_chunk_size", "entropy_chunk_size", COUNT, 2048)
      for section in (_ACTOR, _FSDP)),
    Key(f"{_REF}.model_dtype", "reference_shards", LONG_DTYPE, "fp32"),
    Key(f"{_REF}.reshard_after_forward", "reference_reshards", SWITCH, True),
    Key(f"{_ROLLOUT}.layered_summon", "is_layered", SWITCH, False),
)  # fmt: skip
FRAMEWORK_MISSING = (
    *(row for row in VERL.missing
      if row.name.startswith((f"{_ACTOR}.", f"{_ROLLOUT}.", "distillation.", "reward", "trainer."))
      and not row.name.startswith((*_OF_MEGATRON, f"{_ROLLOUT}.enable_rollout_routing_replay"))),
    Missing(f"{_ACTOR}.entropy_coeff", "more", "the entropy's gradient keeps probabilities and a copy of the logits"),
    Missing(f"{_ACTOR}.calculate_entropy", "more", "verl keeps probabilities for backward"),
    *(Missing(f"{section}.entropy_from_logits_with_chunking", "less", "the entropy is computed in chunks of tokens")
      for section in (_ACTOR, _FSDP)),
    Missing(f"{_FSDP}.entropy_checkpointing", "less", "backward computes the entropy again"),
    Missing(f"{_ACTOR}.entropy_checkpointing", "less", "backward computes the entropy again"),
    *engine_missing(_FSDP, _MODEL),
    Missing(f"{_ACTOR}.pad_to_length", "more", "rows are padded to a multiple of pad_to_length_bucket"),
    Missing(f"{_ACTOR}.use_prefix_grouper", "either", "prompts that responses share are computed once"),
    Missing(f"{_ACTOR}.freeze_vision_tower", "less", "frozen parts have no gradients and no optimizer state"),
)  # fmt: skip


def chooses_fsdp(values: dict[str, Any]) -> bool:
    """Whether a job trains with FSDP: by name, or as verl does where neither a name nor a key of Megatron says else."""
    chosen = values.get(f"actor@{_ACTOR}")
    engine = values.get("model_engine") or values.get(f"{_ACTOR}.strategy")
    engine = engine if chosen is None else str(chosen).removesuffix("_actor")
    if engine is not None:
        return engine in ("dp", "fsdp", "fsdp2", "fsdp_turbo")
    has_keys = any(key.startswith((f"{_ACTOR}.megatron.", "actor_rollout_ref.ref.megatron.")) for key in values)
    return not has_keys and "megatron" not in str(values.get("config_name"))


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards, what leaves the device, and rows."""
    values = reading.values
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    engine, configuration = values.pop("model_engine", None), reading.get(f"actor@{_ACTOR}")
    is_chosen = engine is not None or configuration is not None
    if "fsdp_turbo" in (engine, str(configuration).removesuffix("_actor")):
        values["strategy"] = "fsdp_turbo"
    if not is_chosen and f"{_ACTOR}.strategy" not in reading.entries.by_key:
        reading.warnings.append(
            "no key chooses an engine, and verl takes FSDP then: give model_engine=megatron for Megatron"
        )
    complete_engine(reading, *_PREFIXES, strategy=f"{_ACTOR}.strategy", loss=f"{_ACTOR}.policy_loss")
    complete_trainer(reading, "fsdp", _FSDP)
    if not reading.blocked["engine"]:  # FSDP-Turbo reduces gradients in each micro-batch
        take_sync_of_gradients(reading, _FSDP)


def complete_trainer(reading: Reading, name: str, engine: str, *, has_reference_on_host: bool = True) -> None:
    """Derives what happens between steps, and rows, of an engine that shards as FSDP does.

    Args:
        reading: Of the job, with its ranks, its types, its shards and what leaves the device.
        name: The engine's section below a critic's.
        engine: The prefix of the engine's keys.
        has_reference_on_host: Whether a reference model's shards are on the host, wherever the policy's are.
    """
    values, per_node = reading.values, reading.values.pop("ranks_per_node")
    refuse_without_training(reading)
    del values["nodes"]
    reading.known.add("config_name")
    note_program(reading)
    note_workers(reading)
    note_lengths(reading)
    take_turns(reading)
    take_gpus_of_the_engine(reading)
    note_critic(reading, f"critic.{name}")
    note_reward_model(reading)
    if values["is_colocated"]:
        take_allocator(reading)
    if not (
        values["offload_parameters"] or values.get("fsdp_cpu_offload")
    ):  # ``offload_fsdp_model_to_cpu`` in verl/utils/fsdp_utils.py empties the cache
        reading.warnings.append(
            f"{engine}.param_offload is off, so verl empties torch's cache at the weight sync only: each phase counts "
            "what it needs by itself, and torch may hold more that is left of the phases before"
        )
    take_rows_of_all_ranks(reading, values["responses_per_prompt"])
    _take_phases(reading, per_node, has_reference_on_host=has_reference_on_host)
    _take_rows(reading)


def take_sync_of_gradients(reading: Reading, engine: str) -> None:
    """Takes the micro-batches that reduce gradients, which depends on verl's version where the file does not say it.

    See ``_gradient_sync_context`` in transformer_impl.py. Before 2026-07-22 each micro-batch reduces them; 0.9.0 and
    1dda039b have the last one reduce them and no key for it; 0.9.1 has the key, which is false.

    Args:
        reading: Of the job, with its micro-batches.
        engine: The prefix of the engine's keys.
    """
    key, values = f"{engine}.{_SYNC}", reading.values
    if key in reading.entries.by_key or values.get("num_microbatches") == 1 or reading.version == RELEASE:
        return
    # A user's BEFORE may mean July too, a checkout's and a recipe's do not.
    if reading.version == BEFORE and (version_around(reading.started) or ("",))[0] == BEFORE:
        return
    if reading.version == FP32_SINCE:
        reading.taken = [one for one in reading.taken if one.key != key]
        reading.take(key, "defer_fsdp_grad_sync", value=True)
        return
    reading.miss(
        key,
        "more",
        "verl 0.9.0 and its main of July and August 2026 reduce gradients in the last micro-batch only, and each rank "
        f"has those of the whole model until then; {RELEASE} and versions before July do not: give --framework-version "
        f"{RELEASE}, or {FP32_SINCE} for the others",
    )


def complete_engine(reading: Reading, engine: str, optim: str, model: str, *, strategy: str, loss: str) -> None:
    """Derives types, shards and what leaves the device, from the keys of `engine_keys`.

    Args:
        engine: The prefix of the engine's keys.
        optim: Of the optimizer's.
        model: Of the model's.
        strategy: The key that chooses FSDP1 or FSDP2.
        loss: By which key a difference of the loss is named.
    """
    values = reading.values
    note_replaced_values(reading, f"{model}.override_config")
    _take_strategy(reading, strategy, engine)
    take_types(reading, shards=values.pop("shards"), compute=values.pop("compute"), reduced=values.pop("reduced"))
    _take_optimizer(reading, optim)
    take_peft(reading, f"{model}.lora_rank", adapts_experts=True)  # verl asks for no version of PEFT
    _take_version(reading)
    take_attention(reading, f"{model}.override_config.attn_implementation")
    take_logprobs(reading, loss, "logprobs_by_row")
    saved = f"{model}.lora_adapter_path"
    if is_given(reading.get(saved)) and values.get("lora_rank"):
        # ``PeftModel.from_pretrained`` in transformer_impl.py (1dda039b), which a rank of 0 does not reach.
        reading.miss(saved, "either", "rank and linears are those of the saved adapters, not the file's")
    take_shards(reading, f"{engine}.fsdp_size")  # as ``create_device_mesh`` in verl/workers/engine/fsdp/utils.py
    take_resharding(reading)
    if values.pop("gathers_ahead") and values["reshard_after_forward"] != "none":
        values["fsdp2_forward_prefetch_depth"] = 1  # ``apply_fsdp2`` in verl/utils/fsdp_utils.py
    values["offload_gradients"] = values["offload_parameters"]
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)


def _take_strategy(reading: Reading, key: str, engine: str) -> None:
    strategy = reading.values["strategy"]
    if strategy not in ("fsdp", "fsdp2"):
        block(reading, key, f"the engine {strategy}", of="engine")
    if strategy == "fsdp_turbo":
        _take_turbo(reading, engine)
    if strategy == "fsdp":
        _drop_policy(reading)
    take_ulysses(reading)


def _take_turbo(reading: Reading, engine: str) -> None:
    """Takes FSDP-Turbo's own keys, and names the others of its section."""
    start = f"{engine}.turbo_config."
    for name in [name for name in reading.entries.by_key if name.startswith(start)]:
        field, conversion = _TURBO.get(name.removeprefix(start), ("", TEXT))
        value = reading.converted(name, conversion) if field else None
        if not field:
            reading.miss(name, "either", "it decides what FSDP-Turbo shards, computes and keeps")
        elif value:
            reading.take(name, field, value)


def _drop_policy(reading: Reading) -> None:
    """Moves the policy of offloading, which FSDP1 does not read (``_build_fsdp_module``), to what has no effect."""
    reading.values["fsdp_cpu_offload"] = False
    reading.take_back("fsdp_cpu_offload", "verl reads it with FSDP2 only")


def _take_version(reading: Reading) -> None:
    """Takes FSDP1, which shards again over all ranks or none."""
    values = reading.values
    if values.pop("strategy") != "fsdp":
        values["use_orig_params"] = False
        take_units(reading, "both")
    else:
        values["fsdp_version"] = 1
        if isinstance(values["reshard_after_forward"], int):
            values["reshard_after_forward"] = "all"


def _take_optimizer(reading: Reading, optim: str) -> None:
    values = reading.values
    is_adam = take_optimizer(reading, f"{optim}.optimizer", f"{values.pop('library')}.{values.pop('optimizer')}")
    if values["fsdp_cpu_offload"]:  # the policy keeps them on the host already (``_build_fsdp_module``)
        values["offload_parameters"] = values["offload_optimizer"] = False
    take_kept(reading, trains_all=values["lora_rank"] is None, is_torch_adam=is_adam)


def _take_phases(reading: Reading, per_node: int, *, has_reference_on_host: bool) -> None:
    """Takes what the job does between training steps; its engine frees the gradients when a step ends.

    With FSDP a reference model always has its shards on the host (``_build_fsdp_module`` in transformer_impl.py,
    0.9.1), and the policy without adapters takes its place. The policy's pass computes the entropy
    (``_compute_old_log_prob`` in trainer/ppo/ray_trainer.py), by a function that torch compiles unless told otherwise.
    """
    values, longest = reading.values, reading.values["prompt_length"] + reading.values["response_length"]
    # Where memlab has no such adapters, it trains the model, and the job has them still.
    has_adapters = values.get("lora_rank") is not None or bool(reading.entries.get(f"{_MODEL}.lora_rank"))
    is_colocated = values.pop("is_colocated")
    policy, reference = rows_of_passes(
        reading, longest, values["tokens_per_rank"], values["responses_per_prompt"],
        is_dynamic=values["is_dynamic"], removes_padding=values["removes_padding"],
    )  # fmt: skip
    shards, reshards = values.pop("reference_shards"), values.pop("reference_reshards")
    has_reference = compares(reading) and not has_adapters
    if has_reference:
        note_other_reference(reading, _REFERENCE)
    skip_passes(reading)
    _take_entropy_of_pass(reading)
    values["sends_adapters"] = has_adapters and reading.get(f"{_MODEL}.lora.merge") is not True
    values["gathers_model_at_once"] = not values.pop("is_layered")
    values["keeps_cache"] = not values["offload_parameters"]
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        seq_length=policy[0],
        micro_batch_size=policy[1],
        bucket_bytes=(values.pop("bucket") or 0) * 2**20,
        bucket_copies=copies_of_bucket(reading),
        syncs_from_host=bool(values["offload_parameters"]),
        reference_pass=ReferencePass(
            seq_length=reference[0],
            micro_batch_size=reference[1],
            is_on_host=has_reference_on_host,
            fp32_shards=shards == "fp32",
            reshards=reshards,
        )
        if has_reference
        else None,
        sender="verl",
        engine=(f"{_ROLLOUT}.name", str(reading.get(f"{_ROLLOUT}.name") or "vllm")),
        quantization=f"{_ROLLOUT}.quantization",
    )


def _take_entropy_of_pass(reading: Reading) -> None:
    """Takes what ``entropy_from_logits`` makes of logits where it is not compiled, all in fp32.

    Autocast copies them for ``logsumexp``, which makes their exponentials, beside the probabilities; in chunks, verl
    copies them itself (``verl/utils/torch_functional.py``, 0.9.1). An H200 had 14 bytes a logit with its own 2.
    """
    values, of_loss = reading.values, {f"{_ACTOR}.entropy_coeff", f"{_ACTOR}.calculate_entropy"}
    if not of_loss & {one.key for one in reading.not_modelled}:
        reading.not_modelled = [one for one in reading.not_modelled if "entropy_from_logits" not in one.key]
    is_compiled, is_chunked = values.pop("is_compiled"), values.pop("has_chunks_of_entropy")
    size = values.pop("entropy_chunk_size")
    if not is_compiled:
        values["entropy_bytes_of_logit"] = 12
        values["entropy_tokens"] = size if is_chunked else None


def _take_rows(reading: Reading) -> None:
    values = reading.values
    longest = values.pop("prompt_length") + values.pop("response_length")
    sequences = values.pop("prompts") * values.pop("responses_per_prompt")
    tokens, removes_padding = values.pop("tokens_per_rank"), values.pop("removes_padding")
    if values.pop("is_dynamic"):
        take_rows_of_verl(reading, f"{_ACTOR}.ppo_max_token_len_per_gpu", tokens, longest, sequences)
    else:
        key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        if values.get("micro_batch_size") is None:
            reading.warnings.append(f"{key} is not in the file, so memlab takes 1; verl refuses a job without it")
        take_sequences(reading, longest, sequences, packed_by=key if removes_padding else None)


def check(reading: Reading) -> None:
    """Checks groups of shards, and micro-batches.

    Raises:
        CannotStartError: If verl or torch refuses the job.
    """
    check_shards(reading)
    check_rollout(reading, has_one_engine=False)
    check_fsdp(reading, f"{_ACTOR}.optim")
    check_policy_loss(reading)
    check_sequences(reading)


def composed_of_engine(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns the values by the fields of `engine_keys`, from which `complete_engine` makes the same job."""
    # verl has no tensor parallelism with FSDP, which `cannot_write` says: such ranks are copies there
    sequences = sequences_of_a_step(scenario) * scenario.layout.tensor_model_parallel_size
    return (
        composed(scenario, settings)
        | composed_of_fsdp2(scenario, settings, "peft")
        | dict.fromkeys(("prompts", "sequences"), sequences)
        | {
            "strategy": "fsdp" if scenario.state.fsdp_version == 1 else "fsdp2",
            "library": "torch.optim",
            "optimizer": "AdamW",
        }
    )


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    return composed_of_engine(scenario, settings) | {
        "model_engine": "dp",
        "allocator": None,
        "is_colocated": True,
        "tokens_per_rank": scenario.seq_length // scenario.layout.context_parallel_size if is_row else 16384,
        "micro_batch_size": None if is_row else scenario.micro_batch_size,
    }


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what verl's engine cannot express of a job."""
    state, title = scenario.state, "verl"
    is_first, frees = state.fsdp_version == 1, state.reshard_after_forward != "none"
    gathers = min(state.fsdp2_forward_prefetch_depth, 1) if frees else 0
    stays = state.fsdp_cpu_offload
    policy = "its offload_policy keeps parameters and optimizer state on the host in any case"
    loss = "logprobs_flash_attn" if state.attn_implementation == FLASH else "logprobs_by_row"
    own: Own = {
        "use_orig_params": (state.use_orig_params and is_first, "verl reads it with FSDP1 only"),
        "fsdp2_forward_prefetch_depth": (gathers, "verl gathers one layer ahead, where layers are sharded again"),
        "fsdp2_backward_prefetch_depth": (0, "verl gathers no layer ahead in backward"),
        "separate_embeddings": ("none" if is_first else "both", "verl's strategy decides it"),
        "reshard_root_after_forward": (frees and not is_first, "verl's strategy and reshard_after_forward decide it"),
        "loss_of_transformers": (loss, "verl computes log-probabilities, with flash-attn's kernel where it attends"),
        "offload_parameters": (settings.offload_parameters and not stays, policy),
        "offload_optimizer": (settings.offload_optimizer and not stays, policy),
        "offload_gradients": (
            settings.offload_parameters and not stays,
            "verl frees the gradients where it offloads the parameters",
        ),
        "lora_dropout": (0.0, "memlab knows no key of verl for it under FSDP"),
    }
    return of_other_values(
        scenario,
        settings,
        own | own_checkpoints(settings, title) | own_transformers(scenario, title, adapts_experts=True),
    ) | _of_adam(scenario)


def _of_adam(scenario: Scenario) -> dict[str, str]:
    if scenario.state.adam_implementation != "te_fused":
        return {}
    return {"adam_implementation": "memlab reads torch's Adam from verl's files, and no FusedAdam"}


CANNOT_WRITE = ONLY_OF_AUTOMODEL | {
    "offload_optimizer_except_update": "verl loads the optimizer state before the step",
    "model_classes": "verl builds transformers' classes",
}
"""Fields that no trainer of verl with FSDP expresses, each with the reason."""
WITHOUT_OWN_KEY = OF_SEVERAL_KEYS.union(
    ("grad_reduce_in_bf16", "adam_implementation", "fsdp_version", "lora_dropout", "lora_dropout_position"),
    ("cp_comm_type", "reshard_after_forward_ranks", "dp_replicate_size", "separate_embeddings"),
    ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth"),
    ("reshard_root_after_forward", "loss_of_transformers", "offload_gradients"),
)
"""Fields of which `composed_of_engine` makes several keys, or which `cannot_write` names."""
VERL_FSDP = Framework(
    name="verl-fsdp",
    title="verl with FSDP",
    source="1dda039b, and 0.9.1",
    signs=Signs(looked_for="actor.strategy=fsdp2"),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=VERL.without_effect
    | {f"{_FSDP}.mixed_precision.buffer_dtype"}
    | {key.name for key in VERL.keys if not key.name.startswith(_OF_MEGATRON) or ".model.lora." in key.name}
    | {row.name for row in VERL.missing if not row.name.startswith(_OF_MEGATRON)},
    complete=complete,
    complete_of_model=check_family,
    check=check,
    versions=VERL.versions,
    version_around=version_around,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
    compose=compose,
    packs=is_packed,
    cannot_write=CANNOT_WRITE,
    cannot_write_of=lambda scenario, settings: cannot_write(scenario, settings) | only_segments(scenario, "verl"),
    without_own_key=WITHOUT_OWN_KEY,
    render=hydra_lines,
)
"""`memlab.jobs.frameworks.registry` says which jobs are its."""
