"""Run and Stop, the progress of the step, and the result of the last action."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from memlab.views.panel.state import LabState


class RunBar:
    """The row that starts and ends steps. `box` is the widget.

    Args:
        state: What it shows and changes.
        *others: Further buttons of the row.
    """

    def __init__(self, state: LabState, *others: Any) -> None:
        self._state = state
        self.run = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.stop = ipywidgets.Button(description="Stop", icon="stop")
        self.progress = ipywidgets.IntProgress(min=0, max=1)
        self.place = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        self.stop.tooltip = "Stops the step before its next layer; the model stays usable"
        for name in ("run", "stop", "progress", "status"):
            getattr(self, name).add_class(f"memlab-{name}")
        self.place.add_class("memlab-progress-text")
        # Run stays enabled while a step runs: a second press says in words why it starts nothing.
        self.run.on_click(lambda _: state.run())
        self.stop.on_click(lambda _: state.stop())
        self.box = ipywidgets.Box([self.run, self.stop, *others, self.progress, self.place, self.status])
        self.box.add_class("memlab-run-bar")
        self._show_progress()
        self._show_notice()
        state.observe(lambda _: self._show_progress(), names=["busy", "progress"])
        state.observe(lambda _: self._show_notice(), names=["notice"])
        self._show_rebuild()
        state.observe(lambda _: self._show_rebuild(), names=["form", "busy", "runs"])

    def _show_progress(self) -> None:
        progress, busy = self._state.progress, self._state.busy
        self.stop.disabled = not busy
        self.progress.layout.visibility = "visible" if busy else "hidden"
        self.progress.max = progress.total or 1 if progress else 1
        self.progress.value = progress.done if progress else 0
        self.place.value = html.escape(_place(progress)) if busy else ""

    def _show_rebuild(self) -> None:
        rebuilds = self._state.rebuilds
        self.run.description = "Run" if rebuilds == "nothing" else f"Rebuild {rebuilds} and run"
        first = "" if rebuilds == "nothing" else f"Rebuilds the {rebuilds} for the new training state. "
        self.run.tooltip = f"{first}Takes a step with these settings, after a warm-up step if they have changed"

    def _show_notice(self) -> None:
        self.status.value = f'<div role="status">{html.escape(self._state.notice, quote=False)}</div>'


def _place(progress: Any) -> str:
    if progress is None:
        return "starting"
    where = f"{progress.phase}, {progress.module}" if progress.module else progress.phase
    if not progress.total:
        return where
    return f"{where}: {progress.done} of {progress.total} layer passes"
