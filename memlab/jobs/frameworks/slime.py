"""slime: Megatron-LM's flags and its own, in a launch script or in the block of arguments of a log.

Names and defaults: ``slime/utils/arguments.py`` and ``slime/backends/megatron_utils/arguments.py`` (624b824a,
main of August 2026).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.adapters import LORA, no_adapters
from memlab.jobs.frameworks.balanced_rows import warn_of_fuller_rows
from memlab.jobs.frameworks.budgets import by_first_fit, by_tokens
from memlab.jobs.frameworks.framework import Framework, Reading, Signs, flags_of
from memlab.jobs.frameworks.keys import (
    COUNT,
    NUMBER,
    SWITCH,
    TEXT,
    WHOLE,
    Conversion,
    Key,
    Missing,
    is_given,
    other_than,
    with_defaults,
)
from memlab.jobs.frameworks.megatron_lm import (
    CANNOT_WRITE,
    FLAGS_MISSING,
    FLAGS_WITHOUT_EFFECT,
    NO_MASK_OF_DATA_LOADER,
    SWITCHES,
    check_arguments,
    complete_chunks,
    complete_model,
    complete_state,
    leaves_out,
    refused_overlap,
    take_sequence_parallel,
)
from memlab.jobs.frameworks.megatron_lm import KEYS as MEGATRON_KEYS
from memlab.jobs.frameworks.megatron_lm import compose as compose_megatron
from memlab.jobs.frameworks.megatron_lm import render as render_flags
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_padded_rows,
    refuse_program,
    sglang_arguments,
    take_rollout,
    take_rows,
    take_sequences,
)
from memlab.jobs.frameworks.user_buffers import NOT_WRITTEN
from memlab.jobs.frameworks.without_effect import keys_without_effect
from memlab.jobs.slime_file import take_values_above_flags

_IS_NOT_ZERO = Conversion(lambda value: bool(NUMBER.read(value)), lambda value: 0.01 if value else 0)
CRITIC = "advantage_estimator"
"""The key that decides whether there is a critic."""
KEYS = (
    Key("hf_checkpoint", "architecture", TEXT),
    Key("actor_num_nodes", "nodes", WHOLE, 1),
    Key("actor_num_gpus_per_node", "ranks_per_node", WHOLE, 8),
    Key("use_dynamic_batch_size", "is_dynamic", SWITCH, False),
    Key("qkv_format", "qkv_format", TEXT, "thd"),
    Key("max_tokens_per_gpu", "tokens_per_rank", COUNT, None),
    Key("balance_by_flops", "is_balanced", SWITCH, False),
    Key("entropy_coef", "entropy_loss", _IS_NOT_ZERO, False),
    Key("sglang_mem_fraction_static", "engine_share", NUMBER, None),
    Key("rollout_num_gpus_per_engine", "engine_ranks", COUNT, 1),
    Key("update_weight_buffer_size", "bucket", WHOLE, 512 * 2**20),
    Key("log_probs_chunk_size", "logprobs_chunk_size", WHOLE, -1),
    Key("rollout_temperature", "temperature", NUMBER, 1.0),
    Key("colocate", "is_colocated", SWITCH, False),
    Key("data_pad_size_multiplier", "pad_multiple", COUNT, 128),
    Key("offload_train", "is_offloaded", SWITCH, None),
    Key("no_offload_train", "stays", SWITCH, False),
    Key("offload", "is_offloaded_too", SWITCH, False),
    Key("offload_rollout", "engine_is_offloaded", SWITCH, None),
    Key("no_offload_rollout", "engine_stays", SWITCH, False),
    Key("num_steps_per_rollout", "steps_per_rollout", COUNT, None),
    Key("rollout_batch_size", "prompts", COUNT, None),
    Key("n_samples_per_prompt", "responses_per_prompt", COUNT, 1),
    Key("rollout_max_prompt_len", "prompt_length", WHOLE, None),
    Key("rollout_max_response_len", "response_length", WHOLE, None),
    Key("rollout_max_context_len", "context_length", WHOLE, None),
    *(
        # ``validate_args`` in slime/backends/megatron_utils/arguments.py takes alltoall in place of allgather.
        replace(key, conversion=Conversion(lambda value: "flex" if value == "flex" else "alltoall", str))
        if key.field == "moe_token_dispatcher_type"
        else key
        for key in with_defaults(
            MEGATRON_KEYS,
            use_distributed_optimizer=True,
            bf16=True,
            micro_batch_size=1,
            moe_token_dispatcher_type="alltoall",
        )
        if key.field not in ("world_size", "global_batch_size", *NO_MASK_OF_DATA_LOADER)
    ),
    Key("global_batch_size", "sequences", COUNT, None),
)


FRAMEWORK_MISSING = (
    *FLAGS_MISSING,
    Missing("lora_rank", "less", LORA),
    *(
        Missing(name, "less", "frozen parameters have no gradients and no optimizer state", is_given)
        for name in ("freeze_params_name_list", "only_train_params_name_list")
    ),
    Missing("use_stateless_adam", "less", "Adam's moments are made anew in each update"),
    *sglang_arguments("sglang_"),
    *(
        Missing(name, "more", "the chosen experts of each token are kept in host memory, and copied layer by layer")
        for name in ("use_routing_replay", "use_rollout_routing_replay")
    ),
    Missing("release_train", "less", "the ranks of the training end before generation, so they keep nothing then"),
    Missing("custom_loss_function_path", "either", "the job's own loss keeps other tensors", is_given),
    Missing("custom_model_provider_path", "either", "the job's own model is another one", is_given, True),
    *(
        Missing(name, "either", "some layers compute with DeepGEMM in FP8", is_given)
        for name in ("megatron_deepgemm_forward_layers", "megatron_deepgemm_moe_forward_layers")
    ),
    Missing("rollout_top_p", "more", "a mask and one more copy of the logits leave out what was not sampled from",
            other_than(1)),
    Missing("recompute_loss_function", "less", "the loss is recomputed in backward: fewer copies of the logits stay"),
    Missing("debug_rollout_only", "less", "the job generates and does not train", blocks=True, of="job"),
    Missing("train_backend", "either", "memlab predicts this framework's jobs with Megatron only",
            lambda value: value != "megatron", blocks=True, of="job"),
)  # fmt: skip


_CONVERTERS = r"convert_\w+"
"""Names of programs in ``tools/`` (624b824a)."""


def complete(reading: Reading) -> None:
    """Derives ranks, workload and state, on top of what Megatron-LM's flags mean."""
    values = reading.values
    values["pads_nothing"] = True
    refuse_program(reading, _CONVERTERS, "converts a checkpoint")
    complete_model(reading)
    complete_state(reading)
    complete_chunks(reading)
    take_sequence_parallel(reading)
    _take_allocator(reading)
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    values.setdefault("world_size", nodes * per_node)
    if (values.get("logprobs_chunk_size") or -1) < 0:
        values["logprobs_chunk_size"] = None
    values["loss"] = "softmax" if values.pop("temperature") == 1 else "scaled_softmax"
    if values["entropy_loss"] and reading.get("rollout_top_p", 1.0) not in (None, 1):
        reading.miss("entropy_coef", "more", "the entropy is that of all logits, with a softmax of its own")
    is_colocated = values.pop("is_colocated")
    _complete_offload(reading, is_colocated=is_colocated)
    _note_skipped_passes(reading)
    sequences, is_dynamic = _sequences(reading), values.pop("is_dynamic")
    is_balanced = values.pop("is_balanced")
    tokens = _padded(reading, values.pop("tokens_per_rank"))
    row = (tokens or 0) * (values.get("context_parallel_size") or 1) * is_dynamic
    longest = _longest_sequence(reading, row, sequences)
    removes_padding = values.pop("qkv_format") == "thd"
    if is_dynamic and tokens:
        if not removes_padding:
            note_padded_rows(reading, "qkv_format")
        _take_rows(reading, tokens, longest, sequences, is_balanced=is_balanced)
    else:
        given = values.get("seq_length") or _LENGTH
        if not longest:
            reading.assumed.append("how long sequences are")
            reading.warnings.append(
                "micro_batch_size: the file does not say how long the data's sequences are, so memlab takes "
                f"{given:,} tokens: give --set rollout_max_context_len=TOKENS"
            )
        packed_by = "micro_batch_size" if removes_padding else None
        take_sequences(reading, longest or given, sequences, packed_by=packed_by)
    has_engine = not (reading.get("debug_train_only") or reading.get("load_debug_rollout_data"))
    bucket = values.pop("bucket")
    if not has_engine:
        values["engine_share"] = 0.0  # and ``update_weights`` in actor.py returns at once
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        # Passes without backward have the micro-batches of the training (``get_data_iterator`` in data.py).
        seq_length=None,
        micro_batch_size=values.get("micro_batch_size"),
        bucket_bytes=bucket if has_engine else 0,
        # ``_build_flattened_tensor_data`` in update_weight_from_tensor.py makes one tensor of them.
        bucket_copies=2 if is_colocated else 1,
        # ``wake_up`` brings everything back before log-probabilities, and ``update_weights`` reads the host's copy,
        # unless a critic has the actor's GPUs and the engine others (slime/backends/megatron_utils/actor.py).
        offloads_for_generation_only=True,
        syncs_from_host=bool(values["offload_parameters"])
        and (is_colocated or reading.get("advantage_estimator") != "ppo"),
        engine=("sglang_mem_fraction_static", "sglang" if has_engine else "vllm"),
        quantization="sglang_quantization",
    )
    if not has_engine and reading.rollout is not None and not reading.rollout.computes_log_probabilities:
        reading.rollout = None


