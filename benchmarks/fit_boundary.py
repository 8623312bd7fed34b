"""The smallest device memory with which a step succeeds: bisected on a GPU, and predicted.

    python -m benchmarks.fit_boundary measure --out limits.jsonl       # on a GPU, minutes
    python -m benchmarks.fit_boundary predict labs/results/h200_limits.jsonl

On a GPU each try is a process of its own, in which torch's memory fraction caps the allocator: a process that has run
out of memory once has other holes in its segments. A try takes two steps, because the first one allocates the optimizer
state in between. `memlab results --limits` writes the page that has both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy import full, recompute
from memlab import Lab, MemorySettings, Scenario, StepRecord
from memlab.analysis.limits import Limit
from memlab.lab.predictions import predict_limit

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


def take_step(name: str, limit_bytes: int | None) -> StepRecord:
    """Takes two steps of a case on the GPU; returns the record of the second one."""
    architecture, workload, settings = CASES[name]
    with Lab(architecture, **workload, backend="cuda") as lab:
        lab.device_memory_bytes = limit_bytes
        return replace(lab.step(settings), timeline=None)


def take_step_in_a_process(name: str, limit_bytes: int | None) -> StepRecord | None:
    """As `take_step`, in a process of its own; None if that ended with an error."""
    command = [sys.executable, "-m", "benchmarks.fit_boundary", "try", name, str(limit_bytes or 0)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # this interpreter
    return None if done.returncode else StepRecord.from_dict(json.loads(done.stdout.splitlines()[-1]))


def measure(out: Path, names: list[str]) -> None:
    """Bisects on the GPU, and appends a line for each case that the file lacks."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    known = [Limit.from_dict(json.loads(line)) for line in lines]
    for name in names:
        architecture, workload, settings = CASES[name]
        scenario = Scenario.of(architecture, **workload)
        if not any((one.scenario, one.settings) == (scenario, settings) for one in known):
            limit = Limit.find(partial(take_step_in_a_process, name))
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(limit.to_dict()) + "\n")
            print(f"{name}: {limit.fails_bytes / 1e9:.2f} to {limit.fits_bytes / 1e9:.2f} GB", flush=True)


def predict(measured: Path) -> None:
    """Predicts the limits of a file, and prints both and the error; below zero, "fits" is said too early."""
    for line in measured.read_text(encoding="utf-8").splitlines():
        limit = Limit.from_dict(json.loads(line))
        found = predict_limit(limit)
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
    measuring = actions.add_parser("measure", help="bisect on a GPU")
    measuring.add_argument("--out", type=Path, required=True, help="a line for each case is appended")
    measuring.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="names of cases")
    actions.add_parser("predict", help="predict what was measured").add_argument("measured", type=Path)
    trying = actions.add_parser("try", help="one try of `measure`")
    trying.add_argument("name", choices=list(CASES))
    trying.add_argument("limit_bytes", type=int, help="what torch may reserve; 0 is no limit")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        measure(arguments.out, arguments.only)
    elif arguments.action == "predict":
        predict(arguments.measured)
    else:
        print(json.dumps(take_step(arguments.name, arguments.limit_bytes or None).to_dict()))


if __name__ == "__main__":
    main()
