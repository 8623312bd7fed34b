"""Memory snapshots of torch: what is read out of them, and what is refused."""

from __future__ import annotations

import bisect
import json
import os
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlab.allocator.protocol import NO_BLOCK
from memlab.allocator.replay import Blocks
from memlab.record.timeline import Timeline
from memlab.snapshot.allocation_sites import NUM_NAMES, OTHERS
from memlab.snapshot.remainders import _Boundaries
from memlab.vocabulary import POOLS
from tests.unit.caching_allocator import MIB, Block, CachingAllocator, random_history

Read = Callable[..., Timeline]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes what a program would have dumped, and reads it."""

    def read(snapshot: Any, **options: Any) -> Timeline:
        (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(snapshot))
        return Timeline.from_snapshot(tmp_path / "snapshot.pickle", **options)

    return read


# Reading, against an allocator that knows its totals


def totals_after_entries(timeline: Timeline, num_entries: int) -> np.ndarray:
    """Allocated, waiting and reserved bytes after each entry of a history with an entry a microsecond."""
    last = np.searchsorted(timeline.nanoseconds, np.arange(num_entries) * 1000, side="right") - 1
    return np.stack([timeline.total_bytes(pool)[last] for pool in ("device", "pending_free", "reserved")], axis=1)


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable segments"])
@pytest.mark.parametrize("seed", range(4))
def test_totals_of_a_whole_history_are_exact_after_every_entry(read: Read, seed: int, *, expandable: bool) -> None:
    allocator = random_history(500, seed, expandable=expandable)
    totals = totals_after_entries(read(allocator.snapshot()), len(allocator.trace))
    assert np.array_equal(totals, allocator.totals)
    rests = [
        block.size - block.requested for parts in allocator.segments.values() for block in parts if block.requested
    ]
    assert expandable or max(rests) > 512, "nothing in this history tells a rest from a rounding"


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable segments"])
@pytest.mark.parametrize("last", [1, 7, 100, 400])
@pytest.mark.parametrize("seed", range(4))
def test_totals_of_a_history_that_begins_late_end_at_the_snapshot_s(
    read: Read, seed: int, last: int, *, expandable: bool
) -> None:
    allocator = random_history(500, seed, expandable=expandable)
    totals = totals_after_entries(read(allocator.snapshot(last)), last)
    truth = np.array(allocator.totals[-last:])
    assert np.array_equal(totals[-1], truth[-1])
    assert np.array_equal(totals[:, 2], truth[:, 2])
    missing = truth[:, :2].sum(axis=1) - totals[:, :2].sum(axis=1)
    # A block of before the first entry may be short of its rest until it dies, and nothing else may be off.
    assert (missing >= 0).all()
    assert (np.diff(missing) <= 0).all()
    assert missing[0] <= MIB * sum(entry["action"] == "free_completed" for entry in allocator.trace[-last:])
    assert not expandable or not missing.any()


def test_a_snapshot_without_any_block_has_nothing_allocated(read: Read) -> None:
    segment = {"device": 0, "address": 4 * MIB, "total_size": 2 * MIB, "allocated_size": 0, "active_size": 0}
    segment |= {"stream": 0, "segment_type": "small", "frames": [], "is_expandable": False}
    free = {"address": 4 * MIB, "size": 2 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
    timeline = read({"segments": [segment | {"blocks": [free]}], "device_traces": [[]]})
    assert (int(timeline.total_bytes()[-1]), int(timeline.total_bytes("reserved")[-1])) == (0, 2 * MIB)


def test_a_block_of_before_is_exact_where_its_neighbour_tells_its_end(read: Read) -> None:
    allocator = CachingAllocator()
    first, _ = allocator.malloc(8 * MIB), allocator.malloc(8 * MIB)
    allocator.free(first)
    first = allocator.malloc(7 * MIB + 300)
    begins = len(allocator.trace)
    allocator.free(first)
    timeline = read(allocator.snapshot(len(allocator.trace) - begins))
    assert timeline.opening_bytes == 16 * MIB
    assert timeline.total_bytes()[-1] == 8 * MIB


def test_a_block_of_before_is_exact_where_a_later_birth_tells_its_end(read: Read) -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(8 * MIB), allocator.malloc(8 * MIB)
    allocator.free(first)
    first = allocator.malloc(7 * MIB + 300)
    allocator.free(second)
    begins = len(allocator.trace)
    second = allocator.malloc(9 * MIB)
    assert second.address == first.address + 8 * MIB
    allocator.free(first)
    timeline = read(allocator.snapshot(len(allocator.trace) - begins))
    assert timeline.opening_bytes == 8 * MIB


def test_a_block_of_before_beside_free_memory_is_rounded(read: Read) -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(8 * MIB), allocator.malloc(8 * MIB)
    allocator.free(first)
    first = allocator.malloc(7 * MIB + 300)
    allocator.free(second)
    begins = len(allocator.trace)
    allocator.free(first)
    assert read(allocator.snapshot(len(allocator.trace) - begins)).opening_bytes == 7 * MIB + 512


def h200_snapshot(values: dict[str, Any], *, expandable: bool) -> dict[str, Any]:
    """The recorded history as torch would have dumped it: the blocks at the end are those of the replay."""
    trace = [{"action": action, "addr": addr, "size": size} for action, addr, size in values["trace"]]
    blocks = Blocks(values["segments"], expandable=expandable)
    for number, entry in enumerate(trace):
        entry["time_us"] = number
        blocks.replay(entry)
    states = {True: "inactive", False: "active_allocated"}
    segments: dict[int, dict[str, Any]] = {}
    table, start = blocks._blocks, 0
    for address, block in sorted(blocks._at.items()):
        start = address if table.before[block] == NO_BLOCK else start
        segment = segments.setdefault(start, {"device": 0, "address": start, "total_size": 0, "blocks": []})
        state = "active_pending_free" if address in blocks.waiting else states[table.is_free[block]]
        segment["blocks"].append({"address": address, "size": table.num_bytes[block], "state": state})
        segment["total_size"] += table.num_bytes[block]
    settings = {"expandable_segments": expandable}
    return {"segments": list(segments.values()), "device_traces": [trace], "allocator_settings": settings}


@pytest.mark.parametrize(("name", "expandable"), [("h200_history", False), ("h200_history_expandable", True)])
def test_totals_of_a_real_history_are_torch_s_own_after_every_request(
    read: Read, name: str, *, expandable: bool
) -> None:
    values = json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())
    totals = totals_after_entries(read(h200_snapshot(values, expandable=expandable)), len(values["trace"]))
    totals[:, 1] += totals[:, 0]  # torch's active bytes
    # The pages of expandable segments are not among the replay's blocks.
    columns = 2 if expandable else 3
    wrong = [state for state in values["states"] if totals[state[0] - 1][:columns].tolist() != state[1 : 1 + columns]]
    assert wrong == []


@pytest.mark.parametrize("last", [1, 2])
def test_what_waited_for_a_stream_before_the_first_entry_waits_from_the_start(read: Read, last: int) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(5000)
    allocator.free(block, waits=True)
    allocator.malloc(3000)
    allocator.complete(block)
    timeline = read(allocator.snapshot(last))
    opening = slice(0, timeline.num_opening_events)
    assert 5120 in timeline.delta_bytes[opening][timeline.pool[opening] == POOLS.index("pending_free")]
    assert timeline.opening_bytes == (3072 if last == 1 else 0)
    assert timeline.bytes_at(len(timeline) - 1, "pending_free") == 0


def test_blocks_from_max_split_size_on_are_never_split(read: Read) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(31 * MIB)
    allocator.free(block)
    block = allocator.malloc(25 * MIB)
    parts = allocator.segments[block.address]
    block.size += parts.pop().size  # what max_split_size would have left whole
    allocator.free(block)
    snapshot = allocator.snapshot()
    snapshot["allocator_settings"]["max_split_size"] = 24 * MIB
    timeline = read(snapshot)
    assert timeline.delta_bytes[timeline.pool == 0].tolist() == [32 * MIB, -32 * MIB] * 2


def test_without_a_history_all_is_there_from_the_start(read: Read) -> None:
    allocator = random_history(300)
    timeline = read(allocator.snapshot(last=0))
    assert len(timeline) == timeline.num_opening_events
    assert (
        tuple(timeline.total_bytes(pool)[-1] for pool in ("device", "pending_free", "reserved")) == allocator.totals[-1]
    )
    assert timeline.breakdown(len(timeline) - 1) == {"unlabelled": allocator.totals[-1][0]}


@pytest.mark.parametrize("seed", range(5))
def test_a_history_with_holes_still_ends_at_the_snapshot_s_bytes(read: Read, seed: int) -> None:
    allocator = random_history(500, seed)
    snapshot = allocator.snapshot()
    keep = np.random.default_rng(seed).random(len(allocator.trace)) < 0.7
    snapshot["device_traces"] = [[entry for entry, kept in zip(allocator.trace, keep, strict=True) if kept]]
    timeline = read(snapshot)
    ends = tuple(timeline.total_bytes(pool)[-1] for pool in ("device", "pending_free", "reserved"))
    assert ends == allocator.totals[-1]
    assert all((timeline.total_bytes(pool) >= 0).all() for pool in ("device", "pending_free"))


def test_each_block_is_a_storage_that_dies_with_the_bytes_of_its_birth(read: Read) -> None:
    timeline = read(random_history(400).snapshot())
    device = timeline.pool == POOLS.index("device")
    for storage in np.unique(timeline.storage[device]):
        deltas = timeline.delta_bytes[device & (timeline.storage == storage)]
        assert len(deltas) <= 2
        assert len(deltas) == 1 or deltas.sum() == 0 < deltas[0]


def test_the_times_are_those_of_the_entries_and_never_go_back(read: Read) -> None:
    snapshot = random_history(50).snapshot()
    snapshot["device_traces"][0][7]["time_us"] -= 5
    nanoseconds = read(snapshot).nanoseconds
    assert (np.diff(nanoseconds) >= 0).all()
    assert nanoseconds[-1] == (len(snapshot["device_traces"][0]) - 1) * 1000


# Reading, names


def frame(filename: str, line: int = 3, name: str = "forward") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


@pytest.mark.parametrize(
    ("frames", "metadata", "module"),
    [
        ([frame("/usr/lib/python3.11/site-packages/torch/nn/functional.py"), frame("/me/model.py", 7)], "", "model.py:7 forward"),
        ([frame("??"), frame("/pytorch/aten/src/ATen/Op.cpp"), frame("/src/pytorch/torch/_ops.py"), frame("<stdin>")], "", "<stdin>:3 forward"),
        ([frame("/home/torch/train.py")], "", "train.py:3 forward"),
        ([frame("/me/model.py")], "layer 3", "layer 3"),
        ([frame("/me/model.py")], '{"layer":3}', '{"layer":3}'),
        ([frame("/me/model.py")], {"layer": 3, "what": "weights"}, '{"layer":3,"what":"weights"}'),
        ([], {"of": {"layer": [3]}, 1: None}, '{"of":"...","1":null}'),
        ([frame("??")], "", ""),
        ([], "", ""),
    ],
    ids=["torch's own left out", "C++ left out", "a folder called torch", "metadata first",
         "JSON that torch wrote", "JSON read back", "nested", "no Python", "no stack"],
)  # fmt: skip
def test_a_block_is_named_after_who_made_it(
    read: Read, frames: list[dict[str, Any]], metadata: Any, module: str
) -> None:
    allocator = CachingAllocator()
    allocator.malloc(1000, frames, metadata)
    assert read(allocator.snapshot()).breakdown(1, "module") == {module: 1024}


def annotation(block: Block, text: str) -> dict[str, Any]:
    """An entry of ``torch.cuda.memory._annotate_tensor`` (torch 2.14)."""
    return {"action": "annotate", "addr": block.address, "size": 0, "stream": 0, "time_us": 10**15, "frames": []} | {
        "user_metadata": text
    }


def test_an_annotation_names_the_memory_that_is_allocated_at_its_moment(read: Read) -> None:
    allocator = CachingAllocator()
    made_by = [frame("/me/model.py")]
    first = allocator.malloc(600, made_by)
    allocator.trace += [annotation(first, "packed"), annotation(first, "packed for layer 3")]
    allocator.free(first)
    second, third = allocator.malloc(600, made_by), allocator.malloc(5000, made_by, "weights")
    assert second.address == first.address
    allocator.trace.append(annotation(third, "packed"))
    timeline = read(allocator.snapshot())
    named = {timeline.modules[code] for code in timeline.module[timeline.delta_bytes > 0]} - {""}
    assert named == {"packed for layer 3", "model.py:3 forward", "weights"}
    assert timeline.breakdown(len(timeline.pool) - 1, "module") == {"model.py:3 forward": 1024, "weights": 5120}


def test_an_annotation_names_a_block_of_before_the_recording(read: Read) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(600)
    allocator.trace.append(annotation(block, "packed"))
    assert read(allocator.snapshot(1)).breakdown(0, "module") == {"packed": 1024}


def test_a_snapshot_of_pinned_host_memory_alone_says_so(tmp_path: Path) -> None:
    host = {"host_segments": [{"device": -1}], "host_traces": []}
    (tmp_path / "x.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]} | host))
    assert "only pinned host memory" in refusal(tmp_path / "x.pickle")


def test_pinned_host_memory_beside_the_device_s_changes_nothing(read: Read) -> None:
    history = random_history(30)
    of_host = [{"action": "alloc", "addr": 4096, "size": 2**30, "device": -1}]
    snapshot = history.snapshot() | {"host_segments": [{"device": -1, "total_size": 2**30}], "host_traces": of_host}
    assert read(snapshot).total_bytes()[-1] == history.totals[-1][0]


def test_a_block_of_before_is_named_by_the_end_and_never_by_who_freed_it(read: Read) -> None:
    allocator = CachingAllocator()
    stays, goes = (allocator.malloc(size, [frame("/me/model.py", size)]) for size in (600, 5000))
    allocator.free(goes)
    allocator.trace[-2]["frames"] = [frame("/me/free.py")]
    timeline = read(allocator.snapshot(2))
    assert stays.state == "active_allocated"
    assert timeline.breakdown(timeline.num_opening_events - 1, "module") == {"": 5120, "model.py:600 forward": 1024}


def test_names_are_bounded_and_their_bytes_are_all_there(read: Read) -> None:
    allocator = CachingAllocator()
    allocator.trace += [
        {"action": "alloc", "addr": 2**40 + 2**12 * number, "size": 512 + 512 * (number < 10)}
        | {"user_metadata": f"name {number}", "frames": []}
        for number in range(NUM_NAMES + 50)
    ]
    timeline = read(allocator.snapshot() | {"segments": []}, device=0)
    assert len(timeline.modules) == NUM_NAMES
    assert timeline.modules[-1] == OTHERS
    assert {f"name {number}" for number in range(10)} <= set(timeline.modules)
    born = timeline.delta_bytes > 0
    assert timeline.delta_bytes[born & (timeline.module == NUM_NAMES - 1)].sum() == 52 * 512


# Reading, refusals


class Malicious:
    """Unpickling one makes the file that it names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Timeline.from_snapshot(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert re.search(r": (give|take) ", message), "the next action is missing"
    return message


def test_a_pickle_that_would_run_something_is_refused_before_it_runs(tmp_path: Path) -> None:
    path, touched = tmp_path / "snapshot.pickle", tmp_path / "touched"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], "more": Malicious(touched)}))
    pickle.loads(path.read_bytes())  # noqa: S301 - harmless, and written above
    assert touched.exists(), "this pickle does no harm"
    touched.unlink()
    assert "only plain data is read" in refusal(path)
    assert not touched.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'false'\ntR.",
        b"(S'false'\nios\nsystem\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04evalh\x00\x93.",
        b"Pan object outside\n.",
        b"\x80\x04\x82\x01.",
        b"}(K\x01K\x02b.",
    ],
    ids=["global", "instance", "stack global", "persistent", "extension", "state"],
)
def test_no_opcode_builds_more_than_plain_data(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pickle").write_bytes(content)
    refusal(tmp_path / "x.pickle")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(random_history(20).snapshot())
    path = tmp_path / "damaged.pickle"
    for length in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:length])
        assert "not a whole pickle" in refusal(path)
    path.write_text("This is a text.\n")
    refusal(path)
    assert "No such file" in refusal(tmp_path / "missing.pickle")


