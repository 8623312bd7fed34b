"""Rules of verl that concern no memory, and refuse a job: of its configuration's classes and of its workers.

They are in 0.9.1 and in 1dda039b (August 2026), and in 0.7.0 unless the key is newer.
"""

from __future__ import annotations

import math

from memlab.config.validation import is_whole_number
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.own_rules import Rule, broken, check_dispatcher, one_of
from memlab.jobs.frameworks.reinforcement import copies
from memlab.jobs.frameworks.verl_checkout import BEFORE, RELEASE, release_around

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ENGINES = ("vllm", "sglang", "trtllm")
_TYPES = ("fp32", "float32", "32", "bf16", "bfloat16")


_OF_ROLLOUT: tuple[Rule, ...] = (
    (f"{_ROLLOUT}.mode", lambda value, _: value == "sync", "must be async: leave it out"),
    (f"{_ROLLOUT}.name", lambda value, _: value == "hf", "must be vllm, sglang or trtllm: choose one"),
    (
        f"{_ROLLOUT}.pipeline_model_parallel_size",
        lambda value, reading: isinstance(value, int) and value > 1 and reading.get(f"{_ROLLOUT}.name") in _ENGINES,
        "must be 1 for this inference engine: leave it out",
    ),
    one_of(
        f"{_ACTOR}.loss_agg_mode",
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
)
"""``RolloutConfig`` and ``ActorConfig`` (verl/workers/config), ``get_rollout_class`` (verl/workers/rollout/base.py)."""


def _of_engine(engine: str, optim: str) -> tuple[Rule, ...]:
    """Returns the rules of ``McoreEngineConfig``, ``McoreOptimizerConfig`` and ``MegatronEngine``."""
    return (
        (f"{engine}.use_mbridge", lambda value, _: value is False, "must be true: leave it out"),
        one_of(f"{engine}.router_replay.mode", "disabled", "R2", "R3"),
        one_of(f"{engine}.dtype", "bfloat16", "float16"),
        (
            f"{engine}.dynamic_context_parallel",
            lambda value, reading: value is True and not reading.get(f"{engine}.max_seqlen_per_dp_cp_rank"),
            "needs max_seqlen_per_dp_cp_rank: give it a number of tokens",
        ),
        *(one_of(f"{optim}.{name}", *_TYPES) for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    )


def check_rollout(reading: Reading, *, has_one_engine: bool) -> None:
    """Checks what the inference engine and its passes are asked for.

    Args:
        has_one_engine: Whether all versions that memlab knows train it with the engine of 0.9.1, and not with a worker
            that has fewer rules.

    Raises:
        CannotStartError: If a version of verl that the job names refuses it.
    """
    _check(reading, _OF_ROLLOUT)
    _check_dynamic(reading, has_one_engine=has_one_engine)
    _check_ranks_of_engine(reading)


def check_fsdp(reading: Reading, optim: str) -> None:
    """Checks ``FSDPOptimizerConfig``.

    Args:
        optim: The prefix of the optimizer's keys.

    Raises:
        CannotStartError: If verl refuses it.
    """
    _check(reading, (one_of(f"{optim}.lr_scheduler_type", "constant", "cosine"),))


def _check_dynamic(reading: Reading, *, has_one_engine: bool) -> None:
    """Checks ``init_model`` in verl/workers/engine_workers.py."""
    key, own = f"{_ROLLOUT}.log_prob_use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"
    is_dynamic = reading.get(own) or False
    of_passes = reading.get(key, is_dynamic) or False
    if reading.version == BEFORE or of_passes == is_dynamic:
        return
    text = f"{key} is {of_passes} with {own} {is_dynamic}, which verl refuses: set both to the same"
    if reading.version is not None or has_one_engine:
        raise CannotStartError(text)
    reading.warnings.append(text)


def _check_ranks_of_engine(reading: Reading) -> None:
    """Checks ``RolloutConfig``, and that engines have all ranks (``init_model``, and fsdp_workers.py since 0.1)."""
    _check_ranks(reading)
    key = f"{_ROLLOUT}.expert_parallel_size"
    experts, name = reading.get(key), reading.get(f"{_ROLLOUT}.name")
    sizes = [
        reading.get(f"{_ROLLOUT}.{size}", default)
        for size, default in (("tensor_model_parallel_size", 2), ("data_parallel_size", 1))
    ]
    if name == "trtllm" or not all(isinstance(size, int) for size in (experts, *sizes)):
        return
    if experts > 1 and experts != math.prod(sizes):
        raise CannotStartError(
            f"{key} is {experts}, must be tensor_model_parallel_size x data_parallel_size ({sizes[0]} x {sizes[1]}), "
            "by a rule of verl: change one of them"
        )
    if key in reading.entries.by_key:
        reading.without_effect[key] = "the engine spreads experts over its tensor and data parallel ranks in any case"


def _check_ranks(reading: Reading) -> None:
    kinds = {"tensor_model_parallel_size": 2, "data_parallel_size": 1, "pipeline_model_parallel_size": 1}
    entries, keys = reading.entries.by_key, {f"{_ROLLOUT}.{kind}": default for kind, default in kinds.items()}
    if next(iter(keys)) not in entries or any(entries[key].is_unknown for key in keys if key in entries):
        return
    has_own = any(key in entries for key in ("rollout.n_gpus_per_node", "rollout.nnodes"))
    sizes = [reading.get(key, default) for key, default in keys.items()]
    ranks = reading.values.get("world_size")
    if has_own or reading.get("actor_rollout_ref.hybrid_engine", default=True) is not True:
        return
    if all(is_whole_number(size) for size in (*sizes, ranks)) and ranks % math.prod(sizes):
        raise CannotStartError(
            f"an engine has {math.prod(sizes)} ranks (tensor, data and pipeline parallel sizes of {_ROLLOUT}), must "
            f"divide the {ranks} ranks of the job by a rule of verl: change one of them"
        )


def check_megatron(reading: Reading, engine: str, optim: str) -> None:
    """Checks an engine that runs Megatron, and its optimizer.

    Args:
        engine: The prefix of the engine's keys.
        optim: Of the optimizer's.

    Raises:
        CannotStartError: If verl or Megatron-Core refuses the job.
    """
    # ``provider_overrides`` of the engine (transformer_impl.py) has sequences of variable length since 0.5.
    check_dispatcher(reading, "verl", [f"{engine}.override_transformer_config"])
    rules = _of_engine(engine, optim)
    if reading.version == RELEASE:
        rules += ((f"{engine}.grad_offload", lambda *_: True, "is no key of this version: leave it out"),)
    _check(reading, rules)


def check_micro_batches(reading: Reading, keys: list[str]) -> None:
    """Checks the sequences of micro-batches (``validate_config`` and ``ActorConfig``), since verl 0.2.

    Args:
        reading: Of a job whose batches are not dynamic.
        keys: Of the sequences of all ranks; those of a rank have ``_per_gpu`` behind it.

    Raises:
        CannotStartError: If both are given, or none where the job says so.
    """
    entries = reading.entries
    for key in keys:
        own = f"{key}_per_gpu"
        found = [entries.by_key[one] for one in (key, own) if one in entries.by_key]
        if any(entry.is_unknown for entry in found):
            continue
        given = [entry for entry in found if entry.value is not None]
        if len(given) == 2:
            raise CannotStartError(
                f"{key} is {given[0].value} with {own} {given[1].value}, which verl refuses together: leave {key} out"
            )
        is_late = (release_around(reading.path) or ((0, 2),))[0] >= (0, 2)
        if found and not given and is_late:  # a file without them may be a part of a job's keys
            raise CannotStartError(
                f"{found[0].key} is null, and verl refuses a job without sequences of a micro-batch unless batches are "
                f"dynamic: give {own}",
                "micro_batch_size",
            )


def check_step(reading: Reading, sequences: tuple[str, str], of_micro_batch: str | None) -> None:
    """Checks that the sequences of a step fill its micro-batches (``validate_config``, since verl 0.2).

    Args:
        reading: Of a job whose batches are not dynamic.
        sequences: The keys of a step's prompts and of their responses.
        of_micro_batch: The key of a rank's sequences with Megatron; None with FSDP, which counts ranks alone.

    Raises:
        CannotStartError: If they do not.
    """
    prompts, responses = reading.get(sequences[0]), reading.get(sequences[1], default=1)
    size = 1 if of_micro_batch is None else reading.get(of_micro_batch)
    ranks = reading.values.get("world_size") if of_micro_batch is None else copies(reading)
    if not (is_whole_number(prompts) and is_whole_number(responses) and is_whole_number(size) and ranks):
        return
    if prompts * responses % (ranks * size):
        raise CannotStartError(
            f"{sequences[0]} x the responses is {prompts * responses} sequences, must be a multiple of {ranks * size} "
            f"({'ranks' if of_micro_batch is None else f'copies of the model x {of_micro_batch}'}), by a rule of verl: "
            "change one of them",
            "micro_batch_size",
        )


def _check(reading: Reading, rules: tuple[Rule, ...]) -> None:
    """Checks what a version from before 0.7 may take, so that a job of no known version is only warned of."""
    if reading.version == BEFORE:
        return
    for entry, text in broken(reading, rules):
        if reading.version is not None:
            raise CannotStartError(f"{text}, by a rule of verl {reading.version}")
        reading.warnings.append(f"{entry.place}: {text}, by a rule of verl's later versions, which refuse the job")
