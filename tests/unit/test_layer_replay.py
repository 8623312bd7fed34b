"""A prediction that replays layers has the events of one that steps every layer, up to the order of frees in a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memlab import Lab, MemorySettings
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.vocabulary import POOLS

_COLUMNS = ("delta_bytes", "pool", "category", "phase", "module", "storage", "rounding_bytes")
_MLP = MemorySettings(recompute_granularity="selective", recompute_modules=("mlp",))
_MOE = MemorySettings(recompute_granularity="selective", recompute_modules=("moe",))
_LAYERNORM = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm",))
_FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
_GROUPS = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
_BLOCK = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
_OFFLOAD = MemorySettings(offload_modules=("expert_fc1",), min_offloaded_tensor_size=0)
_BETWEEN = MemorySettings(offload_optimizer=True)

_CASES: list[tuple[str, dict[str, Any], list[MemorySettings]]] = [
    ("phi-4-tiny", {"num_layers": 8, "seq_length": 64}, [MemorySettings(), _FULL, _GROUPS, _BLOCK, _MLP, _BETWEEN]),
    ("phi-4-tiny", {"num_layers": 7, "seq_length": 64, "num_microbatches": 5}, [_LAYERNORM, _FULL]),
    (
        "qwen3-moe-tiny",
        {"num_layers": 7, "seq_length": 64},
        [MemorySettings(), _MOE, _FULL, MemorySettings(), _BLOCK, _LAYERNORM, _OFFLOAD],
    ),
    ("qwen3-moe-tiny", {"num_layers": 7, "seq_length": 64, "num_microbatches": 5}, [_MOE]),
]


def steps(
    architecture: str, arguments: dict[str, Any], settings: list[MemorySettings], *, replay: bool, limit: int | None
) -> tuple[list[StepRecord], int]:
    """Returns the records, and how many passes through layers the steps replayed."""
    records, count = [], 0
    with Lab(architecture, **arguments, backend="simulated", replay=replay) as lab:
        lab.device_memory_bytes = limit
        for each in settings:
            records.append(lab.step(each))
            stepper: Any = lab._session.stepper  # type: ignore[union-attr]
            count += stepper.num_replayed
    return records, count


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
    assert stepped.timeline is not None and replayed.timeline is not None
    first, second = with_sorted_frees(stepped.timeline), with_sorted_frees(replayed.timeline)
    assert len(first) == len(second), f"{stepped.settings}"
    for name in _COLUMNS:
        different = np.flatnonzero(getattr(first, name) != getattr(second, name))
        assert not len(different), f"{stepped.settings}: {name} differs from event {different[0]} on"
    assert (np.diff(second.nanoseconds) >= 0).all()
    assert stepped.status == replayed.status
    assert stepped.host_bytes == replayed.host_bytes
    assert stepped.host_reserved_bytes == replayed.host_reserved_bytes
    assert stepped.residual_bytes == replayed.residual_bytes


@pytest.mark.parametrize(("architecture", "arguments", "settings"), _CASES)
def test_replayed_layers_have_the_events_of_stepped_ones(
    architecture: str, arguments: dict[str, Any], settings: list[MemorySettings]
) -> None:
    stepped, none = steps(architecture, arguments, settings, replay=False, limit=None)
    replayed, count = steps(architecture, arguments, settings, replay=True, limit=None)
    assert none == 0 < count
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


def test_a_replayed_step_runs_out_of_memory_where_a_stepped_one_does() -> None:
    arguments = {"num_layers": 8, "seq_length": 2048}
    plain, _ = steps("phi-4-tiny", arguments, [MemorySettings()], replay=True, limit=None)
    limit = (plain[0].peak_reserved_bytes or 0) - 40 * 1024**2
    tries = [MemorySettings(), _FULL, MemorySettings()]
    stepped, _ = steps("phi-4-tiny", arguments, tries, replay=False, limit=limit)
    replayed, count = steps("phi-4-tiny", arguments, tries, replay=True, limit=limit)
    assert count > 0
    assert [record.status for record in stepped] == ["out_of_memory", "ok", "out_of_memory"]
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)
        assert (one.out_of_memory is None) == (other.out_of_memory is None)
        if one.out_of_memory is not None and other.out_of_memory is not None:
            first, second = one.out_of_memory.failed_allocation, other.out_of_memory.failed_allocation
            assert (first.phase, first.module, first.requested_bytes) == (
                second.phase,
                second.module,
                second.requested_bytes,
            )
            assert first.allocated_bytes == second.allocated_bytes
