"""Runs a suite of labs and holds each against its baseline."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.commands.process import terminate_on_signal

if TYPE_CHECKING:
    from memlab.regression.nightly import Options
    from memlab.regression.suite.suite import Case, Suite

_MOST_JOBS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("suite", type=Path, metavar="SUITE", help="such as papermill_runs/suites/cpu.yaml")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help=f"cases at a time (one a core, at most {_MOST_JOBS}; on cuda 1)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="only cases whose name has it; * and ? stand for any letters")
    parser.add_argument("--allow-missing", action="store_true", help="let a case pass that has no baseline yet")
    parser.add_argument("--keep", type=int, metavar="N", help="how many runs stay, this one counted (14)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the runs (papermill_runs/runs)")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the suite with every lab, parameter and name in it; nothing has run yet.

    Raises:
        ValueError: If one of them is wrong.
    """
    from memlab.regression.nightly import KEPT_RUNS, Options
    from memlab.regression.suite.suite import read_suite

    suite = read_suite(arguments.suite)
    own_jobs = min(os.cpu_count() or 1, _MOST_JOBS) if suite.backend != "cuda" else 1
    options = Options(
        jobs=own_jobs if arguments.jobs is None else arguments.jobs,
        allow_missing=arguments.allow_missing,
        keep=KEPT_RUNS if arguments.keep is None else arguments.keep,
        runs_folder=arguments.out,
    )
    cases = suite.select(arguments.only)
    return lambda: _run(suite, cases, options)


def _run(suite: Suite, cases: tuple[Case, ...], options: Options) -> int:
    from memlab.regression.nightly import run_suite
    from memlab.regression.report.summary_text import summary_table
    from memlab.regression.run.disk import DiskFullError

    print(
        f"running {len(cases)} of {len(suite.cases)} cases of {suite.name} on {suite.backend}, {options.jobs} at a time"
    )
    try:
        with terminate_on_signal() as signals:
            summary, folder = run_suite(suite, cases, options, lambda line: print(line, flush=True))
    except DiskFullError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no case had ended, so nothing of this run was kept; all else is as it was", file=sys.stderr)
        return 130
    print(
        f"\n{summary_table(summary)}\n\n{summary.headline} in {summary.seconds:.0f} s\nreport: {folder / 'index.html'}"
    )
    return 128 + signals[0] if summary.not_run else 1 if summary.red else 0
