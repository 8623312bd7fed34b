"""The frameworks whose jobs memlab reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memlab.config.option import EngineName
from memlab.config.validation import shortened
from memlab.jobs.frameworks import (
    nemo_rl_dtensor,
    skyrl_fsdp,
    skyrl_sft_fsdp,
    verl_fsdp,
    verl_old_sft,
    verl_own_classes,
    verl_sft_fsdp,
)
from memlab.jobs.frameworks.automodel import AUTOMODEL
from memlab.jobs.frameworks.bridge import BRIDGE
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.megatron_lm import MEGATRON_LM
from memlab.jobs.frameworks.ms_swift import MS_SWIFT
from memlab.jobs.frameworks.nemo_rl import NEMO_RL
from memlab.jobs.frameworks.nemo_rl_teacher import NEMO_RL_DTENSOR_TEACHER, NEMO_RL_TEACHER
from memlab.jobs.frameworks.skyrl import SKYRL
from memlab.jobs.frameworks.skyrl_sft import SKYRL_SFT
from memlab.jobs.frameworks.slime import SLIME
from memlab.jobs.frameworks.slime_critic import SLIME_CRITIC
from memlab.jobs.frameworks.torchtitan import TORCHTITAN
from memlab.jobs.frameworks.verl import VERL
from memlab.jobs.frameworks.verl_critic import VERL_CRITIC
from memlab.jobs.frameworks.verl_sft import VERL_SFT, chooses_old_trainer

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (MEGATRON_LM, AUTOMODEL, BRIDGE, VERL, VERL_SFT, NEMO_RL, SKYRL, SKYRL_SFT, SLIME, MS_SWIFT)
}
_OF_OTHER_ENGINES: dict[str, tuple[tuple[Callable[[dict[str, Any]], bool], Framework], ...]] = {
    "nemo-rl": ((nemo_rl_dtensor.chooses_dtensor, nemo_rl_dtensor.NEMO_RL_DTENSOR),),
    "skyrl": ((skyrl_fsdp.chooses_fsdp, skyrl_fsdp.SKYRL_FSDP),),
    "skyrl-sft": ((skyrl_sft_fsdp.chooses_fsdp, skyrl_sft_fsdp.SKYRL_SFT_FSDP),),
    "verl": ((verl_fsdp.chooses_fsdp, verl_fsdp.VERL_FSDP), *verl_own_classes.OF_TRAINER),
    "verl-sft": (
        (verl_sft_fsdp.chooses_fsdp, verl_sft_fsdp.VERL_SFT_FSDP),
        (chooses_old_trainer, verl_old_sft.VERL_OLD_SFT),
        *verl_own_classes.OF_SFT,
    ),
}
"""For a framework that has several engines, the others: whether the values of a job by key choose one, and its table;
the first is the one that memlab writes."""
OF_OTHER_MODELS: dict[str, tuple[str, Framework]] = {
    VERL_CRITIC.name: (VERL.name, VERL_CRITIC),
    SLIME_CRITIC.name: (SLIME.name, SLIME_CRITIC),
    NEMO_RL_TEACHER.name: (NEMO_RL.name, NEMO_RL_TEACHER),
    NEMO_RL_DTENSOR_TEACHER.name: (NEMO_RL.name, NEMO_RL_DTENSOR_TEACHER),
}
"""Tables of a second model that a framework's jobs train, or that is a teacher, by the name that ``--format`` takes,
each with the framework whose files have it."""
TABLES: dict[str, Framework] = (
    FRAMEWORKS
    | {one.name: one for others in _OF_OTHER_ENGINES.values() for _, one in others}
    | {one.name: one for _, one in OF_OTHER_MODELS.values()}
    | {TORCHTITAN.name: TORCHTITAN}
)
"""All that memlab reads."""


LOOKED_FOR = "; ".join(f"{name}: {framework.signs.looked_for}" for name, framework in FRAMEWORKS.items())


def framework_of_commands(commands: list[list[str]]) -> str | None:
    """Returns the framework that commands start, by their words; None if it is none that memlab reads."""
    signs = {
        name: framework.signs for name, framework in reversed(FRAMEWORKS.items())
    }  # others have Megatron-LM's flags
    words = [word for command in commands for word in command]
    files = {word.rpartition("/")[2] for word in words}
    for name, own in signs.items():
        if any(module in words or f"{module.rpartition('.')[2]}.py" in files for module in own.programs):
            return name
    for name, own in signs.items():
        if own.key and any(word.lstrip("+~").startswith(own.key) for word in words):
            return name
    return next((name for name, own in signs.items() if any(own.of_command(command) for command in commands)), None)


def framework_of_keys(keys: Iterable[str]) -> str | None:
    """Returns the framework whose configuration has such keys; None if it is none that memlab reads."""
    keys = list(keys)

    def begins(start: str) -> bool:
        return any(key.startswith(start) for key in keys)

    for name, framework in FRAMEWORKS.items():
        if framework.signs.key and begins(framework.signs.key):
            return name
    return next((name for name, framework in FRAMEWORKS.items() if framework.signs.of_tree(begins)), None)


def table_of(name: str, values: dict[str, Any]) -> Framework:
    """Returns the table of a framework for the engine that a job chooses by its values."""
    return next((one for chooses, one in _OF_OTHER_ENGINES.get(name, ()) if chooses(values)), TABLES[name])


def writer_of(name: str, engine: EngineName) -> Framework:
    """Returns the table by which memlab writes a framework's jobs of an engine; its usual one if it has none of it.

    Raises:
        ValueError: If there is no such framework.
    """
    usual = framework_named(name)
    return next((one for _, one in _OF_OTHER_ENGINES.get(name, ()) if one.engine == engine), usual)


def framework_named(name: str, others: Iterable[str] = ()) -> Framework:
    """Returns the framework of a name.

    Args:
        others: Names that the caller takes too.

    Raises:
        ValueError: If there is none.
    """
    if name not in FRAMEWORKS:
        known = ", ".join((*FRAMEWORKS, *others))
        raise ValueError(f"the format is {shortened(name)}, must be one of {known}: choose one of them")
    return FRAMEWORKS[name]
