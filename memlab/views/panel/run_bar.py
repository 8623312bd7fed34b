"""Run and Stop, the progress of the step, and the result of the last action."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from memlab.views.panel.state import LabState
from memlab.views.panel.what_if import WhatIf


class RunBar:
    """The row that starts and ends steps. `box` is the widget.

    Args:
        state: What it shows and changes.
        what_if: What the selected settings would need.
        *others: Further buttons of the row.
    """

    def __init__(self, state: LabState, what_if: WhatIf, *others: Any) -> None:
        self._state, self._what_if = state, what_if
        self.predicts = ipywidgets.Checkbox(description="predict changes", indent=False)
        self.predicts.observe(lambda change: what_if.set_trait("is_on", change["new"]), names=["value"])
        self.verdict = ipywidgets.HTML()
        self.run = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.stop = ipywidgets.Button(description="Stop", icon="stop")
        self.progress = ipywidgets.IntProgress(min=0, max=1)
        self.place = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        self.stop.tooltip = "Stops the step before its next layer; the model stays usable"
        for name in ("run", "stop", "progress", "status", "predicts", "verdict"):
            getattr(self, name).add_class(f"memlab-{name}")
        self.place.add_class("memlab-progress-text")
        # Run stays enabled while a step runs: a second press says in words why it starts nothing.
        self.run.on_click(lambda _: state.run())
        self.stop.on_click(lambda _: state.stop())
        self.box = ipywidgets.Box(
            [self.run, self.stop, self.verdict, self.progress, self.place, self.predicts, *others, self.status]
        )
        self.box.add_class("memlab-run-bar")
        self._show_progress()
        self._show_notice()
        state.observe(lambda _: self._show_progress(), names=["busy", "progress"])
        state.observe(lambda _: self._show_notice(), names=["notice"])
        state.observe(lambda _: self._show_verdict(), names=["form", "shown", "pinned", "runs"])
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
        self.verdict.value = f'<div role="status">{html.escape(self._what_if.words, quote=False)}</div>'

    def _show_notice(self) -> None:
        self.status.value = f'<div role="status">{html.escape(self._state.notice, quote=False)}</div>'


def _place(progress: Any) -> str:
    if progress is None:
        return "starting"
    where = f"{progress.phase}, {progress.module}" if progress.module else progress.phase
    if not progress.total:
        return where
    return f"{where}: {progress.done} of {progress.total} layer passes"
