"""Collections of garbage in the steps of a simulated lab: what they free, and what they need not visit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab import Lab, MemorySettings
from memlab.backends.fake_cuda import FAKE
from memlab.meter.allocations import StorageAllocation
from tests.unit.inside import inside
from tests.unit.replayed import require_identical

pytestmark = pytest.mark.versions

_MODEL: dict[str, Any] = {"num_layers": 4, "seq_length": 64}
_LAYERNORM = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm",))
_STEPS = [MemorySettings(), _LAYERNORM, MemorySettings(recompute_granularity="selective", recompute_modules=("moe",))]


def _cycle() -> list[Any]:
    held: list[Any] = [torch.empty(1024**3, device=FAKE)]
    held.append(held)
    return held


def _make_cycle() -> None:
    _cycle()


def _num_allocations() -> int:
    return sum(type(each) is StorageAllocation for each in gc.get_objects())


def test_a_storage_that_is_freed_is_in_no_reference_cycle() -> None:
    gc.collect()
    of_earlier_tests = _num_allocations()
    with Lab("qwen3-moe-tiny", **_MODEL, backend="simulated", replay=False) as lab:  # a replay keeps some for later
        lab.step()
        gc.collect()
        gc.disable()
        try:
            lab.step(_LAYERNORM, warm_up=False)
            allocations = _num_allocations() - of_earlier_tests
        finally:
            gc.enable()
        storages: Any = inside(lab).model.meter.storages
        assert storages.num_births > 3 * len(storages.live), "most storages of a step are freed in it"
        assert allocations < 1.5 * len(storages.live), "else only a collection frees what the meter knew of them"


def test_what_is_left_in_a_cycle_is_no_memory_of_the_next_settings() -> None:
    with Lab("qwen3-moe-tiny", **_MODEL, backend="simulated") as lab:
        expected = [lab.step(settings) for settings in _STEPS]
    with Lab("qwen3-moe-tiny", **_MODEL, backend="simulated") as lab:
        for settings, record in zip(_STEPS, expected, strict=True):
            if lab.records:  # the first step finds whatever was in the allocator's cache before, as a job's does
                inside(lab).run_exclusive(_make_cycle)
            require_identical(record, lab.step(settings))


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """Notes the generation of each collection but those of the youngest objects."""
    noted: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"]:
            noted.append(info["generation"])

    gc.callbacks.append(collected)
    yield noted
    gc.callbacks.remove(collected)


def test_old_objects_are_visited_only_if_a_cycle_of_them_may_hold_memory(generations: list[int]) -> None:
    threshold = gc.get_threshold()
    with Lab("qwen3-moe-tiny", **_MODEL, backend="simulated") as lab:
        residual_bytes = lab.step().residual_bytes
        generations.clear()
        lab.step(_LAYERNORM)
        assert generations == [1], "the step before left no garbage, and the warm-up step only young garbage"
        assert gc.get_threshold() == threshold

        cycles: list[Any] = []
        inside(lab).run_exclusive(lambda: cycles.append(_cycle()))
        gc.collect()
        record = lab.step(MemorySettings(), on_progress=lambda _: cycles.clear())
        assert record.residual_bytes == residual_bytes, "it became garbage in the warm-up step"


def test_a_lab_that_starts_over_visits_old_objects_only_if_a_cycle_of_them_holds_memory(generations: list[int]) -> None:
    with Lab("qwen3-moe-tiny", **_MODEL, backend="simulated") as lab:
        expected = lab.step(_LAYERNORM)
        generations.clear()
        assert lab.start_over()
        assert generations == [1]
        require_identical(expected, lab.step(_LAYERNORM))
        assert generations == [1, 1, 1], "the warm-up step and the step are followed by one each, and preceded by none"

        cycles: list[Any] = []
        inside(lab).run_exclusive(lambda: cycles.append(_cycle()))
        gc.collect()
        cycles.clear()  # old garbage
        generations.clear()
        assert lab.start_over()
        assert generations == [1, 2]
        require_identical(expected, lab.step(_LAYERNORM))
