"""The chart in the panel, its switches, and what is allocated at the selected moment."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import ipywidgets

from memlab.record.timeline import Timeline
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.palette import CATEGORY_LOOKS
from memlab.views.figures.resample import AXES
from memlab.views.panel.chart_data import chart_drawing, event_at, mark_moment
from memlab.views.panel.chart_widget import ChartWidget
from memlab.views.panel.slider import Slider
from memlab.views.panel.state import FLOORS, POOLS_SHOWN, LabState
from memlab.views.text.columns import as_html, in_unit
from memlab.views.text.ranks import ranks_blocks
from memlab.views.text.record import grouped_modules
from memlab.vocabulary import PHASES

_NUM_MODULES = 8
_ALL_RANKS = -1
_TOOLTIPS = {
    "pool": ("Which memory the chart shows", "Device memory", "Host memory that holds offloaded data"),
    "axis": ("What the chart's axis counts", "Milliseconds since the step's start", "Each allocation and each free"),
    "floor": (
        "Where the bytes axis starts",
        "The axis starts at the bytes held throughout the step. They differ between runs: heights cannot be compared",
        "The axis starts at 0 in every run, so shapes and heights can be compared",
    ),
}
"""Of each switch, then of its choices in their order."""
_SAME_START = 0.02
"""Of an axis: a start that differs by less is the same to the eye."""


class TimelineView:
    """Chart, switches and breakdown on one state. `box` is the widget."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self._drawn: tuple[Any, Any] | None = None
        self._starts: list[tuple[Any, str, int]] = []
        self._is_listing_ranks = False
        self.pool = self._switch("pool", POOLS_SHOWN, "Memory")
        self.axis = self._switch("axis", AXES, "x axis")
        self.floor = self._switch("floor", FLOORS, "Bytes from")
        self.chart = ChartWidget(self._drawing(), self._look_at_point, state.lock)
        self.chart.add_class("memlab-chart")
        self.slider = Slider(name="moment, as the number of its event")
        self.number = ipywidgets.BoundedIntText(
            min=0, max=0, description="event", style={"description_width": "initial"}
        )
        self.number.tooltip = "Number of the allocation or free, counted from the step's start"
        self.to_peak = ipywidgets.Button(description="Peak", tooltip="Selects the step's peak")
        self.to_peak.on_click(lambda _: state.look_at(None))
        self.breakdown = ipywidgets.HTML()
        self.rank = ipywidgets.Dropdown(description="Rank", options=[("all", _ALL_RANKS)])
        self.rank.tooltip = "The rank that is shown alone"
        self.rank.observe(self._rank_given, names=["value"])
        self.all_ranks = ipywidgets.Button(description="All ranks", tooltip="Shows all ranks next to each other again")
        self.all_ranks.on_click(lambda _: state.show_rank(None))
        for name, widget in (("rank", self.rank), ("all-ranks", self.all_ranks)):
            widget.add_class(f"memlab-{name}")
        for name, widget in (("moment-slider", self.slider), ("moment", self.number), ("to-peak", self.to_peak)):
            widget.add_class(f"memlab-{name}")
        for widget in (self.slider, self.number):
            widget.observe(self._moment_given, names=["value"])
        self.breakdown.add_class("memlab-breakdown")
        self.title = ipywidgets.HTML()
        self.start = ipywidgets.HTML()
        switches = ipywidgets.Box([self.pool, self.axis, self.floor, self.rank, self.all_ranks])
        heading = ipywidgets.Box([self.title, self.start])
        self.moment = ipywidgets.Box([ipywidgets.Label("Moment"), self.slider, self.number, self.to_peak])
        drawing = ipywidgets.Box([self.chart])
        self.box = ipywidgets.Box([switches, heading, drawing, self.moment, self.breakdown])
        named = {
            "title": self.title,
            "switches": switches,
            "start": self.start,
            "heading": heading,
            "drawing": drawing,
            "moment-bar": self.moment,
        }
        for name, box in (named | {"timeline": self.box}).items():
            box.add_class(f"memlab-{name}")
        self._show_ranks()
        self._show_moment()
        self._show_title()
        state.observe(lambda _: self._show_ranks(), names=["shown", "rank"])
        drawn = ["shown", "pinned", "pool", "axis", "floor", "moment", "rank", "pinned_rank"]
        state.observe(lambda _: self._show_chart(), names=drawn)
        state.observe(lambda _: self._show_moment(), names=["shown", "pool", "moment", "rank"])

    def _switch(self, name: str, choices: tuple[str, ...], label: str) -> Any:
        switch = ipywidgets.ToggleButtons(options=choices, description=label, value=getattr(self._state, name))
        switch.tooltip, *switch.tooltips = _TOOLTIPS[name]
        switch.style.description_width = "initial"
        switch.style.button_width = "3.2rem"
        switch.add_class(f"memlab-{name}")
        switch.observe(lambda change: self._state.set_trait(name, change["new"]), names=["value"])
        self._state.observe(lambda change: switch.set_trait("value", change["new"]), names=[name])
        return switch

    def _drawing(self) -> Any:
        state = self._state
        key = (state.shown, state.pinned, state.pool, state.axis, state.one_rank, state.pinned_rank, state.floor)
        # Only the mark of the moment changes: a million events are not drawn again for it.
        if self._drawn is None or self._drawn[0] != key:
            *runs, floor = key
            self._drawn = (key, chart_drawing(*runs, above_start=floor == "held", is_bare=True))
        if state.shows_all_ranks:
            return self._drawn[1]
        return mark_moment(self._drawn[1], state.one_run, state.moment, state.pool, state.axis)

    def _look_at_point(self, point: int | None) -> None:
        state = self._state
        timeline = state.timeline
        if point is not None and state.shows_all_ranks:
            state.show_rank(point)
        elif point is None or timeline is None:
            state.say("The chart changed before your click arrived: click again.")
        else:
            state.look_at(event_at(timeline, point, state.pool, state.axis))

    def _rank_given(self, change: Any) -> None:
        if not self._is_listing_ranks:
            self._state.show_rank(None if change["new"] == _ALL_RANKS else change["new"])

    def _show_ranks(self) -> None:
        """Lists the ranks of the shown run, if it has several."""
        state = self._state
        job = state.shown.job if state.shown is not None else None
        self.rank.layout.display = self.all_ranks.layout.display = None if job is not None else "none"
        self.all_ranks.disabled = state.one_rank is None
        (self.box.add_class if state.shows_all_ranks else self.box.remove_class)("memlab-every-rank")
        # Never None: widgets whose layouts set nothing share one.
        self.moment.layout.display = "none" if state.shows_all_ranks else "flex"
        numbers = [] if job is None else [record.scenario.layout.rank for record in job.ranks]
        worst = None if job is None else job.worst_rank
        names = [(f"{number}, worst" if number == worst else f"{number}", number) for number in numbers]
        self._is_listing_ranks = True  # new options select the first one, which is not the user's choice
        try:
            self.rank.options = [("all", _ALL_RANKS), *names]
            self.rank.value = _ALL_RANKS if state.one_rank is None else state.one_rank
        finally:
            self._is_listing_ranks = False

    def _moment_given(self, change: Any) -> None:
        timeline = self._state.timeline
        # Without a selected moment the controls show the peak, which is not the user's choice.
        if timeline is not None and change["new"] != self._moment(timeline):
            self._state.look_at(change["new"])

    def _moment(self, timeline: Timeline) -> int:
        moment = self._state.moment
        return timeline.peak_index(self._state.pool) - timeline.first_step_event if moment is None else moment

    def _show_chart(self) -> None:
        with self._state.lock:
            self.chart.show(self._drawing())
            self._show_title()

    def _show_title(self) -> None:
        self.title.value = chart_title(self._state)
        self.start.value = self._other_start()

    def _other_start(self) -> str:
        """Says where the bytes axis starts, if it started elsewhere in the chart of the run before."""
        state = self._state
        layout = self._drawing().layout
        run, timeline = state.one_run, state.timeline
        if run is None or timeline is None:
            return ""
        unit_bytes, _ = binary_unit(timeline.peak_bytes(state.pool))
        low, high = (round(end * unit_bytes) for end in layout["yaxis"]["range"])
        if self._starts and self._starts[-1][0] == (run.number, run.rank):
            self._starts.pop()
        self._starts = [*self._starts[-1:], ((run.number, run.rank), state.pool, low)]
        (_, pool, before), *_ = self._starts
        if pool != state.pool or abs(low - before) < _SAME_START * (high - low):
            return ""
        return f"The bytes axis starts at {format_bytes(low)} (before: {format_bytes(before)})."

    def _show_moment(self) -> None:
        state = self._state
        timeline = state.timeline
        for control in (self.slider, self.number, self.to_peak):
            control.disabled = timeline is None
        if timeline is None:
            job = state.shown.job if state.shown is not None else None
            self.breakdown.value = "" if job is None else as_html(ranks_blocks(job.ranks))
            return
        moment, last = self._moment(timeline), len(timeline) - 1 - timeline.first_step_event
        for control in (self.slider, self.number):
            # In an order in which no value is ever above its maximum: the page would change it and send that back.
            if moment > control.max:
                control.max = last
            control.value = moment
            control.max = last
        self.breakdown.value = breakdown_html(
            timeline, moment, state.pool, is_peak=state.moment is None, is_timed=not state.backend.is_prediction
        )


