"""The smallest device memory with which a step succeeds: bisected on GPUs, and predicted.

    python -m benchmarks.fit_boundary expect --out expected.json            # anywhere: predictions, to begin near them
    python -m benchmarks.fit_boundary measure --expected expected.json --out limits.jsonl        # on one or two GPUs
    python -m benchmarks.fit_boundary predict labs/results/h200_limits.jsonl
    python -m benchmarks.fit_boundary device labs/results/h200_limits.jsonl --only "phi-4 plain"           # on one GPU

On a GPU each try is a process of its own, in which torch's memory fraction caps the allocator: a process that has run
out of memory once has other holes in its segments. A try takes two steps, because the first one allocates the optimizer
state in between. A try of a job of two ranks has two processes, with the same cap. Tries of several cases run at the
same time where the GPUs have room. `memlab results --limits` writes the page that has both.

`device` needs no cap: this process holds the memory of the GPU that a try is not to have. What a try then needs more
than torch's limit is what CUDA's context and the libraries take.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Lock
from typing import Any
from unittest.mock import patch

from benchmarks.accuracy import JOBS, LOW_PRECISION, full, noting_routes, recompute, with_routes
from memlab import AllocatorSettings, Lab, MemorySettings, Scenario, StepRecord, TrainingState
from memlab.analysis.limits import Limit
from memlab.commands.shared.process import exit_now
from memlab.commands.shared.ranks import abort_job_on_error, gathered, rank, world_size
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.lab.predictions import predict_limit
from memlab.units import GIB, MIB

QWEN, PHI = "qwen3-30b-a3b", "phi-4"
USUAL: dict[str, Any] = {"num_layers": 4, "seq_length": 4096}
SHALLOW = USUAL | {"num_layers": 2}
ONE_RANK = Layout()
LONG = SHALLOW | {"seq_length": 16384}
EXPANDABLE = {"allocator": AllocatorSettings(expandable_segments=True)}


def several(num_microbatches: int, micro_batch_size: int, num_layers: int = 2) -> dict[str, Any]:
    """Returns what a lab of one rank with several micro-batches is given."""
    return {
        "num_layers": num_layers,
        "seq_length": 4096,
        "micro_batch_size": micro_batch_size,
        "num_microbatches": num_microbatches,
    }


def of_job(name: str) -> dict[str, Any]:
    """Returns what a lab of a job of two ranks is given."""
    layout, num_microbatches = JOBS[name]
    return {"layout": layout, "num_microbatches": num_microbatches}


CASES: dict[str, tuple[str, dict[str, Any], MemorySettings]] = {
    "qwen3 EP2": (QWEN, USUAL | of_job("EP2"), MemorySettings()),
    "qwen3 EP2 full recompute": (QWEN, USUAL | of_job("EP2"), full(1)),
    "qwen3 EP2 three micro-batches": (QWEN, SHALLOW | of_job("EP2") | {"num_microbatches": 3}, MemorySettings()),
    "qwen3 EP2 expert_fc1 and moe_act offloaded": (
        QWEN,
        SHALLOW | of_job("EP2"),
        MemorySettings(offload_modules=("expert_fc1", "moe_act")),
    ),
    "qwen3 PP2": (QWEN, USUAL | of_job("PP2"), MemorySettings()),
    "phi-4 PP2": (PHI, USUAL | of_job("PP2"), MemorySettings()),
    "phi-4 PP2 full recompute": (PHI, USUAL | of_job("PP2"), full(1)),
    "phi-4 TP2": (PHI, USUAL | of_job("TP2"), MemorySettings()),
    "qwen3 full recompute": (QWEN, SHALLOW, full(1)),
    "qwen3 moe recomputed": (QWEN, SHALLOW, recompute("moe")),
    "qwen3 core_attn offloaded": (QWEN, SHALLOW, MemorySettings(offload_modules=("core_attn",))),
    "qwen3 two layers": (QWEN, SHALLOW, MemorySettings()),
    "qwen3 three micro-batches": (QWEN, SHALLOW | {"num_microbatches": 3}, MemorySettings()),
    "qwen3 16384 tokens": (QWEN, LONG, MemorySettings()),
    "qwen3 16384 tokens, full recompute": (QWEN, LONG, full(1)),
    "qwen3 16384 tokens, layernorm, offload": (
        QWEN,
        LONG,
        recompute("layernorm", offload_modules=("expert_fc1", "moe_act")),
    ),
    "qwen3 optimizer offloaded": (QWEN, SHALLOW, MemorySettings(offload_optimizer=True)),
    "qwen3 low precision": (QWEN, SHALLOW | {"state": TrainingState(**LOW_PRECISION)}, MemorySettings()),
    "qwen3 low precision, full recompute, two micro-batches": (
        QWEN,
        SHALLOW | {"state": TrainingState(**LOW_PRECISION), "num_microbatches": 2},
        full(1),
    ),
    "phi-4 plain": (PHI, USUAL, MemorySettings()),
    "phi-4 8192 tokens, offload": (
        PHI,
        USUAL | {"seq_length": 8192},
        MemorySettings(offload_modules=("core_attn", "mlp_norm")),
    ),
    "phi-4 16384 tokens, full recompute": (PHI, LONG, full(1)),
    "phi-4 mlp recomputed": (PHI, SHALLOW, recompute("mlp")),
    "phi-4 three micro-batches": (PHI, SHALLOW | {"num_microbatches": 3}, MemorySettings()),
    "phi-4 optimizer offloaded": (PHI, SHALLOW, MemorySettings(offload_optimizer=True)),
    "phi-4 low precision": (PHI, SHALLOW | {"state": TrainingState(**LOW_PRECISION)}, MemorySettings()),
    "qwen3 plain": (QWEN, USUAL, MemorySettings()),
    "qwen3 8192 tokens, layernorm, offload": (
        QWEN,
        USUAL | {"seq_length": 8192},
        recompute("layernorm", offload_modules=("expert_fc1", "moe_act")),
    ),
}
"""Jobs first: a try of theirs waits for room on both GPUs."""
FC1_AND_ACTIVATION = ("expert_fc1", "moe_act")
CASES |= {
    "qwen3 three layers, 3 x 2 sequences, moe recomputed": (QWEN, several(3, 2, num_layers=3), recompute("moe")),
    "qwen3 three layers, 3 x 1 sequence, moe recomputed": (QWEN, several(3, 1, num_layers=3), recompute("moe")),
    "qwen3 2 x 2 sequences, moe recomputed": (QWEN, several(2, 2), recompute("moe")),
    "qwen3 3 x 2 sequences, moe recomputed": (QWEN, several(3, 2), recompute("moe")),
    "qwen3 4 x 2 sequences, moe recomputed": (QWEN, several(4, 2), recompute("moe")),
    "qwen3 4 x 1 sequence, moe recomputed": (QWEN, several(4, 1), recompute("moe")),
    "qwen3 3 x 2 sequences": (QWEN, several(3, 2), MemorySettings()),
    "qwen3 3 x 2 sequences, full recompute": (QWEN, several(3, 2), full(1)),
    "qwen3 2 x 2 sequences, moe_act recomputed": (QWEN, several(2, 2), recompute("moe_act")),
    "qwen3 3 x 2 sequences, layernorm, offload": (
        QWEN,
        several(3, 2),
        recompute("layernorm", offload_modules=FC1_AND_ACTIVATION),
    ),
    "qwen3 3 x 1 sequence, moe recomputed, core_attn offloaded": (
        QWEN,
        several(3, 1),
        recompute("moe", offload_modules=("core_attn",)),
    ),
    "qwen3 3 x 2 sequences, moe recomputed, expandable segments": (
        QWEN,
        several(3, 2) | EXPANDABLE,
        recompute("moe"),
    ),
}
"""Of one rank, with several micro-batches of one or two sequences."""
CASES |= {
    "qwen3 three layers, 1 x 2 sequences, moe recomputed": (QWEN, several(1, 2, num_layers=3), recompute("moe")),
    "qwen3 1 x 3 sequences, full recompute": (QWEN, several(1, 3), full(1)),
    "qwen3 three layers, 2 x 2 sequences, full recompute": (QWEN, several(2, 2, num_layers=3), full(1)),
    "qwen3 2 x 3 sequences, moe and layernorm recomputed": (QWEN, several(2, 3), recompute("moe", "layernorm")),
    "qwen3 2 x 2 sequences, low precision, moe recomputed": (
        QWEN,
        several(2, 2) | {"state": TrainingState(**LOW_PRECISION)},
        recompute("moe"),
    ),
    "phi-4 3 x 2 sequences": (PHI, several(3, 2), MemorySettings()),
    "phi-4 3 x 2 sequences, mlp recomputed": (PHI, several(3, 2), recompute("mlp")),
    "phi-4 2 x 2 sequences, full recompute": (PHI, several(2, 2), full(1)),
    "llama-3.1-8b 3 x 2 sequences, layernorm recomputed": ("llama-3.1-8b", several(3, 2), recompute("layernorm")),
}
"""Limits that no margin was derived from: they test what memlab says of the others."""
CASES |= {
    f"{name}, expandable segments": (CASES[name][0], CASES[name][1] | EXPANDABLE, CASES[name][2])
    for name in (
        "qwen3 16384 tokens",
        "qwen3 16384 tokens, full recompute",
        "qwen3 16384 tokens, layernorm, offload",
        "qwen3 8192 tokens, layernorm, offload",
        "qwen3 three micro-batches",
        "qwen3 low precision, full recompute, two micro-batches",
        "phi-4 plain",
        "phi-4 16384 tokens, full recompute",
        "phi-4 8192 tokens, offload",
        "phi-4 three micro-batches",
    )
}

_BESIDE_A_CAP_BYTES = 5 * GIB
"""Of a process: CUDA's context, libraries and NCCL, and some room."""
_ROOM_BYTES = 32 * MIB
"""Off a limit: what CUDA holds of its own varies by a few pages."""


