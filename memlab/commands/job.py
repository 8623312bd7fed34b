"""Reads the configuration of a job of another framework, and says what memlab understood of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from memlab.commands.shared.job_flags import add_job_file_options, add_writing_option, job_of
from memlab.config.architectures import Architecture
from memlab.jobs.any_model import of_any_model
from memlab.jobs.job import Job
from memlab.jobs.writing import check_engine_of
from memlab.views.text.job import job_table, lines_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a launch script, a log with a block of arguments, a resolved configuration, or FILE.py::RECIPE of "
        "Megatron-Bridge; memlab never executes it",
    )
    add_job_file_options(parser, takes_job=False)
    add_writing_option(parser)
    parser.add_argument(
        "--architecture",
        metavar="ARCH",
        help="take this model in place of the job's own: a name that memlab knows, or the path of a config.json",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: what the file says)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Reads the job's file.

    Raises:
        ValueError: If it cannot be understood, or ``--as`` names a framework of another engine.
    """

    def read(architecture: str | Architecture | None, *, fields_only: bool = True) -> Job:
        return job_of(
            arguments.file,
            arguments,
            architecture=architecture or arguments.architecture,
            world_size=arguments.world_size,
            fields_only=fields_only,
        )

    job = read(None, fields_only=False)
    if job.scenario is not None and arguments.as_framework is not None:
        check_engine_of(arguments.as_framework, job.scenario)

    def report() -> int:
        common = of_any_model(job, read)
        values = job.to_dict() | {"of_any_model": common and common.to_dict()}
        lines = None
        if arguments.as_framework is not None and job.scenario is not None and job.settings is not None:
            lines = lines_for(arguments.as_framework, job.scenario, job.settings)
            values["lines"] = lines.splitlines()
        print(json.dumps(values, indent=2) if arguments.json else job_table(job, common))
        if lines is not None and not arguments.json:
            print(f"\n{lines}")
        return 0 if job.scenario is not None else 1

    return report
