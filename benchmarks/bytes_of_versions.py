"""Whether another torch or megatron-core changes the bytes of a step, and where: the same steps with both.

    python -m benchmarks.bytes_of_versions take before.jsonl        with the packages that memlab pins
    python -m benchmarks.bytes_of_versions take after.jsonl         with others
    python -m benchmarks.bytes_of_versions compare before.jsonl after.jsonl

The steps are tiny ones on the CPU, which run the libraries' own code, and predictions at full width. `take` goes on
after a step that fails, and writes its error: the others say what else another version changes. `compare` prints a
table in Markdown, and exits with 1 if a step's bytes differ, or if it failed with only one set. Bytes of Transformer
Engine are not compared: it needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab import Lab, Layout, MemorySettings, StepRecord, TrainingState

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = {
    "dense": MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "layernorm")),
    "experts": MemorySettings(recompute_granularity="selective", recompute_modules=("moe_act", "moe", "layernorm")),
}
OFFLOAD = {
    "dense": MemorySettings(offload_modules=("core_attn", "attn_proj"), min_offloaded_tensor_size=0),
    "experts": MemorySettings(offload_modules=("expert_fc1", "moe_act", "core_attn"), min_offloaded_tensor_size=0),
}
ON_HOST = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
STATES = {
    "": TrainingState(),
    "precision-aware optimizer": TrainingState(
        use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    ),
    "fp8": TrainingState(fp8_recipe="blockwise"),
}
MODELS = {
    "phi-4-tiny": ("cpu", "dense", 256),
    "qwen3-dense-tiny": ("cpu", "dense", 256),
    "qwen3-moe-tiny": ("cpu", "experts", 256),
    "deepseek-tiny": ("cpu", "experts", 256),
    "phi-4": ("simulated", "dense", 4096),
    "qwen3-30b-a3b": ("simulated", "experts", 4096),
}
LAYOUTS = ("TP2 DP2", "PP2", "CP2", "TP2 EP2 ETP1")
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
FIGURES = ("static_bytes", "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "host_bytes")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of a model with two layers."""

    model: str
    state: str = ""
    layout: str = "one rank"
    settings: MemorySettings

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.model, MODELS[self.model][0], self.state, self.layout, f"{self.settings}")))

    def take(self) -> StepRecord:
        """Takes the step."""
        backend, _, seq_length = MODELS[self.model]
        with Lab(
            self.model,
            num_layers=2,
            seq_length=seq_length,
            layout=Layout.from_text(self.layout),
            state=STATES[self.state],
            backend=backend,
        ) as lab:
            return lab.step(self.settings)


def cases() -> Iterator[Case]:
    """Yields the steps of one rank under each setting, then those of training states and of layouts."""
    for model, (_, kind, _) in MODELS.items():
        for settings in (MemorySettings(), FULL, SELECTIVE[kind], OFFLOAD[kind], ON_HOST):
            yield Case(model=model, settings=settings)
        for state in STATES:
            if state:
                yield Case(model=model, state=state, settings=MemorySettings())
    for layout in LAYOUTS:
        for settings in (MemorySettings(), FULL):
            yield Case(model="qwen3-30b-a3b", layout=layout, settings=settings)


def take(path: Path) -> None:
    """Writes a line for each step: its bytes, or the error with which it failed."""
    with path.open("w", encoding="utf-8") as file:
        for case in cases():
            try:
                record = case.take()
            except _FAILURES as error:
                row: dict[str, Any] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
            else:
                row = {name: getattr(record, name) for name in FIGURES}
                row |= {"at the peak": record.peak_by_category, "of modules": record.peak_by_module}
                row |= {"versions": record.versions}
            file.write(json.dumps({"case": f"{case}"} | row) + "\n")
            print(f"{case}: {row.get('error', 'ok')}", flush=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of a file by their step."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row.pop("case"): row for row in rows}


def compare(before: Path, after: Path) -> int:
    """Prints what differs; returns how many steps do."""
    rows = read(before), read(after)
    for path, found in zip((before, after), rows, strict=True):
        versions = next((row["versions"] for row in found.values() if "versions" in row), {})
        print(f"{path.name}: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "\n")
    if rows[0].keys() != rows[1].keys():
        sys.exit("the files have other steps: take both with the same memlab")
    differing = {case: list(differences(rows[0][case], rows[1][case])) for case in rows[0]}
    differing = {case: found for case, found in differing.items() if found}
    print(f"{len(differing)} of {len(rows[0])} steps differ.\n")
    if differing:
        print("| step | bytes | before | after | difference |\n| --- | --- | ---: | ---: | ---: |")
    for case, found in differing.items():
        for name, *values in found:
            print(f"| {case} | {name} | " + " | ".join(str(value) for value in values) + " |")
    return len(differing)


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, object, object, object]]:
    """Yields each figure that differs: its name, both values, and the difference."""
    if "error" in before or "error" in after:
        if before.get("error") != after.get("error"):
            yield "failed", before.get("error", "no"), after.get("error", "no"), ""
        return
    for name in FIGURES:
        if before[name] != after[name]:
            yield name, f"{before[name]:,}", f"{after[name]:,}", f"{after[name] - before[name]:+,}"
    for part in ("at the peak", "of modules"):
        for name in before[part] | after[part]:
            old, new = (row[part].get(name, 0) for row in (before, after))
            if old != new:
                yield f"{name or 'no module'}, {part}", f"{old:,}", f"{new:,}", f"{new - old:+,}"


def main() -> None:
    """Takes the steps, or compares two files of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("take").add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "take":
        take(arguments.file)
    elif compare(arguments.before, arguments.after):
        sys.exit(1)


if __name__ == "__main__":
    main()
