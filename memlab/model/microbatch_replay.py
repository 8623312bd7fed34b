"""Micro-batches that memlab does not step, because earlier ones have shown what they do.

Megatron's own schedule runs with a few micro-batches. Where one of them had the same events as the one before, and left
allocated what it found, the others are inserted behind it: `SimulatedMeter.insert_periods`. In 1F1B a period is the
forward pass of one micro-batch and the backward pass of an earlier one.
"""

from __future__ import annotations

from memlab.config.scenario import Scenario
from memlab.meter.labels import Labels
from memlab.meter.simulated_meter import SimulatedMeter
from memlab.model.layer_replay import NotReplayableError


class MicrobatchReplay:
    """Takes a step with fewer micro-batches, and inserts the others.

    Args:
        meter: Of the step.
        labels: Of the step.
        scenario: What the step runs. Its stage decides after how many forward passes the pipeline is full.
    """

    def __init__(self, meter: SimulatedMeter, labels: Labels, scenario: Scenario) -> None:
        layout, num_microbatches = scenario.layout, scenario.num_microbatches
        stage = layout.rank // layout.ranks_of_a_stage
        self._labels = labels
        self._passes_of_a_microbatch = 2 * scenario.num_layers_of_stage
        self._num_before = layout.pipeline_model_parallel_size - 1 - stage
        """Forward passes before the first backward pass, without the one that it follows."""
        self._meter = meter
        self._starts: list[int] = []
        # A period frees what up to `num_before` + 2 periods before it have allocated: the schedule holds for a while
        # what it has sent and received. The first period of a full pipeline, and those before it, number their storages
        # otherwise. Two after them must be equal.
        spare = 6 if layout.pipeline_model_parallel_size > 1 else 5
        self.num_stepped = min(num_microbatches, 2 * self._num_before + spare)
        self.num_left = num_microbatches - self.num_stepped
        """Micro-batches that are to be inserted."""

    def before_forward(self) -> None:
        """Called before each forward pass."""
        self._starts.append(self._meter.position())
        is_full = len(self._starts) >= 2 * self._num_before + 3
        if self.num_left and is_full and self._meter.insert_periods(self._starts, self.num_left):
            self._labels.num_repeated += self.num_left * self._passes_of_a_microbatch
            self.num_left = 0

    def require_all(self) -> None:
        """Checks that no micro-batch is missing.

        Raises:
            NotReplayableError: If one is.
        """
        if self.num_left:
            raise NotReplayableError(f"{self.num_left} micro-batches are not known to repeat")
