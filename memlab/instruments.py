"""What a lab can be asked about its live model besides steps: what offload freed, what fits, who keeps memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from memlab.analysis.offload_account import OffloadAccount
from memlab.between_steps import BetweenSteps
from memlab.fitting.fit import Fit, judge_fit
from memlab.model.remedies import Tap
from memlab.model.retention import Retained, find_retained
from memlab.record import StepRecord
from memlab.settings import MemorySettings
from memlab.units import parse_bytes
from memlab.unrecorded_steps import account_for_offload, saved_in_regions, unmetered_step_seconds


class Instruments(BetweenSteps, ABC):
    """The half of a `Lab` that looks; the other half steps."""

    settings: MemorySettings

    @abstractmethod
    def step(self, settings: MemorySettings | None = None) -> StepRecord:
        """Takes a training step and measures it."""

    @abstractmethod
    def _check(self, settings: MemorySettings) -> None:
        """Refuses settings that the model cannot take."""

    @property
    def device_memory_bytes(self) -> int | None:
        """Where the device is pretended, its size: a step that needs more ends in a record that says so. None: endless.

        Raises:
            ValueError: When it is set to something else than a positive number of bytes or None.
        """
        return self._stepper.meter.device_memory_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        if num_bytes is not None and (not isinstance(num_bytes, int) or num_bytes < 1):
            raise ValueError(f"device_memory_bytes is {num_bytes!r}, must be a positive number of bytes, or None")
        self._stepper.meter.device_memory_bytes = num_bytes

    def audit_offload(self, settings: MemorySettings) -> OffloadAccount:
        """Holds what activation offload was expected to free against what it saves, to the byte.

        Takes steps with and without offload, some of them more than once; the two that are measured are in `records`.

        Args:
            settings: With `offload_modules`.

        Raises:
            ValueError: If nothing is offloaded, under full recompute (what is offloaded then is saved in backward), if
                the settings break another rule, or the lab is busy or closed.
        """
        self._check(settings)
        if not settings.offload_modules or settings.recompute_granularity == "full":
            raise ValueError(
                f"audit_offload got settings {settings}, must have offload_modules and no full recompute: activations "
                "are audited that wait from forward to backward"
            )
        default = MemorySettings().min_offloaded_tensor_size
        plain = self.step(replace(settings, offload_modules=None, min_offloaded_tensor_size=default))
        saved = self._alone(lambda: saved_in_regions(self._stepper, plain.settings))
        offloaded = self.step(settings)
        return self._alone(lambda: account_for_offload(self._stepper, saved, plain, offloaded))

    def fit(self, record: StepRecord, gpu_memory: str | int) -> Fit:
        """Holds a step against a GPU's memory; where it does not fit, takes a step under each setting that may.

        Args:
            record: Of a step of this lab that ran to its end.
            gpu_memory: Of the whole GPU, in bytes or such as ``"80GiB"``.

        Raises:
            ValueError: If the size is none, or the lab is busy or closed.
        """
        num_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
        meter = self._stepper.meter
        before = meter.device_memory_bytes

        def step(settings: MemorySettings, room_bytes: int | None) -> StepRecord:
            meter.device_memory_bytes = room_bytes
            return self.step(settings)

        try:
            return judge_fit(record, step, num_bytes)
        finally:
            meter.device_memory_bytes = before

    def retained(self) -> list[Retained]:
        """Finds what module attributes keep alive between steps through their autograd graphs, and by which path."""
        return self._alone(lambda: find_retained(self._stepper.live))

    @contextmanager
    def tap(self, layer: int, *, guarded: bool = True) -> Iterator[Tap]:
        """Within the block, keeps one layer's output alive after each forward, as a probe or an auxiliary head does.

        Args:
            layer: Counted from 0.
            guarded: False lets ``release_storage`` empty the tapped storage too, as upstream's patch does (verl #7328);
                `Tap.look` then shows what a probe would have read, without a read.

        Raises:
            ValueError: If there is no such layer, or the lab is busy or closed.
        """
        if not 0 <= layer < self._stepper.scenario.num_layers:
            raise ValueError(
                f"layer is {layer!r}, must be from 0 to {self._stepper.scenario.num_layers - 1}: tap another layer"
            )
        tap = self._alone(lambda: self._stepper.tap(layer, guarded=guarded))
        try:
            yield tap
        finally:
            self._stepper.untap(tap)

    def unmetered_step_seconds(self) -> float:
        """Takes a step without metering it, and returns its duration: what the meter costs is told by comparison.

        The meter then has to catch up: the next step under the same settings is preceded by a warm-up step.

        Raises:
            ValueError: If no metered step has been taken under these settings, or the lab is busy or closed.
        """
        if not self._settled:
            raise ValueError("an unmetered step is held against a metered one: take a step under these settings first")
        return self._alone(lambda: unmetered_step_seconds(self._stepper, self.settings), unsettles=True)
