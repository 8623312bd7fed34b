"""Searches for the memory settings that fit a GPU: the Pareto front of peak against extra work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memlab.atomic_files import written_aside
from memlab.commands.predict import other_ranks_line
from memlab.commands.shared.asked_step import asked_step
from memlab.commands.shared.engines import EnginesNotStartedError, number_or_profile, open_engines
from memlab.commands.shared.exit_codes import EXIT_CODES
from memlab.commands.shared.job_flags import add_writing_option, writable_as
from memlab.commands.shared.option_flags import whole_number
from memlab.commands.shared.output import check_new_file, out_path
from memlab.commands.shared.process import stdout_reserved_for_result, terminated_as_by_ctrl_c
from memlab.commands.shared.step_flags import (
    add_job_arguments,
    add_step_arguments,
    limit_for_torch,
    memory_size,
    rank_or_all,
)
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.along_front import AlongFront, AlongFrontInterrupted, largest_along_front
from memlab.fitting.candidates import candidates, each_alone
from memlab.fitting.does_it_fit import VERDICTS
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.largest import WHATS, Largest, LargestInterrupted, with_value
from memlab.fitting.layouts import SIZES, LayoutSearchInterrupted, layouts_of
from memlab.fitting.least_peak import bytes_at_update
from memlab.fitting.pareto_front import SearchResult, default_resolution_bytes
from memlab.fitting.peak_range import with_lower_end
from memlab.fitting.prediction import PredictionLostError
from memlab.fitting.search import SearchInterrupted
from memlab.units import format_bytes
from memlab.views.text.largest import along_front_table, largest_table
from memlab.views.text.layouts import layouts_table

if TYPE_CHECKING:
    from memlab.jobs.frameworks.framework import NotModelled
    from memlab.jobs.job import Job
    from memlab.lab.search_workers import Workers

_FEW_LAYERS = 500
"""Of all steps of a search together: for fewer, a second process costs more time than it saves."""
_STEPS_PER_ENGINE = 4
"""An engine that takes fewer costs more time than it saves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `predict` for one rank, and those that bound the search."""
    add_step_arguments(parser)
    add_job_arguments(parser)
    add_writing_option(parser)
    parser.epilog = (
        "Every combination of settings that the search tries includes the memory settings that you give. Exit codes: 0 "
        "if something fits, 1 if nothing does, 3 if the best that was found may fit."
    )
    parser.add_argument(
        "--rank",
        type=rank_or_all,
        metavar="N|all",
        help="judge only rank N of the job (default all: predict one rank of each kind, and judge the worst; ranks of "
        "one kind need the same memory)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=memory_size,
        required=True,
        metavar="SIZE",
        help="memory of the GPU, such as 79GiB (what CUDA reports for a GPU of 80 GB); memlab subtracts its estimate "
        "of what is used outside torch",
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
        help="treat two peaks as equal if they lie in the same interval of this size (default: 1/64 of the GPU's "
        "memory; 1B, one byte, distinguishes all peaks)",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="predict each setting alone instead of combinations, and list all of them by how much they save, "
        "with the extra work that each costs",
    )
    parser.add_argument(
        "--engines",
        type=number_or_profile,
        metavar="N|PROFILE",
        help="predict in N processes on this machine, or on the ipyparallel engines of a running cluster "
        "(ipcluster start --profile=PROFILE); the result does not depend on N; 0 and 1 use this process alone "
        "(default: one process per core, fewer if host memory is short, or this process alone if the search is short)",
    )
    parser.add_argument(
        "--gpus",
        type=whole_number,
        metavar="N",
        help="search the layouts of a job on N GPUs instead of settings: vary the tensor, context, pipeline and expert "
        "parallel sizes that you do not give; show each layout that was tried and fits, with the least recompute that "
        "makes it fit; all layouts train the same number of sequences per step, N x --num-microbatches x "
        "--micro-batch-size, so a layout with fewer data-parallel ranks takes more micro-batches; not together with "
        "--job",
    )
    parser.add_argument(
        "--largest",
        metavar="{" + ",".join(WHATS) + "}",
        help="instead of searching settings, find the largest workload that fits under the settings that you give. "
        "tokens: the most tokens in a micro-batch of one packed row; seq-length: the longest sequence; "
        "micro-batch-size: the most sequences in a micro-batch. The number of micro-batches stays as it is",
    )
    parser.add_argument(
        "--along-front",
        action="store_true",
        help="with --largest: first search the settings, and then find the largest workload under each setting on the "
        "front; a setting is on the front if no other setting is at least as good in peak, recompute and transfer",
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="predict each step anew, and neither use nor keep predictions of other searches. Without this flag, a "
        "search keeps what it predicts in ~/.cache/memlab/predictions, or in the folder that MEMLAB_PREDICTIONS names, "
        "and a later search uses it if job, settings, memlab and the installed packages are the same; the results are "
        "the same in either case",
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
    search = _layout_search(arguments) if arguments.gpus is not None else _settings_search(arguments)

    def job() -> int:
        try:
            with terminated_as_by_ctrl_c():
                return search()
        except (EnginesNotStartedError, PredictionLostError) as error:
            print(error, file=sys.stderr)
            return 1

    return job


def _settings_search(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks a search through settings, or for the largest workload, and returns it."""
    asked = asked_step(arguments, rank=arguments.rank)
    base, source, scenarios = asked.settings, asked.job, asked.on_ranks
    limit_bytes = limit_for_torch(arguments.gpu_memory, asked.scenario)
    _check_bounds(arguments)
    resolution_bytes = arguments.resolution or default_resolution_bytes(arguments.gpu_memory)

    tried = each_alone(base, scenarios[0]) if arguments.alone else candidates(base, scenarios[0])
    most_engines = _most_engines(scenarios, min(len(tried), arguments.max_steps or sys.maxsize))

    is_allowed = writable_as(arguments.as_framework, scenarios[0], base)

    def find_front(workers: Workers) -> SearchResult:
        from memlab.lab.search_workers import front_of

        return front_of(
            base,
            scenarios,
            workers,
            limit_bytes,
            outside_torch_bytes=arguments.gpu_memory - limit_bytes,
            resolution_bytes=resolution_bytes,
            max_steps=arguments.max_steps,
            alone=arguments.alone,
            is_allowed=is_allowed,
        )

    _check_largest(arguments, asked.scenario)
    if arguments.along_front:
        return lambda: _find_along_front(arguments, scenarios, limit_bytes, find_front, source)
    if arguments.largest is not None:
        return lambda: _find_largest(arguments, scenarios, base, limit_bytes, source)

    def job() -> int:
        _tell_least(scenarios, limit_bytes)
        try:
            with (
                stdout_reserved_for_result(),
                _workers(
                    arguments.engines, most_engines, replay=arguments.replay, anew=arguments.anew, source=source
                ) as workers,
            ):
                found = find_front(workers)
        except SearchInterrupted as interrupted:
            _show(interrupted.found, arguments)
            return _code_of(interrupted)
        _show(found, arguments)
        if found.cheapest:
            _show_lines(arguments, scenarios[0], found.best.settings, source)
        return EXIT_CODES[found.best.verdict]

    return job


