"""The steps of a search: each is taken on a simulated lab, and only what the search compares is kept of it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import completes_in_any_case
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.measured_margin import further_steps_of
from memlab.fitting.prediction import Prediction, Seen
from memlab.jobs.frameworks.framework import NotModelled
from memlab.lab.kept_predictions import KeptPredictions, NotedAnswers
from memlab.lab.request import PassRequest
from memlab.live_objects import count_objects
from memlab.quiet_import import imported
from memlab.record.step_record import StepRecord

if TYPE_CHECKING:
    from memlab.allocator.request_log import RequestLog
    from memlab.backends import Backend
    from memlab.lab.lab import Lab
    from memlab.lab.progress import Progress

_NICENESS = 5
_FEW_OBJECTS = 100_000
"""A collection that visits so many takes less than 0.1 s; torch and Megatron are 300,000."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A prediction needs no GPU, so it takes none from the machine that it runs on."""


class StepInterrupted(Interrupted[StepRecord]):
    """Ctrl-C during a step, of which there is the part that was taken, or that of its warm-up step."""


class SimulatedSteps:
    """Takes steps of one rank on a simulated lab: each is the one that a new process would take.

    So it depends neither on the steps before it nor on how many processes a search has: the lab starts over
    (`Lab.start_over`), or another one is opened where it cannot. What earlier steps have left in the allocator could
    otherwise change peaks (by up to 15.7 MB of 68 GB, `labs/LOG.md`, 2026-11-24, night), and let a step fit where it
    would not in a new process.
    """

    def __init__(
        self,
        open_lab: Callable[[], AbstractContextManager[Lab]],
        *,
        forward_only: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._open_lab, self._forward_only, self.on_progress = open_lab, forward_only, on_progress
        self.stop_at: float | None = None
        """When a step that runs is stopped, on the clock of `time.monotonic`; its record then has status
        ``interrupted``. None never stops one."""
        self._opened = ExitStack()
        self._lab: Lab | None = None
        self._last: StepRecord | None = None
        """The step that the lab has taken last, if nothing followed it."""
        self._logged: StepRecord | None = None
        """The step without a limit that has sent `requests`, or an equal one."""
        self.sent_bytes: dict[str, int] = {}
        """What the rank sent in the last step, by kind of collective."""
        self.requests: RequestLog | None = None
        """The requests of the last step and its warm-up step to the allocator; None if that step had a limit, or if the
        backend has no allocator."""

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step, and keeps no record.

        Raises:
            StepInterrupted: At Ctrl-C, if a step was running.
        """
        lab = self._new_lab()
        lab.device_memory_bytes = limit_bytes
        self._last = self._logged = self.requests = None
        try:
            with lab.logging_requests() if limit_bytes is None else nullcontext() as self.requests:
                if self._forward_only:
                    record = lab.forward_only(settings, warm_up=True)
                else:
                    record = lab.step(settings, on_progress=self._on_progress)
        except KeyboardInterrupt:
            if lab.records and lab.records[-1].status == "interrupted":
                raise StepInterrupted(lab.records[-1]) from None
            raise
        lab.records.clear()  # the timelines of a hundred steps of a large model exceed a laptop's memory
        self._last, self.sent_bytes = record, lab.sent_bytes
        self._logged = record if limit_bytes is None else None
        return record

    def _on_progress(self, progress: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)
        if self._lab is not None and self.stop_at is not None and time.monotonic() > self.stop_at:
            self._lab.stop()

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        """Implements `Steps.completes`: sends the requests of the step to an allocator with the limit.

        A step of which that is known in any case is not taken again.
        """
        if completes_in_any_case(record, limit_bytes):
            return True
        if record is not self._logged:
            self._take_again(record)
        return self.requests is None or self.requests.completes_within(limit_bytes, further_steps_of(record.scenario))

    def pass_after(self, record: StepRecord, scenario: Scenario) -> StepRecord:
        """Takes a forward-only pass, after one to warm up, on the model that has taken a step.

        Args:
            record: The step; it is taken again unless it is the last thing that these steps have done.
        """
        if record is not self._last:
            self._take_again(record)
        assert self._lab is not None, "it has taken the step"
        self._last = None
        return self._lab.take(PassRequest(scenario=scenario, warm_up=True))

    def _take_again(self, record: StepRecord) -> None:
        self(record.settings)
        self._logged = record

    def close(self) -> None:
        """Closes the lab. The requests are kept, and a further step opens another lab."""
        self._opened.close()

    def _new_lab(self) -> Lab:
        """Returns a lab as it is when it is opened."""
        if self._lab is None or self._lab.closed or not self._lab.start_over():
            self._opened.close()
            self._lab = self._opened.enter_context(self._open_lab())
        return self._lab


@contextmanager
def stepping(
    scenario: Scenario,
    *,
    forward_only: bool = False,
    backend: str | Backend = "simulated",
    replay: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[SimulatedSteps]:
    """Returns a context whose value takes steps of a scenario, on simulated labs that the context closes."""
    steps = SimulatedSteps(
        partial(_simulated_lab, scenario, backend, replay=replay), forward_only=forward_only, on_progress=on_progress
    )
    with closing(steps):
        yield steps


@contextmanager
def _simulated_lab(scenario: Scenario, backend: str | Backend, *, replay: bool) -> Iterator[Lab]:
    lab_module = imported("memlab.lab.lab")

    with lab_module.Lab(scenario, backend=backend, replay=replay) as lab:
        # The lab collects garbage after every change of settings. A collection that visits all objects of torch,
        # Megatron and a large model takes longer than a small step, so they are excluded. Only all objects together can
        # be included again. If few objects are left, torch and Megatron are excluded already, and a small model is no
        # reason for that. (`gc.get_freeze_count` would say so too, but counts 300,000 objects one by one.)
        if count_objects() < _FEW_OBJECTS:
            yield lab
            return
        was_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        try:
            yield lab
        finally:
            gc.unfreeze()
    if was_frozen:
        gc.collect()
        gc.freeze()


class Predictor:
    """Predicts steps on a simulated lab that stays open, for a process of a search; it reports no progress."""

    def __init__(self, report: Callable[[Any], None] = lambda _: None) -> None:
        del report
        self._lab = ExitStack()
        self._open_for: tuple[Scenario, str] | None = None
        self._steps: SimulatedSteps | None = None
        imported("memlab.lab.lab")  # with torch and Megatron

        # As in memlab/__init__.py: this process is the search's own.
        gc.collect()
        gc.freeze()

    def predict(
        self,
        scenario: Scenario,
        settings: MemorySettings,
        limit_bytes: int,
        replay: bool = True,
        backend: str = "simulated",
        not_modelled: Sequence[NotModelled] = (),
        kept: KeptPredictions | None = None,
    ) -> Prediction:
        """Takes one step, and a second one with the limit if only that shows whether the step fits.

        Args:
            scenario: What is run. Another one than in the last call needs another lab.
            backend: Name of the backend whose step is predicted: bytes on the ``cpu`` have no allocator's rounding.
        """
        steps = self._steps_of(scenario, backend, replay=replay)
        seen = Seen.of(steps(settings), not_modelled, communicated_bytes=steps.sent_bytes)
        noted = NotedAnswers(steps)
        prediction = Prediction.judged(seen, noted, limit_bytes)
        if kept is not None:
            kept.keep(seen, not_modelled, noted.answers)
        return prediction

    def record(self, scenario: Scenario, settings: MemorySettings, backend: str) -> StepRecord:
        """Takes one step, and returns its record without the timeline."""
        self.give_way()  # also in a process that replaces another one
        return replace(self._steps_of(scenario, backend, replay=True)(settings), timeline=None)

    def give_way(self) -> None:
        """Lets a live model, which runs in another process, go first."""
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    def _steps_of(self, scenario: Scenario, backend: str, *, replay: bool) -> SimulatedSteps:
        from memlab.backends.simulated import predicting

        if self._steps is None or (scenario, backend) != self._open_for:
            self.close()
            opened = stepping(scenario, replay=replay, backend=predicting(backend))
            self._steps, self._open_for = self._lab.enter_context(opened), (scenario, backend)
        return self._steps

    def close(self) -> None:
        """Closes the lab."""
        self._steps = None
        self._lab.close()
