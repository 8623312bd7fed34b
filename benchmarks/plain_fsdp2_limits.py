"""The least memory with which steps under torch's FSDP2 complete: bisected on GPUs without memlab, and predicted.

    python -m benchmarks.plain_fsdp2_limits expect FILE                          anywhere: what memlab predicts
    python -m benchmarks.plain_fsdp2_limits measure FOLDER --expected FILE       a machine with GPUs
    python -m benchmarks.plain_fsdp2_limits predict FOLDER/limits.jsonl          anywhere

Each try has processes of its own, in which torch's memory fraction caps the allocator, and takes five steps. FOLDER
gets ``limits.jsonl``, a line for each job, and what torch's allocator did: in the try without a limit, in the last one
that completed, and in the last one that did not (``NUMBER-free.xz`` and so on, read by `history_of`).
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import plain_fsdp2, plain_fsdp2_pipeline
from benchmarks.forked_jobs import GIB, prepare
from benchmarks.plain_fsdp2 import MODELS, Job
from benchmarks.plain_fsdp2_pipeline import PipelineJob

_TOLERANCE = 0.0005
"""Of the limit: how near both ends of a bisection come."""
_STEPS = 5
"""Of a try: without a limit, torch reserves more until the third; with one, the fourth has been the first to fail."""
_TRY_SECONDS = 45
_BESIDE_A_CAP_BYTES = 3 * GIB


def jobs() -> list[Job]:
    """Returns the jobs, those of two GPUs first."""
    llama = Job(model="llama-3.1-8b", num_layers=8)
    phi, qwen = replace(llama, model="phi-4"), replace(llama, model="qwen3-8b")
    moe = replace(llama, model="qwen3-30b-a3b", num_layers=4)
    eight: dict[str, Any] = {"num_ranks": 8, "one_process": True}
    stages = PipelineJob(model="llama-3.1-8b", num_layers=8, seq_length=4096, num_ranks=8, rank=4)
    return [
        replace(llama, num_ranks=2, seq_length=4096, checkpointing=True),
        replace(qwen, num_ranks=2, num_microbatches=2, fp32_sharded_params=True),
        PipelineJob(model="llama-3.1-8b", num_layers=8),
        phi,
        replace(phi, fp32_sharded_params=True, num_layers=4),
        replace(phi, checkpointing=True, adam_implementation="fused"),
        replace(qwen, num_microbatches=3),
        replace(qwen, checkpointing=True, fp32_sharded_params=True, adam_implementation="fused"),
        replace(llama, num_microbatches=4, defer_fsdp_grad_sync=True, checkpointing=True),
        replace(llama, seq_length=4096, lora_rank=16),
        replace(phi, seq_length=8192, lora_rank=16, checkpointing=True, **eight),
        moe,
        replace(moe, seq_length=4096, checkpointing=True, fp32_sharded_params=True, **eight),
        replace(llama, seq_length=4096, fsdp_cpu_offload=True, checkpointing=True, **eight),
        replace(phi, **eight),
        replace(llama, seq_length=8192, fp32_sharded_params=True, checkpointing=True, **eight),
        replace(qwen, seq_length=4096, num_microbatches=3, fp32_sharded_params=True, **eight),
        replace(qwen, seq_length=4096, adam_implementation="fused", reshard_after_forward="none", **eight),
        replace(stages, num_microbatches=8, chunks=2, reshard_after_forward="none"),
        replace(stages, model="qwen3-8b", rank=0, checkpointing=True, fp32_sharded_params=True),
        *_later_jobs(),
    ]


def _later_jobs() -> list[Job]:
    """Returns jobs whose limits were predicted by the code that the limits of the others had led to."""
    llama = Job(model="llama-3.1-8b", num_layers=8, seq_length=4096)
    phi, qwen = replace(llama, model="phi-4"), replace(llama, model="qwen3-8b")
    qwen2, mistral = replace(llama, model="qwen2.5-7b"), replace(llama, model="mistral-7b-v0.3")
    moe = replace(llama, model="qwen3-30b-a3b", num_layers=4)
    eight: dict[str, Any] = {"num_ranks": 8, "one_process": True}
    stages = PipelineJob(model="qwen3-8b", num_layers=8, num_ranks=2, chunks=2, checkpointing=True)
    return [
        replace(phi, num_layers=4, num_ranks=2, fp32_sharded_params=True, checkpointing=True),
        replace(stages, fp32_sharded_params=True),
        replace(qwen2, checkpointing=True),
        replace(mistral, fp32_sharded_params=True, adam_implementation="fused", **eight),
        replace(qwen, lora_rank=16, num_microbatches=2, checkpointing=True),
        replace(llama, packed_sequences=4),
        replace(moe, num_microbatches=2, defer_fsdp_grad_sync=True, adam_implementation="fused", **eight),
        replace(phi, fsdp_cpu_offload=True, **eight),
        replace(llama, selective_ac=True),
        replace(llama, fp32_sharded_params=True, adam_implementation="for_loop", num_layers=4),
        replace(qwen, dp_replicate_size=2, grad_reduce_in_bf16=True, **eight),
        replace(llama, seq_length=8192, checkpointing=True, reshard_after_forward="none", **eight),
        replace(qwen2, tensor_model_parallel_size=2, adam_implementation="fused", **eight),
        replace(phi, micro_batch_size=2, num_microbatches=3, **eight),
        replace(stages, model="phi-4", num_layers=16, num_ranks=8, stages=4, rank=6, num_microbatches=8, chunks=1),
        replace(stages, model="llama-3.1-8b", num_ranks=8, rank=0, seq_length=4096, checkpointing=False),
    ]


def steps_of(job: Job) -> Callable[..., dict[str, Any]]:
    """Returns the function that takes a job's steps."""
    return (plain_fsdp2_pipeline if isinstance(job, PipelineJob) else plain_fsdp2).take_steps


