"""What a meter remembers of one storage, and how a step's births and deaths become a `Timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES

_ACTIVATIONS, _RECOMPUTED, _TEMPORARY = (CATEGORIES.index(name) for name in ("activations", "recomputed", "temporary"))
_BACKWARD, _FORWARD, _IDLE = (PHASES.index(name) for name in ("backward", "forward", "idle"))


@dataclass(slots=True, eq=False)
class Life:
    """One storage, from its birth on. Indices are those of `Timeline`'s columns, spans those of `Labels`."""

    num_bytes: int
    pool: int
    module: int
    phase: int
    span: int
    recomputed: bool
    step: int
    """Number of the timeline that it was born in."""
    category: int | None = None
    """Where it is known by construction; else `settled_category` tells it from the whole life."""
    died_in_span: int | None = None
    died_in_step: int | None = None
    rounding_bytes: int = 0
    """Of `num_bytes`, what the allocator gave beyond the request."""

    @property
    def settled_category(self) -> int:
        """What the storage was, told from its whole life: one that ends in the span of its birth was temporary.

        What outlives its step waits for something, whatever made it: a retained gradient is no temporary.
        """
        if self.category is not None:
            return self.category
        if self.died_in_span == self.span:
            return _TEMPORARY
        if self.died_in_step != self.step:
            return _ACTIVATIONS
        if self.phase == _FORWARD:
            return _ACTIVATIONS
        if self.phase == _BACKWARD and self.recomputed:
            return _RECOMPUTED
        return _TEMPORARY


class Event(NamedTuple):
    """A birth, death or change of size."""

    nanoseconds: int
    """On the clock of its meter."""
    delta_bytes: int
    pool: int
    life: Life
    phase: int
    rounding_bytes: int
    """Of `delta_bytes`, and of its sign."""
    stamp: int = 0
    """The number of the stamp that stood, where the meter has such."""

    @classmethod
    def opening(cls, life: Life, pool: int | None = None) -> Event:
        """Returns the birth that stands for what was alive when a step began, in its own pool or in another."""
        return cls.of(life, life.num_bytes, 0, life.pool if pool is None else pool, _IDLE)

    @classmethod
    def of(cls, life: Life, delta_bytes: int, nanoseconds: int, pool: int, phase: int, stamp: int = 0) -> Event:
        """Returns an event at which a life's storage comes or goes as it is now."""
        rounding_bytes = life.rounding_bytes if delta_bytes > 0 else -life.rounding_bytes
        return cls(nanoseconds, delta_bytes, pool, life, phase, rounding_bytes, stamp)


def timeline_of(opening: Sequence[Event], events: Iterable[Event], started: int, modules: Sequence[str]) -> Timeline:
    """Writes lives as columns.

    Args:
        opening: A birth for all that was alive when the step began.
        events: What happened since, in order.
        started: The step's start, in nanoseconds on the events' clock.
        modules: The names that a life's `module` points to.
    """
    numbers: dict[int, int] = {}

    def row(nanoseconds: int, event: Event) -> tuple[int, ...]:
        life = event.life
        number = numbers.setdefault(id(life), len(numbers))
        of_life = (life.settled_category, event.phase, life.module, number)
        return (nanoseconds, event.delta_bytes, event.pool, *of_life, event.rounding_bytes)

    rows = [row(0, event) for event in opening] + [row(event.nanoseconds - started, event) for event in events]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    return Timeline(
        nanoseconds=columns[0].copy(),
        delta_bytes=columns[1].copy(),
        pool=columns[2].astype(np.uint8),
        category=columns[3].astype(np.uint8),
        phase=columns[4].astype(np.uint8),
        module=columns[5].astype(np.int32),
        storage=columns[6].astype(np.int32),
        modules=tuple(modules),
        num_opening_events=len(opening),
        rounding_bytes=columns[7].copy(),
    )