def scenario_of(name: str) -> Scenario:
    """Returns the scenario of a case."""
    architecture, workload, _ = CASES[name]
    return Scenario.of(architecture, **workload)


def _of_case(measured: Scenario, layout: Layout = ONE_RANK) -> Scenario:
    """Returns a measured scenario without its routes, of the rank in a layout."""
    return replace(measured, layout=layout, routing=Routing())


@contextmanager
def keeping_history(path: Path | None) -> Iterator[None]:
    """Writes to a pickle what torch's allocator did: the snapshots that the meter reads, in their order.

    Each has torch's segments and blocks at its moment, and in ``device_traces`` the entries since the one before. With
    them the requests of a real step can be given to the simulated allocator, and be compared with the predicted ones.

    Args:
        path: Of the pickle; None writes nothing.
    """
    if path is None:
        yield
        return
    from memlab.meter.cuda import meter

    read, snapshots = meter._snapshot, list[dict[str, Any]]()

    def reading() -> dict[str, Any]:
        snapshots.append(read())
        return snapshots[-1]

    with patch.object(meter, "_snapshot", reading):
        try:
            yield
        finally:
            path.write_bytes(pickle.dumps(snapshots))


def take_step(name: str, limit_bytes: int | None) -> StepRecord:
    """Takes two steps of a case on the GPU of this rank; returns the second's record, of the rank that reserved most.

    The record of a model with experts has the routes of its step, if they are one list per layer. A rank that runs out
    of memory ends its process: the others wait for it.
    """
    architecture, workload, settings = CASES[name]
    layout = scenario_of(name).layout
    with abort_job_on_error(), Lab(architecture, **workload | {"layout": replace(layout, rank=rank())}) as lab:
        lab.device_memory_bytes = limit_bytes
        with noting_routes() as counts:
            record = replace(lab.step(settings), timeline=None)
        if record.status == "ok":
            record = with_routes(record, counts)
        if world_size() == 1:
            return record
        if record.status != "ok":
            exit_now(1)
        return max(gathered(record), key=lambda each: each.peak_reserved_bytes or 0)


