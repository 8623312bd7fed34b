"""Steps that simulated labs take twice: with and without replay, or after others and in a new lab; drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture, find_architecture
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.vocabulary import POOLS
from tests.unit.inside import inside
from tests.unit.live import random_settings

_COLUMNS = ("delta_bytes", "pool", "category", "phase", "module", "storage", "rounding_bytes")
_FIGURES = ("status", "host_bytes", "host_reserved_bytes", "residual_bytes", "without_effect")
_FIGURES += ("offloaded_bytes_by_module", "offloaded_bytes_by_group")
_AT_THE_END = ("alive_by_category", "alive_by_module", "passes_in_flight")
"""Of an out-of-memory."""
_STATES: list[dict[str, Any]] = [
    *({} for _ in range(6)),
    {"grad_reduce_in_bf16": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"use_distributed_optimizer": False},
    {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    {"optimizer_cpu_offload": True},
    {"gradient_accumulation_fusion": True, "bias_activation_fusion": False},
    {"loss": "logprobs"},
    {"cross_entropy_loss_fusion": True},
    {"fp8_format": "hybrid"},
    {"reference_model": "copy"},
]
_LAYOUTS: list[dict[str, Any]] = [
    *({} for _ in range(3)),
    {"data_parallel_size": 2},
    {"tensor_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {"expert_model_parallel_size": 2, "data_parallel_size": 2},
    *({"pipeline_model_parallel_size": 2, "rank": rank} for rank in (0, 1)),
    {"pipeline_model_parallel_size": 4, "rank": 1},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
]
_PATTERNS: list[tuple[int, ...] | None] = [None, None, (0, 1), (0, 0, 0, 1), (0, 1, 1, 1, 1, 1, 1, 1)]
"""Which layers have experts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of one lab."""

    architecture: str | Architecture
    arguments: dict[str, Any]
    settings: list[MemorySettings]
    warm_up: tuple[bool, ...] = ()
    """Before which of the steps a warm-up step is taken; before all of them if it is empty."""
    limit_bytes: int | None = None
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)


def random_case(rng: random.Random) -> Case:
    """Draws a scenario that memlab accepts, and settings for it; some settings twice in a row."""
    while True:
        architecture = rng.choice(["phi-4-tiny", "qwen3-moe-tiny"])
        arguments = {
            "num_layers": rng.choice([2, 4, 6, 8]),
            "seq_length": 64,
            "num_microbatches": rng.choice([1, 1, 2, 4, 6, 9]),
            "dtype": rng.choice(["bf16", "bf16", "bf16", "fp32"]),
        }
        try:
            arguments["layout"] = Layout(**rng.choice(_LAYOUTS))
            arguments["state"] = TrainingState(**rng.choice(_STATES))
            scenario = Scenario.of(architecture, **arguments)
        except ValueError:
            continue
        plain = [MemorySettings()] * rng.randint(0, 2)
        lab: Any = SimpleNamespace(scenario=scenario)
        settings = [random_settings(lab, rng) for _ in range(rng.randint(1, 3))]
        expands = rng.random() < 0.3
        allocator = AllocatorSettings(expandable_segments=expands)
        settings = [*plain, *settings, settings[-1]]
        model = _with_dense_layers(architecture, arguments, settings, rng)
        return Case(architecture=model, arguments=arguments, settings=settings, allocator=allocator)


def _with_dense_layers(
    architecture: str, arguments: dict[str, Any], settings: list[MemorySettings], rng: random.Random
) -> str | Architecture:
    """Returns the model, or sometimes one in which dense layers are among the MoE layers, if it takes the settings."""
    pattern, num_layers = rng.choice(_PATTERNS), arguments["num_layers"]
    model = find_architecture(architecture)
    if pattern is None or not model.routes:
        return architecture
    freq = tuple(islice(cycle(pattern), num_layers))
    model = replace(model, num_layers=num_layers, moe_layer_freq=freq)
    try:
        for each in settings:
            check_on_model(each, Scenario.of(model, **arguments))
    except ValueError:
        return architecture
    return model


def take(case: Case, *, replay: bool) -> tuple[list[StepRecord], int]:
    """Returns the records, and how many passes through layers only repeated others."""
    records, count = [], 0
    with Lab(case.architecture, **case.arguments, allocator=case.allocator, backend="simulated", replay=replay) as lab:
        lab.device_memory_bytes = case.limit_bytes
        for each, warm_up in zip(case.settings, case.warm_up or (True,) * len(case.settings), strict=True):
            records.append(lab.step(each, warm_up=warm_up))
            model: Any = inside(lab).model
            count += model.replay.num_replayed
        count += model.labels.num_repeated
    return records, count


def take_anew(case: Case) -> Iterator[tuple[StepRecord, StepRecord | None]]:
    """Yields the record of each step in a lab of its own, and in one that starts over before each; None if it cannot.

    After each step, that lab takes it again with nine tenths of what it allocated at its peak, and runs out of memory.
    """
    arguments = {**case.arguments, "allocator": case.allocator, "backend": "simulated"}

    def take_in(lab: Lab, settings: MemorySettings, limit_bytes: int | None) -> StepRecord:
        lab.records.clear()  # the message of an out-of-memory compares it with them
        lab.device_memory_bytes = limit_bytes
        return lab.step(settings)

    alone: list[tuple[MemorySettings, int | None, StepRecord]] = []
    for settings in case.settings:
        limit_bytes = None
        for _ in range(2):
            with Lab(case.architecture, **arguments) as lab:
                alone.append((settings, limit_bytes, take_in(lab, settings, limit_bytes)))
            limit_bytes = alone[-1][-1].peak_allocated_bytes * 9 // 10
    with Lab(case.architecture, **arguments) as lab:
        lab.step(case.settings[-1])
        for settings, limit_bytes, expected in alone:
            if not lab.start_over():
                yield expected, None
                return
            yield expected, take_in(lab, settings, limit_bytes)


def with_sorted_frees(timeline: Timeline) -> Timeline:
    """Returns a timeline with each row of frees, between two allocations of a phase, in the order of the storages' numbers.

    A graph of autograd frees its storages in an order that depends on how deep its objects are nested (CPython
    defers nested deallocations, ``Py_TRASHCAN_BEGIN``). No total after the row depends on it.
    """
    is_free = (timeline.delta_bytes < 0) & (timeline.pool != POOLS.index("reserved"))
    goes_on = is_free[1:] & is_free[:-1] & (timeline.phase[1:] == timeline.phase[:-1])
    row = np.concatenate([[0], np.cumsum(~goes_on)]) if len(timeline) else np.zeros(0, dtype=np.int64)
    order = np.lexsort((timeline.storage, row))
    return replace(timeline, **{name: getattr(timeline, name)[order] for name in _COLUMNS})


def require_identical(stepped: StepRecord, replayed: StepRecord) -> None:
    """Compares two records, event by event; frees in a row may come in another order."""
    assert stepped.timeline is not None and replayed.timeline is not None
    first, second = with_sorted_frees(stepped.timeline), with_sorted_frees(replayed.timeline)
    assert len(first) == len(second), f"{stepped.settings}: {len(first)} and {len(second)} events"
    for name in _COLUMNS:
        different = np.flatnonzero(getattr(first, name) != getattr(second, name))
        assert not len(different), f"{stepped.settings}: {name} differs from event {different[0]} on"
    assert (np.diff(second.nanoseconds) >= 0).all()
    for name in _FIGURES:
        assert getattr(stepped, name) == getattr(replayed, name), f"{stepped.settings}: {name}"
    if stepped.out_of_memory is not None:
        for name in _AT_THE_END:
            assert getattr(stepped.out_of_memory, name) == getattr(replayed.out_of_memory, name), name
