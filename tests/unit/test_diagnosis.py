"""Leak, spike, retention and growth by phase, told apart from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from memlab.analysis.diagnosis import diagnose, probability_of_exceeding
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from tests.unit.live import FULL


def series(plain: StepRecord, starts: Sequence[int], peaks_above: Sequence[int], residual: int = 0) -> list[StepRecord]:
    return [
        replace(
            plain,
            static_bytes=start,
            peak_allocated_bytes=start + above,
            activation_peak_bytes=above,
            residual_bytes=residual,
        )
        for start, above in zip(starts, peaks_above, strict=True)
    ]


@pytest.fixture
def plain(open_lab: Callable[..., Any]) -> StepRecord:
    record: StepRecord = open_lab("phi-4-tiny", seq_length=16).step()
    return record


@pytest.mark.parametrize(
    ("starts", "above", "residual", "kinds"),
    [
        ([100] * 6, [5] * 6, 0, ["steady"]),
        ([100, 110, 120, 130, 140, 150], [5] * 6, 0, ["leak"]),
        ([100, 180, 180, 180, 180, 180], [5] * 6, 0, ["growth by phase"]),
        ([100] * 5 + [110] * 3, [5] * 8, 0, ["growth by phase"]),  # late, and then it stays
        ([100, 100, 110, 110, 120, 120, 130], [5] * 7, 0, ["leak"]),  # in every other step
        ([100, 180, 180, 190, 190, 200, 200], [5] * 7, 0, ["leak"]),  # beside state that is allocated once
        ([180, 100, 100, 100, 100, 100], [5] * 6, 0, ["steady"]),  # it falls for good
        ([100, 120, 100, 120, 100, 120], [5] * 6, 0, ["steady"]),
        ([100] * 6, [5] * 6, 7, ["retention"]),
        ([100] * 6, [300] * 6, 0, ["spike"]),
        ([100] * 6, [200, 600, 250, 900, 300, 220], 0, ["spike"]),
        ([100, 110, 120, 130, 140, 150], [300] * 6, 0, ["leak", "spike"]),
    ],
)
def test_each_kind_is_told_from_the_others(
    starts: list[int], above: list[int], residual: int, kinds: list[str], plain: StepRecord
) -> None:
    assert [finding.kind for finding in diagnose(series(plain, starts, above, residual))] == kinds


@pytest.mark.parametrize("starts", [[100] * 7 + [110], [100, 100, 110, 110, 120, 120, 130, 130]])
def test_a_rise_that_may_go_on_is_not_called_growth_that_ends(starts: list[int], plain: StepRecord) -> None:
    assert "growth by phase" not in {finding.kind for finding in diagnose(series(plain, starts, [5] * len(starts)))}


@pytest.mark.parametrize(
    ("starts", "evidence"),
    [
        ([1500, 2700, 2711, 2714], "rises from 1.5 KiB to 2.6 KiB up to step 1, and changes by 14 B after it"),
        # No single step grows by more than a cache takes, but together they do.
        ([1000, 1009, 1018, 1018, 1018, 1018], "rises from 1000 B to 1009 B up to step 1, and changes by 9 B after it"),
    ],
)
def test_growth_by_phase_says_how_much_the_start_changes_after_the_growth(
    starts: list[int], evidence: str, plain: StepRecord
) -> None:
    (finding,) = diagnose(series(plain, starts, [5] * len(starts)))
    assert (finding.kind, finding.evidence.partition("start ")[2]) == ("growth by phase", evidence)


def test_a_leak_says_the_least_and_the_most_that_a_late_step_adds(plain: StepRecord) -> None:
    (finding,) = diagnose(series(plain, [100, 110, 120, 132, 142], [5] * 5))
    assert finding.evidence.endswith("in the last steps by 10 B to 12 B per step")


def test_batches_of_varying_length_are_a_spike_and_no_leak_on_a_live_model(open_lab: Callable[..., Any]) -> None:
    # NeMo Automodel #2634: flat allocated bytes between steps, 60 GiB above them within.
    lab = open_lab("phi-4-tiny", seq_length=1024)
    lab.step()
    records = []
    for length in (64, 1024, 128, 512, 1024, 256):
        lab.set_workload(seq_length=length)
        records.append(lab.step(warm_up=False))
    findings = diagnose(records)
    assert [finding.kind for finding in findings] == ["spike"]
    assert "longest batch" in findings[0].advice


def test_a_live_moe_checkpoint_is_retention(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    records = [lab.step(FULL) for _ in range(4)]
    (evidence,) = [finding.evidence for finding in diagnose(records) if finding.kind == "retention"]
    assert "stay allocated after every step" in evidence
    assert "retention" not in [finding.kind for finding in diagnose([lab.step(MemorySettings()) for _ in range(4)])]


def test_a_rare_spike_becomes_likely_in_a_long_run(plain: StepRecord) -> None:
    records = series(plain, [100] * 100, [50] * 99 + [500])
    assert probability_of_exceeding(records, 200, 1) == pytest.approx(0.01)
    assert probability_of_exceeding(records, 200, 500) == pytest.approx(1 - 0.99**500)
    assert probability_of_exceeding(records, 1000, 500) == 0.0


def test_a_step_that_ran_out_of_memory_does_not_fit(plain: StepRecord) -> None:
    # Its peak is below the device's size: the request that was refused is not part of it.
    records = series(plain, [100] * 4, [50] * 4)
    records[0] = replace(records[0], status="out_of_memory")
    assert probability_of_exceeding(records, 200, 1) == 0.25
    assert probability_of_exceeding(records, 200, 0) == 0.0
    with pytest.raises(ValueError, match="num_steps is -1, must be a whole number of at least 0"):
        probability_of_exceeding(records[:1], 200, -1)
    with pytest.raises(ValueError, match="got a step that was interrupted"):
        probability_of_exceeding([*records, replace(plain, status="interrupted")], 200, 1)


def test_too_little_to_tell_is_refused(plain: StepRecord) -> None:
    with pytest.raises(ValueError, match="got 2 records, must be at least 3"):
        diagnose([plain, plain])
    with pytest.raises(ValueError, match="different settings"):
        diagnose([plain, plain, replace(plain, settings=MemorySettings(offload_parameters=True))])


def test_three_records_are_enough_to_tell_a_leak(plain: StepRecord) -> None:
    assert [finding.kind for finding in diagnose(series(plain, [10**9, 2 * 10**9, 3 * 10**9], [5] * 3))] == ["leak"]
    assert [finding.kind for finding in diagnose(series(plain, [10**9, 2 * 10**9, 2 * 10**9], [5] * 3))] != ["leak"]
