"""What `memlab.watch` costs: the same training step of plain torch with it and without it, in turn, in one process.

A transformer with AdamW. On the CPU it has 4 layers, hidden size 512, and 4 sequences of 256 tokens, in fp32. On a GPU
it has 8 layers, hidden size 4096, and 4 sequences of 1024 tokens, in bf16: a step of about 100 ms on an H200. The ratio
is that of the medians. The time of the step inside the block and that of the whole `with` statement are shown
separately: the start of a block looks for all tensors of the process, and its end writes the timeline. Where other
programs use the processor, read the CPU time of one thread instead of the time.

    python benchmarks/watch.py [pairs of steps] [threads]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import memlab

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_LAYERS, HIDDEN, NUM_SEQUENCES, NUM_TOKENS = (8, 4096, 4, 1024) if DEVICE == "cuda" else (4, 512, 4, 256)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
NUM_PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
if len(sys.argv) > 2:
    torch.set_num_threads(int(sys.argv[2]))


def now() -> tuple[float, float]:
    """Returns the time and the process's CPU time, after the GPU's work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Prints the medians and their ratios."""
    layers = [
        torch.nn.TransformerEncoderLayer(HIDDEN, HIDDEN // 64, 4 * HIDDEN, batch_first=True, device=DEVICE, dtype=DTYPE)
        for _ in range(NUM_LAYERS)
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(NUM_SEQUENCES, NUM_TOKENS, HIDDEN, device=DEVICE, dtype=DTYPE)
    seconds: dict[str, list[tuple[float, float]]] = {"plain step": [], "watched step": [], "whole block": []}

    def step(name: str) -> None:
        started = now()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(name, started)

    def note(name: str, started: tuple[float, float]) -> None:
        ended = now()
        seconds[name].append((ended[0] - started[0], ended[1] - started[1]))

    num_events = 0
    for _ in range(NUM_PAIRS + 1):
        step("plain step")
        started = now()
        with memlab.watch(model, optimizer) as run:
            step("watched step")
        note("whole block", started)
        num_events = len(run.ended_timeline)
    threads = f"{torch.get_num_threads()} threads" if DEVICE == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {DEVICE} ({threads}), {NUM_PAIRS} pairs, {num_events:,} events in a step")
    for clock, title in enumerate(("time", "CPU time")):
        measured = {name: [each[clock] * 1e3 for each in values[1:]] for name, values in seconds.items()}
        plain = statistics.median(measured["plain step"])
        for name, values in measured.items():
            median = statistics.median(values)
            spread = f"({min(values):.1f} to {max(values):.1f})"
            print(f"{title:<9} {name:<13} median {median:8.1f} ms {spread:<20} {median / plain:.3f} of plain")


if __name__ == "__main__":
    main()
