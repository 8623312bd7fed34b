"""The teacher of NeMo-RL's distillation, which has processes of its own on the student's GPUs: a policy by its keys.

``setup`` in nemo_rl/algorithms/distillation.py (7ea279ab) makes a policy of the section ``teacher``, without gradients
and optimizer, on the ranks that train. The student decides how long sequences are, and where they are generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from memlab.jobs.entries import Entries
from memlab.jobs.frameworks.framework import Framework, Reading
from memlab.jobs.frameworks.keys import COUNT, Key
from memlab.jobs.frameworks.nemo_rl import NEMO_RL
from memlab.jobs.frameworks.nemo_rl_dtensor import NEMO_RL_DTENSOR, chooses_dtensor
from memlab.jobs.frameworks.reinforcement import more_rows

_OF_STUDENT = ("policy.generation", "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by")
_OF_TRAINING = (
    *("policy.megatron_cfg.optimizer", "policy.megatron_cfg.distributed_data_parallel_config", "policy.draft"),
    *("policy.megatron_cfg.empty_unused_memory_level", "policy.router_replay", "teacher", "loss_fn"),
)
"""What a model without gradients and optimizer does not read."""
_SECTION = re.compile(rf"\bpolicy\.(?!{'|'.join(re.escape(key.partition('.')[2]) for key in _OF_STUDENT)})")


def of_section(entries: Entries) -> Entries:
    """Returns the entries of a job whose policy is the teacher."""
    kept = {
        key: entry
        for key, entry in entries.by_key.items()
        if key.startswith(_OF_STUDENT) or not key.startswith(("policy.", "teacher."))
    }
    for key, entry in entries.by_key.items():
        name = key.replace("teacher.", "policy.", 1)
        if key.startswith("teacher.") and not name.startswith(_OF_STUDENT):
            kept[name] = replace(entry, key=name)
    return replace(entries, by_key=kept)


def as_in_file(text: str) -> str:
    """Names the keys of a text as the file does."""
    return _SECTION.sub("teacher.", text)


_AS_TRAINED = {
    "log_prob_packed_tokens": "packed_tokens",
    "log_prob_dynamic_tokens": "dynamic_tokens",
    "log_prob_micro_batch_size": "micro_batch_size",
}


def complete_dtensor(reading: Reading) -> None:
    """Derives what a DTensor policy's keys mean in such passes: each micro-batch's logits go to the host at once."""
    _take_rows(reading)
    if not chooses_dtensor({key: entry.value for key, entry in reading.entries.by_key.items()}):
        reading.questions.append(
            "the teacher has Megatron's engine, and the student DTensor's, which memlab does not predict together: "
            "give --format nemo-rl-teacher to predict the teacher alone, or --set teacher.megatron_cfg.enabled=false "
            "and --set teacher.dtensor_cfg.enabled=true for a teacher with DTensor"
        )
    NEMO_RL_DTENSOR.complete(reading)
    reading.not_modelled = [one for one in reading.not_modelled if not one.key.startswith(_OF_TRAINING)]


def _take_rows(reading: Reading) -> None:
    values = reading.values
    prompts, responses = values.pop("prompts_of_teacher"), values.pop("responses_of_teacher")
    if prompts is not None:
        values["sequences"] = prompts * (responses or 1)
    for own, trained in _AS_TRAINED.items():
        given = values.get(own)
        if trained != "micro_batch_size" or given is not None:
            values[trained] = given


def complete(reading: Reading) -> None:
    """Derives what the policy's keys mean where its rows are those of passes without gradients, of all sequences."""
    values = reading.values
    _take_rows(reading)
    chunk = values["logprobs_chunk_size"]
    NEMO_RL.complete(reading)
    values["logprobs_chunk_size"] = chunk
    # The weights leave the device after the passes, wherever the job generates (``distillation_train``).
    values["offload_parameters"] = True
    passes = reading.most_micro_batches
    if reading.rollout is None or passes == 0:
        return
    reading.rollout = replace(reading.rollout, num_passes=passes)
    *others, row = reading.taken
    of_training = more_rows(reading, row.key)
    reading.taken = [*others, replace(row, key=row.key.replace("train_mb", "logprob_mb"))]
    reading.warnings = [one for one in reading.warnings if one != of_training]
    reading.warnings.append(
        f"{reading.taken[-1].key}: passes are filled up to a budget, so their number depends on the data; memlab "
        f"predicts {passes or values['num_microbatches']}, all full, of each of which the largest logits stay until "
        "the last has ended"
    )


_KEYS = (
    Key("distillation.num_prompts_per_step", "prompts_of_teacher", COUNT, None),
    Key("distillation.num_generations_per_prompt", "responses_of_teacher", COUNT, None),
)


_ENGINE = "policy.megatron_cfg.enabled"
_WITHOUT_MEGATRON = (
    "a teacher with DTensor beside a student with Megatron's engine, which memlab does not predict together: give "
    "--format nemo-rl-dtensor-teacher to predict the teacher alone, or --set teacher.megatron_cfg.enabled=true"
)


def _of_teacher(policy: Framework, name: str, title: str, complete: Callable[[Reading], None]) -> Framework:
    """Returns the format of the teacher beside a policy's: what only training reads has no effect on it."""
    of_training = {row.name for row in policy.missing if row.name.startswith(_OF_TRAINING)}
    missing = (row for row in policy.missing if row.name not in of_training)
    return replace(
        policy,
        name=name,
        title=title,
        missing=tuple(replace(row, reason=_WITHOUT_MEGATRON) if row.name == _ENGINE else row for row in missing),
        without_effect=policy.without_effect | of_training,
        decided_by=("teacher.model_name",),
        keys=(*policy.keys, *_KEYS),
        complete=complete,
        is_teacher=True,
        own_entries=of_section,
        as_in_file=as_in_file,
    )


NEMO_RL_TEACHER = _of_teacher(NEMO_RL, "nemo-rl-teacher", "the teacher of NeMo-RL's distillation", complete)
NEMO_RL_DTENSOR_TEACHER = _of_teacher(
    NEMO_RL_DTENSOR, "nemo-rl-dtensor-teacher", "the teacher of NeMo-RL's distillation with DTensor", complete_dtensor
)
