"""The panel: memory settings as widgets on a live model, in one cell."""

from __future__ import annotations

import html
from typing import Any, overload

import ipywidgets

from memlab.views.panel.lab_protocol import LabLike
from memlab.views.panel.opening import Opening
from memlab.views.panel.preset_choice import PresetChoice
from memlab.views.panel.run_bar import RunBar
from memlab.views.panel.runs_view import RunsView, text_twin
from memlab.views.panel.search_state import SearchState
from memlab.views.panel.search_view import SearchView
from memlab.views.panel.settings_controls import SettingsControls
from memlab.views.panel.state import LabState
from memlab.views.panel.state_controls import StateControls
from memlab.views.panel.static_files import page_code
from memlab.views.panel.timeline_view import TimelineView
from memlab.views.panel.what_if import WhatIf
from memlab.views.panel.widget_models import opened_when_complete, widgets_in

# By the lab's id, which no other object gets: the panel keeps its lab.
_panels: dict[int, Panel] = {}


class Panel(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """The widgets of one lab. What they show is in `state`, which works without them.

    `memlab.panel` makes it, one per lab.
    """

    def __init__(self, lab: LabLike, *, predict: bool = True) -> None:
        with opened_when_complete(self):
            self._build(lab, predict=predict)

    def _build(self, lab: LabLike, *, predict: bool) -> None:
        self._predicts_on_a_page = predict
        self.state = LabState(lab)
        self.controls = SettingsControls(self.state)
        self.training_state = StateControls(self.state)
        self.what_if = WhatIf(self.state)
        self.search = SearchView(SearchState(self.state, what_if=self.what_if))
        self.run_bar = RunBar(self.state, self.what_if, self.search.alone, self.search.toggle)
        self.presets = PresetChoice(self.state, self.search.state)
        self.timeline = TimelineView(self.state)
        self.table_toggle = ipywidgets.ToggleButton(description="Text table", tooltip="The chart's numbers as text")
        self.table_toggle.add_class("memlab-text-toggle")
        self.runs = RunsView(self.state, self.table_toggle)
        self.table = ipywidgets.HTML()
        self.table.add_class("memlab-text")
        scenario = lab.scenario
        ranks = scenario.layout.world_size
        where = f"{ranks} ranks ({scenario.layout}), {lab.backend.name}" if ranks > 1 else lab.backend.name
        where = where if scenario.engine == "megatron" else f"{where}, {scenario.engine}"
        title = html.escape(f"{scenario.architecture.name}, {scenario.num_layers} layers, on {where}")
        heading = ipywidgets.HTML(f"<style>{page_code('panel.css')}</style><h3>{title}</h3>")
        controls = ipywidgets.VBox([heading, self.presets.box, self.controls.box, self.training_state.box])
        results = ipywidgets.VBox([self.run_bar.box, self.search.box, self.timeline.box, self.table, self.runs.box])
        body = ipywidgets.Box([controls, results])
        super().__init__([body])
        for name, part in (("controls", controls), ("results", results), ("body", body), ("panel", self)):
            part.add_class(f"memlab-{name}")
        state = self.state
        self.table_toggle.observe(lambda change: state.set_trait("table_open", change["new"]), names=["value"])
        state.observe(lambda _: self._show_table(), names=["table_open", "shown", "pinned", "rank", "pinned_rank"])
        self._show_table()
        # Run closes the search, because the timeline appears in the same place.
        self.run_bar.run.on_click(lambda _: self.search.state.set_trait("is_open", False))
        self.search.state.observe(lambda _: self._show_one(), names=["is_open"])
        state.observe(lambda _: self._show_one(), names=["table_open"])
        self._show_one()
        _share_looks(self)

    def close(self) -> None:
        """Removes the panel and all its widgets from the page; the lab and its records stay."""
        if self._is_closed:
            return
        _panels.pop(id(self.state.lab), None)
        self.search.state.stop()
        self.what_if.close()
        self.search.state.unobserve_all()
        self.state.unobserve_all()
        for widget in widgets_in(self):
            for part in (widget.layout, getattr(widget, "style", None), widget):
                if part is not None and part is not self:
                    part.close()
        super().close()
        # IPython keeps what a cell has shown, in `Out`: of a closed panel it keeps no lab, no timeline and no widget.
        self.children = ()
        for name in [name for name in vars(self) if not name.startswith("_")]:
            delattr(self, name)

    @property
    def _is_closed(self) -> bool:
        return not hasattr(self, "state")

    def __repr__(self) -> str:
        return "Panel(closed)" if self._is_closed else f"Panel({len(self.state.runs)} runs on {self.state.lab!r})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the widget for a page, and the same as text for a front end without widgets."""
        if self._predicts_on_a_page:  # once: later the switch decides
            self._predicts_on_a_page, self.what_if.is_on = False, True
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        text = f"{self!r}\n\n{text_twin(self.state.shown, self.state.pinned)}"
        return {"text/plain": text, "application/vnd.jupyter.widget-view+json": view}

    def _show_one(self) -> None:
        """The search and the text are each in the place of the timeline while they are open."""
        is_hidden = self.search.state.is_open or self.state.table_open
        self.timeline.box.layout.display = "none" if is_hidden else "grid"

    def _show_table(self) -> None:
        state = self.state
        self.table_toggle.value = state.table_open
        self.table.layout.display = None if state.table_open else "none"
        twin = text_twin(state.shown, state.pinned, state.one_rank, state.pinned_rank)
        text = html.escape(twin, quote=False)
        self.table.value = f'<pre tabindex="0">{text}</pre>'


@overload
def panel(lab: None = None, *, predict: bool = True) -> Opening: ...
@overload
def panel(lab: LabLike, *, predict: bool = True) -> Panel: ...
def panel(lab: LabLike | None = None, *, predict: bool = True) -> Panel | Opening:
    """Shows a lab's memory settings as controls, with its runs. As the last expression of a cell it shows itself.

    Without a lab, a row of controls opens one: the model, the engine, the versions, and LoRA.

    Panels of labs that have been closed are removed, from their cells too: each would keep its lab and all timelines,
    and a page that is loaded again waits for the widgets of all panels of the kernel.

    Args:
        lab: An open lab. Steps that cells took are in the table too. None asks for a model first.
        predict: Whether the panel predicts each change of a control at first; its switch changes this later. Next to a
            live lab, another process predicts; a simulated lab takes the step at once.

    Returns:
        The same panel for the same lab, so that a cell that runs again shows the panel that it showed.
    """
    if lab is None:
        from memlab.lab.lab import Lab  # with torch, which the panel of an open lab has already

        def panel_inside(opened: Lab) -> Panel:
            made = panel(opened, predict=False)
            made.what_if.is_on = predict  # a panel that a cell does not show by itself does not turn it on
            return made

        return Opening(panel_inside, Lab)
    for other in [other for other in _panels.values() if other.state.lab.closed and other.state.lab is not lab]:
        other.close()
    shown = _panels.get(id(lab))
    if shown is None:
        shown = _panels[id(lab)] = Panel(lab, predict=predict)
    shown.state.refresh()
    return shown


def _share_looks(root: Any) -> None:
    """Replaces equal styles, and layouts that set nothing, by one of each kind: half of all models of a panel.

    A page that is loaded again creates every model of the kernel before it shows the first, and does nothing else
    meanwhile. A layout that sets something stays a widget's own: the panel changes it later.
    """
    shared: dict[tuple[type, str], Any] = {}
    for widget in widgets_in(root):
        for name in ("layout", "style"):
            look = getattr(widget, name, None)
            if look is None:
                continue
            state = look.get_state(drop_defaults=True)
            if name == "layout" and state:
                continue
            first = shared.setdefault((type(look), repr(sorted(state.items()))), look)
            if first is not look:
                setattr(widget, name, first)
