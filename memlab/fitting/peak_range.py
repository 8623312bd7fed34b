"""The two ends of a predicted peak: what memlab knows only as a bound makes it a range, and no bound decides alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from memlab.config.backend_kind import KINDS
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.measured_margin import measured_margin
from memlab.jobs.bounds import bound_bytes, categories_it_can_take, changes_the_step, freezes_parameters
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.frameworks.keys import Effect
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.vocabulary import CATEGORIES, PHASES, POOLS, RESIDUAL_CATEGORIES

KEPT_GATHERS = "kept FP8 gathers"
"""See `StepRecord.kept_gather_bytes`."""
UNCOLLECTED = "uncollected copies"
"""See `StepRecord.uncollected_bytes`."""
MEASURED_MARGIN = "measured margin"
"""See `memlab.fitting.measured_margin`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Something whose bytes memlab does not know exactly."""

    name: str
    """A key of the job that memlab does not model, or `KEPT_GATHERS`, `UNCOLLECTED` or `MEASURED_MARGIN`."""
    effect: Effect
    """How the real peak differs from the predicted one."""
    num_bytes: int | None
    """By how much at most; None if that is not known."""
    categories: tuple[str, ...] = ()
    """Where it takes bytes away, if that is known."""

    @property
    def may_add(self) -> bool:
        """Whether the real peak may be higher because of it."""
        return self.effect != "less"

    @property
    def may_take(self) -> bool:
        """Whether the real peak may be lower because of it."""
        return self.effect != "more"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRange:
    """Between which two ends the real peak of a step is."""

    peak_allocated_bytes: int
    """As predicted, or as measured."""
    lower_bytes: int
    """The real peak is at least this, as far as the bytes of the causes are known."""
    upper_bytes: int
    """The real peak is at most this, as far as the bytes of the causes are known."""
    causes: tuple[Cause, ...] = ()

    @classmethod
    def of(cls, record: StepRecord, not_modelled: Sequence[NotModelled] = ()) -> Self:
        """Adds up what is known only as a bound. A measured step has none, and neither has a prediction for a CPU.

        Args:
            record: Of a step without a limit. With its timeline, the lower end is nearer to the peak.
        """
        peak = record.peak_allocated_bytes
        if not KINDS[record.backend].is_prediction:
            return cls.exactly(peak)
        causes = list(_causes(record, not_modelled))
        highest = peak + sum(cause.num_bytes or 0 for cause in causes if cause.may_add)
        margin = round(highest * measured_margin(record.scenario).share)
        return cls(
            peak_allocated_bytes=peak,
            lower_bytes=_lower_bytes(record, [cause for cause in causes if cause.may_take]),
            upper_bytes=highest + margin,
            causes=(*causes, Cause(name=MEASURED_MARGIN, effect="more", num_bytes=margin)),
        )

    @classmethod
    def exactly(cls, num_bytes: int) -> Self:
        """Returns the range of a peak that is known."""
        return cls(peak_allocated_bytes=num_bytes, lower_bytes=num_bytes, upper_bytes=num_bytes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Builds a range from what `to_dict` returned."""
        causes = tuple(Cause(**cause | {"categories": tuple(cause["categories"])}) for cause in values["causes"])
        return cls(**{name: values[name] for name in cls.__slots__ if name != "causes"}, causes=causes)

    @property
    def named_causes(self) -> tuple[Cause, ...]:
        """The causes without the measured margin, which every prediction has."""
        return tuple(cause for cause in self.causes if cause.name != MEASURED_MARGIN)

    @property
    def is_predicted(self) -> bool:
        """Whether real steps may need more, as they did where they were measured."""
        return bool(self.causes)

    @property
    def is_exact(self) -> bool:
        """Whether the peak itself is known, apart from the measured margin."""
        return not self.named_causes

    @property
    def more_bytes(self) -> int:
        """What the named causes add to the peak at most, as far as their bytes are known."""
        return sum(cause.num_bytes or 0 for cause in self.named_causes if cause.may_add)

    @property
    def less_bytes(self) -> int:
        """What the causes take from the peak at most, as far as their bytes are known."""
        return self.peak_allocated_bytes - self.lower_bytes

    @property
    def may_be_higher(self) -> bool:
        """Whether the real peak may be above the upper end, because a cause adds bytes that are not known."""
        return any(cause.may_add and cause.num_bytes is None for cause in self.causes)

    @property
    def may_be_lower(self) -> bool:
        """Whether the real peak may be below the lower end, because a cause takes bytes that are not known."""
        return any(cause.may_take and cause.num_bytes is None for cause in self.causes)

    def __str__(self) -> str:
        lower = " or less" if self.may_be_lower else ""
        upper = " or more" if self.may_be_higher else ""
        return f"{format_bytes(self.lower_bytes)}{lower} to {format_bytes(self.upper_bytes)}{upper}"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self) | {"may_be_higher": self.may_be_higher, "may_be_lower": self.may_be_lower}


