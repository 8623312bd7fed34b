"""How accurate predictions are: the errors between measured steps and the same steps predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS
from memlab.units import MIB

WORTH_A_LOOK_BYTES = 64 * MIB
"""If a setting saves less, the error of its saving says little."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured step and the same step predicted; errors are shares of the measured value, below 0 for too little."""

    measured: StepRecord
    predicted: StepRecord
    plain: Pair | None = None
    """The pair of the same scenario without settings, if there is one."""
    default_state: Pair | None = None
    """The pair of the same step in the default training state, if there is one."""

    @property
    def peak_error(self) -> float:
        """The error of the allocated peak."""
        return _share(self.predicted.peak_allocated_bytes, self.measured.peak_allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        """The error of the reserved peak; None if a record does not have it."""
        predicted, measured = self.predicted.peak_reserved_bytes, self.measured.peak_reserved_bytes
        return _share(predicted, measured) if predicted is not None and measured is not None else None

    @property
    def activation_peak_error(self) -> float:
        """The error of the peak above the step's start."""
        return _share(self.predicted.activation_peak_bytes, self.measured.activation_peak_bytes)

    @property
    def saving_error(self) -> float | None:
        """The error of what the settings save of the activation peak; None if that is little or not known."""
        if self.plain is None:
            return None
        saved = self.plain.measured.activation_peak_bytes - self.measured.activation_peak_bytes
        predicted = self.plain.predicted.activation_peak_bytes - self.predicted.activation_peak_bytes
        return _share(predicted, saved) if saved > WORTH_A_LOOK_BYTES else None

    @property
    def start_error(self) -> float:
        """The error of the bytes allocated when the step begins."""
        return _share(self.predicted.static_bytes, self.measured.static_bytes)

    @property
    def host_error(self) -> float | None:
        """The error of the most bytes on the host; None if they are few."""
        host = self.measured.host_bytes
        return _share(self.predicted.host_bytes, host) if host > WORTH_A_LOOK_BYTES else None

    @property
    def option_error(self) -> float | None:
        """The error of what the training state changes of the allocated peak; None if that is little or not known."""
        if self.default_state is None:
            return None
        changed = self.default_state.measured.peak_allocated_bytes - self.measured.peak_allocated_bytes
        predicted = self.default_state.predicted.peak_allocated_bytes - self.predicted.peak_allocated_bytes
        return _share(predicted, changed) if abs(changed) > WORTH_A_LOOK_BYTES else None

    def state_error(self, category: str) -> float | None:
        """The error of one of `GROUPS`; None where the peak holds none of it."""
        measured = self.measured.peak_by_category.get(category, 0)
        return _share(self.predicted.peak_by_category.get(category, 0), measured) if measured else None


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one figure over many pairs."""

    count: int
    median: float
    worst: float
    """The largest absolute error."""
    under_estimated: float
    """The share of pairs in which too little was predicted."""

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Errors | None:
        """Summarizes errors; None if there is none."""
        known = [error for error in errors if error is not None]
        if not known:
            return None
        sizes = [abs(error) for error in known]
        under = sum(error < 0 for error in known) / len(known)
        return cls(len(known), statistics.median(sizes), max(sizes), under)


FIGURES: dict[str, Callable[[Pair], float | None]] = {
    "allocated peak": lambda pair: pair.peak_error,
    "reserved peak": lambda pair: pair.reserved_error,
    "activation peak": lambda pair: pair.activation_peak_error,
    "start of the step": lambda pair: pair.start_error,
    "what a setting saves": lambda pair: pair.saving_error,
    "what a training state changes": lambda pair: pair.option_error,
    "host": lambda pair: pair.host_error,
    **{name: lambda pair, name=name: pair.state_error(name) for name in GROUPS},  # type: ignore[misc]
}


def pairs_of(measured: Iterable[StepRecord], predicted: Iterable[StepRecord]) -> list[Pair]:
    """Pairs steps with their predictions, and each with the earlier steps that it is compared with."""
    pairs: list[Pair] = []
    for truth, guess in zip(measured, predicted, strict=True):
        plain = None
        if truth.settings != MemorySettings():
            plain = _earlier(pairs, replace(truth, settings=MemorySettings()))
        default_state = None
        usual = truth.scenario.in_default_state
        if truth.scenario != usual:
            default_state = _earlier(pairs, replace(truth, scenario=usual))
        pairs.append(Pair(truth, guess, plain, default_state))
    return pairs


def _earlier(pairs: list[Pair], step: StepRecord) -> Pair | None:
    return next((pair for pair in pairs if _identity(pair.measured) == _identity(step)), None)


def _identity(step: StepRecord) -> tuple[Scenario, MemorySettings, bool]:
    # What the router did is measured like the bytes, and differs from state to state.
    return replace(step.scenario, routing=Routing()), step.settings, step.forward_only


def _share(predicted: int, measured: int) -> float:
    return predicted / measured - 1 if measured else float(predicted != measured)
