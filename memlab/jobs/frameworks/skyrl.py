"""SkyRL with Megatron: overrides of a launch script, or a resolved configuration.

Names and defaults: ``skyrl/train/config/config.py`` and ``workers/megatron/megatron_worker.py`` (0.3.0).
"""

from __future__ import annotations

from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.jobs.frameworks.adapters import adapter_keys
from memlab.jobs.frameworks.bridge_keys import complete_provider
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.keys import COUNT, NUMBER, SWITCH, TEXT, WHOLE, Key, Missing, is_false, is_given
from memlab.jobs.frameworks.lines import plain_lines
from memlab.jobs.frameworks.reinforcement import (
    check_batches,
    composed,
    is_packed,
    note_other_section,
    note_padded_rows,
    note_replaced_values,
    note_segments,
    of_any_length,
    of_one_copy,
    refuse_program,
    row_of_budget,
    take_rollout,
    take_rows,
    take_sequences,
    vllm_arguments,
)
from memlab.jobs.frameworks.skyrl_checkout import note_checkout
from memlab.jobs.frameworks.skyrl_megatron import (
    ADAPTERS,
    CANNOT_WRITE,
    FIXED,
    cannot_write_of_rows,
    complete_skyrl_adapters,
    drop_single_chunk,
    is_without_padding,
    megatron_keys,
    megatron_missing,
    megatron_without_effect,
    padding_in_fp8,
    padding_missing,
)
from memlab.jobs.frameworks.skyrl_rules import check_megatron, check_model, check_rules
from memlab.jobs.frameworks.without_effect import keys_without_effect

_MEGATRON = "trainer.policy.megatron_config"
_ENGINE = "generator.inference_engine"

KEYS = (
    Key("trainer.strategy", "strategy", TEXT, "fsdp"),
    Key("trainer.policy.model.path", "architecture", TEXT),
    Key("trainer.placement.policy_num_nodes", "nodes", WHOLE, 1),
    Key("trainer.placement.policy_num_gpus_per_node", "ranks_per_node", WHOLE, 1),
    *megatron_keys(_MEGATRON),
    Key("trainer.flash_attn", "is_flash", SWITCH, True),
    Key("trainer.gradient_checkpointing", "is_checkpointing", SWITCH, True),
    Key("trainer.logprobs_chunk_size", "logprobs_chunk_size", WHOLE, 1024),
    Key("trainer.use_expandable_segments", "expandable_segments", SWITCH, True),
    Key("trainer.placement.colocate_all", "is_colocated", SWITCH, True),
    Key("trainer.micro_train_batch_size_per_gpu", "micro_batch_size", COUNT, 1),
    Key("trainer.max_tokens_per_microbatch", "tokens_per_rank", WHOLE, -1),
    Key("trainer.remove_microbatch_padding", "removes_padding", SWITCH, True),
    Key("trainer.use_sample_packing", "removes_padding", SWITCH),
    Key("trainer.micro_forward_batch_size_per_gpu", "log_prob_micro_batch_size", COUNT, 1),
    Key(f"{_ENGINE}.gpu_memory_utilization", "engine_share", NUMBER, 0.8),
    Key("generator.gpu_memory_utilization", "engine_share", NUMBER),
    Key(f"{_ENGINE}.tensor_parallel_size", "engine_ranks", COUNT, 1),
    Key("generator.inference_engine_tensor_parallel_size", "engine_ranks", COUNT),
    Key(f"{_ENGINE}.pipeline_parallel_size", "engine_stages", COUNT, 1),
    Key(f"{_ENGINE}.data_parallel_size", "engine_data_ranks", COUNT, 1),
    Key(f"{_ENGINE}.weight_transfer_threshold_cuda_ipc_GB", "bucket", NUMBER, 1.0),
    Key("generator.weight_transfer_threshold_cuda_ipc_GB", "bucket", NUMBER),
    Key("trainer.policy_mini_batch_size", "prompts", WHOLE, 256),
    Key("generator.n_samples_per_prompt", "responses_per_prompt", WHOLE, 5),
    Key("trainer.max_prompt_length", "prompt_length", WHOLE, 512),
    Key("generator.max_input_length", "input_length", WHOLE, None),
    Key("generator.sampling_params.max_generate_length", "response_length", WHOLE, 1024),
    Key("trainer.algorithm.use_entropy_loss", "entropy_loss", SWITCH, False),
    *adapter_keys("trainer.policy.model.lora", **ADAPTERS),
    Key(f"{_MEGATRON}.lora_config.lora_type", "kind_of_adapters", TEXT, "lora"),
)
FRAMEWORK_MISSING = (
    Missing("trainer.bf16", "more", "memlab predicts SkyRL's jobs in bf16 only", is_false),
    Missing("trainer.fused_lm_head_logprob", "less", "log-probabilities without whole logits"),
    Missing("trainer.mtp.enabled", "more", "multi-token prediction: one more layer and set of logits"),
    Missing("trainer.policy.model.fake_int4_qat.enabled", "either", "weights are quantized in forward"),
    Missing("trainer.critic.model.path", "more", "a critic is trained too, with an optimizer of its own", is_given),
    # ``main`` in skyrl/train/entrypoints/main_base.py (a9564572) hands the command on, with keys of the other's own.
    Missing("trainer.override_entrypoint", "either", "another program trains, with an engine of its own", is_given,
            blocks=True, of="job"),
    Missing("trainer.fully_async.simulate_training", "less", "no step is taken: the training is simulated", blocks=True,
            of="job"),
    Missing(f"{_ENGINE}.model_dtype", "more", "memlab takes the inference engine's weights in 2 bytes",
            lambda value: value not in (None, "auto", "bfloat16", "float16", "half")),
    Missing(f"{_ENGINE}.speculative_config", "more", "the inference engine has a draft model too", is_given),
    *vllm_arguments(f"{_ENGINE}.engine_init_kwargs"),
    *megatron_missing(_MEGATRON),
    *padding_missing("trainer."),
)  # fmt: skip


