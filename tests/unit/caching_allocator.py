"""torch's caching allocator in a few lines: it searches, splits and merges, and writes its history as torch does.

Rules of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11) with its default settings. It knows every total after every
entry, which is the truth that reading a snapshot is held against.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

MIB = 1024**2
BASE = 0x7F4700000000


@dataclass(eq=False)
class Block:
    address: int
    size: int
    is_small: bool
    state: str = "inactive"
    requested: int = 0
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class CachingAllocator:
    expandable: bool = False
    unsplit_from: int = 2**62
    """torch's max_split_size: blocks of this size and larger are never split."""
    segments: dict[int, list[Block]] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    totals: list[tuple[int, int, int]] = field(default_factory=list)
    """Allocated, waiting and reserved bytes after each entry."""
    lowest: int = BASE

    def malloc(self, size: int, frames: list[dict[str, Any]] | None = None, metadata: str = "") -> Block:
        rounded = max(512, (size + 511) // 512 * 512)
        is_small = rounded <= MIB
        block = self._best_fit(rounded, is_small) or self._new_segment(rounded, is_small)
        rest = block.size - rounded
        if rest >= 512 if is_small or self.expandable else rest > MIB and rounded < self.unsplit_from:
            parts = self._parts(block)
            parts.insert(parts.index(block) + 1, Block(block.address + rounded, rest, is_small))
            block.size = rounded
        block.state, block.requested, block.frames = "active_allocated", size, frames or []
        self._note("alloc", block.address, size, frames=block.frames, user_metadata=metadata)
        return block

    def free(self, block: Block, *, waits: bool = False) -> None:
        block.state = "active_pending_free"
        self._note("free_requested", block.address, block.requested)
        if not waits:
            self.complete(block)

    def complete(self, block: Block) -> None:
        block.state = "inactive"
        if self.trace[-1]["action"] == "free_requested" and self.trace[-1]["addr"] == block.address:
            allocated, waiting, reserved = self.totals[-1]
            self.totals[-1] = (allocated, waiting - block.size, reserved)  # nothing came between: it did not wait
        parts = self._parts(block)
        at = parts.index(block)
        for left in (at, at - 1):
            if left >= 0 and left + 1 < len(parts) and parts[left].state == parts[left + 1].state == "inactive":
                parts[left].size += parts.pop(left + 1).size
        self._note("free_completed", block.address, block.requested)

    def empty_cache(self) -> None:
        for address, parts in list(self.segments.items()):
            if len(parts) == 1 and parts[0].state == "inactive":
                del self.segments[address]
                self._note("segment_unmap" if self.expandable else "segment_free", address, parts[0].size)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        trace = self.trace if last is None else self.trace[len(self.trace) - last :]
        segments = [
            {
                "device": 0,
                "address": address,
                "total_size": sum(block.size for block in parts),
                "stream": 0,
                "blocks": [
                    {"address": b.address, "size": b.size, "requested_size": b.requested}
                    | {"state": b.state, "frames": b.frames}
                    for b in parts
                ],
            }
            for address, parts in sorted(self.segments.items())
        ]
        settings = {"expandable_segments": self.expandable, "max_split_size": -1}
        return {"segments": segments, "device_traces": [trace], "allocator_settings": settings}

    def _parts(self, block: Block) -> list[Block]:
        return next(parts for parts in self.segments.values() if block in parts)

    def _best_fit(self, rounded: int, is_small: bool) -> Block | None:
        blocks = [block for parts in self.segments.values() for block in parts]
        fits = [b for b in blocks if b.state == "inactive" and b.is_small == is_small and b.size >= rounded]
        best = min(fits, key=lambda b: (b.size, b.address), default=None)
        if best is None or (rounded < self.unsplit_from <= best.size):
            return None
        return None if rounded >= self.unsplit_from and best.size >= rounded + 20 * MIB else best

    def _new_segment(self, rounded: int, is_small: bool) -> Block:
        size = 2 * MIB if is_small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
        self.lowest -= size  # segments may touch, as on a device
        block = Block(self.lowest, size, is_small)
        self.segments[self.lowest] = [block]
        self._note("segment_map" if self.expandable else "segment_alloc", block.address, size)
        return block

    def _note(self, action: str, address: int, size: int, **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 10**15 + len(self.trace)}
        self.trace.append(entry | {"compile_context": "N/A", "user_metadata": "", "frames": []} | more)
        blocks = [block for parts in self.segments.values() for block in parts]
        allocated = sum(block.size for block in blocks if block.state == "active_allocated")
        waiting = sum(block.size for block in blocks if block.state == "active_pending_free")
        self.totals.append((allocated, waiting, sum(block.size for block in blocks)))


def random_history(num_operations: int, seed: int = 0, *, expandable: bool = False) -> CachingAllocator:
    """A program that allocates and frees at random, some of it in use by another stream."""
    choose = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable)
    live: list[Block] = []
    waiting: list[Block] = []
    for _ in range(num_operations):
        if len(live) < 40 or choose.random() < 0.5:
            live.append(allocator.malloc(int(2 ** choose.uniform(4, 25))))
        elif choose.random() < 0.8:
            block = live.pop(choose.randrange(len(live)))
            waits = choose.random() < 0.2
            allocator.free(block, waits=waits)
            waiting += [block] if waits else []
        if waiting and choose.random() < 0.3:
            allocator.complete(waiting.pop(choose.randrange(len(waiting))))
        if choose.random() < 0.02:
            allocator.empty_cache()
    return allocator
