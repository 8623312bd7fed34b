"""One command on every rank of a job that ``torchrun`` started: a record a rank, and a summary that names the worst."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from memlab.analysis.diagnosis import worst
from memlab.config.layout import Layout
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes


def world_size() -> int:
    """Returns how many ranks were started; 1 without ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns this process's rank; 0 without ``torchrun``."""
    return int(os.environ.get("RANK", "0"))


def layout_of_the_job(arguments: argparse.Namespace, num_ranks: int, number: int) -> Layout:
    """Returns the layout that the flags name, with as many copies of the model as the ranks make.

    Args:
        arguments: With the sizes of the parallel groups, under `Layout`'s names.
        num_ranks: Of the job.
        number: The rank that is looked at.

    Raises:
        ValueError: If a size breaks its rule, or the ranks do not divide.
    """
    given = {field.name: getattr(arguments, field.name, None) for field in fields(Layout)}
    sizes = {name: size for name, size in given.items() if size is not None and name != "rank"}
    splits = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    tensor, context, pipeline = (sizes.get(name, 1) for name in splits)
    per_copy = tensor * context * pipeline
    if per_copy > 0 and (num_ranks < 1 or num_ranks % per_copy):
        raise ValueError(
            f"the job has {num_ranks} ranks, must be a multiple of {per_copy} (tensor {tensor} x context {context} x "
            f"pipeline {pipeline}): take {per_copy} (torchrun --nproc-per-node, or --world-size of a prediction), or "
            "change a size"
        )
    return Layout(**sizes, data_parallel_size=max(1, num_ranks // max(1, per_copy)), rank=number)


@contextmanager
def failing_together() -> Iterator[None]:
    """Ends this process at once if the block fails: the other ranks wait in a collective for one that will not come.

    ``torchrun`` ends them when it sees this one gone; leaving in the usual way would wait for them here.
    """
    try:
        yield
    except BaseException:
        if world_size() == 1:
            raise
        print(f"rank {rank()} failed:", file=sys.stderr)
        traceback.print_exc()
        leave(1)


def leave(code: int) -> None:
    """Ends the process without the farewells that would wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def gathered(record: StepRecord) -> list[StepRecord]:
    """Returns every rank's record, without timelines; all ranks call it."""
    import torch

    everyone: list[str] = [""] * world_size()
    torch.distributed.all_gather_object(everyone, json.dumps(record.to_dict()))
    return [StepRecord.from_dict(json.loads(text)) for text in everyone]


def ranks_json(records: list[StepRecord]) -> dict[str, Any]:
    """Returns all ranks' records as JSON-ready values, and which is the worst."""
    return {"worst_rank": worst(records).scenario.layout.rank, "ranks": [record.to_dict() for record in records]}


def ranks_table(records: list[StepRecord]) -> str:
    """Writes one row a rank, the worst marked; a predicted step has no time."""
    rows = [("rank", "peak allocated", "reserved", "at the start", "above it", "step", "")]
    rows += [
        (
            str(record.scenario.layout.rank),
            format_bytes(record.peak_allocated_bytes),
            "-" if record.peak_reserved_bytes is None else format_bytes(record.peak_reserved_bytes),
            format_bytes(record.static_bytes),
            format_bytes(record.activation_peak_bytes),
            f"{record.step_seconds * 1e3:.0f} ms" if record.tokens_per_second else "-",
            "<- worst" if record is worst(records) else "",
        )
        for record in records
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([str(records[0].scenario), f"settings: {records[0].settings}", "", *lines])


def rank_folder(folder: Path) -> Path:
    """Returns where this rank's record goes."""
    return folder / f"rank-{rank()}" if world_size() > 1 else folder
