"""Predictions of published jobs, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from memlab.config.scenario import Scenario
from memlab.fitting.outside_torch import outside_torch_of
from memlab.jobs.published import PublishedJob
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A published job and its prediction."""

    job: PublishedJob
    reason: str = ""
    """Why memlab does not predict the job; empty if it does."""
    peak_bytes: int = 0
    between_steps_bytes: int = 0
    not_modelled: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """How far the prediction is from the measured peak, as a share of it."""
        return self.peak_bytes / self.job.peak_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self) | ({} if self.reason else {"error": self.error})


def compare_published(jobs: Iterable[PublishedJob]) -> Iterator[Compared]:
    """Predicts each job on the rank that was measured, or on one rank of each kind."""
    for job in jobs:
        yield _compared(job)


def _compared(job: PublishedJob) -> Compared:
    if not (job.arguments or job.script):
        return Compared(job=job, reason="its arguments are not published as values")
    try:
        read = job.read()
    except ValueError as error:
        return Compared(job=job, reason=str(error))
    if read.scenario is None or read.settings is None:
        reason = read.cannot_start or read.not_supported or " ".join(read.questions)
        return Compared(job=job, reason=reason)
    records = []
    for scenario in read.scenario.on_ranks(job.rank):
        with Lab(scenario, backend="simulated") as lab:
            records.append(lab.step(read.settings))
    highest = max(records, key=lambda record: record.peak_allocated_bytes)
    return Compared(
        job=job,
        peak_bytes=_bytes_of_gpu(highest, read.scenario) if job.is_of_gpu else highest.peak_allocated_bytes,
        between_steps_bytes=highest.static_bytes,
        not_modelled=tuple(one.key for one in read.not_modelled),
    )


def _bytes_of_gpu(record: StepRecord, scenario: Scenario) -> int:
    assert record.peak_reserved_bytes is not None, "a prediction knows what torch reserves"
    return record.peak_reserved_bytes + outside_torch_of(scenario).total_bytes
