"""One live model under its current settings: what `Lab`, `ResidencyControl` and `Probes` share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from memlab.allocator.request_log import RequestLog
from memlab.backends import Backend
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.out_of_memory_verdict import judge, name_smaller_loss
from memlab.lab.progress import Progress, StepMonitor
from memlab.lab.stepper import ModelLost, Stepper
from memlab.lab.worker import Worker
from memlab.model.process_group import agreed_with_rank_0
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord

_Result = TypeVar("_Result")


class Session:
    """The stepper, the thread that it runs on, whether the next step is steady, and the records so far.

    Args:
        scenario: What a step runs.
        backend: Where the model lives.
        replays: Whether a simulated step repeats what earlier events have shown.
    """

    def __init__(self, scenario: Scenario, backend: Backend, *, replays: bool) -> None:
        self.stepper = Stepper(scenario, backend, replays=replays)
        self.worker = Worker(self.stepper.job_context, lambda: f"{self.stepper.scenario}, {self.stepper.settings}")
        self.records: list[StepRecord] = []
        self.state_changes: list[StateChange] = []
        self._is_steady = False
        self._follows_tapped_step = False
        """Whether the last step was taken in the block of a tap, and may have left other bytes than others leave."""
        self._is_next_misled = False
        """Whether a forward-only pass has added groups to the offload manager: the next step may offload other ones."""
        self._stop = threading.Event()

    @property
    def scenario(self) -> Scenario:
        """Implements `Lab.scenario`."""
        return self.stepper.scenario

    @property
    def settings(self) -> MemorySettings:
        """Implements `Lab.settings`."""
        return self.stepper.settings

    @property
    def num_steps(self) -> int:
        """Steps taken so far, including warm-up steps."""
        return self.stepper.num_steps

    @property
    def backend(self) -> Backend:
        """Implements `Lab.backend`."""
        return self.stepper.backend

    @property
    def device_memory_bytes(self) -> int | None:
        """Implements `Lab.device_memory_bytes`."""
        return self.stepper.meter.device_memory_bytes

    def limit_device_memory(self, num_bytes: int | None) -> None:
        """Sets `Lab.device_memory_bytes`."""
        meter = self.stepper.meter

        def set_limit() -> None:
            meter.device_memory_bytes = num_bytes

        # A job on a device of that size would have allocated its optimizer state within it: warm up again.
        self.run_exclusive(set_limit, disturbs=num_bytes != meter.device_memory_bytes)

    def build(self) -> None:
        """Builds the model."""
        self.worker.submit(self.stepper.build).result()

    def close(self) -> None:
        """Implements `Lab.close`."""
        self.worker.finish(self.stepper.release)

    @property
    def is_steady(self) -> bool:
        """Whether a step has been taken under the current settings, so that the next one equals all that follow.

        False after a step in the block of a tap, once that has ended.
        """
        return self._is_steady and (self.stepper.is_tapped or not self._follows_tapped_step)

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

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        """Returns a context that logs the requests to a simulated allocator; on other backends, its value is None."""
        return self.stepper.meter.logging_requests()

    def start_over(self) -> bool:
        """Makes a simulated model as it was when it was built; see `Lab.start_over`."""
        return self.run_exclusive(self.stepper.start_over, disturbs=True)

    def set_workload(self, scenario: Scenario) -> None:
        """Implements `Lab.set_workload`."""
        self.run_exclusive(lambda: self.stepper.set_workload(scenario), disturbs=scenario != self.stepper.scenario)

    def set_state(self, state: TrainingState, settings: MemorySettings | None = None) -> StateChange:
        """Implements `Lab.set_state`."""
        requested = self.stepper.settings if settings is None else settings
        self.check(requested, state)
        return self.run_exclusive(lambda: self._change_state(state, self.scenario.allocator, requested))

    def step(
        self,
        settings: MemorySettings | None = None,
        *,
        state: TrainingState | None = None,
        allocator: AllocatorSettings | None = None,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> StepRecord:
        """Implements `Lab.step`."""
        return self._result_of(
            self.submit(settings, state=state, allocator=allocator, warm_up=warm_up, on_progress=on_progress)
        )

    def _result_of(self, running: Future[StepRecord]) -> StepRecord:
        """Waits for a step or a pass; Ctrl-C ends it at its next layer."""
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
        state: TrainingState | None = None,
        allocator: AllocatorSettings | None = None,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Future[StepRecord]:
        """Implements `Lab.submit`."""
        requested = self.stepper.settings if settings is None else settings
        self.check(requested, state, allocator)

        def take_step() -> StepRecord:
            now = self.stepper.scenario
            wanted = state or now.state, allocator or now.allocator
            if wanted != (now.state, now.allocator):
                self._change_state(*wanted, requested, on_progress)
            return self._take_step(requested, warm_up, on_progress)

        return self.worker.start(take_step, before=self._stop.clear)

    def forward_only(
        self, settings: MemorySettings | None, scenario: Scenario, *, suspend_offload: bool, warm_up: bool
    ) -> StepRecord:
        """Implements `Lab.forward_only`."""
        requested = self.stepper.settings if settings is None else settings
        self.check(requested)

        def take_pass() -> StepRecord:
            self._apply_if_changed(requested)
            is_other = scenario != self.stepper.scenario
            monitor = StepMonitor(self.stepper.labels, scenario, 2 if warm_up else 1, self._stops, None)
            is_steady, self._is_steady = self.is_steady and not is_other, False
            bytes_before = self.stepper.meter.live_bytes()
            self._is_next_misled |= not suspend_offload and requested.offload_modules is not None
            with self.stepper.workload_of_a_pass(scenario):
                if warm_up:
                    self.stepper.release_garbage()
                    record = self.stepper.step(monitor, forward_only=True, suspend_offload=suspend_offload)
                if not warm_up or record.status == "ok":
                    record = self.stepper.step(monitor, forward_only=True, suspend_offload=suspend_offload)
            is_ok = record.status == "ok"
            # The pass may have freed what the checkpoints of an MoE model retain.
            self._is_steady = is_steady and is_ok and self.stepper.meter.live_bytes() == bytes_before
            record = replace(record, is_steady=warm_up and is_ok and not self.stepper.is_tapped)
            record = name_smaller_loss(record)
            self.records.append(record)
            return record

        return self._result_of(self.worker.start(take_pass, before=self._stop.clear))

    def stop(self) -> bool:
        """Implements `Lab.stop`."""
        self._stop.set()
        return self.worker.busy

    def check(
        self,
        settings: MemorySettings,
        state: TrainingState | None = None,
        allocator: AllocatorSettings | None = None,
    ) -> None:
        """Refuses settings that the model cannot take, and a state or an allocator that this backend cannot have.

        Raises:
            ValueError: If a rule is broken.
        """
        if not isinstance(settings, MemorySettings):
            raise ValueError(f"settings are {settings!r}, must be MemorySettings(...): name its fields")
        scenario = self.stepper.scenario
        if state is not None:
            if not isinstance(state, TrainingState):
                raise ValueError(f"state is {state!r}, must be TrainingState(...): name its fields")
            scenario = replace(scenario, state=state)
        if allocator is not None:
            if not isinstance(allocator, AllocatorSettings):
                raise ValueError(f"allocator is {allocator!r}, must be AllocatorSettings(...): name its fields")
            scenario = replace(scenario, allocator=allocator)
        if scenario != self.stepper.scenario:
            self.stepper.backend.check(scenario)
        check_on_model(settings, scenario)

    def _stops(self, phase: str) -> bool:
        """Whether the step is to end here. Ranks of a job end it together, between backward and optimizer.

        A rank that ended it alone would leave the others waiting in a collective operation.
        """
        if self.stepper.scenario.layout.world_size == 1 or not self.stepper.backend.computes:
            return self._stop.is_set()
        return phase == "optimizer" and agreed_with_rank_0(self._stop.is_set())

    def _change_state(
        self,
        state: TrainingState,
        allocator: AllocatorSettings,
        settings: MemorySettings,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> StateChange:
        stepper = self.stepper
        rebuilt = stepper.what_rebuilds(state, allocator)
        if on_progress is not None and rebuilt != "nothing":
            on_progress(Progress(phase=f"rebuilding the {rebuilt}", module="", done=0, total=0))
        self._is_steady = False
        try:
            change = stepper.change_state(state, allocator, settings)
        except ModelLost:
            self.worker.end()
            raise
        self.state_changes.append(change)
        return change

    def _apply_if_changed(self, settings: MemorySettings) -> None:
        if settings != self.stepper.settings:
            self.stepper.apply(settings)
            self._is_steady = False

    def _take_step(
        self, settings: MemorySettings, warm_up: bool, on_progress: Callable[[Progress], None] | None
    ) -> StepRecord:
        stepper = self.stepper
        is_collected = stepper.is_collected
        self._apply_if_changed(settings)
        warms_up = warm_up and not self.is_steady
        is_repeated = warms_up or (self.is_steady and not self._is_next_misled)
        monitor = StepMonitor(stepper.labels, stepper.scenario, 2 if warms_up else 1, self._stops, on_progress)
        self._is_steady = self._is_next_misled = False
        if warms_up:
            stepper.release_garbage(is_collected=is_collected)
        with stepper.garbage.kept_young():
            if warms_up:
                monitor.prefix = "warm-up "
                record = stepper.step(monitor)
                stepper.garbage.collect()  # what the previous settings left in cycles is not memory of these settings
                monitor.prefix = ""
            if not warms_up or record.status == "ok":
                record = stepper.step(monitor)
        self._is_steady = record.status == "ok"
        self._follows_tapped_step = stepper.is_tapped
        is_repeated &= self._is_steady and not stepper.is_tapped
        record = judge(replace(record, is_steady=is_repeated), self.records)
        self.records.append(record)
        return record
