"""Runs one steady training step on a live model, on one rank or many, and prints the memory that it needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from memlab.backends import BACKEND_VARIABLE, BACKENDS
from memlab.backends.allocator_environment import start_with
from memlab.commands.shared.asked_step import AskedStep, asked_step
from memlab.commands.shared.option_flags import whole_number
from memlab.commands.shared.output import add_record_arguments, claimed_folder, save_record
from memlab.commands.shared.process import exit_now, stdout_reserved_for_result
from memlab.commands.shared.ranks import abort_job_on_error, gathered, rank_folder
from memlab.commands.shared.step_flags import (
    add_pass_arguments,
    add_step_arguments,
)
from memlab.config.backend_kind import KINDS
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import check_whole_number
from memlab.quiet_import import imported
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.started_ranks import rank, world_size

_MOST_RANKS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_step_arguments(parser)
    add_pass_arguments(parser)
    add_record_arguments(parser)
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(BACKENDS)} (default: auto, which uses a GPU if there is one, and otherwise the CPU); "
        "simulated predicts the step instead of measuring it",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number,
        metavar="N",
        help="start N ranks on this machine, each in a process of its own, and measure all of them (default: 1 rank in "
        "this process; under torchrun, the ranks that it has started)",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model: no torch is imported for a bad flag.

    Raises:
        ValueError: If a value breaks its rule, the output folder is not empty, or the backend cannot be used here.
    """
    num_ranks = world_size() if arguments.ranks is None else _started_here(arguments.ranks)
    asked = asked_step(arguments, rank=rank(), measured_ranks=num_ranks)
    backend_name = _backend_name(arguments.backend)
    if arguments.snapshot and arguments.out is None:
        raise ValueError("--snapshot has no folder to write to: give --out FOLDER")
    if world_size() == 1 < num_ranks:
        return _prepare_ranks(asked, arguments, backend_name)
    with ExitStack() as claims:
        folder = arguments.out and rank_folder(arguments.out)
        claims.enter_context(claimed_folder(folder, is_of_a_rank=world_size() > 1))
        scenario = replace(asked.scenario, allocator=start_with(asked.scenario.allocator))
        imported("memlab.lab.lab")
        from memlab.backends import find_backend

        with stdout_reserved_for_result():
            backend = find_backend(arguments.backend)
            backend.check(scenario)
        claimed = claims.pop_all()
    return lambda: _measure(scenario, asked.settings, arguments, claimed)


def _started_here(num_ranks: int) -> int:
    check_whole_number("ranks", num_ranks, at_most=_MOST_RANKS)
    if world_size() > 1:
        raise ValueError(
            f"--ranks is {num_ranks}, and torchrun has started {world_size()} ranks (WORLD_SIZE): leave --ranks out, "
            "or start memlab without torchrun"
        )
    return num_ranks


def _backend_name(name: str) -> str:
    """Returns the name of the backend, which `auto` may be, and refuses an unknown one before torch is imported."""
    flag = "--backend"
    if name == "auto" and BACKEND_VARIABLE in os.environ:
        flag, name = f"the environment variable {BACKEND_VARIABLE}", os.environ[BACKEND_VARIABLE]
    if name not in BACKENDS:
        raise ValueError(f"{flag} is {name!r}, must be one of {', '.join(BACKENDS)}: choose one of them")
    return name


def _prepare_ranks(asked: AskedStep, arguments: argparse.Namespace, backend_name: str) -> Callable[[], int]:
    """Checks a step on ranks that this command starts."""
    if backend_name in KINDS and KINDS[backend_name].is_prediction:
        raise ValueError(
            f"--ranks is {arguments.ranks}, but the backend simulated starts no ranks: use memlab predict --world-size "
            f"{arguments.ranks}, or choose another backend"
        )
    for number in asked.scenario.ranks_of_every_kind:
        check_on_model(asked.settings, asked.scenario.on_rank(number))
    scenario = replace(asked.scenario, allocator=start_with(asked.scenario.allocator))
    with ExitStack() as claims:
        claims.enter_context(claimed_folder(arguments.out))
        claimed = claims.pop_all()
    return lambda: _measure_ranks(scenario, asked.settings, arguments, claimed)


def _measure_ranks(
    scenario: Scenario, settings: MemorySettings, arguments: argparse.Namespace, claimed: ExitStack
) -> int:
    with claimed, stdout_reserved_for_result():
        from memlab.lab.lab import Lab
        from memlab.ranks.group import RankFailed
        from memlab.ranks.ranks import Ranks

        try:
            with (
                Ranks.start(arguments.ranks) as ranks,
                Lab(scenario, backend=arguments.backend, ranks=ranks) as lab,
            ):
                if arguments.device_memory is not None:
                    lab.device_memory_bytes = arguments.device_memory
                job = lab.forward_only(settings, warm_up=True) if arguments.forward_only else lab.step(settings)
        except (ValueError, RankFailed) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        assert isinstance(job, JobRecord)
        for record in job.ranks if arguments.out is not None else ():
            save_record(record, arguments.out / f"rank-{record.scenario.layout.rank}", snapshot=arguments.snapshot)
    print(_result(list(job.ranks), as_json=arguments.json))
    return 0 if job.status == "ok" else 1


def _measure(scenario: Scenario, settings: MemorySettings, arguments: argparse.Namespace, claimed: ExitStack) -> int:
    with claimed, abort_job_on_error(), stdout_reserved_for_result():
        from memlab.lab.lab import Lab

        # Inside as well: closing the lab of a rank that failed would wait for the others.
        with Lab(scenario, backend=arguments.backend) as lab, abort_job_on_error():
            lab.device_memory_bytes = arguments.device_memory
            record = lab.forward_only(settings, warm_up=True) if arguments.forward_only else lab.step(settings)
            if arguments.out is not None:
                save_record(record, rank_folder(arguments.out), snapshot=arguments.snapshot)
            if record.status != "ok" and world_size() > 1:
                print(f"rank {rank()}: {record}", file=sys.stderr)
                exit_now(1)
            records = gathered(record) if world_size() > 1 else [record]
    if rank() == 0:
        print(_result(records, as_json=arguments.json))
    return 0 if record.status == "ok" else 1


def _result(records: list[StepRecord], *, as_json: bool) -> str:
    from memlab.views.text.ranks import ranks_table
    from memlab.views.text.record import record_table

    if records[0].scenario.layout.world_size > 1:
        return json.dumps(JobRecord.of(records).to_dict(), indent=2) if as_json else ranks_table(records)
    return json.dumps(records[0].to_dict(), indent=2) if as_json else record_table(records[0])
