"""The panel's state: the one place that knows what is edited, what runs, and which runs there are.

Controls mirror it and call its methods; so does a test, or a notebook without a front end. Callbacks come on
JupyterLab's subshell thread while a cell runs, and a step's end comes on the lab's worker thread, so everything
that changes the state holds one lock. It is never held while the lab is asked for something: the worker may be
waiting for it.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import traitlets

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.views.figures.resample import AXES
from memlab.views.panel.run import Run
from memlab.views.panel.settings_form import Draft

if TYPE_CHECKING:
    from memlab.lab.lab import Lab, Progress

_logger = logging.getLogger(__name__)
# An error of a step is a row of the table. Without this it would also be printed under whichever cell is running.
_logger.addHandler(logging.NullHandler())

_SECONDS_BETWEEN_PROGRESS = 0.1
POOLS_SHOWN = ("device", "host")


class LabState(traitlets.HasTraits):
    """What a panel on one lab shows.

    Args:
        lab: Does the work, and keeps the records.
    """

    draft = traitlets.Instance(Draft)
    """The settings and the workload that the controls show."""
    settings = traitlets.Instance(MemorySettings, allow_none=True)
    """The draft's settings; None while a rule refuses them."""
    refusal = traitlets.Unicode()
    """The rule's text; empty while there are settings."""
    busy = traitlets.Bool()
    progress = traitlets.Any()
    """The `memlab.lab.lab.Progress` of the running step; None before its first phase and while nothing runs."""
    notice = traitlets.Unicode("Ready: change a setting, then press Run.")
    """What the last press led to, in words."""
    runs = traitlets.Tuple()
    """Of `Run`, in their order."""
    shown = traitlets.Instance(Run, allow_none=True)
    pinned = traitlets.Instance(Run, allow_none=True)
    """What the others are held against."""
    pool = traitlets.Enum(POOLS_SHOWN, default_value="device")
    axis: traitlets.Enum[Any] = traitlets.Enum(AXES, default_value="time")
    moment = traitlets.Int(allow_none=True, default_value=None)
    """Number of the event that is looked at, from the step's start; None looks at the peak."""
    table_open = traitlets.Bool()
    export_folder = traitlets.Unicode("memlab_exports")

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.lock = threading.RLock()
        self._pressing = threading.Lock()
        self._last_progress_at = 0.0
        self._num_runs = 0
        self.draft = Draft.of(lab.settings, lab.scenario)
        self.refresh()

    @traitlets.observe("draft")
    def _resolve(self, _change: object) -> None:
        try:
            self.draft.scenario(self.lab.scenario)
            self.settings = self.draft.settings(self.lab.scenario)
            self.refusal = ""
        except ValueError as error:
            self.settings = None
            self.refusal = str(error)

    @property
    def scenario(self) -> Scenario:
        """What the lab runs now; the draft's workload replaces its own at the next run."""
        return self.lab.scenario

    def edit(self, **changes: Any) -> None:
        """Changes fields of the draft."""
        with self.lock:
            self.draft = replace(self.draft, **changes)

    def toggle(self, field: str, module: str, *, on: bool) -> None:
        """Ticks or unticks a module of ``recompute_modules`` or ``offload_modules``."""
        with self.lock:
            self.draft = self.draft.toggled(field, module, on=on)

    def reuse(self) -> None:
        """Puts the shown run's settings and workload back into the controls."""
        with self.lock:
            if self.shown is None:
                self.notice = "No run is shown: choose one in the table first."
                return
            self.draft = Draft.of(self.shown.settings, self.shown.scenario)
            self.notice = f"The controls show the settings of {self.shown}."

    def run(self) -> Future[StepRecord] | None:
        """Starts a step with the settings of the draft, or says in `notice` why not.

        Returns:
            The record to come, when the state has it too; None if the step was refused.
        """
        # The worker never takes this lock, so the lab may be asked under it.
        with self._pressing:
            settings, draft = self.settings, self.draft
            if settings is None:
                self._say(f"Not started: {self.refusal}")
                return None
            try:
                scenario = draft.scenario(self.lab.scenario)
                self.lab.set_workload(seq_length=scenario.seq_length, micro_batch_size=scenario.micro_batch_size)
                self.refresh()
                running = self.lab.submit(settings, on_progress=self._follow)
            except ValueError as error:
                self._say(f"Not started: {error}")
                return None
            except Exception as error:  # noqa: BLE001 - whatever it is, the panel lives on and its reader is told
                self._fail(error, draft.scenario(self.lab.scenario), settings)
                return None
            with self.lock:
                self.progress, self.busy = None, True
                self.notice = f"Running: {settings}"
            ended: Future[StepRecord] = Future()
            running.add_done_callback(lambda done: self._finish(done, ended, scenario, settings))
            return ended

    def stop(self) -> None:
        """Ends the running step between two phases or layers; its row says ``interrupted``."""
        was_running = self.lab.stop()
        self._say(
            "Stopping: the step ends after this layer." if was_running else "Nothing is running: press Run first."
        )

    def show(self, number: int) -> None:
        """Shows a run in the chart and in the text beside it."""
        with self.lock:
            run = self._run(number)
            if run is not self.shown:
                self.moment = None
                self.shown = run

    def pin(self) -> None:
        """Pins the shown run: it is laid over the others. Pinning it again takes it off."""
        with self.lock:
            if self.shown is None:
                self.notice = "No run is shown: choose one in the table first."
                return
            self.pinned = None if self.pinned is self.shown else self.shown
            self.notice = f"Pinned {self.pinned}." if self.pinned else "No run is pinned."

    def delete(self) -> None:
        """Forgets the shown run, here and in the lab's records, and shows the one after it, or before."""
        with self.lock:
            run = self.shown
            if run is None:
                self.notice = "No run is shown: choose one in the table first."
                return
            at = self.runs.index(run)
            records = self.lab.records
            records[:] = [record for record in records if record is not run.record]
            left = (*self.runs[:at], *self.runs[at + 1 :])
            if self.pinned is run:
                self.pinned = None
            self.moment = None
            self.shown = left[min(at, len(left) - 1)] if left else None
            self.runs = left
            self.notice = f"Deleted {run}."

    def look_at(self, moment: int | None) -> None:
        """Looks at what is alive after an event, counted from the step's start; None looks at the peak.

        Raises:
            ValueError: If the shown run has no such event.
        """
        with self.lock:
            record = self.shown.record if self.shown is not None else None
            timeline = record.timeline if record is not None else None
            num_moments = len(timeline) - timeline.first_step_event if timeline is not None else 0
            if moment is not None and not 0 <= moment < num_moments:
                raise ValueError(f"moment is {moment}, but the shown run has {num_moments} events: count them from 0")
            self.moment = moment

    def refresh(self) -> None:
        """Takes up records that the lab got since, from steps of a cell for example."""
        with self.lock:
            known = {id(run.record) for run in self.runs}
            new = [record for record in self.lab.records if id(record) not in known]
            for record in new:
                self._add(scenario=record.scenario, settings=record.settings, record=record)

    def moved_bytes(self) -> dict[str, int]:
        """Returns what each offload moved in the last run in which it moved anything: by module, and by group."""
        moved: dict[str, int] = {}
        for run in self.runs:
            if run.is_ok and run.record is not None:
                moved |= run.record.offloaded_bytes_by_module | run.record.offloaded_bytes_by_group
        return moved

    def _run(self, number: int) -> Run:
        for run in self.runs:
            if run.number == number:
                return run  # type: ignore[no-any-return]  # a traitlets.Tuple does not say of what
        raise ValueError(f"there is no run {number}: choose from {', '.join(str(run.number) for run in self.runs)}")

    def _add(self, **values: Any) -> None:
        self._num_runs += 1
        run = Run(number=self._num_runs, backend=self.lab.backend.name, **values)
        self.moment = None
        self.runs = (*self.runs, run)
        self.shown = run

    def _say(self, notice: str) -> None:
        with self.lock:
            self.notice = notice

    def _follow(self, progress: Progress) -> None:
        """Called on the worker's thread many times a step; the page hears of ten a second at most."""
        now = time.monotonic()
        if now - self._last_progress_at >= _SECONDS_BETWEEN_PROGRESS:
            self._last_progress_at = now
            with self.lock:
                self.progress = progress

    def _finish(
        self, done: Future[StepRecord], ended: Future[StepRecord], scenario: Scenario, settings: MemorySettings
    ) -> None:
        error = done.exception()
        with self.lock:
            if error is not None:
                self._fail(error, scenario, settings)
            else:
                self.refresh()
                assert self.shown is not None
                self.notice = f"{self.shown}: {self.shown.message or self.shown.status}"
            self.progress, self.busy = None, False
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(done.result())

    def _fail(self, error: BaseException, scenario: Scenario, settings: MemorySettings) -> None:
        _logger.error("the step under %s ended in an error", settings, exc_info=error)
        # Its frames hold tensors, and the lab holds the error until the next step.
        traceback.clear_frames(error.__traceback__)
        with self.lock:
            self._add(scenario=scenario, settings=settings, error=f"{type(error).__name__}: {error}")
            self.notice = f"{self.shown}: {self.shown.message}" if self.shown is not None else ""
