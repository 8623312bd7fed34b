"""Optimizer state that is on the device only while the optimizer updates the parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.candidates import candidates
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import CATEGORIES, PHASES
from tests.unit.live import FULL

NONE, EXCEPT_UPDATE = MemorySettings(), MemorySettings(offload_optimizer_except_update=True)
STATE = "optimizer state"


def state_bytes_in(record: StepRecord, phase: str) -> set[int]:
    """Returns the bytes of optimizer state on the device after each event of a phase."""
    assert record.timeline is not None
    on_device = record.timeline.category_bytes()[CATEGORIES.index(STATE)]
    in_phase = record.timeline.phase == PHASES.index(phase)
    in_phase[: record.timeline.num_opening_events] = False
    return set(np.unique(on_device[in_phase]).tolist())


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "bf16"), ("cpu", "fp32"), ("simulated", "bf16")])
def test_forward_and_backward_run_without_optimizer_state(backend: str, dtype: str) -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, dtype=dtype, backend=backend) as lab:  # type: ignore[arg-type]
        plain = lab.step(NONE)
        all_bytes = plain.peak_by_category[STATE]
        lab.step(EXCEPT_UPDATE, warm_up=False)
        away = lab.step()
        assert (away.loss, lab.audit_residency().complaints) == (plain.loss, ())
        assert plain.static_bytes - away.static_bytes == all_bytes
        assert 0 <= all_bytes - away.offloaded_bytes_by_group[STATE] < 512 * 40, "the allocator rounds up"
        assert away.activation_peak_bytes == plain.activation_peak_bytes
        assert (state_bytes_in(away, "forward"), state_bytes_in(away, "backward")) == ({0}, {0})
        assert state_bytes_in(away, "optimizer") == {all_bytes}
        assert away.peak_allocated_bytes < plain.peak_allocated_bytes
        assert away.load_seconds > 0 < away.offload_seconds
        between_steps = lab.step(MemorySettings(offload_optimizer=True, offload_gradients=False))
        assert between_steps.host_bytes == away.host_bytes, "one copy on the host"
        assert between_steps.peak_allocated_bytes > away.peak_allocated_bytes
        after = lab.step(NONE)
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "host_bytes"):
        assert getattr(after, name) == getattr(plain, name), name


def test_the_first_step_under_it_already_offloads_before_forward() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        lab.step(NONE)
        first = lab.step(EXCEPT_UPDATE, warm_up=False)
        assert state_bytes_in(first, "forward") == {0}
        lab.load(STATE)
        assert (state_bytes_in(lab.step(), "forward"), lab.audit_residency().complaints) == ({0}, ())
        lab.load(STATE)
        passed = lab.forward_only()
        assert (state_bytes_in(passed, "forward"), list(passed.offloaded_bytes_by_group)) == ({0}, [STATE])


def test_a_step_that_cannot_load_it_for_the_update_leaves_a_usable_model() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        plain, away = lab.step(NONE), lab.step(EXCEPT_UPDATE)
        lab.device_memory_bytes = plain.static_bytes - 1
        failed = lab.step(warm_up=False)
        assert failed.status == "out_of_memory"
        assert failed.out_of_memory is not None
        assert failed.out_of_memory.failed_allocation.phase == "load"
        lab.device_memory_bytes = None
        again = lab.step()
        assert (again.loss, again.peak_allocated_bytes) == (plain.loss, away.peak_allocated_bytes)
        assert not lab.audit_residency().complaints


def test_what_it_makes_pointless_is_said_and_a_search_tries_it() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=64, backend="simulated") as lab:
        both = lab.step(replace(EXCEPT_UPDATE, offload_optimizer=True))
    assert "already keeps the same state" in both.without_effect["offload_optimizer"]
    scenario = Scenario.of("phi-4-tiny")
    assert EXCEPT_UPDATE in candidates(NONE, scenario)
    of_host = TrainingState(optimizer_cpu_offload=True, use_precision_aware_optimizer=True)
    on_host = replace(scenario, state=of_host)
    assert EXCEPT_UPDATE not in candidates(NONE, on_host)
    assert all(each.offload_optimizer_except_update for each in candidates(EXCEPT_UPDATE, scenario))
    assert replace(FULL, offload_optimizer_except_update=True) in candidates(EXCEPT_UPDATE, scenario)
