"""The limit of a step: the smallest device memory with which it completes, measured or predicted, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.config.from_json import build
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord

_TOLERANCE = 0.0005
"""Of the limit: how near both ends of a bisection come."""
_AROUND_THE_EXPECTED = tuple(share * _TOLERANCE for share in (0.5, -0.5, 2, -2, 8, -8))
"""Distances from the expected limit, as shares of it, that a bisection tries first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Between which two sizes of memory a step begins to complete; the bytes are those that torch may reserve.

    Every rank of a job has the same limit, and all must complete: the job's limit is that of the rank that needs most.
    """

    scenario: Scenario
    """Of a job: of the rank that reserved most without a limit, as the settings and the peaks."""
    settings: MemorySettings
    fails_bytes: int
    """The most memory with which the step ran out of memory."""
    fits_bytes: int
    """The least memory with which the step completed."""
    peak_allocated_bytes: int | None
    """Of the step without a limit, as the next one; None if a bisection was cut short, and they were not kept."""
    peak_reserved_bytes: int | None
    versions: dict[str, str]
    hardware: dict[str, str]

    def __post_init__(self) -> None:
        if not 0 < self.fails_bytes < self.fits_bytes:
            raise ValueError(
                f"a limit lies between {self.fails_bytes} and {self.fits_bytes} bytes, must be two positive numbers "
                "in ascending order: measure it again"
            )

    @classmethod
    def find(
        cls, free: StepRecord | None, completes: Callable[[int], bool], *, expected_bytes: int | None = None
    ) -> Limit:
        """Bisects the limit of a step.

        Args:
            free: The step without a limit; None if it ended with an error.
            completes: Says whether the step completes in a new process in which torch may reserve so many bytes.
            expected_bytes: A prediction, near which the bisection begins; it saves attempts and changes no result.

        Raises:
            ValueError: If the step does not complete without a limit.
        """
        if free is None or free.status != "ok" or free.peak_reserved_bytes is None:
            raise ValueError(f"{free or 'the step'} did not complete on a GPU, so it has no limit: choose another step")
        fails = int(free.peak_allocated_bytes * (1 - _TOLERANCE))
        fits = int(free.peak_reserved_bytes * (1 + _TOLERANCE))
        near = [int(expected_bytes * (1 + share)) for share in _AROUND_THE_EXPECTED] if expected_bytes else []
        while fits - fails > _TOLERANCE * fits:
            near = [num_bytes for num_bytes in near if fails < num_bytes < fits]
            middle = near.pop(0) if near else (fails + fits) // 2
            if completes(middle):
                fits = middle
            else:
                fails = middle
        return cls(
            scenario=free.scenario,
            settings=free.settings,
            fails_bytes=fails,
            fits_bytes=fits,
            peak_allocated_bytes=free.peak_allocated_bytes,
            peak_reserved_bytes=free.peak_reserved_bytes,
            versions=dict(free.versions),
            hardware=dict(free.hardware),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"scenario": self.scenario.to_dict(), "settings": self.settings.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Limit:
        """Builds a limit from what `to_dict` returned.

        Raises:
            ValueError: If a field is missing or has a wrong value.
        """
        if not isinstance(values, dict) or not {"scenario", "settings"} <= set(values):
            raise ValueError("a limit has no scenario or no settings: measure it with benchmarks/fit_boundary.py")
        scenario, settings = Scenario.from_dict(values["scenario"]), MemorySettings.from_dict(values["settings"])
        others = {name: value for name, value in values.items() if name not in ("scenario", "settings")}
        return build(cls, others, "a limit", scenario=scenario, settings=settings)

    def error_of(self, predicted: Limit) -> float:
        """Returns how far a predicted limit is off, as a share of this one; below 0 if it is too low."""
        measured = self.fails_bytes + self.fits_bytes
        return (predicted.fails_bytes + predicted.fits_bytes) / measured - 1
