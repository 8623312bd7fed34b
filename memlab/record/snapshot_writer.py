"""A timeline as a memory snapshot of torch, for https://pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py``.

A timeline contains no addresses, so they are made up: storages are placed one after the other in one segment, and an
address is used again by the next storage of its size. How full and how fragmented that segment is says nothing about
the allocator. Neither the reserved bytes nor those of the host are written.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memlab.allocator.rules import MIN_BLOCK_BYTES
from memlab.atomic_files import written_aside
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_DEVICE, _PENDING = POOLS.index("device"), POOLS.index("pending_free")
_BASE_ADDRESS = 0x7F0000000000


def write_snapshot(timeline: Timeline, path: Path | str) -> Path:
    """Writes a pickle that memory_viz opens.

    Args:
        timeline: Its opening events are written as allocations at the head; otherwise memory_viz would show them
            without labels.
        path: Path of the file, in a folder that exists.
    """
    path = Path(path)
    with written_aside(path) as aside:
        # Protocol 4 is the newest that MemoryViz.js reads.
        aside.write_bytes(pickle.dumps(_Writer(timeline).snapshot(), protocol=4))
    return path


class _Writer:
    """Replays a timeline at made-up addresses."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._trace: list[dict[str, Any]] = []
        self._placed: dict[int, tuple[int, int, int]] = {}
        """Address, bytes and row of the allocation, by storage."""
        self._waiting: dict[int, tuple[int, int, int]] = {}
        self._free: dict[int, list[int]] = {}
        """Addresses that can be used again, by the bytes of their place."""
        self._top = _BASE_ADDRESS
        self._frames: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns what ``torch.cuda.memory._snapshot`` would, and a note by which memlab recognizes its own export."""
        timeline = self._timeline
        (rows,) = np.nonzero(np.isin(timeline.pool, (_DEVICE, _PENDING)))
        opening = rows < timeline.num_opening_events
        self._replay(rows[opening])
        opening_entries = len(self._trace)
        # MemoryViz.js (pytorch c4b5ac7, annotate_snapshot) trips over categories of which none is "unknown".
        marker = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": []}
        self._trace.append(marker | {"category": "unknown"})
        self._replay(rows[~opening])
        return {
            "segments": self._segments(),
            "device_traces": [self._trace],
            "allocator_settings": {},
            "memlab": {"opening_entries": opening_entries},
        }

    def _replay(self, rows: np.ndarray[Any, Any]) -> None:
        names = ("pool", "storage", "delta_bytes")
        pool, storages, delta_bytes = (getattr(self._timeline, name)[rows] for name in names)
        # A free that is followed by the same storage in `pending_free`: another stream still uses it.
        waits = (np.roll(storages, -1) == storages) & (np.roll(pool, -1) == _PENDING)
        columns = (values.tolist() for values in (rows, pool, storages, delta_bytes, waits))
        for row, code, storage, delta, is_waiting in zip(*columns, strict=True):
            if code == _DEVICE:
                self._resize(row, storage, delta, waits=is_waiting)
            elif delta < 0:
                self._complete(row, self._waiting.pop(storage))
            elif storage not in self._waiting:
                self._waiting[storage] = (self._take(delta), delta, row)

    def _resize(self, row: int, storage: int, delta: int, *, waits: bool) -> None:
        """Writes an allocation, a free, or both: a storage that grows or shrinks gets another address."""
        placed = self._placed.pop(storage, None)
        num_bytes = delta + (placed[1] if placed is not None else 0)
        assert num_bytes >= 0, f"storage {storage} is freed without having been allocated"
        if placed is not None:
            self._note("free_requested", row, *placed[:2])
            if waits and not num_bytes:
                self._waiting[storage] = placed
            else:
                self._complete(row, placed)
        if num_bytes:
            self._placed[storage] = (self._take(num_bytes), num_bytes, row)
            self._note("alloc", row, *self._placed[storage][:2])

    def _complete(self, row: int, place: tuple[int, int, int]) -> None:
        address, num_bytes, _ = place
        self._note("free_completed", row, address, num_bytes)
        self._free.setdefault(_rounded(num_bytes), []).append(address)

    def _take(self, num_bytes: int) -> int:
        free = self._free.get(_rounded(num_bytes))
        if free:
            return free.pop()
        address, self._top = self._top, self._top + _rounded(num_bytes)
        return address

    def _note(self, action: str, row: int, address: int, num_bytes: int) -> None:
        self._trace.append(
            {
                "action": action,
                "addr": address,
                "size": num_bytes,
                "stream": 0,
                "time_us": int(self._timeline.nanoseconds[row]) // 1000,
                **self._labels(row),
            }
        )

    def _labels(self, row: int) -> dict[str, Any]:
        """Returns what memory_viz shows under the pointer, as frames, and colours, by category."""
        timeline = self._timeline
        module, category, phase = (int(column[row]) for column in (timeline.module, timeline.category, timeline.phase))
        names = {"module": timeline.modules[module], "category": CATEGORIES[category], "phase": PHASES[phase]}
        if (module, category, phase) not in self._frames:
            frames = [{"filename": kind, "line": 0, "name": name or "not known"} for kind, name in names.items()]
            self._frames[module, category, phase] = frames
        frames = self._frames[module, category, phase]
        return {"user_metadata": names["module"], "category": names["category"], "frames": frames}

    def _segments(self) -> list[dict[str, Any]]:
        blocks = list(self._blocks())
        if not blocks:
            return []
        active = [block for block in blocks if block["state"] != "inactive"]
        allocated = [block for block in active if block["state"] == "active_allocated"]
        segment = {
            "device": 0,
            "address": _BASE_ADDRESS,
            "total_size": self._top - _BASE_ADDRESS,
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in allocated),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        return [segment]

    def _blocks(self) -> Iterator[dict[str, Any]]:
        """Yields the blocks at the end and the gaps between them, in the order of their addresses."""
        places = [(*place, "active_allocated") for place in self._placed.values()]
        places += [(*place, "active_pending_free") for place in self._waiting.values()]
        at = _BASE_ADDRESS
        for address, num_bytes, row, state in sorted(places):
            if at < address:
                yield _gap(at, address)
            block = {"address": address, "size": num_bytes, "requested_size": num_bytes, "state": state}
            yield block | self._labels(row)
            at = address + num_bytes
        if at < self._top:
            yield _gap(at, self._top)


def _gap(start: int, end: int) -> dict[str, Any]:
    return {"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}


def _rounded(num_bytes: int) -> int:
    """Returns the bytes of the place that a storage occupies."""
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
