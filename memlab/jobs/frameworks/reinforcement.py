"""What the frameworks of reinforcement learning have in common: packed rows, and as many passes as these fill."""

from __future__ import annotations

import math
import re
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture, published_architecture
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import shortened
from memlab.jobs.frameworks.adapters import kind_of
from memlab.jobs.frameworks.budgets import Counting, Step, by_first_fit
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import PARTS_OF_MULTIMODAL_MODELS, Missing, is_given, missing_under, refusal
from memlab.jobs.frameworks.megatron_lm import common, named
from memlab.jobs.model import is_quantized

FROZEN_ROUTER = "the frozen router has no gradients and no optimizer state"


def drop_frozen_parts(reading: Reading, architecture: Architecture) -> None:
    """Moves keys that freeze parts of multimodal models to those without effect where the job's model is none.

    Another architecture that the user gives in place of the job's says nothing about the job's own parts.
    """
    if published_architecture(str(reading.values.get("architecture"))) != architecture:
        return
    for key in [key for key in reading.entries.by_key if key.rpartition(".")[2] in PARTS_OF_MULTIMODAL_MODELS]:
        reading.not_modelled = [one for one in reading.not_modelled if one.key != key]
        reading.known.add(key)
        reading.without_effect[key] = "only multimodal models have parts that it can freeze"


def vllm_arguments(prefix: str) -> tuple[Missing, ...]:
    """Returns the rows of vLLM's own arguments below a prefix; ``speculative_config`` is a text or a mapping."""
    draft, quantized = "the inference engine has a draft model too", "the inference engine's weights are quantized"
    rows = (
        *(Missing(f"speculative_config{end}", "more", draft, is_given) for end in ("", ".method", ".model")),
        Missing("quantization", "less", quantized, is_given),
        Missing("cpu_offload_gb", "less", "a part of the inference engine's weights is on the host", is_given),
        Missing("kv_cache_memory_bytes", "either",
                "the engine takes its weights and these bytes in place of its share of the memory", is_given),
    )  # fmt: skip
    return missing_under(prefix, rows)


def sglang_arguments(prefix: str) -> tuple[Missing, ...]:
    """Returns the rows of SGLang's own arguments, after a prefix such as ``sglang_``."""
    return (
        Missing(f"{prefix}enable_dp_attention", "more", "each of the engine's ranks has the whole attention"),
        Missing(f"{prefix}speculative_algorithm", "more", "the inference engine has a draft model too", is_given),
        Missing(f"{prefix}quantization", "less", "the inference engine's weights are quantized", is_given),
        Missing(f"{prefix}cpu_offload_gb", "less", "a part of the inference engine's weights is on the host", is_given),
    )