def _take_rows(reading: Reading, tokens: int, longest: int | None, sequences: int | None, *, is_balanced: bool) -> None:
    """Takes micro-batches that are filled up to a budget, or balanced (``_pack_step_into_mbs``, dp_schedule.py)."""
    key = "max_tokens_per_gpu"
    take_rows(reading, key, tokens, longest, sequences, counted=by_tokens if is_balanced else by_first_fit)
    if is_balanced:
        warn_of_fuller_rows(reading, key, tokens, longest, sequences, cause="balance_by_flops")


_LENGTH = 4096
"""slime's own placeholder where nothing gives a length (``_set_default_megatron_args``)."""


def _note_skipped_passes(reading: Reading) -> None:
    """Notes where a job trains without a pass for log-probabilities before (``train_actor`` in actor.py, 624b824a).

    A reference model and a teacher need one in any case. The policy's own is left out where the engine's are taken, or
    where a rollout is one step, whose loss computes them anyway.
    """
    get = reading.get
    compares = get("kl_coef", 0) != 0 or get("use_kl_loss") is True or get("use_opd") is True
    is_measured = get("get_mismatch_metrics") is True
    names = ("sequences", "steps_per_rollout", "prompts", "responses_per_prompt")
    given, steps, prompts, responses = (reading.values[name] for name in names)
    is_one_step = steps == 1 or (steps is None and bool(prompts) and given == prompts * responses)
    is_reused = (
        is_one_step
        and get("loss_type", "policy_loss") == "policy_loss"
        and get("advantage_estimator") not in ("ppo", "gspo")
        and not any(get(key) for key in ("keep_old_actor", "use_critic"))
        and (not get("use_routing_replay") or get("use_rollout_routing_replay") is True)
    )
    skipped_by = {
        "disable_compute_advantages_and_returns": get("disable_compute_advantages_and_returns") is True,
        "use_rollout_logprobs": get("use_rollout_logprobs") is True and not is_measured and not compares,
        "num_steps_per_rollout": is_reused and not is_measured and not compares,
    }
    for key in [key for key, holds in skipped_by.items() if holds][:1]:
        reading.take(key, "computes_log_probabilities", value=False)


