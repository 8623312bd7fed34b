"""What `memlab predict` costs as a model grows: processor seconds by layers and micro-batches, and the line through it.

Whole commands, each in a process of its own, interleaved; the median of user and system time, which another program on
the machine disturbs less than the clock. The line is seconds = start + a layer's x layers + a pass's x layers x
micro-batches; linear cost shows as a small largest deviation from it.

    python benchmarks/prediction_time.py
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys

import numpy as np

NUM_ROUNDS = 3
LAYERS, MICROBATCHES = (12, 24, 48, 94), (1, 4, 8)
GOALS = {"phi-4": 10, "qwen3-30b-a3b": 15, "qwen3-235b-a22b": 30}
"""Seconds that a whole prediction at 4096 tokens may take."""


def cost(architecture: str, *flags: str) -> tuple[float, float]:
    """Returns processor seconds and the largest resident size in GB of one prediction."""
    command = [sys.executable, "-m", "memlab", "predict", architecture, "--seq-length", "4096", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} failed"
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def whole_models() -> None:
    """Prints the models at full depth beside their goals."""
    print(f"{'':20}{'seconds':>10}{'goal':>6}{'GB':>7}")
    for name, goal in GOALS.items():
        seconds, sizes = zip(*(cost(name) for _ in range(NUM_ROUNDS)), strict=True)
        print(f"{name:20}{statistics.median(seconds):10.1f}{goal:6}{max(sizes):7.2f}")


def by_size() -> None:
    """Prints seconds by layers and micro-batches, and how far they are from a line."""
    cells = list(itertools.product(LAYERS, MICROBATCHES))
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for _, (layers, batches) in itertools.product(range(NUM_ROUNDS), cells):
        flags = ("--num-layers", str(layers), "--num-microbatches", str(batches))
        seconds[layers, batches].append(cost("qwen3-235b-a22b", *flags)[0])
    medians = {cell: statistics.median(each) for cell, each in seconds.items()}
    print(f"\n{'layers':>6}" + "".join(f"{f'x {batches}':>9}" for batches in MICROBATCHES))
    for layers in LAYERS:
        print(f"{layers:6}" + "".join(f"{medians[layers, batches]:9.1f}" for batches in MICROBATCHES))
    known = np.array([[1, layers, layers * batches] for layers, batches in cells])
    line = np.linalg.lstsq(known, np.array(list(medians.values())), rcond=None)[0]
    off = max(abs(medians[cell] / at - 1) for cell, at in zip(cells, known @ line, strict=True))
    print(f"{line[0]:.1f} s + {line[1] * 1e3:.0f} ms a layer + {line[2] * 1e3:.1f} ms a layer and micro-batch")
    print(f"largest deviation from that {off:.1%}")


if __name__ == "__main__":
    whole_models()
    by_size()