def chart_title(state: LabState) -> str:
    """Writes what the chart shows: the run, and how the pinned one is drawn over it."""
    run, pinned = state.one_run, state.pinned
    if run is None or state.shows_all_ranks:
        return ""
    title = f"Chart: <b>{html.escape(f'{run}', quote=False)}</b>"
    if pinned is None or state.is_pinned:
        return title
    rank = state.one_rank if state.pinned_rank is None else state.pinned_rank
    if pinned.lacks(rank):
        return f"{title}; the pinned run {pinned.number} has no record of rank {rank}"
    other = pinned.of_rank(rank)
    return f'{title} <span class="memlab-pinned-line">{html.escape(f"pinned: {other}", quote=False)}</span>'


def breakdown_html(timeline: Timeline, moment: int, pool: str, *, is_peak: bool, is_timed: bool) -> str:
    """Writes what is allocated after an event: by category and by module, the largest first.

    The event's time is left out where it is that of a prediction, which a reader would take for a GPU's.
    """
    index = timeline.first_step_event + moment
    total = timeline.bytes_at(index, pool)
    time = f"{timeline.nanoseconds[index] / 1e6:,.3f} ms, " if is_timed else ""
    where = f"event {moment:,}, {time}{PHASES[timeline.phase[index]]}"
    head = f"Allocated on the {pool} {'at the peak' if is_peak else 'at this moment'}: {format_bytes(total)}"
    categories = timeline.breakdown(index, "category", pool)
    elsewhere = [name for name in CATEGORY_LOOKS if name in timeline.categories_of(pool) and name not in categories]
    modules = grouped_modules(timeline.breakdown(index, "module", pool), categories)
    others = sum(list(modules.values())[_NUM_MODULES:])
    largest = dict(list(modules.items())[:_NUM_MODULES])
    if others:
        largest[f"others ({len(modules) - _NUM_MODULES})"] = others
    by_category = _table("by category", categories, total, elsewhere)
    tables = by_category + _table("by module that allocated it", largest, total)
    return (
        f'<div class="memlab-allocated" aria-live="polite"><b>{head}</b><br>{where}</div>'
        f'<div class="memlab-tables" tabindex="0">{tables}</div>'
    )


def _table(title: str, sizes: dict[str, int], total: int, elsewhere: Sequence[str] = ()) -> str:
    """Writes a row for each size, and one row for the categories that the chart shows at other moments only."""
    unit_bytes, unit = binary_unit(max(sizes.values(), default=1))
    rows = ""
    for name, size in sizes.items():
        share = f"{size / total:.1%}" if total else ""
        rows += f"<tr><td>{_named(name)}</td><td>{in_unit(size, unit_bytes)}</td><td>{share}</td></tr>"
    if elsewhere:
        rows += f'<tr><td colspan="3">nothing now of {", ".join(_named(name) for name in elsewhere)}</td></tr>'
    return f"<table><caption>{title} ({unit})</caption>{rows}</table>"


def _named(name: str) -> str:
    look = CATEGORY_LOOKS.get(name)
    swatch = f'<i style="background:{look.colour}"></i>' if look else ""
    return swatch + html.escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
