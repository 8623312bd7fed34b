"""Progress of a running step, reported at each phase and layer that it enters, where a step can also be stopped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memlab.config.scenario import Scenario
from memlab.meter.labels import Labels
from memlab.vocabulary import PHASES

_LAYER = re.compile(r"decoder\.layers\.\d+")


class StepStopped(Exception):  # noqa: N818  # requested, not an error
    """Raised inside a step to end it; its text is the place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The place that a step has reached."""

    phase: str
    """A phase of the timeline, with ``warm-up`` before it during the step that precedes the recorded one; before that,
    ``rebuilding the model`` or ``rebuilding the optimizer`` where the training state changes."""
    module: str
    """The layer that runs, such as ``decoder.layers.2``, or empty."""
    done: int
    """Passes through a layer, forward or backward, that have begun."""
    total: int
    """All passes through a layer, those of the warm-up step included; 0 during a rebuild."""


class StepMonitor:
    """Reads the labels of a step and its warm-up, reports each new place, and raises `StepStopped` on request.

    Args:
        num_steps: 2 with a warm-up step, else 1.
        stops: Returns whether the step is to end where it enters a phase or a layer of it.
        on_progress: Called at each new place.
    """

    def __init__(
        self,
        labels: Labels,
        scenario: Scenario,
        num_steps: int,
        stops: Callable[[str], bool],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._labels = labels
        self._stops = stops
        self._on_progress = on_progress
        self._total = 2 * scenario.num_layers_of_stage * scenario.num_microbatches * num_steps
        self._num_repeated_before = labels.num_repeated
        self._seen: set[tuple[int, int, str]] = set()
        self._place = (-1, "")
        self._layers: dict[int, str] = {}
        self.prefix = ""
        """Written before the phase's name."""

    def __call__(self) -> None:
        """Reports the step's place if it is a new one.

        Raises:
            StepStopped: If `stops` says so.
        """
        labels = self._labels
        layer = self._layer(labels.module)
        phase = PHASES[labels.phase]
        if (labels.phase, layer) == self._place or (phase in ("forward", "backward") and not layer and self._seen):
            return
        self._place = (labels.phase, layer)
        if phase != "idle" and self._stops(phase):
            raise StepStopped(labels.place)
        if layer and phase in ("forward", "backward"):
            self._seen.add((labels.phase, labels.num_passes, layer))
        if self._on_progress is not None:
            done = min(len(self._seen) + labels.num_repeated - self._num_repeated_before, self._total)
            self._on_progress(Progress(phase=self.prefix + phase, module=layer, done=done, total=self._total))

    def _layer(self, code: int) -> str:
        layer = self._layers.get(code)
        if layer is None:
            found = _LAYER.match(self._labels.modules[code])
            layer = self._layers[code] = found.group() if found else ""
        return layer
