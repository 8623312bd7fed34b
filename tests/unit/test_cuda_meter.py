"""The GPU's meter on a machine without one: a small allocator writes the history that torch would."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memlab.meter.cuda import meter as allocator
from memlab.meter.cuda.meter import AllocatorMeter
from memlab.meter.labels import Labels
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS
from tests.unit.test_allocator_replay import history

pytestmark = pytest.mark.versions

MIB = 2**20


class ScriptedAllocator:
    """Gives every request a segment of its own, and writes down what torch writes down."""

    def __init__(self) -> None:
        self.metadata = ""
        self.entries: list[dict[str, Any]] = []
        self.live: dict[int, int] = {}
        self.requested: dict[int, int] = {}
        self._next = 2**30
        self._microseconds = time.time_ns() // 1000 + 10**6

    def write(self, action: str, addr: int, size: int, metadata: str | None = None) -> None:
        self._microseconds += 1
        stamp = self.metadata if metadata is None else metadata
        self.entries.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "time_us": self._microseconds,
                "user_metadata": stamp,
            }
        )

    def allocate(self, size: int, metadata: str | None = None) -> int:
        address, self._next = self._next, self._next + 2**30
        self.write("segment_alloc", address, size)
        self.write("alloc", address, size, metadata)
        self.live[address] = size
        return address

    def free(self, address: int, *, is_done: bool = True) -> None:
        self.write("free_requested", address, self.live[address])
        if is_done:
            self.complete(address)

    def complete(self, address: int) -> None:
        self.write("free_completed", address, self.live.pop(address))

    def snapshot(self) -> dict[str, Any]:
        segments = [
            {
                "device": 0,
                "address": address,
                "total_size": size,
                "blocks": [
                    {
                        "address": address,
                        "size": size,
                        "requested_size": self.requested.get(address, size),
                        "state": "active_allocated",
                    }
                ],
            }
            for address, size in self.live.items()
        ]
        return {"segments": segments, "device_traces": [list(self.entries)], "allocator_settings": {}}


def tensor_at(address: int, num_bytes: int) -> Any:
    storage = SimpleNamespace(nbytes=lambda: num_bytes, data_ptr=lambda: address)
    return SimpleNamespace(is_cuda=True, untyped_storage=lambda: storage)


@pytest.fixture
def torch_allocator(monkeypatch: pytest.MonkeyPatch) -> ScriptedAllocator:
    scripted = ScriptedAllocator()
    monkeypatch.setattr(allocator, "_snapshot", scripted.snapshot)
    monkeypatch.setattr(allocator, "_restart_history", scripted.entries.clear)
    monkeypatch.setattr(
        torch.cuda.memory, "_set_memory_metadata", lambda text: setattr(scripted, "metadata", text), raising=False
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(scripted.live.values()))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return scripted


@pytest.fixture
def labels() -> Labels:
    return Labels()


@pytest.fixture
def meter(torch_allocator: ScriptedAllocator, labels: Labels) -> Any:
    meter = AllocatorMeter(labels)
    with meter.watching():
        meter.start({})
        yield meter


def births(timeline: Timeline) -> list[tuple[int, str, str, str]]:
    rows = zip(timeline.delta_bytes, timeline.pool, timeline.phase, timeline.module, timeline.category, strict=True)
    return [
        (int(delta), PHASES[phase], timeline.modules[module], CATEGORIES[category])
        for delta, pool, phase, module, category in rows
        if pool == 0 and delta > 0
    ]


def test_each_allocation_carries_the_label_of_its_moment(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator
) -> None:
    labels.enter_phase("forward")
    labels.enter_module(labels.code("decoder.layers.0.mlp"))
    kept = torch_allocator.allocate(3 * MIB)
    labels.enter_phase("backward")
    labels.enter_module(labels.code("decoder.layers.0"))
    torch_allocator.free(torch_allocator.allocate(MIB))
    torch_allocator.free(kept)
    labels.enter_phase("idle")
    timeline = meter.finish()
    assert births(timeline) == [
        (3 * MIB, "forward", "decoder.layers.0.mlp", "activations"),
        (MIB, "backward", "decoder.layers.0", "temporary"),
    ]
    assert (timeline.peak_bytes(), timeline.total_bytes()[-1]) == (4 * MIB, 0)
    assert timeline.peak_bytes("reserved") == 4 * MIB
    assert not timeline.total_bytes("pending_free").any(), "nothing had to wait"
    assert meter.labelled_share == 1.0


def test_a_dropped_timeline_leaves_the_meter_as_a_finished_one_does(
    torch_allocator: ScriptedAllocator, labels: Labels
) -> None:
    timelines = []
    for ends in (AllocatorMeter.finish, AllocatorMeter.drop):
        meter = AllocatorMeter(labels)
        with meter.watching():
            meter.start({})
            held = torch_allocator.allocate(2 * MIB)
            ends(meter)
            meter.start({}, others="unlabelled")
            torch_allocator.free(held)
            timelines.append(meter.finish())
    finished, dropped = timelines
    assert births(dropped) == births(finished)
    assert dropped.total_bytes()[-1] == 0
    assert dropped.total_bytes().tolist() == finished.total_bytes().tolist()


def test_what_has_no_category_at_the_start_can_get_one_for_good(
    torch_allocator: ScriptedAllocator, labels: Labels
) -> None:
    known, other = torch_allocator.allocate(MIB), torch_allocator.allocate(2 * MIB)
    meter = AllocatorMeter(labels)
    with meter.watching():
        meter.start({"parameters": [tensor_at(known, MIB)]}, others="unlabelled")
        torch_allocator.free(other)
        timeline = meter.finish()
    assert timeline.breakdown(timeline.first_step_event) == {"unlabelled": 2 * MIB, "parameters": MIB}
    assert timeline.breakdown(len(timeline) - 1) == {"parameters": MIB}


def test_a_stamp_of_another_step_is_no_label(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator
) -> None:
    stale = torch_allocator.metadata
    meter.finish()
    meter.start({})
    labels.enter_phase("backward")
    torch_allocator.allocate(MIB)
    torch_allocator.allocate(3 * MIB, metadata=stale)
    timeline = meter.finish()
    assert [row[1] for row in births(timeline)] == ["backward", "backward"], "the last label in order is taken instead"
    assert meter.labelled_share == 0.25


def test_a_category_holds_from_birth_on_and_the_rest_is_residual(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator
) -> None:
    labels.enter_phase("optimizer")
    moments, left = torch_allocator.allocate(8 * MIB), torch_allocator.allocate(2 * MIB)
    meter.categorise({"optimizer state": [tensor_at(moments, 8 * MIB)]})
    labels.enter_phase("offload")
    torch_allocator.free(moments)
    reused = torch_allocator.allocate(5 * MIB)
    timeline = meter.finish()
    categories = {row[0]: row[3] for row in births(timeline)}
    assert categories == {8 * MIB: "optimizer state", 2 * MIB: "activations", 5 * MIB: "activations"}
    assert meter.uncategorised_bytes() == 7 * MIB
    assert meter.untracked_bytes([tensor_at(reused, 5 * MIB)]) == 2 * MIB
    torch_allocator.free(left)


def test_what_another_stream_still_uses_is_active_and_not_allocated(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator
) -> None:
    labels.enter_phase("forward")
    offloaded = torch_allocator.allocate(4 * MIB)
    torch_allocator.free(offloaded, is_done=False)
    del torch_allocator.live[offloaded]
    torch_allocator.allocate(3 * MIB)
    torch_allocator.write("free_completed", offloaded, 4 * MIB)
    timeline = meter.finish()
    assert (timeline.peak_bytes(), timeline.peak_active_bytes()) == (4 * MIB, 7 * MIB)
    assert timeline.bytes_at(len(timeline) - 1, "pending_free") == 0


def test_a_refusal_keeps_what_the_allocator_knew(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = SimpleNamespace(total_memory=100 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    labels.enter_phase("forward")
    labels.enter_module(labels.code("output_layer"))
    torch_allocator.allocate(60 * MIB)
    torch_allocator.write("oom", 0, 50 * MIB)
    torch_allocator.entries[-1]["device_free"] = 30 * MIB
    meter.finish()
    refusal = meter.out_of_memory
    assert refusal is not None
    assert (refusal.place, refusal.requested_bytes) == ("forward of output_layer", 50 * MIB)
    assert (refusal.allocated_bytes, refusal.reserved_bytes, refusal.device_free_bytes) == (
        60 * MIB,
        60 * MIB,
        30 * MIB,
    )


def test_a_look_comes_when_the_module_takes_over_in_which_the_event_was(
    meter: AllocatorMeter, labels: Labels, torch_allocator: ScriptedAllocator
) -> None:
    def step() -> None:
        labels.enter_phase("forward")
        for name in ("first", "second", "third"):
            labels.enter_module(labels.code(name))
            torch_allocator.free(torch_allocator.allocate(MIB))
        labels.enter_phase("idle")

    step()
    meter.finish()
    seen: list[str] = []
    with meter.at_event(3, lambda: seen.append(labels.place)):  # a birth and a death each: the second one's birth
        meter.start({})
        step()
        meter.finish()
    assert seen == ["forward of second"]


@pytest.mark.parametrize(("name", "expandable"), [("h200_history", False), ("h200_history_expandable", True)])
def test_what_an_h200_gave_beyond_each_request_is_known(
    name: str, expandable: bool, torch_allocator: ScriptedAllocator, labels: Labels, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, num_written = history(name), 0
    segments = [{"device": 0, **segment} for segment in values["segments"]]
    settings = {"expandable_segments": expandable}
    entries = [{"time_us": 2**52 + number, **entry} for number, entry in enumerate(values["trace"])]

    def snapshot() -> dict[str, Any]:
        return {"segments": segments, "device_traces": [entries[:num_written]], "allocator_settings": settings}

    opening = [part for segment in segments for part in segment["blocks"] if part["state"] == "active_allocated"]
    monkeypatch.setattr(allocator, "_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(part["size"] for part in opening))
    meter = AllocatorMeter(labels)
    with meter.watching():
        meter.start({})
        num_written = len(entries)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: values["states"][-1][1])
        timeline = meter.finish()
    assert timeline.rounding_bytes is not None
    requested = [sum(part["requested_size"] for part in opening)]
    for entry in values["trace"]:
        if entry["action"] in ("alloc", "free_requested"):
            requested.append(requested[-1] + entry["size"] * (1 if entry["action"] == "alloc" else -1))
    on_device = timeline.pool == POOLS.index("device")
    told = np.cumsum((timeline.delta_bytes - timeline.rounding_bytes)[on_device])
    assert told[len(opening) - 1 :].tolist() == requested
    rounding = timeline.rounding_bytes[on_device]
    assert (rounding * np.sign(timeline.delta_bytes[on_device]) >= 0).all()
    assert (abs(rounding).max() > 512) != expandable, "a rest is more than rounding, and expandable segments have none"


def test_what_was_there_before_has_its_rounding_too(torch_allocator: ScriptedAllocator, labels: Labels) -> None:
    address = torch_allocator.allocate(2 * MIB)
    torch_allocator.requested[address] = 2 * MIB - 100
    meter = AllocatorMeter(labels)
    with meter.watching():
        meter.start({})
        torch_allocator.free(address)
        timeline = meter.finish()
    assert timeline.rounding_bytes is not None
    assert timeline.rounding_bytes[timeline.pool == POOLS.index("device")].tolist() == [100, -100]


def test_a_saved_timeline_keeps_its_rounding_and_one_from_before_has_none(
    meter: AllocatorMeter, torch_allocator: ScriptedAllocator, tmp_path: Path
) -> None:
    torch_allocator.write("segment_alloc", 2**20, 2 * MIB)
    torch_allocator.write("alloc", 2**20, 2 * MIB - 100)
    torch_allocator.live[2**20] = 2 * MIB
    timeline = meter.finish()
    timeline.save(tmp_path / "timeline.npz")
    loaded = Timeline.load(tmp_path / "timeline.npz")
    assert loaded.rounding_bytes is not None and loaded.rounding_bytes.tolist().count(100) == 1
    with np.load(tmp_path / "timeline.npz") as data:
        columns = {name: data[name] for name in data.files if name != "rounding_bytes"}
    np.savez_compressed(tmp_path / "before.npz", **columns)
    before = Timeline.load(tmp_path / "before.npz")
    assert before.rounding_bytes is None
    assert before.peak_bytes() == loaded.peak_bytes() == 2 * MIB
