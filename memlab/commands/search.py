"""Searches for the memory settings that fit a GPU: the Pareto front of peak against extra work."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from memlab.atomic_files import written_aside
from memlab.commands.predict import other_ranks_line
from memlab.commands.shared.engines import EnginesNotStartedError, number_or_profile, open_engines
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
from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import candidates
from memlab.fitting.pareto_front import SearchResult, default_resolution_bytes
from memlab.fitting.search import PredictionLostError, SearchInterrupted
from memlab.lab.search_process import search_simulated

_FEW_LAYERS = 500
"""Of all steps of a search together. One process takes so many in about the time in which engines start."""
_STEPS_PER_ENGINE = 4
"""An engine that takes fewer costs more time than it saves."""


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
    parser.add_argument(
        "--engines",
        type=number_or_profile,
        metavar="N|PROFILE",
        help="predict on N engines of ipyparallel that are started on this machine, or on those of a running cluster "
        "(ipcluster start --profile=PROFILE); the result is the same on any number; 0 and 1 use this process alone "
        "(default: one engine per core, or this process alone if the search is short)",
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

    engines = _own_engines(scenario, base, arguments.max_steps) if arguments.engines is None else arguments.engines

    def job() -> int:
        try:
            with stdout_reserved_for_result():
                found = _search(
                    engines,
                    scenario,
                    base,
                    limit_bytes,
                    outside_torch_bytes=arguments.gpu_memory - limit_bytes,
                    resolution_bytes=resolution_bytes,
                    max_steps=arguments.max_steps,
                )
        except SearchInterrupted as interrupted:
            _show(interrupted.found, arguments)
            if isinstance(interrupted.__cause__, PredictionLostError):
                print(interrupted.__cause__, file=sys.stderr)
                return 1
            return 130
        except (EnginesNotStartedError, PredictionLostError) as error:
            print(error, file=sys.stderr)
            return 1
        _show(found, arguments)
        return 0 if found.cheapest else 1

    return job


def _own_engines(scenario: Scenario, base: MemorySettings, max_steps: int | None) -> int:
    """Returns how many engines a search gets by itself; 1 is this process alone."""
    num_steps = min(len(candidates(base, scenario)), max_steps or sys.maxsize)
    if num_steps * scenario.num_layers_of_stage * scenario.num_microbatches < _FEW_LAYERS:
        return 1
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_cores, num_steps // _STEPS_PER_ENGINE))


def _search(
    engines: int | str, scenario: Scenario, base: MemorySettings, limit_bytes: int, **options: Any
) -> SearchResult:
    if engines in {0, 1}:
        return search_simulated(scenario, base, limit_bytes, **options)
    from memlab.lab.search_on_engines import search_on_engines

    with open_engines(engines) as ranks:
        print(f"predicting on {len(ranks)} engines", file=sys.stderr, flush=True)
        return search_on_engines(ranks, scenario, base, limit_bytes, **options)


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