WITHOUT_TRAINING = r"serve|main_(\w+_)?generate"
"""Names of the programs that only start an inference engine (``skyrl/train/entrypoints``, and Harbor's)."""
_EXAMPLES = frozenset(
    (
        *("main_async", "main_custom_adv_est", "main_custom_policy_loss", "main_dapo", "main_dapo_fully_async"),
        *("main_fully_async", "main_fully_async_sim", "main_llm_judge", "main_multiply", "main_on_policy_distill"),
        "main_tis_dapo",
    )
)
"""Programs in SkyRL's folder ``examples`` whose trainer and checks are SkyRL's, and whose generator is (a9564572)."""


def complete(reading: Reading) -> None:
    """Derives ranks, workload, recompute, attention and what leaves the device between phases."""
    values = reading.values
    refuse_program(reading, WITHOUT_TRAINING)
    complete_skyrl_adapters(reading, "trainer.policy.model.lora", _MEGATRON)
    note_program(reading)
    note_checkout(reading)
    note_reference(reading)
    strategy = values.pop("strategy")
    if strategy != "megatron":
        reading.blocked["job"].append(
            f"trainer.strategy {strategy}: memlab predicts this framework's jobs with Megatron only"
        )
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    note_replaced_values(reading, "trainer.policy.model_config_kwargs")
    note_replaced_values(reading, f"{_MEGATRON}.model_config_kwargs")
    if not values.pop("is_checkpointing"):
        values["recompute_granularity"] = None
    _note_parts_of_entropy(reading)
    is_flash = values.pop("is_flash")
    values["attention_backend"] = values.get("attention_backend") or ("flash" if is_flash else "fused")
    is_colocated = values.pop("is_colocated")
    values["offload_parameters"] = values["offload_gradients"] = values["offload_optimizer"] = is_colocated
    if values["expandable_segments"]:
        note_segments(reading, "trainer.use_expandable_segments")
    longest = longest_row(reading)
    prompts, responses = values.pop("prompts"), values.pop("responses_per_prompt")
    tokens, rows = values.pop("tokens_per_rank"), values.pop("log_prob_micro_batch_size")
    removes_padding = values.pop("removes_padding")
    note_skipped_passes(reading)
    # ``_save_lora_adapters_and_sync`` in workers/megatron/megatron_worker.py; by default adapters are merged.
    is_merged = reading.get(f"{_MEGATRON}.lora_config.merge_lora") is not False
    values["sends_adapters"] = values.get("lora_rank") is not None and not is_merged
    if tokens > 0:
        of_log_probs, rows = row_of_pass(reading, tokens, longest, responses), 1
    else:
        of_log_probs, rows = (longest * rows, 1) if removes_padding else (longest, rows)
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=values["ranks_per_node"],
        seq_length=of_log_probs,
        micro_batch_size=rows,
        bucket_bytes=int((values.pop("bucket") or 0) * 2**30),
        # ``_send_chunks_vllm_native`` in weight_sync/cuda_ipc_strategy.py packs them into one tensor.
        bucket_copies=2 if is_colocated else 1,
        freed_for_log_probabilities=() if is_colocated else freed_by_reference_model(reading),
        engine=engine_of(reading),
        quantization=f"{_ENGINE}.engine_init_kwargs.quantization",
    )
    if tokens > 0:
        if not removes_padding:
            note_padded_rows(reading, "trainer.max_tokens_per_microbatch")
        take_rows_of_budget(reading, tokens, longest, prompts * responses)
    else:
        key = "trainer.micro_train_batch_size_per_gpu" if removes_padding else None
        take_sequences(reading, longest, prompts * responses, packed_by=key)
    note_steps(reading)
    drop_single_chunk(values)