class Gpus:
    """Room on the GPUs of this machine, handed out to tries.

    Args:
        leave_bytes: On each GPU, for other programs.
    """

    def __init__(self, leave_bytes: int) -> None:
        import torch

        free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        self._free_bytes = [num_bytes - leave_bytes for num_bytes in free]
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._free_bytes)

    @contextmanager
    def taken(self, count: int, num_bytes: int) -> Iterator[list[int]]:
        """Waits for room of so many bytes on so many GPUs, and yields their indices."""
        with self._changed:
            self._changed.wait_for(lambda: sum(free >= num_bytes for free in self._free_bytes) >= count)
            ordered = sorted(range(len(self)), key=self._free_bytes.__getitem__, reverse=True)
            indices = sorted(ordered[:count])
            for index in indices:
                self._free_bytes[index] -= num_bytes
        try:
            yield indices
        finally:
            with self._changed:
                for index in indices:
                    self._free_bytes[index] += num_bytes
                self._changed.notify_all()


def take_step_in_processes(
    name: str, gpus: Gpus, room_bytes: int, limit_bytes: int | None, history: Path | None = None
) -> StepRecord | None:
    """As `take_step`, in a process for each rank; None if one ended with an error."""
    num_bytes = min(room_bytes, (limit_bytes or room_bytes) + _BESIDE_A_CAP_BYTES)
    with gpus.taken(scenario_of(name).layout.world_size, num_bytes) as indices:
        return _take_step_on(name, indices, limit_bytes, history)


