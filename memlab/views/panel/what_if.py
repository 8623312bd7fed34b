"""What the selected settings would need, before a step is taken with them.

On a simulated lab a step costs nothing on a device, so the lab takes it at once, and the chart shows it. Next to a live
lab another process predicts the step, so that the model and the kernel stay usable.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import traitlets

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.backend_kind import KINDS
from memlab.config.settings import MemorySettings
from memlab.lab.prediction_process import PredictionProcess
from memlab.record.notebook_result import RUN_FOLDER_VARIABLE
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes
from memlab.views.panel.run import TRIED, cost_words, without_effect_words
from memlab.views.panel.settings_form import in_labels
from memlab.views.panel.state import LabState, Selection

_logger = logging.getLogger(__name__)
# An error of a prediction is a notice. Without this handler it would also be printed under the cell that runs.
_logger.addHandler(logging.NullHandler())
_SETTLE_SECONDS = 0.1
"""A prediction starts when the controls have not changed for this long."""
_MOST_KEPT = 200
_CONTROLS = MemorySettings.__slots__
"""What else has no effect is of the training state or the allocator, whose controls say so."""
_PROCESS = PredictionProcess()
"""For all panels of this kernel: it takes seconds to start."""


class WhatIf(traitlets.HasTraits):
    """Predicts the step that Run would take, whenever the controls change; the last selection wins.

    Args:
        state: The panel's state, whose form is the selection.
        process: Predicts next to a live lab.
    """

    is_on = traitlets.Bool()
    """Whether a change of the controls is predicted."""
    predicted = traitlets.Instance(StepRecord, allow_none=True)
    """The predicted step with the selected settings; None while there is none."""
    notice = traitlets.Unicode()
    """Why there is no prediction, in words; empty if there is one, or nothing to predict."""

    def __init__(self, state: LabState, process: Any = _PROCESS) -> None:
        super().__init__()
        self._state = state
        self._process = process
        self._takes_steps = KINDS[state.lab.backend.name].is_prediction
        self._changed = threading.Condition(state.lock)
        self._wanted: Selection | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._known: dict[Selection, StepRecord] = {}
        # The shown run of a job decides which rank is predicted; on a simulated lab it is the prediction.
        state.observe(lambda _: self._select(), names=["form"] if self._takes_steps else ["form", "shown"])
        state.observe(lambda _: self._wake(), names=["busy"])

    @property
    def words(self) -> str:
        """What the controls' settings need and cost, next to what the shown run needed if it had the same settings."""
        state, predicted = self._state, self.predicted
        if state.settings is None:
            return f"not possible: {state.validation_error}"
        run = state.shown
        measured = run.record if run is not None and run.is_ok and state.is_selected(run) else None
        if run is not None and run.number == TRIED:
            predicted, measured = predicted or measured, None
        if measured is not None:
            words = f"peak {format_bytes(measured.peak_allocated_bytes)}{state.compared(run)}{_reserved(measured)}"
            if predicted is None:
                return words
            return f"{words}; predicted {format_bytes(predicted.peak_allocated_bytes)}{_reserved(predicted)}"
        if predicted is None:
            return self.notice
        peak = f"predicted peak {format_bytes(predicted.peak_allocated_bytes)}"
        reasons = predicted.without_effect.items()
        idle = {name: in_labels(reason) for name, reason in reasons if name.partition(":")[0] in _CONTROLS}
        needs = f"{peak}{state.compared(predicted)}{_reserved(predicted)}"
        return "; ".join([needs, *cost_words(predicted), *without_effect_words(idle)])

    def close(self) -> None:
        """Ends the thread; the process stays for the next panel."""
        with self._state.lock:
            self._is_closed, self.is_on = True, False
            self._changed.notify_all()
        self.unobserve_all()

    @traitlets.observe("is_on")
    def _turned(self, _change: object) -> None:
        with self._state.lock:
            self._wanted, self.predicted, self.notice = None, None, ""
        # In a headless run nobody changes a control, so the process is not started in advance.
        if self.is_on and not self._takes_steps and RUN_FOLDER_VARIABLE not in os.environ:
            self._process.start()
            self._select()

    def _wake(self) -> None:
        with self._state.lock:
            self._changed.notify_all()

    def _select(self) -> None:
        """Asks for the form's settings; what was asked for before is no longer wanted."""
        state = self._state
        with state.lock:
            selection = state.selection
            self._wanted, self.predicted, self.notice = None, None, ""
            if not self.is_on or selection is None:
                return
            selection = state.of_worst_rank(selection[0]), selection[1]
            if selection in self._known:
                self.predicted = self._known[selection]
                return
            self._wanted, self.notice = selection, "predicting the peak ..."
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer, name="memlab-what-if", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _answer(self) -> None:
        """Predicts the newest selection, as long as there is one that nothing has predicted."""
        state = self._state
        while True:
            with state.lock:
                while not self._is_closed and (self._wanted is None or (self._takes_steps and state.busy)):
                    self._changed.wait()
                if self._is_closed:
                    return
                selection = self._wanted
                if not self._takes_steps:
                    self._changed.wait(_SETTLE_SECONDS)
                    if self._is_closed or self._wanted != selection:
                        continue
            assert selection is not None
            found, notice = None, ""
            try:
                if self._takes_steps:
                    self._finish(selection, None, "")
                    state.try_out()
                    continue
                found = self._process.predict(*selection, state.lab.backend.name)
            except ValueError as error:
                notice = f"not predicted: {error}"
            except Exception as error:  # the thread goes on with the next selection
                _logger.exception("the step under %s could not be predicted", selection[1])
                words = " ".join(f"{type(error).__name__}: {error}".split())
                notice = f"not predicted ({words}): change a setting to try again"
            self._finish(selection, found, notice)

    def _finish(self, selection: Selection, found: StepRecord | None, notice: str) -> None:
        with self._state.lock:
            if found is not None:
                self._known[selection] = found
                while len(self._known) > _MOST_KEPT:
                    del self._known[next(iter(self._known))]
            if self._wanted == selection:  # a prediction of what was selected before is not shown
                self._wanted, self.predicted, self.notice = None, found, notice


def _reserved(record: StepRecord) -> str:
    """Writes the reserved peak where options of the allocator are set: it is what they change."""
    if record.scenario.allocator == AllocatorSettings() or record.peak_reserved_bytes is None:
        return ""
    return f", {format_bytes(record.peak_reserved_bytes)} reserved"
