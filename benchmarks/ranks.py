"""One job twice, on engines and under torchrun: do all ranks allocate the same bytes, and what does a change cost?

    python -m benchmarks.ranks FOLDER qwen3-30b-a3b:EP2 phi-4:PP4 ...       two and four GPUs
    python -m benchmarks.ranks FOLDER --layers 4 qwen3-moe-tiny:EP2 ...      two processes on a CPU

Each job takes a step under each of some settings, each after another, so that every step changes the setting. Both ways
begin with new processes, because what an earlier lab left in torch's allocator decides which remainders stay unsplit.
The records are in FOLDER, one file for each way, to be compared with predictions
(`python benchmarks/accuracy.py predict`).

A block that another stream used is free once that stream has passed it, which the allocator asks when it needs one: so
which block a request gets, and which remainder stays unsplit behind it, depends on timing, in one process too. What a
job requests does not. So two comparisons are printed: of the allocated bytes, and of the requested bytes that torch
counts, their peak in a step and their sum over it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.accuracy import JOBS, USUAL, full
from memlab import JobRecord, Lab, MemorySettings, Ranks, StepRecord
from memlab.lab import many_ranks
from memlab.lab.rank import Rank
from memlab.lab.request import PassRequest, StepRequest
from memlab.units import MIB

REQUESTED = "MEMLAB_REQUESTED_BYTES"
"""Names the folder in which each rank notes what it requested."""
SETTINGS = (MemorySettings(), full(1), MemorySettings(offload_modules=("core_attn",)), MemorySettings(), full(1))
ROUNDS = 2


class CountingRank(Rank):
    """A rank that notes after each step what was requested in it."""

    def take(self, request: StepRequest | PassRequest) -> StepRecord:
        """As `Rank.take`."""
        record = super().take(request)
        note_requested("engines")
        return record


def note_requested(way: str) -> None:
    """Appends the peak of the requested bytes since the step began, and their sum since the process began."""
    if torch.cuda.is_available():
        counts = torch.cuda.memory_stats()
        line = [counts["requested_bytes.all.peak"], counts["requested_bytes.all.allocated"]]
        with (Path(os.environ[REQUESTED]) / f"{way}-{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def requested_bytes(folder: Path, way: str) -> list[tuple[int, int]]:
    """Returns the peak and the total of the requested bytes of each step but the first, rank by rank.

    There are none on a CPU.
    """
    steps = []
    for path in sorted(folder.glob(f"{way}-?.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps += [(peak, total - before) for (_, before), (peak, total) in pairwise(lines)]
    return steps


def take_steps(lab: Lab, after_each: Callable[[], None] = lambda: None) -> tuple[list[StepRecord], list[float]]:
    """Takes a step under each setting, several times over; returns the records and the seconds of each change."""
    records, seconds = [], []
    lab.step()
    after_each()
    for settings in SETTINGS * ROUNDS:
        started = time.perf_counter()
        records.append(lab.step(settings))
        seconds.append(time.perf_counter() - started)
        after_each()
    return records, seconds


def arguments_of(job: str, num_layers: int | None) -> dict[str, Any]:
    """Returns the arguments of a job's lab."""
    architecture, _, name = job.partition(":")
    layout, num_microbatches = JOBS[name]
    workload = (USUAL if "tiny" not in architecture else {}) | {"num_microbatches": num_microbatches}
    return {"architecture": architecture, "num_layers": num_layers, "layout": layout, **workload}


def num_ranks(job: str) -> int:
    """Returns how many processes a job has."""
    return JOBS[job.partition(":")[2]][0].world_size


def on_engines(job: str, num_layers: int | None) -> tuple[list[StepRecord], list[float]]:
    """Steps a job on new engines; returns every rank's records."""
    started = time.perf_counter()
    with patch.object(many_ranks, "_SERVED", "benchmarks.ranks:CountingRank"), Ranks.start(num_ranks(job)) as ranks:
        print(f"{len(ranks)} engines: {time.perf_counter() - started:.1f} s")
        with Lab(**arguments_of(job, num_layers), ranks=ranks) as lab:
            steps, seconds = take_steps(lab)
    return [record for step in steps if isinstance(step, JobRecord) for record in step.ranks], seconds


def as_one_rank(job: str, num_layers: int | None, folder: Path) -> None:
    """Steps this rank of a job under torchrun, and writes its records and seconds."""
    rank = int(os.environ["RANK"])
    arguments = arguments_of(job, num_layers)
    with Lab(**arguments | {"layout": replace(arguments["layout"], rank=rank)}) as lab:
        records, seconds = take_steps(lab, partial(note_requested, "torchrun"))
    values = {"records": [record.to_dict() for record in records], "seconds": seconds}
    (folder / f"torchrun-{job}-{rank}.json").write_text(json.dumps(values))


def under_torchrun(job: str, num_layers: int | None, folder: Path) -> tuple[list[StepRecord], list[float]]:
    """Steps a job under torchrun; returns every rank's records."""
    number = num_ranks(job)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number)]
    layers = ["--layers", str(num_layers)] if num_layers else []
    own = ["-m", "benchmarks.ranks", str(folder), *layers, "--as-one-rank", job]
    subprocess.run([*torchrun, *own], check=True, timeout=300)
    values = [json.loads((folder / f"torchrun-{job}-{rank}.json").read_text()) for rank in range(number)]
    by_step = zip(*(one["records"] for one in values), strict=True)
    records = [StepRecord.from_dict(record) for step in by_step for record in step]
    return records, [max(all_ranks) for all_ranks in zip(*(one["seconds"] for one in values), strict=True)]


def held_bytes(record: StepRecord) -> tuple[Any, ...]:
    """Returns the bytes that both ways must have in common: at the peak, by category, and before the step."""
    return record.peak_allocated_bytes, record.static_bytes, record.peak_by_category


def main() -> None:
    """Runs the jobs both ways."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="+", metavar="ARCHITECTURE:JOB", help=f"with JOB of {', '.join(JOBS)}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--as-one-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_one_rank:
        as_one_rank(arguments.jobs[0], arguments.layers, arguments.folder)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for job in arguments.jobs:
        requested = arguments.folder / f"requested-{job}"
        requested.mkdir()
        os.environ[REQUESTED] = str(requested)
        records, seconds = on_engines(job, arguments.layers)
        lines = [json.dumps(record.to_dict() | {"peak_by_module": {}}) for record in records]
        (arguments.folder / f"engines-{job}.jsonl").write_text("\n".join(lines) + "\n")
        others, other_seconds = under_torchrun(job, arguments.layers, arguments.folder)
        pairs = list(zip(records, others, strict=True))
        equal = sum(held_bytes(one) == held_bytes(other) for one, other in pairs)
        apart = max(abs(one.peak_allocated_bytes - other.peak_allocated_bytes) for one, other in pairs)
        ratio = statistics.median(seconds) / statistics.median(other_seconds)
        of_engines, of_torchrun = (requested_bytes(requested, way) for way in ("engines", "torchrun"))
        same = sum(one == other for one, other in zip(of_engines, of_torchrun, strict=True))
        print(
            f"{job}: requested bytes equal in {same} of {len(of_engines)} steps; allocated bytes in {equal} of "
            f"{len(records)}, with peaks at most {apart / MIB:.2f} MiB apart; a changed setting takes "
            f"{statistics.median(seconds):.2f} s on engines, {statistics.median(other_seconds):.2f} s under torchrun, "
            f"{ratio:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
