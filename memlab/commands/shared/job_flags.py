"""The flags with which a command takes a job of another framework, and writes one for it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.frameworks.registry import FRAMEWORKS, framework_named
from memlab.jobs.job import Job

_MANY_PASSES = 4
"""Per pipeline stage. Micro-batches beyond a few repeat what was allocated before."""
_WORKLOAD = ("num_layers", "seq_length", "micro_batch_size", "num_microbatches", "dtype")
_TOGETHER = ("recompute_", "offload_modules", "logprobs_chunk_size", "fp8_", "cross_entropy_")
"""Beginnings of names: a flag of such a group replaces all of the job's settings of the group."""


def add_job_file_options(parser: argparse.ArgumentParser, *, takes_job: bool = True) -> None:
    """Declares how a job's file is read.

    Args:
        parser: Of the command.
        takes_job: Whether the file is named with ``--job``, and not as the command's own argument.
    """
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
    names = ", ".join(FRAMEWORKS)
    group.add_argument(
        "--format", metavar="NAME", help=f"framework of the file: {names} (default: memlab recognizes it)"
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
        help=f"also print the lines to paste into a job of this framework: {', '.join(FRAMEWORKS)}",
    )


def job_of(
    path: Path, arguments: argparse.Namespace, *, architecture: str | None = None, world_size: int | None = None
) -> Job:
    """Reads a job's file as the flags say.

    Raises:
        ValueError: If it cannot be understood.
    """
    if getattr(arguments, "as_framework", None) is not None:
        framework_named(arguments.as_framework)
    return Job.read(
        path,
        format_name=arguments.format,
        overrides=arguments.set,
        version=arguments.framework_version,
        architecture=architecture,
        world_size=world_size,
        arguments=arguments.values_of_script,
    )


def take_job(arguments: argparse.Namespace, *, num_ranks: int | None = None) -> Job | None:
    """Fills in what the flags leave out from the file that ``--job`` names, if there is one.

    Args:
        arguments: Of `measure`, `predict` or `search`; they are changed.
        num_ranks: The ranks that there are, where a command measures; a single one has no layout.

    Raises:
        ValueError: If the file cannot be understood, or there is neither a job nor a model.
    """
    if getattr(arguments, "as_framework", None) is not None:
        framework_named(arguments.as_framework)
        if arguments.json:
            raise ValueError(
                "--as cannot be combined with --json, which prints only one JSON object: leave one of the two out"
            )
    if arguments.job is None:
        _require_a_model(arguments)
        return None
    given_ranks = getattr(arguments, "world_size", None)
    job = job_of(arguments.job, arguments, architecture=arguments.architecture, world_size=given_ranks)
    scenario, settings = job.required()
    if getattr(arguments, "forward_only", False) and job.rollout is not None:
        scenario = job.rollout.of_log_probabilities(scenario)
    arguments.architecture = scenario.architecture
    _fill(arguments, scenario, settings, has_layout=num_ranks != 1)
    if hasattr(arguments, "world_size"):
        arguments.world_size = scenario.layout.world_size
    notes = _notes(job, scenario, arguments.num_microbatches)
    if num_ranks == 1 and scenario.layout.world_size > 1:
        notes.append(
            f"only one rank is measured, although the job's layout is {scenario.layout}: --ranks N starts more ranks"
        )
    for note in notes:
        print(f"{job.path.name}: {note}", file=sys.stderr)
    return job


def _require_a_model(arguments: argparse.Namespace) -> None:
    for flag in ("format", "framework_version", "set"):
        if getattr(arguments, flag):
            raise ValueError(f"--{flag.replace('_', '-')} concerns a job's file, and there is none: give --job FILE")
    if arguments.values_of_script is not None:
        raise ValueError("what follows -- is for a job's script, and there is none: give --job FILE, or leave it out")
    if arguments.architecture is None:
        raise ValueError(
            f"ARCH is missing: give one of {', '.join(ARCHITECTURES)}, the path of a config.json, or --job FILE"
        )


def _notes(job: Job, scenario: Scenario, num_microbatches: int) -> list[str]:
    """Says what the user should know of a job before its figures."""
    notes = [*job.causes, *job.warnings]
    missing = [f"{one.key} ({one.effect})" for one in job.not_modelled if one.effect != "unknown"]
    if missing:
        words = "; ".join(missing)
        notes.append(
            f"memlab does not model these keys, so the job may need more or less memory than memlab says: {words} "
            f"(memlab job {job.path} explains each)"
        )
    stages = scenario.layout.pipeline_model_parallel_size
    if num_microbatches > _MANY_PASSES * stages:
        shorter = f"--num-microbatches {2 * stages} makes the step shorter"
        notes.append(f"a step has {num_microbatches} micro-batches, which take a while: {shorter}")
    return notes


def _fill(arguments: argparse.Namespace, scenario: Scenario, settings: MemorySettings, *, has_layout: bool) -> None:
    layout: dict[str, Any] = {}
    if has_layout:
        names = (field.name for field in fields(Layout) if field.name not in ("rank", "data_parallel_size"))
        layout = {name: getattr(scenario.layout, name) for name in names}
    allocator = {field.name: getattr(scenario.allocator, field.name) for field in fields(AllocatorSettings)}
    of_job = (
        {name: getattr(scenario, name) for name in _WORKLOAD}
        | {"packed_sequences": _packed_sequences(arguments, scenario)}
        | layout
        | {name: value for name, value in allocator.items() if value}
        | scenario.state.changed()
        | settings.changed()
    )
    given = {name for name in of_job if getattr(arguments, name, None) is not None}
    given |= {
        field.name
        for cls in (MemorySettings, TrainingState)
        for field in fields(cls)
        if getattr(arguments, field.name, None) is not None
    }
    for name, value in of_job.items():
        replaced = any(name.startswith(start) and any(one.startswith(start) for one in given) for start in _TOGETHER)
        if name not in given and not replaced:
            setattr(arguments, name, value)


def _packed_sequences(arguments: argparse.Namespace, scenario: Scenario) -> int | None:
    """Returns the job's packed sequences; those of a row of another length are as long as the job's."""
    if (arguments.micro_batch_size or 1) > 1 or arguments.attention_backend == "unfused":
        return None
    tokens = arguments.seq_length or scenario.seq_length
    packed, ranks = scenario.packed_sequences_in(tokens), getattr(arguments, "context_parallel_size", None) or 1
    return packed if packed is None or ranks == 1 else max(1, min(packed, tokens // (2 * ranks)))
