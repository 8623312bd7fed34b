"""The Pareto front of a model's memory settings: allocated peak, recomputed FLOPs, bytes transferred.

FLOPs and bytes are never combined into one cost: no rate between them holds for all machines. So a setting is on the
front if no other is at least as good on all three.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import VERDICTS, Verdict, basis_of, verdict_margin
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.recompute_cost import recomputed_share
from memlab.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One setting, and what a step under it was predicted to need."""

    settings: MemorySettings
    rank: int = 0
    """The worst of the ranks that were judged: one that does not fit, or the one with the highest peak."""
    peak_allocated_bytes: int
    """The highest of the ranks. Each of the other figures, too, is the largest of the ranks."""
    recomputed_operations: float
    """FLOPs that backward recomputes for one token, over the layers of the rank."""
    transferred_bytes: int
    """To the host, and back again, in a step and between two."""
    host_bytes: int
    """The most that is on the host."""
    verdict: Verdict
    """Whether torch's allocator completes the step within the limit."""
    peak_range: PeakRange | None = None
    """Both ends of the highest peak; None if it is estimated."""
    peak_phase: str = ""
    """Phase of the highest peak, of `memlab.vocabulary.PHASES`: what a setting frees in another one lowers no peak."""

    @property
    def fits(self) -> bool:
        """Whether the predicted step completes: it fits, or may fit."""
        return self.verdict != "does not fit"

    @property
    def peak(self) -> PeakRange:
        """Both ends of the peak."""
        return self.peak_range or PeakRange.exactly(self.peak_allocated_bytes)

    @property
    def work(self) -> tuple[float, int]:
        """The two kinds of extra work."""
        return self.recomputed_operations, self.transferred_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The settings that were predicted, and how many were left out."""

    scenario: Scenario
    """On the first of the ranks."""
    ranks: tuple[int, ...] = (0,)
    """Those that were judged."""
    base: MemorySettings
    limit_bytes: int
    """The most that torch may hold."""
    outside_torch_bytes: int
    """Estimated for a whole GPU, in addition to that limit."""
    resolution_bytes: int
    """Peaks in the same interval of this size, counted from the limit, are equal; 1 distinguishes all."""
    points: tuple[Point, ...]
    """In the order in which they were predicted, the base first."""
    num_candidates: int
    num_pruned: int
    """Settings without a step: they are estimated not to be on the front."""
    num_left: int = 0
    """Settings that might be on the front and were not tried, because the search was cut short."""
    may_offload_optimizer: bool = True
    """Whether the optimizer state may be proposed to be on the host except while the optimizer updates."""
    backend: str = "simulated"
    """Name of the backend whose steps were predicted: ``cpu``, or else a GPU's."""

    @property
    def front(self) -> tuple[Point, ...]:
        """The Pareto-optimal points, the highest peak first."""
        # Here nothing dominates what comes before it. Of equals, the one with the lower peak, or the first, stays.
        in_order = sorted((self._criteria(point), point.peak_allocated_bytes, i) for i, point in enumerate(self.points))
        on_front: list[tuple[float, ...]] = []
        front: list[Point] = []
        for ours, _, place in in_order:
            if not any(is_dominated(ours, theirs) for theirs in on_front):
                on_front.append(ours)
                front.append(self.points[place])
        return tuple(sorted(front, key=lambda point: (-point.peak_allocated_bytes, point.work)))

    @property
    def cheapest(self) -> tuple[Point, ...]:
        """Of the front, what fits with the least work: no other that fits needs as little of both kinds, or less."""
        fitting = [point for point in self.front if point.fits]
        least = [
            point
            for point in fitting
            if not any(other.work != point.work and is_dominated(point.work, other.work) for other in fitting)
        ]
        return tuple(sorted(least, key=lambda point: point.work))

    @property
    def best(self) -> Point:
        """The answer: the first of the cheapest with the best verdict, or the front's lowest peak if none fits."""
        best = min(self.cheapest, key=lambda point: VERDICTS.index(point.verdict), default=None)
        return best or min(self.front, key=lambda point: point.peak_allocated_bytes)

    @property
    def verdict(self) -> str:
        """The answer in one line: which setting fits at the least cost, by how much, and what that is based on."""
        best = self.best
        margin = verdict_margin(best.verdict, self.limit_bytes, best.peak)
        limit = format_bytes(self.limit_bytes + self.outside_torch_bytes)
        if self.outside_torch_bytes:
            limit += f" minus about {format_bytes(self.outside_torch_bytes)} outside torch"
        surer = [point for point in self.points if point.verdict == "fits"] if best.verdict == "may fit" else []
        if surer:
            margin += f"; '{min(surer, key=lambda point: point.work).settings}' fits, with more extra work"
        return f"'{best.settings}' {best.verdict} {limit}{margin}; based on {basis_of(self.scenario, self.backend)}"

    def recomputed_share(self, point: Point) -> float:
        """Returns what a point recomputes, as a share of a step, on the rank where this is the most."""
        layouts = (replace(self.scenario.layout, rank=rank) for rank in self.ranks)
        return max(recomputed_share(point.settings, replace(self.scenario, layout=layout)) for layout in layouts)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values; a point also says whether it is on the front, and of the cheapest that fit."""
        front, cheapest = self.front, self.cheapest
        points = [
            asdict(point)
            | {"settings": point.settings.to_dict(), "fits": point.fits}
            | {"peak_range": None if point.peak_range is None else point.peak_range.to_dict()}
            | {"on_front": point in front, "is_cheapest": point in cheapest}
            for point in self.points
        ]
        values = {name: getattr(self, name) for name in self.__slots__}
        values["verdict"] = self.verdict
        return values | {"scenario": self.scenario.to_dict(), "base": self.base.to_dict(), "points": points}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Builds a result from what `to_dict` returned."""
        points = tuple(
            Point(**{name: point[name] for name in Point.__slots__ if name in point} | _nested(point))
            for point in values["points"]
        )
        scenario, base = Scenario.from_dict(values["scenario"]), MemorySettings.from_dict(values["base"])
        ranks = tuple(values["ranks"])
        values = {name: values[name] for name in cls.__slots__}
        return cls(**values | {"scenario": scenario, "ranks": ranks, "base": base, "points": points})

    def _criteria(self, point: Point) -> tuple[float, ...]:
        return criteria(point.peak_allocated_bytes, point.fits, point.work, self.limit_bytes, self.resolution_bytes)


