"""The list *Copy as*: the lines with which another framework runs as the shown run did."""

from __future__ import annotations

from typing import Any

import ipywidgets

from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.views.panel.state import LabState


class CopyAs:
    """A list of frameworks, and a text to copy from, which is the state's `lines_to_copy`. `box` is the widget."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        titles = [(framework.title, name) for name, framework in FRAMEWORKS.items()]
        self.framework = ipywidgets.Dropdown(options=[("choose a framework", ""), *titles])
        self.framework.description = "Copy the run as"
        self.framework.tooltip = "The shown run's settings, as lines for a job of another framework"
        self.framework.style.description_width = "initial"
        self.framework.add_class("memlab-copy-as")
        self.framework.observe(lambda change: state.set_trait("copied_as", change["new"]), names=["value"])
        self.lines = ipywidgets.Textarea(disabled=False, tooltip="Lines to paste into a job of the framework")
        self.lines.add_class("memlab-copied-lines")
        self.box: Any = ipywidgets.VBox([self.framework, self.lines])
        self._show()
        state.observe(lambda _: self._show(), names=["copied_as", "shown"])

    def _show(self) -> None:
        text = self._state.lines_to_copy
        self.framework.value = self._state.copied_as
        self.lines.value, self.lines.rows = text, min(20, 1 + text.count("\n"))
        self.lines.layout.display = None if text else "none"
