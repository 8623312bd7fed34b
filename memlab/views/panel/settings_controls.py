"""The controls of the settings and the workload: they mirror the form, and a note next to each says what it did."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets

from memlab.config import without_effect
from memlab.config.option import Option
from memlab.config.settings import MODULES, MemorySettings
from memlab.units import format_bytes
from memlab.views.panel.option_control import OptionControl
from memlab.views.panel.run import GRADIENTS, TRIED
from memlab.views.panel.settings_form import OPTIONS, STATE_OPTIONS, SettingsForm, of_engine, reason_against
from memlab.views.panel.state import LabState

_OPTIONS = {name: one for name, one in OPTIONS.items() if name not in STATE_OPTIONS}
_BESIDE = ("recompute_num_layers", "micro_batch_size")
"""Each stands beside the control before it."""
_ON_HOST = {
    "offload_parameters": "parameters",
    "offload_gradients": GRADIENTS,
    "offload_optimizer": "optimizer state",
}
_EXCEPT_UPDATE = "offload_optimizer_except_update"
_OF_FEW_MODELS = ("mla_up_proj", "shared_experts")


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
        self.heads: dict[str, Any] = {}
        self._show_value: dict[str, Callable[[SettingsForm], None]] = {}
        # What only newer versions have is below the workload, so that what every version has is on one screen.
        self._options = of_engine(_OPTIONS, state.scenario.engine)
        by_version = sorted(self._options.values(), key=lambda one: one.since is not None)
        titles = dict.fromkeys(one.group for one in by_version)
        self.box = ipywidgets.VBox([self._group(title) for title in titles])
        self.box.add_class("memlab-settings")
        self._show_form()
        state.observe(lambda _: self._show_form(), names=["form"])
        state.observe(lambda _: self._show_heads(), names=["validation_error"])
        state.observe(lambda _: self._show_notes(), names=["shown"])

    def _group(self, title: str) -> Any:
        head = self.heads[title] = ipywidgets.HTML()
        head.add_class("memlab-group-head")
        grouped, lines = set(self.by_name), []
        for one in self._options.values():
            if one.group == title and one.kind == "modules":
                lines.append(
                    [self._tick(one.name, module) for module in one.choices if self._has_tick(one.name, module)]
                )
            elif one.group == title:
                lines[-1:] = [*lines[-1:], []] if one.name not in _BESIDE else lines[-1:]
                lines[-1].append(self._control(one))
        self._groups[title] = [name for name in self.by_name if name not in grouped]
        box = ipywidgets.VBox([head, *(line[0] if len(line) == 1 else _side_by_side(line) for line in lines)])
        box.add_class("memlab-group")
        return box

    def _has_tick(self, field: str, module: str) -> bool:
        """Leaves out what few models have, from the panels of the others: they would need a second screen."""
        return module not in _OF_FEW_MODELS or not reason_against(field, module, self._state.scenario.architecture)

    def _control(self, option: Option) -> Any:
        control, name = OptionControl(option), option.name
        control.widget.observe(lambda change: self._state.edit(**{name: control.value(change["new"])}), names=["value"])
        box = self._register(name, control.widget, lambda form: control.show(form.values[name]))
        if option.kind == "switch":
            box.add_class("memlab-host")
        return box

    def _tick(self, field: str, module: str) -> Any:
        what = MODULES[module]
        tooltip = (
            f"Recomputes {what}" if field == "recompute_modules" else f"Copies to the host what is saved by {what}"
        )
        control = ipywidgets.Checkbox(description=module, indent=False, tooltip=tooltip)
        name = f"{field}:{module}"

        def edit(change: dict[str, Any]) -> None:
            if not control.disabled:  # the form keeps what is ticked, for when the control applies again
                self._state.toggle(field, module, on=change["new"])

        def show(form: SettingsForm) -> None:
            control.value = module in form.values[field] and not control.disabled

        control.observe(edit, names=["value"])
        return self._register(name, control, show)

    def _register(self, name: str, control: Any, show: Callable[[SettingsForm], None]) -> Any:
        """Puts a note next to a control: what it transferred in the shown run, or why it has no effect."""
        self.by_name[name], self._show_value[name] = control, show
        note = self.notes[name] = ipywidgets.HTML()
        hook = name.replace("_", "-").replace(":", "-")
        control.add_class(f"memlab-{hook}")
        note.add_class(f"memlab-note-{hook}")
        box = self._boxes[name] = ipywidgets.Box([control, note])
        box.add_class("memlab-noted")
        return box

    def _show_form(self) -> None:
        self._show_notes()  # first: a tick that does not apply is shown as not ticked
        for show in self._show_value.values():
            show(self._state.form)

    def _show_notes(self) -> None:
        """Writes a few letters next to each control, in a place of their own; the tooltip has the sentence."""
        reasons = self._state.form.not_applicable(self._state.scenario.architecture)
        settings, run = self._state.settings, self._state.shown
        idle = without_effect.of_settings(settings, self._state.scenario.architecture) if settings is not None else {}
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
        if name not in self._groups["Workload"] and not self._is_shown(run.settings, name):
            return "", ""
        if name in run.without_effect:
            return "no effect", f"no effect {where}: {run.without_effect[name]}"
        # What is outside the update on the host is there between steps, too: the other setting transferred nothing.
        optimizer = _EXCEPT_UPDATE if run.settings.offload_optimizer_except_update else "offload_optimizer"
        if name in (_EXCEPT_UPDATE, "offload_optimizer") and name != optimizer:
            return "", ""
        subject = (
            "optimizer state" if name == optimizer else _ON_HOST.get(name) or name.removeprefix("offload_modules:")
        )
        if "offload" not in name or subject not in run.transferred_bytes:
            return "", ""
        size = format_bytes(run.transferred_bytes[subject])
        return size, f"{size} {'dropped' if subject == GRADIENTS else 'copied to the host and back'} {where}"

    def _is_shown(self, settings: MemorySettings, name: str) -> bool:
        """Whether a control shows what settings have; of a ``field:module``, whether the module is in both or none."""
        field, _, module = name.partition(":")
        form, own = self._state.form.values, getattr(settings, field)
        if module:
            return (module in form[field]) == (module in (own or ()))
        follows = field == "offload_gradients" and form[field] is None
        return bool((form["offload_optimizer"] if follows else form[field]) == own)

    def _show_heads(self) -> None:
        """Writes each group's title, the run that its notes are about, and the rule that its controls break."""
        run, state = self._state.shown, self._state
        who = "" if run is None else "what if:" if run.number == TRIED else f"run {run.number}:"
        text = "" if state.error_is_about_state else state.validation_error
        about = next((OPTIONS[name].group for name in state.error_fields if name in OPTIONS), "Workload")
        for title, names in self._groups.items():
            of_run = run is not None and any(self._in_shown_run(name)[0] for name in names)
            error = f'<div role="alert" class="memlab-validation-error">{html.escape(text, quote=False)}</div>'
            is_refused = bool(text) and title == about
            head = f"<h4>{title}</h4><span>{who if of_run else ''}</span>"
            self.heads[title].value = head + (error if is_refused else "")


def _side_by_side(widgets: Iterable[Any]) -> Any:
    box = ipywidgets.Box([*widgets])
    box.add_class("memlab-side-by-side")
    return box


def _note(kind: str, sentence: str, words: str) -> str:
    why = html.escape(sentence)
    return f'<i class="{kind}" role="note" tabindex="0" title="{why}" aria-label="{why}">{html.escape(words)}</i>'
