"""A lab without a model: it has the methods that the panel calls, and its steps end when and how a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState, what_rebuilds
from memlab.lab.request import StepRequest
from memlab.record.job_record import JobRecord
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline

from .builders import record_of, training_step

if TYPE_CHECKING:
    from memlab.views.panel.lab_protocol import LabLike


@dataclass(frozen=True, kw_only=True)
class FakeProgress:
    phase: str = "forward"
    module: str = "decoder.layers.0"
    done: int = 1
    total: int = 8


@dataclass(frozen=True)
class FakeBackend:
    name: str = "cpu"


class FakeLab:
    """A `LabLike`, as mypy checks. Its steps end at once, or with ``holds`` when ``end`` is called."""

    def __init__(self, architecture: str = "qwen3-moe-tiny", timeline: Timeline | None = None, **options: Any) -> None:
        self.scenario = Scenario.of(architecture=architecture, **({"seq_length": 64} | options))
        self.backend = FakeBackend()
        self.settings = MemorySettings()
        self.device_memory_bytes: int | None = None
        self.closed = False
        self.records: list[StepRecord] = []
        self.submitted: list[MemorySettings] = []
        self.state_changes: list[StateChange] = []
        self.refused_state: TrainingState | None = None
        """A training state that this lab's backend cannot build."""
        self.timeline = training_step(scale=1024) if timeline is None else timeline
        self.holds = False
        self.outcome: dict[str, Any] | Exception = {}
        """Changes of the next record, or the error that its step ends in."""
        self._running: Future[StepRecord] | None = None
        self._on_progress: Callable[[Any], None] | None = None

    @property
    def scenario_as_opened(self) -> Scenario:
        return self.scenario

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def set_workload(self, **workload: int | None) -> None:
        self._refuse_if_busy()
        changes: dict[str, Any] = {name: value for name, value in workload.items() if value is not None}
        self.scenario = replace(self.scenario, **changes)

    def check_state(self, state: TrainingState, settings: MemorySettings | None = None) -> None:
        if state == self.refused_state:
            raise ValueError(f"state is '{state}', and the cpu backend cannot build it: choose another")

    def submit(
        self, request: StepRequest | MemorySettings | None = None, on_progress: Callable[[Any], None] | None = None
    ) -> Future[StepRecord]:
        asked = request if isinstance(request, StepRequest) else StepRequest(settings=request)
        settings = self.settings if asked.settings is None else asked.settings
        state, allocator = asked.state, asked.allocator
        check_on_model(settings, self.scenario)
        self._refuse_if_busy()
        self.scenario = replace(self.scenario, allocator=allocator or self.scenario.allocator)
        if state is not None and state != self.scenario.state:
            before = self.scenario.state
            self.state_changes.append(
                StateChange(
                    before=before,
                    after=state,
                    rebuilt=what_rebuilds(before, state),
                    seconds=2.5,
                    device_bytes=2**30,
                )
            )
            self.scenario = replace(self.scenario, state=state)
        self.settings, self._on_progress = settings, on_progress
        self.submitted.append(settings)
        running = self._running = Future()
        if not self.holds:
            self.end()
        return running

    def progress(self, **place: Any) -> None:
        assert self._on_progress is not None
        self._on_progress(FakeProgress(**place))

    def end(self, **outcome: Any) -> None:
        """Ends the running step, on a thread of its own as a lab does."""
        running = self._running
        assert running is not None
        error = self.outcome if isinstance(self.outcome, Exception) else None

        def finish() -> None:
            if error is not None:
                running.set_exception(error)
                return
            changes = (self.outcome if isinstance(self.outcome, dict) else {}) | outcome
            values: dict[str, Any] = {"scenario": self.scenario, "backend": "cpu", "step_index": len(self.records)}
            self.records.append(self.record(**(values | changes)))
            running.set_result(self.records[-1])

        worker = threading.Thread(target=finish)
        worker.start()
        worker.join()

    def record(self, **values: Any) -> StepRecord:
        """Makes the record of a step."""
        return record_of(self.timeline, self.settings, **values)

    def stop(self) -> bool:
        was_busy = self.busy
        if was_busy:
            self.end(status="interrupted", message="stopped in forward: run the step again", loss=None)
        return was_busy

    def _refuse_if_busy(self) -> None:
        if self.busy:
            raise ValueError(f"this lab is busy with a step ({self.settings}): wait for it, or stop it")


class FakeJobLab(FakeLab):
    """A lab of four pipeline stages, each of which has half the bytes of the one before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(layout=Layout(pipeline_model_parallel_size=4), num_microbatches=4, **options)
        self.lost: tuple[int, ...] = ()
        """Ranks that have no record of the next step."""

    def record(self, **values: Any) -> StepRecord:
        """Makes the records of all ranks that are not lost."""
        layout = self.scenario.layout
        ranks = []
        for rank in range(layout.world_size):
            scenario = replace(values["scenario"], layout=replace(layout, rank=rank))
            timeline = training_step(scale=1024 * 2**rank)
            ranks.append(record_of(timeline, self.settings, **(values | {"scenario": scenario})))
        return JobRecord.of([record for rank, record in enumerate(ranks) if rank not in self.lost])


if TYPE_CHECKING:

    def _fake_lab_is_like_that(lab: FakeLab) -> LabLike:
        return lab