def default_resolution_bytes(gpu_memory_bytes: int) -> int:
    """Returns how far two peaks are apart that a reader distinguishes: 1.25 GiB of 80 GiB."""
    return max(1, gpu_memory_bytes // 64)


def criteria(
    peak_bytes: int, fits: bool, work: tuple[float, int], limit_bytes: int, resolution_bytes: int
) -> tuple[float, ...]:
    """Returns what a front compares; less is better, and what fits is better than what does not.

    The peak counts as ceil((peak - limit) / resolution), at least 1 if it does not fit. With a limit of 80 GiB and a
    resolution of 1: peaks of 78.2 and 78.9 GiB are both -1 and so equal, 80.5 is 1, and so is one of 79.9 that does
    not fit because memory is fragmented.
    """
    steps_above_limit = -((limit_bytes - peak_bytes) // resolution_bytes)
    return steps_above_limit if fits else max(1, steps_above_limit), *work


def is_dominated(ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    """Whether `theirs` is at least as good as `ours` on every criterion."""
    return all(other <= own for own, other in zip(ours, theirs, strict=True))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    peak = values.get("peak_range")
    peak_range = None if peak is None else PeakRange.from_dict(peak)
    return {"settings": MemorySettings.from_dict(values["settings"]), "peak_range": peak_range}
