"""The controls of the settings and the workload: they mirror the draft, and say why one does not apply."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets

from memlab.config.settings import CHECKPOINT_INPUT_REMEDIES, OFFLOAD_MODULES, RECOMPUTE_METHODS, RECOMPUTE_MODULES
from memlab.config.settings_on_model import without_effect
from memlab.units import format_bytes
from memlab.views.panel.settings_form import Draft
from memlab.views.panel.slider import Slider
from memlab.views.panel.state import LabState

# By what a control shows. A Dropdown takes the value None for no choice at all, so its values are these words.
_GRANULARITIES = {"none": None, "full": "full", "selective": "selective"}
_METHODS = {method: method for method in RECOMPUTE_METHODS}
_REMEDIES = {"kept": None, **{name.replace("_", " "): name for name in CHECKPOINT_INPUT_REMEDIES}}
_DEVICE_OR_HOST = {"device": False, "host": True}
# Gradients are dropped, not copied: between steps they hold nothing that the optimizer has not used.
_GRADIENTS = {"with the optimizer state": None, "device": False, "dropped": True}
_WAITING = {
    "offload_parameters": "parameters",
    "offload_gradients": "gradients",
    "offload_optimizer": "optimizer state",
}


class SettingsControls:
    """Four groups of controls on one state. `box` is the widget; `by_name` holds each control.

    Names are those of the fields, ``field:module`` for the ticks, and ``recompute_num_layers:slider``.
    """

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.by_name: dict[str, Any] = {}
        self.refusals: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._reads: dict[str, Callable[[Draft], Any]] = {}
        last_column = ipywidgets.VBox([self._between_steps(), self._workload()])
        last_column.add_class("memlab-column")
        self.box = ipywidgets.Box([self._recompute(), self._offload(), last_column])
        self.box.add_class("memlab-settings")
        self._follow_draft()
        state.observe(lambda _: self._follow_draft(), names=["draft"])
        state.observe(lambda _: self._follow_refusal(), names=["refusal"])
        state.observe(lambda _: self._follow_reasons(), names=["runs"])

    def _recompute(self) -> Any:
        num_layers = max(self._state.scenario.layers_of_chunks)
        slider = Slider(name="recompute_num_layers", min=1, max=num_layers, value=1)
        return self._group(
            "Recompute",
            [
                self._choice("recompute_granularity", "granularity", _GRANULARITIES),
                self._choice("recompute_method", "method", _METHODS),
                self._number("recompute_num_layers", _typed("layers")),
                self._number("recompute_num_layers:slider", slider),
                ipywidgets.HTML("modules, under selective:"),
                *(self._tick("recompute_modules", module) for module in RECOMPUTE_MODULES),
                self._choice("checkpoint_input_remedy", "MoE checkpoint's input", _REMEDIES),
            ],
            ("recompute_", "checkpoint_input_remedy"),
        )

    def _offload(self) -> Any:
        ticks = [self._tick("offload_modules", module) for module in OFFLOAD_MODULES]
        size = _typed("at least, elements")
        return self._group(
            "Offload during the step",
            [*ticks, self._number("min_offloaded_tensor_size", size)],
            ("offload_modules", "min_offloaded_tensor_size"),
        )

    def _between_steps(self) -> Any:
        places = {name: _GRADIENTS if name == "offload_gradients" else _DEVICE_OR_HOST for name in _WAITING}
        boxes = [self._choice(name, _WAITING[name], choices) for name, choices in places.items()]
        return self._group("Between steps", boxes, tuple(_WAITING))

    def _workload(self) -> Any:
        fields = {"seq_length": "sequence length", "micro_batch_size": "micro-batch size"}
        numbers = [self._number(name, _typed(label)) for name, label in fields.items()]
        return self._group("Workload", numbers, tuple(fields))

    def _group(self, title: str, children: list[Any], prefixes: tuple[str, ...]) -> Any:
        """A titled group with room for the text of a rule about one of its fields, which begins with the field."""
        refusal = ipywidgets.HTML()
        refusal.add_class("memlab-refusal")
        self.refusals |= dict.fromkeys(prefixes, refusal)
        box = ipywidgets.VBox([ipywidgets.HTML(f"<h4>{title}</h4>"), refusal, *children])
        box.add_class("memlab-group")
        return box

    def _choice(self, field: str, label: str, choices: dict[str, Any]) -> Any:
        """A choice among values of a field of the draft, by their words."""
        control = ipywidgets.Dropdown(options=list(choices), description=label)
        control.style.description_width = "initial"
        control.observe(lambda change: self._state.edit(**{field: choices[change["new"]]}), names=["value"])
        words = {value: word for word, value in choices.items()}
        return self._register(field, control, lambda draft: words.get(getattr(draft, field)))

    def _number(self, name: str, control: Any) -> Any:
        """A number that is a field of the draft: the name up to its colon."""
        field = name.partition(":")[0]
        control.observe(lambda change: self._state.edit(**{field: change["new"]}), names=["value"])
        return self._register(name, control, lambda draft: getattr(draft, field))

    def _tick(self, field: str, module: str) -> Any:
        control = ipywidgets.Checkbox(description=module, indent=False)
        control.observe(lambda change: self._state.toggle(field, module, on=change["new"]), names=["value"])
        return self._register(f"{field}:{module}", control, lambda draft: module in getattr(draft, field))

    def _register(self, name: str, control: Any, read: Callable[[Draft], Any]) -> Any:
        """Puts a note beside a control: what it moved last time, or why it does not apply."""
        self.by_name[name], self._reads[name] = control, read
        note = self.notes[name] = ipywidgets.HTML()
        hook = name.replace("_", "-").replace(":", "-")
        control.add_class(f"memlab-{hook}")
        note.add_class(f"memlab-note-{hook}")
        box = ipywidgets.Box([control, note])
        box.add_class("memlab-noted")
        return box

    def _follow_draft(self) -> None:
        draft = self._state.draft
        for name, control in self.by_name.items():
            value = self._reads[name](draft)
            # A slider that cannot stand at a value stays where it is; the typed number beside it and the rule tell.
            if value is not None and not (hasattr(control, "max") and not control.min <= value <= control.max):
                control.value = value
        self._follow_reasons()
        self._follow_refusal()

    def _follow_reasons(self) -> None:
        reasons = self._state.draft.not_applicable(self._state.scenario.architecture)
        moved = self._state.moved_bytes()
        settings = self._state.settings
        idle = without_effect(settings, self._state.scenario.architecture) if settings is not None else {}
        for name, control in self.by_name.items():
            reason = reasons.get(name.removesuffix(":slider"))
            control.disabled = reason is not None
            subject = _WAITING.get(name) or name.removeprefix("offload_modules:")
            if reason:
                # The note lies over the control: JupyterLab's own tooltips stand on a part of it, or nowhere.
                why = html.escape(reason)
                self.notes[name].value = f'<i class="memlab-why" tabindex="0" title="{why}" aria-label="{why}"></i>'
            elif name in idle:
                self.notes[name].value = html.escape(f"no effect: {idle[name]}")
            elif subject in moved and "offload" in name:
                verb = "dropped" if subject == "gradients" else "moved"
                self.notes[name].value = f"{format_bytes(moved[subject])} {verb} last time"
            else:
                self.notes[name].value = ""

    def _follow_refusal(self) -> None:
        refusal = self._state.refusal
        about = [box for prefix, box in self.refusals.items() if refusal.startswith(prefix)]
        for box in self.refusals.values():
            is_about = bool(refusal) and box is (about[0] if about else self.refusals["seq_length"])
            box.value = f'<div role="alert">{html.escape(refusal, quote=False)}</div>' if is_about else ""


def _typed(label: str) -> Any:
    return ipywidgets.IntText(description=label, style={"description_width": "initial"})
