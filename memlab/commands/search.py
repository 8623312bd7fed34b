"""Searches the memory settings that fit a GPU: the Pareto front of peak against extra work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from memlab.commands.measure import add_step_arguments, checked_step, whole_number
from memlab.commands.output import result_alone_on_stdout
from memlab.commands.predict import add_job_arguments, memory_size, other_ranks_line, room_of
from memlab.commands.ranks import layout_of_the_job
from memlab.config.scenario import Scenario
from memlab.fitting.front import Search, default_resolution_bytes
from memlab.fitting.search import SearchInterrupted
from memlab.lab.search_process import search_simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `predict` for one rank, and what bounds the search."""
    add_step_arguments(parser)
    add_job_arguments(parser)
    parser.add_argument("--rank", type=whole_number, default=0, metavar="N", help="one rank (0)")
    parser.add_argument("--gpu-memory", type=memory_size, required=True, metavar="SIZE", help="such as 80GiB")
    parser.add_argument("--max-steps", type=whole_number, metavar="N", help="predict so many settings at most")
    parser.add_argument(
        "--resolution", type=memory_size, metavar="SIZE", help="tell peaks apart by so much (1/64 of the GPU; 1B: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, bytes as integers")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="also write the chart and the table as one page")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model.

    Raises:
        ValueError: If a value breaks its rule, or the page cannot be written or is there.
    """
    layout = layout_of_the_job(arguments, arguments.world_size, arguments.rank)
    workload, base = checked_step(arguments, layout)
    scenario = Scenario(**workload)
    room_bytes = room_of(arguments.gpu_memory, layout)
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise ValueError(f"--max-steps is {arguments.max_steps}, must be at least 1: give a larger number")
    _check_page(arguments.out)
    resolution_bytes = arguments.resolution or default_resolution_bytes(arguments.gpu_memory)

    def job() -> int:
        try:
            with result_alone_on_stdout():
                found = search_simulated(
                    scenario,
                    base,
                    room_bytes,
                    outside_torch_bytes=arguments.gpu_memory - room_bytes,
                    resolution_bytes=resolution_bytes,
                    max_steps=arguments.max_steps,
                )
        except SearchInterrupted as interrupted:
            _show(interrupted.found, arguments)
            return 130
        _show(found, arguments)
        return 0 if found.cheapest else 1

    return job


def _check_page(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".html" or not path.parent.is_dir():
        raise ValueError(f"--out is {path}, must be a file that ends in .html in a folder that is there: name another")
    if path.exists():
        raise ValueError(f"{path} is there, and is not overwritten: give another file")


def _show(found: Search, arguments: argparse.Namespace) -> None:
    from memlab.views.text.search import search_table

    if arguments.out is not None:
        from memlab.views.display import View
        from memlab.views.figures.search import search_figure

        View(search_figure(found), search_table(found)).save(arguments.out)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(search_table(found))
    if len(found.scenario.ranks_of_every_kind) > 1:
        print(f"\n{other_ranks_line(found.scenario.layout)}")
