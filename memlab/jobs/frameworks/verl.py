"""verl with Megatron: Hydra's resolved configuration, ``.hydra/``, or the overrides of a launch script.

Names and defaults: ``verl/trainer/config/`` (0.9.1); `verl_engine` has those of the engine.
"""

from __future__ import annotations

import math
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_number
from memlab.jobs.frameworks.balanced_rows import take_rows_of_verl
from memlab.jobs.frameworks.bridge_keys import complete_provider
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.keys import (
    ALLOCATOR,
    COUNT,
    NUMBER,
    SWITCH,
    TEXT,
    WHOLE,
    Key,
    Missing,
    is_given,
    other_than,
    under,
)
from memlab.jobs.frameworks.lines import hydra_lines
from memlab.jobs.frameworks.megatron_lm import ONLY_OF_VERL_AND_SLIME
from memlab.jobs.frameworks.reinforcement import (
    check_batches,
    composed,
    is_packed,
    note_other_section,
    note_padded_rows,
    note_segments,
    of_any_length,
    of_one_copy,
    only_segments,
    refuse_program,
    row_of_budget,
    sglang_arguments,
    take_rollout,
    take_sequences,
    vllm_arguments,
)
from memlab.jobs.frameworks.verl_checkout import (
    BEFORE,
    VERSIONS,
    checks_prompts,
    has_earlier_configurations,
    leaves_segments,
    release_around,
    trains_without_engines,
    version_around,
)
from memlab.jobs.frameworks.verl_engine import (
    AWAY,
    CANNOT_WRITE,
    FIXED,
    cannot_write,
    complete_engine,
    engine_keys,
    engine_missing,
    engine_without_effect,
    padding_in_fp8,
)
from memlab.jobs.frameworks.verl_rules import check_megatron, check_micro_batches, check_rollout, check_step
from memlab.jobs.frameworks.without_effect import keys_without_effect

_ACTOR = "actor_rollout_ref.actor"
_PREFIXES = (f"{_ACTOR}.megatron", f"{_ACTOR}.optim", "actor_rollout_ref.model")
"""Of the engine, the optimizer and the model."""
_ROLLOUT = "actor_rollout_ref.rollout"

KEYS = (
    Key("model_engine", "model_engine", TEXT, None),
    Key("trainer.nnodes", "nodes", WHOLE, 1),
    Key("trainer.n_gpus_per_node", "ranks_per_node", WHOLE, 8),
    *engine_keys(*_PREFIXES),
    Key(f"{_ACTOR}.use_dynamic_bsz", "is_dynamic", SWITCH, False),
    Key(f"{_ACTOR}.ppo_max_token_len_per_gpu", "tokens_per_rank", COUNT, 16384),
    Key(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "micro_batch_size", COUNT, None),
    Key(f"{_ACTOR}.ppo_mini_batch_size", "prompts", COUNT, 256),
    Key("actor_rollout_ref.rollout.n", "responses_per_prompt", WHOLE, 1),
    Key("actor_rollout_ref.hybrid_engine", "is_colocated", SWITCH, True),
    Key(f"{_ACTOR}.calculate_entropy", "entropy_loss", SWITCH, False),
    Key(f"{_ACTOR}.entropy_coeff", "entropy_coefficient", NUMBER, 0),
    Key(f"{_ACTOR}.entropy_from_logits_with_chunking", "has_chunks_of_entropy", SWITCH, False),
    Key(f"{_PREFIXES[0]}.entropy_from_logits_with_chunking", "has_chunks_of_entropy", SWITCH),
    Key(f"{_ACTOR}.entropy_from_logits_chunk_size", "entropy_chunk_size", COUNT, 2048),
    Key(f"{_PREFIXES[0]}.entropy_from_logits_chunk_size", "entropy_chunk_size", COUNT),
    *(
        Key(f"{prefix}.log_prob_{key}", f"{model}_{field}", conversion)
        for model, prefix in (("policy", _ROLLOUT), ("reference", "actor_rollout_ref.ref"))
        for key, field, conversion in (
            ("use_dynamic_bsz", "is_dynamic", SWITCH),
            ("max_token_len_per_gpu", "tokens", COUNT),
            ("micro_batch_size_per_gpu", "rows", COUNT),
        )
    ),
    Key(f"{_ROLLOUT}.gpu_memory_utilization", "engine_share", NUMBER, 0.5),
    Key(f"{_ROLLOUT}.free_cache_engine", "engine_sleeps", SWITCH, True),
    Key(f"{_ROLLOUT}.tensor_model_parallel_size", "engine_ranks", COUNT, 2),
    Key(f"{_ROLLOUT}.pipeline_model_parallel_size", "engine_stages", COUNT, 1),
    Key(f"{_ROLLOUT}.data_parallel_size", "engine_data_ranks", COUNT, 1),
    Key(f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "bucket", WHOLE, 2048),
    Key(f"{_ROLLOUT}.update_weights_bucket_megabytes", "bucket", WHOLE),
    *under("ray_kwargs.ray_init.runtime_env.env_vars", ALLOCATOR),
    Key("data.max_prompt_length", "prompt_length", WHOLE, 512),
    Key("data.max_response_length", "response_length", WHOLE, 512),
    Key(f"{_ROLLOUT}.prompt_length", "prompt_length", WHOLE),
    Key(f"{_ROLLOUT}.response_length", "response_length", WHOLE),
)


