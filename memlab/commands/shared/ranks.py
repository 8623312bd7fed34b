"""One command on every rank of a job that ``torchrun`` started: one record per rank and a table of all."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memlab.commands.shared.process import exit_now
from memlab.record.step_record import StepRecord
from memlab.started_ranks import rank, world_size


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
