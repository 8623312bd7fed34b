"""The allocator's history, replayed: held against torch's own counters after every one of 400 random requests.

The histories were recorded on an H200 with ``torch.cuda.memory._snapshot``; the counters are ``memory_stats``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memlab.allocator.replay import Blocks
from memlab.allocator.rules import rounded_bytes

DATA = Path(__file__).parent / "data"


def history(name: str) -> dict[str, Any]:
    values = json.loads((DATA / f"{name}.json").read_text())
    values["trace"] = [{"action": action, "addr": addr, "size": size} for action, addr, size in values["trace"]]
    return values


def totals_after_each_entry(values: dict[str, Any], *, expandable: bool) -> list[tuple[int, int, int]]:
    blocks = Blocks(values["segments"], expandable=expandable)
    opening = sum(blocks.allocated().values())
    allocated = active = opening
    totals = []
    for entry in values["trace"]:
        change = blocks.replay(entry)
        if change is not None:
            kind, _, num_bytes = change
            allocated += num_bytes * ((kind == "allocated") - (kind == "freed"))
            active += num_bytes * ((kind == "allocated") - (kind == "completed"))
        totals.append((allocated, active, blocks.reserved_bytes))
    return totals


@pytest.mark.parametrize(("name", "expandable"), [("h200_history", False), ("h200_history_expandable", True)])
def test_allocated_active_and_reserved_bytes_are_torch_s_after_every_request(name: str, expandable: bool) -> None:
    values = history(name)
    totals = totals_after_each_entry(values, expandable=expandable)
    assert len(values["states"]) == 400
    # The counters were read after a snapshot, which leaves an entry of its own.
    wrong = [state for state in values["states"] if totals[state[0] - 1] != tuple(state[1:])]
    assert wrong == []


def test_a_rest_that_is_too_small_to_split_off_is_counted_with_the_block() -> None:
    values = history("h200_history")
    requested = sum(rounded_bytes(entry["size"]) for entry in values["trace"] if entry["action"] == "alloc")
    blocks = Blocks(values["segments"])
    given = [blocks.replay(entry) for entry in values["trace"]]
    assert sum(change[2] for change in given if change and change[0] == "allocated") > requested


def test_a_block_that_another_stream_uses_waits() -> None:
    values = history("h200_history")
    blocks = Blocks(values["segments"])
    waited = 0
    for entry, following in zip(values["trace"], values["trace"][1:], strict=False):
        blocks.replay(entry)
        is_done_at_once = following["action"] == "free_completed" and following["addr"] == entry["addr"]
        if entry["action"] == "free_requested" and not is_done_at_once:
            waited += 1
            assert entry["addr"] in blocks.waiting
    assert waited > 0


def test_free_neighbours_are_merged() -> None:
    segment = {
        "address": 0,
        "total_size": 20 * 1024**2,
        "blocks": [{"address": 0, "size": 20 * 1024**2, "state": "inactive"}],
    }
    blocks = Blocks([segment])
    for address in (0, 4 * 1024**2, 8 * 1024**2):
        blocks.replay({"action": "alloc", "addr": address, "size": 4 * 1024**2})
    assert blocks.largest_free_bytes(2 * 1024**2) == 8 * 1024**2
    assert blocks.largest_free_bytes(1024**2) == 0, "a small request gets no block of a large segment"
    for address in (0, 8 * 1024**2, 4 * 1024**2):
        blocks.replay({"action": "free_requested", "addr": address, "size": 4 * 1024**2})
        blocks.replay({"action": "free_completed", "addr": address, "size": 4 * 1024**2})
    assert blocks.largest_free_bytes(2 * 1024**2) == 20 * 1024**2
    assert blocks.allocated() == {}
