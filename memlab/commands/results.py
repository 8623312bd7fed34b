"""Writes measured settings, and how accurate predictions of measured steps are, as one Markdown page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.analysis.accuracy import pairs_of
from memlab.analysis.limits import Limit
from memlab.atomic_files import written_aside
from memlab.commands.shared.output import check_new_file, out_path
from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.config.from_json import parse_json

if TYPE_CHECKING:
    from memlab.record.step_record import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "records",
        type=Path,
        metavar="RECORDS",
        help="file of records that show what settings save, such as labs/results/h200_settings.jsonl",
    )
    parser.add_argument(
        "--steps",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files of records of measured steps; memlab predicts each step and compares the two",
    )
    parser.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help="file of measured limits, such as labs/results/h200_limits.jsonl. A limit is the smallest memory with "
        "which a step completes. memlab predicts each limit (this takes seconds) and compares it with the measured one",
    )
    parser.add_argument(
        "--hardware",
        default="",
        metavar="NAME",
        help="machine that measured the records, such as 'NVIDIA H200', if they do not name it "
        "(memlab 0.1.0 wrote no name)",
    )
    parser.add_argument(
        "--out", type=out_path, metavar="FILE", help="write the page to this new file (default: print it)"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the records.

    Raises:
        ValueError: If there is no such file, a line is not a result, or a step did not finish.
    """
    from memlab.record.step_record import StepRecord
    from memlab.views.text.results import Result, results_page

    check_new_file(arguments.out)
    given = arguments.hardware.strip()
    page = results_page([_read(Result.from_dict, *line) for line in _lines(arguments.records)], given)
    steps = {
        place: _read(StepRecord.from_dict, place, line) for path in arguments.steps for place, line in _lines(path)
    }
    limits = [_read(Limit.from_dict, *line) for line in _lines(arguments.limits)] if arguments.limits else []
    for place, step in steps.items():
        if step.status != "ok":
            raise ValueError(f"--steps: {place}: {step.scenario}, {step}, did not finish: leave its line out")
    return lambda: _write(page, list(steps.values()), limits, given, arguments.out)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give a file such as labs/results/h200_settings.jsonl")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        yield f"{path}, line {number}", line


def _read(read: Callable[[dict[str, Any]], Any], place: str, line: bytes) -> Any:
    try:
        return read(parse_json(line, "the line", "measure it again"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


def _write(page: str, steps: list[StepRecord], limits: list[Limit], hardware: str, out: Path | None) -> int:
    with stdout_reserved_for_result():
        if steps or limits:
            from memlab.lab.predictions import predict_limit, predict_measured
            from memlab.views.text.accuracy import accuracy_page, limits_page
        if limits:
            predicted = [(limit, predict_limit(limit.scenario, limit.settings)) for limit in limits]
            page = f"{page}\n{limits_page(predicted)}".rstrip()
        if steps:
            page = f"{page}\n\n{accuracy_page(pairs_of(steps, predict_measured(steps)), hardware)}".rstrip()
    if out is None:
        print(page)
    else:
        with written_aside(out) as aside:
            aside.write_text(page + "\n", encoding="utf-8")
        print(f"wrote {out}")
    return 0
