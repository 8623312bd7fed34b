"""verl with Megatron: Hydra's resolved configuration, ``.hydra/``, or the overrides of a launch script.

Names and defaults: ``verl/trainer/config/{engine,optim}/megatron.yaml``, ``actor/actor.yaml`` (0.9.1). On
2026-08-20 the gradients became fp32 (verl PR 7485); before, Megatron-Core's default was used, bf16.
"""

from __future__ import annotations

from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.bridge_keys import (
    NUMBERS_OF_THE_MODEL,
    PROVIDER_DEFAULTS,
    PROVIDER_MISSING,
    REPLACED,
    complete_provider,
)
from memlab.jobs.frameworks.framework import Framework, Reading
from memlab.jobs.frameworks.keys import (
    ABSENT,
    ALLOCATOR,
    COUNT,
    LONG_DTYPE,
    NUMBER,
    SWITCH,
    TEXT,
    WHOLE,
    Key,
    Missing,
    is_false,
    is_given,
    missing_under,
    under,
)
from memlab.jobs.frameworks.lines import hydra_lines
from memlab.jobs.frameworks.megatron_keys import (
    BUCKETS,
    CHUNKS,
    COMPUTE,
    ENDS,
    MISSING,
    MISSING_DDP,
    MISSING_OPTIMIZER,
    OFFLOAD,
    OPTIMIZER,
    PIPELINE,
    RECOMPUTE,
    SIZES,
)
from memlab.jobs.frameworks.megatron_lm import common, named
from memlab.jobs.frameworks.reinforcement import (
    LORA,
    is_packed,
    longest_sequence,
    note_replaced_values,
    sequences_of_a_step,
    take_rollout,
    take_rows,
    take_sequences,
)
from memlab.jobs.frameworks.without_effect import keys_without_effect

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_DDP = f"{_MEGATRON}.override_ddp_config"
_OPTIM = f"{_ACTOR}.optim"
_ROLLOUT = "actor_rollout_ref.rollout"
_RELEASE, _FP32_SINCE, _BEFORE = "0.9.1", "2026-08-20", "before-2026-08-20"

_OWN_OPTIMIZER = (
    "use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer",
    "use_layer_wise_distributed_optimizer",
)  # fmt: skip
"""What verl's own optimizer config has of Megatron-Core's (``workers/config/optimizer.py``, 0.9.1)."""

