"""Run and Stop, the progress of the step, what the controls' settings need, and the result of the last action.

The two texts share a place of three lines, however long they are: nothing below them moves. A longer text scrolls.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from memlab.views.panel.state import LabState
from memlab.views.panel.what_if import WhatIf


class RunBar:
    """The rows that start and end steps. `box` is the widget.

    Args:
        what_if: What the selected settings would need.
        *others: Further buttons of the first row.
    """

    def __init__(self, state: LabState, what_if: WhatIf, *others: Any) -> None:
        self._state, self._what_if = state, what_if
        self.predicts = ipywidgets.Checkbox(description="predict changes", indent=False)
        self.predicts.tooltip = "Predicts what the controls' settings need, before Run"
        self.predicts.observe(lambda change: what_if.set_trait("is_on", change["new"]), names=["value"])
        self.verdict = ipywidgets.HTML()
        self.run = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.stop = ipywidgets.Button(description="Stop", icon="stop")
        self.progress = ipywidgets.IntProgress(min=0, max=1)
        self.place = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        end = "on all ranks together, before the optimizer" if state.stops_all_ranks else "after the current layer"
        self.stop.tooltip = f"Stops the step {end}; the model stays usable"
        self.undo = ipywidgets.Button(description="Undo delete", tooltip="Brings back the run that was deleted last")
        self.undo.on_click(lambda _: state.undo_delete())
        for name in ("run", "stop", "progress", "status", "predicts", "verdict", "undo"):
            getattr(self, name).add_class(f"memlab-{name}")
        self.place.add_class("memlab-progress-text")
        # Run stays enabled while a step runs: a second press says in words why it starts nothing.
        self.run.on_click(lambda _: state.run())
        self.stop.on_click(lambda _: state.stop())
        outcome = ipywidgets.Box([self.progress, self.place, self.status, self.undo])
        outcome.add_class("memlab-outcome")
        texts = ipywidgets.Box([self.verdict, outcome])
        texts.add_class("memlab-run-texts")
        self.box = ipywidgets.Box([self.run, self.stop, self.predicts, *others, texts])
        self.box.add_class("memlab-run-bar")
        self._show_progress()
        self._show_notice()
        state.observe(lambda _: self._show_progress(), names=["busy", "progress"])
        state.observe(lambda _: self._show_notice(), names=["notice", "deleted"])
        state.observe(lambda _: self._show_verdict(), names=["form", "settings", "shown", "pinned", "runs"])
        what_if.observe(lambda _: self._show_verdict(), names=["is_on", "predicted", "notice"])
        self._show_verdict()
        self._show_rebuild()
        state.observe(lambda _: self._show_rebuild(), names=["form", "busy", "runs"])

    def _show_progress(self) -> None:
        progress, busy = self._state.progress, self._state.busy
        self.stop.disabled = not busy
        self.progress.layout.display = "flex" if busy else "none"
        self.progress.max = progress.total or 1 if progress else 1
        self.progress.value = progress.done if progress else 0
        self.place.value = html.escape(_place(progress)) if busy else ""

    def _show_rebuild(self) -> None:
        rebuilds = self._state.rebuilds
        self.run.description = "Run" if rebuilds == "nothing" else f"Rebuild {rebuilds} and run"
        first = "" if rebuilds == "nothing" else f"Rebuilds the {rebuilds} for the new training state or allocator. "
        self.run.tooltip = f"{first}Takes a step with these settings, after a warm-up step if they have changed"

    def _show_verdict(self) -> None:
        self.predicts.value = self._what_if.is_on
        words = html.escape(self._what_if.words, quote=False)
        is_refused = self._state.settings is None
        # A refusal ends with what to do, which a place of three lines may not show: the tooltip has all of it.
        tooltip = f' title="{html.escape(self._what_if.words)}"' if is_refused else ""
        self.verdict.value = f'<div role="status"{tooltip}>{f"<b>Controls:</b> {words}" if words else ""}</div>'
        self.run.disabled = is_refused

    def _show_notice(self) -> None:
        self.status.value = f'<div role="status">{html.escape(self._state.notice, quote=False)}</div>'
        self.undo.layout.display = "none" if self._state.deleted is None else "flex"


def _place(progress: Any) -> str:
    if progress is None:
        return "starting"
    where = progress.phase.replace("warm-up ", "warm-up step, ").removesuffix(", idle")
    where = f"{where} of {progress.module}" if progress.module else where
    return f"{where}: {progress.done / progress.total:.0%} done" if progress.total else where
