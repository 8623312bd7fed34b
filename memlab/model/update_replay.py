"""Updates of the parameters that memlab does not step: every step's update has the events of the one before.

The optimizer works on the parameters, the gradients and its state, whatever the layers recompute and whatever the step
trains on. An update that leaves nothing allocated, and frees nothing that it found, can only be followed by equal ones:
it is recorded, and its events happen again in later steps. The first update, which allocates Adam's state, does not
qualify, and neither does one that leaves fp32 copies of bf16 gradients to the next step.
"""

from __future__ import annotations

import numpy as np

from memlab.meter.labels import Labels
from memlab.meter.recording import Recording
from memlab.meter.simulated_meter import SimulatedMeter
from memlab.model.build import LiveModel
from memlab.model.training_step import update_parameters

_NO_MODULES = np.zeros(1, dtype=np.int64)


class UpdateReplay:
    """Updates the parameters of one model, or replays an earlier update.

    Args:
        labels: The model's labels.
        meter: Its meter.
    """

    def __init__(self, labels: Labels, meter: SimulatedMeter) -> None:
        self._labels, self._meter = labels, meter
        self._known: Recording | None = None

    @property
    def is_known(self) -> bool:
        """Whether the next update is replayed."""
        return self._known is not None

    def forget(self) -> None:
        """Forgets what was recorded: the training state changes, or a step ended early."""
        self._known = None

    def __call__(self, live: LiveModel) -> None:
        """Takes the place of `update_parameters`."""
        meter, labels = self._meter, self._labels
        if self._known is not None:
            meter.replay(self._known, _NO_MODULES, None, {})
            return
        at, span = meter.position(), labels.span
        update_parameters(live)
        recorded = meter.record(at, meter.position(), {}, (span, labels.span), {})
        if recorded is not None and not recorded[0].live:
            self._known = recorded[0]