def copies(reading: Reading) -> int:
    """Returns how many copies of the model the job has; 1 where its sizes do not divide."""
    values = reading.values
    per_copy = math.prod(
        values.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "context", "pipeline_model")
    )
    world_size = values.get("world_size") or per_copy
    return int(max(1, world_size // max(1, per_copy)))


def take_rows(
    reading: Reading,
    key: str,
    tokens_per_rank: int,
    longest: int | None,
    sequences: int | None,
    *,
    counted: Counting = by_first_fit,
    is_refused: bool = False,
    are_shared_evenly: bool = False,
) -> None:
    """Takes packed micro-batches: rows of so many tokens on each rank.

    Args:
        reading: The job; its sizes are known already.
        key: The key of the budget.
        tokens_per_rank: The budget of one rank; context parallel ranks share a row.
        longest: Tokens of the longest sequence, where it is known.
        sequences: Sequences of a step over all copies, where they are known.
        counted: How the framework counts the rows.
        is_refused: Whether the framework stops at a sequence above the budget, and gives it no row of its own.
        are_shared_evenly: Whether each copy of the model has as many sequences as each other, and fills its rows with
            these; else a row may hold any of the step's.

    Raises:
        ValueError: If the budget is no number of tokens.
    """
    values = reading.values
    if tokens_per_rank < 1:
        entry = reading.entries.by_key.get(key)
        place = "the default of other keys" if entry is None else entry.place
        raise refusal(place, key, tokens_per_rank, "must be at least 1")
    (unit, _), context = _units(reading), values.get("context_parallel_size") or 1
    full = row_of_budget(reading, tokens_per_rank)[1]
    among = of_one_copy(reading, sequences) if are_shared_evenly else sequences
    filled, row = row_of_budget(reading, tokens_per_rank, longest, among, is_refused=is_refused)
    if longest and longest > full:
        instead = (
            f"rows of {row:,} tokens, since the job stops at a longer sequence"
            if is_refused
            else "rows of the longest sequence alone, as the framework makes them"
        )
        reading.warnings.append(
            f"{key}: the longest sequence has {longest:,} tokens, and a row {full:,}: memlab predicts {instead}"
        )
    if not longest:
        reading.assumed.append("how long sequences are")
        reading.warnings.append(
            f"{key}: the file does not say how long the data's sequences are: memlab predicts rows of {row:,} tokens, "
            "and a sequence that is longer makes a longer row"
        )
    reading.take(key, "seq_length", row)
    values["micro_batch_size"] = 1
    sequences_of_row = math.ceil(filled / longest) if longest else 1
    pack(reading, key, min(sequences_of_row, values["seq_length"] // unit))
    rows, turn, stages = None, 1, values.get("pipeline_model_parallel_size") or 1
    if sequences:
        rows = counted(Step(math.ceil(sequences / copies(reading)), tokens_per_rank * context, longest))
        # Chunks of a pipeline take turns with as many micro-batches as there are stages.
        turn = stages if (values.get("virtual_pipeline_model_parallel_size") or 1) > 1 else 1
        rows = math.ceil(rows / turn) * turn
        reading.micro_batches = (turn, rows)
    reading.most_micro_batches = rows
    values["num_microbatches"] = _full_rows(rows, stages)
    if not turn == rows == values["num_microbatches"]:
        reading.warnings.append(more_rows(reading, key))


def more_rows(reading: Reading, key: str) -> str:
    """Says that a step may have other micro-batches than the predicted ones, with the key of their budget."""
    turn, rows = reading.micro_batches or (1, None)
    number = f"their number, {turn} to {rows} in a step, depends" if rows else "their number depends"
    why = f"a step has {turn}" if turn == rows else f"micro-batches are filled up to a budget, so {number} on the data"
    return (
        f"{key}: {why}; memlab predicts {reading.values['num_microbatches']}, all full; more of them need no more "
        "memory, unless experts are spread over ranks"
    )


def of_one_copy(reading: Reading, sequences: int | None) -> int | None:
    """Returns the sequences that each copy of the model has, of those of all copies."""
    return math.ceil(sequences / copies(reading)) if sequences else None


def row_of_budget(
    reading: Reading,
    tokens_per_rank: int,
    longest: int | None = None,
    sequences: int | None = None,
    *,
    is_refused: bool = False,
) -> tuple[int, int]:
    """Returns the tokens of the padded sequences that fill a row, and of the row, which is padded itself.

    Args:
        reading: The job; its sizes are known already.
        tokens_per_rank: The budget of one rank; context parallel ranks share a row.
        longest: Tokens of the longest sequence, where it is known.
        sequences: Among which a row has its own, where they are known: if all of them do not fill the budget, rows are
            smaller, however long sequences are.
        is_refused: As in `take_rows`.
    """
    (unit, unit_of_row), context = _units(reading), reading.values.get("context_parallel_size") or 1
    filled = max(1, tokens_per_rank * context // unit) * unit
    if longest and sequences:
        filled = min(filled, sequences * max(1, -(-longest // unit)) * unit)
    row = -(-filled // unit_of_row) * unit_of_row
    if longest and longest > row and not is_refused:
        filled = row = -(-longest // unit_of_row) * unit_of_row
    return filled, row


def pack(reading: Reading, key: str, sequences: int) -> None:
    """Takes that so many sequences share the row of each micro-batch."""
    # Megatron's own attention, "local", is predicted as "unfused", and neither has packed sequences.
    values = reading.values
    if values.get("attention_backend") in ("unfused", "local") or values.get("transformer_impl") == "local":
        reading.miss(key, "either", "the sequences of a row are predicted as one sequence")
    else:
        values["packed_sequences"] = sequences


def _units(reading: Reading) -> tuple[int, int]:
    """Returns what frameworks pad sequences to a multiple of, and rows of packed sequences.

    Tensor parallel ranks share a sequence, and context parallel ranks have two chunks of it each. In FP8 a framework
    pads more.
    """
    tensor, context = (reading.values.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "context"))
    unit = int(tensor * (2 * context if context > 1 else 1))
    if reading.padding_in_fp8 is None or not reading.values.get("fp8_format"):
        return unit, unit
    return reading.padding_in_fp8(unit, context, str(reading.values.get("fp8_recipe")))


def _full_rows(rows: int | None, stages: int) -> int:
    """Returns the rows to predict: a multiple of the pipeline stages, from which on more rows need no more memory."""
    most = 2 * stages
    return -(-min(most, max(1, rows or most)) // stages) * stages


def is_packed(scenario: Scenario) -> bool:
    """Whether a budget of tokens describes the workload, so that `take_rows` reads the same rows back.

    Of packed sequences it reads no more rows than `_full_rows`: with one more, a step needs no more memory.
    """
    if scenario.packed_sequences is not None:
        return math.ceil(scenario.seq_length / longest_sequence(scenario)) == scenario.packed_sequences
    passes = scenario.num_microbatches
    if scenario.micro_batch_size > 1 or _full_rows(passes, scenario.layout.pipeline_model_parallel_size) != passes:
        return False
    return scenario.keeps_scores


def longest_sequence(scenario: Scenario) -> int:
    """Returns the tokens of the longest sequence."""
    return max(scenario.sequence_lengths or (scenario.seq_length,))


def sequences_of_a_step(scenario: Scenario) -> int:
    """Returns the sequences of a step over all copies, so many that `take_rows` makes as many rows of them."""
    rows, copies_of_model = scenario.num_microbatches, scenario.layout.data_parallel_size
    if not is_packed(scenario):
        return scenario.micro_batch_size * rows * copies_of_model
    return rows * scenario.seq_length // longest_sequence(scenario) * copies_of_model


def composed(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns the values by the tables' fields of a job that trains on a budget of tokens, or on sequences of a batch.

    Each framework takes those that its table has: half of the longest sequence is a prompt, of which each has one
    response, as `take_rows` and `take_sequences` read them back.
    """
    is_row, longest, sequences = is_packed(scenario), longest_sequence(scenario), sequences_of_a_step(scenario)
    return (
        common(scenario, settings)
        | named(scenario)
        | {
            **dict.fromkeys(("is_packed", "is_dynamic"), is_row),
            **dict.fromkeys(("prompts", "sequences"), sequences),
            "kind_of_adapters": kind_of(scenario),
            "removes_padding": is_row or scenario.micro_batch_size == 1,
            "responses_per_prompt": 1,
            "longest": longest,
            "prompt_length": longest // 2,
            "response_length": longest - longest // 2,
        }
    )


def of_any_length(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a job's values with a dispatcher that takes sequences of variable length; `names_dispatcher` says so."""
    is_other = values.get("moe_token_dispatcher_type") == "allgather"
    return values | ({"moe_token_dispatcher_type": "alltoall"} if is_other else {})


def names_dispatcher(scenario: Scenario, title: str) -> dict[str, str]:
    """Names the dispatcher that takes no sequences of variable length, which Megatron-Core refuses."""
    if scenario.state.moe_token_dispatcher_type != "allgather":
        return {}
    return {"moe_token_dispatcher_type": f"{title}'s sequences have any length, with which Megatron refuses allgather"}


def note_other_reference(reading: Reading, pairs: dict[str, tuple[str, str, Any, Any]]) -> None:
    """Names what a reference model has otherwise than the policy, whose model and ranks memlab predicts its pass with.

    Args:
        pairs: By the reference model's key: the policy's, what both say, the policy's default, and the reference
            model's, which is None where it has the policy's value.
    """
    for own, (of_policy, what, default, own_default) in pairs.items():
        policy = reading.get(of_policy, default)
        if reading.get(own, policy if own_default is None else own_default) != policy:
            reading.miss(own, "either", f"the reference model's pass is predicted with {what} of the policy")


def note_other_section(reading: Reading, own: str, of_policy: str, *, is_there: bool) -> None:
    """Names each key of a section of the reference model that the policy's section does not have with the same value.

    Args:
        own: The reference model's section.
        of_policy: The policy's.
        is_there: Whether the job has a reference model.
    """
    for key, entry in reading.entries.by_key.items():
        name = key.removeprefix(f"{own}.")
        if name == key:
            continue
        reading.known.add(key)
        is_of_training = name.startswith("recompute_")
        if (
            is_there
            and not is_of_training
            and entry.value not in (None, {}, reading.entries.get(f"{of_policy}.{name}"))
        ):
            reading.miss(key, "either", "the reference model's pass is predicted with the policy's configuration")


_OF_A_ROLLOUT = (
    "computes_log_probabilities", "engine_bytes", "engine_has_own_weights", "engine_sleeps", "sends_adapters",
    "gathers_model_at_once", "keeps_cache", "gathers_model_for_passes", "entropy_bytes_of_logit", "entropy_tokens",
    "host_copies_of_shards",
)  # fmt: skip
"""Fields of `Rollout` that a framework's module leaves among a job's values."""


def take_rollout(
    reading: Reading,
    *,
    is_colocated: bool,
    ranks_per_node: int,
    seq_length: int | None,
    micro_batch_size: int | None = 1,
    bucket_bytes: int | None = None,
    bucket_share: float | None = None,
    engine: tuple[str, str] = ("", "vllm"),
    quantization: str,
    **others: Any,
) -> None:
    """Takes what the job does between training steps.

    Args:
        reading: The job, with the engine's keys among its values.
        is_colocated: Whether the inference engine has the GPUs that the training has.
        ranks_per_node: Of the training.
        seq_length: Tokens of a row for log-probabilities; None takes those of training.
        micro_batch_size: Rows of such a pass; None takes 1.
        bucket_bytes: Of the weight sync, where a key says it.
        bucket_share: Of the free memory, that the framework takes for the bucket where no key says it.
        engine: The key that chooses the inference engine, and the engine.
        quantization: The key that quantizes the engine's weights; without it, the checkpoint decides.
        **others: Further fields of `Rollout`; those of `_OF_A_ROLLOUT` are among the job's values.
    """
    values = reading.values
    name, said = str(values.get("architecture")), {one.key for one in reading.not_modelled}
    if is_quantized(name) and engine[1] != "megatron" and quantization not in said:
        reading.miss(
            quantization,
            "less",
            f"the inference engine's weights are quantized, as in the checkpoint {shortened(name)}",
        )
    if is_colocated:
        _note_engine(reading, *engine)
    share = values.pop("engine_share", None)
    if share is not None and not 0 <= share <= 1:
        reading.warnings.append(
            f"the inference engine's share of the GPU's memory is {shortened(share)}, must be from 0 to 1, so memlab "
            "does not count the engine: correct it"
        )
        share = None
    reading.rollout = Rollout(
        is_colocated=is_colocated,
        ranks_per_node=max(1, ranks_per_node),
        seq_length=max(1, seq_length or values.get("seq_length") or 1),
        micro_batch_size=max(1, micro_batch_size or 1),
        gpu_memory_utilization=share,
        engine_ranks=_count(values, "engine_ranks") * _count(values, "engine_stages"),
        engine_data_ranks=_count(values, "engine_data_ranks"),
        bucket_bytes=bucket_bytes,
        bucket_share=bucket_share if bucket_bytes is None else None,
        **{name: values.pop(name) for name in _OF_A_ROLLOUT if name in values},
        **others,
    )


def _note_engine(reading: Reading, key: str, engine: str) -> None:
    """Notes in what an engine's share of the memory differs from vLLM's, which is one of the whole GPU.

    SGLang 0.5.23 leaves ``1 - mem_fraction_static`` of what is free when it loads its weights for everything else
    (``pre_model_load_memory`` in sglang/srt/mem_cache/kv_cache_configurator.py).
    """
    if engine == "sglang":
        reading.miss(
            key,
            "either",
            "SGLang takes its share of the memory that is free when it starts, for weights and its cache of keys and "
            "values: activations and CUDA graphs come on top; memlab takes that share of the whole GPU",
        )
    elif engine == "trtllm":
        reading.values["engine_share"] = None
        reading.miss(key, "more", "TensorRT-LLM takes a share of the memory that is free after its weights")
    elif engine not in ("vllm", "megatron"):
        reading.values["engine_share"] = None
        reading.miss(key, "either", "memlab does not know how much memory this inference engine takes")


def note_replaced_values(reading: Reading, prefix: str) -> None:
    """Notes what a job replaces in the published model's own config.

    Args:
        prefix: Of the mapping that the framework passes on, such as ``policy.hf_config_overrides``.
    """
    taken = {one.key for one in reading.taken}
    for key, entry in reading.entries.by_key.items():
        if not key.startswith(f"{prefix}.") or key in taken:
            continue
        reading.known.add(key)
        if key.endswith(".freeze_moe_router"):
            if entry.value:
                reading.miss(key, "less", FROZEN_ROUTER)
        elif key.endswith(".max_position_embeddings"):
            reading.without_effect[key] = "rotary positions are computed for the rows of the job"
        elif is_given(entry.value) and not key.endswith(".attn_implementation"):
            reading.miss(key, "either", "it replaces a value of the published model")


def note_segments(reading: Reading, key: str) -> None:
    """Says what is built before a framework switches expandable segments on, and stays on the device."""
    if not reading.values.get("offload_parameters"):
        reading.warnings.append(
            f"{key}: expandable segments are switched on after the model is built, so its parameters and gradients "
            "stay in segments of fixed size; memlab predicts all in expandable segments"
        )


def only_segments(scenario: Scenario, title: str) -> dict[str, str]:
    """Names the allocator's settings where a framework makes its own, whatever the environment says."""
    if scenario.allocator == AllocatorSettings(expandable_segments=True):
        return {}
    return {"allocator": f"{title} switches expandable segments on, and nothing else"}


def _count(values: dict[str, Any], name: str) -> int:
    """Takes a number of ranks, which is at least 1, out of a job's values."""
    return max(1, values.pop(name, None) or 1)


def take_sequences(
    reading: Reading, longest: int | None, sequences: int | None, *, packed_by: str | None = None
) -> None:
    """Takes micro-batches of so many sequences, and as many passes as a copy's sequences make.

    Args:
        reading: The job; its sizes are known already.
        longest: Tokens of the longest sequence, to which the framework pads; None leaves the length.
        sequences: Sequences of a step over all copies, where they are known.
        packed_by: The key of the micro-batch, where its sequences without their padding are one row; else, and where
            one sequence is a micro-batch, each sequence is a row.
    """
    if longest:
        unit, _ = _units(reading)
        reading.values["seq_length"] = -(-longest // unit) * unit
    if sequences:
        reading.values["num_microbatches"] = _passes(reading, sequences)
    if packed_by is not None and longest:
        pack_micro_batch(reading, packed_by)


def pack_micro_batch(reading: Reading, key: str) -> None:
    """Takes the sequences of a micro-batch as one row.

    Args:
        reading: The job; the number of its sequences and their length are known already.
    """
    rows = reading.values.get("micro_batch_size") or 1
    if rows > 1:
        _, unit = _units(reading)
        reading.take(key, "seq_length", -(-rows * reading.values["seq_length"] // unit) * unit)
        reading.take(key, "micro_batch_size", 1)
        pack(reading, key, rows)


def note_padded_rows(reading: Reading, *keys: str) -> None:
    """Notes that micro-batches of a budget of tokens have padding too, by the key that a job gives, or its default."""
    key = next((key for key in keys if key in reading.entries.by_key), keys[0])
    if not any(one.key == key for one in reading.not_modelled):
        reading.miss(key, "more", "rows are padded")


def check_batches(reading: Reading, factors: dict[str, int], micro: tuple[str, int], title: str) -> None:
    """Checks that the sequences of a copy of the model in a step are a multiple of a micro-batch.

    Args:
        reading: Of the job, with its layout.
        factors: Keys whose product is the step's sequences, each with its default.
        micro: The key of a micro-batch's sequences, with its default.
        title: The framework that asserts it.

    Raises:
        CannotStartError: If they are not.
    """
    counts = {key: reading.get(key) or default for key, default in factors.items()}
    key, size = micro[0], reading.get(micro[0]) or micro[1]
    own = math.prod(counts.values()) // max(1, copies(reading))
    if own < 1 or own % size:
        words = " x ".join(f"{name} {count}" for name, count in counts.items())
        raise CannotStartError(
            f"a copy of the model has {own} sequences in a step ({words}, by the copies), must be a multiple of {key}, "
            f"{size}, by a rule of {title}: change one of them",
            "micro_batch_size",
        )


def refuse_program(reading: Reading, names: str, does: str = "generates") -> None:
    """Refuses a job of a program that trains nothing.

    Args:
        names: A pattern that the whole name of such a program or module has, without what it lies in.
    """
    program = reading.entries.program
    if program is not None and re.search(rf"(^|[./])({names})([.]py)?$", str(program.value)):
        reading.blocked["job"].append(f"{program.value} ({program.place}): it {does} and does not train")


def _passes(reading: Reading, sequences: int) -> int:
    """Returns how many micro-batches a copy of the model has in a step."""
    per_pass = max(1, (reading.values.get("micro_batch_size") or 1) * copies(reading))
    passes = max(1, sequences // per_pass)
    if sequences % per_pass:
        reading.warnings.append(
            f"a step has {sequences} sequences, which is no multiple of {per_pass} (micro-batch x copies of the "
            f"model): memlab takes {passes} micro-batch{'es' if passes > 1 else ''}"
        )
    return passes
