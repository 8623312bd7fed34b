"""Micro-batches that memlab does not step, because earlier ones have shown what they do.

Megatron's own schedule counts the micro-batches. Where one of them had the same events as the one before, and left
allocated what it found, all later ones but the last are inserted there (`Repeater.insert_periods`), and the
schedule's count goes on behind them. In 1F1B a period is the forward pass of one micro-batch and the backward pass of
an earlier one, and without backward it is a forward pass. If no micro-batch is known to repeat, the schedule steps all
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from memlab.config.scenario import Scenario
from memlab.engines.protocol import Microbatches
from memlab.meter import collectives
from memlab.meter.labels import Labels
from memlab.meter.repeater import Repeater
from memlab.replay.passes import PassesOfStep
from memlab.upstream.patching import patched


class MicrobatchReplay(Microbatches):
    """Inserts micro-batches into one step.

    Args:
        scenario: What the step runs. Its stage decides after how many forward passes the pipeline is full.
        step: The step under way. Its schedule makes fewer forward passes where micro-batches are inserted.
    """

    def __init__(self, meter: Repeater, labels: Labels, scenario: Scenario, step: PassesOfStep) -> None:
        layout = scenario.layout
        num_before = layout.pipeline_model_parallel_size - 1 - layout.pipeline_stage
        """Forward passes before the first backward pass, without the one that it follows."""
        self._labels, self._meter, self._step = labels, meter, step
        self._num_microbatches = scenario.num_microbatches
        self._passes_of_a_microbatch = 2 * scenario.num_layers_of_stage
        self._starts: list[int] = []
        self._sent: list[Counter[str]] = []
        """`collectives.sent_bytes` at each of them."""
        self._num_inserted = 0
        # A period frees what up to `num_before` + 2 periods before it have allocated: the schedule holds for a while
        # what it has sent and received. The first period of a full pipeline, and those before it, number their storages
        # otherwise. Two after them must be equal. To compare them takes as long as all that came before them.
        first = 2 * num_before + 3
        self._tries = range(first, first + (4 if layout.pipeline_model_parallel_size > 1 else 3))

    def before_forward(self) -> None:
        self._starts.append(self._meter.position())
        self._sent.append(collectives.sent_bytes.copy())
        num_left = self._num_microbatches - len(self._starts) - 1  # without the one that begins, and the last one
        if num_left <= 0 or self._num_inserted or len(self._starts) not in self._tries:
            return
        before, sent = self._sent[-2] - self._sent[-3], self._sent[-1] - self._sent[-2]
        if before == sent and self._meter.insert_periods(self._starts, num_left):
            self._num_inserted = num_left
            collectives.send_again(sent, num_left)
            self._labels.num_repeated += num_left * self._passes_of_a_microbatch
            self._step.num_microbatches -= num_left

    @contextmanager
    def counted(self) -> Iterator[None]:
        with patched({"megatron.core.pipeline_parallel.schedules.range": self._count}):
            yield
        num_passes = len(self._starts) + self._num_inserted
        assert num_passes == self._num_microbatches, f"{num_passes} of {self._num_microbatches} micro-batches"

    def _count(self, *bounds: int) -> Iterator[int]:
        """Takes the place of ``range`` in the schedule's loops: leaves out the micro-batches that are inserted."""
        num_left_out = self._num_inserted
        for number in range(*bounds):
            if num_left_out < self._num_inserted:
                num_left_out += 1
            else:
                yield number
