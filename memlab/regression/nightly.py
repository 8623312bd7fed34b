"""Runs a suite: each case in a process of its own, some at a time, all of them ended whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from memlab.backends import BACKEND_VARIABLE
from memlab.regression.baseline import baseline_path, read_baseline
from memlab.regression.compare import compare, has_same_rounding
from memlab.regression.measured import Measured, read_measured
from memlab.regression.report.report import write_reports
from memlab.regression.run.disk import full_disk_is_told
from memlab.regression.run.kept_runs import current_commit, free_name, locked, publish, read_history, run_name, staged
from memlab.regression.run.process import end_processes
from memlab.regression.run.runner import LabFailedError, PreparedLab, prepare_lab
from memlab.regression.suite.suite import Case, Suite
from memlab.regression.summary import CaseResult, Summary

KEPT_RUNS = 14
PLOTLY_FILE = "plotly.min.js"

_QUIET_SECONDS = 10.0
_DISK_FULL = (
    "nothing of this run was kept, earlier runs and baselines are as they were: free some space, or keep fewer runs "
    "with --keep"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a suite is run."""

    jobs: int = 1
    """Cases at a time."""
    allow_missing: bool = False
    """Takes a case without a baseline for passed."""
    keep: int = KEPT_RUNS
    """How many runs stay in the folder."""
    runs_folder: Path | None = None
    """None stands for the suite's own."""

    def __post_init__(self) -> None:
        for name in ("jobs", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1: give another number")


def run_suite(
    suite: Suite, cases: Sequence[Case], options: Options, on_progress: Callable[[str], object] = print
) -> tuple[Summary, Path]:
    """Runs cases of a suite, holds each against its baseline, and keeps the run.

    A run that Ctrl-C or a request to terminate ends early is kept too, with the cases that had ended by then; the
    others are ``not run``.

    Args:
        suite: What `read_suite` returned.
        cases: Those of its cases that run.
        options: How.
        on_progress: Called with one line, from one thread at a time.

    Returns:
        The summary, and the folder of the run.

    Raises:
        DiskFullError: If the folder of runs has no room. Earlier runs and baselines are as they were.
        KeyboardInterrupt: If it is ended before its first case has; nothing is kept then. `SystemExit` likewise.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    runs_folder = (options.runs_folder or suite.runs_folder).resolve()
    commit = current_commit(suite.path.parent)
    name = run_name(started, commit, suite.backend)
    with full_disk_is_told(runs_folder, _DISK_FULL), staged(runs_folder, name, on_progress) as staging:
        _write_plotly(staging)
        results = _Cases(suite, staging, options, on_progress).run(cases)
        with locked(runs_folder, on_progress):
            target = runs_folder / free_name(runs_folder, name)
            summary = Summary(
                suite=suite.name,
                backend=suite.backend,
                name=target.name,
                commit=commit,
                started=started.isoformat(timespec="seconds"),
                seconds=round(time.monotonic() - clock, 1),
                results=tuple(results),
            )
            history = read_history(runs_folder, suite.name, suite.backend, on_progress)
            write_reports(staging, summary, history)
            publish(staging, target, options.keep)
    return summary, target


def _write_plotly(staging: Path) -> None:
    from plotly.offline import get_plotlyjs

    (staging / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")


class _Cases:
    """The cases of one run while they run."""

    def __init__(self, suite: Suite, staging: Path, options: Options, on_progress: Callable[[str], object]) -> None:
        self._suite = suite
        self._staging = staging
        self._options = options
        self._on_progress = on_progress
        self._telling = threading.Lock()

    def run(self, cases: Sequence[Case]) -> list[CaseResult]:
        """Runs all cases; whatever ends this early ends the processes of all."""
        labs = [prepare_lab(c.notebook, c.parameters, self._staging / c.name, c.timeout_seconds) for c in cases]
        futures: list[Future[CaseResult]] = []
        ended: list[Future[CaseResult]] = []
        with ThreadPoolExecutor(self._options.jobs) as pool:
            try:
                futures += [pool.submit(self._run, case, lab) for case, lab in zip(cases, labs, strict=True)]
                for future in as_completed(futures):
                    ended.append(future)
                    result = future.result()
                    outcome = result.status if result.is_green else f"{result.status.upper()}: {result.message}"
                    count = f"{len(ended):>{len(str(len(cases)))}}/{len(cases)}"
                    self._tell(f"[{count}] {result.name}: {outcome} ({result.seconds:.0f} s)")
            except BaseException as error:
                ended = [future for future in futures if future.done()]
                pool.shutdown(wait=False, cancel_futures=True)
                # A thread that was about to start its process starts it still, so this asks until all have ended.
                while not all(future.done() for future in futures):
                    end_processes(self._staging)
                    wait(futures, timeout=0.2)
                if not ended or not isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
        return [
            future.result() if future in ended else _not_run(case) for case, future in zip(cases, futures, strict=True)
        ]

    def _run(self, case: Case, lab: PreparedLab) -> CaseResult:
        self._tell(f"{case.name}: started")
        clock = time.monotonic()
        last_told = clock

        def on_cell(line: str) -> None:
            nonlocal last_told
            if time.monotonic() - last_told > _QUIET_SECONDS:
                last_told = time.monotonic()
                self._tell(f"{case.name}: {line}")

        message, folder = "", lab.folder
        variables = {BACKEND_VARIABLE: self._suite.backend}
        measured: Measured | None = None
        try:
            run = replace(lab, plotly_js=f"../{PLOTLY_FILE}", variables=variables).run(on_cell)
            measured = read_measured(run.folder, case.notebook.stem, case.parameters, self._suite.backend)
        except LabFailedError as failure:
            message, folder = str(failure), failure.folder
        except ValueError as error:
            message = str(error)
        result = CaseResult(
            name=case.name,
            lab=case.notebook.stem,
            status="passed" if measured else "failed",
            seconds=round(time.monotonic() - clock, 1),
            folder=folder.name,
            message=message,
            measured=measured,
        )
        return _judge(result, self._suite, allow_missing=self._options.allow_missing)

    def _tell(self, line: str) -> None:
        with self._telling:
            self._on_progress(line)


def _not_run(case: Case) -> CaseResult:
    return CaseResult(
        name=case.name,
        lab=case.notebook.stem,
        status="not run",
        seconds=0.0,
        folder=case.name,
        message="the nightly was ended before this case was: run it with --only",
    )


def _judge(result: CaseResult, suite: Suite, *, allow_missing: bool) -> CaseResult:
    """Holds what a case measured against its baseline."""
    if result.measured is None:
        return result
    path = baseline_path(suite.baselines_folder, result.name)
    try:
        baseline = read_baseline(path)
    except ValueError as error:
        return replace(result, status="bad baseline", message=str(error))
    if baseline is None:
        if allow_missing:
            return replace(result, status="new", message="no baseline yet, which --allow-missing lets pass")
        command = f"memlab baseline update {suite.shown_path} --only {result.name}"
        return replace(
            result, status="no baseline", message=f"it has no baseline yet: look at its figures, then {command}"
        )
    differences = compare(baseline.measured, result.measured, suite.backend)
    gating = [difference for difference in differences if not (allow_missing and difference.is_missing)]
    message = ""
    if gating:
        num_metrics = f"{len(gating)} metric{' differs' if len(gating) == 1 else 's differ'}"
        message = f"{num_metrics} from the baseline of {baseline.date}, commit {baseline.commit}"
    elif not has_same_rounding(baseline.measured, result.measured):
        message = "loss is reported only: the baseline was made with other packages or on another processor"
    return replace(
        result,
        status="changed" if gating else "passed",
        message=message,
        differences=tuple(differences),
        baseline=baseline.measured,
    )
