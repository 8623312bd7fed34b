"""The panel's search: what is asked of it, what it shows, and how a point's settings come into the controls."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.pareto_front import SearchResult
from memlab.fitting.search import search
from memlab.units import GIB, MIB, format_bytes, parse_bytes
from memlab.views.figures.search import CHOICE, search_figure
from memlab.views.panel.panel import panel
from memlab.views.panel.search_state import SearchState
from memlab.views.panel.search_view import SearchView
from memlab.views.panel.settings_form import LABELS
from memlab.views.panel.state import LabState
from memlab.views.panel.what_if import WhatIf
from memlab.views.text.columns import LINE_WIDTH, as_text
from memlab.views.text.search import alone_blocks, ranked, search_table
from tests.unit.builders import record_of
from tests.unit.test_search import PLAIN, machine, predicting

from .fake_lab import FakeLab


class FakeSearch:
    """A search that ends when a test says so."""

    def __init__(self, scenario: Scenario, base: MemorySettings, limit_bytes: int, **others: Any) -> None:
        self.asked = (scenario, base, limit_bytes)
        self.backend, self.alone = others["backend"], others["alone"]
        self.on_line, self.on_end = others["on_line"], others["on_end"]

    def stop(self) -> None:
        self.on_end("Stopped: search again.")


@pytest.fixture(scope="module")
def found() -> SearchResult:
    scenario = Scenario.of(architecture="qwen3-moe-tiny")
    return search(PLAIN, [scenario], predicting(machine(1, scenario), 59 * GIB), 59 * GIB, resolution_bytes=GIB // 4)


@pytest.fixture
def state() -> SearchState:
    return SearchState(LabState(FakeLab()), FakeSearch)


def points_of(figure: Any, axis: str) -> dict[int, tuple[float, float]]:
    traces = [trace for trace in figure.data if (trace.uid or "").startswith(f"{CHOICE}-{axis}-")]
    return {number: (x, y) for t in traces for number, x, y in zip(t.customdata, t.x, t.y, strict=True)}


def test_the_figure_has_every_point_in_both_panels_at_its_own_place(found: SearchResult) -> None:
    figure = search_figure(found)
    again, moved = points_of(figure, "y"), points_of(figure, "y2")
    assert sorted(again) == sorted(moved) == list(range(len(found.points)))
    largest = max(point.transferred_bytes for point in found.points)
    unit = GIB if largest >= GIB else MIB
    for number, point in enumerate(found.points):
        peak = point.peak_allocated_bytes / GIB
        assert again[number] == pytest.approx((peak, point.recomputed_operations / 1e6))
        assert moved[number] == pytest.approx((peak, point.transferred_bytes / unit))
    (room,) = figure.layout.shapes
    assert room.x0 == room.x1 == 59.0


def test_a_mark_on_the_zero_line_is_inside_its_plot(found: SearchResult) -> None:
    layout = search_figure(found).layout
    for axis, costs in (
        (layout.yaxis, [point.recomputed_operations / 1e6 for point in found.points]),
        (layout.yaxis2, []),
    ):
        low, high = axis.range
        assert low < -0.05 * high, "the mouse reaches the lower half of the mark"
        assert high > max(costs, default=0)


def test_the_front_is_told_by_more_than_colour(found: SearchResult) -> None:
    figure = search_figure(found)
    for trace in figure.data:
        if not (trace.uid or "").startswith(CHOICE):
            continue
        for number in trace.customdata:
            point = found.points[number]
            assert (trace.marker.opacity == 1) == (point in found.front)
            assert trace.marker.symbol.endswith("-open") == (not point.fits)
    ringed = [trace for trace in figure.data if trace.name == "fits with the least extra work"]
    assert {x for trace in ringed for x in trace.x} == {p.peak_allocated_bytes / GIB for p in found.cheapest}


def test_marks_that_hide_each_other_have_their_number_beside_them_and_each_names_the_others(
    found: SearchResult,
) -> None:
    first, *_ = [point for point in found.front if point.recomputed_operations and not point.transferred_bytes]
    hidden, apart = sorted(
        (point for point in found.points if point not in found.front), key=lambda point: f"{point.settings}"
    )[:2]
    near = replace(first, settings=hidden.settings, peak_allocated_bytes=first.peak_allocated_bytes + 1)
    far = replace(near, settings=apart.settings, peak_allocated_bytes=first.peak_allocated_bytes + 20 * GIB)
    figure = search_figure(replace(found, points=(first, near, far)))

    (upper,) = [trace for trace in figure.data if trace.name == "settings in one place" and trace.yaxis == "y"]
    assert (list(upper.x), list(upper.text)) == ([first.peak_allocated_bytes / GIB], ["2"])
    texts = {
        number: text
        for trace in figure.data
        if (trace.uid or "").startswith(f"{CHOICE}-y-")
        for number, text in zip(trace.customdata, trace.text, strict=True)
    }
    for number, other in ((0, near), (1, first)):
        name = f"{other.settings}: {format_bytes(other.peak_allocated_bytes)}"
        assert texts[number].endswith(f"in the same place:</i><br>{name}")
    assert "same place" not in texts[2]


@pytest.mark.parametrize("number", [1, 3])
def test_faint_marks_in_one_place_are_together_as_faint_as_one(found: SearchResult, number: int) -> None:
    first = found.front[0]
    far = replace(first, peak_allocated_bytes=first.peak_allocated_bytes + 20 * GIB)
    others = [point.settings for point in found.points if point not in found.front][:number]
    figure = search_figure(replace(found, points=(first, *(replace(far, settings=each) for each in others))))
    (faint,) = [trace for trace in figure.data if (trace.uid or "").startswith(f"{CHOICE}-y-False")]
    assert len(faint.x) == number
    assert math.prod(1 - opacity for opacity in faint.marker.opacity) == pytest.approx(0.6), "is seen through them"


@pytest.mark.parametrize("room_gib", [1, 500])
def test_a_room_that_is_far_off_is_said_and_not_drawn(found: SearchResult, room_gib: int) -> None:
    points = tuple(replace(point, verdict="fits" if room_gib > 60 else "does not fit") for point in found.points)
    figure = search_figure(replace(found, limit_bytes=room_gib * GIB, points=points))
    assert figure.layout.shapes == ()
    assert figure.layout.annotations[0].text.endswith(f"{'left' if room_gib == 1 else 'right'} of this axis")
    assert ("nothing fits" in figure.layout.title.text) == (room_gib == 1)


def test_the_table_says_what_was_left_out(found: SearchResult) -> None:
    text = search_table(replace(found, num_left=7))
    assert max(len(line) for line in text.splitlines()) <= LINE_WIDTH
    assert f"{len(found.points)} of {found.num_candidates} settings predicted" in text
    assert "CUT SHORT: 7 that may be on the front" in " ".join(text.split())
    assert "in the same interval of 256.00 MiB, counted from the limit" in text
    assert text.count("fits\n") + text.count("may fit\n") >= len(found.cheapest)


def test_the_lowest_peak_that_is_named_where_nothing_fits_is_in_the_front_below(found: SearchResult) -> None:
    above = tuple(replace(point, verdict="does not fit") for point in found.points)
    lowest = min(above, key=lambda point: point.peak_allocated_bytes)
    # Of two peaks that count as equal, the front has the one with less work.
    lower = replace(lowest, peak_allocated_bytes=lowest.peak_allocated_bytes - 1, recomputed_operations=1e15)
    none_fits = replace(found, limit_bytes=GIB, points=(*above, lower))
    named = search_table(none_fits).partition("of the front, '")[2].partition("'")[0]
    assert named in {f"{point.settings}" for point in none_fits.front}
    assert lower not in none_fits.front and none_fits.best in none_fits.front


def test_a_search_on_a_cpu_cites_no_measurement_of_gpus(found: SearchResult) -> None:
    assert "on H200s" in found.verdict
    on_cpu = SearchResult.from_dict(replace(found, backend="cpu").to_dict())
    assert on_cpu.verdict.endswith(
        "a step that was predicted for this CPU with balanced routing; it says nothing about a GPU"
    )


def test_a_search_is_of_the_form_s_workload_and_what_waits_between_steps(state: SearchState) -> None:
    kept = {"offload_parameters": True, "offload_optimizer": True, "offload_optimizer_except_update": True}
    state._state.edit(seq_length=128, recompute_granularity="full", **kept)
    state._state.edit(grad_reduce_in_bf16=True)
    state.limit = "30 MiB"
    state.start()
    scenario, base, limit_bytes = state._search.asked
    assert (scenario.seq_length, base, limit_bytes) == (128, MemorySettings(**kept), 30 * MIB)
    assert scenario.state == TrainingState(grad_reduce_in_bf16=True)
    assert state._search.backend == "cpu", "it compares with the runs of a lab on a CPU"
    assert state.busy
    state.start()
    assert "is running" in state.notice
    state._search.on_line("3 predicted, at most 9 to go")
    assert state.notice == "3 predicted, at most 9 to go"
    state.stop()
    assert not state.busy and state.notice.startswith("Stopped")


@pytest.mark.parametrize(
    ("room", "changes", "words"),
    [("much", {}, "'much' is not a size of memory"), ("1GiB", {"seq_length": 0}, "seq_length is 0")],
)
def test_what_cannot_be_searched_is_said(state: SearchState, room: str, changes: dict[str, Any], words: str) -> None:
    state._state.edit(**changes)
    state.limit = room
    state.start()
    assert not state.busy and state.notice.startswith("Not searched: ") and words in state.notice


def test_the_room_that_is_proposed_lies_just_under_the_shown_run(state: SearchState) -> None:
    state.is_open = True
    assert (state.limit, state.limit_source) == (
        "76.000 GiB",
        "what torch can usually hold of a GPU's 80 GB in a job of one rank",
    )
    lab = FakeLab()
    lab.submit(PLAIN)
    beside = SearchState(LabState(lab), FakeSearch)
    beside.is_open = True
    assert parse_bytes(beside.limit) == pytest.approx(0.9 * lab.records[0].peak_allocated_bytes, rel=1e-3)
    view = SearchView(beside)
    assert "The suggested limit is 90% of the peak of run 1." in view.what.value
    beside._state.lab.outcome = {"peak_allocated_bytes": 10 * GIB}
    beside._state.run()
    assert parse_bytes(beside.limit) == pytest.approx(9 * GIB, rel=1e-3), "the latest run's, until the user enters one"
    view.limit.value = "1 GiB"
    beside._state.run()
    assert beside.limit == "1 GiB" and beside.limit_source == "" and "The suggested limit" not in view.what.value


def test_the_room_that_a_search_has_used_stays() -> None:
    lab = FakeLab()
    lab.submit(PLAIN)
    searched = SearchState(LabState(lab), FakeSearch)
    searched.is_open = True
    proposed = searched.limit
    searched.start(alone=True)
    scenario = Scenario.of(architecture="qwen3-moe-tiny")
    searched._search.on_end(search(PLAIN, [scenario], predicting(machine(1, scenario), GIB), GIB, alone=True))
    lab.outcome = {"peak_allocated_bytes": 10 * GIB}
    searched._state.run()
    assert searched.limit == proposed


def test_without_a_run_the_room_is_proposed_from_what_is_predicted_for_the_controls() -> None:
    state = LabState(FakeLab())
    what_if = WhatIf(state)
    search = SearchState(state, FakeSearch, what_if=what_if)
    search.is_open = True
    what_if.predicted = record_of(None, peak_allocated_bytes=20 * MIB)
    assert search.limit == "18.00 MiB"
    assert search.limit_source == "90% of the peak that is predicted for the controls"


def test_a_search_and_the_controls_call_what_is_on_the_host_alike() -> None:
    for field in ("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update"):
        name = f"{MemorySettings(**({'offload_gradients': False} | {field: True}))}"
        assert set(LABELS[field].split()) | {"on", "host"} == set(name.split())


def test_the_search_names_what_it_keeps_of_the_controls(state: SearchState) -> None:
    view, controls = SearchView(state), state._state
    takes = "Both take this from the controls and do not change it:"
    assert f"{takes} 1 sequence of 64 tokens in a micro-batch." in view.what.value
    controls.edit(offload_optimizer_except_update=True, recompute_granularity="full", micro_batch_size=2)
    controls.edit(grad_reduce_in_bf16=True)
    kept = "2 sequences of 64 tokens in a micro-batch; optimizer on host except update; grad_reduce_in_bf16"
    assert f"{takes} {kept}." in view.what.value
    controls.edit(offload_optimizer=1)
    assert "offload_optimizer is 1, must be True or False" in view.what.value


def test_what_the_controls_showed_is_not_said_after_they_changed(state: SearchState, found: SearchResult) -> None:
    state.found = found
    state.take(0)
    assert state._state.notice.startswith("The controls show ")
    state._state.edit(seq_length=128)
    assert state._state.notice == "Ready: change a setting, then press Run."


def test_the_proposed_limit_is_in_its_field_before_the_field_appears(state: SearchState) -> None:
    view = SearchView(state)
    in_field: list[str] = []
    view._section.layout.observe(lambda _: in_field.append(view.limit.value), names=["display"])
    state.is_open = True
    assert in_field == ["76.000 GiB"]


def test_every_point_of_the_front_comes_into_the_controls_as_it_is(state: SearchState, found: SearchResult) -> None:
    view = SearchView(state)
    state.limit = "59GiB"
    state.start()
    state._search.on_end(found)
    assert view.chart is not None and not state.busy
    for number, point in enumerate(found.points):
        view.chart._answer(view.chart, {"point": number, "view": "search 1"}, [])
        assert state._state.settings == point.settings
        assert str(point.settings) in state._state.notice
    assert " settings are on the front (" in state.notice, "one line says what was found, another what was taken"
    view.chart._answer(view.chart, {"point": 0, "view": "search 0"}, [])
    assert state._state.notice == "Another search ended before your click arrived: click again."
    rows = view.table.content["choices"]
    assert [found.points[number] for number in rows] == list(found.front)
    view.table._answer(view.table, {"choice": rows[0], "shown": view.table.content["shown"]}, [])
    assert state._state.settings == found.front[0].settings
    state._state.notice = ""
    state.start()
    state._search.on_end(replace(found, points=found.points[:1]))
    assert view.table.content["choices"] == [0]
    view.table._answer(view.table, {"choice": 0, "shown": view.table.content["shown"] - 1}, [])
    assert state._state.notice == "Another search ended before your click arrived: click again."


def test_a_click_that_arrives_while_a_search_ends_chooses_no_other_row(state: SearchState, found: SearchResult) -> None:
    view = SearchView(state)
    state.limit = "59GiB"
    state.start()
    state._search.on_end(found)
    assert view.chart is not None
    for widget, points in ((view.table, found.points[::-1]), (view.chart, found.points)):
        before, (row, *_), shown = state._state.settings, view.table.content["choices"], view.table.content["shown"]
        message = {"choice": row, "point": row, "shown": shown, "view": view.chart.picture["layout"]["uirevision"]}
        state.start()
        clicked = threading.Thread(target=widget._answer, args=(widget, message, []))
        with state.lock:  # as the thread that receives a search's result
            clicked.start()
            clicked.join(0.1)
            state._search.on_end(replace(found, points=points))
        clicked.join()
        assert state._state.notice == "Another search ended before your click arrived: click again."
        assert state._state.settings == before


def test_a_failed_search_is_a_line_and_the_panel_lives() -> None:
    shown = panel(FakeLab())
    view, state = shown.search, shown.search.state
    state._start_search = FakeSearch
    state.is_open = True
    assert view.toggle.value and view.table.layout.display == "none"
    assert view.toggle.description == "Back to the timeline" and shown.timeline.box.layout.display == "none"
    shown.run_bar.run.click()
    assert not state.is_open and shown.timeline.box.layout.display == "grid", "Run shows its chart"
    state.is_open = True
    assert "the bytes that a step allocates on this CPU; a GPU needs more" in view.what.value
    state.start()
    last = "The search ended with code 1 (ValueError: so): change the memory limit or the workload, and search again."
    state._search.on_end(last)
    assert "code 1" in view.status.value and view.stop.disabled
    assert not shown.state.busy and shown.state.settings == PLAIN
    shown.close()


def test_each_setting_alone_is_listed_by_what_it_saves_and_comes_into_the_controls(state: SearchState) -> None:
    scenario = Scenario.of(architecture="qwen3-moe-tiny")
    limit_bytes = 59 * GIB
    alone = search(PLAIN, [scenario], predicting(machine(1, scenario), limit_bytes), limit_bytes, alone=True)
    base, *others = alone.points
    view, state.limit = SearchView(state), "59 GiB"
    view.alone.click()
    assert state.alone and state._search.alone
    state._search.on_end(alone)
    saved = {f"{point.settings}": base.peak_allocated_bytes - point.peak_allocated_bytes for point in others}
    text = as_text(alone_blocks(alone))
    places = [text.index(f"\n{name}  ") for name in sorted(saved, key=lambda name: -saved[name])]
    assert places == sorted(places), "what saves most comes first"
    assert f"{max(saved.values()) / MIB:.2f}" in text
    in_phases = replace(alone, points=tuple(replace(point, peak_phase="optimizer") for point in alone.points))
    assert "peak in" not in text and "optimizer" in as_text(alone_blocks(in_phases)), "why it saves no more"
    assert "each setting alone" in view.answer.content["html"]
    counted = f"{len(alone.points)} settings predicted: 'none', and each change to it alone."
    assert state.notice.startswith(counted), "the count is that of the rows"
    assert f"{len(alone.points)} of {len(alone.points)} settings predicted" in view.table.content["html"]
    assert [alone.points[number] for number in view.answer.content["choices"]] == ranked(alone)
    chosen = {"choice": alone.points.index(others[0]), "shown": view.answer.content["shown"]}
    view.answer._answer(view.answer, chosen, [])
    assert state._state.settings == others[0].settings
    view.search.click()
    assert not state.alone and not state._search.alone