def _padded(reading: Reading, tokens: int | None) -> int | None:
    """Returns the tokens of a full row on one rank: slime pads each to a multiple (``get_batch`` in data.py)."""
    multiple = reading.values.pop("pad_multiple") * (reading.values.get("tensor_model_parallel_size") or 1)
    return None if tokens is None else -(-tokens // multiple) * multiple


def _complete_offload(reading: Reading, *, is_colocated: bool) -> None:
    """Takes what leaves the device between phases, as ``slime_validate_args`` decides it."""
    values = reading.values
    is_offloaded, is_offloaded_too = values.pop("is_offloaded"), values.pop("is_offloaded_too")
    stays, engine_stays = values.pop("stays"), values.pop("engine_stays")
    # ``--release-train`` colocated, and ``--offload``, offload the engine in any case.
    given = values.pop("engine_is_offloaded")
    is_forced = is_offloaded_too or (is_colocated and bool(reading.get("release_train")))
    values["engine_sleeps"] = is_forced or not (engine_stays or given is False)
    has_critic = reading.get(CRITIC) == "ppo"
    if has_critic:
        reading.miss(
            CRITIC, "more", "a critic is trained too, in processes of its own: --format slime-critic predicts it"
        )
    # Who colocates offloads, unless --no-offload-train says otherwise; the other two offload in any case.
    moved = {
        "colocate": is_colocated and is_offloaded is None and not stays,
        "offload_train": bool(is_offloaded),
        "offload": is_offloaded_too,
        CRITIC: has_critic,
    }
    moved_by = [key for key, moves in moved.items() if moves]
    for name in ("offload_parameters", "offload_gradients", "offload_optimizer"):
        values[name] = bool(moved_by)
        for key in moved_by or ["no_offload_train"] * stays:
            reading.take(key, name, value=bool(moved_by))


def _sequences(reading: Reading) -> int | None:
    """Returns the sequences of a step over all copies: given, or a part of a rollout."""
    names = ("sequences", "steps_per_rollout", "prompts", "responses_per_prompt")
    given, steps, prompts, responses = (reading.values.pop(name) for name in names)
    if given is None and steps and prompts:
        return max(1, int(prompts * responses // steps))
    return None if given is None else int(given)


def _take_allocator(reading: Reading) -> None:
    """Takes the allocator's settings from the environment that Ray, or slime itself, gives the ranks, a JSON text."""
    texts = [f'"{name}": "{value}"' for name, value in reading.entries.environment.items()]
    for key in ("runtime_env_json", "train_env_vars"):
        entry = reading.entries.by_key.get(key)
        texts += [] if entry is None else [str(entry.value)]
        # Other variables of the text may be known only when the job runs.
        found = dict(_ALLOCATOR.findall(str(entry.value))) if entry is not None else {}
        if found:
            reading.take(key, "allocator", found.get("CUDA_", found.get("")))
    if any(_SEGMENTS.search(text) for text in texts):
        reading.take("SLIME_ENABLE_EXPANDABLE_SEGMENTS", "expandable_segments", value=True)
    if any(_INT4_TRAINING.search(text) for text in texts):
        reason = "each forward pass rounds a copy of every expert's weights to 4 bits and back"
        reading.miss("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "more", reason)


_INT4_TRAINING = re.compile(r'"OPEN_TRAINING_INT4_FAKE_QAT_FLAG"\s*:\s*"1"')
"""slime's patch of Megatron-LM reads it (``docker/patch/latest/megatron.patch``, 624b824a)."""
_SEGMENTS = re.compile(r'"SLIME_ENABLE_EXPANDABLE_SEGMENTS"\s*:\s*"1"')
"""The training ranks read it before they build the model (``slime/utils/accelerator/torch_accelerator.py``)."""
_ALLOCATOR = re.compile(r'"PYTORCH_(CUDA_|)ALLOC_CONF"\s*:\s*"([^"]{0,500})"')


def _longest_sequence(reading: Reading, row: int, sequences: int | None) -> int | None:
    """Returns the tokens of the longest prompt with its response, as far as the file gives them.

    Args:
        row: The tokens that a row may have by its budget, 0 where it has none: how long a shorter response's prompt is
            changes nothing, as long as the two fit.
        sequences: Of a step, where they are known: with prompts of unknown length they may fill a row.
    """
    prompt, response, context = (reading.values.pop(f"{name}_length") for name in ("prompt", "response", "context"))
    together = (prompt or 0) + (response or 0)
    own = "custom_generate_function_path"
    if reading.get(own) and not context:
        reading.miss(
            own,
            "more",
            "the job's own function may generate several turns, so that sequences are longer than a prompt with one "
            "response, which memlab takes: give rollout_max_context_len",
        )
    if prompt and response:
        return int(min(together, context or together))
    if context:
        return int(context)
    if response and response < row:
        reading.warnings.append(
            "rollout_max_prompt_len and rollout_max_context_len are not in the file: memlab takes rows of the budget, "
            f"{row:,} tokens, and a prompt of more than {row - response:,} tokens may make a longer one: give --set "
            "rollout_max_context_len=TOKENS"
        )
        return max(together, -(-row // sequences) if sequences else 0)
    if response:
        reading.assumed.append("how long sequences are")
        reading.warnings.append(
            "rollout_max_prompt_len and rollout_max_context_len are not in the file, so memlab takes sequences as long "
            f"as a response, {response} tokens: give --set rollout_max_context_len=TOKENS"
        )
    return together or None


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    chunk = scenario.state.logprobs_chunk_size
    return (
        composed(scenario, settings)
        | compose_megatron(scenario, settings)
        | {
            "qkv_format": "thd" if is_row or scenario.micro_batch_size == 1 else "bshd",
            "tokens_per_rank": tokens if is_row else None,
            "pad_multiple": 1 if is_row and tokens % (128 * scenario.layout.tensor_model_parallel_size) else 128,
            "logprobs_chunk_size": -1 if chunk is None else chunk,
            "temperature": 0.9 if scenario.state.loss == "scaled_softmax" else 1.0,
            "is_colocated": settings.offload_parameters,
            "is_offloaded": None,
            "is_offloaded_too": False,
            "stays": False,
            "engine_is_offloaded": None,
            "engine_stays": False,
            "steps_per_rollout": None,
            "prompts": None,
            "context_length": None,
        }
    )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what slime cannot express of these settings, and what Megatron-LM's arguments refuse."""
    moved = {settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer}
    reasons = refused_overlap(scenario)
    if len(moved) > 1:
        reasons["offload_parameters"] = "slime offloads parameters, gradients and optimizer together, or nothing"
    if scenario.state.loss not in ("softmax", "scaled_softmax"):
        reasons["loss"] = "slime computes the losses softmax and scaled_softmax"
    if scenario.state.moe_token_dispatcher_type == "allgather":
        reasons["moe_token_dispatcher_type"] = "slime takes alltoall in place of allgather"
    return reasons


_NEVER = {
    name: reason
    for name, reason in CANNOT_WRITE.items()
    if not name.startswith(("offload", "loss", "fp32_output", "logprobs", "entropy_loss"))
}

SLIME = Framework(
    name="slime",
    title="slime",
    source="main of August 2026, with Megatron-LM core 0.16.1",
    transformer_engine="2.16",
    signs=Signs(looked_for="--actor-num-nodes", of_command=lambda words: "--actor-num-nodes" in flags_of(words)),
    style="flags",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=FLAGS_WITHOUT_EFFECT | keys_without_effect("slime"),
    take_files=take_values_above_flags,
    complete=complete,
    check=check_arguments,
    compose=compose,
    fixed={
        "deallocate_pipeline_outputs": True,
        "fp32_output": True,
        "use_distributed_optimizer": True,
        "dtype": "bf16",
    },
    switches=SWITCHES,
    leaves_out=leaves_out,
    writes_sizes=True,
    packs=is_packed,
    cannot_write=_NEVER
    | NO_MASK_OF_DATA_LOADER
    | NOT_WRITTEN
    | no_adapters("slime")
    | {
        "offload_optimizer_except_update": "slime loads the optimizer state before the step",
        "use_distributed_optimizer": "slime always uses the distributed optimizer",
        "dtype": "slime trains in bf16",
        "fp32_output": "slime's logits are fp32",
    },
    without_own_key=frozenset(("offload_parameters", "offload_gradients", "offload_optimizer", "loss")),
    cannot_write_of=cannot_write,
    render=render_flags,
)
