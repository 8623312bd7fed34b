"""The control of an option, from its row, and what its values mean."""

from __future__ import annotations

from typing import Any

import ipywidgets

from memlab.config.option import Option


class OptionControl:
    """A control for one option. `widget` is the control itself."""

    def __init__(self, option: Option) -> None:
        self._option = option
        self._by_words = {} if option.kind == "modules" else _words(option)
        name, tooltip = option.label or option.name, option.sentence()
        if self._by_words:
            self.widget = ipywidgets.Dropdown(options=list(self._by_words), description=name, tooltip=tooltip)
        elif option.kind == "switch":
            self.widget = ipywidgets.Checkbox(description=name, indent=False, tooltip=tooltip)
        elif option.kind == "modules":
            self.widget = ipywidgets.Text(description=name, tooltip=tooltip, continuous_update=False)
        else:
            unset = f" ({option.shown_for_none}: unset)"
            kind = ipywidgets.IntText if option.kind == "whole" else ipywidgets.FloatText
            described_as = name + unset if option.shown_for_none is not None and not option.label else name
            self.widget = kind(description=described_as, tooltip=tooltip)
        if not isinstance(self.widget, ipywidgets.Checkbox):
            self.widget.style.description_width = "initial"

    def value(self, shown: Any) -> Any:
        """Returns what the control's value means."""
        if self._by_words:
            return self._by_words[shown]
        if self._option.kind == "modules":
            return tuple(name.strip() for name in shown.split(",") if name.strip())
        return None if shown == self._option.shown_for_none else shown

    def show(self, value: Any) -> None:
        """Shows a value of the option; one that the control has no words for changes nothing."""
        words = {value: word for word, value in self._by_words.items()}
        shown = words.get(value) if words else self._option.shown_for_none if value is None else value
        if self._option.kind == "modules":
            shown = ", ".join(value)
        if shown is not None:
            self.widget.value = shown


def _words(option: Option) -> dict[str, Any]:
    """Returns the values of a choice by their words: a Dropdown reads the value None as "nothing chosen"."""
    if option.words is not None:
        return dict(option.words)
    words = {value: value for value in option.choices}
    return {"none": None, **words} if words and option.may_be_none and not option.needs_value else words
