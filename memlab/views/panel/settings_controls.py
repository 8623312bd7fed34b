"""The controls of the settings and the workload: they mirror the form, and a note next to each says what it did."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets

from memlab.config.model_restrictions import without_effect
from memlab.config.settings import (
    CHECKPOINT_INPUT_REMEDIES,
    OFFLOAD_MODULES,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODULES,
    SINCE_MEGATRON_0_19,
)
from memlab.units import format_bytes
from memlab.views.panel.run import GRADIENTS, TRIED
from memlab.views.panel.settings_form import SettingsForm
from memlab.views.panel.state import LabState

# Values by the words that a control shows. A Dropdown reads the value None as "nothing chosen", so it holds the words.
_GRANULARITIES = {"none": None, "full": "full", "selective": "selective"}
_METHODS = {method: method for method in RECOMPUTE_METHODS}
_REMEDIES = {"kept": None, **{name.replace("_", " "): name for name in CHECKPOINT_INPUT_REMEDIES}}
_DEVICE_OR_HOST = {"device": False, "host": True}
# Gradients are dropped, not copied: between steps the optimizer has already used them.
_GRADIENTS = {"with the optimizer state": None, "device": False, "dropped": True}
_GROUPS = {
    "offload_parameters": "parameters",
    "offload_gradients": GRADIENTS,
    "offload_optimizer": "optimizer state",
}
_LETTERS_BESIDE = 30
"""Of a note that fits beside its tick; a longer one has a row of its own."""
_EXCEPT_UPDATE = "offload_optimizer_except_update"


class SettingsControls:
    """Five groups of controls on one state. `box` is the widget; `by_name` holds each control.

    Names are those of the fields, and ``field:module`` for the ticks.
    """

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.by_name: dict[str, Any] = {}
        self.error_boxes: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._boxes: dict[str, Any] = {}
        self._reads: dict[str, Callable[[SettingsForm], Any]] = {}
        self.box = ipywidgets.VBox(
            [
                *(self._recompute(), self._offload(), self._between_steps(), self._workload()),
                self._offload_since_0_19(),
            ]
        )
        self.box.add_class("memlab-settings")
        self._show_form()
        state.observe(lambda _: self._show_form(), names=["form"])
        state.observe(lambda _: self._show_validation_error(), names=["validation_error"])
        state.observe(lambda _: self._show_notes(), names=["shown"])

    def _recompute(self) -> Any:
        return self._group(
            "Recompute",
            [
                self._choice("recompute_granularity", "granularity", _GRANULARITIES),
                _side_by_side(
                    [
                        self._choice("recompute_method", "method", _METHODS),
                        self._number("recompute_num_layers", _typed("layers")),
                    ]
                ),
                ipywidgets.HTML("modules (granularity selective):"),
                _side_by_side(self._tick("recompute_modules", module) for module in RECOMPUTE_MODULES),
                self._choice("checkpoint_input_remedy", "MoE checkpoint's input", _REMEDIES),
            ],
            ("recompute_", "checkpoint_input_remedy"),
        )

    def _offload(self) -> Any:
        ticks = _side_by_side(self._tick("offload_modules", module) for module in OFFLOAD_MODULES)
        size = _typed("smallest tensor (elements)")
        return self._group(
            "Offload during the step",
            [ticks, self._number("min_offloaded_tensor_size", size)],
            ("offload_modules", "min_offloaded_tensor_size"),
        )

    def _offload_since_0_19(self) -> Any:
        """Below the workload, so that what every version has is on one screen."""
        fraction, delta, inflight = SINCE_MEGATRON_0_19
        share = ipywidgets.FloatText(description="share of groups offloaded", style={"description_width": "initial"})
        numbers = [
            self._number(fraction, share),
            self._number(delta, _typed("more bytes kept, per stage")),
            self._number(inflight, _typed("copies in progress (-1: any)"), none=-1),
        ]
        return self._group("Offload, since megatron-core 0.19", numbers, SINCE_MEGATRON_0_19)

    def _between_steps(self) -> Any:
        places = {name: _GRADIENTS if name == "offload_gradients" else _DEVICE_OR_HOST for name in _GROUPS}
        boxes = [self._choice(name, _GROUPS[name], choices) for name, choices in places.items()]
        boxes.append(self._choice(_EXCEPT_UPDATE, "optimizer, except update", _DEVICE_OR_HOST))
        return self._group("Between steps", boxes, (*_GROUPS, _EXCEPT_UPDATE))

    def _workload(self) -> Any:
        fields = {"seq_length": "tokens", "micro_batch_size": "micro-batch"}
        numbers = [self._number(name, _typed(label)) for name, label in fields.items()]
        return self._group("Workload", [_side_by_side(numbers)], tuple(fields))

    def _group(self, title: str, children: list[Any], prefixes: tuple[str, ...]) -> Any:
        """A titled group with a place for the text of a rule, which begins with the field that breaks it."""
        error_box = ipywidgets.HTML()
        error_box.add_class("memlab-validation-error")
        self.error_boxes |= dict.fromkeys(prefixes, error_box)
        box = ipywidgets.VBox([ipywidgets.HTML(f"<h4>{title}</h4>"), error_box, *children])
        box.add_class("memlab-group")
        return box

    def _choice(self, field: str, label: str, choices: dict[str, Any]) -> Any:
        """A choice among values of a field of the form, by their words."""
        control = ipywidgets.Dropdown(options=list(choices), description=label)
        control.style.description_width = "initial"
        control.observe(lambda change: self._state.edit(**{field: choices[change["new"]]}), names=["value"])
        words = {value: word for word, value in choices.items()}
        return self._register(field, control, lambda form: words.get(getattr(form, field)))

    def _number(self, field: str, control: Any, none: int | None = None) -> Any:
        """A number that is a field of the form; `none` is shown where the field is None."""

        def edit(change: dict[str, Any]) -> None:
            self._state.edit(**{field: None if change["new"] == none else change["new"]})

        def read(form: SettingsForm) -> Any:
            value = getattr(form, field)
            return none if value is None else value

        control.observe(edit, names=["value"])
        return self._register(field, control, read)

    def _tick(self, field: str, module: str) -> Any:
        control = ipywidgets.Checkbox(description=module, indent=False)
        name = f"{field}:{module}"

        def edit(change: dict[str, Any]) -> None:
            if not control.disabled:  # the form keeps what is ticked, for when the control applies again
                self._state.toggle(field, module, on=change["new"])

        def read(form: SettingsForm) -> bool:
            return module in getattr(form, field) and not control.disabled

        control.observe(edit, names=["value"])
        return self._register(name, control, read)

    def _register(self, name: str, control: Any, read: Callable[[SettingsForm], Any]) -> Any:
        """Puts a note next to a control: what it transferred in the shown run, or why it has no effect."""
        self.by_name[name], self._reads[name] = control, read
        note = self.notes[name] = ipywidgets.HTML()
        hook = name.replace("_", "-").replace(":", "-")
        control.add_class(f"memlab-{hook}")
        note.add_class(f"memlab-note-{hook}")
        box = self._boxes[name] = ipywidgets.Box([control, note])
        box.add_class("memlab-noted")
        return box

    def _show_form(self) -> None:
        self._show_notes()  # first: a tick that does not apply is shown as not ticked
        form = self._state.form
        for name, control in self.by_name.items():
            value = self._reads[name](form)
            if value is not None:
                control.value = value
        self._show_validation_error()

    def _show_notes(self) -> None:
        reasons = self._state.form.not_applicable(self._state.scenario.architecture)
        settings = self._state.settings
        idle = without_effect(settings, self._state.scenario.architecture) if settings is not None else {}
        for name, control in self.by_name.items():
            reason = reasons.get(name)
            control.disabled = reason is not None
            note = html.escape(f"no effect: {idle[name]}" if name in idle else self._note_of_shown_run(name))
            box = self._boxes[name]
            (box.add_class if len(note) > _LETTERS_BESIDE and not reason else box.remove_class)("memlab-wide")
            if reason:
                # The note covers the control: JupyterLab shows the tooltip of a disabled control nowhere, and that of
                # its label, which is the control's name, everywhere else.
                why = html.escape(reason)
                self.notes[
                    name
                ].value = f'<i class="memlab-why" role="note" tabindex="0" title="{why}" aria-label="{why}"></i>'
            else:
                self.notes[name].value = note

    def _note_of_shown_run(self, name: str) -> str:
        """What a control's setting did in the shown run; empty if it was not set, or is not an offload."""
        run = self._state.shown
        if run is None:
            return ""
        where = "" if run.number == TRIED else f" in run {run.number}"
        if name in run.without_effect:
            return f"no effect{where}: {run.without_effect[name]}"
        subject = _GROUPS.get(name) or name.removeprefix("offload_modules:")
        if "offload" not in name or subject not in run.transferred_bytes:
            return ""
        verb = "dropped" if subject == GRADIENTS else "transferred"
        return f"{format_bytes(run.transferred_bytes[subject])} {verb}{where}"

    def _show_validation_error(self) -> None:
        text = "" if self._state.error_is_about_state else self._state.validation_error
        about = [box for prefix, box in self.error_boxes.items() if text.startswith(prefix)]
        for box in self.error_boxes.values():
            is_about = bool(text) and box is (about[0] if about else self.error_boxes["seq_length"])
            box.value = f'<div role="alert">{html.escape(text, quote=False)}</div>' if is_about else ""


def _side_by_side(widgets: Iterable[Any]) -> Any:
    box = ipywidgets.Box([*widgets])
    box.add_class("memlab-side-by-side")
    return box


def _typed(label: str) -> Any:
    return ipywidgets.IntText(description=label, style={"description_width": "initial"})
