"""Tokens per second under recompute and offload, in interleaved rounds on one GPU, as NeMo-RL #2279 was asked for.

    python -m benchmarks.throughput qwen3-30b-a3b:4:16384 --out throughput.jsonl

Every round takes a few steps under each setting, and each setting is compared with the plain steps of the same round,
so that a slow minute hits both. Beside the times stand the bytes that each setting copies or recomputes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

from benchmarks.accuracy import full, recompute
from memlab import Lab, MemorySettings
from memlab.config.architectures import find_architecture
from memlab.record.step_record import StepRecord


def settings_of(architecture: str) -> list[MemorySettings]:
    """Returns what is compared, plain first."""
    dense = [
        MemorySettings(),
        MemorySettings(offload_modules=("core_attn", "attn_proj")),
        MemorySettings(offload_modules=("qkv_linear", "core_attn", "attn_proj")),
        full(1),
    ]
    if not find_architecture(architecture).routes:
        return [*dense, recompute("mlp")]
    return [
        *dense,
        MemorySettings(offload_modules=("moe_act",)),
        MemorySettings(offload_modules=("expert_fc1", "moe_act")),
        recompute("layernorm", "moe_act"),
        recompute("moe"),
    ]


def measure(
    architecture: str, num_layers: int, seq_length: int, *, rounds: int, steps_a_round: int
) -> list[tuple[StepRecord, list[float]]]:
    """Returns each setting's record, and the median seconds of a step in each round."""
    with Lab(architecture, num_layers=num_layers, seq_length=seq_length) as lab:
        wanted = settings_of(architecture)
        records: list[StepRecord] = []
        seconds: list[list[float]] = [[] for _ in wanted]
        for _ in range(rounds):
            for settings, times in zip(wanted, seconds, strict=True):
                steps = [lab.step(settings) for _ in range(steps_a_round)]
                times.append(statistics.median(step.step_seconds or 0.0 for step in steps))
                if len(records) < len(wanted):
                    records.append(steps[-1])
                lab.records.clear()  # with their timelines
        return list(zip(records, seconds, strict=True))


def table(measured: list[tuple[StepRecord, list[float]]]) -> str:
    """Writes the medians, and the ratios to the plain steps of the same rounds with their quartiles."""
    plain, plain_seconds = measured[0]
    tokens = plain.scenario.seq_length * plain.scenario.micro_batch_size * plain.scenario.num_microbatches
    lines = [f"{plain.scenario}, {len(plain_seconds)} rounds", f"{'setting':60}tokens/s  time ratio (quartiles)   GiB"]
    for record, seconds in measured:
        ratios = [one / other for one, other in zip(seconds, plain_seconds, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        saved = (plain.peak_allocated_bytes - record.peak_allocated_bytes) / 2**30
        speed = f"{tokens / statistics.median(seconds):8,.0f}"
        lines.append(f"{record.settings!s:60}{speed}  {middle:6.3f} ({lower:.3f} to {upper:.3f})  saves {saved:6.3f}")
    return "\n".join(lines)


def main() -> None:
    """Measures each case, appends a line for each setting, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="ARCHITECTURE:LAYERS:SEQUENCE")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="in a round, under each setting (default 3)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for case in arguments.cases:
        architecture, num_layers, seq_length = case.split(":")
        started = time.perf_counter()
        measured = measure(
            architecture, int(num_layers), int(seq_length), rounds=arguments.rounds, steps_a_round=arguments.steps
        )
        with arguments.out.open("a", encoding="utf-8") as out:
            for record, seconds in measured:
                values = record.to_dict() | {"peak_by_module": {}}
                out.write(json.dumps({"record": values, "seconds": [round(each, 6) for each in seconds]}) + "\n")
        print(f"{table(measured)}\n{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
