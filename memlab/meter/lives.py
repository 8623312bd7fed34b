"""What a meter remembers of one storage, and how a step's births and deaths become a `Timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.timeline import CATEGORIES, PHASES, Timeline

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
    stamp: int = 0
    """Changes of the labels since the step's start, where the meter counts them."""


def timeline_of(
    opening: Sequence[tuple[int, int, Life]], events: Iterable[Event], started: int, modules: Sequence[str]
) -> Timeline:
    """Writes lives as columns.

    Args:
        opening: Bytes, pool and life of what was alive when the step began.
        events: What happened since, in order.
        started: The step's start, in nanoseconds on the events' clock.
        modules: The names that a life's `module` points to.
    """
    numbers: dict[int, int] = {}

    def number(life: Life) -> int:
        return numbers.setdefault(id(life), len(numbers))

    rows = [
        (0, num_bytes, pool, life.settled_category, _IDLE, life.module, number(life))
        for num_bytes, pool, life in opening
    ]
    rows += [
        (when - started, delta, pool, life.settled_category, phase, life.module, number(life))
        for when, delta, pool, life, phase, _ in events
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
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
    )