@pytest.mark.parametrize(
    "content",
    [
        7,
        None,
        [],
        [{"address": 0}],
        {"segments": []},
        {"segments": 3, "device_traces": []},
        {"segments": [{"device": 0}], "device_traces": []},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": "x", "size": 1}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 2**70, "size": 1}]]},
        {"segments": [], "device_traces": [["alloc"]]},
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(content))
    assert "is not a memory snapshot" in refusal(tmp_path / "x.pickle")


def test_the_device_is_asked_for_only_where_there_is_a_choice(read: Read, tmp_path: Path) -> None:
    one, two = random_history(30, 1), random_history(30, 2)
    snapshot = one.snapshot()
    snapshot["device_traces"] = [one.trace, [], two.trace]
    snapshot["segments"] += [segment | {"device": 2} for segment in two.snapshot()["segments"]]
    assert read(snapshot, device=2).total_bytes()[-1] == two.totals[-1][0]
    assert read(snapshot, device=0).total_bytes()[-1] == one.totals[-1][0]
    path = tmp_path / "snapshot.pickle"
    assert "several devices: give device, one of 0, 2" in refusal(path)
    assert "does not contain device 1: give device, one of 0, 2" in refusal(path, device=1)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], []]}))
    assert "contains no device: take the snapshot after" in refusal(path)


