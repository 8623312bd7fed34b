"""Updates the baselines of a suite from one of its runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.commands.shared.output import out_path

if TYPE_CHECKING:
    from memlab.regression.refresh_baselines import Refresh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    update = actions.add_parser(
        "update",
        help="write new baselines, and print the old and new values",
        description="Write the values of a nightly run as new baselines, and print the old and new values.",
        allow_abbrev=False,
    )
    update.add_argument(
        "suite", type=Path, metavar="SUITE", help="the suite to update, such as papermill_runs/suites/cpu.yaml"
    )
    update.add_argument(
        "--only",
        metavar="PATTERN",
        help="update only cases whose name contains PATTERN; * matches any characters, ? any one character",
    )
    update.add_argument(
        "--run",
        type=out_path,
        metavar="FOLDER",
        help="folder of the nightly run to take the values from (default: the newest run of the suite)",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the suite, and that baselines can be taken from the run.

    Raises:
        ValueError: If there is no such run, one of its cases failed, or a case was run with other parameters.
    """
    from memlab.regression.refresh_baselines import plan_refresh
    from memlab.regression.suite.suite import read_suite

    suite = read_suite(arguments.suite)
    refresh = plan_refresh(suite, suite.select(arguments.only), arguments.run)
    return lambda: _write(refresh, suite.baselines_folder)


def _write(refresh: Refresh, baselines_folder: Path) -> int:
    lines: list[str] = []
    failure = ""
    try:
        lines.extend(refresh.write())
    except OSError as error:
        failure = (
            f"{baselines_folder} cannot be written ({error.strerror or error}): baselines that are not named above are "
            "as they were: free some space, and update again"
        )
    # Printed at the end: a reader that leaves early, as in ``| head``, must not leave the other baselines unwritten.
    print("\n".join(lines), flush=True)
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0
