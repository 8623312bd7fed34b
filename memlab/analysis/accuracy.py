"""How near predictions come: the errors between measured steps and the same steps predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.units import MIB

WORTH_A_LOOK_BYTES = 64 * MIB
"""A setting that saves less is not judged by the share of it that a prediction misses."""
STATE = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured step and the same step predicted; shares are of what was measured, below 0 for too little."""

    measured: StepRecord
    predicted: StepRecord
    plain: Pair | None = None
    """The step without settings of the same scenario, where there is one."""

    @property
    def peak_error(self) -> float:
        """Of the allocated peak."""
        return _share(self.predicted.peak_allocated_bytes, self.measured.peak_allocated_bytes)

    @property
    def activation_peak_error(self) -> float:
        """Of the peak above the step's start."""
        return _share(self.predicted.activation_peak_bytes, self.measured.activation_peak_bytes)

    @property
    def saving_error(self) -> float | None:
        """Of what the settings take off the peak above the start; None where that is little, or there is no plain."""
        if self.plain is None:
            return None
        saved = self.plain.measured.activation_peak_bytes - self.measured.activation_peak_bytes
        predicted = self.plain.predicted.activation_peak_bytes - self.predicted.activation_peak_bytes
        return _share(predicted, saved) if saved > WORTH_A_LOOK_BYTES else None

    def state_error(self, category: str) -> float | None:
        """Of one of `STATE`; None where the peak holds none of it."""
        measured = self.measured.peak_by_category.get(category, 0)
        return _share(self.predicted.peak_by_category.get(category, 0), measured) if measured else None


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one figure, over many pairs."""

    count: int
    median: float
    worst: float
    """The largest, as a size."""
    under_estimated: float
    """The share of pairs in which too little was predicted."""

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Errors | None:
        """Sums errors up; None without any."""
        known = [error for error in errors if error is not None]
        if not known:
            return None
        sizes = [abs(error) for error in known]
        under = sum(error < 0 for error in known) / len(known)
        return cls(len(known), statistics.median(sizes), max(sizes), under)


FIGURES: dict[str, Callable[[Pair], float | None]] = {
    "allocated peak": lambda pair: pair.peak_error,
    "activation peak": lambda pair: pair.activation_peak_error,
    "what a setting saves": lambda pair: pair.saving_error,
    **{name: lambda pair, name=name: pair.state_error(name) for name in STATE},  # type: ignore[misc]
}


def pairs_of(measured: Iterable[StepRecord], predicted: Iterable[StepRecord]) -> list[Pair]:
    """Puts steps and their predictions together, each with the plain step of its scenario if that came before."""
    pairs: list[Pair] = []
    for truth, guess in zip(measured, predicted, strict=True):
        plain = next((other for other in pairs if _is_plain_of(other.measured, truth)), None)
        pairs.append(Pair(truth, guess, plain))
    return pairs


def _is_plain_of(other: StepRecord, record: StepRecord) -> bool:
    is_plain = other.settings == MemorySettings() and record.settings != MemorySettings()
    return is_plain and other.scenario == record.scenario


def _share(predicted: int, measured: int) -> float:
    return predicted / measured - 1 if measured else float(predicted != measured)
