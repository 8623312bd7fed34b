"""How long a step's figure takes, from a thousand events to a million.

Times depend on the machine, so each is also given as a multiple of one running sum over a million events, which
is what reading the timeline once costs. The goal is a million events, from columns to the data that a notebook
receives, in under a second.

    python benchmarks/figures.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.views.display import View
from memlab.views.figures.ranks import ranks_figure
from memlab.views.figures.resample import resample
from memlab.views.figures.timeline import timeline_figure
from memlab.views.text.record import record_table
from memlab.vocabulary import CATEGORIES, PHASES

EVENT_COUNTS = (1_000, 10_000, 100_000, 1_000_000)
MODULE_COUNTS = (500, 20_000)
NUM_RANKS, EVENTS_PER_RANK = 8, 100_000


def synthetic_record(num_events: int, num_modules: int) -> StepRecord:
    """A step in which every storage dies a little after its birth, in six phases."""
    random = np.random.default_rng(0)
    half = num_events // 2
    birth = np.sort(random.random(half))
    order = np.argsort(np.concatenate([birth, birth + random.random(half) * 0.2]), kind="stable")
    size = random.integers(512, 64 * 1024**2, half) // max(1, num_events // 10_000)

    def column(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, values])[order]

    timeline = Timeline(
        nanoseconds=np.sort(random.integers(0, 10**8, num_events)),
        delta_bytes=np.concatenate([size, -size])[order],
        pool=np.zeros(num_events, dtype=np.uint8),
        category=column(random.integers(0, len(CATEGORIES), half).astype(np.uint8)),
        phase=np.sort(random.integers(0, len(PHASES), num_events)).astype(np.uint8),
        module=column(random.integers(0, num_modules, half).astype(np.int32)),
        storage=column(np.arange(half, dtype=np.int32)),
        modules=tuple(f"decoder.layers.{number}.mlp.experts.linear_fc1" for number in range(num_modules)),
        num_opening_events=0,
    )
    peak = timeline.peak_index()
    return StepRecord(
        scenario=Scenario.of(architecture=ARCHITECTURES["qwen3-30b-a3b"]),
        settings=MemorySettings(),
        backend="cpu",
        versions={},
        step_index=0,
        static_bytes=0,
        peak_allocated_bytes=timeline.bytes_at(peak),
        activation_peak_bytes=timeline.bytes_at(peak),
        peak_by_category=timeline.breakdown(peak),
        peak_by_module=timeline.breakdown(peak, by="module"),
        residual_bytes=0,
        host_bytes=0,
        timeline=timeline,
    )


def synthetic_job() -> JobRecord:
    """The same step on every stage of a pipeline."""
    record = synthetic_record(EVENTS_PER_RANK, 500)
    layouts = [Layout(pipeline_model_parallel_size=NUM_RANKS, rank=rank) for rank in range(NUM_RANKS)]
    return JobRecord.of([replace(record, scenario=replace(record.scenario, layout=layout)) for layout in layouts])


def best_seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """The shortest of some runs: what the work costs when nothing else runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Prints a row for each number of events and modules."""
    million = np.arange(1_000_000)
    running_sum = best_seconds(lambda: np.cumsum(million))
    print(f"one running sum over a million events: {running_sum * 1e3:.2f} ms\n")
    print("   events  modules  points  resample ms  figure ms  to the cell ms  all ms  running sums    kB")
    for num_modules in MODULE_COUNTS:
        for num_events in EVENT_COUNTS:
            record = synthetic_record(num_events, num_modules)
            timeline = record.timeline
            assert timeline is not None
            view = View(timeline_figure(record), record_table(record))
            resampling = best_seconds(lambda timeline=timeline: resample(timeline))
            drawing = best_seconds(lambda record=record: timeline_figure(record))
            sending = best_seconds(view._repr_mimebundle_)
            size = len(json.dumps(view._repr_mimebundle_()))
            print(
                f"{num_events:9,}  {num_modules:7,}  {len(resample(timeline)):6,}  {resampling * 1e3:11.1f}  "
                f"{drawing * 1e3:9.1f}  {sending * 1e3:14.1f}  {(drawing + sending) * 1e3:6.1f}  "
                f"{(drawing + sending) / running_sum:12.0f}  {size / 1e3:4.0f}"
            )
    job = synthetic_job()
    seconds = best_seconds(lambda: ranks_figure(job, above_start=True))
    print(f"\n{NUM_RANKS} ranks of {EVENTS_PER_RANK:,} events each in one figure: {seconds * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
