"""Runs a suite: each case in a process of its own, several at a time. The results of finished cases are never lost.

An error in a case, its judgement or its part of the report fails that case, with the traceback in its ``log.txt``. A
signal ends the cases that run, and the report is still written: Python raises the exception of a signal in the main
thread, so everything that must not be cut short happens in another one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.backends import BACKEND_VARIABLE
from memlab.regression.baseline import baseline_path, read_baseline
from memlab.regression.case_measurements import read_measured
from memlab.regression.compare import compare_with_baseline, has_same_rounding
from memlab.regression.one_line import one_line
from memlab.regression.report.report import write_reports
from memlab.regression.run.case_on_engine import run_on_engine
from memlab.regression.run.kept_runs import (
    commit_in_words,
    current_commit,
    free_name,
    locked,
    publish,
    read_history,
    remove_oldest,
    run_name,
    staged,
)
from memlab.regression.run.process import end_processes
from memlab.regression.run.runner import LabFailedError, failed, prepare_lab
from memlab.regression.suite.suite import PLOTLY_FILE, SUMMARY_FILE, Case, Suite
from memlab.regression.summary import CaseResult, Summary

if TYPE_CHECKING:
    from memlab.ranks.balanced import Balanced
    from memlab.ranks.ranks import Engine

KEPT_RUNS = 14

_QUIET_SECONDS = 10.0
_POLL_SECONDS = 0.2

Outcome = tuple[Summary, Path]
"""The summary of a kept run, and its folder."""


class NothingKeptError(Exception):
    """The nightly was ended before its first case had ended, so there is no run to keep."""


class ReportNotWrittenError(Exception):
    """The disk filled up after the results of the run were written, and before its report was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a suite is run."""

    jobs: int = 1
    """How many cases run at the same time."""
    allow_missing: bool = False
    """Whether a case without a baseline passes."""
    keep: int = KEPT_RUNS
    """How many runs of the suite stay in the folder of runs, this one included."""
    runs_folder: Path | None = None
    """The folder of runs; None is the suite's own."""

    def __post_init__(self) -> None:
        for name in ("jobs", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1: give another number")


def run_suite(
    suite: Suite,
    cases: Sequence[Case],
    options: Options,
    on_progress: Callable[[str], object] = print,
    engines: Balanced | None = None,
) -> Outcome:
    """Runs cases of a suite, compares each with its baseline, and keeps the run.

    If Ctrl-C or another signal that raises in the main thread ends the nightly, it keeps the run with the cases that
    had ended by then; the others have the status ``not run``. A signal while the report is written changes nothing.

    Args:
        on_progress: Called with one line, from one thread at a time. A broken pipe does not end the nightly.
        engines: The cases run on these, which serve `CaseOnEngine`; None runs them on this machine, `Options.jobs` at
            the same time.

    Returns:
        The summary, and the folder of the run.

    Raises:
        NothingKeptError: If a signal ended the nightly before its first case had ended.
        ReportNotWrittenError: If the report cannot be written. The results are kept without it.
        OSError: If the folder of runs cannot be written. Earlier runs and baselines are as they were.
    """
    night = _Night(suite, cases, options, on_progress, engines)
    future: Future[Outcome] | None = None
    pool = ThreadPoolExecutor(1)
    try:
        future = pool.submit(night.run)
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        night.ending.set()
        pool.shutdown()
        if future is None:
            raise
        return future.result()
    finally:
        pool.shutdown(wait=False)


class _Night:
    """One run of a suite."""

    def __init__(
        self,
        suite: Suite,
        cases: Sequence[Case],
        options: Options,
        on_progress: Callable[[str], object],
        engines: Balanced | None = None,
    ) -> None:
        self.ending = threading.Event()
        """Set by a signal: cases that run are killed, and no other begins."""
        self._suite = suite
        self._cases = cases
        self._options = options
        self._on_progress = on_progress
        self._engines = engines
        self._reporting = threading.Lock()

    def run(self) -> Outcome:
        """Runs the cases, and keeps the run."""
        started, clock = datetime.now(UTC), time.monotonic()
        runs_folder = (self._options.runs_folder or self._suite.runs_folder).resolve()
        commit = current_commit(self._suite.path.parent)
        name = run_name(started, commit, self._suite.backend)
        with staged(runs_folder, name, self._report) as staging:
            results = self._run_cases(staging)
            if self.ending.is_set() and all(result.status == "not run" for result in results):
                raise NothingKeptError("interrupted: no case had ended, so nothing of this run was kept")
            with locked(runs_folder, self._report):
                history = read_history(runs_folder, self._suite.name, self._suite.backend, self._report)
                target = runs_folder / free_name(runs_folder, name)
                summary = Summary(
                    suite=self._suite.name,
                    backend=self._suite.backend,
                    name=target.name,
                    commit=commit,
                    started=started.isoformat(timespec="seconds"),
                    seconds=round(time.monotonic() - clock, 1),
                    results=tuple(results),
                    number=max((kept.number for _, kept in history), default=0) + 1,
                )
                staging.mkdir(exist_ok=True)  # a notebook may have removed it
                _write_plotly(staging)
                try:
                    summary = write_reports(staging, summary, history)
                except Exception as error:
                    # A full disk, or an error of the page itself and not of a case: the results are kept.
                    if not (staging / SUMMARY_FILE).is_file():
                        raise
                    publish(staging, target)
                    if isinstance(error, OSError):
                        raise ReportNotWrittenError(
                            f"the report cannot be written ({error.strerror or error}): the results are kept in "
                            f"{target / SUMMARY_FILE}: free some space, or give another folder with --out"
                        ) from error
                    raise
                publish(staging, target)
                remove_oldest([*history, (target, summary)], self._options.keep, self._report)
        return summary, target

    def _run_cases(self, staging: Path) -> list[CaseResult]:
        with ThreadPoolExecutor(self._options.jobs if self._engines is None else len(self._engines)) as pool:
            futures = [pool.submit(self._run, case, staging) for case in self._cases]
            running = set(futures)
            while running and not self.ending.is_set():
                ended, running = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in sorted(ended, key=futures.index):
                    self._report_end(future.result(), len(futures) - len(running))
            pool.shutdown(wait=False, cancel_futures=True)
            if self._engines is not None and running:
                self._engines.close()
            # A thread that was about to start its process still starts it, so this repeats until all have ended.
            while not all(future.done() for future in running):
                with contextlib.suppress(RuntimeError):  # a process that does not end is the failure of its case
                    end_processes(staging)
                wait(running, timeout=_POLL_SECONDS)
        return [
            _not_run(case) if future in running else future.result()
            for case, future in zip(self._cases, futures, strict=True)
        ]

    def _run(self, case: Case, staging: Path) -> CaseResult:
        clock = last_reported = time.monotonic()
        engine = ""

        def on_cell(line: str) -> None:
            nonlocal last_reported
            if time.monotonic() - last_reported > _QUIET_SECONDS:
                last_reported = time.monotonic()
                self._report(f"{case.name}: {line}")

        def on_start(one: Engine | None) -> None:
            nonlocal clock, last_reported, engine
            engine = "" if one is None else f"engine {one.number} on {one.host}"
            self._report(f"{case.name}: started{engine and f' on {engine}'}")
            clock = last_reported = time.monotonic()

        result = CaseResult(name=case.name, lab=case.notebook.stem, status="failed", seconds=0.0, folder=case.name)
        try:
            lab = prepare_lab(case.notebook, case.parameters, staging / case.name, case.timeout_seconds)
            variables = {BACKEND_VARIABLE: self._suite.backend}
            lab = replace(lab, plotly_js=f"../{PLOTLY_FILE}", variables=variables)
            if self._engines is None:
                on_start(None)
                folder = lab.run(on_cell).folder
            else:
                folder = run_on_engine(self._engines, lab, on_cell, on_start)
            measured = read_measured(folder, case.notebook.stem, case.parameters, self._suite.backend)
            result = replace(result, folder=folder.name, measured=measured)
            result = _judge(result, self._suite, self._options)
        except LabFailedError as failure:
            result = replace(result, folder=failure.folder.name, message=one_line(failure, 1000))
        except Exception as error:  # noqa: BLE001 - any error is the failure of this case, and the others go on
            result = failed(result, staging, error)
        return replace(result, seconds=round(time.monotonic() - clock, 1), engine=engine)

    def _report_end(self, result: CaseResult, num_ended: int) -> None:
        outcome = result.status if result.is_green else f"{result.status.upper()}: {result.message}"
        num_cases = str(len(self._cases))
        count = f"{num_ended:>{len(num_cases)}}/{num_cases}"
        self._report(f"[{count}] {result.name}: {outcome} ({result.seconds:.0f} s)")

    def _report(self, line: str) -> None:
        # Progress is not the result: where its reader is gone, the command's last lines will find out.
        with self._reporting, contextlib.suppress(OSError):
            self._on_progress(line.encode("utf-8", "backslashreplace").decode("utf-8"))


def _write_plotly(staging: Path) -> None:
    from plotly.offline import get_plotlyjs

    (staging / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")


def _not_run(case: Case) -> CaseResult:
    return CaseResult(
        name=case.name,
        lab=case.notebook.stem,
        status="not run",
        seconds=0.0,
        folder=case.name,
        message="the nightly was ended before this case had ended: run it with --only",
    )


def _judge(result: CaseResult, suite: Suite, options: Options) -> CaseResult:
    """Compares what a case measured with its baseline."""
    assert result.measured is not None
    path = baseline_path(suite.baselines_folder, result.name)
    try:
        baseline = read_baseline(path)
    except ValueError as error:
        return replace(result, status="bad baseline", message=str(error))
    if baseline is None:
        if options.allow_missing:
            return replace(result, status="new", message="no baseline yet, and --allow-missing lets it pass")
        command = f"memlab baseline update {suite.shown_path} --only {result.name}"
        return replace(
            result, status="no baseline", message=f"it has no baseline yet: look at its values, then {command}"
        )
    changes = compare_with_baseline(baseline.measured, result.measured, suite.backend)
    gating = [change for change in changes if not (options.allow_missing and change.is_missing)]
    message = ""
    if gating:
        num_metrics = f"{len(gating)} metric{' differs' if len(gating) == 1 else 's differ'}"
        message = f"{num_metrics} from the baseline of {baseline.date}, {commit_in_words(baseline.commit)}"
    elif not has_same_rounding(baseline.measured, result.measured):
        message = "loss is only reported: the baseline was measured with other packages or on another processor"
    return replace(
        result,
        status="changed" if gating else "passed",
        message=message,
        differences=tuple(changes),
        baseline=baseline.measured,
    )