_OF_ALL_RANKS = "it counts the sequences of all ranks and is deprecated: memlab takes {}_per_gpu, or 1"


def rows_of_all_ranks(section: str) -> Missing:
    """Returns a deprecated key of the actor's section, or of the critic's."""
    return Missing(f"{section}.ppo_micro_batch_size", "either", _OF_ALL_RANKS.format("ppo_micro_batch_size"))


FRAMEWORK_MISSING = (
    *engine_missing(*_PREFIXES),
    Missing(f"{_ACTOR}.use_fused_kernels", "less", "log-probabilities without whole logits"),
    Missing(f"{_ACTOR}.calculate_sum_pi_squared", "more", "the probabilities of all logits are squared"),
    rows_of_all_ranks(_ACTOR),
    Missing(f"{_ACTOR}.qat.enable", "either", "weights are quantized in forward"),
    Missing(f"{_ACTOR}.router_replay.mode", "more", "the chosen experts of each token are kept, of all micro-batches",
            lambda value: value not in (None, "disabled")),
    Missing("trainer.val_only", "less", "the job validates and does not train", blocks=True, of="job"),
    Missing("distillation.enabled", "more", "the loss reads more of the logits than the labels' log-probabilities"),
    *(
        Missing(f"{one}.enable", "more", "a reward model's engine may be on the same GPUs")
        for one in ("reward.reward_model", "reward_model")
    ),
    *vllm_arguments(f"{_ROLLOUT}.engine_kwargs.vllm"),
    *sglang_arguments(f"{_ROLLOUT}.engine_kwargs.sglang."),
    Missing("actor_rollout_ref.model.mtp.enable_rollout", "more", "the inference engine has a draft model too"),
    Missing("trainer.device", "either", "memlab predicts the job on NVIDIA's GPUs",
            lambda value: value not in (None, "cuda")),
    Missing("trainer.use_legacy_worker_impl", "either",
            "an earlier verl trains with its workers from before the engines, which memlab does not predict",
            other_than("disable")),
    Missing(f"{_ROLLOUT}.quantization", "less", "the inference engine's weights are quantized", is_given),
    Missing(f"{_ROLLOUT}.quantization_config_file", "less", "the inference engine's weights are quantized", is_given),
    Missing(f"{_ROLLOUT}.dtype", "more", "memlab takes the inference engine's weights in 2 bytes",
            lambda value: value not in (None, "auto", "bfloat16", "float16", "half")),
    Missing(f"{_ROLLOUT}.enable_rollout_routing_replay", "more", "the chosen experts of each token are kept"),
    Missing("trainer.v1.trainer_mode", "either",
            "other GPUs generate, and the engine of the training's GPUs sleeps unless it is lent to them",
            lambda value: value == "separate_async"),
    Missing(f"{_ROLLOUT}.disaggregation.enabled", "either", "prefill and decoding have different engines"),
    *(Missing(f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.rollout_dtype", "either",
              "memlab takes the weights that are sent in 2 bytes", other_than("bfloat16", "bf16", "float16"))
      for backend in ("nccl", "nixl", "kimi_ckpt_engine", "mooncake")),
    *(Missing(f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.device", "less",
              "the buffers from which weights are sent are on the host", other_than("cuda"))
      for backend in ("nixl", "mooncake")),
)  # fmt: skip


