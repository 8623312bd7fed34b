"""Holds saved steps against each other; a predicted and a measured one are split into terms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from memlab.analysis.difference import difference_of, obstacles
from memlab.record.step_record import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of measure --out or predict --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object, bytes as integers")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the picture and the text as an HTML page")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the records.

    Raises:
        ValueError: If there are fewer than two, a folder holds none, or the page cannot be drawn or written.
    """
    if len(arguments.folders) < 2:
        raise ValueError(f"got 1 folder, {arguments.folders[0]}, must be at least 2: give the one to hold it against")
    records = [_load(folder) for folder in arguments.folders]
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise ValueError(f"the page {arguments.out} is in no folder that exists: make {arguments.out.parent} first")
    from memlab.views.display import compare
    from memlab.views.text.difference import comparison_text

    view = None if arguments.out is None else compare(*records)
    text = _json(records) if arguments.json else comparison_text(*records)

    def write() -> int:
        if view is not None:
            view.save(arguments.out)
        print(text)
        return 0

    return write


def _load(folder: Path) -> StepRecord:
    ranks = sorted(folder.glob("rank-*/record.json"))
    if ranks and not (folder / "record.json").exists():
        raise ValueError(
            f"{folder} holds one record a rank ({len(ranks)}): give one of them, such as {ranks[0].parent}"
        )
    return StepRecord.load(folder)


def _json(records: list[StepRecord]) -> str:
    difference = difference_of(records)
    values = {
        "records": [record.to_dict() for record in records],
        "difference": None if difference is None else difference.to_dict(),
        "obstacles": obstacles(records),
    }
    return json.dumps(values, indent=2)
