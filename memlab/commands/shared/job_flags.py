"""The flags with which a command takes a job of another framework, and writes one for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.config.architectures import Architecture, known_names

if TYPE_CHECKING:
    from memlab.config.scenario import Scenario
    from memlab.config.settings import MemorySettings
    from memlab.jobs.job import Job


class _Help(str):
    """Help with the names of frameworks. Their tables, a tenth of a short command's time, are imported to show it."""

    __slots__ = ()

    def __mod__(self, values: Any) -> str:
        from memlab.jobs.frameworks.registry import FRAMEWORKS, OF_OTHER_MODELS

        return str.__mod__(self, {"frameworks": ", ".join(FRAMEWORKS), "others": ", ".join(OF_OTHER_MODELS)} | values)


def add_job_file_options(parser: argparse.ArgumentParser, *, takes_job: bool = True) -> None:
    """Declares how a job's file is read: by ``--job`` if `takes_job`, or else as the command's own argument."""
    parser.set_defaults(values_of_script=None)
    group = parser.add_argument_group(
        "job of another framework",
        "If the job's file is a script that is started with values, write them at the end, behind two dashes, as in: "
        "-- 2 8",
    )
    if takes_job:
        group.add_argument(
            "--job",
            type=Path,
            metavar="FILE",
            help="take model, layout, workload, training state and memory settings from a job's own file (memlab job "
            "explains it); ARCH and flags that you give replace the job's",
        )
    group.add_argument(
        "--format",
        metavar="NAME",
        help=_Help(
            "framework of the file: %(frameworks)s (default: memlab recognizes it); %(others)s: take the second model "
            "that such a job trains"
        ),
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the job's file to another value; write the key as the framework does. If the file is a "
        "script, KEY may also be one of its variables. May be given several times",
    )
    group.add_argument(
        "--framework-version",
        metavar="VERSION",
        help="version of the framework, if its defaults depend on the version; memlab says when it needs one",
    )


def add_writing_option(parser: argparse.ArgumentParser) -> None:
    """Declares for which framework the result is written."""
    parser.add_argument(
        "--as",
        dest="as_framework",
        metavar="NAME",
        help=_Help("also print the lines to paste into a job of this framework: %(frameworks)s"),
    )


def job_of(
    path: Path,
    arguments: argparse.Namespace,
    *,
    architecture: str | Architecture | None = None,
    world_size: int | None = None,
    fields_only: bool = False,
) -> Job:
    """Reads a job's file as the flags say.

    Raises:
        ValueError: If it cannot be understood.
    """
    from memlab.jobs.job import Job

    _check_framework(arguments)
    return Job.read(
        path,
        format_name=arguments.format,
        overrides=arguments.set,
        version=arguments.framework_version,
        architecture=architecture,
        world_size=world_size,
        arguments=arguments.values_of_script,
        fields_only=fields_only,
    )


def job_of_flags(arguments: argparse.Namespace) -> Job | None:
    """Reads the file that ``--job`` names, if there is one.

    Raises:
        ValueError: If the file cannot be understood, or there is neither a job nor a model.
    """
    if _check_framework(arguments) and arguments.json:
        raise ValueError(
            "--as cannot be combined with --json, which prints only one JSON object: leave one of the two out"
        )
    if arguments.job is None:
        _require_a_model(arguments)
        return None
    given_ranks = getattr(arguments, "world_size", None)
    return job_of(arguments.job, arguments, architecture=arguments.architecture, world_size=given_ranks)


def _check_framework(arguments: argparse.Namespace) -> bool:
    """Returns whether a job of a framework is to be written, which there has to be."""
    if getattr(arguments, "as_framework", None) is None:
        return False
    from memlab.jobs.frameworks.registry import framework_named

    framework_named(arguments.as_framework)
    return True


def writable_as(
    framework_name: str | None, scenario: Scenario, base: MemorySettings
) -> Callable[[MemorySettings], bool]:
    """Returns what `memlab.jobs.writing.writable` returns; None, no framework, can express everything."""
    if framework_name is None:
        return lambda settings: True
    from memlab.jobs.writing import writable

    return writable(framework_name, scenario, base)


def _require_a_model(arguments: argparse.Namespace) -> None:
    for flag in ("format", "framework_version", "set"):
        if getattr(arguments, flag):
            raise ValueError(f"--{flag.replace('_', '-')} concerns a job's file, and there is none: give --job FILE")
    if arguments.values_of_script is not None:
        raise ValueError("what follows -- is for a job's script, and there is none: give --job FILE, or leave it out")
    if arguments.architecture is None:
        raise ValueError(f"ARCH is missing: give one of {known_names()}, the path of a config.json, or --job FILE")
