"""A slider with an accessible name, which the handle of ipywidgets' own slider lacks."""

from __future__ import annotations

import anywidget
import traitlets

from memlab.views.panel.static_files import widget_code


class Slider(anywidget.AnyWidget):
    """The browser's own slider for whole numbers; its value changes when the user releases the handle."""

    _esm = widget_code("slider.js")

    name = traitlets.Unicode().tag(sync=True)
    """What it sets, for screen readers."""
    min = traitlets.Int(0).tag(sync=True)
    max = traitlets.Int(0).tag(sync=True)
    value = traitlets.Int(0).tag(sync=True)
    disabled = traitlets.Bool(default_value=False).tag(sync=True)

    def __init__(self, **traits: object) -> None:
        super().__init__(**traits)
        self.add_class("memlab-slider")
