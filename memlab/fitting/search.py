"""The search for a front: which settings are predicted, each by a step of its own, and which need not be.

What offload modules save and move adds up, module by module and under any recompute (to 0.2 % where it was tried,
`labs/LOG.md`). So a setting is reckoned from its parts, a little lighter than they tell. Where it is still not lighter
in anything than a step that was predicted, it is on no front, and is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.bounds import recomputed_operations
from memlab.fitting.candidates import added_offload, candidates, without_added_offload
from memlab.fitting.fit import Step, fits, moved_bytes
from memlab.fitting.front import Point, Search, criteria, is_covered
from memlab.record.step_record import StepRecord

_OPTIMISM = 1.05
"""By how much more a module may save beside others than it did alone."""


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C in a search that had predicted something.

    Args:
        found: What it had found, cut short.
    """

    def __init__(self, found: Search) -> None:
        super().__init__()
        self.found = found


def search(
    base: MemorySettings,
    scenario: Scenario,
    step: Step,
    room_bytes: int,
    *,
    outside_torch_bytes: int = 0,
    resolution_bytes: int = 1,
    max_steps: int | None = None,
    on_point: Callable[[Point, int], object] = lambda point, num_left: None,
) -> Search:
    """Predicts settings until no other can be on the front.

    Args:
        base: What each setting does at least.
        scenario: What is run.
        step: Takes a steady step of it.
        room_bytes: What torch may hold.
        outside_torch_bytes: What else is on the GPU; kept in the result.
        resolution_bytes: As in `Search`.
        max_steps: Settings that are predicted at most; None is as many as it takes.
        on_point: Called with each point, and how many settings may still follow.

    Raises:
        SearchInterrupted: At Ctrl-C, with what was found until then.
    """
    walk = _Walk(base, scenario, room_bytes, resolution_bytes)

    def found() -> Search:
        return Search(
            scenario=scenario,
            base=base,
            room_bytes=room_bytes,
            outside_torch_bytes=outside_torch_bytes,
            resolution_bytes=resolution_bytes,
            points=tuple(walk.points.values()),
            num_candidates=walk.num_candidates,
            num_reckoned=walk.num_candidates - len(walk.points) - len(walk.pending),
            num_left=len(walk.pending),
        )

    try:
        for settings in walk:
            if max_steps is not None and len(walk.points) >= max_steps:
                break
            record = step(settings, None)
            if walk.is_idle(record):
                continue
            point = Point(
                settings=settings,
                peak_allocated_bytes=record.peak_allocated_bytes,
                recomputed_operations=recomputed_operations(settings, scenario),
                moved_bytes=moved_bytes(record),
                host_bytes=record.host_bytes,
                fits=fits(record, step, room_bytes),
            )
            walk.take(point)
            on_point(point, len(walk.pending))
    except KeyboardInterrupt as interrupt:
        if not walk.points:
            raise
        raise SearchInterrupted(found()) from interrupt
    return found()


