"""A live model in this process: the session of one rank."""

# ruff: noqa: D102 - `memlab.lab.session.Session` documents what both sessions have

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from memlab.allocator.request_log import RequestLog
from memlab.backends import Backend
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.process_group import agreed_with_rank_0
from memlab.engines.protocol import Engine, Place
from memlab.fitting.out_of_memory_verdict import judge, name_smaller_loss
from memlab.lab.lab_model import LabModel
from memlab.lab.progress import Progress, StepMonitor
from memlab.lab.request import PassRequest, StepRequest, check_kind
from memlab.lab.session import OnProgress
from memlab.lab.state_changes import ModelLost, StateChanges
from memlab.lab.stepper import Stepper
from memlab.lab.worker import Worker
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord
from memlab.record.transfer import Action, Transfer
from memlab.replay.passes import NotReplayableError

_Result = TypeVar("_Result")


class OneProcess:
    """The model, what steps it, the thread that both run on, whether the next step is steady, and the records so far.

    Args:
        replays: Whether a simulated step may repeat what is known (`Lab`).
        engine: Makes what builds and steps the model; None is the scenario's.
    """

    def __init__(
        self,
        scenario: Scenario,
        backend: Backend,
        *,
        replays: bool = False,
        engine: Callable[[Scenario, Place], Engine] | None = None,
    ) -> None:
        self.model = LabModel((engine or _engine_of(scenario))(scenario, backend), backend, replays=replays)
        self.stepper = Stepper(self.model)
        self._states = StateChanges(self.model)
        self.worker = Worker(self.model.job_context, lambda: f"{self.model.scenario}, {self.model.settings}")
        self.records: list[StepRecord] = []
        self.state_changes: list[StateChange] = []
        self._is_steady = False
        self._follows_tapped_step = False
        """Whether the last step was taken in the block of a tap, and may have left other bytes than others leave."""
        self._is_next_misled = False
        """Whether a forward-only pass has added groups to the offload manager: the next step may offload other ones."""
        self._past: list[Callable[[], StepRecord]] | None = []
        """The steps since the model was built; None if it has done anything else."""
        self._stop = threading.Event()

    @property
    def scenario(self) -> Scenario:
        return self.model.scenario

    @property
    def settings(self) -> MemorySettings:
        return self.model.settings

    @property
    def num_steps(self) -> int:
        return self.model.num_steps

    @property
    def backend(self) -> Backend:
        return self.model.backend

    @property
    def device_memory_bytes(self) -> int | None:
        return self.model.meter.device_memory_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        meter = self.model.meter

        def set_limit() -> None:
            meter.device_memory_bytes = num_bytes

        # A job on a device of that size would have allocated its optimizer state within it: warm up again.
        self.run_exclusive(set_limit, disturbs=num_bytes != meter.device_memory_bytes, sets=True)

    @property
    def pinned_host_memory(self) -> bool:
        self.worker.require_open()
        return self.model.pinned_host_memory

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        def set_pinned() -> None:
            self.model.pinned_host_memory = pinned

        self.run_exclusive(set_pinned, sets=True)

    def build(self) -> None:
        self.worker.submit(self.model.build).result()

    def require_free(self) -> None:
        self.model.require_free()

    def close(self) -> None:
        self.worker.finish(self.model.release)

    @property
    def is_steady(self) -> bool:
        """Whether a step has been taken under the current settings, so that the next one equals all that follow.

        False after a step in the block of a tap, once that has ended.
        """
        return self._is_steady and (self.model.is_tapped or not self._follows_tapped_step)

    def run_exclusive(self, job: Callable[[], _Result], *, disturbs: bool = False, sets: bool = False) -> _Result:
        """Runs a job on the worker and waits for it; a job that disturbs makes the next step take a warm-up first.

        Args:
            disturbs: As above.
            sets: Whether it only sets what a model keeps that starts over.

        Raises:
            ValueError: If the lab is busy or closed.
        """

        def run() -> _Result:
            self._is_steady = self._is_steady and not disturbs
            if self._past or not sets:
                self._past = None
            return job()

        return self.worker.run_exclusive(run)

    def run_after_step(self, job: Callable[[], None], *, disturbs: bool = False) -> None:
        """Runs a job that undoes something, after the running step if there is one; a closed lab needs none."""

        def run() -> None:
            self._is_steady, self._past = self._is_steady and not disturbs, None
            job()

        if not self.worker.closed:
            self.worker.submit(run).result()

    def apply(self, settings: MemorySettings) -> None:
        check_kind("settings", settings, MemorySettings)
        self.check(StepRequest(settings=settings))
        self.run_exclusive(lambda: self.model.apply(settings), disturbs=True, sets=True)

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        """Returns a context that logs the requests to a simulated allocator; on other backends, its value is None."""
        return self.model.meter.logging_requests()

    def start_over(self) -> bool:
        """Makes a simulated model as it was when it was built, if that is possible (`Lab.start_over`)."""

        def start_over() -> bool:
            is_done = self.model.start_over()
            self._past = [] if is_done else None
            return is_done

        return self.run_exclusive(start_over, disturbs=True)

    def set_workload(self, scenario: Scenario) -> None:
        disturbs = scenario != self.model.scenario
        self.run_exclusive(lambda: self.model.set_workload(scenario), disturbs=disturbs, sets=True)

    def set_state(self, state: TrainingState, settings: MemorySettings | None) -> StateChange:
        check_kind("state", state, TrainingState)
        request = StepRequest(settings=settings, state=state)
        self.check(request)
        requested, wanted = self._settings_of(request), request.scenario_after(self.scenario)
        return self.run_exclusive(lambda: self._change_state(requested, wanted))

    def submit(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> Future[StepRecord]:
        self.check(request)
        settings = self._settings_of(request)  # as they are now, whatever the step's callbacks do

        def take() -> StepRecord:
            if isinstance(request, PassRequest):
                return self._take_pass(settings, request)
            wanted = request.scenario_after(self.model.scenario)
            if wanted != self.model.scenario:
                self._change_state(settings, wanted, on_progress)
            return self._take_step(settings, request.warm_up, on_progress)

        return self.worker.start(take, before=self._stop.clear)

    def take(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> StepRecord:
        running = self.submit(request, on_progress)
        try:
            return running.result()
        except KeyboardInterrupt:
            self.stop()
            running.result()
            raise

    def stop(self) -> bool:
        self._stop.set()
        return self.worker.busy

    def check(self, request: StepRequest | PassRequest) -> None:
        scenario = self.model.scenario
        if isinstance(request, PassRequest):
            request.check_workload_of(scenario)
        else:
            wanted = request.scenario_after(scenario)
            if wanted != scenario:
                self.model.backend.check(wanted)
            scenario = wanted
        check_on_model(self._settings_of(request), scenario)

    def transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        return self.run_exclusive(lambda: self.model.transfers.transfer(action, groups), disturbs=True)

    def _settings_of(self, request: StepRequest | PassRequest) -> MemorySettings:
        return self.model.settings if request.settings is None else request.settings

    def _stops(self, phase: str) -> bool:
        """Whether the step is to end here. Ranks of a job end it together, between backward and optimizer.

        A rank that ended it alone would leave the others waiting in a collective operation.
        """
        if self.model.scenario.layout.world_size == 1 or self.model.backend.kind.is_prediction:
            return self._stop.is_set()
        return phase == "optimizer" and agreed_with_rank_0(self._stop.is_set())

    def _change_state(
        self, settings: MemorySettings, wanted: Scenario, on_progress: OnProgress | None = None
    ) -> StateChange:
        """Changes the training state and the allocator to those of another scenario."""
        state, allocator = wanted.state, wanted.allocator
        rebuilt = self.model.backend.kind.rebuilt_by(self.model.scenario, state, allocator)
        if on_progress is not None and rebuilt != "nothing":
            on_progress(Progress(phase=f"rebuilding the {rebuilt}", module="", done=0, total=0))
        self._is_steady, self._past = False, None
        try:
            change = self._states.change(state, allocator, settings)
        except ModelLost:
            self.worker.end()
            raise
        self.state_changes.append(change)
        return change

    def _apply_if_changed(self, settings: MemorySettings) -> None:
        if settings != self.model.settings:
            self.model.apply(settings)
            self._is_steady = False

    def _take_pass(self, settings: MemorySettings, request: PassRequest) -> StepRecord:
        scenario, warm_up, suspend_offload = request.scenario, request.warm_up, request.suspend_offload
        self._past = None
        self._apply_if_changed(settings)
        is_other = scenario != self.model.scenario
        monitor = StepMonitor(self.model.labels, scenario, 2 if warm_up else 1, self._stops, None)
        is_steady, self._is_steady = self.is_steady and not is_other, False
        bytes_before = self.model.meter.live_bytes()
        self._is_next_misled |= not suspend_offload and settings.offload_modules is not None
        with self.model.workload_of_a_pass(scenario):
            if warm_up:
                self.model.release_garbage()
                record = self.stepper.step(monitor, forward_only=True, suspend_offload=suspend_offload)
            if not warm_up or record.status == "ok":
                record = self.stepper.step(monitor, forward_only=True, suspend_offload=suspend_offload)
        is_ok = record.status == "ok"
        # The pass may have freed what the checkpoints of an MoE model retain.
        self._is_steady = is_steady and is_ok and self.model.meter.live_bytes() == bytes_before
        record = replace(record, is_steady=warm_up and is_ok and not self.model.is_tapped)
        record = name_smaller_loss(record)
        self.records.append(record)
        return record

    def _take_step(self, settings: MemorySettings, warm_up: bool, on_progress: OnProgress | None) -> StepRecord:
        past, self._past = self._past, None
        take = partial(self._steps, settings, warm_up)
        record, again = None, list[Callable[[], StepRecord]]()
        begins_again = False
        while record is None:
            try:
                for earlier in again:
                    earlier()
                record = take(on_progress)
            except NotReplayableError:  # without presumptions, then without replay
                past, begins_again = self._begin_again(past), True
                again = past or []
        if begins_again and past is not None and record.status == "interrupted" and self.model.start_over():
            self._past = []  # some of its steps may not have been taken again
            self._apply_if_changed(settings)
        if past is not None and record.status != "interrupted" and not self.model.is_tapped:
            self._past = [*past, take]
        record = judge(record, self.records)
        self.records.append(record)
        return record

    def _begin_again(self, past: list[Callable[[], StepRecord]] | None) -> list[Callable[[], StepRecord]] | None:
        """Makes the model as it was when it was built, after a step that could not be replayed, and replays less.

        If it has done anything else than steps, what the last one has reserved stays reserved.

        Returns:
            The steps that it has to take again; None if it is not as it was.
        """
        starts_over = past is not None and self.model.start_over()
        self._is_steady = False
        self.model.replay.stop(starts_over=starts_over)
        return past if starts_over else None

    def _steps(self, settings: MemorySettings, warm_up: bool, on_progress: OnProgress | None = None) -> StepRecord:
        """Takes the steps of one request, and returns the record of the last one."""
        model, stepper = self.model, self.stepper
        is_collected = model.is_collected
        self._apply_if_changed(settings)
        warms_up = warm_up and not self.is_steady
        is_repeated = warms_up or (self.is_steady and not self._is_next_misled)
        warm_ups = model.scenario.num_warm_up_steps if warms_up else 0
        monitor = StepMonitor(model.labels, model.scenario, warm_ups + 1, self._stops, on_progress)
        self._is_steady = self._is_next_misled = False
        if warms_up:
            model.release_garbage(is_collected=is_collected)
        with model.garbage.kept_young():
            monitor.prefix = "warm-up "
            ended_early: StepRecord | None = None
            for _ in range(warm_ups):
                ended_early = stepper.warm_up(monitor) if ended_early is None else ended_early
                model.garbage.collect()  # what the previous settings left in cycles is not memory of these settings
            monitor.prefix = ""
            record = stepper.step(monitor) if ended_early is None else ended_early
        self._is_steady = record.status == "ok"
        self._follows_tapped_step = model.is_tapped
        is_repeated &= self._is_steady and not model.is_tapped
        return replace(record, is_steady=is_repeated)


def _engine_of(scenario: Scenario) -> Callable[[Scenario, Place], Engine]:
    """Returns the class of a scenario's engine; the other one is not imported."""
    if scenario.engine == "fsdp2":
        from memlab.engines.fsdp2.engine import Fsdp2Engine

        return Fsdp2Engine
    from memlab.engines.megatron.engine import MegatronEngine

    return MegatronEngine
