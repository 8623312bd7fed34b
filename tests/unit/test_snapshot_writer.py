"""A step as a memory snapshot: what memory_viz and torch's own tools find in it."""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, POOLS
from tests.unit.builders import TimelineBuilder, random_timeline, record_of
from tests.unit.caching_allocator import random_history
from tests.unit.live import recompute

# fmt: off
MEMORY_VIZ_READS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS",
    "LIST", "EMPTY_DICT", "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}
# fmt: on
"""Opcodes that ``unpickle`` in torch/utils/viz/MemoryViz.js knows."""


def export(timeline: Timeline, path: Path) -> dict[str, Any]:
    return pickle.loads(record_of(timeline).export_snapshot(path / "step.pickle").read_bytes())  # noqa: S301 - written by the test


@pytest.fixture(scope="module")
def live_step() -> StepRecord:
    """A step with recompute and offload: births, deaths and moves of every kind that a meter writes."""
    from memlab.lab.lab import Lab

    with Lab("qwen3-moe-tiny", backend="cpu", num_layers=2, seq_length=128) as lab:
        return lab.step(replace(recompute("moe"), offload_optimizer=True))


@pytest.fixture(params=["a live step", "births and deaths in no order", "streams that are waited for"])
def timeline(request: pytest.FixtureRequest, tmp_path: Path) -> Timeline:
    if request.param == "a live step":
        timeline = request.getfixturevalue("live_step").timeline
        assert timeline is not None
        return timeline
    if request.param == "births and deaths in no order":
        return random_timeline(3000)
    (tmp_path / "dump.pickle").write_bytes(pickle.dumps(random_history(300).snapshot(last=200)))
    return Timeline.from_snapshot(tmp_path / "dump.pickle")


def test_what_is_written_reads_back_the_same(timeline: Timeline, tmp_path: Path) -> None:
    export(timeline, tmp_path)
    again = Timeline.from_snapshot(tmp_path / "step.pickle")
    written = np.isin(timeline.pool, [POOLS.index("device"), POOLS.index("pending_free")])
    assert again.num_opening_events == written[: timeline.num_opening_events].sum()
    opened = again.num_opening_events
    for pool in ("device", "pending_free"):
        rows = timeline.category_bytes(pool)[:, written]
        assert np.array_equal(again.category_bytes(pool)[:, opened:], rows[:, opened:])
    assert again.breakdown(again.peak_index(), "module") == timeline.breakdown(timeline.peak_index(), "module")
    assert np.abs(again.nanoseconds - timeline.nanoseconds[written]).max() < 1000


def test_no_two_live_storages_share_an_address(timeline: Timeline, tmp_path: Path) -> None:
    snapshot = export(timeline, tmp_path)
    (segment,) = snapshot["segments"]
    end = segment["address"] + segment["total_size"]
    live: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            start, stop = entry["addr"], entry["addr"] + entry["size"]
            assert segment["address"] <= start < stop <= end
            assert all(stop <= other or other_stop <= start for other, other_stop in live.items())
            live[start] = stop
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    assert end < 2**53, "memory_viz reads addresses as JavaScript's numbers"
    there = {b["address"]: b["address"] + b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert live.items() <= there.items()


def test_torch_s_own_tools_read_what_is_written(timeline: Timeline, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    snapshot = export(timeline, tmp_path)
    closing = timeline.total_bytes()[-1]
    assert f"total_allocated: {_memory_viz.Bytes(closing)!r}\n" in _memory_viz.segsum(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    folded = _memory_viz.memory(snapshot, lambda lines: lines)
    by_category = timeline.breakdown(len(timeline) - 1)
    for name, num_bytes in by_category.items():
        lines = [
            line
            for line in folded.splitlines()
            if "active_allocated;phase:0:" in line and f"category:0:{name};" in line
        ]
        assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == num_bytes
    assert "$SNAPSHOT" not in _memory_viz.trace_plot(snapshot)
    assert "$SNAPSHOT" not in _memory_viz.segment_plot(snapshot)


def test_memory_viz_knows_every_opcode_and_finds_the_category_that_it_trips_over(
    timeline: Timeline, tmp_path: Path
) -> None:
    snapshot = export(timeline, tmp_path)
    used = {opcode.name: value for opcode, value, _ in pickletools.genops((tmp_path / "step.pickle").read_bytes())}
    assert used.keys() <= MEMORY_VIZ_READS
    assert 2 <= used["PROTO"] <= 4
    categories = {entry["category"] for entry in snapshot["device_traces"][0]}
    assert "unknown" in categories
    assert categories <= {*CATEGORIES, "unknown"}


def test_a_storage_that_grows_or_shrinks_is_written_anew(tmp_path: Path) -> None:
    step = TimelineBuilder()
    step.opening("workspace", 700)
    step.phase = "forward"
    for delta in (500, -900, -300):
        step.event(delta, "workspace", after=1)
    timeline = replace(step.build(), storage=np.zeros(4, dtype=np.int32))
    snapshot = export(timeline, tmp_path)
    told = [
        (entry["action"], entry["size"]) for entry in snapshot["device_traces"][0] if "free_req" not in entry["action"]
    ]
    assert told == [
        *[("alloc", 700), ("snapshot", 0)],
        *[("free_completed", 700), ("alloc", 1200), ("free_completed", 1200), ("alloc", 300), ("free_completed", 300)],
    ]


def test_a_record_without_a_timeline_says_so(tmp_path: Path) -> None:
    record = replace(record_of(random_timeline(20)), timeline=None)
    with pytest.raises(ValueError, match="has no timeline to export: take the step again"):
        record.export_snapshot(tmp_path / "x.pickle")
