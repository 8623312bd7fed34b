"""Compares saved steps; the difference between a prediction and a measurement is split into terms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from memlab.analysis.difference import difference_of, obstacles
from memlab.atomic_files import written_aside
from memlab.commands.shared.output import check_new_file, out_path
from memlab.record.saved_records import load_record
from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "first",
        type=Path,
        metavar="FOLDER",
        help="folder that measure --out or predict --out wrote, or save of a record",
    )
    parser.add_argument("others", type=Path, nargs="+", metavar="FOLDER", help="one or more folders to compare it with")
    parser.add_argument("--json", action="store_true", help="print one JSON object; bytes are integers")
    parser.add_argument(
        "--out", type=out_path, metavar="FILE", help="also write the figure and the text to this new HTML file"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the records.

    Raises:
        ValueError: If a record cannot be read, or the page exists or cannot be written.
    """
    check_new_file(arguments.out)
    records = [_load(folder) for folder in (arguments.first, *arguments.others)]
    from memlab.views.display import compare
    from memlab.views.text.difference import comparison_text

    steps = [record for record in records if isinstance(record, StepRecord)]
    is_watched = len(steps) < len(records)  # or a mixture, which `compare` refuses
    view = compare(*records) if arguments.out is not None or is_watched else None
    table = f"{view}" if is_watched else comparison_text(*steps)
    text = _json(records, steps) if arguments.json else table

    def write() -> int:
        if view is not None and arguments.out is not None:
            with written_aside(arguments.out) as page:
                view.save(page)
        print(text)
        return 0

    return write


def _load(folder: Path) -> StepRecord | WatchRecord:
    ranks = sorted(folder.glob("rank-*/record.json"))
    if ranks and not (folder / "record.json").exists():
        raise ValueError(
            f"{folder} contains {len(ranks)} records, one per rank: give one of them, such as {ranks[0].parent}"
        )
    return load_record(folder)


def _json(records: list[StepRecord | WatchRecord], steps: list[StepRecord]) -> str:
    difference = difference_of(steps)
    values = {
        "records": [record.to_dict() for record in records],
        "difference": None if difference is None else difference.to_dict(),
        "obstacles": obstacles(steps),
    }
    return json.dumps(values, indent=2)
