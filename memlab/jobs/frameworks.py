"""The frameworks whose jobs memlab reads and writes."""

from __future__ import annotations

from memlab.config.validation import shortened
from memlab.jobs.bridge import BRIDGE
from memlab.jobs.framework import Framework
from memlab.jobs.megatron_lm import MEGATRON_LM
from memlab.jobs.ms_swift import MS_SWIFT
from memlab.jobs.nemo_rl import NEMO_RL
from memlab.jobs.skyrl import SKYRL
from memlab.jobs.slime import SLIME
from memlab.jobs.verl import VERL

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (MEGATRON_LM, BRIDGE, VERL, NEMO_RL, SKYRL, SLIME, MS_SWIFT)
}


def framework_named(name: str) -> Framework:
    """Returns the framework of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in FRAMEWORKS:
        raise ValueError(f"the format is {shortened(name)}, must be one of {', '.join(FRAMEWORKS)}: choose one of them")
    return FRAMEWORKS[name]
