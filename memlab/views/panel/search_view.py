"""The section of the panel that finds settings: the memory limit, and what a search found as chart and tables.

Closed, it is a button.
"""

from __future__ import annotations

import html

import ipywidgets

from memlab.config.backend_kind import KINDS
from memlab.views.figures.frame import Drawing
from memlab.views.figures.search import search_figure
from memlab.views.panel.chart_widget import ChartWidget
from memlab.views.panel.found_table import FoundTable
from memlab.views.panel.search_state import SearchState
from memlab.views.text.columns import as_html
from memlab.views.text.search import alone_blocks, answer_blocks, ranked, searched_blocks


class SearchView:
    """Controls, chart and table on one state. `box` is the widget; the chart exists after the first search."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.toggle = ipywidgets.ToggleButton(description="Find settings")
        self.toggle.tooltip = "Which settings save most, which fit a limit, and the extra work that each costs"
        self.alone = ipywidgets.Button(description="What saves most?")
        self.alone.tooltip = "Predicts each setting alone: which one saves most, and the extra work that it costs"
        on_cpu = not KINDS[state.backend].has_allocator
        self.limit = ipywidgets.Text(
            description="memory limit" if on_cpu else "limit for torch", continuous_update=False
        )
        self.limit.style.description_width = "initial"
        self.limit.tooltip = "The most that a step may need, such as 40 MiB or 76 GiB"
        self.search = ipywidgets.Button(description="Combinations")
        self.search.tooltip = "Which combinations of settings fit, and which of them need the least extra work"
        self.stop = ipywidgets.Button(description="Stop search", tooltip="Ends the search, and shows what it has found")
        self.status = ipywidgets.HTML()
        self._predicts = (
            "the bytes that a step allocates on this CPU; a GPU needs more, for workspaces and rounding"
            if on_cpu
            else "the bytes that a step needs on a GPU, with workspaces and the allocator's blocks"
        )
        self.what = ipywidgets.HTML()
        self.answer, self.table = (FoundTable(state.take, state.lock) for _ in range(2))
        self.chart: ChartWidget | None = None
        self._num_found = 0
        self._bar = ipywidgets.Box([self.limit, self.search, self.stop, self.status])
        self.box = self._section = ipywidgets.VBox([self._bar, self.answer, self.what, self.table])
        names = {
            "search-toggle": self.toggle,
            "search-limit": self.limit,
            "search-start": self.search,
        }
        names |= {
            "search-alone": self.alone,
            "search-stop": self.stop,
            "search": self.box,
            "search-status": self.status,
            "search-what": self.what,
            "search-answer": self.answer,
        }
        for name, widget in (names | {"search-bar": self._bar, "search-text": self.table}).items():
            widget.add_class(f"memlab-{name}")
        self.toggle.observe(lambda change: state.set_trait("is_open", change["new"]), names=["value"])
        self.limit.observe(lambda change: state.set_trait("limit", change["new"]), names=["value"])
        self.search.on_click(lambda _: state.start())
        self.alone.on_click(lambda _: self._ask_what_saves_most())
        self.stop.on_click(lambda _: state.stop())
        # Each part of the page is written only when its own part of the state changes. Otherwise the progress of a
        # search would overwrite what the user has entered and what has not reached the state yet.
        state.observe(lambda _: self._show_limit(), names=["limit", "limit_source"])
        state.observe(lambda _: self._show_section(), names=["is_open"])
        state.observe(lambda _: self._show_progress(), names=["busy", "notice"])
        state.observe_form(self._show_what)
        state.observe(lambda _: self._show_found(), names=["found"])
        for show in (self._show_limit, self._show_section, self._show_progress):
            show()

    def _ask_what_saves_most(self) -> None:
        self.state.is_open = True
        self.state.start(alone=True)

    def _show_limit(self) -> None:
        self.limit.value = self.state.limit
        self._show_what()

    def _show_section(self) -> None:
        is_open = self.state.is_open
        self.toggle.value = is_open
        self.toggle.description = "Back to the timeline" if is_open else "Find settings"
        self._section.layout.display = None if is_open else "none"

    def _show_progress(self) -> None:
        busy = self.state.busy
        self.stop.disabled = not busy
        for part in (self.answer, self.chart, self.table):  # an old answer would look like the running search's
            if part is not None:
                part.layout.display = "none" if busy or self.state.found is None else None
        self.status.value = f'<div role="status">{html.escape(self.state.notice, quote=False)}</div>'

    def _show_what(self) -> None:
        source = self.state.limit_source
        suggested = f" The suggested limit is {source}." if source else ""
        kept = html.escape(self.state.kept, quote=False)
        self.what.value = (
            "<b>What saves most?</b> predicts single changes, which takes seconds. <b>Combinations</b> predicts "
            "settings that are changed together, which takes up to a few minutes. It lists every combination that no "
            "other one matches or beats in all three: peak, recomputed FLOPs and bytes copied to the host."
            f"{suggested} Both take this from the controls and do not change it: {kept}. Both predict "
            f"{self._predicts}. You can use the lab meanwhile."
        )

    def _show_found(self) -> None:
        found = self.state.found
        if found is None:
            return
        self._num_found += 1
        drawing = Drawing.of(search_figure(found))
        drawing.layout["uirevision"] = f"search {self._num_found}"
        if self.chart is None:
            self.chart = ChartWidget(drawing, self.state.take, self.state.lock)
            self.chart.add_class("memlab-chart")
            self.chart.add_class("memlab-search-chart")
            # What a further search would keep and do is below the answer of this one.
            self._section.children = [self._bar, self.answer, self.chart, self.what, self.table]
        else:
            self.chart.show(drawing)
        self._show_progress()
        for widget, blocks, points in (
            (self.answer, alone_blocks(found, is_narrow=True), ranked(found))
            if self.state.alone
            else (self.answer, answer_blocks(found, is_narrow=True), found.cheapest),
            (self.table, searched_blocks(found, is_narrow=True), found.front),
        ):
            widget.show(as_html(blocks), [found.points.index(point) for point in points])
