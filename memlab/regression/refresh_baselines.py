"""Updates baselines from a run, and prints the old and the new value of every metric that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memlab.regression.baseline import Baseline, baseline_path, read_baseline, write_baseline
from memlab.regression.case_measurements import Measured
from memlab.regression.compare import compare_with_baseline, has_same_rounding
from memlab.regression.report.summary_text import value_text
from memlab.regression.run.kept_runs import read_history
from memlab.regression.suite.suite import Case, Suite
from memlab.regression.summary import Summary, read_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """New baselines that were checked, and are not written yet."""

    suite: Suite
    summary: Summary
    measured: dict[str, Measured]
    """By case."""
    not_in_run: tuple[str, ...]
    unreadable: tuple[str, ...] = ()
    """Kept runs that could not be read, of which one may be newer; a line each."""

    def write(self) -> Iterator[str]:
        """Writes the baselines, and yields what changed, line by line."""
        yield from self.unreadable
        yield f"from {self.summary.name}"
        for case, measured in self.measured.items():
            path = baseline_path(self.suite.baselines_folder, case)
            lines = list(_changes(path, measured, self.suite.backend))
            if lines:
                write_baseline(
                    path,
                    Baseline(
                        backend=self.suite.backend,
                        case=case,
                        date=self.summary.started[:10],
                        commit=self.summary.commit,
                        measured=measured,
                    ),
                )
            yield from (f"{case}: {line}" for line in lines or ["unchanged"])
        if self.not_in_run:
            yield f"not in this run, so left as they are: {', '.join(self.not_in_run)}"


def plan_refresh(suite: Suite, cases: Sequence[Case], run: Path | None = None) -> Refresh:
    """Checks that baselines can be taken from a run.

    Args:
        run: The folder of the run; None is the newest run of the suite.

    Raises:
        ValueError: If there is no such run, one of its cases failed, or it was run with other parameters.
    """
    unreadable: list[str] = []
    summary = read_summary(run) if run is not None else _newest(suite, unreadable)
    if (summary.suite, summary.backend) != (suite.name, suite.backend):
        raise ValueError(
            f"run {summary.name} is of suite {summary.suite} on {summary.backend}, must be of {suite.name} on "
            f"{suite.backend}: give another with --run"
        )
    failed = [result.name for result in summary.results if result.status == "failed"]
    if failed:
        raise ValueError(
            f"run {summary.name} has failed cases, must have none for baselines to be taken from it: fix "
            f"{', '.join(failed)}, run the suite again, or give another run with --run"
        )
    measured = {result.name: result.measured for result in summary.results if result.measured is not None}
    chosen = {case.name: measured[case.name] for case in cases if case.name in measured}
    if not chosen:
        raise ValueError(f"run {summary.name} has none of these cases: run memlab nightly {suite.shown_path} first")
    for case in cases:
        if case.name in chosen and chosen[case.name].parameters != case.parameters:
            raise ValueError(
                f"case {case.name} was run with {chosen[case.name].parameters}, and the suite now says "
                f"{case.parameters}: run memlab nightly {suite.shown_path} again"
            )
    return Refresh(
        suite=suite,
        summary=summary,
        measured=chosen,
        not_in_run=tuple(case.name for case in cases if case.name not in chosen),
        unreadable=tuple(unreadable),
    )


def _newest(suite: Suite, unreadable: list[str]) -> Summary:
    history = read_history(suite.runs_folder, suite.name, suite.backend, unreadable.append)
    if not history:
        damaged = f" ({'; '.join(unreadable)})" if unreadable else ""
        raise ValueError(
            f"{suite.runs_folder} holds no run of {suite.name} on {suite.backend}{damaged}: run memlab nightly "
            f"{suite.shown_path} first, or give one with --run"
        )
    return history[-1][1]


def _changes(path: Path, measured: Measured, backend: str) -> Iterator[str]:
    """Yields what would change in the file of a baseline; nothing if it has the same figures already."""
    try:
        old = read_baseline(path)
    except ValueError as error:
        yield f"new, instead of a file that could not be read ({error})"
        return
    if old is None:
        num_metrics = sum(len(record.metrics) for record in measured.records.values())
        yield f"new, {num_metrics} metrics of {len(measured.records)} records"
        return
    changes = compare_with_baseline(old.measured, measured, backend)
    for change in changes:
        values = f"{value_text(change.baseline)} -> {value_text(change.now)}"
        yield f"{change.record} {change.metric}: {values} ({change.difference})"
    if not changes and not has_same_rounding(old.measured, measured):
        yield "no metric is beyond its tolerance; the loss is new: other packages or another processor computed it"
    elif not changes and _modules(old.measured) != _modules(measured):
        yield "no metric is beyond its tolerance; the bytes by module are new"


def _modules(measured: Measured) -> list[tuple[Mapping[str, int], ...]]:
    figures = measured.records.values()
    return [(one.peak_by_module, one.residual_by_module, one.recomputed_by_module) for one in figures]
