"""What a rank sends in the collectives of a step: counted where a simulated step calls them."""

from __future__ import annotations

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings


def communicated_bytes(scenario: Scenario, settings: MemorySettings) -> dict[str, int]:
    """Takes two steps, and counts the second: the first one gathers no parameters.

    Args:
        scenario: On the rank whose communication is counted.
        settings: Of the steps.

    Returns:
        Bytes that the rank sends in a step, by kind of collective.
    """
    from memlab.lab.lab import Lab

    with Lab(scenario, backend="simulated") as lab:
        lab.step(settings)
        return lab.sent_bytes
