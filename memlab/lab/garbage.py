"""Collections of garbage around the steps of a lab, without a visit to each object of a large simulated model.

A lab collects garbage when its settings change: what the earlier settings left in reference cycles is not memory of the
new ones. Such a collection visits all objects of the process. A model of 94 layers with 128 experts has more than a
million, and to visit them takes longer than the rest of a replayed step. Python sorts objects by age, and can leave old
ones out, so what only a step has left is looked for among the objects that are younger than the step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memlab.meter.protocol import Meter

_NEVER = 2**31 - 1


class Garbage:
    """Collects garbage between the steps of one lab."""

    def __init__(self, meter: Meter) -> None:
        self._storages = None if meter.repeater is None else meter.repeater.storages
        """Of a simulated model."""
        self._births_before: int | None = None
        """Allocations before the block of `kept_young`; None outside of it."""
        self._births_at_collection = -1

    @property
    def is_collected(self) -> bool:
        """Whether a simulated meter has counted no allocation since the last collection."""
        return self._storages is not None and self._births_at_collection == self._storages.num_births

    @contextmanager
    def kept_young(self) -> Iterator[None]:
        """Keeps what the block makes in Python's two young generations, if the meter is a simulated one.

        Collections of the youngest generation go on. They free most cycles. At the end of the block, none is left.
        """
        if self._storages is None:
            yield
            return
        threshold = gc.get_threshold()
        self._births_before = self._storages.num_births
        gc.set_threshold(threshold[0], _NEVER, threshold[2])
        try:
            yield
            if not self.is_collected:  # the next settings need not look among all objects for what these have left
                self.collect()
        finally:
            gc.set_threshold(*threshold)
            self._births_before = None

    def collect_until(self, is_enough: Callable[[], bool]) -> bool:
        """Frees what is in reference cycles: among young objects, and among all objects only if that was not enough.

        Args:
            is_enough: Whether no garbage holds a storage any more; called after each collection.

        Returns:
            What `is_enough` said last.
        """
        for generation in (1, 2):
            gc.collect(generation)
            if is_enough():
                if self._storages is not None:
                    self._births_at_collection = self._storages.num_births
                return True
        return False

    def collect(self) -> None:
        """Frees what is in reference cycles; after it, no garbage holds a storage."""
        storages, before = self._storages, self._births_before
        if storages is None:
            gc.collect()
            return
        old_garbage_may_hold = before is None or storages.has_residual_before(before)
        gc.collect(2 if old_garbage_may_hold else 1)
        self._births_at_collection = storages.num_births
