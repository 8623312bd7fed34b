"""Tensors that torch may keep for a collective after the program has freed them, so that a step's peak is higher."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memlab.meter.allocations import Allocation, Event
from memlab.meter.events import EventLog
from memlab.vocabulary import POOLS

_DEVICE = POOLS.index("device")
_MOST_KEPT = 100
"""Number of collectives whose tensors torch may keep at the same time. On H100s it kept those of up to 83
(`labs/LOG.md`, 2026-11-24, night): torch looks every 100 ms which collectives the GPU has run, and the program is ahead
of the GPU, probably by as many launches as CUDA's queue holds."""


class KeptGathers:
    """Follows the tensors of the collectives of one step."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._gathers: list[int] = []
        """For each collective of which torch may keep tensors, the number of events before it."""
        self._may_be_kept: dict[int, int] = {}
        """The collective of such tensors, by the identity of their allocations."""
        self.kept: list[tuple[int, int, int]] = []
        """Of those that the step has freed: the number of events then, their bytes, and their collective."""

    def begin(self) -> None:
        """Begins a step."""
        self._gathers.clear()
        self._may_be_kept.clear()
        self.kept.clear()

    def note(self, allocations: Iterable[Allocation | None]) -> None:
        """Notes a collective of which torch may keep these tensors."""
        for allocation in allocations:
            assert allocation is not None, "every tensor of a simulated step is metered"
            self._may_be_kept[id(allocation)] = len(self._gathers)
        self._gathers.append(len(self._log.events))

    def freed(self, allocation: Allocation) -> None:
        """Notes that an allocation is freed, after its event."""
        gather = self._may_be_kept.pop(id(allocation), None)
        if gather is not None:
            self.kept.append((len(self._log.events), allocation.num_bytes, gather))

    def most_bytes(self, columns: npt.NDArray[np.int64]) -> int:
        """Returns how much higher the step's peak is if torch always keeps the last `_MOST_KEPT` gathers.

        They are of this step and of the one before, which is taken to be like it: from the last gather of a backward
        pass to the peak of the next forward pass, a program may need less than the 100 ms after which torch looks. Two
        H200s had 392 MiB of a step's gathers at the peak of the next (steps of 0.07 s;
        ``labs/results/h200x2_plain_megatron_fp8.jsonl``). Gathers of earlier steps are not counted, of which steps
        shorter than that may keep some.
        """
        if not self.kept:
            return 0
        assert all(type(event) is Event for event in self._log.events), "steps in FP8 are not replayed"
        num_opening_events, num_gathers = len(self._log.opening), len(self._gathers)
        kept = np.zeros(columns.shape[1], dtype=np.int64)
        of_step_before = [(0, num_bytes, gather - num_gathers) for _, num_bytes, gather in self.kept]
        for num_events, num_bytes, gather in (*of_step_before, *self.kept):
            dropped_by = gather + _MOST_KEPT
            dropped = self._gathers[dropped_by] if dropped_by < num_gathers else None
            if dropped_by >= 0 and (dropped is None or dropped >= num_events):
                kept[max(num_opening_events + num_events - 1, 0)] += num_bytes
                if dropped is not None:
                    kept[max(num_opening_events + dropped - 1, 0)] -= num_bytes
        in_step = slice(max(num_opening_events - 1, 0), None)
        allocated, kept = np.cumsum(np.where(columns[2] == _DEVICE, columns[1], 0)), np.cumsum(kept)
        return int((allocated + kept)[in_step].max() - allocated[in_step].max())
