"""What a rank sends in the collectives of a step: counted where a simulated step calls them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from memlab.backends.fake_collectives import counted_collectives
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings


def communicated_bytes(scenario: Scenario, settings: MemorySettings) -> dict[str, int]:
    """Takes two steps, the second without repeated passes, and counts that: the first one gathers no parameters.

    Args:
        scenario: On the rank whose communication is counted.
        settings: Of the steps.

    Returns:
        Bytes that the rank sends in a step, by kind of collective.
    """
    from memlab.lab.lab import Lab

    values = {field.name: getattr(scenario, field.name) for field in fields(Scenario)}
    with Lab(**values, backend="simulated") as lab:
        lab.step(settings, warm_up=False)
        session: Any = lab._session
        session.stepper.replays = False
        with counted_collectives() as counted:
            lab.step(settings, warm_up=False)
    return {kind: num_bytes for kind, num_bytes in sorted(counted.items()) if num_bytes}