KEYS = (
    Key("actor_rollout_ref.model.path", "architecture", TEXT),
    Key("trainer.nnodes", "nodes", WHOLE, 1),
    Key("trainer.n_gpus_per_node", "ranks_per_node", WHOLE, 8),
    *under(_MEGATRON, (*SIZES, CHUNKS)),
    *under(_TRANSFORMER, (*ENDS, *PIPELINE, *RECOMPUTE, *OFFLOAD, *COMPUTE), attention_backend="flash"),
    Key(f"{_TRANSFORMER}.num_layers", "num_layers", WHOLE),
    *under(_DDP, BUCKETS, grad_reduce_in_bf16=ABSENT),
    *under(f"{_OPTIM}.override_optimizer_config", OPTIMIZER),
    *under(_OPTIM, (key for key in OPTIMIZER if key.name in _OWN_OPTIMIZER)),
    Key(f"{_MEGATRON}.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    Key(f"{_DDP}.use_distributed_optimizer", "use_distributed_optimizer", SWITCH),
    Key(f"{_MEGATRON}.dtype", "dtype", LONG_DTYPE, "bf16"),
    Key(f"{_MEGATRON}.param_offload", "offload_parameters", SWITCH, False),
    Key(f"{_MEGATRON}.optimizer_offload", "offload_optimizer", SWITCH, False),
    *(Key(f"{_MEGATRON}.offload.{part}.target", f"{part}_target", TEXT, None) for part in ("param", "optimizer")),
    Key(f"{_ACTOR}.use_dynamic_bsz", "is_dynamic", SWITCH, False),
    Key(f"{_ACTOR}.ppo_max_token_len_per_gpu", "tokens_per_rank", COUNT, 16384),
    Key(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "micro_batch_size", COUNT, None),
    Key(f"{_ACTOR}.ppo_mini_batch_size", "prompts", COUNT, 256),
    Key("actor_rollout_ref.rollout.n", "responses_per_prompt", WHOLE, 1),
    Key("actor_rollout_ref.hybrid_engine", "is_colocated", SWITCH, True),
    Key(f"{_ROLLOUT}.log_prob_use_dynamic_bsz", "log_prob_is_dynamic", SWITCH),
    Key(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", "log_prob_tokens", COUNT),
    Key(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size", COUNT),
    Key(f"{_ROLLOUT}.gpu_memory_utilization", "engine_share", NUMBER, 0.5),
    Key(f"{_ROLLOUT}.free_cache_engine", "engine_sleeps", SWITCH, True),
    Key(f"{_ROLLOUT}.tensor_model_parallel_size", "engine_ranks", WHOLE, 2),
    Key(f"{_ROLLOUT}.pipeline_model_parallel_size", "engine_stages", WHOLE, 1),
    Key(f"{_ROLLOUT}.data_parallel_size", "engine_data_ranks", WHOLE, 1),
    Key(f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "bucket", WHOLE, 2048),
    Key(f"{_ROLLOUT}.update_weights_bucket_megabytes", "bucket", WHOLE),
    *under("ray_kwargs.ray_init.runtime_env.env_vars", ALLOCATOR),
    Key("data.max_prompt_length", "prompt_length", WHOLE, 512),
    Key("data.max_response_length", "response_length", WHOLE, 512),
    Key(f"{_ROLLOUT}.prompt_length", "prompt_length", WHOLE),
    Key(f"{_ROLLOUT}.response_length", "response_length", WHOLE),
)
_CHUNKS = Missing(CHUNKS.name, "either", "verl has a key of its own for it", is_given)
FRAMEWORK_MISSING = (
    Missing("actor_rollout_ref.model.lora.rank", "less", LORA),
    Missing("actor_rollout_ref.model.lora_rank", "less", LORA),
    *(
        Missing(
            f"actor_rollout_ref.{part}.use_fused_kernels", "less",
            "a fused linear cross entropy computes log-probabilities without whole logits, which saves at most the "
            "logits and their fp32 copies",
        )
        for part in ("model", "actor")
    ),
    Missing(f"{_ACTOR}.entropy_coeff", "more", "the entropy's gradient keeps probabilities and a copy of the logits"),
    Missing(f"{_ACTOR}.calculate_entropy", "more", "verl copies the logits and keeps probabilities for backward"),
    Missing(f"{_ACTOR}.calculate_sum_pi_squared", "more", "the probabilities of all logits are squared"),
    Missing(f"{_ACTOR}.ppo_micro_batch_size", "either",
            "it counts the sequences of all ranks and is deprecated: memlab takes ppo_micro_batch_size_per_gpu, or 1"),
    Missing("distillation.enabled", "more", "the loss reads more of the logits than the labels' log-probabilities"),
    Missing("actor_rollout_ref.model.mtp.enable", "more", "multi-token prediction: one more layer and set of logits"),
    *(
        Missing(f"{one}.entropy_from_logits_with_chunking", "less", "the entropy is computed in chunks of tokens")
        for one in (_ACTOR, _MEGATRON)
    ),
    Missing(f"{_MEGATRON}.dynamic_context_parallel", "either", "the context parallel size changes from row to row"),
    Missing(f"{_MEGATRON}.use_megatron_fsdp", "less", "Megatron-FSDP shards parameters and gradients too"),
    Missing(f"{_MEGATRON}.use_remove_padding", "more", "rows are padded to the longest sequence", is_false),
    Missing(f"{_MEGATRON}.pad_to_length", "more", "rows are padded to a multiple of pad_to_length_bucket"),
    Missing(f"{_MEGATRON}.sequence_parallel", "more", "norms and residuals keep whole sequences per rank", is_false),
    *(Missing(f"{one}.qat.enable", "either", "weights are quantized in forward") for one in (_ACTOR, _MEGATRON)),
    *(
        Missing(f"{one}.router_replay.mode", "more", "the chosen experts of each token are kept, of all micro-batches",
                lambda value: value not in (None, "disabled"))
        for one in (_ACTOR, _MEGATRON)
    ),
    *(
        Missing(f"{_MEGATRON}.offload.{part}.target", "either", "memlab predicts it as offload to host memory",
                lambda value: value == "disk")
        for part in ("param", "optimizer")
    ),
    *(
        Missing(f"{one}.enable", "more", "a reward model's engine may be on the same GPUs")
        for one in ("reward.reward_model", "reward_model")
    ),
    Missing(f"{_ROLLOUT}.quantization", "less", "the inference engine's weights are quantized", is_given),
    Missing(f"{_ROLLOUT}.quantization_config_file", "less", "the inference engine's weights are quantized", is_given),
    Missing(f"{_ROLLOUT}.dtype", "more", "memlab takes the inference engine's weights in 2 bytes",
            lambda value: value not in (None, "auto", "bfloat16", "float16", "half")),
    Missing(f"{_ROLLOUT}.enable_rollout_routing_replay", "more", "the chosen experts of each token are kept"),
    Missing(f"{_ROLLOUT}.disaggregation.enabled", "either", "prefill and decoding have different engines"),
    *missing_under(
        _TRANSFORMER, (*MISSING, *PROVIDER_MISSING, *REPLACED, _CHUNKS), **PROVIDER_DEFAULTS,
        moe_router_load_balancing_type="none",
    ),
    *missing_under(_DDP, MISSING_DDP),
    *missing_under(f"{_OPTIM}.override_optimizer_config", MISSING_OPTIMIZER),
    *missing_under(_OPTIM, (row for row in MISSING_OPTIMIZER if row.name in _OWN_OPTIMIZER)),
)  # fmt: skip


def complete(reading: Reading) -> None:
    """Derives ranks, workload and gradients."""
    values = reading.values
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    values.setdefault("world_size", nodes * per_node)
    _complete_optimizer(reading)
    _note_critic(reading)
    note_replaced_values(reading, "actor_rollout_ref.model.override_config")
    _complete_gradients(reading)
    _complete_offload(reading)
    _drop_defaults_of_bridge(reading)
    longest = values.pop("prompt_length") + values.pop("response_length")
    sequences = values.pop("prompts") * values.pop("responses_per_prompt")
    is_dynamic, tokens = values.pop("is_dynamic"), values.pop("tokens_per_rank")
    of_log_probs = (values.pop("log_prob_tokens", None) or tokens) * (values.get("context_parallel_size") or 1)
    rows = values.pop("log_prob_micro_batch_size", None)
    if values.pop("log_prob_is_dynamic", is_dynamic):
        rows = 1
    else:
        of_log_probs = longest
    take_rollout(
        reading,
        is_colocated=values.pop("is_colocated"),
        ranks_per_node=per_node,
        seq_length=of_log_probs,
        micro_batch_size=rows,
        bucket_bytes=(values.pop("bucket") or 0) * 2**20,
        has_reference_model=_keeps_reference_model(reading),
    )
    if is_dynamic:
        take_rows(reading, f"{_ACTOR}.ppo_max_token_len_per_gpu", tokens, longest, sequences)
        return
    if values.get("micro_batch_size") is None:
        reading.warnings.append(f"{_ACTOR}.ppo_micro_batch_size_per_gpu is not in the file, so memlab takes 1")
    take_sequences(reading, longest, sequences)


def _complete_optimizer(reading: Reading) -> None:
    """Takes types by verl's own keys, which it reads with the precision-aware optimizer only.

    What ``override_optimizer_config`` has replaces them (``init_megatron_optim_config``, utils/megatron/optimizer.py).
    """
    is_on = reading.get(f"{_OPTIM}.use_precision_aware_optimizer")
    for key in OPTIMIZER:
        own, override = f"{_OPTIM}.{key.name}", f"{_OPTIM}.override_optimizer_config.{key.name}"
        if override in reading.entries.by_key:
            reading.values[key.field] = key.conversion.read(reading.get(override))
        elif key.name.endswith("_dtype") and own in reading.entries.by_key and not is_on:
            reading.values[key.field] = key.default
            reading.taken = [one for one in reading.taken if one.key != own]
            reading.without_effect[own] = "verl reads it with use_precision_aware_optimizer only"


def _note_critic(reading: Reading) -> None:
    """Notes a critic (``need_critic`` in verl/trainer/ppo/utils.py), unless everything of it is offloaded."""
    key = "critic.enable" if reading.entries.get("critic.enable") is not None else "algorithm.adv_estimator"
    if reading.entries.get(key, "gae") not in ("gae", True):
        return
    offloads = [reading.entries.get(f"critic.megatron.{part}_offload") for part in ("param", "grad", "optimizer")]
    if offloads != [True] * 3:
        reading.miss(key, "more", "a critic is trained on the same GPUs: its parameters, gradients and optimizer state")


def _keeps_reference_model(reading: Reading) -> bool:
    """Returns whether a reference model is on the device wherever the parameters are.

    A penalty by KL divergence needs one (``need_reference_policy`` in verl/trainer/ppo/utils.py), unless adapters are
    trained. It is offloaded as the parameters are (``ref/megatron_ref.yaml``), unless its own key says otherwise.
    """
    compares = [reading.entries.get(key) for key in ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")]
    adapters = [reading.entries.get(f"actor_rollout_ref.model.{key}") for key in ("lora.rank", "lora_rank")]
    if True not in compares or any(adapters):
        return False
    moves = bool(reading.values.get("offload_parameters"))
    key = "actor_rollout_ref.ref.megatron.param_offload"
    if moves and reading.entries.get(key) is False:
        reading.miss(key, "more", "the reference model stays on the device while the parameters are offloaded")
    return not moves and reading.entries.get(key) is not True


def _complete_gradients(reading: Reading) -> None:
    """Takes the type of the gradients, as ``_resolve_override_ddp_config`` of verl's engine does since June 2026."""
    key = f"{_DDP}.grad_reduce_in_fp32"
    if key in reading.entries.by_key:
        return
    own = f"{_OPTIM}.main_grads_dtype"
    if reading.get(f"{_OPTIM}.use_precision_aware_optimizer") and reading.get(own) not in (None, "fp32", "float32"):
        reading.take(own, "grad_reduce_in_bf16", True)
        return
    if reading.version is None:
        reading.questions.append(
            f"{key} is not in the file, and its default depends on the version: fp32 since {_FP32_SINCE}, "
            f"bf16 before: give --framework-version {_RELEASE} or {_BEFORE}, or --set {key}=true or false"
        )
    reading.values["grad_reduce_in_bf16"] = reading.version == _BEFORE


def _complete_offload(reading: Reading) -> None:
    """Takes what leaves the device: gradients with the parameters (``offload_megatron_model_to_cpu``)."""
    values, targets = reading.values, ("cpu", "disk")
    for name, component in (("parameters", "param"), ("optimizer", "optimizer")):
        if values.pop(f"{component}_target") in targets:
            reading.take(f"{_MEGATRON}.offload.{component}.target", f"offload_{name}", value=True)
    values["offload_gradients"] = values.get("offload_parameters")
    for key in (f"{_MEGATRON}.grad_offload", f"{_MEGATRON}.offload.grad.target"):
        if reading.get(key) is not None:
            reading.without_effect[key] = (
                "verl frees the gradients where it offloads the parameters; 0.9.1 refuses the key"
            )


def _drop_defaults_of_bridge(reading: Reading) -> None:
    """Drops what is a default of Megatron-Bridge only, where verl builds the model by mbridge (0.15.1)."""
    if not reading.get(f"{_MEGATRON}.vanilla_mbridge"):
        return
    # models/qwen3moe.py sets the one; Megatron-Core's default of the other is false.
    others = {f"{_TRANSFORMER}.{key}" for key in ("bias_activation_fusion", "gradient_accumulation_fusion")}
    reading.not_modelled = [one for one in reading.not_modelled if one.place != "default" or one.key not in others]


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    values = common(scenario, settings)
    context = scenario.layout.context_parallel_size
    is_row, longest = is_packed(scenario), longest_sequence(scenario)
    return (
        values
        | named(scenario)
        | {
            "is_dynamic": is_row,
            "tokens_per_rank": scenario.seq_length // context if is_row else 16384,
            "micro_batch_size": None if is_row else scenario.micro_batch_size,
            "prompt_length": longest // 2,
            "response_length": longest - longest // 2,
            "prompts": sequences_of_a_step(scenario),
            "responses_per_prompt": 1,
        }
    )


def cannot_write(_: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what verl cannot express of these settings."""
    if settings.offload_gradients == settings.offload_parameters:
        return {}
    return {"offload_gradients": "verl frees the gradients where it offloads the parameters"}


VERL = Framework(
    name="verl",
    title="verl",
    source="0.9.1, and main of August 2026",
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("verl")
    | keys_without_effect("megatron_core_model", _TRANSFORMER)
    | keys_without_effect("megatron_core_ddp", _DDP)
    | keys_without_effect("megatron_core_optimizer", f"{_OPTIM}.override_optimizer_config")
    | keys_without_effect("bridge_provider", _TRANSFORMER)
    | {f"{_TRANSFORMER}.{key}" for key in NUMBERS_OF_THE_MODEL},
    complete=complete,
    complete_of_model=complete_provider,
    compose=compose,
    # It patches Megatron's checkpoints on every GPU: apply_patch_megatron_recomputation_backward in
    # verl/models/mcore/patch.py.
    fixed={"loss": "logprobs", "checkpoint_input_remedy": "release_storage"},
    packs=is_packed,
    cannot_write={
        "checkpoint_input_remedy": "verl always applies release_storage",
        "offload_optimizer_except_update": "verl loads the optimizer state before the step",
        "manual_gc": "verl has no such key",
        "loss": "verl's actor trains with log-probabilities",
        "logprobs_chunk_size": "verl computes log-probabilities of a whole micro-batch at once",
    },
    cannot_write_of=cannot_write,
    render=hydra_lines,
    configurations=("ppo_megatron_trainer",),
    versions=(_RELEASE, _FP32_SINCE, _BEFORE),
)
