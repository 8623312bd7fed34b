"""Predicts jobs that others measured, and writes both as one Markdown page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.jobs.published import PublishedJob, published_jobs
from memlab.views.text.published import published_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="take the jobs whose name has this text (default: all, some minutes)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list, with an entry for each job")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the jobs.

    Raises:
        ValueError: If no job has such a name.
    """
    all_jobs = published_jobs()
    jobs = [job for job in all_jobs if arguments.only in job.name]
    if not jobs:
        names = ", ".join(job.name for job in all_jobs)
        raise ValueError(f"--only is {arguments.only!r}, which no job has in its name: choose from {names}")
    return lambda: _print(jobs, as_json=arguments.json)


def _print(jobs: list[PublishedJob], *, as_json: bool) -> int:
    with stdout_reserved_for_result():
        from memlab.lab.published import compare_published

        rows = []
        for row in compare_published(jobs):
            rows.append(row)
            print(f"{len(rows)} of {len(jobs)}: {row.job.name}", file=sys.stderr, flush=True)
    print(json.dumps([row.to_dict() for row in rows], indent=2) if as_json else published_page(rows))
    return 0
