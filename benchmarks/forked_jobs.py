"""Takes jobs of transformers' models one after the other, each in new processes, one for each GPU.

The processes are forked from one that has imported transformers and never uses a GPU. A folder gets ``steps.jsonl``, a
line after each job. A job that fails has a line with the error, and the others are taken all the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

GIB = 2**30
_JOB_SECONDS = {True: 90, False: 300}
"""On GPUs, and without."""


def prepare(families: Iterable[str]) -> int:
    """Imports what processes need, before they are forked; returns how many GPUs there are."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA itself could not be used after a fork
    import torch
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    from transformers import AutoModelForCausalLM  # noqa: F401

    for family in families:
        import_module(f"transformers.models.{family}.modeling_{family}")
    return torch.cuda.device_count()


def measure(jobs: Iterable[Any], take_steps: Callable[..., dict[str, Any]], folder: Path, seconds: float) -> int:
    """Takes the jobs that the folder does not have yet, and appends a line for each; returns how many failed.

    Args:
        jobs: Dataclasses with a name and a number of processes.
        take_steps: Takes a job, a rank, a folder of the ranks and ``on_gpu``, and returns what the last step needed.
        folder: Gets the lines.
        seconds: After these, no further job begins.
    """
    import torch

    started, context, failed = time.monotonic(), multiprocessing.get_context("fork"), 0
    on_gpu, file = torch.cuda.device_count() > 0, folder / "steps.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    for job in jobs:
        if job.name in done or time.monotonic() - started > seconds:
            continue
        with tempfile.TemporaryDirectory() as shared:
            ranks = [
                context.Process(target=_run_rank, args=(take_steps, job, rank, shared, on_gpu))
                for rank in range(job.num_processes)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + _JOB_SECONDS[on_gpu]
            for process in ranks:
                process.join(max(0, deadline - time.monotonic()))
                process.kill()
            rows = [
                json.loads(path.read_text()) if (path := Path(shared) / f"rank-{rank}").exists() else {"error": "ended"}
                for rank in range(job.num_processes)
            ]
        errors = [row["error"] for row in rows if "error" in row]
        failed += bool(errors)
        row = {"error": errors[0]} if errors else {"ranks": rows}
        with file.open("a") as lines:
            lines.write(json.dumps({"name": job.name, "job": asdict(job), **row}) + "\n")
        figures = errors or [{key: round(row[key] / GIB, 3) for key in ("start", "peak", "reserved")} for row in rows]
        print(f"{time.monotonic() - started:.0f} s: {job.name}: {figures}", flush=True)
    return failed


def _run_rank(take_steps: Callable[..., dict[str, Any]], job: Any, rank: int, shared: str, on_gpu: bool) -> None:
    """Takes the steps of a job on one rank, and writes the last one's row."""
    try:
        row = take_steps(job, rank, shared, on_gpu=on_gpu)
    except BaseException as error:  # noqa: BLE001 - the other jobs go on
        row = {"error": f"{traceback.format_exc().splitlines()[-1]} ({type(error).__name__})"}
    written = Path(shared) / f"writing-{rank}"
    written.write_text(json.dumps(row))
    written.rename(Path(shared) / f"rank-{rank}")
    os._exit(0)


class NoMemory:
    """Stands for `torch.cuda` in a rehearsal."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


def about_gpu() -> dict[str, Any]:
    """Returns the GPU, torch's version, and the bytes that are in use outside torch's allocator."""
    import torch

    free, total = torch.cuda.mem_get_info()
    in_use = total - free - torch.cuda.memory_reserved()
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "outside_torch": in_use}
