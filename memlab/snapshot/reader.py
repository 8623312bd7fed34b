"""A memory snapshot of torch as events: births and deaths of blocks, and what was there before the first of them.

The format is what ``torch.cuda.memory._dump_snapshot`` writes (documented at ``torch.cuda.memory._snapshot``, seen with
torch 2.11): the segments and blocks at the end, and for each device the last entries of the allocator's history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.snapshot.allocations import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    STAYS,
    STAYS_PENDING,
    Entries,
    IntArray,
    Lives,
    lives_of,
)
from memlab.snapshot.places import places_of
from memlab.snapshot.plain_data import load_plain_data, without_garbage_collection
from memlab.snapshot.remainders import bytes_with_rests

SNAPSHOT_POOLS = ("device", "pending_free", "reserved")
_ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_GROWS,
    "segment_map": SEGMENT_GROWS,
    "segment_free": SEGMENT_SHRINKS,
    "segment_unmap": SEGMENT_SHRINKS,
}
_OF_NO_BLOCK = -1
_NOT_A_SNAPSHOT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotEvents:
    """Events in order, as columns of one length; the first `num_opening_events` stand for what was there before."""

    nanoseconds: IntArray
    delta_bytes: IntArray
    pool: IntArray
    """Index into `SNAPSHOT_POOLS`."""
    category: IntArray
    """Index into `categories`."""
    module: IntArray
    """Index into `modules`."""
    storage: IntArray
    """Number of the block, one for each life; all segments together are one."""
    categories: tuple[str, ...]
    """As the entries say, where something other than torch's allocator wrote them; else one empty string."""
    modules: tuple[str, ...]
    num_opening_events: int


def read_snapshot(path: Path | str, device: int | None = None) -> SnapshotEvents:
    """Reads a device's history out of a snapshot's file.

    Args:
        path: Of the pickle. Nothing in it is executed.
        device: Number of the device; None takes the only one that the snapshot tells of.

    Raises:
        ValueError: If the file cannot be read, is no snapshot, or does not tell of the device.
    """
    with without_garbage_collection():
        snapshot = load_plain_data(path)
        try:
            segments, traces = snapshot["segments"], snapshot["device_traces"]
            devices = sorted(
                {segment["device"] for segment in segments} | {number for number, trace in enumerate(traces) if trace}
            )
        except _NOT_A_SNAPSHOT as error:
            raise _no_snapshot(path, error) from error
        chosen = _choose(path, devices, device)
        try:
            segments = [segment for segment in segments if segment["device"] == chosen]
            trace = traces[chosen] if chosen < len(traces) else []
            return _events(segments, trace, snapshot.get("allocator_settings", {}), snapshot.get("memlab"))
        except _NOT_A_SNAPSHOT as error:
            raise _no_snapshot(path, error) from error


def _no_snapshot(path: Path | str, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is no memory snapshot ({type(error).__name__}: {error}): give a file that "
        "torch.cuda.memory._dump_snapshot wrote"
    )


def _choose(path: Path | str, devices: Sequence[int], device: int | None) -> int:
    if device is None and len(devices) == 1:
        return devices[0]
    if device is not None and device in devices:
        return device
    if not devices:
        raise ValueError(f"{path} tells of no device: take the snapshot after something was allocated")
    asked = "tells of several devices" if device is None else f"does not tell of device {device!r}"
    raise ValueError(f"{path} {asked}: give device, one of {', '.join(map(str, devices))}")


def _events(
    segments: Sequence[Mapping[str, Any]],
    trace: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    exported: Mapping[str, Any] | None,
) -> SnapshotEvents:
    """Joins the columns.

    Args:
        segments: Of the device, as in the snapshot.
        trace: Of the device, as in the snapshot.
        settings: The allocator's.
        exported: What memlab's export says of itself. Its sizes are exact, it tells nothing of reserved bytes, and its
            first ``opening_entries`` stand for what was there before.
    """
    staying = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    addresses = [address for segment in segments for address in _addresses(segment)]
    entries = _entries(trace, staying, addresses)
    lives = lives_of(entries) if exported is None else lives_of(entries, rounding_bytes=1)
    num_bytes = lives.num_bytes
    if exported is None and not settings.get("expandable_segments", False):
        most = settings.get("max_split_size", -1)
        ends = [segment["address"] + segment["total_size"] for segment in segments]
        num_bytes = bytes_with_rests(lives, entries, ends, most if most > 0 else None)
    sources = [
        _source(trace[number]) if number < len(trace) else staying[number - len(trace)]
        for number in lives.source.tolist()
    ]
    module, modules = places_of(sources, num_bytes)
    categories = {"": 0}
    category = [categories.setdefault((source or {}).get("category", ""), len(categories)) for source in sources]
    reserved_bytes = sum(segment["total_size"] for segment in segments) if exported is None else 0
    moment, delta, pool, storage = _rows(lives, num_bytes, entries, reserved_bytes)
    num_opening_events = int(np.count_nonzero(moment < (exported or {}).get("opening_entries", 0)))
    return SnapshotEvents(
        nanoseconds=_nanoseconds(trace)[np.clip(moment, 0, max(len(trace) - 1, 0))],
        delta_bytes=delta,
        pool=pool,
        category=np.append(np.array(category, dtype=np.int64), 0)[storage],
        module=np.append(module, 0)[storage],
        storage=storage,
        categories=tuple(categories),
        modules=modules,
        num_opening_events=num_opening_events,
    )


