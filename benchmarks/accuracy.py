"""How near predictions come to a real GPU: the same steps on both, and the errors between them as a table.

    python benchmarks/accuracy.py step --backend cuda --out h200.jsonl          # on the GPU
    torchrun --nproc-per-node 2 benchmarks/accuracy.py step --backend cuda --job phi-4:TP2 --out h200.jsonl
    python benchmarks/accuracy.py step --backend simulated --out predicted.jsonl   # all cases, every rank of every job
    python benchmarks/accuracy.py compare h200.jsonl predicted.jsonl

A lab is opened for each architecture, number of layers and rank, and takes its cases one after the other. A line is
written after each case: a run that was cut short is carried on by the same command. Ranks of a job write a file each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.architectures import find_architecture
from memlab.commands.ranks import failing_together, rank
from memlab.lab import Lab
from memlab.layout import Layout
from memlab.record import StepRecord
from memlab.settings import MOE_OFFLOAD_MODULES, MOE_RECOMPUTE_MODULES, MemorySettings
from memlab.units import MIB, format_bytes

Case = tuple[str, int, dict[str, int], MemorySettings]
"""Architecture, layers, workload, settings."""

OFFLOAD = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
RECOMPUTE = ("core_attn", "layernorm", "moe_act", "moe", "mlp")
WORKLOADS = (
    {"seq_length": 1024, "micro_batch_size": 4, "num_microbatches": 1},
    {"seq_length": 16384, "micro_batch_size": 1, "num_microbatches": 1},
    {"seq_length": 4096, "micro_batch_size": 2, "num_microbatches": 3},
)
USUAL = {"seq_length": 4096, "micro_batch_size": 1, "num_microbatches": 1}
SHORT = {"seq_length": 2048, "micro_batch_size": 1, "num_microbatches": 1}
WORTH_A_LOOK_BYTES = 64 * MIB
"""Savings below this are not judged by their share."""


def full(count: int, method: str = "uniform") -> MemorySettings:
    """Full recompute."""
    return MemorySettings(recompute_granularity="full", recompute_method=method, recompute_num_layers=count)


def recompute(*modules: str, **others: Any) -> MemorySettings:
    """Selective recompute."""
    return MemorySettings(recompute_granularity="selective", recompute_modules=modules, **others)


def cases() -> Iterator[Case]:
    """Yields every case, those of one lab together and a plain one first at each workload."""
    for architecture, is_moe, deep in (("qwen3-30b-a3b", True, 8), ("phi-4", False, 12)):
        offload = [name for name in OFFLOAD if is_moe or name not in MOE_OFFLOAD_MODULES]
        again = [name for name in RECOMPUTE if (is_moe or name not in MOE_RECOMPUTE_MODULES) and name != "mlp" * is_moe]
        every = MemorySettings(offload_modules=offload)
        both = recompute("layernorm", again[-1], offload_modules=("core_attn", "attn_proj"))
        several = [MemorySettings(), full(1), every, both]
        for settings in (MemorySettings(), full(1), full(2), full(2, "block"), every, both):
            yield architecture, 4, USUAL, settings
        for name in again:
            yield architecture, 4, USUAL, recompute(name)
        for name in offload:
            names = ("core_attn", name) if name == "attn_proj" else (name,)  # a rule: one takes the other's output
            yield architecture, 4, USUAL, MemorySettings(offload_modules=names)
        for workload in WORKLOADS:
            for settings in several:
                yield architecture, 2, workload, settings
        for settings in (
            MemorySettings(),
            full(deep // 2, "block"),
            MemorySettings(offload_parameters=True, offload_optimizer=True),
            MemorySettings(offload_gradients=True, offload_modules=("core_attn",)),
        ):
            yield architecture, deep, SHORT, settings


JOBS: dict[str, tuple[Layout, int]] = {
    "TP2": (Layout(tensor_model_parallel_size=2), 1),
    "PP2": (Layout(pipeline_model_parallel_size=2), 4),
    "EP2": (Layout(expert_model_parallel_size=2, data_parallel_size=2), 1),
    "DP2": (Layout(data_parallel_size=2), 2),
    "CP2": (Layout(context_parallel_size=2), 1),
    "PP2VP2": (Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 4),
    "TP2EP2": (
        Layout(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        1,
    ),
}
"""Layouts of two ranks, and how many micro-batches a step has."""


def job_cases(architecture: str, job: str) -> Iterator[Case]:
    """Yields the cases of one rank of a job."""
    is_moe = find_architecture(architecture).is_moe
    offload = [name for name in OFFLOAD if is_moe or name not in MOE_OFFLOAD_MODULES]
    workload = USUAL | {"num_microbatches": JOBS[job][1]}
    for settings in (
        MemorySettings(),
        full(1),
        MemorySettings(offload_modules=offload),
        recompute("layernorm", "moe_act" if is_moe else "mlp", offload_modules=("core_attn", "attn_proj")),
        MemorySettings(offload_parameters=True, offload_optimizer=True),
    ):
        yield architecture, 4, workload, settings


def all_jobs() -> Iterator[tuple[str, str]]:
    """Yields architecture and job, for every job that the architecture can run."""
    for architecture in ("qwen3-30b-a3b", "phi-4"):
        for job, (layout, _) in JOBS.items():
            if layout.expert_model_parallel_size == 1 or find_architecture(architecture).is_moe:
                yield architecture, job


def step(backend: str, wanted: Iterable[Case], out: Path, layout: Layout) -> None:
    """Takes the steps of one rank that the file does not have yet."""
    known = map(StepRecord.from_dict, map(json.loads, out.read_text().splitlines() if out.exists() else []))
    done = {key(record) for record in known}
    lab: Lab | None = None
    with out.open("a") as lines, failing_together():
        for architecture, num_layers, workload, settings in wanted:
            if (architecture, num_layers, *workload.values(), layout, settings) in done:
                continue
            if lab is None or (lab.scenario.architecture.name, lab.scenario.num_layers) != (architecture, num_layers):
                if lab is not None:
                    lab.close()
                lab = Lab(architecture, num_layers=num_layers, backend=backend, layout=layout, **workload)  # type: ignore[arg-type]
            lab.set_workload(**workload)
            record = lab.step(settings)
            print(record.scenario, record, flush=True)
            lines.write(json.dumps(record.to_dict()) + "\n")
            lines.flush()
    if lab is not None:
        lab.close()


def compare(measured_file: Path, predicted_file: Path) -> None:
    """Prints one row a case, and the worst and median errors."""
    measured, predicted = (_records(path) for path in (measured_file, predicted_file))
    shared = [key for key in measured if key in predicted and measured[key].status == predicted[key].status == "ok"]
    rows, errors, activation_errors, saving_errors, exact = [], [], [], [], 0
    for key in shared:
        truth, guess = measured[key], predicted[key]
        errors.append(_share(guess.peak_allocated_bytes, truth.peak_allocated_bytes))
        activation_errors.append(_share(guess.activation_peak_bytes, truth.activation_peak_bytes))
        plain = (*key[:-1], MemorySettings())
        saved = measured[plain].activation_peak_bytes - truth.activation_peak_bytes
        saving = ""
        if saved > WORTH_A_LOOK_BYTES:
            guessed = predicted[plain].activation_peak_bytes - guess.activation_peak_bytes
            saving_errors.append(_share(guessed, saved))
            saving = f"{saving_errors[-1]:+.2%}"
        exact += guess.offloaded_bytes_by_module == truth.offloaded_bytes_by_module
        rows.append(
            f"| {truth.scenario} | {truth.settings} | {format_bytes(truth.peak_allocated_bytes)} | {errors[-1]:+.4%} | "
            f"{format_bytes(truth.activation_peak_bytes)} | {activation_errors[-1]:+.3%} | {saving} |"
        )
    print("| step | settings | allocated peak | error | activation peak | error | error of what it saves |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    print(f"\n{len(shared)} of {len(measured)} measured cases. {_summary('allocated peak', errors)}")
    print(_summary("activation peak", activation_errors) + " " + _summary("savings over 64 MiB", saving_errors))
    print(f"Offloaded bytes equal, module by module, in {exact} of {len(shared)}.")
    for category in ("parameters", "gradients", "optimizer state"):
        shares = [
            _share(predicted[key].peak_by_category[category], measured[key].peak_by_category[category])
            for key in shared
            if category in measured[key].peak_by_category
        ]
        print(_summary(category, shares))


def _summary(name: str, errors: list[float]) -> str:
    if not errors:
        return f"{name}: nothing to compare."
    sizes = [abs(error) for error in errors]
    under = sum(error < 0 for error in errors) / len(errors)
    return f"{name}: median {statistics.median(sizes):.4%}, worst {max(sizes):.4%}, {under:.0%} under-estimated."


def _share(guess: int, truth: int) -> float:
    return guess / truth - 1 if truth else float(guess != truth)


def _records(path: Path) -> dict[tuple[Any, ...], StepRecord]:
    records = map(StepRecord.from_dict, map(json.loads, path.read_text().splitlines()))
    return {key(record): record for record in records}


def key(record: StepRecord) -> tuple[Any, ...]:
    """Returns what makes a case: two records with the same key are compared."""
    scenario = record.scenario
    workload = (scenario.seq_length, scenario.micro_batch_size, scenario.num_microbatches)
    return (scenario.architecture.name, scenario.num_layers, *workload, scenario.layout, record.settings)


def rank_file(path: Path, architecture: str, job: str) -> Path:
    """Returns where a rank of a job writes."""
    return path.with_name(f"{path.stem}-{architecture}-{job}-{rank()}{path.suffix}")


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    stepping = commands.add_parser("step")
    stepping.add_argument("--backend", default="auto")
    stepping.add_argument("--job", metavar="ARCHITECTURE:JOB", help=f"under torchrun, with JOB of {', '.join(JOBS)}")
    stepping.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("measured", type=Path)
    comparing.add_argument("predicted", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        compare(arguments.measured, arguments.predicted)
    elif arguments.job:
        architecture, _, job = arguments.job.partition(":")
        layout = replace(JOBS[job][0], rank=rank())
        step(arguments.backend, job_cases(architecture, job), rank_file(arguments.out, architecture, job), layout)
    else:
        step(arguments.backend, cases(), arguments.out, Layout())
        if arguments.backend == "simulated":
            for architecture, job in all_jobs():
                for number in range(2):
                    layout = replace(JOBS[job][0], rank=number)
                    step(arguments.backend, job_cases(architecture, job), arguments.out, layout)


if __name__ == "__main__":
    main()
