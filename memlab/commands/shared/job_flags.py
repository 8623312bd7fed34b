"""The flags with which a command takes a job of another framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from memlab.jobs.frameworks import FRAMEWORKS
from memlab.jobs.job import Job


def add_job_file_options(parser: argparse.ArgumentParser) -> None:
    """Declares how a job's file is read."""
    group = parser.add_argument_group("job of another framework")
    group.add_argument(
        "--format", metavar="NAME", help=f"whose file it is: {', '.join(FRAMEWORKS)} (default: memlab recognises it)"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the file, in the framework's spelling; NAME=VALUE in capitals sets a variable of a "
        "script; may be given several times",
    )
    group.add_argument(
        "--framework-version",
        metavar="VERSION",
        help="version of the framework, where its defaults depend on it; memlab says when it needs one",
    )


def job_of(
    path: Path, arguments: argparse.Namespace, *, architecture: str | None = None, world_size: int | None = None
) -> Job:
    """Reads a job's file as the flags say.

    Raises:
        ValueError: If it cannot be understood.
    """
    return Job.read(
        path,
        format_name=arguments.format,
        overrides=arguments.set,
        version=arguments.framework_version,
        architecture=architecture,
        world_size=world_size,
    )