def _addresses(segment: Mapping[str, Any]) -> list[int]:
    """Returns the addresses of a segment's blocks that are in use; they lie one behind the other."""
    ends = np.cumsum([block["size"] for block in segment["blocks"]], dtype=np.int64)
    return [
        int(segment["address"] + end - block["size"])
        for end, block in zip(ends, segment["blocks"], strict=True)
        if block["state"] != "inactive"
    ]


def _entries(
    trace: Sequence[Mapping[str, Any]], staying: Sequence[Mapping[str, Any]], addresses: Sequence[int]
) -> Entries:
    """Turns the history, and the blocks that are there at its end, into columns."""
    codes = [_ACTIONS.get(entry["action"], _OF_NO_BLOCK) for entry in trace]
    codes += [STAYS if block["state"] == "active_allocated" else STAYS_PENDING for block in staying]
    # A refusal has no address.
    address = [entry.get("addr", 0) for entry in trace]
    num_bytes = [entry["size"] for entry in trace]
    return Entries(
        action=np.array(codes, dtype=np.int8),
        address=np.array([*address, *addresses], dtype=np.int64),
        num_bytes=np.array([*num_bytes, *(block["size"] for block in staying)], dtype=np.int64),
        num_traced=len(trace),
    )


def _source(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns an entry that tells who made a block: a death tells who freed it, unless it bears the birth's labels."""
    return entry if entry["action"] == "alloc" or "category" in entry else None


def _rows(
    lives: Lives, num_bytes: IntArray, entries: Entries, reserved_bytes: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns moments, changes, pools and storages of all events, in order."""
    device, pending, reserved = range(len(SNAPSHOT_POOLS))
    end = entries.num_traced
    row = np.arange(len(num_bytes))
    is_freed, is_completed = lives.freed <= end, lives.completed <= end
    # The allocator writes the two frees of a block one behind the other, unless a stream has to be waited for.
    waits = is_freed & (lives.completed > np.minimum(lives.freed, end) + 1)
    born_waiting = lives.freed < 0
    waits |= born_waiting
    born, freed = row[~born_waiting], row[is_freed & ~born_waiting]
    waiting, done = row[waits], row[waits & is_completed]
    changes = np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))
    grown = np.where(entries.action[changes] == SEGMENT_GROWS, 1, -1) * entries.num_bytes[changes]
    parts: list[tuple[IntArray, IntArray, int, IntArray | int]] = [
        (lives.born[born], num_bytes[born], device, born),
        (lives.freed[freed], -num_bytes[freed], device, freed),
        (lives.freed[waiting], num_bytes[waiting], pending, waiting),
        (lives.completed[done], -num_bytes[done], pending, done),
        (np.array([-1]), np.array([reserved_bytes - grown.sum()]), reserved, len(row)),
        (changes, grown, reserved, len(row)),
    ]
    moment, delta, pool, storage = (
        np.concatenate([np.broadcast_to(part[column], len(part[0])) for part in parts]).astype(np.int64)
        for column in range(4)
    )
    order = np.argsort(moment, kind="stable")
    is_something = delta[order] != 0
    order = order[is_something]
    return moment[order], delta[order], pool[order], storage[order]


def _nanoseconds(trace: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int64]:
    """Returns the entries' times since the first; clocks of several threads are kept from going back."""
    if not trace:
        return np.zeros(1, dtype=np.int64)
    times = np.maximum.accumulate(np.array([entry.get("time_us", 0) for entry in trace], dtype=np.int64))
    return np.asarray((times - times[0]) * 1000)
