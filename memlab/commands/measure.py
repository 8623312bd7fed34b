"""Runs one steady training step on a live model and prints the memory that it needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from memlab.backends import BACKEND_VARIABLE, BACKENDS
from memlab.backends.allocator_environment import start_with
from memlab.commands.shared.output import add_record_arguments, claimed_folder, save_record
from memlab.commands.shared.process import exit_now, stdout_reserved_for_result
from memlab.commands.shared.ranks import (
    abort_job_on_error,
    gathered,
    rank,
    rank_folder,
    ranks_json,
    world_size,
)
from memlab.commands.shared.step_flags import add_pass_arguments, add_step_arguments, checked_step, layout_of_the_job
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_step_arguments(parser)
    add_pass_arguments(parser)
    add_record_arguments(parser)
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(BACKENDS)} (default: auto, which takes a GPU if there is one, otherwise the CPU)",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model: no torch is imported for a bad flag.

    Raises:
        ValueError: If a value breaks its rule, the output folder is not empty, or the backend cannot be used here.
    """
    layout = layout_of_the_job(arguments, world_size(), rank())
    workload, settings = checked_step(arguments, layout)
    _check_backend_name(arguments.backend)
    if arguments.snapshot and arguments.out is None:
        raise ValueError("--snapshot has no folder to write to: give --out FOLDER")
    with ExitStack() as claims:
        claims.enter_context(claimed_folder(arguments.out and rank_folder(arguments.out)))
        workload["allocator"] = start_with(workload["allocator"])
        from memlab.backends import find_backend

        with stdout_reserved_for_result():
            backend = find_backend(arguments.backend)
            backend.check(Scenario.of(**workload))
        claimed = claims.pop_all()
    return lambda: _measure(workload, settings, arguments, claimed)


def _check_backend_name(name: str) -> None:
    """Refuses an unknown name before torch is imported."""
    flag = "--backend"
    if name == "auto" and BACKEND_VARIABLE in os.environ:
        flag, name = f"the environment variable {BACKEND_VARIABLE}", os.environ[BACKEND_VARIABLE]
    if name not in BACKENDS:
        raise ValueError(f"{flag} is {name!r}, must be one of {', '.join(BACKENDS)}: choose one of them")


def _measure(
    workload: dict[str, Any], settings: MemorySettings, arguments: argparse.Namespace, claimed: ExitStack
) -> int:
    with claimed, abort_job_on_error(), stdout_reserved_for_result():
        from memlab.lab.lab import Lab

        # Inside as well: closing the lab of a rank that failed would wait for the others.
        with Lab(**workload, backend=arguments.backend) as lab, abort_job_on_error():
            lab.device_memory_bytes = arguments.device_memory
            record = lab.forward_only(settings, warm_up=True) if arguments.forward_only else lab.step(settings)
            if arguments.out is not None:
                save_record(record, rank_folder(arguments.out), snapshot=arguments.snapshot)
            if record.status != "ok" and world_size() > 1:
                print(f"rank {rank()}: {record}", file=sys.stderr)
                exit_now(1)
            records = gathered(record) if world_size() > 1 else [record]
    if rank() == 0:
        print(_result(record, records, as_json=arguments.json))
    return 0 if record.status == "ok" else 1


def _result(record: StepRecord, records: list[StepRecord], *, as_json: bool) -> str:
    from memlab.views.text.ranks import ranks_table
    from memlab.views.text.record import record_table

    if len(records) > 1:
        return json.dumps(ranks_json(records), indent=2) if as_json else ranks_table(records)
    if as_json:
        return json.dumps(record.to_dict(), indent=2)
    return record_table(record)
