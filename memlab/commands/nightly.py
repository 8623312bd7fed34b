"""Runs a suite of labs and compares each with its baseline."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.commands.shared.engines import EnginesNotStartedError, number_or_profile, open_engines
from memlab.commands.shared.output import check_writable_folder, out_path
from memlab.commands.shared.process import terminate_on_signal
from memlab.config.backend_kind import KINDS

if TYPE_CHECKING:
    from memlab.ranks.balanced import Balanced
    from memlab.regression.nightly import Options
    from memlab.regression.suite.suite import Case, Suite

_MAX_JOBS = 4
_FIRST_MODEL = "qwen3-30b-a3b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "suite", type=Path, nargs="?", metavar="SUITE", help="the suite to run, such as papermill_runs/suites/cpu.yaml"
    )
    parser.add_argument(
        "--init",
        nargs="?",
        const=_FIRST_MODEL,
        metavar="MODEL",
        help="in place of a run: write a suite, a notebook and a workflow for a model of your own into the current "
        f"folder; MODEL is a name that memlab knows or the path of a config.json (default: {_FIRST_MODEL})",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of cases that run at the same time on this machine, each in a process of its own (default: the "
        f"number of cores, but at most {_MAX_JOBS}; on a GPU 1)",
    )
    parser.add_argument(
        "--engines",
        type=number_or_profile,
        metavar="N|PROFILE",
        help="in place of --jobs: run one case at a time on each engine of a running cluster of "
        "ipyparallel (ipcluster start --profile=PROFILE), or on each of N engines that memlab starts on this machine "
        "(0 or 1: the same as --jobs 1); all engines must see the suite, the labs and the folder of runs under the "
        "same paths",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="run only cases whose name contains PATTERN; * matches any characters, ? any one character",
    )
    parser.add_argument("--allow-missing", action="store_true", help="count a case without a baseline as passed")
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="keep only the newest N runs of this suite, including this one (default: 14)",
    )
    parser.add_argument(
        "--out", type=out_path, metavar="FOLDER", help="folder that contains the runs (default: papermill_runs/runs)"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the suite with every lab, parameter and name in it; nothing has run yet.

    Raises:
        ValueError: If one of them is wrong.
    """
    from memlab.regression.nightly import KEPT_RUNS, Options
    from memlab.regression.suite.suite import read_suite

    if arguments.init is not None:
        return _prepare_first(arguments)
    if arguments.suite is None:
        raise ValueError("SUITE is missing: give a suite file, or let memlab nightly --init write a first one")
    if arguments.out is not None:
        check_writable_folder(arguments.out)
    if arguments.engines is not None and arguments.jobs is not None:
        raise ValueError("--engines cannot be combined with --jobs, which it replaces: leave one of the two out")
    engines = arguments.engines
    if engines in {0, 1}:
        engines, arguments.jobs = None, 1
    suite = read_suite(arguments.suite)
    own_jobs = min(os.cpu_count() or 1, _MAX_JOBS) if not KINDS[suite.backend].on_gpu else 1
    options = Options(
        jobs=own_jobs if arguments.jobs is None else arguments.jobs,
        allow_missing=arguments.allow_missing,
        keep=KEPT_RUNS if arguments.keep is None else arguments.keep,
        runs_folder=arguments.out,
    )
    cases = suite.select(arguments.only)
    return lambda: _run(suite, cases, options, engines)


def _prepare_first(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the model of a first nightly, and that none of its files is there.

    Raises:
        ValueError: If the model is unknown, a file exists, or a suite or a flag of a run is given too.
    """
    from memlab.config.architectures import find_architecture
    from memlab.regression.starter import starter_files

    if arguments.suite is not None:
        raise ValueError(f"SUITE is {arguments.suite}, but --init writes a suite and runs none: leave one of them out")
    for flag in ("jobs", "engines", "only", "allow_missing", "keep", "out"):
        if getattr(arguments, flag) not in (None, False):
            raise ValueError(
                f"--{flag.replace('_', '-')} cannot be combined with --init, which runs no suite: leave one of the two "
                "out"
            )
    find_architecture(arguments.init)
    files = starter_files(arguments.init)
    if there := [str(path) for path in files if path.exists()]:
        raise ValueError(f"{there[0]} exists, and --init overwrites nothing: move it away, or go to another folder")

    def write() -> int:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        (suite,) = (path for path in files if path.suffix == ".yaml")
        print(
            f"next: memlab nightly {suite} --allow-missing, look at the report, then memlab baseline update {suite}, "
            "and commit these files with papermill_runs/baselines and the wheel that the workflow names"
        )
        return 0

    return write


@contextmanager
def _serving_cases(engines: int | str | None) -> Iterator[Balanced | None]:
    """Opens engines for the block, if the cases are to run on some."""
    if engines is None:
        yield None
        return
    from memlab.ranks.balanced import Balanced
    from memlab.regression.run.case_on_engine import SERVED

    with open_engines(engines) as ranks, Balanced(ranks, SERVED) as balanced:
        yield balanced


def _run(suite: Suite, cases: tuple[Case, ...], options: Options, engines: int | str | None) -> int:
    from memlab.regression.nightly import NothingKeptError, ReportNotWrittenError, run_suite
    from memlab.regression.report.summary_text import summary_table

    what = f"running {len(cases)} of {len(suite.cases)} cases of {suite.name} on {suite.backend}"
    try:
        with terminate_on_signal() as signals, _serving_cases(engines) as serving:
            how = f"{options.jobs} at the same time" if serving is None else f"on {len(serving)} engines"
            print(f"{what}, {how}", flush=True)
            summary, run_folder = run_suite(suite, cases, options, lambda line: print(line, flush=True), serving)
    except OSError as error:
        print(
            f"the folder of runs, {options.runs_folder or suite.runs_folder}, cannot be written "
            f"({error.strerror or error}): nothing of this run was kept, and earlier runs and baselines are unchanged: "
            "free some space, keep fewer runs with --keep, or give another folder with --out",
            file=sys.stderr,
        )
        return 1
    except (EnginesNotStartedError, ReportNotWrittenError) as error:
        print(error, file=sys.stderr)
        return 1
    except NothingKeptError as error:
        print(error, file=sys.stderr)
        return 128 + signals[0]
    table = summary_table(summary).encode("utf-8", "backslashreplace").decode("utf-8")
    print(f"\n{table}\n\n{summary.headline} in {summary.seconds:.0f} s\nreport: {run_folder / 'index.html'}")
    if signals:
        print("a signal ended this nightly run: " + _kept(len(summary.results), len(summary.not_run)))
        return 128 + signals[0]
    return 1 if summary.red else 0


def _kept(num_cases: int, num_not_run: int) -> str:
    if num_not_run:
        return f"{num_cases - num_not_run} of {num_cases} cases had ended, and are kept; {num_not_run} did not run"
    return "all of its cases had ended, and all are kept"
