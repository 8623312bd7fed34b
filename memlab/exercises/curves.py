"""Runs that a reader has not seen, as three numbers per step, each with what it shows."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.units import GIB


@dataclass(frozen=True, slots=True)
class Curve:
    """One step of a run, with the names that a `StepRecord` has."""

    static_bytes: int
    peak_allocated_bytes: int
    residual_bytes: int = 0


def unseen_curves() -> list[tuple[str, list[Curve]]]:
    """Returns runs of large models: the kind of each, and its steps.

    Their shapes differ from those of lab 06 in what a careless rule looks at: peaks vary under a leak, a leak begins
    after eight steps, counts only in the last one, rises by less than 1 % in each step, or falls a little, a spike
    comes in the first or in the last step, state is allocated in the third step, late or in two steps, or takes little
    more than 1 %, a retention lies under peaks that vary, the first or the last step alone has no residual, growth
    comes with a retention that grows, a start rises and falls back, or falls, or falls a little at the end, or comes
    back from below, a rise ends one step before the last, a retention takes less than 1 % of the start, most steps
    have a residual, the residual varies, a leak slows down to just above 5 % of its rise, or growth to just below,
    caches for new lengths lift the start of a spike by little less than 1 %, and nothing happens at all.
    """
    flat = [60.0] * 8
    varying = [21.0, 44.0, 30.0, 25.0, 61.0, 22.0, 38.0, 29.0]
    return [
        ("spike", _steps([10.33] * 8, [68.03, 70.1, 71.2, 69.0, 70.4, 72.3, 69.9, 73.94])),
        ("leak", _steps([20 + 0.5 * step for step in range(8)], varying, [0.5 + 0.5 * step for step in range(8)])),
        ("retention", _steps([74.0] * 8, [76.3] * 8, [1.5] * 8)),
        ("growth", _steps([3.4, *[10.33] * 6, 10.35], [19.0] * 8)),
        ("spike", _steps([50.0, *[50.2] * 6, 50.4], [78.0, *[60.0] * 7])),
        ("leak", _steps([*[40.0] * 4, 40.1, 40.2, 40.3, 42.0], flat, [0.0] * 4 + [0.1, 0.2, 0.3, 2.0])),
        ("growth", _steps([12.0, 12.0, *[31.0] * 10], [40.0] * 12)),
        ("retention", _steps([20.0] * 8, varying, [6.0] * 8)),
        ("leak", _steps([*[50.0] * 9, 51.0, 52.0, 53.0], [80.0] * 12)),
        ("growth", _steps([10.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0, 30.0], [40.0] * 8)),
        ("spike", _steps([20.0] * 8, varying, [0.0] + [1.5] * 7)),
        ("spike", _steps([20.0] * 8, varying, [1.5] * 7 + [0.0])),
        ("growth", _steps([10.0, 10.0] + [20.0] * 6, varying, [0.5 + 0.5 * step for step in range(8)])),
        ("leak", _steps([50 + 0.15 * step for step in range(12)], [80.0] * 12)),
        ("spike", _steps([20.0, 20.0, 26.0, 26.0, *[20.0] * 4], [40.0] * 8)),
        ("spike", _steps([26.0, 26.0, *[20.0] * 6], varying)),
        ("growth", _steps([40.0] * 5 + [44.0] * 3, flat)),
        ("growth", _steps([20.0, *[60.0] * 5, 20.22, 20.22], [70.0] * 8)),
        ("growth", _steps([10.0, *[30.0] * 5, 33.0, 33.0], [50.0] * 8)),
        ("growth", _steps([40.0, 47.7, 47.8, *[47.88] * 4, 48.26], [70.0] * 8)),
        ("leak", _steps([40.0, 44.0, 43.7, 47.0, 46.8, 50.0, 49.8, 53.0], flat)),
        ("spike", _steps([40.0, 41.0, *[38.0] * 5, 40.2], flat)),
        ("spike", _steps([*[100.0] * 7, 100.95], [120.0] * 8)),
        ("growth", _steps([40.0, 40.0, *[44.3] * 5, 44.0], flat)),
        ("retention", _steps([74.0] * 8, [76.3] * 8, [0.05] * 8)),
        ("spike", _steps([20.0] * 8, varying, [1.5, 1.5, 0.0, 1.5, 1.5, 0.0, 1.5, 1.5])),
        ("retention", _steps([30.0] * 8, varying, [0.5, 1.5, 0.75, 0.25, 2.0, 0.5, 1.0, 0.75])),
        ("leak", _steps([40.0, 45.0, 46.0, 47.0, 48.0, 48.6, 49.05, 49.6], flat)),
        ("spike", _steps([60.0] * 8, [62.0] * 8)),
    ]


def _steps(starts: list[float], peaks: list[float], residuals: list[float] | None = None) -> list[Curve]:
    """Makes steps from numbers in GiB."""
    residuals = residuals or [0.0] * len(starts)
    rows = zip(starts, peaks, residuals, strict=True)
    return [Curve(*(int(number * GIB) for number in row)) for row in rows]
