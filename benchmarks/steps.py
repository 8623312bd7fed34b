"""What memlab adds to a step: metered and unmetered steps in turn; a job that does nothing; a change of settings.

python benchmarks/steps.py
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial

from memlab import Lab, MemorySettings
from tests.unit.inside import inside

RUNS = 15
SETTINGS = (
    MemorySettings(),
    MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    MemorySettings(offload_modules=["core_attn", "attn_proj"], min_offloaded_tensor_size=0),
    MemorySettings(offload_parameters=True, offload_optimizer=True),
)


def meter_cost() -> None:
    """Prints the median step with and without the meter, and the median of their ratio run by run."""
    print(f"{'':44}{'metered ms':>12}{'plain ms':>12}{'ratio':>8}")
    for name in ("qwen3-moe-tiny", "phi-4-tiny"):
        with Lab(name, seq_length=128) as lab:
            for settings in SETTINGS:
                lab.step(settings)
                pairs = [(lab.step().step_seconds, lab.unmetered_step_seconds()) for _ in range(RUNS)]
                metered, plain = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
                ratio = statistics.median(metered / plain for metered, plain in pairs)
                print(f"{f'{name}, {settings}':44.44}{metered:12.1f}{plain:12.1f}{ratio:8.2f}")


def job_cost() -> None:
    """Prints what a job that does nothing takes on a lab's thread: a part of every other job."""
    for backend in ("cpu", "simulated"):
        with Lab("phi-4-tiny", num_layers=2, seq_length=32, backend=backend) as lab:
            _print_durations(f"empty job, {backend}", [lambda: inside(lab).worker.submit(int).result()] * RUNS)


def apply_cost() -> None:
    """Prints what `Lab.apply` takes on a model of 48 layers."""
    with Lab("qwen3-30b-a3b", seq_length=512, backend="simulated") as lab:
        _print_durations("apply on 48 layers", [partial(lab.apply, settings) for settings in SETTINGS * RUNS])


def _print_durations(name: str, calls: Iterable[Callable[[], object]]) -> None:
    """The process's own time is printed too: it says more where other processes want the same cores."""
    wall, own = [], []
    for call in calls:
        started, own_started = time.perf_counter(), time.process_time()
        call()
        wall.append((time.perf_counter() - started) * 1e3)
        own.append((time.process_time() - own_started) * 1e3)
    print(f"{name:24} median {statistics.median(wall):6.2f} ms, of its own {statistics.median(own):6.2f} ms")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter_cost()
        job_cost()
        apply_cost()
