"""What memlab adds to a step: metered against unmetered, interleaved in one run; and what changing a setting takes.

python benchmarks/steps.py
"""

from __future__ import annotations

import statistics
import time
import warnings

from memlab import Lab, MemorySettings

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


def apply_cost() -> None:
    """Prints how long `apply` takes on a model of 48 layers."""
    with Lab("qwen3-moe-tiny", num_layers=48, seq_length=16) as lab:
        lab.step()
        seconds = []
        for settings in SETTINGS * RUNS:
            started = time.perf_counter()
            lab.apply(settings)
            seconds.append(time.perf_counter() - started)
    print(
        f"\napply on 48 layers: median {statistics.median(seconds) * 1e3:.1f} ms, largest {max(seconds) * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter_cost()
        apply_cost()
