"""A memory snapshot of torch as events: blocks allocated and freed, and what existed before the first entry.

The format is what ``torch.cuda.memory._dump_snapshot`` writes (documented at ``torch.cuda.memory._snapshot``, seen with
torch 2.11; read in 2.15): the segments and blocks at the end, those of CUDA graphs' pools among them, and for each
device the last entries of the allocator's history. Since 2.14 an entry may say ``annotate``: a text for memory that is
allocated already. The pinned host memory that 2.14 can record too (``host_segments``, ``host_traces``) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.snapshot.allocation_sites import places_of
from memlab.snapshot.allocations import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    IN_USE,
    PENDING_FREE,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    Allocations,
    Entries,
    IntArray,
    find_allocations,
)
from memlab.snapshot.remainders import add_unsplit_remainders
from memlab.snapshot.safe_unpickle import load_plain_data, without_garbage_collection

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
_MOST_SHOWN = 16
"""So many devices a message names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotEvents:
    """Events in order, as columns of one length; the first `num_opening_events` are what existed before the history."""

    nanoseconds: IntArray
    delta_bytes: IntArray
    pool: IntArray
    """Index into `SNAPSHOT_POOLS`."""
    category: IntArray
    """Index into `categories`."""
    module: IntArray
    """Index into `modules`."""
    storage: IntArray
    """Number of the allocation; all segments together are one."""
    categories: tuple[str, ...]
    """Those of the entries, where something other than torch's allocator wrote them; else one empty string."""
    modules: tuple[str, ...]
    num_opening_events: int


def read_snapshot(path: Path | str, device: int | None = None) -> SnapshotEvents:
    """Reads a device's history from a snapshot file.

    Args:
        path: Of the pickle. Nothing in it is executed.
        device: Number of the device; None takes the only one that the snapshot contains.

    Raises:
        ValueError: If the file cannot be read, is not a snapshot, or does not contain the device.
    """
    with without_garbage_collection():
        snapshot = load_plain_data(path)
        try:
            segments, traces = _list(snapshot["segments"], "segments"), _list(snapshot["device_traces"], "traces")
            devices = sorted(
                {_whole(segment["device"]) for segment in segments}
                | {number for number, trace in enumerate(traces) if trace}
            )
        except _NOT_A_SNAPSHOT as error:
            raise _no_snapshot(path, error) from error
        if not devices and (snapshot.get("host_traces") or snapshot.get("host_segments")):
            raise ValueError(
                f"{path} contains only pinned host memory, of which memlab reads nothing: take a snapshot that "
                "_record_memory_history has recorded without record_cuda=False"
            )
        chosen = _choose(path, devices, device)
        try:
            segments = [segment for segment in segments if segment["device"] == chosen]
            trace = _list(traces[chosen], "a trace") if chosen < len(traces) else []
            return _events(segments, trace, snapshot.get("allocator_settings", {}), snapshot.get("memlab"))
        except _NOT_A_SNAPSHOT as error:
            raise _no_snapshot(path, error) from error


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("a device or an address must be a whole number")
    return value


