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
    MemorySettings,
)
from memlab.units import format_bytes
from memlab.views.panel.run import GRADIENTS, TRIED
from memlab.views.panel.settings_form import LABELS, SettingsForm
from memlab.views.panel.state import LabState

# Values by the words that a control shows. A Dropdown reads the value None as "nothing chosen", so it holds the words.
_GRANULARITIES = {"none": None, "full": "full", "selective": "selective"}
_METHODS = {method: method for method in RECOMPUTE_METHODS}
_REMEDIES = {"none": None, **{name.replace("_", " "): name for name in CHECKPOINT_INPUT_REMEDIES}}
_DEVICE_OR_HOST = {"device": False, "host": True}
# Gradients are dropped, not copied: between steps the optimizer has already used them.
_GRADIENTS = {"as optimizer": None, "device": False, "dropped": True}
_GROUPS = {
    "offload_parameters": "parameters",
    "offload_gradients": GRADIENTS,
    "offload_optimizer": "optimizer state",
}
_EXCEPT_UPDATE = "offload_optimizer_except_update"
_MODULES = {
    "attn_norm": "the norm before attention (if it is a module of its own)",
    "qkv_linear": "the linear layer that makes queries, keys and values",
    "core_attn": "attention without its linear layers (scores, softmax, and their product with the values)",
    "attn_proj": "the linear layer after attention (needs core_attn, too)",
    "mlp_norm": "the norm before the MLP or the experts (if it is a module of its own)",
    "expert_fc1": "the first linear layer of the experts of an MoE layer",
    "moe_act": "the activation function of the experts of an MoE layer",
    "layernorm": "the norms before attention and before the MLP",
    "mlp": "the MLP of a dense layer",
    "moe": "the whole MoE part of a layer (router and experts)",
}
"""What each module is; the glossary has the terms."""
_TOOLTIPS = {
    "recompute_granularity": "full: recomputes whole layers; selective: recomputes single modules; none: recomputes "
    "nothing. This does not change offload; the button All plain resets both",
    "recompute_method": "uniform: recomputes every layer, with one checkpoint for each group of one or more "
    "layers; block: "
    "recomputes only the first layers, with one checkpoint per layer",
    "recompute_num_layers": "uniform: layers per checkpoint; block: number of layers that are recomputed",
    "checkpoint_input_remedy": "How to free the input of an MoE layer's checkpoint, which stays allocated after "
    "backward",
    "min_offloaded_tensor_size": "The smallest saved tensor that is copied to the host, in elements; it matters "
    "only if a "
    "module is ticked",
    "activation_offload_fraction": "Share of the groups of the ticked modules that are copied to the host, from 0 to "
    "1; a group is what a module saves in one layer",
    "delta_offload_bytes_across_pp_ranks": "How many more bytes each pipeline stage keeps on the device than "
    "the stage before it",
    "fine_grained_offloading_max_inflight_offloads": "How many copies to the host, per offload module, may still be in "
    "progress while the model computes; -1: no limit",
    "offload_parameters": "Where the parameters are between two steps",
    "offload_gradients": "Whether the gradient buffers are freed (dropped) between two steps; they come back as "
    "zeros. 'as "
    "optimizer' drops them if the optimizer state is on the host",
    "offload_optimizer": "Where main parameters and Adam's moments are between two steps",
    "offload_optimizer_except_update": "host: main parameters and moments are on the device only while the optimizer "
    "updates the parameters",
    "seq_length": "Tokens of a sequence",
    "micro_batch_size": "Sequences of a micro-batch",
}


