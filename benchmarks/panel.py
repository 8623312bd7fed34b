"""What the panel costs in the kernel: a control's change, a picture after a step, a hundred runs, bytes on disk.

The page's own share is measured by `benchmarks/browser.py`. Times depend on the machine. The goals, kernel and
page together: a control's change within 100 ms, a timeline of 100,000 events within 500 ms, of 1,000,000 within
1.5 s; a hundred runs take no more memory than their records.

    python benchmarks/panel.py
"""

from __future__ import annotations

import gc
import json
import pickle
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ipywidgets.widgets.widget import _instances, _remove_buffers

sys.path.insert(0, str(Path(__file__).parents[1]))

from memlab.config.settings import MemorySettings
from memlab.units import format_bytes
from memlab.views.panel.panel import Panel, panel
from tests.unit.builders import random_timeline
from tests.unit.fake_lab import FakeLab

EVENT_COUNTS = (10_000, 100_000, 1_000_000)
NUM_RUNS = 100


def milliseconds(job: Callable[..., Any], *arguments: Any) -> float:
    """Returns the median duration of a job, called once with each argument."""
    durations = []
    for argument in arguments:
        started = time.perf_counter()
        job(argument)
        durations.append((time.perf_counter() - started) * 1e3)
    return statistics.median(durations)


def state_bytes(widgets: list[Any]) -> int:
    """Returns what widgets take in a notebook that is saved with them: JSON, buffers in base64."""
    total = 0
    for widget in widgets:
        state, _, buffers = _remove_buffers(widget.get_state())
        total += len(json.dumps(state, default=str)) + sum(len(buffer) * 4 // 3 for buffer in buffers)
    return total


def pictures() -> None:
    """Prints the kernel's share of showing a run, with another pinned, of a click, of a switch."""
    print(f"{'events':>9}  {'a run':>9}  {'and a pin':>9}  {'a moment':>9}  {'a switch':>9}  {'on disk':>10}")
    for num_events in EVENT_COUNTS:
        before = set(_instances)
        shown = panel(FakeLab(timeline=random_timeline(num_events, num_modules=500)))
        state = shown.state
        for _ in range(3):
            state.run()
        times = [milliseconds(state.show, 1, 2, 3, 1, 2)]
        state.pin()
        times.append(milliseconds(state.show, 1, 3, 1, 3, 1))
        times.append(milliseconds(state.look_at, 1, 10, 100, 1000, 5000))
        times.append(milliseconds(lambda axis, state=state: state.set_trait("axis", axis), *["event", "time"] * 3))
        on_disk = state_bytes([widget for name, widget in _instances.items() if name not in before])
        cells = "".join(f"  {duration:>6.1f} ms" for duration in times)
        print(f"{num_events:>9,}{cells}  {format_bytes(on_disk):>10}")
        shown.close()


def controls(shown: Panel) -> None:
    """Prints the kernel's share of a control's change."""
    change = milliseconds(lambda value: shown.state.edit(recompute_granularity=value), *["full", None] * 50)
    print(f"a control's change: {change:.1f} ms")


def hundred_runs(shown: Panel) -> None:
    """Prints what a hundred runs leave in the kernel: their records, which share one timeline here, and what else."""
    state, num_widgets = shown.state, len(_instances)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    records = [state.run().result() for _ in range(NUM_RUNS)]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    gc.collect()
    kept = len(pickle.dumps([replace(record, timeline=None) for record in records]))
    print(
        f"{NUM_RUNS} runs: {len(_instances) - num_widgets} widgets more; the kernel holds {format_bytes(grown)} more, "
        f"the records pickled without their timelines are {format_bytes(kept)}"
    )


def main() -> None:
    """Prints all of it."""
    started = time.perf_counter()
    shown = panel(FakeLab(timeline=random_timeline(10_000)))
    print(f"a panel: {(time.perf_counter() - started) * 1e3:.0f} ms, {len(_instances)} widgets")
    shown.state.form = shown.state.form.with_settings(MemorySettings())
    controls(shown)
    shown.state.run()
    hundred_runs(shown)
    shown.close()
    pictures()


if __name__ == "__main__":
    main()
