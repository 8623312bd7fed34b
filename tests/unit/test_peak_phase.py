"""In which phase a step peaks."""

from __future__ import annotations

import pytest

from memlab.record.timeline import Timeline
from tests.unit.builders import MIB, TimelineBuilder


def step(opening_mib: int, in_forward_mib: int, in_optimizer_mib: int) -> Timeline:
    """A step that frees all but 10 MiB of what it begins with, and adds some bytes in two phases."""
    builder = TimelineBuilder()
    builder.phase = "idle"
    builder.opening("parameters", 10 * MIB)
    builder.opening("gradients", (opening_mib - 10) * MIB)
    for phase, num_mib in (("forward", in_forward_mib), ("optimizer", in_optimizer_mib)):
        builder.phase = phase
        if phase == "forward":
            builder.event(-(opening_mib - 10) * MIB, "gradients")
        builder.event((num_mib - 10) * MIB, "activations")
        if phase == "forward":
            builder.event(-(num_mib - 10) * MIB, "activations")
    return builder.build()


@pytest.mark.parametrize(
    ("opening", "forward", "optimizer", "expected"),
    [
        (50, 90, 60, "forward"),
        (50, 60, 90, "optimizer"),
        (90, 60, 90, "optimizer"),  # the last step left what this one allocates again
        (91, 60, 90, "optimizer"),  # with one unsplit remainder more
        (120, 60, 90, "idle"),  # nothing in the step comes near
    ],
)
def test_a_step_peaks_in_the_phase_that_reaches_the_peak(
    opening: int, forward: int, optimizer: int, expected: str
) -> None:
    assert step(opening, forward, optimizer).peak_phase() == expected


def test_a_timeline_without_events_has_no_peak_phase() -> None:
    assert TimelineBuilder().build().peak_phase() == ""
