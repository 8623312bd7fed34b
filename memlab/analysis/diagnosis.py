"""What a series of step records shows: a leak, a spike in every step, something retained, or growth that ends.

From outside the four look the same (the job runs out of memory after some steps), but they need different fixes. What
distinguishes them are the bytes at the start of each step, the peak above that, and what is left at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

from memlab.config.validation import check_whole_number
from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord
from memlab.units import format_bytes

Kind = Literal["leak", "retention", "growth by phase", "spike", "steady"]

_SPIKE_SHARE = 0.25
"""Activations above this share of the peak decide whether a step fits."""
_STATIC_NOISE = 0.01
_VARYING = 1.2
"""Steps differ if the largest activation peak is more than this many times the smallest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that the records show."""

    kind: Kind
    evidence: str
    """The figures that say so."""
    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.evidence}. {self.advice}."


Record: TypeAlias = StepRecord | WatchRecord
_AnyRecord = TypeVar("_AnyRecord", bound=StepRecord | WatchRecord)


def diagnose(records: Sequence[Record]) -> list[Finding]:
    """Finds out what a series of consecutive steps under one setting shows.

    Args:
        records: At least three steps in their order, of one model under one setting; the workload may vary. They are
            steps of a lab, or blocks that `memlab.watch` metered, each of which contains one step of a program.

    Returns:
        The findings, the most serious first; never empty.

    Raises:
        ValueError: If there are fewer than three steps, they are of different settings or of different watched models,
            or a watched block has not ended.
    """
    if len(records) < 3:
        raise ValueError(f"diagnose got {len(records)} records, must be at least 3: take more steps")
    if len({record.settings if isinstance(record, StepRecord) else None for record in records}) > 1:
        raise ValueError("diagnose got records of different settings, must be of one: diagnose each setting by itself")
    models = {record.model for record in records if isinstance(record, WatchRecord)}
    if len(models) > 1:
        raise ValueError(
            f"diagnose got watched blocks of different models ({'; '.join(sorted(models))}), must be of one: diagnose "
            "each model by itself"
        )
    growth = _static_growth(records)
    # What an earlier block has left is in the start of a later one: what a leak keeps is not replaced.
    leaks_in_program = any(finding.kind == "leak" for finding in growth) and bool(models)
    findings = [*growth, *(() if leaks_in_program else _retention(records)), *_spike(records)]
    if not findings:
        starts = [record.static_bytes for record in records]
        lowest, highest = (format_bytes(of_starts(starts)) for of_starts in (min, max))
        at = lowest if lowest == highest else f"{lowest} to {highest}"
        findings.append(Finding(kind="steady", evidence=f"every step starts at {at}", advice="No action is needed"))
    return findings


def probability_of_exceeding(records: Sequence[Record], budget_bytes: int, num_steps: int) -> float:
    """Estimates how likely a run is to meet a step that does not fit.

    Args:
        records: Steps drawn from the same workload. One that ran out of memory counts as one that does not fit.

    Returns:
        1 - (1 - p)^n, where p is the share of the records whose peak is above `budget_bytes`. This assumes that steps
        are independent.

    Raises:
        ValueError: If there is no record, a step was interrupted, or the length is not a whole number.
    """
    if not records:
        raise ValueError("probability_of_exceeding got 0 records, must be at least 1: take some steps")
    check_whole_number("num_steps", num_steps, at_least=0)
    if any(record.status == "interrupted" for record in records):
        raise ValueError(
            "probability_of_exceeding got a step that was interrupted, must have steps that came to their peak: leave "
            "it out"
        )
    over = [record.status == "out_of_memory" or record.peak_allocated_bytes > budget_bytes for record in records]
    share = sum(over) / len(records)
    return float(1.0 - (1.0 - share) ** num_steps)


def _static_growth(records: Sequence[Record]) -> list[Finding]:
    starts = [record.static_bytes for record in records]
    growth = [later - earlier for earlier, later in pairwise(starts)]
    recent = growth[len(growth) // 2 :]
    # Less than that is what caches take, such as rotary angles for a new sequence length.
    noise = _STATIC_NOISE * starts[0]
    # At least two steps must grow: state that is allocated once grows in one.
    last_growth = growth[min(len(growth) // 2, len(growth) - 2) :]
    grows_in_each = all(step > 0 for step in last_growth) and sum(last_growth) > noise and len(growth) > 1
    if grows_in_each or _grows_in_some(growth, noise):
        least, most = format_bytes(min(last_growth)), format_bytes(max(last_growth))
        return [
            Finding(
                kind="leak",
                evidence=f"the start grows from {format_bytes(starts[0])} to {format_bytes(starts[-1])}, and in the "
                f"last steps by {least if least == most else f'{least} to {most}'} per step",
                advice="Something keeps in every step what it should release: look for a list that is appended to",
            )
        ]
    total = starts[-1] - starts[0]
    # One late change is state too, if the start stays after it.
    late = [step for step in recent if abs(step) > noise]
    if total > noise and abs(recent[-1]) <= noise and len(late) <= 1:
        last = next(step for step in range(len(starts)) if all(abs(s - starts[-1]) <= noise for s in starts[step:]))
        return [
            Finding(
                kind="growth by phase",
                evidence=f"the start rises from {format_bytes(starts[0])} to {format_bytes(starts[last])} up to step "
                f"{last}, and changes by {format_bytes(starts[-1] - starts[last])} after it",
                advice="State that is allocated once, such as Adam's moments: budget for it, it is not a leak",
            )
        ]
    return []


def _grows_in_some(growth: list[int], noise: float) -> bool:
    """Whether starts rise again and again, as in every other step, and never fall.

    The first step may allocate state, and one more rise may be that of another state.
    """
    later = [step for step in growth[1:] if abs(step) > noise]
    last_two = growth[-2:]
    return len(later) > 1 and min(later) > 0 and max(last_two) > noise


def _retention(records: Sequence[Record]) -> list[Finding]:
    left = [record.residual_bytes for record in records]
    if min(left) == 0 or left[-1] > 2 * left[0]:
        return []
    return [
        Finding(
            kind="retention",
            evidence=f"{format_bytes(min(left))} of activations stay allocated after every step",
            advice="The next forward replaces them, but nothing needs them until then: "
            + (
                "lab.retained() names the holder"
                if isinstance(records[0], StepRecord)
                else "drop what refers to them before the step ends, such as a loss or an output with its graph"
            ),
        )
    ]


def _spike(records: Sequence[Record]) -> list[Finding]:
    highest = max(records, key=lambda record: record.peak_allocated_bytes)
    above = highest.peak_allocated_bytes - highest.static_bytes
    if above < _SPIKE_SHARE * highest.peak_allocated_bytes:
        return []
    peaks = [record.activation_peak_bytes for record in records]
    varies = max(peaks) > _VARYING * min(peaks)
    spread = f"; steps add from {format_bytes(min(peaks))} to {format_bytes(max(peaks))}" if varies else ""
    return [
        Finding(
            kind="spike",
            evidence=f"the step with the highest peak starts at {format_bytes(highest.static_bytes)} and adds "
            f"{format_bytes(above)}{spread}",
            advice="Lower what the step adds: recompute or offload activations"
            + (", or limit the length of the longest batch" if varies else ""),
        )
    ]


def worst(records: Iterable[_AnyRecord]) -> _AnyRecord:
    """Returns the record whose allocated peak is the highest: the rank that runs out of memory first."""
    return max(records, key=lambda record: record.peak_allocated_bytes)
