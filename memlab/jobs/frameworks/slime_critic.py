"""slime's critic, which has processes of its own on the actor's GPUs: a table of its own for the same files.

It takes the actor's arguments (``create_training_models`` in slime/ray/placement_group.py, 624b824a), unless a file of
``--megatron-config-path`` has others. Its head has one output for each token in place of the output layer, and a bias.
"""

from __future__ import annotations

from dataclasses import replace

from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import Missing, is_given
from memlab.jobs.frameworks.slime import CRITIC, SLIME

_OF_LOGITS = ("entropy_coef", "rollout_top_p", "recompute_loss_function")
"""What changes the actor's loss alone: a critic has no logits."""


def complete(reading: Reading) -> None:
    """Derives what the actor's arguments mean, for the critic."""
    SLIME.complete(reading)
    reading.rollout = None  # no engine gets a critic's weights
    dropped = dict.fromkeys(_OF_LOGITS, "a critic has no logits")
    of_engine = [key for key in reading.entries.by_key if key.startswith("sglang_")]
    dropped |= dict.fromkeys(of_engine, "no engine gets a critic's weights")
    reading.without_effect |= {key: reason for key, reason in dropped.items() if key in reading.entries.by_key}
    reading.taken = [one for one in reading.taken if one.key not in dropped]
    reading.not_modelled = [one for one in reading.not_modelled if one.key not in (CRITIC, *dropped)]


def check(reading: Reading) -> None:
    """Checks that the job trains a critic.

    Raises:
        CannotStartError: If it does not.
    """
    estimator = reading.get(CRITIC, "grpo")
    if estimator != "ppo":
        raise CannotStartError(
            f"{CRITIC} is {estimator}, with which slime trains no critic: leave --format out, which predicts the "
            "actor's steps"
        )
    SLIME.check(reading)


SLIME_CRITIC = replace(
    SLIME,
    name="slime-critic",
    title="slime's critic",
    missing=(
        *SLIME.missing,
        Missing("megatron_config_path", "either", "the critic may have arguments of its own in that file", is_given),
    ),
    complete=complete,
    check=check,
    fixed={name: value for name, value in SLIME.fixed.items() if name != "fp32_output"} | {"num_labels": 1},
)