def check(reading: Reading) -> None:
    """Checks ``validate_batch_sizes`` of skyrl/train/utils/utils.py (0.3.0 and a9564572), and `check_turns`.

    Raises:
        CannotStartError: If a step's sequences of a copy of the model are no multiple of a micro-batch, or by turns.
    """
    check_rules(reading)
    check_turns(reading)
    keys = {"trainer.policy_mini_batch_size": 256, "generator.n_samples_per_prompt": 5}
    check_batches(reading, keys, ("trainer.micro_train_batch_size_per_gpu", 1), "SkyRL")


def _check_all(reading: Reading) -> None:
    """Checks the rules of both engines, and those of Megatron's.

    Raises:
        CannotStartError: If SkyRL or Megatron refuses the job.
    """
    check(reading)
    check_megatron(reading)
    check_model(reading, _MEGATRON)


def longest_row(reading: Reading) -> int:
    """Returns the tokens of the longest sequence, from the keys of lengths.

    Of several turns, each begins with at most the input length (skyrl_gym_generator.py). Agents of Harbor read neither
    length: their programs ask for the whole one (``main_harbor.py`` in examples/train_integrations/harbor, a9564572).
    """
    values = reading.values
    prompt = values.pop("prompt_length")
    longest: int = (values.pop("input_length") or prompt) + values.pop("response_length")
    if not _is_of_harbor(reading):
        return longest
    key = "trainer.algorithm.max_seq_len"
    whole = reading.get(key)
    if not is_whole_number(whole):
        reading.known.add(key)
        reading.questions.append(
            f"{key} is not in the file, and Harbor's program refuses a job without it: give --set {key}=TOKENS"
        )
        return longest
    reading.take(key, "longest", whole)
    return int(values.pop("longest"))


def _is_of_harbor(reading: Reading) -> bool:
    return reading.entries.program is not None and "harbor" in str(reading.entries.program.value)


def take_rows_of_budget(reading: Reading, tokens: int, longest: int, sequences: int) -> None:
    """Takes the micro-batches that SkyRL fills up to a budget; see `take_rows`."""
    known = None if _has_steps(reading) else sequences
    take_rows(reading, "trainer.max_tokens_per_microbatch", tokens, longest, known, are_shared_evenly=True)


