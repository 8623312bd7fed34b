"""Refreshes the baselines of a suite from a run of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlab.regression.refresh import Refresh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    update = actions.add_parser("update", help="write them anew, printing old and new", allow_abbrev=False)
    update.add_argument("suite", type=Path, metavar="SUITE", help="such as papermill_runs/suites/cpu.yaml")
    update.add_argument("--only", metavar="PATTERN", help="only cases whose name has it; * and ? stand for any letters")
    update.add_argument("--run", type=Path, metavar="FOLDER", help="of a run (the suite's newest)")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the suite, and that the run is one that baselines can be taken from.

    Raises:
        ValueError: If it is not: no run, a failed case in it, or a case that was run with other parameters.
    """
    from memlab.regression.refresh import plan_refresh
    from memlab.regression.suite.suite import read_suite

    suite = read_suite(arguments.suite)
    refresh = plan_refresh(suite, suite.select(arguments.only), arguments.run)
    return lambda: _write(refresh, suite.baselines_folder)


def _write(refresh: Refresh, folder: Path) -> int:
    from memlab.regression.run.disk import DiskFullError, full_disk_is_told

    try:
        with full_disk_is_told(folder, "what is not named above is as it was: free some space, and update again"):
            for line in refresh.write():
                print(line)
    except DiskFullError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
