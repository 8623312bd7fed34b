"""One command on every rank of a job that ``torchrun`` started: one record per rank and a table of all."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memlab.commands.shared.process import exit_now
from memlab.record.step_record import StepRecord


def world_size() -> int:
    """Returns how many ranks were started; 1 without ``torchrun``.

    Raises:
        ValueError: If the environment variable ``WORLD_SIZE`` is not a positive number.
    """
    return _number_from_environment("WORLD_SIZE", default=1, at_least=1)


def rank() -> int:
    """Returns this process's rank; 0 without ``torchrun``.

    Raises:
        ValueError: If the environment variable ``RANK`` is not the number of one of the ranks.
    """
    number = _number_from_environment("RANK", default=0, at_least=0)
    if number >= world_size():
        raise ValueError(
            f"the environment variable RANK is {number}, must be below WORLD_SIZE, {world_size()}: start the ranks "
            "with torchrun, or unset both"
        )
    return number


def _number_from_environment(name: str, *, default: int, at_least: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < at_least:
        raise ValueError(
            f"the environment variable {name} is {text!r}, must be a whole number of at least {at_least}: start the "
            "ranks with torchrun, or unset it"
        )
    return int(text)


@contextmanager
def abort_job_on_error() -> Iterator[None]:
    """Ends this process at once if the block fails: the other ranks wait for it in a collective.

    ``torchrun`` ends them when it sees this one exit; an ordinary exit would wait for them here.
    """
    try:
        yield
    except BaseException:
        if world_size() == 1:
            raise
        print(f"rank {rank()} failed:", file=sys.stderr)
        traceback.print_exc()
        exit_now(1)


def gathered(record: StepRecord) -> list[StepRecord]:
    """Returns every rank's record, without timelines; all ranks call it."""
    import torch

    everyone: list[str] = [""] * world_size()
    torch.distributed.all_gather_object(everyone, json.dumps(record.to_dict()))
    return [StepRecord.from_dict(json.loads(text)) for text in everyone]


def rank_folder(folder: Path) -> Path:
    """Returns where this rank's record goes."""
    return folder / f"rank-{rank()}" if world_size() > 1 else folder
