"""The controls of the training state and of torch's allocator, under a button: they take effect with the next run."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from memlab.views.panel.option_control import OptionControl
from memlab.views.panel.settings_form import STATE_OPTIONS, of_engine
from memlab.views.panel.state import LabState


class StateControls:
    """The controls on one state. `box` is the widget; `by_name` holds each control under its field's name."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self._options = of_engine(STATE_OPTIONS, state.scenario.engine)
        self._controls = {name: OptionControl(one) for name, one in self._options.items()}
        self.by_name: dict[str, Any] = {name: control.widget for name, control in self._controls.items()}
        self.toggle = ipywidgets.ToggleButton(description="Training state")
        self.toggle.tooltip = (
            "Precision and place of gradients and optimizer state, loss, attention, FP8, torch's allocator"
        )
        self.toggle.add_class("memlab-state-toggle")
        self.note = ipywidgets.HTML()
        self.note.add_class("memlab-state-note")
        self.error_box = ipywidgets.HTML()
        self.error_box.add_class("memlab-validation-error")
        self._section = ipywidgets.Box(self._groups())
        self._section.add_class("memlab-settings")
        head = ipywidgets.Box([self.toggle, self.note])
        head.add_class("memlab-state-bar")
        self.box = ipywidgets.VBox([head, self.error_box, self._section])
        self.toggle.observe(lambda change: state.set_trait("state_open", change["new"]), names=["value"])
        self._show()
        self._show_section()
        state.observe(lambda _: self._show(), names=["form", "validation_error", "busy", "runs"])
        state.observe(lambda _: self._show_section(), names=["state_open"])

    def _groups(self) -> list[Any]:
        boxes: dict[str, list[Any]] = {}
        for name, one in self._options.items():
            heading = [ipywidgets.HTML(f"<h4>{one.group}</h4>")] if one.group not in boxes else []
            boxes.setdefault(one.group, heading).append(self._connected(name))
        groups = [ipywidgets.VBox(children) for children in boxes.values()]
        for group in groups:
            group.add_class("memlab-group")
        return groups

    def _connected(self, name: str) -> Any:
        control = self._controls[name]
        control.widget.add_class(f"memlab-state-{name.replace('_', '-')}")
        control.widget.observe(lambda change: self._state.edit(**{name: control.value(change["new"])}), names=["value"])
        return control.widget

    def _show(self) -> None:
        state = self._state
        for name, control in self._controls.items():
            control.show(state.form.values[name])
        text = state.validation_error
        is_about_state = state.error_is_about_state
        self.error_box.value = f'<div role="alert">{html.escape(text, quote=False)}</div>' if is_about_state else ""
        self.error_box.layout.display = None if is_about_state else "none"
        self.note.value = f'<div role="status">{html.escape(state.state_note, quote=False)}</div>'

    def _show_section(self) -> None:
        self.toggle.value = self._state.state_open
        self._section.layout.display = None if self._state.state_open else "none"
