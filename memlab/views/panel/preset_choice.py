"""The list of presets above the controls, with what a search has found."""

from __future__ import annotations

from typing import Any

import ipywidgets

from memlab.units import format_bytes
from memlab.views.panel.presets import PRESETS, Preset
from memlab.views.panel.search_state import SearchState
from memlab.views.panel.state import LabState

_NONE = "choose a preset"
_PLAIN = "plain"
_WHAT = "Settings and training state to begin with; what a search found is in this list, too"


class PresetChoice:
    """A list that sets the controls, and names what they show; a button goes back to plain. `box` is the widget."""

    def __init__(self, state: LabState, search: SearchState) -> None:
        self._state, self._search = state, search
        self._is_following = False
        self._presets: dict[str, Preset] = {}
        self.choice = ipywidgets.Dropdown(description="preset", options=[_NONE])
        self.choice.style.description_width = "initial"
        self.choice.add_class("memlab-preset")
        self.choice.observe(self._chosen, names=["value"])
        self.plain = ipywidgets.Button(description="All plain")
        self.plain.tooltip = (
            "Resets recompute, offload, what is on the host, and the training state; the workload and the allocator's "
            "options stay"
        )
        self.plain.add_class("memlab-plain")
        self.plain.on_click(lambda _: state.take(_PLAIN, PRESETS[_PLAIN]))
        self.box = ipywidgets.Box([self.choice, self.plain])
        self.box.add_class("memlab-preset-bar")
        state.observe(lambda _: self._follow(), names=["form"])
        search.observe(lambda _: self._list(), names=["found"])
        self._list()

    def _list(self) -> None:
        scenario = self._state.scenario
        own = {name: preset for name, preset in PRESETS.items() if preset.engine in (None, scenario.engine)}
        self._presets = {name: preset.on(scenario) for name, preset in own.items()}
        if self._search.found is not None:
            for point in self._search.found.front:
                name = f"found: {point.settings}, {format_bytes(point.peak_allocated_bytes)}"
                self._presets[name] = Preset(settings=point.settings, state=self._state.scenario.state)
        self._is_following = True  # new options select the first one, which is not the user's choice
        self.choice.options = [_NONE, *self._presets]
        self._is_following = False
        self._follow()

    def _follow(self) -> None:
        """Names what the controls show: a framework's preset only if it was chosen, for others have equal settings."""
        shown = self._state.selection
        names = [
            name
            for name, preset in self._presets.items()
            if shown is not None
            and (shown[0].state, shown[1]) == (preset.state, preset.settings)
            and (name == self.choice.value or not preset.source)
        ]
        self._is_following = True
        if self.choice.value not in names:
            self.choice.value = names[0] if names else _NONE
        self._is_following = False
        # The list is too narrow for what a search found.
        self.choice.tooltip = _WHAT if self.choice.value == _NONE else f"{self.choice.value}"

    def _chosen(self, change: Any) -> None:
        if not self._is_following and change["new"] in self._presets:
            self._state.take(change["new"], self._presets[change["new"]])
