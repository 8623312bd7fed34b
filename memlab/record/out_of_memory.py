"""A step that ran out of memory, as plain data: the allocation that failed, and what was allocated at that moment."""

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
Source = Literal["measured", "estimated, at least"]
_FORMER_SOURCE = "estimated, at most"
"""What older records call an estimate from below."""

STATIC_CATEGORIES = ("parameters", "gradients", "optimizer state", "workspace")
_WITHIN_STEP = [CATEGORIES.index(name) for name in ("activations", "recomputed", "temporary")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAllocation:
    """One allocation that did not fit.

    Fields that a backend cannot know are None: the CPU has no reserved bytes, and only a real GPU knows what the whole
    device has and what is free of it.
    """

    phase: str
    module: str
    """The module that requested it; empty outside the model's modules."""
    nanoseconds: int
    """Time since the step's start, on the timeline's clock."""
    requested_bytes: int
    allocated_bytes: int
    limit_bytes: int
    """The most bytes that torch may reserve: the limit given to the lab, or the whole device."""
    pending_free_bytes: int = 0
    """Freed, but another stream still uses them."""
    reserved_bytes: int | None = None
    """Bytes that the allocator had reserved, after it had returned every segment without a block in use."""
    largest_free_bytes: int | None = None
    """The largest free block inside the reserved bytes that the request may take: torch keeps requests of at most 1 MiB
    in segments of their own. None also where segments are expandable: torch puts free pages together."""
    device_free_bytes: int | None = None
    """Bytes that CUDA could still give."""
    device_total_bytes: int | None = None

    @property
    def place(self) -> str:
        """Phase and module in words."""
        return place_in_words(self.phase, self.module)

    @property
    def unused_reserved_bytes(self) -> int:
        """Reserved bytes that are neither allocated nor pending: the free blocks between those in use."""
        if self.reserved_bytes is None:
            return 0
        return max(0, self.reserved_bytes - self.allocated_bytes - self.pending_free_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """Bytes used on the device outside torch: the CUDA context, libraries, other processes."""
        if self.reserved_bytes is None or self.device_free_bytes is None or self.device_total_bytes is None:
            return None
        return self.device_total_bytes - self.reserved_bytes - self.device_free_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that could have been allocated: those that were, and those that torch could still reserve."""
        if self.reserved_bytes is None:
            return self.limit_bytes
        within_limit = self.limit_bytes - self.reserved_bytes
        more = within_limit if self.device_free_bytes is None else min(self.device_free_bytes, within_limit)
        return self.allocated_bytes + self.pending_free_bytes + max(0, more)

    @property
    def step_capacity_bytes(self) -> int:
        """The most bytes that another step could allocate: without this step's fragmentation."""
        return min(self.limit_bytes, self.capacity_bytes + self.unused_reserved_bytes)

    @property
    def missing_bytes(self) -> int:
        """How many bytes fewer would have to be allocated for this one request to fit."""
        return max(0, self.allocated_bytes + self.pending_free_bytes + self.requested_bytes - self.capacity_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """The cheapest setting that would have fitted."""

    settings: MemorySettings
    peak_bytes: int
    """The step's peak under these settings: measured, or a lower bound."""
    source: Source
    """``measured``: this lab took the step under these settings. Otherwise the peak is estimated, as a lower bound."""

    def __str__(self) -> str:
        return f"{self.settings} ({self.source})"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The evidence, and what `memlab.fitting.out_of_memory_verdict` makes of it."""

    failed_allocation: FailedAllocation
    alive_by_category: dict[str, int]
    """Bytes that were allocated when the request failed, the largest first."""
    alive_by_module: dict[str, int]
    """The same bytes by the module that allocated them."""
    activations_by_module: dict[str, int]
    """Of those, what the step itself had allocated: activations, recomputed, temporary."""
    passes_in_flight: int = 1
    """Forward passes whose backward had not ended, including the current one."""
    retained_by_module: dict[str, int] = field(default_factory=dict)
    """Of `activations_by_module`, what was allocated before the step began: by earlier steps, and (without a module)
    by something else in the process."""
    verdict: Verdict | None = None
    evidence: str = ""
    """The figures that show it, in one or two lines."""
    advice: str = ""
    """What to do next."""
    suggestion: Suggestion | None = None
    """None if no known setting fits."""

    @classmethod
    def at(cls, failed: FailedAllocation, timeline: Timeline, *, passes_in_flight: int = 1) -> OutOfMemory:
        """Finds in a step's timeline what was allocated when an allocation failed."""
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
        """Parameters, gradients, optimizer state and workspaces: no recompute or activation offload frees them."""
        return sum(self.alive_by_category.get(name, 0) for name in STATIC_CATEGORIES)

    @property
    def retained_bytes(self) -> int:
        """Bytes that were allocated before the step began and are in no static category."""
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
            if suggestion.get("source") == _FORMER_SOURCE:
                suggestion = suggestion | {"source": "estimated, at least"}
            suggestion = build(Suggestion, suggestion, "suggestion", settings=settings)
        return build(cls, others, "out_of_memory", failed_allocation=failed, suggestion=suggestion)


def _by_module(timeline: Timeline, mask: Any) -> dict[str, int]:
    sums = np.zeros(len(timeline.modules), dtype=np.int64)
    head = slice(0, len(mask))
    np.add.at(sums, timeline.module[head][mask], timeline.delta_bytes[head][mask])
    order = np.argsort(-sums, kind="stable")
    return {timeline.modules[code]: int(sums[code]) for code in order if sums[code]}
