"""What the CPU optimizer saves on the device, step by step: the rows of NeMo-RL PR #3628.

    python -m benchmarks.optimizer_on_host measure FILE.jsonl [--seconds 45]     on a GPU
    python -m benchmarks.optimizer_on_host predict [--expandable-segments]       anywhere

The pull request (2026-08-13) measures Qwen3-0.6B on one H100 without the CPU optimizer, with half of the parameters in
it (also overlapped), and with all of them (overlapped): 15.24, 14.13, 14.65 and 10.53 GiB. These are the most of
samples taken from outside, so they contain what torch reserved. It names neither the sequence length nor the other
options of the training state.

With overlapped copies, ``HybridDeviceOptimizer`` has a stream for gradients and one for parameters, and torch's
allocator has pools for each stream. What these copies need on the device (conversions between bf16 and fp32, and fp32
gradients that are replaced while the old ones exist) is reserved there, beside what forward and backward leave unused.
``labs/results/h200_optimizer_on_host.jsonl`` has the rows as an H200 reserved them.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memlab import Lab, TrainingState
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.record.step_record import StepRecord
from memlab.units import GIB

MODEL = Architecture(
    name="qwen3-0.6b",
    family="phi3",
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
    rotary_base=1e6,
    layernorm_epsilon=1e-6,
    share_embeddings_and_output_weights=True,
    qk_layernorm=True,
)
"""Qwen3-0.6B: with its sizes, the dense family has the same layers."""
WORKLOAD: dict[str, Any] = {"seq_length": 1024, "num_microbatches": 2}
"""The largest allocated peak is in a micro-batch, so its saving depends little on the length."""
NUM_STEPS = 2
"""A lab records its second and third step: from the third on, the pools of the optimizer's streams no longer grow."""
AWARE = {"use_precision_aware_optimizer": True}
BASES: dict[str, dict[str, Any]] = {
    "precision-aware": AWARE,
    "precision-aware, bf16 gradients": AWARE | {"grad_reduce_in_bf16": True, "manual_gc": True},
    "default": {},
}
"""States that the job may have had. The second is that of NeMo-RL's own files (``examples/configs/sft.yaml``), if
Python's garbage collector has freed the first of the two CPU optimizers that Megatron makes."""
LOSS = {"loss": "logprobs", "apply_rope_fusion": True}
HALF = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
OVERLAPPED = {"overlap_cpu_optimizer_d2h_h2d": True}
ROWS: dict[str, dict[str, Any]] = {
    "0 %": {},
    "50 %": HALF,
    "50 %, overlapped": HALF | OVERLAPPED,
    "100 %, overlapped": {"optimizer_cpu_offload": True} | OVERLAPPED,
}


def measure(path: Path, seconds: float) -> None:
    """Takes some steps in each state, until the time is over; writes a line for each state at once."""
    started = time.monotonic()
    with path.open("w") as lines:
        for base, row, state in _states():
            if time.monotonic() - started > seconds:
                print(f"stopped before {base}, {row}: {seconds:.0f} s are over")
                return
            with Lab(MODEL, state=state, **WORKLOAD) as lab, _most_used() as used:
                records = [lab.step() for _ in range(NUM_STEPS)]
            values = {
                "base": base,
                "row": row,
                "peak_allocated_bytes": [record.peak_allocated_bytes for record in records],
                "peak_reserved_bytes": [record.peak_reserved_bytes for record in records],
                "most_used_bytes": max(used),
                "step_seconds": [round(record.step_seconds, 6) for record in records],
            }
            lines.write(json.dumps(values) + "\n")
            lines.flush()
            print(f"{time.monotonic() - started:.0f} s: {values}", flush=True)


@contextmanager
def _most_used() -> Iterator[list[int]]:
    """Samples the device's bytes in use, of all processes, every 5 ms."""
    samples, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.005):
            free, total = torch.cuda.mem_get_info()
            samples.append(total - free)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        ended.set()
        sampler.join()


def predict(allocator: AllocatorSettings) -> None:
    """Prints the peaks of each state, and how much less they are than without the CPU optimizer."""
    plain: dict[str, list[StepRecord]] = {}
    for base, row, state in _states():
        with Lab(MODEL, state=state, backend="simulated", allocator=allocator, **WORKLOAD) as lab:
            records = [lab.step() for _ in range(NUM_STEPS)]
        steps = zip(records, plain.setdefault(base, records), strict=True)
        print(f"{base}, {row}: {'; '.join(_less(record, other) for record, other in steps)}", flush=True)


def _less(record: StepRecord, plain: StepRecord) -> str:
    figures = (
        ("allocated", record.peak_allocated_bytes, plain.peak_allocated_bytes),
        ("reserved", record.peak_reserved_bytes or 0, plain.peak_reserved_bytes or 0),
    )
    return ", ".join(f"{name} {own / GIB:.3f} ({(other - own) / GIB:.3f} less)" for name, own, other in figures)


def _states() -> Iterator[tuple[str, str, TrainingState]]:
    for base, values in BASES.items():
        for row, others in ROWS.items():
            yield base, row, TrainingState(**values, **others, **LOSS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "predict"))
    parser.add_argument("file", type=Path, nargs="?", default=Path("optimizer_on_host.jsonl"))
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further state after this time")
    parser.add_argument("--expandable-segments", action="store_true", help="predict with this option of torch")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        measure(arguments.file, arguments.seconds)
    else:
        predict(AllocatorSettings(expandable_segments=arguments.expandable_segments))
