"""One live model under its current settings: what `Lab`, `ResidencyControl` and `Probes` share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from memlab.backends import Backend
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.out_of_memory_verdict import judge
from memlab.lab.progress import Progress, StepMonitor
from memlab.lab.stepper import Stepper
from memlab.lab.worker import Worker
from memlab.record.step_record import StepRecord

_Result = TypeVar("_Result")


class Session:
    """The stepper, the thread that it runs on, whether the next step is steady, and the records so far.

    Args:
        scenario: What a step runs.
        backend: Where the model lives.
    """

    def __init__(self, scenario: Scenario, backend: Backend) -> None:
        self.stepper = Stepper(scenario, backend)
        self.worker = Worker(self.stepper.job_context, lambda: f"{self.stepper.scenario}, {self.stepper.settings}")
        self.records: list[StepRecord] = []
        self._is_steady = False
        self._stop = threading.Event()

    @property
    def is_steady(self) -> bool:
        """Whether a step has been taken under the current settings, so that the next one equals all that follow."""
        return self._is_steady

    def run_exclusive(self, job: Callable[[], _Result], *, disturbs: bool = False) -> _Result:
        """Runs a job on the worker and waits for it; a job that disturbs makes the next step take a warm-up first.

        Raises:
            ValueError: If the lab is busy or closed.
        """

        def run() -> _Result:
            self._is_steady = self._is_steady and not disturbs
            return job()

        return self.worker.run_exclusive(run)

    def run_after_step(self, job: Callable[[], None], *, disturbs: bool = False) -> None:
        """Runs a job that undoes something, after the running step if there is one; a closed lab needs none."""

        def run() -> None:
            self._is_steady = self._is_steady and not disturbs
            job()

        if not self.worker.closed:
            self.worker.submit(run).result()

    def apply(self, settings: MemorySettings) -> None:
        """Implements `Lab.apply`."""
        self.check(settings)
        self.run_exclusive(lambda: self.stepper.apply(settings), disturbs=True)

    def set_workload(self, scenario: Scenario) -> None:
        """Implements `Lab.set_workload`."""
        self.run_exclusive(lambda: self.stepper.set_workload(scenario), disturbs=scenario != self.stepper.scenario)

    def step(
        self,
        settings: MemorySettings | None = None,
        *,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> StepRecord:
        """Implements `Lab.step`."""
        running = self.submit(settings, warm_up=warm_up, on_progress=on_progress)
        try:
            return running.result()
        except KeyboardInterrupt:
            self.stop()
            running.result()
            raise

    def submit(
        self,
        settings: MemorySettings | None = None,
        *,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Future[StepRecord]:
        """Implements `Lab.submit`."""
        requested = self.stepper.settings if settings is None else settings
        self.check(requested)
        return self.worker.start(lambda: self._take_step(requested, warm_up, on_progress), before=self._stop.clear)

    def forward_only(self, settings: MemorySettings | None, *, suspend_offload: bool) -> StepRecord:
        """Implements `Lab.forward_only`."""
        requested = self.stepper.settings if settings is None else settings
        self.check(requested)

        def take_pass() -> StepRecord:
            self._apply_if_changed(requested)
            record = self.stepper.step(forward_only=True, suspend_offload=suspend_offload)
            self._is_steady = self._is_steady and record.status == "ok"
            self.records.append(record)
            return record

        return self.run_exclusive(take_pass)

    def stop(self) -> bool:
        """Implements `Lab.stop`."""
        self._stop.set()
        return self.worker.busy

    def check(self, settings: MemorySettings) -> None:
        """Refuses settings that the model cannot take.

        Raises:
            ValueError: If a rule is broken.
        """
        if not isinstance(settings, MemorySettings):
            raise ValueError(f"settings are {settings!r}, must be MemorySettings(...): name its fields")
        scenario = self.stepper.scenario
        check_on_model(settings, scenario)

    def _apply_if_changed(self, settings: MemorySettings) -> None:
        if settings != self.stepper.settings:
            self.stepper.apply(settings)
            self._is_steady = False

    def _take_step(
        self, settings: MemorySettings, warm_up: bool, on_progress: Callable[[Progress], None] | None
    ) -> StepRecord:
        stepper = self.stepper
        self._apply_if_changed(settings)
        warms_up = warm_up and not self._is_steady
        monitor = StepMonitor(stepper.labels, stepper.scenario, 2 if warms_up else 1, self._stop, on_progress)
        self._is_steady = False
        if warms_up:
            monitor.prefix = "warm-up "
            stepper.release_garbage()
            record = stepper.step(monitor)
            gc.collect()  # what the previous settings left in reference cycles is not memory of these settings
            monitor.prefix = ""
        if not warms_up or record.status == "ok":
            record = stepper.step(monitor)
        self._is_steady = record.status == "ok"
        record = judge(record, self.records)
        self.records.append(record)
        return record
