"""The critic of verl's PPO with Megatron, which trains on the actor's GPUs: a table of its own for the same files.

Names and defaults: ``verl/trainer/config/critic/`` (0.9.1). A critic has a head of one value for each token in place of
the output layer (``verl/models/mcore/bridge.py``).
"""

from __future__ import annotations

from dataclasses import replace

from memlab.jobs.frameworks.balanced_rows import take_rows_of_verl
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import COUNT, SWITCH, Key
from memlab.jobs.frameworks.reinforcement import note_padded_rows, take_sequences
from memlab.jobs.frameworks.verl import VERL, check_engine, has_critic, rows_of_all_ranks, take_allocator
from memlab.jobs.frameworks.verl_engine import complete_engine, engine_keys, engine_missing, engine_without_effect
from memlab.jobs.frameworks.verl_fsdp import chooses_fsdp

_PREFIXES = ("critic.megatron", "critic.optim", "critic.model")
_OF_THE_JOB = (
    *("model_engine", "nodes", "ranks_per_node", "prompts", "responses_per_prompt", "is_dynamic", "is_colocated"),
    *("allocator", "prompt_length", "response_length"),
)
KEYS = (
    *(key for key in VERL.keys if key.field in _OF_THE_JOB),
    *engine_keys(*_PREFIXES),
    # Those that are not given are the actor's.
    Key("critic.ppo_mini_batch_size", "prompts", COUNT),
    Key("critic.use_dynamic_bsz", "is_dynamic", SWITCH),
    Key("critic.ppo_max_token_len_per_gpu", "tokens_per_rank", COUNT, 32768),
    Key("critic.ppo_micro_batch_size_per_gpu", "micro_batch_size", COUNT, None),
)


def complete(reading: Reading) -> None:
    """Derives ranks, workload and gradients."""
    values = reading.values
    if chooses_fsdp({key: entry.value for key, entry in reading.entries.by_key.items()}):
        del values["model_engine"]
        reading.blocked["job"].append(
            "model_engine: the job trains with FSDP, and memlab predicts critics with Megatron only"
        )
    else:
        check_engine(reading)
    values.setdefault("world_size", values.pop("nodes") * values.pop("ranks_per_node"))
    complete_engine(reading, *_PREFIXES)
    longest = values.pop("prompt_length") + values.pop("response_length")
    sequences = values.pop("prompts") * values.pop("responses_per_prompt")
    is_dynamic, tokens = values.pop("is_dynamic"), values.pop("tokens_per_rank")
    removes_padding = values.pop("removes_padding")
    if values.pop("is_colocated"):  # in the same process
        take_allocator(reading)
    if is_dynamic:
        if not removes_padding:
            note_padded_rows(reading, "critic.model.use_remove_padding")
        key = "critic.ppo_max_token_len_per_gpu"
        take_rows_of_verl(reading, key, tokens, longest, sequences)
        return
    key = "critic.ppo_micro_batch_size_per_gpu"
    if values.get("micro_batch_size") is None:
        reading.warnings.append(f"{key} is not in the file, so memlab takes 1; verl refuses a job without it")
    take_sequences(reading, longest, sequences, packed_by=key if removes_padding else None)


def check(reading: Reading) -> None:
    """Checks that the job trains a critic.

    Raises:
        CannotStartError: If it does not.
    """
    key, value = has_critic(reading)
    reading.without_effect[key] = "it decides only whether there is a critic"
    if not value:
        raise CannotStartError(
            f"{key} is {reading.get(key)}, with which verl trains no critic: leave --format out, which predicts the "
            "actor's steps"
        )


VERL_CRITIC = replace(
    VERL,
    name="verl-critic",
    title="the critic of verl's PPO",
    keys=KEYS,
    missing=(
        *engine_missing(*_PREFIXES),
        rows_of_all_ranks("critic"),
        *(row for row in VERL.missing if row.name == "trainer.device"),
    ),
    without_effect=VERL.without_effect | VERL.names() | engine_without_effect(*_PREFIXES),
    decided_by=("critic.enable", "algorithm.adv_estimator"),
    complete=complete,
    check=check,
    fixed={"num_labels": 1, "checkpoint_input_remedy": VERL.fixed["checkpoint_input_remedy"]},
)