def _take_step_on(
    name: str, gpus: list[int], limit_bytes: int | None = None, history: Path | None = None
) -> StepRecord | None:
    scenario = scenario_of(name)
    ranks = scenario.layout.world_size
    options = {"PYTORCH_ALLOC_CONF": str(scenario.allocator)} if scenario.allocator.changed() else {}
    own = ["-m", "benchmarks.fit_boundary", "try", name, str(limit_bytes or 0)]
    own += [] if history is None else ["--history", str(history)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, *own],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} | options,
    )
    record = None if done.returncode else StepRecord.from_dict(json.loads(done.stdout.splitlines()[-1]))
    result = record.status if record else done.stderr.strip().splitlines()[-1:]
    limit = f"{limit_bytes / 1e9:.3f} GB" if limit_bytes else "no limit"
    print(f"{name}, {limit}, {time.monotonic() - started:.0f} s: {result}", file=sys.stderr, flush=True)
    return record


def measure(
    out: Path, names: list[str], expected: dict[str, int], jobs: int, leave_bytes: int, histories: Path | None
) -> None:
    """Bisects on the GPUs, and appends a line for each case that the file lacks; several cases at the same time.

    With a folder for histories, each case of one rank is tried once more without a limit and once with the largest that
    was too small, and what torch's allocator did is written there (`keeping_history`).
    """
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    known = [Limit.from_dict(json.loads(line)) for line in lines]
    gpus, writing = Gpus(leave_bytes), Lock()

    def find(name: str) -> None:
        scenario, settings = scenario_of(name), CASES[name][2]
        if any((_of_case(one.scenario, scenario.layout), one.settings) == (scenario, settings) for one in known):
            return
        if scenario.layout.world_size > len(gpus):
            print(f"{name}: left out, it has {scenario.layout.world_size} ranks", flush=True)
            return
        room = expected.get(name, 100 * GIB) * 23 // 20 + _BESIDE_A_CAP_BYTES  # without a cap more is reserved
        attempt = partial(take_step_in_processes, name, gpus, room)

        def completes(limit_bytes: int) -> bool:
            record = attempt(limit_bytes)
            return record is not None and record.status == "ok"

        limit = Limit.find(attempt(None), completes, expected_bytes=expected.get(name))
        with writing, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(limit.to_dict()) + "\n")
            print(f"{name}: {limit.fails_bytes / 1e9:.2f} to {limit.fits_bytes / 1e9:.2f} GB", flush=True)
        if histories is not None and scenario.layout.world_size == 1:
            histories.mkdir(parents=True, exist_ok=True)
            stem = name.replace(" ", "-").replace(",", "")
            for label, limit_bytes in (("free", None), ("fails", limit.fails_bytes)):
                record = attempt(limit_bytes, histories / f"{stem}-{label}.pickle")
                if record is not None:
                    text = json.dumps(record.to_dict(), indent=1)
                    (histories / f"{stem}-{label}.json").write_text(text + "\n", encoding="utf-8")

    with ThreadPoolExecutor(jobs) as threads:
        found = {name: threads.submit(find, name) for name in names}
    failed = {name: future.exception() for name, future in found.items() if future.exception()}
    for name, error in failed.items():
        print(f"FAILED {name}: {error}")
    if failed:
        sys.exit(1)


def check_on_device(measured: Path, names: list[str]) -> None:
    """Tries each step in as much of a GPU as its limit and what it held outside torch, and in a little more."""
    limits = [Limit.from_dict(json.loads(line)) for line in measured.read_text(encoding="utf-8").splitlines()]
    for name in names:
        of_case = (scenario_of(name), CASES[name][2])
        limit = next((one for one in limits if (_of_case(one.scenario), one.settings) == of_case), None)
        if limit is None:
            raise ValueError(f"{measured} has no limit of {name!r}, must have one: measure it first")
        record, used_bytes = _take_step_beside_ballast(name, None)
        assert record is not None and record.peak_reserved_bytes is not None, "it completed when it was measured"
        outside_bytes = used_bytes - record.peak_reserved_bytes
        words = [f"{name}: {outside_bytes / MIB:.0f} MiB outside torch"]
        for torch_bytes in (limit.fails_bytes - _ROOM_BYTES, limit.fits_bytes + _ROOM_BYTES):
            record, _ = _take_step_beside_ballast(name, torch_bytes + outside_bytes)
            status = record.status if record else "error"
            words.append(f"{(torch_bytes + outside_bytes) / 1e9:.2f} GB of the GPU: {status}")
        print("; ".join(words), flush=True)