def row_of_pass(reading: Reading, tokens: int, longest: int, responses: int) -> int:
    """Returns the tokens of a row that a budget fills in a pass for log-probabilities.

    Its sequences are those of the whole batch, or of each mini-batch (``_execute_forward_pass`` in
    skyrl/train/trainer.py, a9564572).
    """
    is_of_mini_batches = reading.get("trainer.recompute_old_logprobs_per_minibatch") is True
    kind, default = ("policy_mini", 256) if is_of_mini_batches else ("train", 1024)
    prompts = reading.get(f"trainer.{kind}_batch_size", default)
    is_known = is_whole_number(prompts) and not _has_steps(reading)
    return row_of_budget(reading, tokens, longest, of_one_copy(reading, prompts * responses) if is_known else None)[1]


def _has_steps(reading: Reading) -> bool:
    """Whether each step of an answer is a sequence, so that nothing says how many there are."""
    return reading.get("generator.step_wise_trajectories") is True


def note_steps(reading: Reading) -> None:
    """Says how many micro-batches a job may have where each step of an answer is a sequence; they are known already.

    Agents of Harbor take as many steps as they like. ``merge_stepwise_output`` joins those of which one begins with
    another.
    """
    steps, turns = "generator.step_wise_trajectories", reading.get("generator.max_turns", default=1)
    if not _has_steps(reading):
        return
    number, predicted = "the number of micro-batches", reading.values["num_microbatches"]
    is_of_budget, reading.micro_batches = reading.most_micro_batches is None, None
    entry = reading.entries.by_key.get("generator.max_turns")
    is_known = is_whole_number(turns) and not (entry is not None and entry.is_unknown)
    if is_known and not _is_of_harbor(reading) and not is_of_budget:
        reading.micro_batches = (predicted, predicted * turns)
        if turns == 1:
            return
        number += f", {predicted} to {predicted * turns} in a step,"
    reading.warnings.append(
        f"{steps}: each step of an answer is a sequence, so {number} depends on the data; memlab predicts one sequence "
        "for each answer; more of them need no more memory, unless experts are spread over ranks"
    )


def check_turns(reading: Reading) -> None:
    """Checks the input length of a generation (``validate_generator_cfg`` in skyrl/train/utils/utils.py, a9564572).

    Raises:
        CannotStartError: If SkyRL refuses it.
    """
    key, turns = "generator.max_input_length", reading.get("generator.max_turns", default=1)
    tokens, prompt = reading.get(key), reading.get("trainer.max_prompt_length", default=512)
    if not is_whole_number(tokens) or not is_whole_number(prompt) or not is_whole_number(turns):
        return
    if tokens < prompt or (tokens > prompt and turns == 1):
        rule = "be the same with generator.max_turns 1" if turns == 1 else "be at least as many"
        raise CannotStartError(
            f"{key} is {tokens} with trainer.max_prompt_length {prompt}, must {rule}, by a rule of SkyRL: change "
            "one of them"
        )


def compares(reading: Reading) -> bool:
    """Whether a penalty compares the policy with a reference model."""
    algorithm = "trainer.algorithm"
    compares = [reading.get(f"{algorithm}.use_kl_loss", default=True), reading.get(f"{algorithm}.use_kl_in_reward")]
    return any(compares)


def note_program(reading: Reading) -> None:
    """Says that a program is none that memlab knows: it may have another generator, and train on other sequences."""
    program = reading.entries.program
    name = "" if program is None else str(program.value).replace("/", ".")
    parts = name.removesuffix(".py").split(".")
    is_example = "examples" in parts and parts[-1] in _EXAMPLES
    if program is None or is_example or not {"skyrl", "skyrl_train"}.isdisjoint(parts):
        return
    reading.other_program = f"{name}, a program that memlab does not know,"
    reading.warnings.append(
        f"{program.place}: {name} is a program that memlab does not know: memlab takes it for SkyRL's, and does not "
        "see what else it does, such as how many sequences it trains on"
    )


def note_reference(reading: Reading) -> None:
    """Names what a reference model is configured with otherwise than the policy."""
    of_megatron = (f"megatron_config.{part}_config_kwargs" for part in ("transformer", "model"))
    for section in ("model_config_kwargs", "fsdp_config.wrap_policy", *of_megatron):
        note_other_section(reading, f"trainer.ref.{section}", f"trainer.policy.{section}", is_there=compares(reading))


