"""Searches for the memory settings that fit a GPU: the Pareto front of peak against extra work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from memlab.atomic_files import written_aside
from memlab.commands.predict import other_ranks_line
from memlab.commands.shared.output import check_new_file, out_path
from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.commands.shared.step_flags import (
    add_job_arguments,
    add_step_arguments,
    checked_step,
    layout_of_the_job,
    limit_for_torch,
    memory_size,
    whole_number,
)
from memlab.config.scenario import Scenario
from memlab.fitting.pareto_front import SearchResult, default_resolution_bytes
from memlab.fitting.search import SearchInterrupted
from memlab.lab.search_process import search_simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `predict` for one rank, and those that bound the search."""
    add_step_arguments(parser)
    add_job_arguments(parser)
    parser.epilog = "Every combination of settings that the search tries includes the memory settings that you give."
    parser.add_argument(
        "--rank",
        type=whole_number,
        default=0,
        metavar="N",
        help="find settings for this rank of the job (default 0)",
    )
    parser.add_argument(
        "--gpu-memory", type=memory_size, required=True, metavar="SIZE", help="memory of the GPU, such as 80GiB"
    )
    parser.add_argument(
        "--max-steps",
        type=whole_number,
        metavar="N",
        help="predict at most N combinations of settings (default: no limit)",
    )
    parser.add_argument(
        "--resolution",
        type=memory_size,
        metavar="SIZE",
        help="compare peaks in units of this size (default: 1/64 of the GPU's memory; 1B compares exactly)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; bytes are integers")
    parser.add_argument(
        "--out", type=out_path, metavar="FILE.html", help="also write the chart and the table to this new HTML file"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model.

    Raises:
        ValueError: If a value breaks its rule, or the page exists or cannot be written.
    """
    layout = layout_of_the_job(arguments, arguments.world_size, arguments.rank)
    workload, base = checked_step(arguments, layout)
    scenario = Scenario.of(**workload)
    limit_bytes = limit_for_torch(arguments.gpu_memory, layout)
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise ValueError(f"--max-steps is {arguments.max_steps}, must be at least 1: give a larger number")
    if arguments.out is not None and arguments.out.suffix != ".html":
        raise ValueError(f"--out is {arguments.out}, must be a file that ends in .html: choose another name")
    check_new_file(arguments.out)
    resolution_bytes = arguments.resolution or default_resolution_bytes(arguments.gpu_memory)

    def job() -> int:
        try:
            with stdout_reserved_for_result():
                found = search_simulated(
                    scenario,
                    base,
                    limit_bytes,
                    outside_torch_bytes=arguments.gpu_memory - limit_bytes,
                    resolution_bytes=resolution_bytes,
                    max_steps=arguments.max_steps,
                )
        except SearchInterrupted as interrupted:
            _show(interrupted.found, arguments)
            return 130
        _show(found, arguments)
        return 0 if found.cheapest else 1

    return job


def _show(found: SearchResult, arguments: argparse.Namespace) -> None:
    from memlab.views.text.search import search_table

    if arguments.out is not None:
        from memlab.views.display import View
        from memlab.views.figures.search import search_figure

        with written_aside(arguments.out) as page:
            View(search_figure(found), search_table(found)).save(page)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(search_table(found))
    if len(found.scenario.ranks_of_every_kind) > 1:
        print(f"\n{other_ranks_line(found.scenario.layout)}")
