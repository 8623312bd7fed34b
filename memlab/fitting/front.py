"""The Pareto front of a model's memory settings: allocated peak against the two kinds of extra work.

Operations that are made twice and bytes that move are never added up: no rate between them holds for all machines. So
a setting is on the front if no other is as light in all three: peak, operations, bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One setting, as a step of its own was predicted."""

    settings: MemorySettings
    peak_allocated_bytes: int
    recomputed_operations: float
    """That backward makes a second time for one token, over the layers of the rank."""
    moved_bytes: int
    """To the host and back, in a step and between two."""
    host_bytes: int
    """The most that is held on the host."""
    fits: bool
    """Whether torch's allocator gets through the step with the room that there is."""

    @property
    def work(self) -> tuple[float, int]:
        """The two kinds of extra work."""
        return self.recomputed_operations, self.moved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The points that were found, and what was left out."""

    scenario: Scenario
    base: MemorySettings
    room_bytes: int
    """That torch may hold."""
    outside_torch_bytes: int
    """Estimated, of a whole GPU, beside that room."""
    resolution_bytes: int
    """Peaks are told apart by this much, counted from the room; 1 tells all apart."""
    points: tuple[Point, ...]
    """In the order in which they were predicted, the base first."""
    num_candidates: int
    num_reckoned: int
    """Settings without a step: what they would be was reckoned, and is on no front."""
    num_left: int = 0
    """Settings that might be on the front and were not tried, because the search was cut short."""

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other is as light as in everything, the highest peak first."""
        on_front = [point for point in self.points if not any(self._beats(other, point) for other in self.points)]
        return tuple(sorted(on_front, key=lambda point: (-point.peak_allocated_bytes, point.work)))

    @property
    def cheapest(self) -> tuple[Point, ...]:
        """Of the front, what fits with no more of either work than another that fits, the least recomputed first."""
        fitting = [point for point in self.front if point.fits]
        least = [
            point
            for point in fitting
            if not any(other.work != point.work and is_covered(point.work, other.work) for other in fitting)
        ]
        return tuple(sorted(least, key=lambda point: point.work))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values; a point also says whether it is on the front, and of the cheapest that fit."""
        front, cheapest = self.front, self.cheapest
        points = [
            asdict(point)
            | {"settings": point.settings.to_dict(), "on_front": point in front, "is_cheapest": point in cheapest}
            for point in self.points
        ]
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"scenario": self.scenario.to_dict(), "base": self.base.to_dict(), "points": points}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Builds a search from what `to_dict` returned."""
        points = tuple(
            Point(**{name: point[name] for name in Point.__slots__} | _settings(point)) for point in values["points"]
        )
        scenario, base = Scenario.from_dict(values["scenario"]), MemorySettings.from_dict(values["base"])
        return cls(**values | {"scenario": scenario, "base": base, "points": points})

    def _beats(self, other: Point, point: Point) -> bool:
        ours, theirs = self._criteria(point), self._criteria(other)
        if ours == theirs:
            # As good as each other: the lower peak, or the one that was first.
            mine = point.peak_allocated_bytes, self.points.index(point)
            return (other.peak_allocated_bytes, self.points.index(other)) < mine
        return is_covered(ours, theirs)

    def _criteria(self, point: Point) -> tuple[float, ...]:
        return criteria(point.peak_allocated_bytes, point.fits, point.work, self.room_bytes, self.resolution_bytes)


def default_resolution_bytes(gpu_memory_bytes: int) -> int:
    """Returns how far two peaks are apart that a reader wants told apart: 1.25 GiB of 80 GiB."""
    return max(1, gpu_memory_bytes // 64)


def criteria(
    peak_bytes: int, fits: bool, work: tuple[float, int], room_bytes: int, resolution_bytes: int
) -> tuple[float, ...]:
    """Returns what a front compares; less is better, and what fits stands below what does not."""
    steps_above_room = -((room_bytes - peak_bytes) // resolution_bytes)
    return steps_above_room if fits else max(1, steps_above_room), *work


def is_covered(ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    """Whether the others are no heavier in anything."""
    return all(other <= own for own, other in zip(ours, theirs, strict=True))


def _settings(values: dict[str, Any]) -> dict[str, MemorySettings]:
    return {"settings": MemorySettings.from_dict(values["settings"])}
