"""Takes a live model through one steady training step and prints what it needed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from memlab.commands.output import result_alone_on_stdout
from memlab.commands.ranks import (
    failing_together,
    gathered,
    layout_of_the_job,
    leave,
    rank,
    rank_folder,
    ranks_json,
    ranks_table,
    world_size,
)
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import DTYPES, Scenario
from memlab.config.settings import (
    CHECKPOINT_INPUT_REMEDIES,
    OFFLOAD_MODULES,
    RECOMPUTE_GRANULARITIES,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODULES,
    MemorySettings,
)
from memlab.config.settings_on_model import check_on_model
from memlab.record.step_record import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_step_arguments(parser)
    add_output_arguments(parser)
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, or one that memlab doctor lists")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what commands that take steps share; values' rules are those of `Scenario` and `MemorySettings`."""
    parser.add_argument(
        "architecture", metavar="ARCH", help=f"{', '.join(ARCHITECTURES)}, or a Hugging Face config.json"
    )
    workload = parser.add_argument_group("workload")
    workload.add_argument("--num-layers", type=whole_number, metavar="N", help="build only so many layers (all)")
    workload.add_argument("--seq-length", type=whole_number, metavar="N", help="tokens in a sequence")
    workload.add_argument("--micro-batch-size", type=whole_number, metavar="N", help="sequences in a pass (1)")
    workload.add_argument("--num-microbatches", type=whole_number, metavar="N", help="passes in a step (1)")
    workload.add_argument("--seed", type=whole_number, metavar="N", help="of weights and data (1234)")
    workload.add_argument("--dtype", metavar=_choices(DTYPES), help="of parameters and activations (bf16)")
    layout = parser.add_argument_group("parallel layout, named as in Megatron: ranks beyond it are data parallel")
    for name in (
        "tensor-model",
        "context",
        "pipeline-model",
        "virtual-pipeline-model",
        "expert-model",
        "expert-tensor",
    ):
        layout.add_argument(f"--{name}-parallel-size", type=whole_number, metavar="N")
    for place in ("first", "last"):
        layout.add_argument(
            f"--num-layers-in-{place}-pipeline-stage",
            type=whole_number,
            metavar="N",
            help="if not as many as in the others",
        )
    workload.add_argument(
        "--expert-buffers",
        action="store_true",
        default=None,
        help="gradient buffers of the experts' own, as under expert parallelism",
    )
    settings = parser.add_argument_group("memory settings, named as in Megatron")
    settings.add_argument("--recompute-granularity", metavar=_choices(RECOMPUTE_GRANULARITIES))
    settings.add_argument("--recompute-method", metavar=_choices(RECOMPUTE_METHODS), help="under full")
    settings.add_argument("--recompute-num-layers", type=whole_number, metavar="N", help="under full")
    settings.add_argument("--recompute-modules", type=_names, metavar="A,B", help=f"of {', '.join(RECOMPUTE_MODULES)}")
    settings.add_argument(
        "--checkpoint-input-remedy", metavar=_choices(CHECKPOINT_INPUT_REMEDIES), help="where MoE layers are recomputed"
    )
    settings.add_argument("--offload-modules", type=_names, metavar="A,B", help=f"of {', '.join(OFFLOAD_MODULES)}")
    settings.add_argument(
        "--min-offloaded-tensor-size", type=whole_number, metavar="N", help="in elements (1048576, Megatron's default)"
    )
    settings.add_argument("--offload-parameters", action="store_true", default=None, help="on the host between steps")
    settings.add_argument(
        "--offload-gradients", action=argparse.BooleanOptionalAction, help="dropped between steps (as the optimizer)"
    )
    settings.add_argument("--offload-optimizer", action="store_true", default=None, help="on the host between steps")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares where a record goes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, bytes as integers")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also save the record and its timeline")
    parser.add_argument(
        "--snapshot", action="store_true", help="in FOLDER, snapshot.pickle for pytorch.org/memory_viz as well"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model: no torch is imported for a bad flag.

    Raises:
        ValueError: If a value breaks its rule, or the output folder holds a record.
    """
    layout = layout_of_the_job(arguments, world_size(), rank())
    workload, settings = checked_step(arguments, layout)
    make_folder(arguments, rank_folder)
    from memlab.backends import find_backend

    with result_alone_on_stdout():
        from memlab.model.process_group import require_ranks

        backend = find_backend(arguments.backend)
        require_ranks(backend.distributed_backend, workload["layout"])
        backend.require_room(Scenario(**workload))
    return lambda: _measure(workload, settings, arguments)


def checked_step(arguments: argparse.Namespace, layout: Layout) -> tuple[dict[str, Any], MemorySettings]:
    """Returns the arguments of a `Lab` and the settings of its step.

    Raises:
        ValueError: If a value breaks its rule.
    """
    workload = _given(arguments, Scenario) | {"layout": layout}
    scenario = Scenario(**workload)
    settings = MemorySettings(**_given(arguments, MemorySettings))
    check_on_model(settings, scenario.architecture, *scenario.layers_of_chunks)
    return workload, settings


def _measure(workload: dict[str, Any], settings: MemorySettings, arguments: argparse.Namespace) -> int:
    with failing_together(), result_alone_on_stdout():
        from memlab.lab.lab import Lab

        # Inside as well: closing the lab of a rank that failed would wait for the others.
        with Lab(**workload, backend=arguments.backend) as lab, failing_together():
            record = lab.step(settings)
            save(record, arguments, rank_folder)
            if record.status != "ok" and world_size() > 1:
                print(f"rank {rank()}: {record}", file=sys.stderr)
                leave(1)
            records = gathered(record) if world_size() > 1 else [record]
    if rank() == 0:
        print(_written(record, records, as_json=arguments.json))
    return 0 if record.status == "ok" else 1


def _written(record: StepRecord, records: list[StepRecord], *, as_json: bool) -> str:
    if len(records) > 1:
        return json.dumps(ranks_json(records), indent=2) if as_json else ranks_table(records)
    if as_json:
        return json.dumps(record.to_dict(), indent=2)
    from memlab.views.text.record import record_table

    return record_table(record)


def make_folder(arguments: argparse.Namespace, folder_of: Callable[[Path], Path]) -> None:
    """Makes the folder that a record goes to.

    Raises:
        ValueError: If it cannot be made, or holds a record.
    """
    if arguments.snapshot and arguments.out is None:
        raise ValueError("--snapshot has no folder to write to: give --out FOLDER")
    if arguments.out is None:
        return
    folder = folder_of(arguments.out)
    if (folder / "record.json").exists():
        raise ValueError(f"output folder {folder} holds a record, and is not overwritten: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output folder {folder} cannot be made ({error.strerror}): give another folder") from error


def save(record: StepRecord, arguments: argparse.Namespace, folder_of: Callable[[Path], Path]) -> None:
    """Saves a record where the flags say, if they do."""
    if arguments.out is not None:
        folder = record.save(folder_of(arguments.out))
        if arguments.snapshot:
            record.export_snapshot(folder / "snapshot.pickle")


def _given(arguments: argparse.Namespace, cls: type[Scenario | MemorySettings]) -> dict[str, Any]:
    """Returns the flags that were given for a class's fields; the defaults stay the class's own."""
    values = {field.name: getattr(arguments, field.name, None) for field in fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def whole_number(text: str) -> int:
    """Reads a flag's number."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _choices(values: tuple[str, ...]) -> str:
    return "{" + ",".join(values) + "}"