DOUBLED = b"\x80\x04)" + b"2\x86" * 100  # ((((), ()), ((), ())), ...): 2**100 steps to hash, compare or print


@pytest.mark.parametrize(
    "content",
    [
        b"}" + DOUBLED + b"K\x00s.",
        b"}\x8c\x08segments](}\x8c\x06device" + DOUBLED + b"ses\x8c\x0ddevice_traces]s.",
        b"\x80\x04)\x94" + b"h\x00h\x00\x86q\x00" * 100 + b".",
        b"\x80\x04K\x01" + b"\x85" * 1_000_000 + b".",
        b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x00s.",
        DOUBLED + b"Q.",
        b"\x80\x04)" + b"\x85" * 1_000_000 + b"Q.",
        b"\x80\x02}r" + (2**29).to_bytes(4, "little") + b".",
        b"}p1000000000\n.",
        b"\x80\x04\x96" + (10**10).to_bytes(8, "little") + b".",
        b"\x80\x04](" + b"}" * 100_000 + b"e.",
        b"\x80\x04](" + b"\x8f" * 100_000 + b"e.",
        b"\x80\x04X\xff\xff\xff\xffabc.",
    ],
    ids=[
        "doubled tuple as key", "doubled tuple as device", "doubled tuple by memo", "deep tuple", "deep tuple as key",
        "doubled persistent id", "deep persistent id", "memo index", "text memo index", "bytearray", "empty dicts",
        "empty sets", "text beyond the end",
    ],
)  # fmt: skip
def test_a_small_file_cannot_ask_for_endless_work(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pickle").write_bytes(content)
    tracemalloc.start()
    refusal(tmp_path / "x.pickle")
    assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    tracemalloc.stop()


def doubled_list(depth: int = 100) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "entry",
    [
        {"user_metadata": doubled_list()},
        {"size": doubled_list()},
        {"addr": doubled_list()},
        {"time_us": doubled_list()},
        {"frames": [{"filename": "a.py", "line": doubled_list(), "name": "f"}]},
        {"frames": [{"filename": "a.py", "line": 1, "name": doubled_list()}]},
        {"category": doubled_list()},
        {"user_metadata": "\ud800"},
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_lists_where_numbers_and_texts_belong_are_refused_at_any_depth(tmp_path: Path, entry: dict[str, Any]) -> None:
    allocation = {"action": "alloc", "addr": 4096, "size": 512, "time_us": 1, "frames": []} | entry
    (tmp_path / "x.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[allocation]]}))
    refusal(tmp_path / "x.pickle")


def test_segments_that_share_their_blocks_are_refused(tmp_path: Path) -> None:
    snapshot = random_history(100).snapshot()
    snapshot["segments"] = snapshot["segments"][:1] * 1000
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(snapshot))
    assert "two segments have the same blocks" in refusal(tmp_path / "x.pickle")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pickle")
    assert "is not a file" in refusal(tmp_path / "x.pickle")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_torch_is_read(tmp_path: Path, protocol: int) -> None:
    snapshot = random_history(400).snapshot()
    snapshot["segments"] = [segment | {"segment_pool_id": (0, 1)} for segment in snapshot["segments"]]
    snapshot["device_traces"][0][0] |= {"user_metadata": "a" * 300, "compile_context": None, "x": [True, 1.5, 2**63]}
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(snapshot, protocol=protocol))
    expected = random_history(400).totals[-1][0]
    assert Timeline.from_snapshot(tmp_path / "x.pickle").total_bytes()[-1] == expected


def test_boundaries_in_buckets_are_those_of_a_sorted_list() -> None:
    rng = np.random.default_rng(0)
    plain: list[int] = []
    boundaries = _Boundaries([])
    for value in rng.integers(0, 4000, 12_000).tolist():
        if rng.random() < 0.7:
            bisect.insort(plain, value)
            boundaries.add(value)
        else:
            boundaries.remove(value)
            if value in plain:
                plain.remove(value)
        at = bisect.bisect_right(plain, value)
        assert boundaries.after(value) == (plain[at] if at < len(plain) else None)
        assert boundaries.at_or_before(value) == (plain[at - 1] if at else None)
    assert len(boundaries._buckets) > 1
