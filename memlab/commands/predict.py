"""Predicts what a training step needs, at full size and without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.analysis.diagnosis import worst
from memlab.commands.measure import (
    add_output_arguments,
    add_step_arguments,
    checked_step,
    make_folder,
    save,
    whole_number,
)
from memlab.commands.output import result_alone_on_stdout
from memlab.commands.ranks import layout_of_the_job, ranks_json, ranks_table
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.fit import Fit, fits, judge_fit
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.lab.search_process import stepping
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes, parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `measure`, and what is asked of a job and a GPU that are not there."""
    add_step_arguments(parser)
    add_output_arguments(parser)
    add_job_arguments(parser)
    parser.add_argument("--rank", type=_rank, default=0, metavar="N|all", help="one rank (0), or one of every kind")
    parser.add_argument(
        "--gpu-memory",
        type=memory_size,
        metavar="SIZE",
        help="such as 80GiB: does it fit (if not, exit 1), and what would",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what only a job that is not there can be asked."""
    parser.add_argument("--world-size", type=whole_number, default=1, metavar="N", help="ranks of the job (1)")
    parser.add_argument(
        "--routing", metavar="CHOICE", help="tokens to experts: balanced, random:SEED, skewed:FACTOR or a JSON file"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model.

    Raises:
        ValueError: If a value breaks its rule, or an output folder holds a record.
    """
    layout = layout_of_the_job(arguments, arguments.world_size, arguments.rank or 0)
    workload, settings = checked_step(arguments, layout)
    if arguments.gpu_memory is not None:
        room_of(arguments.gpu_memory, layout)
    layouts = [layout]
    if arguments.rank is None:
        layouts = [replace(layout, rank=number) for number in Scenario(**workload).ranks_of_every_kind]
    for each in layouts:
        make_folder(arguments, _folder_of(each, layouts))
    return lambda: _predict(workload, layouts, settings, arguments)


def _predict(
    workload: dict[str, Any], layouts: list[Layout], settings: MemorySettings, arguments: argparse.Namespace
) -> int:
    with result_alone_on_stdout():
        records, too_large = [], []
        for layout in layouts:
            with stepping(Scenario(**workload | {"layout": layout})) as step:
                record = step(settings, None)
                save(record, arguments, _folder_of(layout, layouts))
                if arguments.gpu_memory is not None and not fits(record, step, room_of(arguments.gpu_memory, layout)):
                    too_large.append(record)
                records.append(record)
        if arguments.out is not None and len(records) > 1:
            _save_page(records, arguments.out)
        judged = worst(too_large or records)
        fit = None
        if arguments.gpu_memory is not None:
            with stepping(judged.scenario) as step:
                fit = judge_fit(judged, step, arguments.gpu_memory)
            fit = _on_all_ranks(fit, [record.scenario for record in records if record is not judged])
    print(_written(records, judged, fit, as_json=arguments.json))
    return 0 if fit is None or fit.fits else 1


def _on_all_ranks(fit: Fit, others: list[Scenario]) -> Fit:
    """Keeps the alternatives that fit on the other ranks too, each with the largest of their peaks."""
    left = list(fit.alternatives)
    for scenario in others if left else []:
        tried, left = left, []
        with stepping(scenario) as step:
            for choice in tried:
                record = step(choice.settings, None)
                if fits(record, step, fit.gpu_memory_bytes - fit.outside_torch_bytes):
                    peak = max(choice.peak_allocated_bytes, record.peak_allocated_bytes)
                    left.append(replace(choice, peak_allocated_bytes=peak))
    return replace(fit, alternatives=tuple(left))


def _save_page(records: list[StepRecord], folder: Path) -> None:
    """Writes the ranks side by side, as ``ranks.html``."""
    from memlab.views.display import peaks

    peaks({f"rank {record.scenario.layout.rank}": record for record in records}).save(folder / "ranks.html")


def _written(records: list[StepRecord], judged: StepRecord, fit: Fit | None, *, as_json: bool) -> str:
    layout = judged.scenario.layout
    if as_json:
        values = records[0].to_dict() if len(records) == 1 else ranks_json(records)
        told = {} if fit is None else {"fit": fit.to_dict() | {"rank": layout.rank}}
        return json.dumps(values | told, indent=2)
    from memlab.views.text.record import record_table

    table = record_table(records[0]) if len(records) == 1 else ranks_table(records)
    if 1 < len(records) < layout.world_size:
        table += f"\none rank of every kind: each other of the {layout.world_size} is like one of these"
    elif len(records) == 1 and len(judged.scenario.ranks_of_every_kind) > 1:
        table += f"\n{other_ranks_line(layout)}"
    lines = [table, "", str(estimate_outside_torch(layout))]
    if fit is not None:
        name = f"rank {layout.rank} " if layout.world_size > 1 else ""
        if len(records) > 1 and fit.fits:
            name = "each rank "
        lines += ["", f"{name}{fit}", *_alternatives(fit)]
    return "\n".join(lines)


def other_ranks_line(layout: Layout) -> str:
    """Says that a rank stands for itself alone."""
    return f"rank {layout.rank} of {layout.world_size}: others hold more or less, as memlab predict --rank all tells"


def _alternatives(fit: Fit) -> list[str]:
    if fit.fits:
        return []
    if not fit.alternatives:
        room_bytes = fit.gpu_memory_bytes - fit.outside_torch_bytes
        if fit.start_bytes > room_bytes:
            start, room = format_bytes(fit.start_bytes), format_bytes(room_bytes)
            return [f"a step starts with {start}, more than {room}, whatever is set: take another layout or more GPUs"]
        return ["no single setting makes it fit: let memlab search combine them, or take a smaller batch or more GPUs"]
    return ["would fit, the cheapest first:", *(f"  {choice}" for choice in fit.alternatives)]


def _folder_of(layout: Layout, layouts: list[Layout]) -> Callable[[Path], Path]:
    return lambda folder: folder / f"rank-{layout.rank}" if len(layouts) > 1 else folder


def _rank(text: str) -> int | None:
    return None if text == "all" else whole_number(text)


def room_of(gpu_memory_bytes: int, layout: Layout) -> int:
    """Returns how many bytes of a GPU are torch's.

    Raises:
        ValueError: If there are none.
    """
    outside_torch_bytes = estimate_outside_torch(layout).total_bytes
    if gpu_memory_bytes <= outside_torch_bytes:
        raise ValueError(
            f"--gpu-memory is {format_bytes(gpu_memory_bytes)}, must be above about "
            f"{format_bytes(outside_torch_bytes)} that are held outside torch: give a larger GPU, with its unit, such "
            "as 80GiB"
        )
    return gpu_memory_bytes - outside_torch_bytes


def memory_size(text: str) -> int:
    """Reads a flag's size."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
