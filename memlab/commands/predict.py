"""Predicts what a training step needs, at full size and without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlab.commands.measure import add_step_arguments, checked_step, make_folder, save
from memlab.commands.output import result_alone_on_stdout
from memlab.commands.ranks import layout_of_the_job
from memlab.fit import Fit, judge_fit
from memlab.record import StepRecord
from memlab.settings import MemorySettings
from memlab.units import format_bytes, parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `measure`, and what is asked of a GPU that is not there."""
    add_step_arguments(parser)
    parser.add_argument(
        "--gpu-memory",
        type=_size,
        metavar="SIZE",
        help="such as 80GiB: does the step fit (if not, exit 1), and what would",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model.

    Raises:
        ValueError: If a value breaks its rule, or the output folder holds a record.
    """
    layout = layout_of_the_job(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.expert_model_parallel_size,
        1,
    )
    workload, settings = checked_step(arguments, layout)
    make_folder(arguments, _folder)
    return lambda: _predict(workload, settings, arguments)


def _predict(workload: dict[str, Any], settings: MemorySettings, arguments: argparse.Namespace) -> int:
    with result_alone_on_stdout():
        from memlab.lab import Lab

        with Lab(**workload, backend="simulated") as lab:

            def step(settings: MemorySettings, room_bytes: int | None) -> StepRecord:
                lab.device_memory_bytes = room_bytes
                return lab.step(settings)

            record = step(settings, None)
            save(record, arguments, _folder)
            fit = None if arguments.gpu_memory is None else judge_fit(record, step, arguments.gpu_memory)
    print(_written(record, fit, as_json=arguments.json))
    return 0 if fit is None or fit.fits else 1


def _written(record: StepRecord, fit: Fit | None, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(record.to_dict() | ({} if fit is None else {"fit": fit.to_dict()}), indent=2)
    from memlab.views.tables import record_table

    return "\n".join([record_table(record), *([] if fit is None else ["", str(fit), *_alternatives(fit)])])


def _alternatives(fit: Fit) -> list[str]:
    if fit.fits:
        return []
    if not fit.alternatives:
        return ["no single setting makes it fit: combine them, take a smaller micro-batch or more devices"]
    lines = ["would fit, the cheapest first:"]
    for choice in fit.alternatives:
        cost = f"{choice.recomputed_operations / 1e9:.2f} GFLOP a token again"
        moved = f"{format_bytes(choice.moved_bytes)} to the host and back"
        peak = format_bytes(choice.peak_allocated_bytes)
        lines.append(f"  {choice.settings}: peak {peak}, {cost}, {moved}")
    return lines


def _folder(folder: Path) -> Path:
    return folder


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
