"""Measures every setting, or every option of the training state, as lines for `memlab results`.

python -m benchmarks.results FILE.jsonl [ARCHITECTURE:LAYERS:SEQUENCE ...]     a GPU with 139 GiB for the defaults
python -m benchmarks.results --states FILE.jsonl [ARCHITECTURE:LAYERS:SEQUENCE ...]
memlab results FILE.jsonl > labs/RESULTS.md
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy import STATES
from memlab import Lab, MemorySettings, TrainingState
from memlab.config.architectures import Architecture
from memlab.config.parts.moe import Experts
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES
from memlab.record.step_record import StepRecord
from memlab.views.text.results import Result

ROUNDS, STEPS_A_ROUND = 3, 4
"""Each setting is measured several times over, with all others in between, so that a slow minute hits them all."""
STEPS_OF_A_STATE = 8
DEFAULT_STATE_CASES = ("qwen3-30b-a3b:2:4096", "phi-4:2:4096")
DEFAULTS = ("qwen3-30b-a3b:4:4096", "phi-4:4:4096", "qwen3-30b-a3b:4:8192", "phi-4:4:8192")


def settings_of(architecture: Architecture) -> list[MemorySettings]:
    """Returns what is measured of a family, plain first."""
    is_moe = architecture.routes
    recomputed = [name for name in RECOMPUTE_MODULES if is_moe or name not in Experts.recompute_modules]
    offloaded = [name for name in OFFLOAD_MODULES if is_moe or name not in Experts.offload_modules]
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


def measured_settings(architecture: str, num_layers: int, seq_length: int) -> Iterator[Result]:
    """Measures every setting on one live model."""
    with Lab(architecture, num_layers=num_layers, seq_length=seq_length) as lab:
        measured: dict[MemorySettings, list[StepRecord]] = {}
        for _ in range(ROUNDS):
            for settings in settings_of(lab.scenario.architecture):
                measured.setdefault(settings, []).extend(lab.step(settings) for _ in range(STEPS_A_ROUND))
                lab.records.clear()  # with their timelines
        for records in measured.values():
            yield result_of(records)


def measured_states(architecture: str, num_layers: int, seq_length: int) -> Iterator[Result]:
    """Measures every training state, each on a model of its own: a change would build it again as well."""
    for values in ({}, *STATES):
        state = TrainingState(**values)
        try:
            with Lab(architecture, num_layers=num_layers, seq_length=seq_length, state=state) as lab:
                yield result_of([lab.step() for _ in range(STEPS_OF_A_STATE)])
        except Exception as error:  # noqa: BLE001  # the other states are measured all the same
            print(f"FAILED {architecture}, {state}: {type(error).__name__}: {error}"[:500], flush=True)


def result_of(records: list[StepRecord]) -> Result:
    """Returns the first record, without the modules of its peak, which would be most of the file, and all times."""
    record = replace(records[0], timeline=None, peak_by_module={}, step_index=0)
    return Result(record, tuple(round(each.step_seconds, 6) for each in records))


def main(path: Path, cases: list[str], *, states: bool) -> None:
    """Measures each case, one line per setting or state."""
    measured = measured_states if states else measured_settings
    with path.open("w") as lines:
        for case in cases:
            name, num_layers, seq_length = case.split(":")
            started = time.perf_counter()
            for result in measured(name, int(num_layers), int(seq_length)):
                print(result.record.scenario, result.record, flush=True)
                lines.write(json.dumps(result.to_dict()) + "\n")
                lines.flush()
            print(f"{case}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", action="store_true", help="measure training states in place of settings")
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*", metavar="ARCHITECTURE:LAYERS:SEQUENCE")
    arguments = parser.parse_args()
    usual = DEFAULT_STATE_CASES if arguments.states else DEFAULTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(arguments.file, arguments.cases or list(usual), states=arguments.states)