def _take_step_beside_ballast(name: str, free_bytes: int | None) -> tuple[StepRecord | None, int]:
    """As `take_step_in_processes`, on a GPU of which so much is free; returns also the most that the process held."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    ballast_bytes = 0 if free_bytes is None else torch.cuda.mem_get_info()[0] - free_bytes
    ballast = torch.empty(ballast_bytes // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda")
    free_before = least_free = torch.cuda.mem_get_info()[0]
    with ThreadPoolExecutor(1) as thread:
        record = thread.submit(_take_step_on, name, [0])
        while not record.done():
            least_free = min(least_free, torch.cuda.mem_get_info()[0])
            time.sleep(0.01)
    del ballast
    return record.result(), free_before - least_free


def expect(out: Path, names: list[str]) -> None:
    """Writes the predicted limit of each case, in bytes."""
    limits = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for name in names:
        if name not in limits:
            limits[name] = predict_limit(scenario_of(name), CASES[name][2]).fits_bytes
            out.write_text(json.dumps(limits, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {limits[name] / 1e9:.2f} GB", flush=True)


def predict(measured: Path) -> None:
    """Predicts the limits of a file, and prints both and the error; it is below zero if the prediction is too low."""
    for line in measured.read_text(encoding="utf-8").splitlines():
        limit = Limit.from_dict(json.loads(line))
        found = predict_limit(limit.scenario, limit.settings)
        ranges = [f"{each.fails_bytes / 1e9:.2f} to {each.fits_bytes / 1e9:.2f} GB" for each in (limit, found)]
        print(
            f"{limit.scenario}, {limit.settings}: measured {ranges[0]}, predicted {ranges[1]}, "
            f"error {limit.error_of(found):+.2%}",
            flush=True,
        )


def main() -> None:
    """Measures, predicts, or takes one try for `measure`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    expecting = actions.add_parser("expect", help="predict the cases, for measure to begin near")
    measuring = actions.add_parser("measure", help="bisect on GPUs")
    for action, what in ((expecting, "limits in bytes, by case"), (measuring, "a line for each case is appended")):
        action.add_argument("--out", type=Path, required=True, help=what)
        action.add_argument(
            "--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help="names of cases"
        )
    measuring.add_argument("--expected", type=Path, help="what expect wrote")
    measuring.add_argument("--jobs", type=int, default=8, help="cases at the same time (default 8)")
    measuring.add_argument("--histories", type=Path, help="folder for what torch's allocator did in two more tries")
    measuring.add_argument("--leave", type=int, default=0, help="GiB of each GPU for other programs (default 0)")
    actions.add_parser("predict", help="predict what was measured").add_argument("measured", type=Path)
    on_device = actions.add_parser("device", help="try measured limits of one rank on a GPU that has no more memory")
    on_device.add_argument("measured", type=Path)
    of_one_rank = [name for name in CASES if scenario_of(name).layout.world_size == 1]
    on_device.add_argument(
        "--only", nargs="+", choices=of_one_rank, required=True, metavar="CASE", help="names of cases"
    )
    trying = actions.add_parser("try", help="one try of `measure`")
    trying.add_argument("name", choices=list(CASES))
    trying.add_argument("limit_bytes", type=int, help="what torch may reserve; 0 is no limit")
    trying.add_argument("--history", type=Path, help="new pickle for what torch's allocator did")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        expected = json.loads(arguments.expected.read_text(encoding="utf-8")) if arguments.expected else {}
        measure(arguments.out, arguments.only, expected, arguments.jobs, arguments.leave * GIB, arguments.histories)
    elif arguments.action == "expect":
        expect(arguments.out, arguments.only)
    elif arguments.action == "predict":
        predict(arguments.measured)
    elif arguments.action == "device":
        check_on_device(arguments.measured, arguments.only)
    else:
        with keeping_history(arguments.history):
            record = take_step(arguments.name, arguments.limit_bytes or None)
        if rank() == 0:
            print(json.dumps(record.to_dict()))


if __name__ == "__main__":
    main()
