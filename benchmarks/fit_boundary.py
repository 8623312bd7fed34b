"""The smallest device memory with which a step succeeds: bisected on a GPU, and predicted.

    python -m benchmarks.fit_boundary measure --out limits.jsonl       # on a GPU, minutes
    python -m benchmarks.fit_boundary predict labs/results/h200_limits.jsonl

On a GPU each try is a process of its own, in which torch's memory fraction caps the allocator: a process that has run
out of memory once has other holes in its segments. A prediction opens a new lab for each try. A try takes two steps,
because the first one allocates the optimizer state in between.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accuracy import full, recompute
from memlab import Lab, MemorySettings
from memlab.lab.environment import versions

TOLERANCE = 0.0005
"""Of the limit: how near both ends of the bisection come."""
QWEN, PHI = "qwen3-30b-a3b", "phi-4"
USUAL: dict[str, Any] = {"num_layers": 4, "seq_length": 4096}
CASES: dict[str, tuple[str, dict[str, Any], MemorySettings]] = {
    "qwen3 plain": (QWEN, USUAL, MemorySettings()),
    "qwen3 8192 tokens, layernorm, offload": (
        QWEN,
        USUAL | {"seq_length": 8192},
        recompute("layernorm", offload_modules=("expert_fc1", "moe_act")),
    ),
    "qwen3 full recompute": (QWEN, USUAL, full(1)),
    "qwen3 16384 tokens, full recompute": (QWEN, USUAL | {"seq_length": 16384}, full(1)),
    "qwen3 three micro-batches": (QWEN, USUAL | {"num_microbatches": 3}, MemorySettings()),
    "qwen3 two layers": (QWEN, USUAL | {"num_layers": 2}, MemorySettings()),
    "qwen3 optimizer offloaded": (QWEN, USUAL, MemorySettings(offload_optimizer=True)),
    "qwen3 moe recomputed": (QWEN, USUAL, recompute("moe")),
    "qwen3 core_attn offloaded": (QWEN, USUAL, MemorySettings(offload_modules=("core_attn",))),
    "phi-4 plain": (PHI, USUAL, MemorySettings()),
    "phi-4 8192 tokens, offload": (
        PHI,
        USUAL | {"seq_length": 8192},
        MemorySettings(offload_modules=("core_attn", "mlp_norm")),
    ),
    "phi-4 16384 tokens, full recompute": (PHI, USUAL | {"seq_length": 16384}, full(1)),
    "phi-4 three micro-batches": (PHI, USUAL | {"num_microbatches": 3}, MemorySettings()),
    "phi-4 optimizer offloaded": (PHI, USUAL, MemorySettings(offload_optimizer=True)),
}


def succeeds(name: str, cap_bytes: int | None, backend: str) -> tuple[bool, int, int]:
    """Takes two steps of a case; returns whether both finished, the allocated and the reserved peak in bytes."""
    architecture, workload, settings = CASES[name]
    with Lab(architecture, **workload, backend=backend) as lab:
        lab.device_memory_bytes = cap_bytes
        record = lab.step(settings)
    return record.status == "ok", record.peak_allocated_bytes, record.peak_reserved_bytes or 0


def succeeds_in_a_process(name: str, cap_bytes: int | None, backend: str) -> tuple[bool, int, int]:
    """As `succeeds`, in a process of its own; one that ends with an error has not succeeded."""
    command = [sys.executable, "-m", "benchmarks.fit_boundary", "try", name, str(cap_bytes or 0), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # this interpreter
    if done.returncode:
        return False, 0, 0
    ok, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    return ok, allocated, reserved


def bisect(name: str, backend: str, attempt: Callable[[str, int | None, str], tuple[bool, int, int]]) -> dict[str, Any]:
    """Returns the largest cap that failed and the smallest that succeeded, and the peaks without a cap."""
    ok, allocated, reserved = attempt(name, None, backend)
    assert ok, f"{name} does not finish without a cap"
    fails, fits = int(allocated * (1 - TOLERANCE)), int(reserved * (1 + TOLERANCE))
    while fits - fails > TOLERANCE * fits:
        cap = (fails + fits) // 2
        if attempt(name, cap, backend)[0]:
            fits = cap
        else:
            fails = cap
    return {
        "case": name,
        "fails_bytes": fails,
        "fits_bytes": fits,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "versions": versions(),
    }


def measure(out: Path, names: list[str]) -> None:
    """Bisects on the GPU, and appends a line for each case that the file lacks."""
    known = {json.loads(line)["case"] for line in out.read_text().splitlines()} if out.exists() else set()
    for name in names:
        if name not in known:
            row = bisect(name, "cuda", succeeds_in_a_process)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}: {row['fails_bytes'] / 1e9:.2f} to {row['fits_bytes'] / 1e9:.2f} GB", flush=True)


def predict(measured: Path) -> None:
    """Predicts the limits of a file of rows, and prints both and the error; positive is too pessimistic."""
    print(f"{'case':40} {'measured, GB':>16} {'predicted, GB':>16} {'error':>8}")
    for line in measured.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found = bisect(row["case"], "simulated", succeeds)
        middles = [(each["fails_bytes"] + each["fits_bytes"]) / 2 for each in (row, found)]
        ranges = [f"{each['fails_bytes'] / 1e9:.2f} to {each['fits_bytes'] / 1e9:.2f}" for each in (row, found)]
        print(f"{row['case']:40} {ranges[0]:>16} {ranges[1]:>16} {middles[1] / middles[0] - 1:8.2%}", flush=True)


def main() -> None:
    """Measures, predicts, or takes one try for `measure`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure", help="bisect on a GPU")
    measuring.add_argument("--out", type=Path, required=True, help="a line for each case is appended")
    measuring.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="names of cases")
    actions.add_parser("predict", help="predict what was measured").add_argument("measured", type=Path)
    trying = actions.add_parser("try", help="one try of `measure`")
    trying.add_argument("name", choices=list(CASES))
    trying.add_argument("cap_bytes", type=int, help="0 is no cap")
    trying.add_argument("backend")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        measure(arguments.out, arguments.only)
    elif arguments.action == "predict":
        predict(arguments.measured)
    else:
        print(json.dumps(succeeds(arguments.name, arguments.cap_bytes or None, arguments.backend)))


if __name__ == "__main__":
    main()
