"""The panel's state: the settings that are edited, the step that runs, and the runs so far.

Widgets mirror it and call its methods; so does a test, or a notebook without a front end. Callbacks of widgets run on
JupyterLab's subshell thread while a cell runs, and the callback at a step's end runs on the lab's worker thread, so
all code that changes the state holds one lock. No method of the lab is called under this lock: the worker may be
waiting for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import traitlets

from memlab.config import without_effect
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.backend_kind import KINDS, BackendKind
from memlab.config.option import Rebuilt, options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError
from memlab.fitting.candidates import smallest_offloaded
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.lab.request import StepRequest
from memlab.ranks.group import RankFailed
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.views.figures.resample import AXES
from memlab.views.panel.lab_protocol import LabLike
from memlab.views.panel.presets import Preset
from memlab.views.panel.run import TRIED, Run
from memlab.views.panel.settings_form import LABELS, OPTIONS, STATE_OPTIONS, SettingsForm, as_read
from memlab.views.text.job import lines_for

if TYPE_CHECKING:
    from memlab.lab.progress import Progress

Selection = tuple[Scenario, MemorySettings]
_logger = logging.getLogger(__name__)
# An error of a step is a row of the table. Without this handler it would also be printed under the cell that runs.
_logger.addHandler(logging.NullHandler())

_SECONDS_BETWEEN_PROGRESS = 0.1
_NO_ROW = "The shown step is not in the table: press Run to keep it, or choose a run in the table."
_ABOUT_THE_SAME = 2000
"""A difference of less than this part of a peak is none: a prediction leaves out counters of a few bytes."""
POOLS_SHOWN = ("device", "host")
FLOORS = ("held", "zero")


@dataclass(frozen=True, slots=True)
class _Pressed:
    """What was selected when Run was pressed during a step that is tried: it becomes a row when that step has ended."""

    form: SettingsForm
    settings: MemorySettings
    selection: Selection
    ended: Future[StepRecord] = field(default_factory=Future)


_READY = "Ready: change a setting, then press Run."
_NOT_STARTED = "Not started"
_About = Literal["form", "refused", "result"]
"""What a notice is about: the form as it was shown then, a step that was not started, or anything else."""
_PRESSED_MEANWHILE = "Run was pressed during this step and started nothing: press it again for another step."


class LabState(traitlets.HasTraits):
    """What a panel on a lab shows, which takes the steps and keeps the records."""

    form = traitlets.Instance(SettingsForm)
    """The settings, the workload, the training state and the allocator's options that the controls show."""
    settings = traitlets.Instance(MemorySettings, allow_none=True)
    """The form's settings; None while they break a rule."""
    validation_error = traitlets.Unicode()
    """The text of the rule that the form breaks; empty if it breaks none."""
    busy = traitlets.Bool()
    progress = traitlets.Any()
    """Place of the running step, a `Progress`; None before its first phase and while no step runs."""
    notice = traitlets.Unicode(_READY)
    """Result of the user's last action, in words."""
    runs = traitlets.Tuple()
    """Each a `Run`, in the order in which they ended."""
    shown = traitlets.Instance(Run, allow_none=True)
    tried = traitlets.Instance(Run, allow_none=True)
    """The step that a simulated lab took with the form's settings before Run was pressed; it has no row."""
    pinned = traitlets.Instance(Run, allow_none=True)
    """The run that the others are compared with."""
    rank = traitlets.Int(allow_none=True, default_value=None)
    """Of a run on several ranks: the one that is shown alone; None shows all next to each other."""
    pinned_rank = traitlets.Int(allow_none=True, default_value=None)
    """The rank of the pinned run that others are compared with; None is the same rank as the one that is shown."""
    pool = traitlets.Enum(POOLS_SHOWN, default_value="device")
    axis: traitlets.Enum[Any] = traitlets.Enum(AXES, default_value="time")
    floor = traitlets.Enum(FLOORS, default_value="held")
    """Where the chart's bytes axis starts: at 0, or at what is held throughout the step."""
    moment = traitlets.Int(allow_none=True, default_value=None)
    """Number of the selected event, from the step's start; None selects the peak."""
    table_open = traitlets.Bool()
    state_open = traitlets.Bool()
    """Whether the controls of the training state are shown."""
    export_open = traitlets.Bool()
    """Whether the exports of the shown run, and the lines that repeat it, are shown."""
    export_folder = traitlets.Unicode("memlab_exports")
    deleted = traitlets.Any()
    """What `undo_delete` brings back: a place in the table, its run, and what was pinned; None after the next run."""
    copied_as = traitlets.Enum(("", *FRAMEWORKS), default_value="")
    """The framework for which `lines_to_copy` are written; empty for none."""

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self.lab = lab
        self.lock = threading.RLock()
        self._pressing = threading.Lock()
        self._last_progress_at = 0.0
        self._num_runs = 0
        self.error_fields: tuple[str, ...] = ()
        """The options that decide about `validation_error`."""
        self._notice_is_about: _About = "form"
        self._idle_options: dict[str, str] = {}
        self._trying: Future[StepRecord] | None = None
        self._pressed: _Pressed | None = None
        # Megatron's default leaves nearly all of a small model on the device: a ticked module would do nothing, and a
        # search would show what it saves.
        self._smallest_tensor = smallest_offloaded(lab.settings, lab.scenario)
        if self.backend.is_prediction:  # its times are those of the prediction
            self.axis = "event"
        self.form = SettingsForm.of(lab.settings, lab.scenario)
        if lab.settings.offload_modules is None:
            self.form = self.form.with_values(min_offloaded_tensor_size=self._smallest_tensor)
        self.refresh()

    @property
    def lines_to_copy(self) -> str:
        """The lines to paste into a job of `copied_as` so that it runs as the shown run did."""
        if not self.copied_as or self.shown is None:
            return ""
        return f"# {self.shown}\n{lines_for(self.copied_as, self.shown.scenario, self.shown.settings)}"

    @traitlets.observe("form")
    def _resolve(self, _change: object) -> None:
        form, of_lab = self.form, self.lab.scenario_as_opened
        settings, error_text = None, ""
        self.error_fields = ()
        try:
            self._idle_options = without_effect.of_state(form.state)
            scenario = form.scenario(of_lab)
            self._idle_options = without_effect.of_scenario(scenario)
            found = form.settings(scenario)
            if scenario.state != of_lab.state:
                self.error_fields = tuple(options_of(TrainingState))  # of any other error of the check
                self.lab.check_state(scenario.state, found)
            settings, self.error_fields = found, ()
        except ValueError as error:
            error_text = str(error)
            self.error_fields = error.fields if isinstance(error, RuleError) else self.error_fields
        self.settings, self.validation_error = settings, error_text
        # By a rule that the form may no longer break; and of what was taken, the controls show something else now.
        if self._notice_is_about != "result":
            self.say("" if settings is None else _READY, "form")

    @property
    def error_is_about_state(self) -> bool:
        """Whether `validation_error` is a rule of the training state, or of the allocator's options."""
        return next((name in STATE_OPTIONS for name in self.error_fields if name in OPTIONS), False)

    @property
    def rebuilds(self) -> Rebuilt:
        """What the next run rebuilds first: the form has another training state or allocator than the lab."""
        if self.error_is_about_state:
            return "nothing"
        return self.backend.rebuilt_by(self.lab.scenario, self.form.state, self.form.allocator)

    @property
    def backend(self) -> BackendKind:
        """What the lab's backend can do."""
        return KINDS[self.lab.backend.name]

    @property
    def state_note(self) -> str:
        """The form's training state and allocator in words: what the next run rebuilds, and what has no effect."""
        if self.error_is_about_state:
            return ""
        state, allocator, lab = self.form.state, self.form.allocator, self.lab
        words = [_in_words(state, allocator)]
        if state != lab.scenario.state or self.rebuilds != "nothing":
            built = "rebuilds nothing" if self.rebuilds == "nothing" else f"rebuilds the {self.rebuilds}"
            words.append(f"not yet in effect: the next run {built}")
        if allocator != lab.scenario.allocator and self.backend.on_gpu:
            words.append(f"'{allocator}' is only predicted: this process was started with '{lab.scenario.allocator}'")
        of_allocator = allocator.without_effect(
            has_allocator=self.backend.has_allocator, has_limit=lab.device_memory_bytes is not None
        )
        idle = self._idle_options | of_allocator
        words += [f"{name} has no effect: {reason}" for name, reason in idle.items()]
        return "; ".join(words)

    @property
    def scenario(self) -> Scenario:
        """What the lab runs now; the next run gives it the form's workload."""
        return self.lab.scenario

    def edit(self, **changes: Any) -> None:
        """Changes options in the form: the next run has them, and rebuilds what they need."""
        with self.lock:
            self.form = self.form.with_values(**changes)

    def toggle(self, field: str, module: str, *, on: bool) -> None:
        """Ticks or unticks a module of ``recompute_modules`` or ``offload_modules``."""
        with self.lock:
            self.form = self.form.toggled(field, module, on=on)

    def take(self, name: str, preset: Preset) -> None:
        """Puts a preset's settings and training state into the controls; other settings become the defaults."""
        with self.lock:
            source = f", as in {preset.source}" if preset.source else ""
            form = self.form.with_preset(preset.settings, preset.state, self._smallest_tensor)
            self._take(form, f"the preset '{name}'{source}.")

    def take_settings(self, settings: MemorySettings) -> None:
        """Puts settings into the controls; what they do not set or read keeps its value."""
        with self.lock:
            self._take(self.form.with_settings(settings), f"'{settings}': press Run to take the step.")

    def _take(self, form: SettingsForm, what: str) -> None:
        field = "min_offloaded_tensor_size"
        before, now = self.form.values[field], form.values[field]
        # A module that is ticked next would do something else, and the field is far from what the user pressed.
        smallest = "" if before == now else f" '{LABELS[field]}' was {before} and is now {now}."
        self.form = form
        self.say(f"The controls show {what}{smallest}", "form")

    def reuse(self) -> None:
        """Puts the shown run's settings and workload back into the controls."""
        with self.lock:
            if self.shown is None:
                self.say("No run is shown: choose one in the table first.")
                return
            form = self.form.with_run(self.shown.settings, self.shown.scenario)
            self._take(form, f"the settings of {self.shown}.")

    def run(self) -> Future[StepRecord] | None:
        """Starts a step with the settings of the form, or says in `notice` why not.

        During a step that is tried, the step with these settings starts when that one has ended.

        Returns:
            The future of the record, which ends after the state has the record; None if no step was started.
        """
        with self.lock:
            if self.tried is not None and self.is_selected(self.tried):
                return self._keep_tried()
        return self._start()

    def try_out(self) -> None:
        """Takes a step with the form's settings and shows it, without a row in the table; waits for its end.

        A run with the same settings is shown instead, if the table has one.
        """
        with self.lock:
            known = [run for run in self.runs if run.is_ok and self.is_selected(run)]
            if known:
                self.show(known[-1].number)
                return
        ended = self._start(is_tried=True)
        if ended is not None:
            with contextlib.suppress(Exception):  # it is a row of the table
                ended.result()

    @property
    def selection(self) -> Selection | None:
        """What Run would run; None while the form breaks a rule."""
        if self.settings is None:
            return None
        return self.form.scenario(self.lab.scenario_as_opened), self.settings

    def is_selected(self, run: Run) -> bool:
        """Whether a run had the settings, the workload and the training state that the controls show."""
        return _had(run, self.selection)

    def of_worst_rank(self, scenario: Scenario) -> Scenario:
        """Returns a job's scenario for the rank with the highest peak in the shown run: predictions step one rank."""
        job = None if self.shown is None else self.shown.job
        return scenario if job is None else scenario.on_rank(job.worst_rank)

    @property
    def base(self) -> Run | None:
        """The run that the table and the words above the chart compare with: the pinned one, or else the first."""
        if self.pinned is not None:
            return self.pinned if self.pinned.is_ok else None
        return next((run for run in self.runs if run.is_ok), None)

    def compared(self, with_base: Run | StepRecord | None) -> str:
        """Writes how much less than `base` a step needs, as ``, 2.0 MiB (20%) less than run 1``."""
        base, record = self.base, with_base.record if isinstance(with_base, Run) else with_base
        if base is None or base.record is None or record is None or base is with_base:
            return ""
        least = base.record.peak_allocated_bytes
        saved = least - record.peak_allocated_bytes
        if abs(saved) * _ABOUT_THE_SAME < least:
            is_written_alike = format_bytes(least) == format_bytes(record.peak_allocated_bytes)
            return f", {'' if is_written_alike else 'about '}the same as run {base.number}"
        words = "less" if saved > 0 else "more"
        return f", {format_bytes(abs(saved))} ({abs(saved) / least:.0%}) {words} than run {base.number}"

    def _keep_tried(self) -> Future[StepRecord]:
        """Makes the step that was tried a run of the table."""
        tried, ended = self.tried, Future[StepRecord]()
        assert tried is not None and tried.record is not None
        self.tried = None
        self.lab.records.append(tried.record)
        self.refresh()
        assert self.shown is not None
        self.say(f"{self.shown}: {self.shown.outcome}")
        ended.set_result(tried.record)
        return ended

    def _start(self, *, is_tried: bool = False, pressed: _Pressed | None = None) -> Future[StepRecord] | None:
        # The worker never takes this lock, so the lab may be called under it.
        with self._pressing:
            form, settings = (self.form, self.settings) if pressed is None else (pressed.form, pressed.settings)
            if settings is None:
                self.say(f"{_NOT_STARTED}: {self.validation_error}", "refused")
                return None
            with self.lock:
                if self._trying is not None and not is_tried:
                    return self._start_after_tried(form, settings)
            try:
                scenario = form.scenario(self.lab.scenario_as_opened)
                workload = {"seq_length": scenario.seq_length, "micro_batch_size": scenario.micro_batch_size}
                if any(getattr(self.lab.scenario, name) != value for name, value in workload.items()):
                    self.lab.set_workload(**workload)
                self.refresh()
                rebuilds = self.backend.rebuilt_by(self.lab.scenario, scenario.state, scenario.allocator)
                num_changes = len(self.lab.state_changes)
                request = StepRequest(settings=settings, state=scenario.state, allocator=scenario.allocator)
                running = self.lab.submit(request, self._note_progress)
            except ValueError as error:
                self.say(f"{_NOT_STARTED}: {error}", "refused")
                return None
            except Exception as error:  # noqa: BLE001 - any error becomes a row of the table, and the panel stays usable
                self._fail(error, form.scenario(self.lab.scenario_as_opened), settings)
                return None
            ended: Future[StepRecord] = Future() if pressed is None else pressed.ended
            with self.lock:
                self.progress, self.busy = None, True
                self._trying = ended if is_tried else None
                wanted = _in_words(scenario.state, scenario.allocator)
                rebuilding = f"Rebuilding the {rebuilds} for '{wanted}'. " if rebuilds != "nothing" else ""
                self.say(f"{rebuilding}Running: {settings}")
            running.add_done_callback(lambda done: self._finish(done, ended, scenario, settings, num_changes))
            return ended

    def _start_after_tried(self, form: SettingsForm, settings: MemorySettings) -> Future[StepRecord] | None:
        """Notes what Run was pressed for, until the step that is tried has ended."""
        selection = form.scenario(self.lab.scenario_as_opened), settings
        if self._pressed is None:
            self._pressed = _Pressed(form, settings, selection)
        elif self._pressed.selection != selection:
            waiting = self._pressed.settings
            self.say(
                f"{_NOT_STARTED}: a step with other settings ({waiting}) is waiting. Press Run again when it has ended",
                "refused",
            )
            return None
        self.say(f"Waiting for the running step to end. Then this step starts: {settings}")
        return self._pressed.ended

    def _start_pressed(self, pressed: _Pressed) -> None:
        if self._start(pressed=pressed) is None:  # `notice` says why
            with self.lock:
                if not self.lab.busy:  # else another step has begun in between, whose end sets both
                    self.progress, self.busy = None, False
            pressed.ended.cancel()

    @property
    def stops_all_ranks(self) -> bool:
        """Whether a step is stopped on several ranks, which end it together, before the optimizer."""
        return self.lab.scenario.layout.world_size > 1 and not self.backend.is_prediction

    def stop(self) -> None:
        """Ends the running step, as `Lab.stop` does; its row says ``stopped``."""
        with self.lock:
            pressed, self._pressed = self._pressed, None
        if pressed is not None:
            pressed.ended.cancel()
        was_running = self.lab.stop()
        end = "on all ranks together, before the optimizer" if self.stops_all_ranks else "after the current layer"
        self.say(f"Stopping: the step ends {end}." if was_running else "Nothing is running: press Run first.")

    def show(self, number: int) -> None:
        """Shows a run in the chart and in the text, and its outcome in `notice`."""
        with self.lock:
            run = self._run(number)
            if run is not self.shown:
                self.moment = None
                self.shown = run
                self.say(f"{run}: {run.outcome}")

    @property
    def one_rank(self) -> int | None:
        """The rank that is shown alone; None if all are shown, or the run has one rank only."""
        return self.rank if self.shown is not None and self.shown.has_rank(self.rank) else None

    @property
    def one_run(self) -> Run | None:
        """The shown run, as that of the rank that is shown alone if there is one."""
        return None if self.shown is None else self.shown.of_rank(self.rank)

    @property
    def shows_all_ranks(self) -> bool:
        """Whether the shown run has several ranks, and none of them is shown alone."""
        return self.shown is not None and self.shown.job is not None and self.one_rank is None

    @property
    def is_pinned(self) -> bool:
        """Whether what is shown is pinned."""
        return self.pinned is not None and self.pinned is self.shown and self.pinned_rank == self.one_rank

    def show_rank(self, rank: int | None) -> None:
        """Shows one rank of the shown run alone; None shows all ranks next to each other.

        Raises:
            ValueError: If the shown run has no record of the rank.
        """
        with self.lock:
            if rank is not None and (self.shown is None or not self.shown.has_rank(rank)):
                raise ValueError(f"rank is {rank}, and the shown run has no record of it: choose another rank, or all")
            self.moment = None
            self.rank = rank

    def pin(self) -> None:
        """Pins the shown run, or the rank of it that is shown, to compare others with it; unpins it if it is pinned."""
        with self.lock:
            if self.shown is None or self.shown is self.tried:
                self.say(_NO_ROW if self.shown is not None else "No run is shown: choose one in the table first.")
                return
            pinned, rank = (None, None) if self.is_pinned else (self.shown, self.one_rank)
            self.pinned_rank, self.pinned = rank, pinned
            self.say(f"Pinned {pinned.of_rank(rank)}." if pinned is not None else "No run is pinned.")

    def delete(self) -> None:
        """Removes the shown run here and from the lab's records, and shows the next run, or the previous one."""
        with self.lock:
            run = self.shown
            if run is None or run is self.tried:
                self.say(_NO_ROW if run is not None else "No run is shown: choose one in the table first.")
                return
            at = self.runs.index(run)
            _remove(self.lab.records, run.record)
            left = (*self.runs[:at], *self.runs[at + 1 :])
            pinned = self.pinned, self.pinned_rank
            if self.pinned is run:
                self.pinned_rank = self.pinned = None
            self.moment = None
            self.shown = left[min(at, len(left) - 1)] if left else None
            self.runs = left
            self.deleted = (at, run, *pinned)
            self.say(f"Deleted {run}.")

    def undo_delete(self) -> None:
        """Brings back the run that was deleted last, with its record, and shows it."""
        with self.lock:
            if self.deleted is None:
                self.say("No run has been deleted since the last step: there is none to bring back.")
                return
            at, run, pinned, pinned_rank = self.deleted
            if run.record is not None:
                self.lab.records.append(run.record)
            self.runs = (*self.runs[:at], run, *self.runs[at:])
            if pinned is run:
                self.pinned_rank, self.pinned = pinned_rank, pinned
            self.moment, self.shown, self.deleted = None, run, None
            self.say(f"{run} is back.")

    @property
    def timeline(self) -> Timeline | None:
        """What the chart shows, if it shows one timeline with events."""
        run = None if self.shows_all_ranks else self.one_run
        timeline = run.record.timeline if run is not None and run.record is not None else None
        return timeline if timeline is not None and len(timeline) else None

    def look_at(self, moment: int | None) -> None:
        """Selects an event, counted from the step's start, to show what is allocated after it; None selects the peak.

        Raises:
            ValueError: If the shown run has no such event.
        """
        with self.lock:
            timeline = self.timeline
            num_moments = len(timeline) - timeline.first_step_event if timeline is not None else 0
            if moment is not None and not 0 <= moment < num_moments:
                raise ValueError(f"moment is {moment}, but the shown run has {num_moments} events: count them from 0")
            self.moment = moment

    def refresh(self) -> None:
        """Adds a run for each new record of the lab, from steps of a cell for example."""
        with self.lock:
            if self._trying is not None:  # its record is no run yet
                return
            known = {id(run.record) for run in self.runs}
            new = [record for record in self.lab.records if id(record) not in known]
            for record in new:
                self._add(scenario=record.scenario, settings=record.settings, record=record)

    def _run(self, number: int) -> Run:
        for run in self.runs:
            if run.number == number:
                return run  # type: ignore[no-any-return]  # a traitlets.Tuple does not say of what
        raise ValueError(f"there is no run {number}: choose from {', '.join(str(run.number) for run in self.runs)}")

    def _add(self, **values: Any) -> None:
        self.deleted = None
        self._num_runs += 1
        run = Run(number=self._num_runs, backend=self.lab.backend.name, **values)
        self.moment = None
        self.runs = (*self.runs, run)
        self.shown = run

    def say(self, notice: str, about: _About = "result") -> None:
        """Shows a text as the result of the user's last action."""
        with self.lock:
            self._notice_is_about, self.notice = about, notice

    def _note_progress(self, progress: Progress) -> None:
        """Runs on the worker's thread many times per step; the page gets at most ten a second."""
        now = time.monotonic()
        if now - self._last_progress_at >= _SECONDS_BETWEEN_PROGRESS:
            self._last_progress_at = now
            with self.lock:
                self.progress = progress

    def _finish(
        self,
        done: Future[StepRecord],
        ended: Future[StepRecord],
        scenario: Scenario,
        settings: MemorySettings,
        num_changes: int,
    ) -> None:
        error, pressed, is_kept = done.exception(), None, False
        try:
            with self.lock:
                try:
                    is_tried = self._trying is ended
                    self._trying = None
                    pressed, self._pressed = self._pressed, None
                    is_kept = pressed is not None and pressed.selection == (scenario, settings)
                    if error is not None:
                        self._fail(error, scenario, settings)
                    elif is_tried:
                        self._show_tried(done.result())
                        if is_kept:
                            self._keep_tried()
                    else:
                        self.refresh()
                        assert self.shown is not None
                        rebuilt = [f"{change}. " for change in self.lab.state_changes[num_changes:]]
                        was_refused = self._notice_is_about == "refused"
                        again = f". {_PRESSED_MEANWHILE}" if was_refused else ""
                        self.say(f"{''.join(rebuilt)}{self.shown}: {self.shown.outcome}{again}")
                finally:  # what draws the new run may raise
                    self.progress, self.busy = None, pressed is not None and not is_kept
        finally:
            for each in [ended, pressed.ended] if pressed is not None and is_kept else [ended]:
                if error is not None:
                    each.set_exception(error)
                else:
                    each.set_result(done.result())
            if pressed is not None and not is_kept:
                # The lab's worker, which runs this, cannot start a step.
                threading.Thread(target=self._start_pressed, args=(pressed,), name="memlab-run", daemon=True).start()

    def _show_tried(self, record: StepRecord) -> None:
        _remove(self.lab.records, record)
        run = Run(
            number=TRIED,
            scenario=record.scenario,
            settings=record.settings,
            backend=self.lab.backend.name,
            record=record,
        )
        self.moment = None
        self.tried = self.shown = run
        self.say(f"{run}: {run.status if run.is_ok else run.outcome}; press Run to keep it in the table")

    def _fail(self, error: BaseException, scenario: Scenario, settings: MemorySettings) -> None:
        _logger.error("the step under %s ended in an error", settings, exc_info=error)
        # The error's frames hold tensors, and the lab keeps the error until the next step.
        traceback.clear_frames(error.__traceback__)
        # After a rebuild that failed, the lab has its former state; after a rank failed, the next step starts others.
        lab_is_in_order = isinstance(error, RankFailed) or scenario.state != self.lab.scenario.state
        with self.lock:
            self._add(
                scenario=scenario,
                settings=settings,
                error=f"{error}" if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}",
                lab_is_in_order=lab_is_in_order,
            )
            self.say(f"{self.shown}: {self.shown.outcome}" if self.shown is not None else "")


def _in_words(state: TrainingState, allocator: AllocatorSettings) -> str:
    return "; ".join([str(state)] + ([str(allocator)] if allocator.changed() else []))


def _had(run: Run, selection: Selection | None) -> bool:
    if selection is None:
        return False
    scenario, settings = selection
    return (_of_job(run.scenario), as_read(run.settings)) == (_of_job(scenario), settings)


def _of_job(scenario: Scenario) -> Scenario:
    """Returns the scenario of a job, whichever of its ranks this one is about."""
    return scenario.on_rank(0)


def _remove(records: list[StepRecord], record: StepRecord | None) -> None:
    """Removes one record in place: the worker may append another at any moment, so the list is never rewritten."""
    for at, other in enumerate(records):
        if other is record:
            del records[at]
            return
