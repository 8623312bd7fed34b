"""Which steps have a record, and what a record reads from its timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memlab import Lab, MemorySettings
from memlab.lab.step_records import StepRecords
from memlab.meter.repetition import with_reserved, without_reserved
from memlab.record.timeline import Timeline
from memlab.vocabulary import POOLS

_MODEL: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "backend": "simulated"}


def test_a_warm_up_has_a_record_only_if_it_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = StepRecords.make

    def counted(self: StepRecords, measured: dict[str, Any], timeline: Timeline) -> Any:
        record = make(self, measured, timeline)
        made.append(record.step_index)
        return record

    monkeypatch.setattr(StepRecords, "make", counted)
    with Lab("llama-3-tiny", **(_MODEL | {"seq_length": 2048})) as lab:
        record = lab.step()
        assert (record.status, made) == ("ok", [record.step_index])
        lab.device_memory_bytes = (record.static_bytes + record.peak_allocated_bytes) // 2
        refused = lab.step(MemorySettings())
        assert (refused.status, refused.step_index) == ("out_of_memory", record.step_index + 1), "in the warm-up step"
        assert made == [record.step_index, refused.step_index]


def test_a_scanned_timeline_answers_as_the_timeline_does() -> None:
    with Lab("qwen3-moe-tiny", **_MODEL) as lab:
        timeline = lab.step().timeline
    assert timeline is not None
    scanned = timeline.scanned()
    for pool in POOLS:
        assert scanned.peak_bytes(pool) == timeline.peak_bytes(pool), pool
        for index in (-1, 0, len(timeline) // 2, len(timeline) - 1):
            assert scanned.bytes_at(index, pool) == timeline.bytes_at(index, pool), (pool, index)
    assert scanned.opening_bytes == timeline.opening_bytes > 0
    assert scanned.peak_phase() == timeline.peak_phase()
    assert scanned.peak_active_bytes() == timeline.peak_active_bytes()


@pytest.mark.parametrize("places", [[], [0], [7], [0, 3, 4, 19]])
def test_rows_of_reserved_bytes_come_before_the_rows_that_changed_them(places: list[int]) -> None:
    rows = np.arange(8 * 20).reshape(8, 20)
    rows[2], rows[7] = POOLS.index("device"), 0  # pool, rounding
    changes = [(place, 1000 + place) for place in places]
    reserved = with_reserved(rows, changes, 5)
    at = [place + before for before, place in enumerate(places)]
    assert np.flatnonzero(reserved[2] == POOLS.index("reserved")).tolist() == at
    assert reserved[1, at].tolist() == [change for _, change in changes]
    assert np.array_equal(np.delete(reserved, at, axis=1), rows)
    assert np.array_equal(without_reserved(reserved), rows)