def _tell_least(scenarios: list[Scenario], limit_bytes: int) -> None:
    """Says at once, before the first of the steps, what no setting changes."""
    most = max(scenarios, key=bytes_at_update)
    num_bytes = bytes_at_update(most)
    verdict = ": no predicted setting fits" if num_bytes > limit_bytes else ""
    print(
        f"under all settings, parameters, gradients and optimizer state of rank {most.layout.rank} take at "
        f"least {format_bytes(num_bytes)} during the update; torch may hold {format_bytes(limit_bytes)}{verdict}",
        file=sys.stderr,
        flush=True,
    )


def _check_bounds(arguments: argparse.Namespace) -> None:
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise ValueError(f"--max-steps is {arguments.max_steps}, must be at least 1: give a larger number")
    if arguments.out is not None and arguments.out.suffix != ".html":
        raise ValueError(f"--out is {arguments.out}, must be a file that ends in .html: choose another name")
    check_new_file(arguments.out)


def _layout_search(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks what `--gpus` can be combined with, and returns the search through layouts."""
    if arguments.job is not None:
        raise ValueError(
            "--job cannot be combined with --gpus, whose layouts replace the job's: give ARCH and the job's settings "
            "as flags (memlab job FILE shows them)"
        )
    fixed = (
        *("data_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    )
    others = ("largest", "rank", "max_steps", "resolution", "out", *fixed)
    for flag in ("along_front", "alone", *others):
        if getattr(arguments, flag) not in (None, False):
            raise ValueError(
                f"--{flag.replace('_', '-')} cannot be combined with --gpus, which goes through layouts: leave one of "
                "the two out"
            )
    if arguments.world_size is not None:
        raise ValueError(
            f"--world-size is {arguments.world_size}, but --gpus {arguments.gpus} already gives the number of ranks: "
            "leave --world-size out"
        )
    names = (*SIZES, "expert_tensor_parallel_size", "sequence_parallel")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    alone = argparse.Namespace(**vars(arguments) | dict.fromkeys(names) | {"world_size": arguments.gpus})
    asked = asked_step(alone)
    job = asked.scenario
    if job.engine != "megatron":
        raise ValueError(
            f"--engine is {job.engine!r} with --gpus, but memlab searches only layouts of engine 'megatron': leave "
            "--gpus out, or predict each number of ranks (memlab predict --data-parallel-size N)"
        )
    limit_for_torch(arguments.gpu_memory, job)
    if not layouts_of(job, given):
        sizes = ", ".join(f"{name} {size}" for name, size in given.items()) or "any sizes"
        raise ValueError(
            f"--gpus is {arguments.gpus}, but {job.architecture.name} has no layout of that many ranks with "
            f"{sizes}: give another "
            "number, or other sizes"
        )
    return lambda: _find_layouts(arguments, job, given, asked.settings)


def _find_layouts(arguments: argparse.Namespace, job: Scenario, given: dict[str, int], base: MemorySettings) -> int:
    from memlab.lab.search_workers import layouts_that_fit

    code = None
    try:
        with (
            stdout_reserved_for_result(),
            _workers(arguments.engines, replay=arguments.replay, anew=arguments.anew) as workers,
        ):
            is_allowed = writable_as(arguments.as_framework, job, base)
            found = layouts_that_fit(job, given, base, arguments.gpu_memory, workers, is_allowed)
    except LayoutSearchInterrupted as interrupted:
        found, code = interrupted.found, _code_of(interrupted)
    _print(found, layouts_table, arguments)
    if found.fitting:
        best = found.fitting[0]
        scenario = replace(job, layout=best.layout, num_microbatches=best.num_microbatches)
        _show_lines(arguments, scenario, best.settings)
    if code is not None:
        return code
    return EXIT_CODES[min((one.verdict for one in found.fitting), key=VERDICTS.index, default="does not fit")]


def _check_largest(arguments: argparse.Namespace, scenario: Scenario) -> None:
    """Checks what `--largest` can be combined with."""
    if arguments.largest is None:
        if arguments.along_front:
            raise ValueError(
                "--along-front needs --largest, which says what to make as large as possible: give --largest, or "
                "leave --along-front out"
            )
        return
    if arguments.alone:
        raise ValueError(
            "--alone cannot be combined with --largest, which varies the workload: leave one of the two out"
        )
    if arguments.largest not in WHATS:
        raise ValueError(f"--largest is {arguments.largest!r}, must be one of {', '.join(WHATS)}: choose one of them")
    of_front = () if arguments.along_front else ("max_steps", "resolution")
    for flag in (*of_front, "out"):
        if getattr(arguments, flag) is not None:
            why = "which draws no chart" if flag == "out" else "which searches no settings without --along-front"
            raise ValueError(
                f"--{flag.replace('_', '-')} cannot be combined with --largest, {why}: leave one of the two out"
            )
    if arguments.largest == "tokens" and scenario.micro_batch_size > 1:
        raise ValueError(
            f"--micro-batch-size is {scenario.micro_batch_size}, must be 1 with --largest tokens, whose micro-batch "
            "is one packed sequence: leave --micro-batch-size out, or choose --largest seq-length, which keeps "
            f"{scenario.micro_batch_size} sequences in a micro-batch"
        )


def _find_largest(
    arguments: argparse.Namespace,
    scenarios: list[Scenario],
    settings: MemorySettings,
    limit_bytes: int,
    source: Job | None,
) -> int:
    from memlab.lab.search_workers import largest_of

    code = None
    few = scenarios[0].num_layers_of_stage * scenarios[0].num_microbatches * len(scenarios) * 8 < _FEW_LAYERS
    most_engines = 1 if few else 2 * len(scenarios)  # of one rank, two values at a time are worth trying
    try:
        with (
            stdout_reserved_for_result(),
            _workers(
                arguments.engines,
                most_engines,
                replay=arguments.replay,
                anew=arguments.anew,
                source=source,
                is_endless=True,
            ) as workers,
        ):
            outside_torch_bytes = arguments.gpu_memory - limit_bytes
            found = largest_of(
                arguments.largest, settings, scenarios, workers, limit_bytes, outside_torch_bytes=outside_torch_bytes
            )
    except LargestInterrupted as interrupted:
        found, code = interrupted.found, _code_of(interrupted)
    _print(found, largest_table, arguments)
    value = found.largest_that_fits or found.largest_that_may_fit
    if value is not None:
        _show_lines(arguments, with_value(scenarios[0], arguments.largest, value), settings, source)
    return _code_of_largest(found) if code is None else code


def _find_along_front(
    arguments: argparse.Namespace,
    scenarios: list[Scenario],
    limit_bytes: int,
    find_front: Callable[[Workers], SearchResult],
    source: Job | None,
) -> int:
    from memlab.lab.search_workers import largest_of

    code, outside_torch_bytes = None, arguments.gpu_memory - limit_bytes
    try:
        with (
            stdout_reserved_for_result(),
            _workers(
                arguments.engines, replay=arguments.replay, anew=arguments.anew, source=source, is_endless=True
            ) as workers,
        ):

            def find(settings: MemorySettings) -> Largest:
                print(f"the largest under '{settings}':", file=sys.stderr, flush=True)
                return largest_of(
                    arguments.largest,
                    settings,
                    scenarios,
                    workers,
                    limit_bytes,
                    outside_torch_bytes=outside_torch_bytes,
                )

            found = largest_along_front(arguments.largest, find_front(workers), find)
    except SearchInterrupted as interrupted:
        found, code = AlongFront(what=arguments.largest, front=interrupted.found, found=()), _code_of(interrupted)
    except AlongFrontInterrupted as interrupted:
        found, code = interrupted.found, _code_of(interrupted)
    _print(found, along_front_table, arguments)
    best = found.best
    if best is not None and best.largest_that_may_fit is not None:
        scenario = with_value(scenarios[0], arguments.largest, best.largest_that_may_fit)
        _show_lines(arguments, scenario, best.settings, source)
    return _code_of_largest(best) if code is None else code


def _code_of_largest(found: Largest | None) -> int:
    """Returns the exit code of the best verdict on any value."""
    if found is None or found.largest_that_may_fit is None:
        return EXIT_CODES["does not fit"]
    return EXIT_CODES["may fit" if found.largest_that_fits is None else "fits"]


def _code_of(interrupted: Interrupted[Any]) -> int:
    """Returns the exit code of a search that was cut short, and names the error if one is the cause."""
    if isinstance(interrupted.__cause__, PredictionLostError):
        print(interrupted.__cause__, file=sys.stderr)
        return 1
    return 130


def _most_engines(scenarios: list[Scenario], num_settings: int) -> int:
    """Returns in how many processes a search predicts at most by itself; 1 is this process alone."""
    scenario = scenarios[0]
    num_steps = num_settings * len(scenarios)
    if num_steps * scenario.num_layers_of_stage * scenario.num_microbatches < _FEW_LAYERS:
        return 1
    return num_steps // _STEPS_PER_ENGINE


def _with_lower_end(source: Job) -> tuple[NotModelled, ...]:
    """Returns what the job does so that every effect has a lower end, and says what is left out for that."""
    known = with_lower_end(source.not_modelled, *source.required())
    changed = [old.key for old, new in zip(source.not_modelled, known, strict=True) if old != new]
    if changed:
        print(
            f"{source.path.name}: larger workloads may fit too, because memlab does not know how many bytes these keys "
            f"take away: {', '.join(changed)}",
            file=sys.stderr,
        )
    return known


@contextmanager
def _workers(
    engines: int | str | None,
    at_most: int = sys.maxsize,
    *,
    replay: bool,
    source: Job | None = None,
    is_endless: bool = False,
    anew: bool,
) -> Iterator[Workers]:
    """Opens processes of this machine, by default at most so many, or connects to the engines of a profile.

    Args:
        at_most: Of this machine.
        source: The job, if it was read from a file.
        is_endless: Whether the search goes on to larger workloads until one does not fit.
    """
    from memlab.allocator.choice import compile_in_background
    from memlab.lab.kept_predictions import KeptPredictions
    from memlab.lab.search_workers import open_workers, tell

    not_modelled = () if source is None else source.not_modelled
    if is_endless and source is not None:
        not_modelled = _with_lower_end(source)
    if not isinstance(engines, str):
        compile_in_background(tell)
        kept = KeptPredictions.here(tell) if replay and not anew else None
        try:
            with open_workers(engines, at_most=at_most, replay=replay, not_modelled=not_modelled, kept=kept) as workers:
                yield workers
        finally:
            if kept is not None:
                kept.shorten()
        if workers.num_kept:
            tell(f"{workers.num_kept} of these steps are those of earlier searches; --anew predicts them anew")
        return
    with open_engines(engines) as ranks, open_workers(ranks, replay=replay, not_modelled=not_modelled) as workers:
        print(f"predicting on {len(ranks)} engines", file=sys.stderr, flush=True)
        yield workers


def _print(found: Any, table: Callable[[Any], str], arguments: argparse.Namespace) -> None:
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else table(found))


def _show_lines(
    arguments: argparse.Namespace, scenario: Scenario, settings: MemorySettings, source: Job | None = None
) -> None:
    """Prints what ``--as`` asks for."""
    if arguments.as_framework is not None:
        from memlab.views.text.job import lines_for

        print(f"\n{lines_for(arguments.as_framework, scenario, settings, source)}")


def _show(found: SearchResult, arguments: argparse.Namespace) -> None:
    from memlab.views.text.peak_range import range_lines
    from memlab.views.text.search import alone_table, search_table

    table = alone_table(found) if arguments.alone else search_table(found)
    if arguments.out is not None:
        from memlab.views.display import View
        from memlab.views.figures.search import search_figure

        with written_aside(arguments.out) as page:
            View(search_figure(found), table).save(page)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(table)
    for line in range_lines(found.best.peak):
        print(line)
    if arguments.rank is not None and len(found.scenario.ranks_of_every_kind) > 1:
        print(f"\n{other_ranks_line(found.scenario.layout)}")
