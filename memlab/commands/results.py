"""Writes measured settings as a Markdown page, from the records that a benchmark kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("records", type=Path, metavar="RECORDS", help="a file such as labs/results/h200.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there (printed otherwise)")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the records.

    Raises:
        ValueError: If there is no such file, or a line is no result.
    """
    from memlab.views.results import Result, results_page

    if not arguments.records.is_file():
        raise ValueError(f"records {arguments.records} do not exist: give a file such as labs/results/h200.jsonl")
    results = []
    for number, line in enumerate(arguments.records.read_text().splitlines(), start=1):
        try:
            results.append(Result.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{arguments.records}, line {number}: {error}") from error
    page = results_page(results)
    return lambda: _write(page, arguments.out)


def _write(page: str, out: Path | None) -> int:
    if out is None:
        print(page)
    else:
        out.write_text(page + "\n")
        print(f"wrote {out}")
    return 0