class _Walk:
    """Which setting is predicted next: first those that others are reckoned from, then what is cheap and would fit."""

    def __init__(self, base: MemorySettings, scenario: Scenario, room_bytes: int, resolution: int) -> None:
        wanted = candidates(base, scenario)
        self.points: dict[MemorySettings, Point] = {}
        self.pending: dict[MemorySettings, Point | None] = dict.fromkeys(wanted)
        """With what they are reckoned to be; None before that can be told."""
        self.num_candidates = len(wanted)
        self._base, self._room_bytes, self._resolution = base, room_bytes, resolution
        self._num_layers = scenario.num_layers_of_chunk
        self._without_effect: set[str] | None = None

    def __iter__(self) -> Iterator[MemorySettings]:
        heads = [settings for settings in self.pending if not added_offload(settings, self._base)]
        for settings in [*heads, *self._alone().values()]:
            if settings in self.pending:
                yield settings
        self._reckon()
        while self.pending:
            yield min(self.pending, key=self._order)

    def take(self, point: Point) -> None:
        """Keeps a point, and gives up what is reckoned to be no lighter in anything."""
        self.pending.pop(point.settings)
        self.points[point.settings] = point
        self._give_up([point])

    def is_idle(self, record: StepRecord) -> bool:
        """Whether something more than in the base was seen to do nothing; whatever has it is then no candidate."""
        if self._without_effect is None:
            self._without_effect = set(record.without_effect)
        idle = set(record.without_effect) - self._without_effect
        head = self._head(record.settings)
        if not idle:
            return False
        for settings in list(self.pending):
            names = {f"offload_modules:{name}" for name in added_offload(settings, self._base)}
            alike = head in (self._base, self._head(settings)) and names & idle
            if settings == record.settings or alike:
                del self.pending[settings]
                self.num_candidates -= 1
        return True

    def _alone(self) -> dict[str, MemorySettings]:
        """Returns for each offload module the smallest set beyond the base's that has it."""
        alone: dict[str, MemorySettings] = {}
        for settings in sorted(self.pending, key=lambda each: len(added_offload(each, self._base))):
            if self._head(settings) == self._base:
                for name in added_offload(settings, self._base):
                    alone.setdefault(name, settings)
        return alone

    def _head(self, settings: MemorySettings) -> MemorySettings:
        return without_added_offload(settings, self._base)

    def _reckon(self) -> None:
        saved: dict[str, float] = {}
        moved: dict[str, int] = {}
        base = self.points[self._base]
        tried = [point for point in self.points.values() if self._head(point.settings) == self._base]
        for point in sorted(tried, key=lambda each: len(added_offload(each.settings, self._base))):
            names = added_offload(point.settings, self._base)
            for name in names:
                others = [other for other in names if other != name]
                if name not in saved and all(other in saved for other in others):
                    less = base.peak_allocated_bytes - point.peak_allocated_bytes
                    saved[name] = max(0.0, less * _OPTIMISM - sum(saved[other] for other in others))
                    moved[name] = point.moved_bytes - base.moved_bytes - sum(moved[other] for other in others)
        for settings in list(self.pending):
            head = self.points.get(self._head(settings))
            names = added_offload(settings, self._base)
            if head is None or not set(names) <= set(saved):
                continue  # cannot be reckoned: it is predicted
            frees = sum(saved[name] for name in names) * self._share_of_layers(settings)
            peak = head.peak_allocated_bytes - round(frees)
            self.pending[settings] = replace(
                head,
                settings=settings,
                peak_allocated_bytes=peak,
                moved_bytes=head.moved_bytes + sum(moved[name] for name in names),
                fits=peak <= self._room_bytes,
            )
        self._give_up(list(self.points.values()))

    def _share_of_layers(self, settings: MemorySettings) -> float:
        """Offload frees nothing of the layers that are recomputed, and nothing of the last; one is put on top."""
        if settings.recompute_method != "block":
            return 1.0
        left = self._num_layers - (settings.recompute_num_layers or 0) + 1
        return min(1.0, left / max(1, self._num_layers - 1))

    def _give_up(self, points: list[Point]) -> None:
        for settings, reckoned in list(self.pending.items()):
            if reckoned is not None and any(self._is_no_lighter(reckoned, point) for point in points):
                del self.pending[settings]

    def _is_no_lighter(self, reckoned: Point, point: Point) -> bool:
        ours, theirs = (
            criteria(each.peak_allocated_bytes, each.fits, each.work, self._room_bytes, self._resolution)
            for each in (reckoned, point)
        )
        if ours == theirs:
            return point.peak_allocated_bytes <= reckoned.peak_allocated_bytes
        return is_covered(ours, theirs)

    def _order(self, settings: MemorySettings) -> tuple[Any, ...]:
        reckoned = self.pending[settings]
        return (True,) if reckoned is None else (not reckoned.fits, reckoned.work, reckoned.peak_allocated_bytes)
