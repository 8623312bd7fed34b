"""The controls of the settings and the workload: they mirror the draft, and say why one does not apply."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets

from memlab.settings import OFFLOAD_MODULES, RECOMPUTE_METHODS, RECOMPUTE_MODULES
from memlab.units import format_bytes
from memlab.views.draft import Draft
from memlab.views.state import LabState

_DEVICE_OR_HOST = [("device", False), ("host", True)]
# Gradients are dropped, not copied: between steps they hold nothing that the optimizer has not used.
_GRADIENTS = [("with the optimizer state", None), ("device", False), ("dropped", True)]
_WAITING = {"offload_parameters": "parameters", "offload_gradients": "gradients", "offload_optimizer": "optimizer state"}


class SettingsControls:
    """Four groups of controls on one state. `box` is the widget; `by_name` holds each control.

    Names are those of the fields, ``field:module`` for the ticks, and ``recompute_num_layers:slider``.
    """

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.by_name: dict[str, Any] = {}
        self.refusals: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._reads: dict[str, Callable[[Draft], Any]] = {}
        self.box = ipywidgets.Box([self._recompute(), self._offload(), self._between_steps(), self._workload()])
        self.box.add_class("memlab-settings")
        self._follow_draft()
        self._follow_runs()
        state.observe(lambda _: self._follow_draft(), names=["draft"])
        state.observe(lambda _: self._follow_refusal(), names=["refusal"])
        state.observe(lambda _: self._follow_runs(), names=["runs"])

    def _recompute(self) -> Any:
        granularities = [("none", None), ("full", "full"), ("selective", "selective")]
        num_layers = self._state.scenario.num_layers
        layers = {"min": 1, "max": num_layers, "value": 1}
        slider = ipywidgets.IntSlider(**layers, description="", readout=False, continuous_update=False)
        slider.tooltip = "recompute_num_layers"
        return self._group(
            "Recompute",
            [
                self._field("recompute_granularity", ipywidgets.Dropdown(options=granularities, description="granularity")),
                self._field("recompute_method", ipywidgets.Dropdown(options=RECOMPUTE_METHODS, description="method")),
                self._field("recompute_num_layers", ipywidgets.BoundedIntText(**layers, description="layers")),
                self._named("recompute_num_layers:slider", "recompute_num_layers", slider),
                *(self._tick("recompute_modules", module) for module in RECOMPUTE_MODULES),
            ],
            ("recompute_",),
        )

    def _offload(self) -> Any:
        ticks = [self._noted(self._tick("offload_modules", module), module) for module in OFFLOAD_MODULES]
        size = ipywidgets.IntText(description="at least, elements")
        return self._group(
            "Offload during the step",
            [*ticks, self._field("min_offloaded_tensor_size", size)],
            ("offload_modules", "min_offloaded_tensor_size"),
        )

    def _between_steps(self) -> Any:
        places = {name: _GRADIENTS if name == "offload_gradients" else _DEVICE_OR_HOST for name in _WAITING}
        boxes = [
            self._noted(self._field(name, ipywidgets.Dropdown(options=options, description=_WAITING[name])), _WAITING[name])
            for name, options in places.items()
        ]
        return self._group("Between steps, on", boxes, tuple(_WAITING))

    def _workload(self) -> Any:
        fields = {"seq_length": "sequence length", "micro_batch_size": "micro-batch size"}
        numbers = [self._field(name, ipywidgets.IntText(description=label)) for name, label in fields.items()]
        return self._group("Workload", numbers, tuple(fields))

    def _group(self, title: str, children: list[Any], prefixes: tuple[str, ...]) -> Any:
        """A titled group with room for the text of a rule about one of its fields, which begins with the field."""
        refusal = ipywidgets.HTML()
        refusal.add_class("memlab-refusal")
        self.refusals |= dict.fromkeys(prefixes, refusal)
        box = ipywidgets.VBox([ipywidgets.HTML(f"<h4>{title}</h4>"), refusal, *children])
        box.add_class("memlab-group")
        return box

    def _field(self, name: str, control: Any) -> Any:
        return self._named(name, name, control)

    def _named(self, name: str, field: str, control: Any) -> Any:
        """Ties a control to a field of the draft, in both directions."""
        control.style.description_width = "initial"
        control.observe(lambda change: self._state.edit(**{field: change["new"]}), names=["value"])
        return self._register(name, control, lambda draft: getattr(draft, field))

    def _tick(self, field: str, module: str) -> Any:
        control = ipywidgets.Checkbox(description=module, indent=False)
        control.observe(lambda change: self._state.toggle(field, module, on=change["new"]), names=["value"])
        return self._register(f"{field}:{module}", control, lambda draft: module in getattr(draft, field))

    def _register(self, name: str, control: Any, read: Callable[[Draft], Any]) -> Any:
        control.add_class("memlab-" + name.replace("_", "-").replace(":", "-"))
        self.by_name[name], self._reads[name] = control, read
        return control

    def _noted(self, control: Any, subject: str) -> Any:
        note = self._notes[subject] = ipywidgets.HTML()
        note.add_class("memlab-offload-note-" + subject.replace("_", "-").replace(" ", "-"))
        box = ipywidgets.Box([control, note])
        box.add_class("memlab-noted")
        return box

    def _follow_draft(self) -> None:
        draft = self._state.draft
        reasons = draft.not_applicable(self._state.scenario.architecture)
        for name, control in self.by_name.items():
            value = self._reads[name](draft)
            if value is not None or name in ("recompute_granularity", "offload_gradients"):
                control.value = value
            reason = reasons.get(name.removesuffix(":slider"))
            control.disabled, control.tooltip = reason is not None, reason or name.partition(":")[0]
        self._follow_refusal()

    def _follow_refusal(self) -> None:
        refusal = self._state.refusal
        about = [box for prefix, box in self.refusals.items() if refusal.startswith(prefix)]
        for box in self.refusals.values():
            is_about = bool(refusal) and box is (about[0] if about else self.refusals["seq_length"])
            box.value = f'<div role="alert">{html.escape(refusal, quote=False)}</div>' if is_about else ""

    def _follow_runs(self) -> None:
        moved = self._state.moved_bytes()
        reasons = self._state.draft.not_applicable(self._state.scenario.architecture)
        for subject, note in self._notes.items():
            reason = reasons.get(f"offload_modules:{subject}")
            if reason:
                why = html.escape(reason)
                note.value = f'<span tabindex="0" title="{why}" aria-label="{why}">does not apply</span>'
            elif subject in moved:
                verb = "dropped" if subject == "gradients" else "moved"
                note.value = f"{format_bytes(moved[subject])} {verb} last time"
