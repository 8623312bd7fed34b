"""Reads all job files below a folder, and says how many of them memlab can predict, and what the others miss."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from memlab.jobs.survey import survey
from memlab.views.text.survey import survey_table

_SECONDS_BETWEEN_LINES = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a checkout of a framework, or another folder with launch scripts and configurations; none is executed",
    )
    parser.add_argument(
        "--framework-version",
        metavar="VERSION",
        help="version of the framework, where defaults depend on it (default: such jobs count as asked)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with an entry for each file")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the files: what is wrong with the folder is said before the first of them.

    Raises:
        ValueError: If it is no folder, or no framework has such a version.
    """
    printed = time.monotonic()

    def on_file(number: int, count: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= _SECONDS_BETWEEN_LINES:
            printed = now
            print(f"{number:,} of {count:,} files", file=sys.stderr, flush=True)

    found = survey(arguments.folder, version=arguments.framework_version, on_file=on_file)

    def report() -> int:
        print(json.dumps(found.to_dict(), indent=2) if arguments.json else survey_table(found))
        return 1 if any(one.outcome == "failed" for one in found.files) else 0

    return report