def with_lower_end(
    not_modelled: Iterable[NotModelled], scenario: Scenario, settings: MemorySettings
) -> tuple[NotModelled, ...]:
    """Returns what a job does so that every effect has a lower end: where that is not known, it only adds.

    The largest workload that may fit is found with it. With bytes of unknown size taken away, there is no largest one.
    """
    return tuple(
        replace(one, effect="more") if _has_no_lower_end(one, scenario, settings) else one for one in not_modelled
    )


def _has_no_lower_end(one: NotModelled, scenario: Scenario, settings: MemorySettings) -> bool:
    if one.effect == "more" or not changes_the_step(one.key):
        return False
    if one.effect == "less" and categories_it_can_take(one.key):
        return False
    return one.effect == "unknown" or bound_bytes(one, scenario, settings) is None


def _causes(record: StepRecord, not_modelled: Iterable[NotModelled]) -> Iterator[Cause]:
    if record.kept_gather_bytes:
        yield Cause(name=KEPT_GATHERS, effect="more", num_bytes=record.kept_gather_bytes)
    if record.uncollected_bytes:
        where = ("optimizer state",)
        yield Cause(name=UNCOLLECTED, effect="less", num_bytes=record.uncollected_bytes, categories=where)
    for one in not_modelled:
        if not changes_the_step(one.key):
            continue
        cause = _not_modelled(one, record)
        if cause.num_bytes != 0:
            yield cause


def _not_modelled(one: NotModelled, record: StepRecord) -> Cause:
    bound = None if one.effect == "unknown" else bound_bytes(one, record.scenario, record.settings)
    categories = categories_it_can_take(one.key) if one.effect == "less" else ()
    if categories:
        is_freezing = freezes_parameters(one.key)
        there = record.peak_allocated_bytes - _staying_bytes(record, categories, computes_all=is_freezing)
        bound = there if bound is None or is_freezing else min(bound, there)
    return Cause(name=one.key, effect=one.effect, num_bytes=bound, categories=categories or ())


def _lower_bytes(record: StepRecord, causes: Sequence[Cause]) -> int:
    """Returns the lower end of a peak.

    Several causes together take no more from a category than is there.
    """
    peak = record.peak_allocated_bytes
    taken = {name for cause in causes for name in cause.categories}
    taking_activations = [cause for cause in causes if set(RESIDUAL_CATEGORIES) & set(cause.categories)]
    computes_all = all(freezes_parameters(cause.name) for cause in taking_activations)
    stays = _staying_bytes(record, taken, computes_all=computes_all)
    from_categories, others = (
        sum(cause.num_bytes or 0 for cause in causes if bool(cause.categories) is has_categories)
        for has_categories in (True, False)
    )
    return max(0, max(peak - from_categories, stays) - others)


def _staying_bytes(record: StepRecord, taken: Collection[str], *, computes_all: bool) -> int:
    """Returns what is on the device at the peak, without the categories from which causes can take bytes away.

    Where every layer computes what it does in the predicted step, as frozen weights do, the largest tensor of the
    forward pass is made too.
    """
    stays = sum(size for name, size in record.peak_by_category.items() if name not in taken)
    if record.timeline is None or not computes_all:
        return stays
    return max(stays, _least_of_forward(record.timeline, taken))


def _least_of_forward(timeline: Timeline, taken: Collection[str]) -> int:
    """Returns what is on the device with the largest tensor of the forward pass, without what causes can take."""
    in_step = np.arange(len(timeline)) >= timeline.num_opening_events
    in_forward = in_step & (timeline.pool == POOLS.index("device")) & (timeline.phase == PHASES.index("forward"))
    if not in_forward.any():
        return 0
    largest = int(np.argmax(np.where(in_forward, timeline.delta_bytes, 0)))
    stays = sum(size for name, size in timeline.breakdown(largest).items() if name not in taken)
    is_taken = CATEGORIES[timeline.category[largest]] in taken
    return stays + (int(timeline.delta_bytes[largest]) if is_taken else 0)