def _no_snapshot(path: Path | str, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ValueError(
        f"{path} is not a memory snapshot ({reason}): give a file that torch.cuda.memory._dump_snapshot wrote"
    )


def _choose(path: Path | str, devices: Sequence[int], device: int | None) -> int:
    if device is None and len(devices) == 1:
        return devices[0]
    if device is not None and device in devices:
        return device
    if not devices:
        raise ValueError(f"{path} contains no device: take the snapshot after something was allocated")
    found = "contains several devices" if device is None else f"does not contain device {device!r}"
    names = ", ".join(map(str, devices[:_MOST_SHOWN])) + (", ..." if len(devices) > _MOST_SHOWN else "")
    raise ValueError(f"{path} {found}: give device, one of {names}")


def _events(
    segments: Sequence[Mapping[str, Any]],
    trace: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    exported: Mapping[str, Any] | None,
) -> SnapshotEvents:
    """Joins the columns.

    Args:
        exported: What memlab's own export says about itself. Its sizes are exact, it contains no reserved bytes, and
            its first ``opening_entries`` are what existed before the step.
    """
    if len({id(_list(segment["blocks"], "blocks")) for segment in segments}) < len(segments):
        raise ValueError("two segments have the same blocks")  # a small file could name them a billion times
    remaining = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    addresses = [address for segment in segments for address in _addresses(segment)]
    entries = _entries(trace, remaining, addresses)
    allocations = find_allocations(entries) if exported is None else find_allocations(entries, rounding_bytes=1)
    num_bytes = allocations.num_bytes
    if exported is None and not settings.get("expandable_segments", False):
        most = settings.get("max_split_size", -1)
        ends = [segment["address"] + segment["total_size"] for segment in segments]
        num_bytes = add_unsplit_remainders(allocations, entries, ends, most if most > 0 else None)
    sources = [
        _source(trace[number]) if number < len(trace) else remaining[number - len(trace)]
        for number in allocations.source.tolist()
    ]
    module, modules = places_of(_annotated(sources, allocations, trace), num_bytes)
    categories = {"": 0}
    category = [categories.setdefault((source or {}).get("category", ""), len(categories)) for source in sources]
    reserved_bytes = sum(segment["total_size"] for segment in segments) if exported is None else 0
    moment, delta, pool, storage = _rows(allocations, num_bytes, entries, reserved_bytes)
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
    """Returns the addresses of a segment's blocks that are in use. Blocks follow each other without gaps."""
    sizes = _column(segment["blocks"], "size")
    starts = segment["address"] + np.cumsum(sizes) - sizes
    return [
        start for start, block in zip(starts.tolist(), segment["blocks"], strict=True) if block["state"] != "inactive"
    ]


def _entries(
    trace: Sequence[Mapping[str, Any]], remaining: Sequence[Mapping[str, Any]], addresses: Sequence[int]
) -> Entries:
    """Turns the history, and the blocks that exist at its end, into columns."""
    codes = [_ACTIONS.get(entry["action"], _OF_NO_BLOCK) for entry in trace]
    codes += [IN_USE if block["state"] == "active_allocated" else PENDING_FREE for block in remaining]
    return Entries(
        action=np.array(codes, dtype=np.int8),
        # The entry of a failed allocation has no address.
        address=np.append(_column(trace, "addr", 0), np.array(addresses, dtype=np.int64)),
        num_bytes=np.append(_column(trace, "size"), _column(remaining, "size")),
        num_traced=len(trace),
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str, default: int | None = None) -> IntArray:
    """Returns a number of every row. ``fromiter`` refuses lists, which ``array`` would walk through at any depth."""
    values: Iterable[Any] = (row[name] if default is None else row.get(name, default) for row in rows)
    return np.fromiter(values, dtype=np.int64, count=len(rows))


def _source(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns an entry that names who allocated. A free names who freed, unless it has the allocation's labels."""
    return entry if entry["action"] == "alloc" or "category" in entry else None


def _annotated(
    sources: Sequence[Mapping[str, Any] | None], allocations: Allocations, trace: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any] | None]:
    """Returns the sources, and in place of one without a text of the program's the last annotation of its memory."""
    annotations: dict[int, list[int]] = {}
    for number, entry in enumerate(trace):
        if entry["action"] == "annotate":
            annotations.setdefault(_whole(entry["addr"]), []).append(number)
    if not annotations:
        return list(sources)
    named = []
    columns = (allocations.address.tolist(), allocations.allocated.tolist(), allocations.freed.tolist())
    for source, address, allocated, freed in zip(sources, *columns, strict=True):
        meant = [number for number in annotations.get(address, ()) if allocated < number < freed]
        has_text = source is not None and source.get("user_metadata")
        named.append(trace[meant[-1]] if meant and not has_text else source)
    return named


def _rows(
    allocations: Allocations, num_bytes: IntArray, entries: Entries, reserved_bytes: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Writes each allocation as up to four events, and each change of a segment as one.

    ======================= ================= ============================================
    moment                  change            which allocations
    ======================= ================= ============================================
    `allocated`             device + bytes    all, except those that only wait from the start
    `freed`                 device - bytes    of those, the freed ones
    `freed`                 pending + bytes   those that another stream used after the free
    `completed`             pending - bytes   of those, the completed ones
    ======================= ================= ============================================

    For example, 512 bytes that are allocated by entry 3, freed by entry 5 and completed by entry 6 become
    ``(3, +512, device), (5, -512, device)``: the two frees are neighbours, so nothing was waited for. Completed by
    entry 9, they also become ``(5, +512, pending), (9, -512, pending)``.

    Returns:
        Moments, changes of bytes, pools and storages of all events, in order.
    """
    device, pending, reserved = range(len(SNAPSHOT_POOLS))
    end = entries.num_traced
    row = np.arange(len(num_bytes))
    is_freed, is_completed = allocations.freed <= end, allocations.completed <= end
    # The allocator writes the two frees of a block one after the other, unless a stream has to be waited for.
    waits = is_freed & (allocations.completed > np.minimum(allocations.freed, end) + 1)
    waits_from_start = allocations.freed < 0
    waits |= waits_from_start
    allocated, freed = row[~waits_from_start], row[is_freed & ~waits_from_start]
    waiting, done = row[waits], row[waits & is_completed]
    changes = np.flatnonzero(np.isin(entries.action, (SEGMENT_GROWS, SEGMENT_SHRINKS)))
    grown = np.where(entries.action[changes] == SEGMENT_GROWS, 1, -1) * entries.num_bytes[changes]
    parts: list[tuple[IntArray, IntArray, int, IntArray | int]] = [
        (allocations.allocated[allocated], num_bytes[allocated], device, allocated),
        (allocations.freed[freed], -num_bytes[freed], device, freed),
        (allocations.freed[waiting], num_bytes[waiting], pending, waiting),
        (allocations.completed[done], -num_bytes[done], pending, done),
        # What was reserved before the first entry: what is reserved at the end, less all changes.
        (np.array([-1]), np.array([reserved_bytes - grown.sum()]), reserved, len(row)),
        (changes, grown, reserved, len(row)),
    ]
    moment, delta, pool, storage = (
        np.concatenate([np.broadcast_to(part[column], len(part[0])) for part in parts]).astype(np.int64)
        for column in range(4)
    )
    order = np.argsort(moment, kind="stable")
    order = order[delta[order] != 0]
    return moment[order], delta[order], pool[order], storage[order]


def _nanoseconds(trace: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int64]:
    """Returns the entries' times since the first. Clocks of several threads differ: no time is before the last."""
    if not trace:
        return np.zeros(1, dtype=np.int64)
    times = np.maximum.accumulate(_column(trace, "time_us", 0))
    return np.asarray((times - times[0]) * 1000)