_ROWS_OF_ALL_RANKS = (
    (f"{_ACTOR}.ppo_micro_batch_size", "micro_batch_size"),
    (f"{_ROLLOUT}.log_prob_micro_batch_size", "policy_rows"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size", "reference_rows"),
)
"""Deprecated keys of sequences of all ranks, each with the field of those of a rank."""
_OF_CRITIC = "critic.ppo_micro_batch_size"
_PROGRAMS_OF_TRAINER = (
    "main_ppo", "main_ppo_sync", "main_ppo_v0", "main_eval", "main_generation", "main_generation_server",
    "sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer",
)  # fmt: skip
"""In ``verl/trainer``."""
_SEPARATE = {
    "algorithm.rollout_correction.bypass_mode": True,
    f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
}
"""What trainers whose inference engine has GPUs of its own set in ``verl/experimental`` (0.9.1 and 1dda039b)."""
_FULLY_ASYNC, _ONE_STEP = _SEPARATE, _SEPARATE | {f"{_ROLLOUT}.free_cache_engine": False}
_OF_MEGATRON = {f"{_ACTOR}.strategy": "megatron"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ppo_megatron_trainer": _OF_MEGATRON,
    "ppo_trainer": {},
    "fully_async_ppo_megatron_trainer": _FULLY_ASYNC | _OF_MEGATRON,
    "fully_async_ppo_trainer": _FULLY_ASYNC,
    "one_step_off_ppo_megatron_trainer": _ONE_STEP | _OF_MEGATRON,
    "one_step_off_ppo_trainer": _ONE_STEP,
}
CONFIGURATION_OF = {
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
}


def refuse_without_training(reading: Reading) -> None:
    """Refuses the jobs of verl's programs that take keys of a training, and train nothing."""
    refuse_program(reading, "main_generation(_server)?")
    refuse_program(reading, "main_eval", "evaluates")


def note_program(reading: Reading) -> None:
    """Says that a program is not verl's own, and whether its configuration is known."""
    program = reading.entries.program
    name = "verl." if program is None else str(program.value)
    if program is None or _is_own_program(name):
        return
    if "verl.experimental." in name:
        reading.other_program = f"{name}, a trainer that memlab does not know,"
        reading.warnings.append(
            f"{program.place}: {name} is a trainer of verl's that memlab does not know: memlab reads its keys as "
            "main_ppo does, and does not see what else it does"
        )
        return
    reading.other_program = f"{name}, a program of the job's own,"
    configuration = reading.entries.by_key.get("config_name")
    reading.warnings.append(
        f"{program.place}: {name} is no program of verl's own, and may have a configuration of its own: memlab takes "
        "verl's defaults for what the file does not give; give --set KEY=VALUE for others"
        if configuration is None
        else f"{program.place}: {name} is no program of verl's own: memlab looks only at its configuration, "
        f"{configuration.value}, and not at what else it does"
    )


def _is_own_program(name: str) -> bool:
    """Whether a program is one of verl's (0.2.0 to 0.9.1 and 1dda039b), and not of a fork."""
    *folders, program = name.removesuffix(".py").replace("/", ".").split(".")
    below = folders[len(folders) - folders[::-1].index("verl") :] if "verl" in folders else [""]
    return (below[:1] == ["experimental"] and below[1:2] != ["vla"]) or (
        below == ["trainer"] and program in _PROGRAMS_OF_TRAINER
    )


def note_workers(reading: Reading) -> None:
    """Says that a job trains with the workers that verl had before its engines, where its checkout shows that."""
    key = "trainer.use_legacy_worker_impl"
    what = trains_without_engines(reading.started) if reading.version in (None, BEFORE) else None
    if what is not None and key not in reading.entries.by_key:
        reading.miss(
            key, "either", f"{what}, which trains with its workers from before the engines: memlab predicts the engines"
        )


def note_lengths(reading: Reading) -> None:
    """Says that a program of the job's own gives the lengths of sequences, where its configuration leaves them open."""
    for key in ("data.max_prompt_length", "data.max_response_length"):
        entry = reading.entries.by_key.get(key)
        if entry is not None and entry.value is None:
            reading.assumed.append("how long sequences are")
            reading.warnings.append(
                f"{entry.place}: {key} is null, so the job's own program decides it: memlab takes other lengths in its "
                f"place; give --set {key}=TOKENS"
            )
    of_data, of_rollout = (reading.get(f"{one}prompt_length") for one in ("data.max_", f"{_ROLLOUT}."))
    if is_number(of_data) and is_number(of_rollout) and of_data < of_rollout:
        reading.warnings.append(
            f"{_ROLLOUT}.prompt_length is {of_rollout:,}, and data.max_prompt_length {of_data:,}: memlab takes prompts "
            f"of {of_rollout:,} tokens, up to which tools may fill them; where none is longer than the data's, give "
            f"--set {_ROLLOUT}.prompt_length={of_data}"
        )


def take_turns(reading: Reading) -> None:
    """Takes the rows of programs whose configuration has the length of the first turn, as Search-R1's does.

    Its ``GenerationManager`` keeps the last ``max_start_length`` tokens of the first prompt, and after it the text of
    all turns, of the model and of its tools, up to ``max_prompt_length`` (PeterGriffinJin/Search-R1, a14dc3a4).
    """
    key = "data.max_start_length"
    start, later = reading.get(key), reading.values["prompt_length"]
    if reading.get("do_search") is False:
        reading.without_effect[key] = "do_search is false, so a row has one prompt and one response"
    elif is_number(start) and is_number(later):
        reading.take(key, "prompt_length", start)
        reading.values["response_length"] = later
        reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
        reading.warnings.append(
            f"{key}: memlab takes rows as Search-R1's program makes them: {start:,} tokens and, of all turns after "
            f"them, at most the {later:,} of data.max_prompt_length"
        )


def take_rows_of_all_ranks(reading: Reading, responses: int = 1) -> None:
    """Takes micro-batches from the keys that count the sequences of all ranks, as verl's earlier workers do.

    See ``ActorRolloutRefWorker`` in verl/workers/fsdp_workers.py (0.1 to 0.7.1): each is divided by the ranks that
    have different sequences. Later releases have no such division, and the key is named.

    Args:
        responses: Of a prompt, where the worker counts prompts before 0.2, as that of FSDP does.
    """
    values, release = reading.values, release_around(reading.started)
    if reading.version not in (None, BEFORE) or release is None or trains_without_engines(reading.started) is None:
        return
    split = math.prod(
        values.get(f"{kind}_parallel_size") or 1 for kind in ("tensor_model", "pipeline_model", "context")
    )
    for key, field in _ROWS_OF_ALL_RANKS:
        rows = reading.get(key)
        if is_number(rows) and rows > 0 and reading.get(f"{key}_per_gpu") is None:
            of_rank = max(1, int(rows) // max(1, values["world_size"] // split))
            reading.take(key, field, of_rank * (responses if release[0] < (0, 2) else 1))
            reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
    _take_steps_of_few_prompts(reading, max(1, values["world_size"] // split))


_REPEATS = f"{_ROLLOUT}.n_agent"
"""Of Search-R1 (598e61bd) and its forks: how often ``fit`` of ray_trainer.py repeats each prompt before its turns."""


def _take_steps_of_few_prompts(reading: Reading, copies: int) -> None:
    """Takes one mini-batch of all prompts of a step where a mini-batch may have more.

    See ``update_policy`` in verl/workers/actor/dp_actor.py (0.1 and 0.2): ``batch.split`` gives what there is.

    Args:
        reading: Of a job of verl's earlier workers.
        copies: Of the model, among which the sequences are shared.
    """
    values, prompts, key = reading.values, reading.get("data.train_batch_size"), f"{_ACTOR}.ppo_mini_batch_size"
    mini_batch, repeats = values.get("prompts"), reading.get(_REPEATS)
    if is_number(prompts) and is_number(repeats):
        prompts *= repeats
    if checks_prompts(reading.started) or not is_number(prompts) or not is_number(mini_batch) or prompts >= mini_batch:
        return
    values["prompts"] = prompts
    of_copy = max(1, int(prompts) * values["responses_per_prompt"] // copies)
    for field in ("micro_batch_size", "policy_rows", "reference_rows"):
        if is_number(values.get(field)) and values[field] > of_copy:
            values[field] = of_copy
    reading.warnings.append(
        f"{key} is {mini_batch}, more than the {prompts} prompts of data.train_batch_size: this verl does not check "
        f"that, and updates once with all {prompts}, so no micro-batch has more than {of_copy} sequences"
    )


def take_gpus_of_the_engine(reading: Reading) -> None:
    """Takes an inference engine on GPUs of its own where a job trains fully asynchronously.

    Its trainer asserts that ``hybrid_engine`` is false (``verl/experimental/fully_async_policy``, 1dda039b). The keys
    may be of something else in the configuration of another program, whose job says that it is true.
    """
    if reading.other_program and reading.get("actor_rollout_ref.hybrid_engine") is True:
        return
    key = next((key for key in ("rollout.n_gpus_per_node", "rollout.nnodes") if key in reading.entries.by_key), None)
    if key is None or not reading.values["is_colocated"]:
        return
    reading.values["is_colocated"] = False
    reading.warnings.append(
        f"{key}: the engine has GPUs of its own, for which verl's trainer asserts that actor_rollout_ref.hybrid_engine "
        "is false: give actor_rollout_ref.hybrid_engine=False, as memlab takes it"
    )


def complete(reading: Reading) -> None:
    """Derives ranks, workload and gradients."""
    values = reading.values
    refuse_without_training(reading)
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    values.setdefault("world_size", nodes * per_node)
    note_program(reading)
    note_workers(reading)
    note_lengths(reading)
    take_turns(reading)
    take_gpus_of_the_engine(reading)
    check_engine(reading)
    note_critic(reading, "critic.megatron")
    note_reward_model(reading)
    section = "megatron.override_transformer_config"
    note_other_section(reading, f"actor_rollout_ref.ref.{section}", f"{_ACTOR}.{section}", is_there=compares(reading))
    complete_engine(reading, *_PREFIXES)
    longest = values.pop("prompt_length") + values.pop("response_length")
    prompts, responses = values.pop("prompts"), values.pop("responses_per_prompt")
    is_dynamic, tokens = values.pop("is_dynamic"), values.pop("tokens_per_rank")
    removes_padding = values.pop("removes_padding")
    take_rows_of_all_ranks(reading)
    passes = rows_of_passes(reading, longest, tokens, responses, is_dynamic=is_dynamic, removes_padding=removes_padding)
    of_log_probs, rows = max(passes if compares(reading) else passes[:1], key=math.prod)
    _take_entropy(reading)
    is_colocated = values.pop("is_colocated")
    if is_colocated:
        take_allocator(reading)
    skip_passes(reading)
    merge = "actor_rollout_ref.model.lora.merge"
    if values.get("lora_rank") is not None and reading.get(merge) is not True:
        # ``update_weights`` in verl/workers/engine_workers.py.
        reading.warnings.append(
            f"{merge} is off: the first weight sync sends the whole model, as memlab predicts it, and later ones only "
            "the adapters"
        )
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        seq_length=of_log_probs,
        micro_batch_size=rows,
        bucket_bytes=(values.pop("bucket") or 0) * 2**20,
        bucket_copies=copies_of_bucket(reading),
        # The sender allocates its bucket before the first weight comes from Megatron-Bridge's ``export_hf_weights``,
        # which it copies there or sends as it is (``bucketed_weight_transfer.py``, 0.9.1 and 1dda039b).
        gathers_beside_bucket=True,
        has_reference_model=_keeps_reference_model(reading),
        engine=(f"{_ROLLOUT}.name", str(reading.get(f"{_ROLLOUT}.name") or "vllm")),
        quantization=f"{_ROLLOUT}.quantization",
    )
    if is_dynamic:
        if not removes_padding:
            note_padded_rows(reading, "actor_rollout_ref.model.use_remove_padding")
        take_rows_of_verl(reading, f"{_ACTOR}.ppo_max_token_len_per_gpu", tokens, longest, prompts * responses)
        return
    if values.get("micro_batch_size") is None:
        reading.warnings.append(
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu is not in the file, so memlab takes 1; verl refuses a job without "
            "it"
        )
    key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu" if removes_padding else None
    take_sequences(reading, longest, prompts * responses, packed_by=key)


def copies_of_bucket(reading: Reading) -> int:
    """Returns how many buckets there are: to other GPUs, two take turns (``NCCLCheckpointEngine``, August 2026)."""
    return 1 if reading.get(f"{_ROLLOUT}.checkpoint_engine.backend") in (None, "naive") else 2


def skip_passes(reading: Reading) -> None:
    """Notes where a job takes the inference engine's log-probabilities in place of the policy's.

    See ``apply_bypass_mode`` in verl/trainer/ppo/rollout_corr_helper.py (0.9.1).
    """
    bypass = "algorithm.rollout_correction.bypass_mode"
    if reading.get(bypass) is True and not compares(reading):
        reading.take(bypass, "computes_log_probabilities", value=False)


def rows_of_passes(
    reading: Reading, longest: int, tokens: int, responses: int, *, is_dynamic: bool, removes_padding: bool
) -> list[tuple[int, int]]:
    """Returns the tokens of a row, and the rows, of the policy's and of the reference model's pass without backward.

    They have keys of their own (``ActorRolloutRefWorker`` in verl/workers/engine_workers.py, 0.9.1), and take the
    actor's where these are not given. All sequences of a generation are in one pass, and each copy of the model has as
    many (``_compute_old_log_prob`` in verl/trainer/ppo/ray_trainer.py).
    """
    values, passes = reading.values, []
    prompts = reading.get("data.train_batch_size", 1024)
    among = of_one_copy(reading, int(prompts) * responses) if is_number(prompts) else None
    for model, section in (("policy", _ROLLOUT), ("reference", "actor_rollout_ref.ref")):
        own, rows = values.pop(f"{model}_tokens", None) or tokens, values.pop(f"{model}_rows", None) or 1
        if values.pop(f"{model}_is_dynamic", is_dynamic):
            passes.append((row_of_budget(reading, own, longest, among, is_refused=True)[1], 1))
        else:
            passes.append((longest * rows, 1) if removes_padding else (longest, rows))
            key = f"{section}.log_prob_micro_batch_size"
            is_taken = any(one.key == key for one in reading.taken)
            if not is_taken and reading.get(key) is not None and (model == "policy" or compares(reading)):
                reading.miss(key, "either", _OF_ALL_RANKS.format("log_prob_micro_batch_size"))
    return passes


def _take_entropy(reading: Reading) -> None:
    """Takes the entropy, which is a part of the loss wherever it is computed, with a coefficient of 0 too.

    See ``ppo_loss`` in verl/workers/utils/losses.py (0.9.1).
    """
    values, key = reading.values, f"{_PREFIXES[0]}.entropy_from_logits_with_chunking"
    if values.pop("entropy_coefficient"):
        values["entropy_loss"] = True
    reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
    if not values.pop("has_chunks_of_entropy"):
        values["entropy_chunk_size"] = None


def take_allocator(reading: Reading) -> None:
    """Takes expandable segments, which verl switches on after each weight sync, the first one before the first step.

    See ``update_weights`` in verl/workers/engine_workers.py (0.9.1): only what sends weights inside the process does.
    """
    key = f"{_ROLLOUT}.checkpoint_engine.backend"
    if reading.version in (None, BEFORE) and leaves_segments(reading.started):
        return
    if reading.get(key) in (None, "naive"):
        reading.take(key, "expandable_segments", value=True)
        note_segments(reading, key)


def check_policy_loss(reading: Reading) -> None:
    """Checks that SAPO's two numbers stand where ``ActorConfig`` has them (0.8.0, 0.9.1 and 1dda039b).

    Raises:
        CannotStartError: If they are among those of ``PolicyLossConfig``, as in two of verl's own examples.
    """
    for name in ("tau_pos", "tau_neg"):
        if reading.get(f"{_ACTOR}.policy_loss.{name}") is not None:
            raise CannotStartError(
                f"{_ACTOR}.policy_loss.{name} is set, which verl's PolicyLossConfig does not have: set {_ACTOR}.{name}"
            )


def check(reading: Reading) -> None:
    """Checks verl's rules.

    Raises:
        CannotStartError: If it refuses the job, or the first backward fails (`_check_entropy`).
    """
    check_rollout(reading, has_one_engine=True)
    check_megatron(reading, *_PREFIXES[:2])
    _check_entropy(reading)
    check_policy_loss(reading)
    check_sequences(reading, has_megatron=True)


def check_sequences(reading: Reading, *, has_megatron: bool = False) -> None:
    """Checks ``prepare_micro_batches`` in verl/workers/engine/utils.py (0.9.1 and 1dda039b).

    Raises:
        CannotStartError: If a step's sequences of a copy of the model are no multiple of a micro-batch, or
            a mini-batch has more prompts than a step.
    """
    if not reading.get(f"{_ACTOR}.use_dynamic_bsz"):
        own = f"{_ACTOR}.ppo_micro_batch_size_per_gpu" if has_megatron else None
        check_step(reading, ("data.train_batch_size", f"{_ROLLOUT}.n"), own)
        of_passes = [f"{_ROLLOUT}.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size"]
        passes = of_passes if compares(reading) else of_passes[:1]
        of_critic = [] if reading.get("critic.use_dynamic_bsz") or not has_critic(reading)[1] else [_OF_CRITIC]
        check_micro_batches(reading, [f"{_ACTOR}.ppo_micro_batch_size", *passes, *of_critic])
        keys = {f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ROLLOUT}.n": 1}
        check_batches(reading, keys, (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 1), "verl")
    _check_prompts(reading)


def _check_prompts(reading: Reading) -> None:
    """Checks ``ActorConfig.validate`` in verl/workers/config/actor.py (0.9.1 and 1dda039b).

    A job's own program need not call it, and a job whose rollout and training are apart gives 0 prompts. verl's default
    of 1,024 is not compared, since a job that memlab writes gives the mini-batch alone.
    """
    prompts, key = reading.get("data.train_batch_size"), f"{_ACTOR}.ppo_mini_batch_size"
    mini_batch, program = reading.get(key, 256), reading.entries.program
    if not isinstance(prompts, int) or not isinstance(mini_batch, int) or not 0 < prompts < mini_batch:
        return
    if not checks_prompts(reading.started):
        return
    broken = f"{key} is {mini_batch}, more than the {prompts} prompts of data.train_batch_size"
    if reading.get(f"{_ACTOR}.use_dynamic_bsz"):
        reading.warnings.append(
            f"{broken}, which verl does not check with dynamic batches: the first update stops there (make_iterator in "
            "verl/utils/tensordict_utils.py) unless the program makes more sequences, and earlier workers take fewer "
            "micro-batches than memlab says, of the same size"
        )
        return
    if program is None or not reading.other_program:
        raise CannotStartError(f"{broken}, which verl refuses: change one of them")
    reading.warnings.append(
        f"{broken}, which verl refuses if {program.value} lets it check the job: a step may have fewer micro-batches "
        "than memlab says, of the same size"
    )


def _check_entropy(reading: Reading) -> None:
    """Refuses chunks of an entropy with a gradient; the rule is that of `Scenario`, and its sources are there."""
    values, key = reading.values, f"{_ACTOR}.entropy_from_logits_chunk_size"
    size, tokens = values["entropy_chunk_size"], values["seq_length"] // (values.get("context_parallel_size") or 1)
    if values["entropy_loss"] and size is not None and size < tokens:
        raise CannotStartError(
            f"{key} is {size} and the loss has the entropy, so it must be at least the {tokens} tokens of a row, since "
            "verl's backward of several chunks fails: give a larger one, or switch entropy_from_logits_with_chunking "
            "off",
            *("entropy_chunk_size", "entropy_loss"),
        )


def check_engine(reading: Reading) -> None:
    """Refuses a job of another engine than Megatron's; those of FSDP have a table of their own (`verl_fsdp`)."""
    chosen = reading.get(f"actor@{_ACTOR}")
    engine = reading.values.pop("model_engine") or reading.get(f"{_ACTOR}.strategy")
    is_chosen = chosen is not None or reading.entries.get("model_engine") is not None
    engine = engine if chosen is None else str(chosen).removesuffix("_actor")
    reading.known.add("config_name")
    if not is_chosen:
        _note_unchosen(reading)
    if engine not in (None, "megatron"):
        reading.blocked["job"].append(f"model_engine {engine}: memlab predicts verl's jobs with Megatron and FSDP only")


def _note_unchosen(reading: Reading) -> None:
    """Says that Hydra stops: FSDP's actor, the default of ``ppo_trainer.yaml`` (0.9.1), has no keys of Megatron."""
    refused = [entry for key, entry in reading.entries.by_key.items() if key.startswith(f"{_ACTOR}.megatron.")]
    program = reading.entries.program
    is_usual = program is not None and program.value == "verl.trainer.main_ppo"
    if refused and program is not None and is_usual and "config_name" not in reading.entries.by_key:
        reading.entries.causes.append(
            f"{program.place}: {program.value} takes FSDP's actor without model_engine=megatron, so Hydra stops at "
            f"{refused[0].key} ({refused[0].place}): add model_engine=megatron"
        )


def has_critic(reading: Reading) -> tuple[str, bool]:
    """Returns the key that decides about a critic, and whether there is one (``need_critic``, trainer/ppo/utils.py)."""
    key = "critic.enable" if reading.get("critic.enable") is not None else "algorithm.adv_estimator"
    return key, reading.get(key, "gae") in ("gae", True)


def note_reward_model(reading: Reading) -> None:
    """Says what a reward model has without effect, or that one is trained, as PRIME's is (verl-recipe, prime)."""
    for section in ("reward.reward_model", "reward_model"):
        names = [name for name in reading.entries.by_key if name.startswith(f"{section}.")]
        if reading.get(f"{section}.enable"):
            if any(name.startswith(f"{section}.model.optim.") for name in names):
                reading.miss(
                    f"{section}.model.optim",
                    "more",
                    "a reward model is trained on the same GPUs: its parameters, gradients and optimizer state",
                )
            continue
        for name in names:
            if not name.endswith(".enable"):
                reading.known.add(name)
                reading.without_effect[name] = "the job has no reward model"


def note_critic(reading: Reading, engine: str) -> None:
    """Notes a critic, unless its engine is offloaded; gradients leave with the parameters (`verl_engine`)."""
    key, is_trained = has_critic(reading)
    offloads = [
        reading.get(f"{engine}.{part}_offload") is True or reading.get(f"{engine}.offload.{part}.target") in AWAY
        for part in ("param", "optimizer")
    ]
    reason = "the job trains no critic"
    if is_trained:
        predicted = engine == "critic.megatron"
        reason = "it is the critic's, " + (
            "whose steps --format verl-critic predicts" if predicted else "which memlab notes as a whole"
        )
    for name in reading.entries.by_key:
        if name.startswith("critic."):
            reading.known.add(name)
            reading.without_effect[name] = reason
    if not is_trained:
        return
    if engine == "critic.megatron" and any(name.startswith("critic.") for name in reading.entries.by_key):
        reading.warnings.append(
            f"{key}: a critic takes steps of its own on the same GPUs, between the actor's: --format verl-critic "
            "predicts them"
        )
    if not all(offloads):
        reading.miss(key, "more", "a critic is trained on the same GPUs: its parameters, gradients and optimizer state")
    elif engine != "critic.megatron":
        reading.warnings.append(
            f"{key}: a critic takes steps of its own on the same GPUs, between the actor's, which memlab does not "
            "predict"
        )


def compares(reading: Reading) -> bool:
    """Whether a penalty compares the policy with a reference model."""
    return True in [reading.get(key) for key in ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")]


def _keeps_reference_model(reading: Reading) -> bool:
    """Returns whether a reference model is on the device wherever the parameters are.

    A penalty by KL divergence needs one (``need_reference_policy`` in verl/trainer/ppo/utils.py), unless adapters are
    trained. It is offloaded as the parameters are (``ref/megatron_ref.yaml``), unless its own key says otherwise.
    """
    adapters = [reading.entries.get(f"actor_rollout_ref.model.{key}") for key in ("lora.rank", "lora_rank")]
    if not compares(reading) or any(adapters):
        return False
    moves = bool(reading.values.get("offload_parameters"))
    key = "actor_rollout_ref.ref.megatron.param_offload"
    if moves and reading.get(key) is False:
        reading.miss(key, "more", "the reference model stays on the device while the parameters are offloaded")
    return not moves and reading.get(key) is not True


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    return of_any_length(composed(scenario, settings)) | {
        "model_engine": "megatron",
        "entropy_coefficient": 0,
        "has_chunks_of_entropy": scenario.state.entropy_chunk_size is not None,
        "entropy_chunk_size": scenario.state.entropy_chunk_size or 2048,
        "allocator": None,
        "tokens_per_rank": tokens if is_row else 16384,
        "micro_batch_size": None if is_row else scenario.micro_batch_size,
    }


VERL = Framework(
    name="verl",
    title="verl",
    source="0.9.1, and main of August 2026",
    transformer_engine="2.16",
    signs=Signs(looked_for="actor_rollout_ref", programs=("verl.trainer.main_ppo",), key="actor_rollout_ref."),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=(keys_without_effect("verl") | engine_without_effect(*_PREFIXES)) - {one.name for one in KEYS},
    complete=complete,
    check=check,
    complete_of_model=complete_provider,
    compose=compose,
    fixed=FIXED,
    packs=is_packed,
    padding_in_fp8=padding_in_fp8,
    cannot_write={name: reason for name, reason in CANNOT_WRITE.items() if name not in ONLY_OF_VERL_AND_SLIME},
    without_own_key=frozenset(("offload_gradients",)),
    cannot_write_of=lambda scenario, settings: cannot_write(scenario, settings) | only_segments(scenario, "verl"),
    render=hydra_lines,
    configurations=CONFIGURATIONS,
    folder_of_configurations="verl/trainer/config",
    configuration_of=CONFIGURATION_OF,
    versions=VERSIONS,
    version_around=version_around,
    has_earlier_configurations=has_earlier_configurations,
)
