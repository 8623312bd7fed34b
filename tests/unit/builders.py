"""Timelines and records made by hand, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import MIB
from memlab.vocabulary import CATEGORIES, PHASES, POOLS


@dataclass(slots=True)
class TimelineBuilder:
    """Collects events one by one; ``build`` turns them into columns."""

    milliseconds: float = 0.0
    phase: str = "idle"
    num_opening_events: int = 0
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=lambda: {"": 0})

    def opening(self, category: str, num_bytes: int, module: str = "", pool: str = "device") -> None:
        """Adds bytes that were there when the step began."""
        self.event(num_bytes, category, module, pool)
        self.num_opening_events += 1

    def event(
        self, delta_bytes: int, category: str, module: str = "", pool: str = "device", after: float = 0.0
    ) -> None:
        """Adds an event some milliseconds after the one before."""
        self.milliseconds += after
        self.rows.append(
            (
                int(self.milliseconds * 1e6),
                delta_bytes,
                POOLS.index(pool),
                CATEGORIES.index(category),
                PHASES.index(self.phase),
                self.modules.setdefault(module, len(self.modules)),
            )
        )

    def build(self) -> Timeline:
        """Returns the timeline of the events so far."""
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 6).T
        return Timeline(
            nanoseconds=columns[0],
            delta_bytes=columns[1],
            pool=columns[2].astype(np.uint8),
            category=columns[3].astype(np.uint8),
            phase=columns[4].astype(np.uint8),
            module=columns[5].astype(np.int32),
            storage=np.array(self._storages(), dtype=np.int32),
            modules=tuple(self.modules),
            num_opening_events=self.num_opening_events,
        )

    def _storages(self) -> list[int]:
        """A death is that of the newest live storage of its size, pool, category and module; else it stands alone."""
        live: dict[tuple[int, ...], list[int]] = {}
        numbers = []
        for number, (_, delta_bytes, pool, category, _, module) in enumerate(self.rows):
            alike = live.setdefault((abs(delta_bytes), pool, category, module), [])
            numbers.append(alike.pop() if delta_bytes < 0 and alike else number)
            if delta_bytes > 0:
                alike.append(number)
        return numbers


SAVED_MIB = {
    "self_attention.linear_qkv": 64,
    "self_attention.core_attention": 97,
    "self_attention.linear_proj": 32,
    "mlp.router": 8,
    "mlp.experts.linear_fc1": 512,
    "mlp.experts.moe_act": 384,
}
"""What each module of a layer saves for backward in `training_step`, in MiB."""


def training_step(num_layers: int = 4, *, recompute: bool = False, scale: int = 1) -> Timeline:
    """A step as a 4-layer MoE model takes it: static bytes eight times the activations, a ramp, a descent, an update.

    Args:
        num_layers: Transformer layers.
        recompute: Keeps only a checkpoint of each layer, and makes the layer's activations again in backward.
        scale: Divides every size; 1 gives about 53 GiB.
    """
    step = TimelineBuilder()
    layers = [f"decoder.layers.{layer}" for layer in range(num_layers)]
    unit = MIB // scale
    for layer in layers:
        for category, num_units in (("parameters", 1331), ("gradients", 2662), ("optimizer state", 7987)):
            step.opening(category, num_units * unit, f"{layer}.mlp.experts.linear_fc1")
    step.opening("workspace", 32 * unit, "decoder.layers.0.self_attention.linear_qkv")
    step.phase = "forward"
    for layer in layers:
        if recompute:
            step.event(16 * unit, "activations", layer, after=0.5)
        _forward(step, layer, unit, "temporary" if recompute else "activations")
    step.event(1200 * unit, "activations", "output_layer", after=1.0)
    step.phase = "backward"
    step.event(600 * unit, "temporary", "output_layer", after=1.0)
    step.event(-600 * unit, "temporary", "output_layer", after=2.0)
    step.event(-1200 * unit, "activations", "output_layer", after=0.2)
    for layer in reversed(layers):
        if recompute:
            _forward(step, layer, unit, "recomputed")
        _backward(step, layer, unit, "recomputed" if recompute else "activations")
        if recompute:
            step.event(-16 * unit, "activations", layer, after=0.1)
    step.phase = "optimizer"
    for layer in layers:
        step.event(300 * unit, "temporary", layer, after=1.5)
        step.event(-300 * unit, "temporary", layer, after=1.5)
    return step.build()


def _forward(step: TimelineBuilder, layer: str, unit: int, saved_as: str) -> None:
    for name, size in SAVED_MIB.items():
        step.event(size // 2 * unit, "temporary", f"{layer}.{name}", after=0.4)
        step.event(size * unit, saved_as, f"{layer}.{name}", after=0.5)
        step.event(-(size // 2) * unit, "temporary", f"{layer}.{name}", after=0.3)
        if saved_as == "temporary":
            step.event(-size * unit, saved_as, f"{layer}.{name}", after=0.1)


def _backward(step: TimelineBuilder, layer: str, unit: int, saved_as: str) -> None:
    for name, size in reversed(SAVED_MIB.items()):
        step.event(size // 2 * unit, "temporary", f"{layer}.{name}", after=0.9)
        step.event(-size * unit, saved_as, f"{layer}.{name}", after=0.9)
        step.event(-(size // 2) * unit, "temporary", f"{layer}.{name}", after=0.3)


def random_timeline(
    num_events: int, seed: int = 0, *, num_modules: int = 20, instants: int = 0, num_opening_events: int = 7
) -> Timeline:
    """Births and deaths in no order: every pool and category, most storages dying again later.

    Args:
        num_events: All events, opening ones included.
        seed: Of everything drawn.
        num_modules: How many modules the storages are born in.
        instants: How many different times there are; 0 gives every event its own.
        num_opening_events: How many events at the head stand at time 0 and are births.
    """
    random = np.random.default_rng(seed)
    born = num_opening_events + (num_events - num_opening_events + 1) // 2
    parents = np.concatenate([np.arange(born), random.permutation(born)[: num_events - born]])
    moment = np.concatenate([random.random(born), np.zeros(num_events - born)])
    moment[:num_opening_events] = -1.0
    moment[born:] = moment[parents[born:]].clip(0) + random.random(num_events - born)
    order = np.argsort(moment, kind="stable")
    sizes = random.integers(1, 2**32, born)
    sign = np.where(np.arange(num_events) < born, 1, -1)
    times = moment.clip(0) * 1e8 if not instants else np.floor(moment.clip(0) * instants / 2) * 1e6
    columns: dict[str, Any] = {
        "pool": random.choice(len(POOLS), born, p=[0.8, 0.1, 0.1, 0.0, 0.0]).astype(np.uint8),
        "category": random.integers(0, len(CATEGORIES), born).astype(np.uint8),
        "module": random.integers(0, num_modules, born).astype(np.int32),
        "storage": np.arange(born, dtype=np.int32),
    }
    return Timeline(
        nanoseconds=times[order].astype(np.int64),
        delta_bytes=(sizes[parents] * sign)[order],
        phase=np.sort(random.integers(0, len(PHASES), num_events)).astype(np.uint8),
        **{name: values[parents][order] for name, values in columns.items()},
        modules=tuple(f"decoder.layers.{number}" for number in range(num_modules)),
        num_opening_events=num_opening_events,
    )


def scenario(**changes: Any) -> Scenario:
    """The cut that the figures are tried on."""
    values: dict[str, Any] = {"architecture": ARCHITECTURES["qwen3-30b-a3b"], "num_layers": 4, "seq_length": 4096}
    return Scenario.of(**(values | changes))


def record_of(timeline: Timeline | None, settings: MemorySettings | None = None, **changes: Any) -> StepRecord:
    """A record whose numbers are those of its timeline."""
    values: dict[str, Any] = {
        "scenario": scenario(),
        "settings": settings or MemorySettings(),
        "backend": "simulated",
        "versions": {},
        "step_index": 3,
        "static_bytes": 0,
        "peak_allocated_bytes": 0,
        "activation_peak_bytes": 0,
        "peak_by_category": {},
        "peak_by_module": {},
        "residual_bytes": 0,
        "host_bytes": 0,
        "step_seconds": 0.1051,
        "tokens_per_second": 38972.0,
        "loss": 12.33374,
        "timeline": timeline,
    }
    if timeline is not None and len(timeline):
        peak = timeline.peak_index()
        values |= {
            "static_bytes": timeline.opening_bytes,
            "peak_allocated_bytes": timeline.bytes_at(peak),
            "activation_peak_bytes": timeline.peak_bytes(phases=("forward", "backward")) - timeline.opening_bytes,
            "peak_by_category": timeline.breakdown(peak),
            "peak_by_module": timeline.breakdown(peak, by="module"),
            "host_bytes": timeline.peak_bytes("host"),
            "recomputed_bytes": timeline.allocated_bytes_of("recomputed"),
        }
    return StepRecord(**(values | changes))


def job_of(layout: Layout, settings: MemorySettings | None = None, **changes: Any) -> JobRecord:
    """A step of a job in which each stage has half the activations of the stage before it."""
    ranks = []
    for rank in range(layout.world_size):
        of_rank = replace(layout, rank=rank)
        timeline = training_step(scale=2**of_rank.pipeline_stage)
        values = {"scenario": scenario(layout=of_rank, num_microbatches=layout.pipeline_model_parallel_size)}
        ranks.append(record_of(timeline, settings, **(values | changes)))
    return JobRecord.of(ranks)


def out_of_memory(record: StepRecord) -> StepRecord:
    """The same step, as if it had run out of memory half way."""
    timeline = record.timeline
    assert timeline is not None
    half = len(timeline) // 2
    columns = ("nanoseconds", "delta_bytes", "pool", "category", "phase", "module", "storage")
    return replace(
        record,
        timeline=replace(timeline, **{name: getattr(timeline, name)[:half] for name in columns}),
        status="out_of_memory",
        message="the device is full: 50.00 GiB of 50.00 GiB; recompute a layer, or offload the optimizer",
        loss=None,
        step_seconds=0.0,
        tokens_per_second=0.0,
    )


class AnsweredSteps:
    """Steps of a search that functions answer.

    Args:
        step: Returns the record of a step under settings.
        completes: Says whether a step completes within a limit; None if nobody should ask.
    """

    def __init__(
        self, step: Callable[[MemorySettings], StepRecord], completes: Callable[[StepRecord, int], bool] | None = None
    ) -> None:
        self._step, self._completes = step, completes

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        assert limit_bytes is None, "a verdict takes no step with a limit"
        return self._step(settings)

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        assert self._completes is not None, "what the step has reserved decides"
        return self._completes(record, limit_bytes)
