"""What a lab can be asked about its live model besides steps: what offload freed, what fits, who keeps memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from memlab.config.settings import MemorySettings
from memlab.fitting.fit import Fit, judge_fit
from memlab.lab.probe_steps import account_for_offload, saved_in_regions, unmetered_step_seconds
from memlab.lab.residency import BetweenSteps
from memlab.model.retention.remedies import Tap
from memlab.model.retention.retained_leaves import Retained, find_retained
from memlab.record.offload_audit import OffloadAccount
from memlab.record.step_record import StepRecord
from memlab.units import parse_bytes


class Instruments(BetweenSteps, ABC):
    """The half of a `Lab` that looks; the other half steps."""

    settings: MemorySettings

    @abstractmethod
    def step(self, settings: MemorySettings | None = None) -> StepRecord:
        """Takes a training step and measures it."""

    @abstractmethod
    def apply(self, settings: MemorySettings) -> None:
        """Changes the settings of the live model."""

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
        if num_bytes is not None and (not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 1):
            raise ValueError(
                f"device_memory_bytes is {num_bytes!r}, must be a whole number of at least 1, or None: give the "
                "device's size in bytes, or None for an endless one"
            )
        if num_bytes != self._stepper.meter.device_memory_bytes:
            self._stepper.meter.device_memory_bytes = num_bytes
            self._settled = False  # a job of that size would have made its state within it

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

        Those steps are in `records` afterwards, and the settings are again what they were.

        Args:
            record: Of a step of this lab that ran to its end.
            gpu_memory: Of the whole GPU, in bytes or such as ``"80GiB"``.

        Raises:
            ValueError: If the size is none, the record is of no whole step, or the lab is busy or closed.
        """
        num_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
        if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 1:
            raise ValueError(f"gpu_memory is {gpu_memory!r}, must be at least 1 byte: give a size such as '80GiB'")
        if record.status != "ok":
            raise ValueError(f"{record} is no whole step, and only such are held against a GPU: take one that fits")
        before, settings = self.device_memory_bytes, self.settings

        def step(settings: MemorySettings, room_bytes: int | None) -> StepRecord:
            self.device_memory_bytes = room_bytes
            return self.step(settings)

        try:
            return judge_fit(record, step, num_bytes)
        finally:
            self.device_memory_bytes = before
            if self.settings != settings:
                self.apply(settings)

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
        last = self._stepper.scenario.num_layers_of_stage - 1
        if not 0 <= layer <= last:
            raise ValueError(f"layer is {layer!r}, must be from 0 to {last}: tap another layer")
        tap = self._alone(lambda: self._stepper.tap(layer, guarded=guarded))
        try:
            yield tap
        finally:
            if not self.closed:
                self._worker.submit(lambda: self._stepper.untap(tap)).result()  # after a step, if one runs

    def unmetered_step_seconds(self) -> float:
        """Takes a step without metering it, and returns its duration: what the meter costs is told by comparison.

        The meter then has to catch up: the next step under the same settings is preceded by a warm-up step.

        Raises:
            ValueError: If no metered step has been taken under these settings, or the lab is busy or closed.
        """
        if not self._settled:
            raise ValueError("an unmetered step is held against a metered one: take a step under these settings first")
        return self._alone(lambda: unmetered_step_seconds(self._stepper, self.settings), unsettles=True)
