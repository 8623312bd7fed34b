"""What memlab costs on a GPU: metering, offloading at the speed of the link, settings and how far they drift.

python benchmarks/cuda.py [metering] [offload] [settings] [soak]     all of them without a name; a GPU with 139 GiB
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch

from memlab import Lab, MemorySettings
from memlab.config.settings import OFFLOAD_MODULES
from tests.unit.inside import inside
from tests.unit.live import random_settings

RUNS = 10


def metering() -> None:
    """Prints steps with and without the meter and its hooks, interleaved, and what two without differ by: the noise."""
    print(
        f"{'metering, sequence 4096':32}{'metered ms':>12}{'plain ms':>10}{'ratio':>8}{'quartiles':>16}"
        f"{'plain / plain':>16}   (ratio at most 1.05)"
    )
    for name, num_layers in (("qwen3-30b-a3b", 4), ("qwen3-30b-a3b", 10), ("phi-4", 4), ("phi-4", 12)):
        with Lab(name, num_layers=num_layers, seq_length=4096) as lab:
            lab.step()
            rounds = [_metered_plain_plain(lab) for _ in range(2 * RUNS)]
            metered, plain, _ = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
            # Of pairs, as a shared host is slow for seconds at a time.
            lower, ratio, upper = statistics.quantiles([one / other for one, other, _ in rounds], n=4)
            least, _, most = statistics.quantiles([one / other for _, one, other in rounds], n=4)
            print(
                f"{f'{name}, {num_layers} layers':32}{metered:12.1f}{plain:10.1f}{ratio:8.3f}"
                f"{f'{lower:.2f} to {upper:.2f}':>16}{f'{least:.2f} to {most:.2f}':>16}",
                flush=True,
            )


def _metered_plain_plain(lab: Lab) -> tuple[float, float, float]:
    """Returns three steps' seconds, each after a metered one: an unmetered one empties the allocator's cache."""
    lab.step()
    metered_seconds = lab.step().step_seconds
    assert metered_seconds is not None
    plain_seconds = lab.unmetered_step_seconds()
    lab.step()
    return metered_seconds, plain_seconds, lab.unmetered_step_seconds()


def offload() -> None:
    """Prints the bandwidth of each way to take a group down and up, beside a plain pinned copy of the same bytes."""
    with Lab("qwen3-30b-a3b", num_layers=4, seq_length=4096) as lab:
        lab.step()
        print(f"\n{'offload and reload':44}{'GiB':>8}{'down GB/s':>11}{'up GB/s':>9}{'of plain':>16}{'host held':>11}")
        plain = _plain_copy()
        _bandwidth_row("a plain pinned copy of 4 GiB", 4 * 1024**3, *plain, plain)
        for group in ("parameters", "optimizer state"):
            for pinned in (True, False) if group == "parameters" else (True,):
                lab.pinned_host_memory = pinned
                runs = RUNS if pinned else 3
                first = lab.offload(group)
                lab.load(group)
                pairs = [(lab.offload(group).seconds, lab.load(group).seconds) for _ in range(runs)]
                down, up = (statistics.median(column) for column in zip(*pairs, strict=True))
                num_bytes = first.transferred_bytes[group]
                name = f"{group}, {'pinned' if pinned else 'pageable'}"
                _bandwidth_row(name, num_bytes, down, up, plain, first.host_bytes, first.seconds)
                lab.step(MemorySettings())  # the host buffer goes
        _naive(lab, plain)


def _plain_copy() -> tuple[float, float]:
    device = torch.empty(4 * 1024**3, dtype=torch.uint8, device="cuda")
    host = torch.empty(4 * 1024**3, dtype=torch.uint8, pin_memory=True)
    down = [_seconds(lambda: host.copy_(device, non_blocking=True)) for _ in range(RUNS)]
    up = [_seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(RUNS)]
    return statistics.median(down), statistics.median(up)


def _naive(lab: Lab, plain: tuple[float, float]) -> None:
    """The way of ``.cpu().pin_memory()`` each time (SkyRL #563, verl before #6193)."""
    buffer = inside(lab).model.engine.live.chunk.buffers[0].param_data
    down = statistics.median(_seconds(lambda: buffer.cpu().pin_memory()) for _ in range(3))
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    _bandwidth_row("parameters, .cpu().pin_memory()", buffer.nbytes, down, float("nan"), plain, held)


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _bandwidth_row(
    name: str,
    num_bytes: int,
    down: float,
    up: float,
    plain: tuple[float, float],
    held: int = 0,
    first: float = 0.0,
) -> None:
    reference = 4 * 1024**3
    shares = f"{num_bytes / down / (reference / plain[0]):.2f} {num_bytes / up / (reference / plain[1]):.2f}"
    row = f"{name:44}{num_bytes / 1024**3:8.2f}{num_bytes / down / 1e9:11.1f}{num_bytes / up / 1e9:9.1f}{shares:>16}"
    print(
        row + (f"{held / num_bytes:10.3f}x" if held else "") + (f"  first {first:.1f} s" if first else ""), flush=True
    )


def settings() -> None:
    """Prints what single offload modules do to the step, and what `apply` takes."""
    with Lab("qwen3-30b-a3b", num_layers=4, seq_length=4096) as lab:
        _offload_modules(lab, [name for name in OFFLOAD_MODULES if name not in ("attn_norm", "attn_proj")])
        seconds = []
        for number in range(100):
            wanted = MemorySettings(offload_modules=("moe_act",)) if number % 2 else MemorySettings()
            started = time.perf_counter()
            lab.apply(wanted)
            seconds.append((time.perf_counter() - started) * 1e3)
        print(f"apply: median {statistics.median(seconds):.1f} ms, largest {max(seconds):.1f} ms (at most 10)")
    with Lab("phi-4", num_layers=4, seq_length=4096) as lab:
        _offload_modules(lab, ["qkv_linear", "core_attn"])


def _offload_modules(lab: Lab, names: list[str]) -> None:
    every = {"none": MemorySettings(), **{name: MemorySettings(offload_modules=[name]) for name in names}}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    losses = set()
    for _ in range(RUNS):
        for name, wanted in every.items():
            record = lab.step(wanted)
            seconds[name].append(record.step_seconds)
            losses.add(record.loss)
    plain = statistics.median(seconds["none"])
    print(f"\n{lab.scenario}: {len(losses)} different losses, {max(losses) - min(losses):.1e} apart")
    for name, values in seconds.items():
        ratio = statistics.median(values) / plain
        print(f"{name:44}{statistics.median(values) * 1e3:8.1f} ms{ratio:8.3f} times none (at most 1.3)", flush=True)


def soak(count: int = 1000) -> None:
    """Takes a step under each of many random settings, and looks whether anything drifts.

    PYTORCH_ALLOC_CONF=expandable_segments:True lets torch split every block: without it rests of up to 1 MiB belong to
    their block, and which blocks have one depends on what was cached.
    """
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=256) as lab:
        gc.freeze()  # torch and Megatron themselves are most of what each collection between two steps would look at
        rng = random.Random(0)  # noqa: S311  # settings at random need no cryptography
        choices = [random_settings(lab, rng) for _ in range(40)]
        plain = lab.step(MemorySettings())
        peaks: dict[MemorySettings, set[int]] = {}
        losses, starts = set(), set()
        started = time.perf_counter()
        for number in range(count):
            wanted = choices[rng.randrange(len(choices))] if number % 4 else MemorySettings()
            record = lab.step(wanted)
            lab.records.clear()  # with their timelines
            losses.add(record.loss)
            peaks.setdefault(wanted, set()).add(record.peak_allocated_bytes)
            if wanted == MemorySettings():
                starts.add(record.static_bytes)
            if number % 100 == 99:
                print(f"setting {number + 1}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        last = lab.step(MemorySettings())
    spread = max(max(values) - min(values) for values in peaks.values())
    print(f"\n{count} settings, {len(peaks)} different, allocator {torch.cuda.memory.get_allocator_backend()}")
    print(f"allocated bytes at the start of plain steps drift by {max(starts) - min(starts)}", end=", ")
    print(f"first to last by {last.static_bytes - plain.static_bytes}; {len(losses)} losses")
    print(f"peaks of a repeated setting differ by at most {spread} bytes")


if __name__ == "__main__":
    parts = {"metering": metering, "offload": offload, "settings": settings, "soak": soak}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in sys.argv[1:] or parts:
            parts[part]()