def _note_parts_of_entropy(reading: Reading) -> None:
    """Notes where an entropy in the loss is computed in other parts of the tokens than memlab's."""
    for key, default in (("trainer.vocab_entropy_chunk_size", 0), ("trainer.vocab_entropy_chunk_memory_mb", 512)):
        if reading.values["entropy_loss"] and reading.get(key, default) != default:
            reading.miss(key, "either", "the entropy in the loss has other parts of the tokens at once")


def note_skipped_passes(reading: Reading) -> None:
    """Notes where a loss reads the engine's log-probabilities alone, so that there is no pass for the policy's own.

    See ``_skip_policy_forward`` in skyrl/train/trainer.py (main of August 2026). A correction for other policies needs
    them in any case.
    """
    algorithm = "trainer.algorithm"
    key = f"{algorithm}.policy_loss_type"
    kind, anchor = reading.get(key), reading.get(f"{algorithm}.cispo.cispo_anchor")
    reads_none = kind in ("rollout_is", "dppo") or (kind == "cispo" and anchor == "rollout")
    corrects = any(name.startswith(f"{algorithm}.off_policy_correction.") for name in reading.entries.by_key)
    if reads_none and not corrects and not compares(reading):
        reading.take(key, "computes_log_probabilities", value=False)


def freed_by_reference_model(reading: Reading) -> tuple[str, ...]:
    """Returns what is off the device in a pass for log-probabilities, although it is on it for generation.

    A reference model has the policy's GPUs (``placement.colocate_policy_ref``), and its pass comes first: the policy
    then leaves the device, and for its own pass the parameters alone return (``_ensure_on_gpu`` in
    skyrl/backends/skyrl_train/workers/worker_dispatch.py, 0.3.0).
    """
    is_together = reading.get("trainer.placement.colocate_policy_ref", default=True)
    return ("gradients", "optimizer state") if compares(reading) and is_together else ()


def engine_of(reading: Reading) -> tuple[str, str]:
    """Returns the key that chooses the inference engine, and the engine; versions before 0.3 have their own key."""
    for key in (f"{_ENGINE}.backend", "generator.backend"):
        if reading.get(key) is not None:
            return key, str(reading.get(key))
    return f"{_ENGINE}.backend", "vllm"


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    return of_any_length(composed(scenario, settings)) | {
        "strategy": "megatron",
        "is_flash": scenario.state.attention_backend != "fused",
        "is_checkpointing": settings.recompute_granularity is not None,
        "is_colocated": settings.offload_parameters,
        "expandable_segments": scenario.allocator.expandable_segments,
        "tokens_per_rank": tokens if is_packed(scenario) else -1,
        "removes_padding": is_without_padding(scenario),
        "input_length": None,
    }


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what SkyRL cannot express of a job."""
    reasons = cannot_write_of_rows(scenario)
    if settings.offload_gradients != settings.offload_parameters:
        reasons["offload_gradients"] = "SkyRL offloads gradients where it offloads parameters"
    if settings.offload_optimizer != settings.offload_parameters:
        reasons["offload_optimizer"] = "SkyRL offloads the optimizer state where it offloads parameters"
    return reasons


SKYRL = Framework(
    name="skyrl",
    title="SkyRL",
    source="0.3.0, and main of August 2026",
    transformer_engine="2.16",
    signs=Signs(looked_for="trainer.policy", key="trainer.policy."),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("skyrl") | megatron_without_effect(_MEGATRON),
    complete=complete,
    check=_check_all,
    complete_of_model=complete_provider,
    compose=compose,
    fixed=FIXED,
    packs=is_packed,
    padding_in_fp8=padding_in_fp8,
    cannot_write={name: reason for name, reason in CANNOT_WRITE.items() if name != "entropy_loss"}
    | {"allocator": "with trainer.use_expandable_segments=false, set the environment variable PYTORCH_CUDA_ALLOC_CONF"},
    without_own_key=frozenset(("offload_parameters", "offload_gradients", "offload_optimizer")),
    cannot_write_of=cannot_write,
    render=plain_lines,
)
