"""Tries random memory settings in every training state on the CPU: no loss may change, and the way back is exact.

One lab per family changes its state in place. A state that the CPU refuses (FP8) is skipped, with the reason.

    python -m benchmarks.state_soak --settings 50
    python -m benchmarks.state_soak --settings 50 --only phi-4-tiny --skip 11     # goes on where a run was cut short
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks.accuracy import STATES
from memlab import Lab, MemorySettings, TrainingState
from memlab.analysis.loss_tolerance import loss_tolerance
from tests.unit.live import random_settings

_FIGURES = ("peak_allocated_bytes", "static_bytes", "host_bytes")
FAMILIES = {"qwen3-moe-tiny": {"num_layers": 2, "seq_length": 64}, "phi-4-tiny": {"num_layers": 2, "seq_length": 64}}


def try_state(lab: Lab, state: TrainingState, count: int, seed: int) -> list[str]:
    """Returns what was wrong with a state: losses that changed, and a peak that did not come back."""
    rng, wrong = random.Random(seed), []  # noqa: S311 - settings need no cryptography
    plain = lab.step(MemorySettings(), state=state)
    assert plain.loss is not None
    for _ in range(count):
        record = lab.step(random_settings(lab, rng))
        allowed = loss_tolerance(plain, record) * abs(plain.loss)
        if record.loss is None or abs(record.loss - plain.loss) > allowed:
            wrong.append(f"{record.settings}: loss {record.loss} in place of {plain.loss}")
    back = lab.step(MemorySettings())
    lab.records.clear()
    figures = {name: (getattr(back, name), getattr(plain, name)) for name in _FIGURES}
    return wrong + [f"{name} is {now}, was {before}" for name, (now, before) in figures.items() if now != before]


def main() -> int:
    """Prints a line per state; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=50, help="random settings per state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FAMILIES, help="try the states of one model")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many states of each model, from the first")
    arguments = parser.parse_args()
    failed = 0
    for architecture, workload in FAMILIES.items():
        if arguments.only not in (None, architecture):
            continue
        with Lab(architecture, backend="cpu", **workload) as lab:  # type: ignore[arg-type]
            for values in ({}, *STATES)[arguments.skip :]:
                started, state = time.monotonic(), TrainingState(**values)
                try:
                    lab.check_state(state)
                except ValueError as reason:
                    print(f"{architecture}, {state}: refused: {reason}")
                    continue
                wrong = try_state(lab, state, arguments.settings, arguments.seed)
                failed += bool(wrong)
                result = "; ".join(wrong[:3]) or f"{arguments.settings} settings, one loss, and the way back is exact"
                print(f"{architecture}, {state}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
