"""The training state onto a live model: Megatron's checks of it, and what changes in place.

The rows of `TrainingState` say which options need another optimizer or model instead.
"""

from __future__ import annotations

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.megatron_config import (
    distributed_data_parallel_config,
    optimizer_config,
    state_fields,
    transformer_config,
)
from memlab.engines.megatron.retention import transformer_engine_caches


def check_configs(scenario: Scenario, settings: MemorySettings) -> None:
    """Lets Megatron check the configs of a scenario by its own rules; nothing is built.

    Raises:
        ValueError: If Megatron refuses them.
    """
    try:
        transformer_config(scenario, settings)
        distributed_data_parallel_config(scenario)
        optimizer_config(scenario)
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Megatron refuses the training state '{scenario.state}' ({reason}): choose another") from None


def set_in_place(live: LiveModel, scenario: Scenario) -> None:
    """Gives the model another scenario, and sets what each forward reads of its training state."""
    if scenario.state.attention_backend != live.scenario.state.attention_backend:
        transformer_engine_caches.forget_causal_masks()
    reference = transformer_config(scenario, MemorySettings())
    for name in state_fields(scenario.state):
        setattr(live.config, name, getattr(reference, name))
    live.scenario = scenario
