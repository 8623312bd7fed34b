"""The difference of a predicted and a measured allocated peak, in terms that add up to it to the byte.

A peak is the sum of what was requested, by category and by the module that requested it, and of what the allocator
added to that. A term compares one of these parts in both steps. If the two steps peak at different moments, it compares
the part at the peak of the one with the part at the peak of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.config.backend_kind import KINDS
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, POOLS

ROUNDING = "allocator rounding"
"""What the allocator adds to the requests: each is rounded to 512 bytes, and remainders of up to 1 MiB stay unsplit."""
TERM_NAMES = (ROUNDING, *CATEGORIES)

_NO_TERMS = "predicted and measured are not split into terms"
_NUM_NAMED = 3
_WITHOUT_VALUES = ("seed", "routing")
"""What decides values in a scenario: a prediction has none, and chooses the routing instead of the router."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of both peaks."""

    name: str
    """One of `TERM_NAMES`."""
    module: str | None
    """What allocated the bytes; empty: no module of the model, None: any module."""
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Measured less predicted."""
        return self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakDifference:
    """From a predicted allocated peak to the measured one."""

    predicted: StepRecord = field(repr=False)
    measured: StepRecord = field(repr=False)
    terms: tuple[Term, ...]
    """Every part of either peak, the largest difference first; their differences add up to `difference_bytes`."""
    rounding_is_known: bool
    """Whether both timelines contain the rounding; else it is part of the categories, not a term of its own."""
    predicted_peak: str | None
    """The moment of the predicted peak in words, such as ``backward of output_layer``; None without a timeline."""
    measured_peak: str | None
    predicted_there_bytes: int | None
    """The most that is predicted at `measured_peak`; None where that is not known, or no such moment is predicted."""

    @property
    def difference_bytes(self) -> int:
        """Measured less predicted: above 0, the prediction was too low."""
        return self.measured.peak_allocated_bytes - self.predicted.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values; terms without a difference are left out."""
        terms = [
            {
                "name": term.name,
                "module": term.module,
                "predicted_bytes": term.predicted_bytes,
                "measured_bytes": term.measured_bytes,
                "difference_bytes": term.difference_bytes,
            }
            for term in self.terms
            if term.difference_bytes
        ]
        return {
            "predicted_bytes": self.predicted.peak_allocated_bytes,
            "measured_bytes": self.measured.peak_allocated_bytes,
            "difference_bytes": self.difference_bytes,
            "rounding_is_known": self.rounding_is_known,
            "predicted_peak": self.predicted_peak,
            "measured_peak": self.measured_peak,
            "predicted_there_bytes": self.predicted_there_bytes,
            "terms": terms,
        }


def predicted_and_measured(records: Sequence[StepRecord]) -> tuple[StepRecord, StepRecord] | None:
    """Returns the simulated record and the other one, if there is one of each and no more."""
    predicted = [record for record in records if KINDS[record.backend].is_prediction]
    measured = [record for record in records if not KINDS[record.backend].is_prediction]
    return (predicted[0], measured[0]) if len(predicted) == len(measured) == 1 else None


def difference_of(records: Sequence[StepRecord]) -> PeakDifference | None:
    """Splits the difference of a prediction and a measurement.

    Args:
        records: Of any steps. Without timelines the terms are the categories alone.

    Returns:
        None if the records are not two steps of which one is simulated, or cannot be split: see `obstacles`.
    """
    pair = predicted_and_measured(records)
    if pair is None or obstacles(records):
        return None
    timelines = [record.timeline for record in pair if record.timeline is not None and len(record.timeline)]
    both = timelines if len(timelines) == len(pair) else []
    rounding_is_known = bool(both) and all(timeline.rounding_bytes is not None for timeline in both)
    parts: list[dict[tuple[str, str | None], int]] = [
        {(name, None): size for name, size in record.peak_by_category.items()} for record in pair
    ]
    if both:
        common = set(both[0].modules) & set(both[1].modules)
        parts = [_folded(_parts(timeline, apart=rounding_is_known), common) for timeline in both]
    predicted, measured = parts
    terms = [
        Term(name=key[0], module=key[1], predicted_bytes=predicted.get(key, 0), measured_bytes=measured.get(key, 0))
        for key in dict.fromkeys([*predicted, *measured])
    ]
    peaks = [timeline.place(timeline.peak_index()) for timeline in both]
    return PeakDifference(
        predicted=pair[0],
        measured=pair[1],
        terms=tuple(sorted(terms, key=lambda term: -abs(term.difference_bytes))),
        rounding_is_known=rounding_is_known,
        predicted_peak=peaks[0] if both else None,
        measured_peak=peaks[1] if both else None,
        predicted_there_bytes=_most_at(*both) if both else None,
    )