class SettingsControls:
    """Five groups of controls on one state. `box` is the widget; `by_name` holds each control.

    Names are those of the fields, and ``field:module`` for the ticks.
    """

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.by_name: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._boxes: dict[str, Any] = {}
        self._groups: dict[str, list[str]] = {}
        self._prefixes: dict[str, tuple[str, ...]] = {}
        self.heads: dict[str, Any] = {}
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
        state.observe(lambda _: self._show_heads(), names=["validation_error"])
        state.observe(lambda _: self._show_notes(), names=["shown"])

    def _recompute(self) -> Any:
        return self._group(
            "Recompute",
            [
                self._choice("recompute_granularity", _GRANULARITIES),
                _side_by_side([self._choice("recompute_method", _METHODS), self._number("recompute_num_layers")]),
                _side_by_side(self._tick("recompute_modules", module) for module in RECOMPUTE_MODULES),
                self._choice("checkpoint_input_remedy", _REMEDIES),
            ],
            ("recompute_", "checkpoint_input_remedy"),
        )

    def _offload(self) -> Any:
        ticks = _side_by_side(self._tick("offload_modules", module) for module in OFFLOAD_MODULES)
        return self._group(
            "Offload during the step",
            [ticks, self._number("min_offloaded_tensor_size")],
            ("offload_modules", "min_offloaded_tensor_size"),
        )

    def _offload_since_0_19(self) -> Any:
        """Below the workload, so that what every version has is on one screen."""
        fraction, delta, inflight = SINCE_MEGATRON_0_19
        numbers = [
            *(self._number(fraction, ipywidgets.FloatText), self._number(delta)),
            self._number(inflight, none=-1),
        ]
        return self._group("Offload, since megatron-core 0.19", numbers, SINCE_MEGATRON_0_19)

    def _between_steps(self) -> Any:
        places = {name: _GRADIENTS if name == "offload_gradients" else _DEVICE_OR_HOST for name in _GROUPS}
        boxes = [self._choice(name, choices) for name, choices in places.items()]
        boxes.append(self._choice(_EXCEPT_UPDATE, _DEVICE_OR_HOST))
        for box in boxes:
            box.add_class("memlab-host")
        return self._group("On host between steps", boxes, (*_GROUPS, _EXCEPT_UPDATE))

    def _workload(self) -> Any:
        fields = ("seq_length", "micro_batch_size")
        return self._group("Workload", [_side_by_side(self._number(name) for name in fields)], fields)

    def _group(self, title: str, children: list[Any], prefixes: tuple[str, ...]) -> Any:
        """A titled group; `prefixes` are the first words of the rules about it."""
        head = self.heads[title] = ipywidgets.HTML()
        head.add_class("memlab-group-head")
        grouped = {name for names in self._groups.values() for name in names}
        self._groups[title] = [name for name in self.by_name if name not in grouped]
        self._prefixes[title] = prefixes
        box = ipywidgets.VBox([head, *children])
        box.add_class("memlab-group")
        return box

    def _choice(self, field: str, choices: dict[str, Any]) -> Any:
        """A choice among values of a field of the form, by their words."""
        control = ipywidgets.Dropdown(options=list(choices), description=LABELS[field], tooltip=_TOOLTIPS[field])
        control.style.description_width = "initial"
        control.observe(lambda change: self._state.edit(**{field: choices[change["new"]]}), names=["value"])
        words = {value: word for word, value in choices.items()}
        return self._register(field, control, lambda form: words.get(getattr(form, field)))

    def _number(self, field: str, kind: Any = ipywidgets.IntText, none: int | None = None) -> Any:
        """A number that is a field of the form; `none` is shown where the field is None."""
        control = kind(description=LABELS[field], tooltip=_TOOLTIPS[field], style={"description_width": "initial"})

        def edit(change: dict[str, Any]) -> None:
            self._state.edit(**{field: None if change["new"] == none else change["new"]})

        def read(form: SettingsForm) -> Any:
            value = getattr(form, field)
            return none if value is None else value

        control.observe(edit, names=["value"])
        return self._register(field, control, read)

    def _tick(self, field: str, module: str) -> Any:
        what = _MODULES[module]
        tooltip = (
            f"Recomputes {what}" if field == "recompute_modules" else f"Copies to the host what is saved by {what}"
        )
        control = ipywidgets.Checkbox(description=module, indent=False, tooltip=tooltip)
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

    def _show_notes(self) -> None:
        """Writes a few letters next to each control, in a place of their own; the tooltip has the sentence."""
        reasons = self._state.form.not_applicable(self._state.scenario.architecture)
        settings, run = self._state.settings, self._state.shown
        idle = without_effect(settings, self._state.scenario.architecture) if settings is not None else {}
        of_run = {name: self._in_shown_run(name) for name in self.by_name} if run is not None else {}
        for name, control in self.by_name.items():
            reason = reasons.get(name)
            control.disabled = reason is not None
            if reason:
                # It covers the control: JupyterLab shows the tooltip of a disabled control nowhere.
                self.notes[name].value = _note("memlab-why", reason, "")
            elif name in idle:
                self.notes[name].value = _note("memlab-note", f"no effect: {idle[name]}", "no effect")
            else:
                words, sentence = of_run.get(name, ("", ""))
                self.notes[name].value = _note("memlab-note", sentence, words) if words else ""
        self._show_heads()

    def _in_shown_run(self, name: str) -> tuple[str, str]:
        """What a control's setting did in the shown run, in a few letters and as a sentence; empty if it did nothing.

        A control that no longer shows what the run used has no note: the figure would be read as that of the control's
        own value.
        """
        run = self._state.shown
        assert run is not None
        where = "in this step" if run.number == TRIED else f"in run {run.number}"
        if name not in self._groups["Workload"] and _value(self._state.form, name) != _value(run.settings, name):
            return "", ""
        if name in run.without_effect:
            return "no effect", f"no effect {where}: {run.without_effect[name]}"
        # What is outside the update on the host is there between steps, too: the other setting transferred nothing.
        optimizer = _EXCEPT_UPDATE if run.settings.offload_optimizer_except_update else "offload_optimizer"
        if name in (_EXCEPT_UPDATE, "offload_optimizer") and name != optimizer:
            return "", ""
        subject = "optimizer state" if name == optimizer else _GROUPS.get(name) or name.removeprefix("offload_modules:")
        if "offload" not in name or subject not in run.transferred_bytes:
            return "", ""
        size = format_bytes(run.transferred_bytes[subject])
        return size, f"{size} {'dropped' if subject == GRADIENTS else 'copied to the host and back'} {where}"

    def _show_heads(self) -> None:
        """Writes each group's title, the run that its notes are about, and the rule that its controls break."""
        run, state = self._state.shown, self._state
        who = "" if run is None else "what if:" if run.number == TRIED else f"run {run.number}:"
        text = "" if state.error_is_about_state else state.validation_error
        about = [title for title, prefixes in self._prefixes.items() if text.startswith(prefixes)] or ["Workload"]
        for title, names in self._groups.items():
            of_run = run is not None and any(self._in_shown_run(name)[0] for name in names)
            error = f'<div role="alert" class="memlab-validation-error">{html.escape(text, quote=False)}</div>'
            is_refused = bool(text) and title == about[0]
            head = f"<h4>{title}</h4><span>{who if of_run else ''}</span>"
            self.heads[title].value = head + (error if is_refused else "")


def _value(settings: SettingsForm | MemorySettings, name: str) -> Any:
    """Returns the value of a field, or whether the module of a ``field:module`` is in it."""
    field, _, module = name.partition(":")
    value = getattr(settings, field)
    if module:
        return module in (value or ())
    return settings.offload_optimizer if name == "offload_gradients" and value is None else value


def _side_by_side(widgets: Iterable[Any]) -> Any:
    box = ipywidgets.Box([*widgets])
    box.add_class("memlab-side-by-side")
    return box


def _note(kind: str, sentence: str, words: str) -> str:
    why = html.escape(sentence)
    return f'<i class="{kind}" role="note" tabindex="0" title="{why}" aria-label="{why}">{html.escape(words)}</i>'
