"""What a predicted step of one rank says to a search: the few figures that a search compares, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import Steps, Verdict, judge, transferred_bytes
from memlab.fitting.least_peak import bytes_at_peak
from memlab.fitting.peak_range import PeakRange
from memlab.jobs.frameworks.framework import NotModelled
from memlab.record.step_record import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A step of one rank, judged by a limit."""

    rank: int
    peak_allocated_bytes: int
    peak_range: PeakRange
    peak_reserved_bytes: int
    start_bytes: int
    """Allocated when the step begins, without what an earlier step left: no recompute or activation offload changes
    it."""
    transferred_bytes: int
    """To the host, and back again, in a step and between two."""
    host_bytes: int
    """The most that is on the host."""
    verdict: Verdict
    """Whether torch's allocator completes the step within the limit."""
    without_effect: frozenset[str]
    """Settings that Megatron accepted and that had no effect."""
    peak_phase: str = ""
    """Phase in which the allocated bytes peak, of `memlab.vocabulary.PHASES`."""
    communicated_bytes: Mapping[str, int] = field(default_factory=dict)
    """What the rank sends in a step, by kind of collective."""
    requested_at_peak: Mapping[str, int] = field(default_factory=dict)
    """As `memlab.fitting.least_peak.bytes_at_peak`."""

    @property
    def fits(self) -> bool:
        """Whether the predicted step completes: it fits, or may fit."""
        return self.verdict != "does not fit"

    @classmethod
    def of(
        cls,
        record: StepRecord,
        steps: Steps,
        limit_bytes: int,
        not_modelled: Sequence[NotModelled] = (),
        *,
        communicated_bytes: Mapping[str, int],
    ) -> Self:
        """Judges a step that was taken without a limit.

        Args:
            steps: Says whether it completes within the limit.
            communicated_bytes: What the rank sent in it, by kind of collective.
        """
        return cls.judged(Seen.of(record, not_modelled, communicated_bytes=communicated_bytes), steps, limit_bytes)

    @classmethod
    def judged(cls, seen: Seen, steps: Steps, limit_bytes: int) -> Self:
        """Judges a step by what was seen of it; for the arguments see `of`."""
        record = seen.record
        return cls(
            rank=record.scenario.layout.rank,
            peak_allocated_bytes=record.peak_allocated_bytes,
            peak_range=seen.peak_range,
            peak_reserved_bytes=record.peak_reserved_bytes or record.peak_allocated_bytes,
            start_bytes=record.static_bytes - record.residual_bytes,
            transferred_bytes=transferred_bytes(record),
            host_bytes=record.host_bytes,
            verdict=judge(record, steps, limit_bytes, seen.peak_range),
            without_effect=frozenset(record.without_effect),
            peak_phase=record.peak_phase,
            communicated_bytes=seen.communicated_bytes,
            requested_at_peak=seen.requested_at_peak,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A step that was taken without a limit, and all that a prediction needs of its timeline."""

    record: StepRecord
    peak_range: PeakRange
    requested_at_peak: Mapping[str, int]
    communicated_bytes: Mapping[str, int]

    @classmethod
    def of(
        cls, record: StepRecord, not_modelled: Sequence[NotModelled] = (), *, communicated_bytes: Mapping[str, int]
    ) -> Self:
        """Reads a record; for the arguments see `Prediction.of`."""
        return cls(
            record=record,
            peak_range=PeakRange.of(record, not_modelled),
            requested_at_peak=bytes_at_peak(record),
            communicated_bytes=communicated_bytes,
        )


Predict = Callable[[Scenario, MemorySettings], Prediction]
"""Predicts a step of the scenario's rank under settings."""


class PredictionLostError(RuntimeError):
    """A step that cannot be predicted, because the processes that should do so are lost."""
