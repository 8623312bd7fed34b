"""The frameworks whose jobs memlab reads and writes."""

from __future__ import annotations

from memlab.config.validation import shortened
from memlab.jobs.frameworks.bridge import BRIDGE
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.megatron_lm import MEGATRON_LM
from memlab.jobs.frameworks.ms_swift import MS_SWIFT
from memlab.jobs.frameworks.nemo_rl import NEMO_RL
from memlab.jobs.frameworks.skyrl import SKYRL
from memlab.jobs.frameworks.skyrl_sft import SKYRL_SFT
from memlab.jobs.frameworks.slime import SLIME
from memlab.jobs.frameworks.verl import VERL
from memlab.jobs.frameworks.verl_sft import VERL_SFT

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (MEGATRON_LM, BRIDGE, VERL, VERL_SFT, NEMO_RL, SKYRL, SKYRL_SFT, SLIME, MS_SWIFT)
}


def framework_named(name: str) -> Framework:
    """Returns the framework of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in FRAMEWORKS:
        raise ValueError(f"the format is {shortened(name)}, must be one of {', '.join(FRAMEWORKS)}: choose one of them")
    return FRAMEWORKS[name]