def obstacles(records: Sequence[StepRecord]) -> list[str]:
    """Says why a prediction and a measurement have no terms; empty if they have, or if there is no such pair."""
    pair = predicted_and_measured(records)
    if pair is None:
        return []
    predicted, measured = (dict(_values(record)) for record in pair)
    differing = [
        f"{name} ({predicted.get(name)} predicted, {measured.get(name)} measured)"
        for name in {**predicted, **measured}
        if predicted.get(name) != measured.get(name)
    ]
    if len(differing) > _NUM_NAMED:
        differing[_NUM_NAMED:] = [f"{len(differing) - _NUM_NAMED} more"]
    words = []
    if differing:
        words.append(f"{_NO_TERMS}: the two differ in {', '.join(differing)}; take the same step on both")
    if any(record.status != "ok" for record in pair):
        words.append(f"{_NO_TERMS}: a step did not finish; take two steps that do")
    return words


def _values(record: StepRecord) -> Iterator[tuple[str, object]]:
    """What has to be equal in both."""
    scenario = {name: value for name, value in record.scenario.to_dict().items() if name not in _WITHOUT_VALUES}
    kind = {name: getattr(record, name) for name in ("forward_only", "is_steady")}
    for name, value in (scenario | record.settings.to_dict() | kind).items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", size) for inner, size in value.items())
        else:
            yield name, value


def _parts(timeline: Timeline, *, apart: bool) -> dict[tuple[str, str | None], int]:
    """Splits the peak by category and module; with `apart`, the rounding is a part of its own."""
    head = slice(0, timeline.peak_index() + 1)
    on_device = timeline.pool[head] == POOLS.index("device")
    sizes, rounding = timeline.delta_bytes[head][on_device], np.int64(0)
    if apart:
        assert timeline.rounding_bytes is not None
        rounding = timeline.rounding_bytes[head][on_device].sum()
        sizes = sizes - timeline.rounding_bytes[head][on_device]
    sums = np.zeros((len(CATEGORIES), len(timeline.modules)), dtype=np.int64)
    np.add.at(sums, (timeline.category[head][on_device], timeline.module[head][on_device]), sizes)
    parts: dict[tuple[str, str | None], int] = {
        (CATEGORIES[category], timeline.modules[module]): int(sums[category, module])
        for category, module in np.argwhere(sums)
    }
    return parts | ({(ROUNDING, None): int(rounding)} if apart else {})


def _folded(parts: dict[tuple[str, str | None], int], common: set[str]) -> dict[tuple[str, str | None], int]:
    """Adds what a module has that only one side knows to the module around it that both sides know.

    Transformer Engine's attention contains modules that no other has. Workspaces belong to no module: the first module
    that needs one allocates it.
    """
    folded: dict[tuple[str, str | None], int] = {}
    for (name, module), size in parts.items():
        place = None if name == "workspace" else module
        while place and place not in common:
            place = place.rpartition(".")[0]
        folded[name, place] = folded.get((name, place), 0) + size
    return folded


def _most_at(predicted: Timeline, measured: Timeline) -> int | None:
    """Returns the most that is predicted at the place where the measured step peaks."""
    peak = measured.peak_index()
    name = measured.modules[measured.module[peak]]
    if name not in predicted.modules:
        return None
    there = predicted.phase == measured.phase[peak]
    there &= (predicted.module == predicted.modules.index(name)) & (predicted.pool == POOLS.index("device"))
    there[: predicted.first_step_event] = False
    return int(predicted.total_bytes()[there].max()) if there.any() else None
