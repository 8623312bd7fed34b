"""The largest workload under each setting on the front of a search: what extra work buys in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.config.settings import MemorySettings
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.largest import Largest, LargestInterrupted, What
from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.prediction import PredictionLostError


@dataclass(frozen=True, kw_only=True, slots=True)
class AlongFront:
    """The front, and the largest workload of each of its settings."""

    what: What
    front: SearchResult
    """For the workload that was given."""
    found: tuple[Largest, ...]
    """In the order of `points`, as many as were found."""

    @property
    def points(self) -> tuple[Point, ...]:
        """The front, the setting with the least extra work first."""
        return points_by_work(self.front)

    @property
    def is_complete(self) -> bool:
        """Whether all settings of a whole front were tried."""
        is_whole = self.front.num_left == 0 and len(self.found) == len(self.points)
        return is_whole and all(one.is_complete for one in self.found)

    @property
    def best(self) -> Largest | None:
        """The largest of all that may fit, with the least extra work; None if nothing fits."""
        fitting = [one for one in self.found if one.largest_that_may_fit is not None]
        return max(fitting, key=lambda one: one.largest_that_may_fit or 0, default=None)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        cut = "" if self.is_complete else "; CUT SHORT: not all settings were tried to the end"
        if self.best is None:
            return f"no setting on the front fits with any value of {self.what} that was tried{cut}"
        return f"of the {len(self.points)} settings on the front, {self.best.verdict}{cut}"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        found = [one.to_dict() for one in self.found]
        values = {"verdict": self.verdict, "what": self.what, "is_complete": self.is_complete, "found": found}
        return values | {"front": self.front.to_dict()}


class AlongFrontInterrupted(Interrupted[AlongFront]):
    """The end of a search along a front."""


def points_by_work(front: SearchResult) -> tuple[Point, ...]:
    """Returns the points on a front, the one with the least extra work first."""
    return tuple(sorted(front.front, key=lambda point: point.work))


def largest_along_front(what: What, front: SearchResult, find: Callable[[MemorySettings], Largest]) -> AlongFront:
    """Finds the largest workload under each setting on the front, the one with the least extra work first.

    Raises:
        AlongFrontInterrupted: At Ctrl-C or `PredictionLostError`, with what was found until then.
    """
    found: list[Largest] = []
    try:
        for point in points_by_work(front):
            found.append(find(point.settings))  # noqa: PERF401  # kept one by one, for Ctrl-C
    except (KeyboardInterrupt, PredictionLostError) as interrupt:
        if isinstance(interrupt, LargestInterrupted):
            found.append(interrupt.found)
        cause = interrupt.__cause__ if isinstance(interrupt, LargestInterrupted) else interrupt
        raise AlongFrontInterrupted(AlongFront(what=what, front=front, found=tuple(found))) from cause
    return AlongFront(what=what, front=front, found=tuple(found))
