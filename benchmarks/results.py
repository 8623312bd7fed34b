"""Measures every recompute and offload module, and the useful combinations, as lines for `memlab results`.

python benchmarks/results.py FILE.jsonl [ARCHITECTURE:LAYERS:SEQUENCE ...]     a GPU with 139 GiB for the defaults
memlab results FILE.jsonl > labs/RESULTS.md
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab import Lab, MemorySettings
from memlab.config.architectures import Architecture
from memlab.config.settings import MOE_OFFLOAD_MODULES, MOE_RECOMPUTE_MODULES, OFFLOAD_MODULES, RECOMPUTE_MODULES
from memlab.record.step_record import StepRecord
from memlab.views.text.results import Result

ROUNDS, STEPS_A_ROUND = 3, 4
"""Each setting is measured several times over, with all others in between, so that a slow minute hits them all."""
DEFAULTS = ("qwen3-30b-a3b:4:4096", "phi-4:4:4096", "qwen3-30b-a3b:4:8192", "phi-4:4:8192")


def settings_of(architecture: Architecture) -> list[MemorySettings]:
    """Returns what is measured of a family, plain first."""
    is_moe = architecture.is_moe
    recomputed = [name for name in RECOMPUTE_MODULES if is_moe or name not in MOE_RECOMPUTE_MODULES]
    offloaded = [name for name in OFFLOAD_MODULES if is_moe or name not in MOE_OFFLOAD_MODULES]
    every = [MemorySettings()]
    for method, num_layers in (("uniform", 1), ("uniform", 2), ("block", 2)):
        full: dict[str, Any] = {"recompute_method": method, "recompute_num_layers": num_layers}
        every.append(MemorySettings(recompute_granularity="full", **full))
    every += [replace(every[1], checkpoint_input_remedy="detach")] if is_moe else []
    every += [selective(name) for name in recomputed]
    every += [selective("layernorm", "moe_act"), selective("core_attn", "moe")] if is_moe else []
    every += [MemorySettings(offload_modules=[name]) for name in offloaded if name != "attn_proj"]
    every += [MemorySettings(offload_modules=["core_attn", "attn_proj"])]
    every += [MemorySettings(offload_modules=["expert_fc1", "moe_act"])] if is_moe else []
    every += [MemorySettings(offload_modules=[name for name in offloaded if name != "attn_norm"])]
    if is_moe:
        both = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
        every += [MemorySettings(**both, offload_modules=["expert_fc1"])]
        every += [MemorySettings(**both, offload_modules=[name for name in offloaded if name != "attn_norm"])]
    else:
        both = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        every += [MemorySettings(**both, offload_modules=["qkv_linear", "core_attn", "attn_proj"])]
    return every


def selective(*names: str) -> MemorySettings:
    """Returns selective recompute of some modules."""
    return MemorySettings(recompute_granularity="selective", recompute_modules=list(names))


def main(path: Path, cases: list[str]) -> None:
    """Measures each case, one line a setting."""
    with path.open("w") as lines:
        for case in cases:
            name, num_layers, seq_length = case.split(":")
            started = time.perf_counter()
            with Lab(name, num_layers=int(num_layers), seq_length=int(seq_length)) as lab:
                measured: dict[MemorySettings, list[StepRecord]] = {}
                for _ in range(ROUNDS):
                    for settings in settings_of(lab.scenario.architecture):
                        measured.setdefault(settings, []).extend(lab.step(settings) for _ in range(STEPS_A_ROUND))
                        lab.records.clear()  # with their timelines
                for records in measured.values():
                    # The modules of each peak would be most of the file.
                    record = replace(records[0], timeline=None, peak_by_module={}, step_index=0)
                    result = Result(record, tuple(round(each.step_seconds, 6) for each in records))
                    lines.write(json.dumps(result.to_dict()) + "\n")
            print(f"{case}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("benchmarks/results.py needs a file to write: give it as the first argument")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(Path(sys.argv[1]), sys.argv[2:] or list(DEFAULTS))
