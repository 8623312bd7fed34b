"""The controls of the training state and of torch's allocator, under a button: they take effect with the next run."""

from __future__ import annotations

import html
from dataclasses import fields
from typing import Any

import ipywidgets

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.training_state import CHOICES, TrainingState
from memlab.views.panel.state import LabState

_NONE = "none"
_NUMBERS = {
    "ddp_bucket_size": "Elements in a bucket; with 0, Megatron chooses the size",
    "logprobs_chunk_size": "Tokens whose log-probabilities are computed at once; 0 computes all at once",
    "optimizer_offload_fraction": "Share of the parameters whose state is on the CPU, from 0 to 1",
    "garbage_collection_threshold": "Above this share of the memory limit, torch frees unused cached blocks; 0: never",
    "max_split_size_mb": "Blocks larger than this many MiB are not split; with 0, all blocks may be split",
}
"""What each number means, as its tooltip."""
_SHARES = ("optimizer_offload_fraction", "garbage_collection_threshold")
"""The numbers that are not whole."""
_MAY_BE_UNSET = ("ddp_bucket_size", "logprobs_chunk_size", "garbage_collection_threshold", "max_split_size_mb")
"""The numbers of which 0 stands for None."""
_OF_ALLOCATOR = tuple(field.name for field in fields(AllocatorSettings))
_GROUPS = {
    "Gradients": "use_distributed_optimizer",
    "Optimizer": "use_precision_aware_optimizer",
    "CPU optimizer": "optimizer_cpu_offload",
    "Loss": "loss",
    "Attention and pipeline": "attention_backend",
    "FP8": "fp8_format",
    "torch's allocator": "expandable_segments",
}
"""Each group's title, with its first field; it ends before the first field of the next one."""


class StateControls:
    """The controls on one state. `box` is the widget; `by_name` holds each control under its field's name."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.by_name: dict[str, Any] = {}
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
        starts = {field: title for title, field in _GROUPS.items()}
        boxes: list[list[Any]] = []
        for name in (*(field.name for field in fields(TrainingState)), *_OF_ALLOCATOR):
            if name in starts:
                boxes.append([ipywidgets.HTML(f"<h4>{starts[name]}</h4>")])
            boxes[-1].append(self._control(name))
        groups = [ipywidgets.VBox(children) for children in boxes]
        for group in groups:
            group.add_class("memlab-group")
        return groups

    def _control(self, name: str) -> Any:
        if name in CHOICES:
            none = [_NONE] if name == "fp8_format" else []
            control = ipywidgets.Dropdown(options=[*none, *CHOICES[name]], description=name)
            control.tooltip = f"Megatron's {name}"
        elif name in _NUMBERS:
            kind = ipywidgets.FloatText if name in _SHARES else ipywidgets.IntText
            unset = " (0: unset)" if name in _MAY_BE_UNSET else ""
            control = kind(description=name + unset, tooltip=_NUMBERS[name])
        else:
            control = ipywidgets.Checkbox(description=name, indent=False, tooltip=f"Megatron's {name}")
        if not isinstance(control, ipywidgets.Checkbox):
            control.style.description_width = "initial"
        control.add_class(f"memlab-state-{name.replace('_', '-')}")
        edit = self._state.edit_allocator if name in _OF_ALLOCATOR else self._state.edit_state
        control.observe(lambda change: edit(**{name: _value(name, change["new"])}), names=["value"])
        self.by_name[name] = control
        return control

    def _show(self) -> None:
        state = self._state
        values = state.form.state_values | state.form.allocator_values
        for name, control in self.by_name.items():
            control.value = _shown(name, values[name])
        text = state.validation_error
        is_about_state = state.error_is_about_state
        self.error_box.value = f'<div role="alert">{html.escape(text, quote=False)}</div>' if is_about_state else ""
        self.error_box.layout.display = None if is_about_state else "none"
        self.note.value = f'<div role="status">{html.escape(state.state_note, quote=False)}</div>'

    def _show_section(self) -> None:
        self.toggle.value = self._state.state_open
        self._section.layout.display = None if self._state.state_open else "none"


def _value(name: str, shown: Any) -> Any:
    """Returns what a control's value means."""
    if name == "fp8_format":
        return None if shown == _NONE else shown
    return shown or None if name in _MAY_BE_UNSET else shown


def _shown(name: str, value: Any) -> Any:
    """Returns the value with which a control shows a field."""
    if value is None:
        return _NONE if name == "fp8_format" else 0
    return value
