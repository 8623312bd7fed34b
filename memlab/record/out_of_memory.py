"""What was seen when a step ran out of memory, as plain data: the refused request, and what was alive then."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from memlab.config.from_json import build
from memlab.config.settings import MemorySettings
from memlab.config.validation import shortened
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, POOLS, place_in_words

Verdict = Literal["outside torch", "fragmentation", "retention", "spike", "capacity"]
Source = Literal["measured", "estimated, at most"]

STATIC_CATEGORIES = ("parameters", "gradients", "optimizer state", "workspace")
_WITHIN_STEP = [CATEGORIES.index(name) for name in ("activations", "recomputed", "temporary")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAllocation:
    """One request that a device had no room for, as its meter knew it. What only a real GPU knows is None elsewhere."""

    phase: str
    module: str
    """At work when it asked; empty outside the model's modules."""
    nanoseconds: int
    """Since the step's start, on the timeline's clock."""
    requested_bytes: int
    allocated_bytes: int
    limit_bytes: int
    """The most that torch may hold: what the lab was told, or the whole device."""
    pending_free_bytes: int = 0
    """Freed, but another stream still uses them."""
    reserved_bytes: int | None = None
    """What the allocator held, after it had given back every segment that was wholly free."""
    largest_free_bytes: int | None = None
    """The largest block that was free inside the reserved bytes; None where segments are expandable, too."""
    device_free_bytes: int | None = None
    """What CUDA still had."""
    device_total_bytes: int | None = None

    @property
    def place(self) -> str:
        """Phase and module in words."""
        return place_in_words(self.phase, self.module)

    @property
    def unused_reserved_bytes(self) -> int:
        """Reserved and neither allocated nor waiting: pieces between what is alive."""
        if self.reserved_bytes is None:
            return 0
        return max(0, self.reserved_bytes - self.allocated_bytes - self.pending_free_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """What is held on the device beside torch's reserved bytes: the CUDA context, libraries, other processes."""
        if self.reserved_bytes is None or self.device_free_bytes is None or self.device_total_bytes is None:
            return None
        return self.device_total_bytes - self.reserved_bytes - self.device_free_bytes

    @property
    def room_bytes(self) -> int:
        """The most that could have been allocated then: what was, and what torch could still have got."""
        if self.reserved_bytes is None:
            return self.limit_bytes
        within_limit = self.limit_bytes - self.reserved_bytes
        more = within_limit if self.device_free_bytes is None else min(self.device_free_bytes, within_limit)
        return self.allocated_bytes + self.pending_free_bytes + max(0, more)

    @property
    def step_room_bytes(self) -> int:
        """The most that another step could allocate: what is in pieces now, it may lay out otherwise."""
        return min(self.limit_bytes, self.room_bytes + self.unused_reserved_bytes)

    @property
    def missing_bytes(self) -> int:
        """How much less would have had to be allocated for this one request."""
        return max(0, self.allocated_bytes + self.pending_free_bytes + self.requested_bytes - self.room_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """The cheapest setting that would have fitted."""

    settings: MemorySettings
    peak_bytes: int
    """The step's peak under it: seen, or the least that it can be."""
    source: Source
    """``measured``: this lab took the step under these settings. Else the setting saves at most what is reckoned."""

    def __str__(self) -> str:
        return f"{self.settings} ({self.source})"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The evidence, and what `memlab.fitting.oom_verdict` makes of it."""

    failed_allocation: FailedAllocation
    alive_by_category: dict[str, int]
    """Allocated when the request was refused, the largest first."""
    alive_by_module: dict[str, int]
    """The same bytes by the module where they were born."""
    activations_by_module: dict[str, int]
    """Of them, what the step itself had made: activations, recomputed, temporary."""
    passes_in_flight: int = 1
    """Forward passes whose backward had not ended, the one at work counted."""
    retained_by_module: dict[str, int] = field(default_factory=dict)
    """Of those, what was alive before the step began: parts of earlier steps, and (without a module) what something
    else in the process holds."""
    verdict: Verdict | None = None
    evidence: str = ""
    """The figures that say so, in one or two lines."""
    advice: str = ""
    """What to do next."""
    suggestion: Suggestion | None = None
    """None where none of the known settings fits."""

    @classmethod
    def at(cls, failed: FailedAllocation, timeline: Timeline, *, passes_in_flight: int = 1) -> OutOfMemory:
        """Looks up in a step's timeline what was alive when a request was refused."""
        index = int(np.searchsorted(timeline.nanoseconds, failed.nanoseconds, side="right")) - 1
        index = max(index, timeline.first_step_event)
        head = slice(0, index + 1)
        within_step = np.isin(timeline.category[head], _WITHIN_STEP) & (timeline.pool[head] == POOLS.index("device"))
        from_before = timeline.storage[: timeline.num_opening_events]
        retained = within_step & np.isin(timeline.storage[head], from_before)
        return cls(
            failed_allocation=failed,
            alive_by_category=timeline.breakdown(index),
            alive_by_module=timeline.breakdown(index, by="module"),
            activations_by_module=_by_module(timeline, within_step),
            passes_in_flight=passes_in_flight,
            retained_by_module=_by_module(timeline, retained),
        )

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients, optimizer state and workspaces: alive whatever is recomputed or offloaded."""
        return sum(self.alive_by_category.get(name, 0) for name in STATIC_CATEGORIES)

    @property
    def retained_bytes(self) -> int:
        """What was alive before the step began and is none of the static categories."""
        return sum(self.retained_by_module.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        values = asdict(self)
        values = {"refusal": values.pop("failed_allocation")} | values
        if self.suggestion is not None:
            values["suggestion"]["settings"] = self.suggestion.settings.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> OutOfMemory:
        """Builds it from what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown, or not of its type.
        """
        if not isinstance(values, dict):
            raise ValueError(f"out_of_memory is {shortened(values)}, must be an object")
        others = {name: value for name, value in values.items() if name not in ("refusal", "suggestion")}
        failed = build(FailedAllocation, values.get("refusal"), "refusal")
        suggestion = values.get("suggestion")
        if suggestion is not None:
            settings = MemorySettings.from_dict(suggestion.get("settings") if isinstance(suggestion, dict) else None)
            suggestion = build(Suggestion, suggestion, "suggestion", settings=settings)
        return build(cls, others, "out_of_memory", failed_allocation=failed, suggestion=suggestion)


def _by_module(timeline: Timeline, mask: Any) -> dict[str, int]:
    sums = np.zeros(len(timeline.modules), dtype=np.int64)
    head = slice(0, len(mask))
    np.add.at(sums, timeline.module[head][mask], timeline.delta_bytes[head][mask])
    order = np.argsort(-sums, kind="stable")
    return {timeline.modules[code]: int(sums[code]) for code in order if sums[code]}