def run_rank(job: Job, rank: int, shared: str, limit_bytes: int | None, history: Path | None) -> None:
    """Takes the steps of a job on one rank with a cap on the allocator, and writes the last one's row."""
    import torch

    device, starts = rank if job.num_processes > 1 else 0, list[int]()
    try:
        torch.cuda.set_device(device)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        if limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
        if history is not None:
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=4_000_000)
        with _noting_starts(starts):
            row = steps_of(job)(job, rank, shared, on_gpu=True, num_steps=_STEPS)
    except BaseException as error:  # noqa: BLE001 - the other tries go on
        row = {"error": f"{traceback.format_exc().splitlines()[-1]} ({type(error).__name__})"}
        row |= {"out_of_memory": _is_out_of_memory(error), "step": len(starts)}
    written = Path(shared) / f"writing-{rank}"
    written.write_text(json.dumps(row))
    written.rename(Path(shared) / f"rank-{rank}")
    if history is not None:
        write_history(history, device, starts)
    (Path(shared) / f"ended-{rank}").touch()
    os._exit(0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is torch's, or one that a pipeline's schedule has raised because of it."""
    import torch

    return error is not None and (
        isinstance(error, torch.cuda.OutOfMemoryError) or _is_out_of_memory(error.__cause__ or error.__context__)
    )


@contextmanager
def _noting_starts(starts: list[int]) -> Iterator[None]:
    """Notes when each step begins, in microseconds of the clock of torch's history: each begins with a collection."""
    collect = plain_fsdp2.gc.collect

    def collected() -> int:
        starts.append(time.time_ns() // 1000)
        return collect()

    with patch.object(plain_fsdp2.gc, "collect", collected):
        yield


def write_history(file: Path, device: int, starts: list[int]) -> None:
    """Writes what torch's allocator did: action, address, bytes, stream and time of each entry."""
    import torch

    snapshot = torch.cuda.memory._snapshot(device)
    entries = snapshot["device_traces"][device]
    rows = [[one.get(name) for name in ("action", "addr", "size", "stream", "time_us")] for one in entries]
    segments = [[one["address"], one["total_size"], one["stream"]] for one in snapshot["segments"]]
    text = json.dumps({"starts": starts, "entries": rows, "segments": segments}, separators=(",", ":"))
    file.write_bytes(lzma.compress(text.encode(), preset=3))


def history_of(file: Path) -> dict[str, Any]:
    """Returns what `write_history` has written."""
    values: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    return values


def try_once(job: Job, gpus: list[int], limit_bytes: int | None, history: Path | None) -> list[dict[str, Any]]:
    """Takes a job's steps in new processes, and returns a row for each rank; the first error ends them all."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as shared:
        names = range(job.num_processes)
        ranks = [
            context.Process(target=run_rank, args=(job, rank, shared, limit_bytes, history if rank == 0 else None))
            for rank in names
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + _TRY_SECONDS
        rows: dict[int, dict[str, Any]] = {}
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            time.sleep(0.1)
            rows = {
                rank: json.loads(path.read_text()) for rank in names if (path := Path(shared) / f"rank-{rank}").exists()
            }
            errors = [rank for rank, row in rows.items() if "error" in row]
            if errors and all((Path(shared) / f"ended-{rank}").exists() for rank in errors):
                break
        for process in ranks:
            process.kill()
            process.join()
        for rank in names:
            if (path := Path(shared) / f"rank-{rank}").exists():
                rows[rank] = json.loads(path.read_text())
        return [rows.get(rank, {"error": "ended"}) for rank in names]


def find_limit(job: Job, number: int, gpus: list[int], folder: Path, expected: int | None, deadline: float) -> None:
    """Bisects the limit of a job, and writes a line."""
    row: dict[str, Any] = {"name": job.name, "job": asdict(job), "number": number, "tries": []}
    os.dup2(os.open(folder / f"{number}.log", os.O_CREAT | os.O_WRONLY), 2)

    def attempt(limit_bytes: int | None) -> list[dict[str, Any]]:
        started, writing = time.monotonic(), folder / f"{number}-writing.xz"
        writing.unlink(missing_ok=True)
        rows = try_once(job, gpus, limit_bytes, writing)
        errors = [one for one in rows if "error" in one and one["error"] != "ended"]
        result = "free" if limit_bytes is None else "fails" if errors else "fits"
        if writing.exists():
            writing.rename(folder / f"{number}-{result}.xz")
        row["tries"].append([limit_bytes, result, *[one["error"][:80] for one in errors[:1]]])
        row["tries"][-1].append(round(time.monotonic() - started, 1))
        return rows

    free = attempt(None)
    row["ranks"] = free
    if not any("error" in one for one in free):
        fails = int(max(one["peak"] for one in free) * (1 - _TOLERANCE))
        fits = int(max(one["reserved"] for one in free) * (1 + _TOLERANCE))
        around = [share * _TOLERANCE for share in (0.5, -0.5, 2, -2, 8, -8, 32, -32)]
        near = [int(expected * (1 + share)) for share in around] if expected else []
        while fits - fails > _TOLERANCE * fits and time.monotonic() < deadline:
            near = [num_bytes for num_bytes in near if fails < num_bytes < fits]
            middle = near.pop(0) if near else (fails + fits) // 2
            rows = attempt(middle)
            if not any("error" in one for one in rows):
                fits = middle
            elif any(one.get("out_of_memory") for one in rows):
                fails = middle
            else:
                break
        row |= {"fails_bytes": fails, "fits_bytes": fits}
    with (folder / "limits.jsonl").open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    found = [round(row[name] / GIB, 3) for name in ("fails_bytes", "fits_bytes") if name in row]
    print(f"{number} {job.name}: {found or free}, expected {expected and round(expected / GIB, 3)}", flush=True)
    os._exit(0)


def measure(folder: Path, only: str, first: int, expected: dict[str, dict[str, int]], seconds: float) -> int:
    """Finds the limits of the jobs, side by side as far as there is room; returns how many were not begun."""
    num_gpus, context = prepare({MODELS[job.model][0] for job in jobs()}), multiprocessing.get_context("fork")
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    room = dict.fromkeys(range(num_gpus), 132 * GIB)
    waiting = [(number, job) for number, job in enumerate(jobs()) if number >= first and re.search(only, job.name)]
    running: dict[Any, tuple[int, list[int], int]] = {}
    while (waiting or running) and time.monotonic() < deadline + _TRY_SECONDS:
        for process in [process for process in running if not process.is_alive()]:
            _, gpus, taken = running.pop(process)
            room |= {gpu: room[gpu] + taken for gpu in gpus}
        for process, (number, gpus, taken) in running.items():
            least = _room_of(expected.get(jobs()[number].name, {}), "limit")
            if least < taken and (folder / f"{number}-free.xz").exists():  # the other tries need less
                room |= {gpu: room[gpu] + taken - least for gpu in gpus}
                running[process] = (number, gpus, least)
        for number, job in waiting.copy() if time.monotonic() < deadline else ():
            predicted = expected.get(job.name, {})
            needed = _room_of(predicted, "reserved")
            gpus = sorted([gpu for gpu, free in room.items() if free >= needed], key=lambda gpu: -room[gpu])
            if job.num_processes > num_gpus:
                waiting.remove((number, job))
            if len(gpus) < job.num_processes:
                continue
            gpus = gpus[: job.num_processes]
            room |= {gpu: room[gpu] - needed for gpu in gpus}
            process = context.Process(
                target=find_limit, args=(job, number, gpus, folder, predicted.get("limit"), deadline)
            )
            process.start()
            running[process] = (number, gpus, needed)
            waiting.remove((number, job))
        time.sleep(0.1)
    for process in running:
        process.kill()
    return len(waiting)


def _room_of(predicted: dict[str, int], name: str) -> int:
    return int(predicted.get(name, 60 * GIB) * 1.1) + _BESIDE_A_CAP_BYTES


def job_of(row: dict[str, Any]) -> Job:
    """Returns the job of a row."""
    return (PipelineJob if "stages" in row["job"] else Job)(**row["job"])


def predicted_of(job: Job) -> dict[str, int]:
    """Returns what memlab predicts of as many steps, of the rank that needs most: peak, reserved bytes and limit."""
    return max((_predicted_of_rank(job, layout) for layout in layouts_of(job)), key=lambda found: found["limit"])


def _predicted_of_rank(job: Job, layout: Any) -> dict[str, int]:
    from memlab import Lab
    from memlab.analysis.limits import Limit
    from memlab.fitting.measured_margin import further_steps_of

    scenario, settings = plain_fsdp2.scenario_of(job, layout), plain_fsdp2.settings_of(job)
    with Lab(scenario, backend="simulated") as lab:
        with lab.logging_requests() as requests:
            record = lab.step(settings)
        further_steps = further_steps_of(scenario)
        assert requests is not None, "torch's allocator is simulated"
        limit = Limit.find(record, lambda limit_bytes: requests.completes_within(limit_bytes, further_steps))
        reserved = lab.step(settings).peak_reserved_bytes
    return {
        "peak": record.peak_allocated_bytes,
        "reserved": reserved or 0,
        "limit": (limit.fails_bytes + limit.fits_bytes) // 2,
    }


def layouts_of(job: Job) -> list[Any]:
    """Returns the layout of each rank whose limit decides; None is that of a job without stages."""
    if not isinstance(job, PipelineJob):
        return [None]
    return [plain_fsdp2_pipeline.layout_of(job, rank) for rank in plain_fsdp2_pipeline.ranks_of(job)]


def expect(file: Path, only: str, first: int) -> None:
    """Writes what memlab predicts of each job that the file does not have."""
    found = json.loads(file.read_text()) if file.exists() else {}
    for job in jobs()[first:]:
        if job.name not in found and re.search(only, job.name):
            found[job.name] = predicted_of(job)
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(job.name, {key: round(value / GIB, 3) for key, value in found[job.name].items()}, flush=True)


def predict(file: Path) -> None:
    """Prints each measured limit, and how far the predicted one is off; below zero it is too low."""
    for row in map(json.loads, file.read_text().splitlines()):
        if "fits_bytes" not in row:
            print(f"{row['name']}: not measured: {row['ranks']}")
            continue
        predicted, limit = predicted_of(job_of(row)), (row["fails_bytes"] + row["fits_bytes"]) / 2
        measured = {key: max(one[key] for one in row["ranks"]) for key in ("peak", "reserved")} | {"limit": limit}
        words = [f"{key} {value / GIB:.3f} GiB {predicted[key] / value - 1:+.3%}" for key, value in measured.items()]
        print(f"{row['name']}: {', '.join(words)}", flush=True)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--expected", type=Path)
    measuring.add_argument("--seconds", type=float, default=480)
    expecting = commands.add_parser("expect")
    expecting.add_argument("file", type=Path)
    for command in (measuring, expecting):
        command.add_argument("--only", default="", help="a regular expression for the names of jobs")
        command.add_argument("--first", type=int, default=0, help="number of the first job")
    commands.add_parser("predict").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "expect":
        expect(arguments.file, arguments.only, arguments.first)
    elif arguments.command == "predict":
        predict(arguments.file)
    else:
        expected = json.loads(arguments.expected.read_text()) if arguments.expected else {}
        return measure(arguments.folder, arguments.only, arguments.first, expected, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
