"""The panel's widgets, driven by the messages that a page sends, without a page."""

from __future__ import annotations

import gc
import html
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comm
import ipywidgets
import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances as open_widgets
from ipywidgets.widgets.widget import _remove_buffers
from megatron.core.transformer.transformer_config import TransformerConfig

import memlab
from memlab.config.settings import NEWER_SETTINGS, OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.views.panel import exports
from memlab.views.panel import panel as panel_module
from memlab.views.panel.panel import Panel, panel
from memlab.views.panel.runs_view import text_twin
from memlab.views.panel.timeline_view import breakdown_html
from memlab.views.text.record import record_table
from memlab.vocabulary import CATEGORIES, PHASES

from .builders import random_timeline, training_step
from .fake_lab import FakeLab

RECOMPUTE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
Drive = tuple[str, Any]
OF_OTHER_MODELS = ("mla_up_proj", "shared_experts")
CONTROLS: list[tuple[list[Drive], dict[str, Any]]] = [
    # The page's messages, by control, and the settings that the API is given for the same.
    ([("recompute_granularity", 1)], {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1}),
    (
        [("recompute_granularity", 2), ("recompute_modules:moe", True), ("checkpoint_input_remedy", 1)],
        {**RECOMPUTE, "recompute_modules": ["core_attn", "moe"], "checkpoint_input_remedy": "detach"},
    ),
    ([("recompute_granularity", 2)], {**RECOMPUTE, "recompute_modules": ["core_attn"]}),
    (
        [("recompute_granularity", 1), ("recompute_method", 1), ("recompute_num_layers", 3)],
        {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    ),
    *(
        (
            [("recompute_granularity", 2), ("recompute_modules:core_attn", False), (f"recompute_modules:{name}", True)],
            {**RECOMPUTE, "recompute_modules": [name]},
        )
        for name in RECOMPUTE_MODULES
        if name not in ("mlp", "core_attn", *OF_OTHER_MODELS)
    ),
    *(
        (
            [("min_offloaded_tensor_size", 0), (f"offload_modules:{name}", True)],
            {"offload_modules": [name], "min_offloaded_tensor_size": 0},
        )
        for name in OFFLOAD_MODULES
        if name not in ("attn_norm", "attn_proj")
    ),
    (
        [
            ("min_offloaded_tensor_size", 1024**2),
            *((f"offload_modules:{name}", True) for name in ("core_attn", "attn_proj")),
        ],
        {"offload_modules": ["core_attn", "attn_proj"]},
    ),
    ([("offload_parameters", 1)], {"offload_parameters": True}),
    ([("offload_optimizer", 1)], {"offload_optimizer": True}),
    ([("offload_optimizer", 1), ("offload_gradients", 1)], {"offload_optimizer": True, "offload_gradients": False}),
    ([("offload_gradients", 2)], {"offload_gradients": True}),
    ([("offload_optimizer_except_update", 1)], {"offload_optimizer_except_update": True}),
]


def receive(widget: Any, **state: Any) -> None:
    """Does what a message of the page does."""
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


def press(button: Any) -> None:
    content = {"data": {"method": "custom", "content": {"event": "click"}}}
    button._handle_msg({"content": content, "buffers": []})


def click(chart: Any, point: int) -> None:
    content = {"point": point, "view": chart.picture["layout"]["uirevision"]}
    chart._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def drive(shown: Panel, name: str, value: Any) -> None:
    control = shown.controls.by_name[name]
    receive(control, **{"index" if isinstance(control, ipywidgets.Dropdown) else "value": value})


def button(shown: Panel, hook: str) -> Any:
    found = [widget for widget in inside(shown) if f"memlab-{hook}" in getattr(widget, "_dom_classes", ())]
    assert len(found) == 1
    return found[0]


def inside(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


@pytest.fixture
def make_panel() -> Iterator[Callable[..., Panel]]:
    made: list[Panel] = []

    def make(**options: Any) -> Panel:
        made.append(panel(FakeLab(**options)))
        return made[-1]

    yield make
    for shown in made:
        shown.close()


@pytest.mark.parametrize(
    ("messages", "settings"), CONTROLS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_each_control_by_message_gives_what_the_api_gives(
    make_panel: Callable[..., Panel], messages: list[Drive], settings: dict[str, Any]
) -> None:
    shown, by_api = make_panel(), make_panel()
    for name, value in messages:
        drive(shown, name, value)
    by_api.state.form = by_api.state.form.with_settings(MemorySettings(**settings))

    press(shown.run_bar.run)
    by_api.state.run()

    assert shown.state.settings == by_api.state.settings == MemorySettings(**settings)
    assert shown.state.lab.submitted == by_api.state.lab.submitted == [MemorySettings(**settings)]
    shared = [name for name, _ in messages]
    for name in shared:
        assert shown.controls.by_name[name].value == by_api.controls.by_name[name].value


def test_every_control_is_in_the_parity_test_or_does_not_apply(make_panel: Callable[..., Panel]) -> None:
    driven = {name for messages, _ in CONTROLS for name, _ in messages}

    left = set(make_panel().controls.by_name) - driven

    elsewhere = {"seq_length", "micro_batch_size", *NEWER_SETTINGS}  # test_settings_of_newer_megatron.py
    assert left == {"recompute_modules:mlp", "offload_modules:attn_norm", *elsewhere}


def test_settings_by_message_give_the_record_that_the_api_gives(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", seq_length=64)
    shown = panel(lab)
    for messages, settings in [CONTROLS[2], CONTROLS[6], CONTROLS[8], CONTROLS[-2]]:
        shown.state.form = shown.state.form.with_settings(MemorySettings())
        drive(shown, "min_offloaded_tensor_size", 1024 * 1024)
        for name, value in messages:
            drive(shown, name, value)
        by_api = lab.step(MemorySettings(**settings))
        lab.step(MemorySettings())
        running = shown.state.run()
        assert running is not None
        assert_same_step(running.result(), by_api)
    drive(shown, "seq_length", 32)
    drive(shown, "micro_batch_size", 2)
    drive(shown, "offload_optimizer", 0)
    by_panel = shown.state.run().result()
    lab.set_workload(seq_length=32, micro_batch_size=2)
    assert_same_step(by_panel, lab.step(by_panel.settings))
    shown.close()


def assert_same_step(one: StepRecord, other: StepRecord) -> None:
    times = ("load_seconds", "offload_seconds", "step_seconds", "tokens_per_second", "step_index")
    values, others = one.to_dict(), other.to_dict()
    assert {name: value for name, value in values.items() if name not in times} == {
        name: value for name, value in others.items() if name not in times
    }
    # In which order Python frees what dies at one place is not decided.
    assert np.array_equal(np.sort(one.timeline.delta_bytes), np.sort(other.timeline.delta_bytes))


def test_a_real_step_ends_on_the_panel_and_out_of_memory_too(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", seq_length=64)
    shown = panel(lab)
    press(shown.run_bar.run)
    wait_for(shown)
    assert shown.timeline.title.value == "Chart: <b>run 1 (none)</b>"

    lab.device_memory_bytes = lab.records[0].peak_allocated_bytes - 1
    press(shown.run_bar.run)
    wait_for(shown)
    lab.device_memory_bytes = None
    press(shown.run_bar.run)
    wait_for(shown)

    assert [row["status"] for row in shown.runs.table.rows] == ["ok", "out of memory", "ok"]
    assert "requested" in shown.runs.table.rows[1]["message"]
    assert shown.runs.table.rows[2]["peak"] == shown.runs.table.rows[0]["peak"]
    shown.close()


def wait_for(shown: Panel) -> None:
    """Waits until the step that was started has ended on the panel too."""
    ended = threading.Event()
    shown.state.observe(lambda change: change["new"] or ended.set(), names=["busy"])
    assert not shown.state.busy or ended.wait(60)


def test_controls_that_do_not_apply_are_disabled_and_say_why(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel(architecture="phi-4-tiny")
    controls = shown.controls
    disabled = {name for name, control in controls.by_name.items() if control.disabled}

    assert disabled == {
        *("recompute_method", "recompute_num_layers"),
        *(f"recompute_modules:{module}" for module in RECOMPUTE_MODULES if module not in OF_OTHER_MODELS),
        *("offload_modules:attn_norm", "offload_modules:mlp_norm"),
        *("offload_modules:expert_fc1", "offload_modules:moe_act", "checkpoint_input_remedy"),
        *(name for name in NEWER_SETTINGS if name not in TransformerConfig.__dataclass_fields__),
    }
    for name in disabled:
        assert 'title="' in controls.notes[name].value
        assert "aria-label=" in controls.notes[name].value
    assert "only MoE layers have, and phi-4-tiny is dense" in controls.notes["offload_modules:moe_act"].value
    assert "only recompute_granularity &#x27;full&#x27; reads it" in controls.notes["recompute_method"].value

    drive(shown, "recompute_granularity", 1)

    assert not controls.by_name["recompute_method"].disabled
    assert controls.notes["recompute_method"].value == ""


@pytest.mark.parametrize(
    ("messages", "group"),
    [
        ([("offload_modules:attn_proj", True)], "Offload during the step"),
        ([("recompute_granularity", 1), ("recompute_num_layers", 3)], "Recompute"),
        ([("recompute_granularity", 1), ("recompute_num_layers", 9)], "Recompute"),
        ([("seq_length", -5)], "Workload"),
    ],
)
def test_a_refusal_stands_beside_its_control_in_the_rules_words(
    make_panel: Callable[..., Panel], messages: list[Drive], group: str
) -> None:
    shown = make_panel()
    for name, value in messages:
        drive(shown, name, value)

    assert shown.state.validation_error
    assert errors(shown) == {group: html.escape(shown.state.validation_error, quote=False)}
    press(shown.run_bar.run)
    assert shown.state.lab.submitted == []
    assert html.escape(shown.state.validation_error, quote=False) in shown.run_bar.status.value
    assert shown.run_bar.run.disabled
    assert html.escape(shown.state.validation_error, quote=False) in shown.run_bar.verdict.value
    tooltip = f'title="not possible: {html.escape(shown.state.validation_error)}"'
    assert tooltip in shown.run_bar.verdict.value, "the place of the message has three lines only"

    shown.state.form = shown.state.form.of(MemorySettings(), shown.state.scenario)
    assert not errors(shown)
    assert not shown.run_bar.run.disabled


def test_run_bar_tells_how_far_the_step_is(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    bar, lab = shown.run_bar, shown.state.lab
    lab.holds = True
    assert (bar.stop.disabled, bar.progress.layout.display) == (True, "none")
    press(bar.run)
    assert (bar.stop.disabled, bar.place.value, bar.progress.layout.display) == (False, "starting", "flex")

    lab.progress(phase="warm-up backward", module="decoder.layers.2", done=6, total=16)

    assert (bar.progress.value, bar.progress.max) == (6, 16)
    assert bar.place.value == "warm-up step, backward of decoder.layers.2: 38% done"
    lab.progress(phase="warm-up idle", module="", done=8, total=16)
    press(bar.run)
    assert "this lab is busy" in bar.status.value
    press(bar.stop)
    assert (bar.stop.disabled, bar.place.value, bar.progress.layout.display) == (True, "", "none")
    assert shown.runs.table.rows[0]["status"] == "stopped"


def test_a_note_says_what_an_offload_transferred_in_the_shown_run_only(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    shown.state.lab.outcome = {
        "offloaded_bytes_by_module": {"core_attn": 2048},
        "offloaded_bytes_by_group": {"gradients": 1024, "optimizer state": 4096},
    }
    press(shown.run_bar.run)
    transferred = {
        "offload_modules:core_attn": ("2.0 KiB", "2.0 KiB copied to the host and back in run 1"),
        "offload_gradients": ("1.0 KiB", "1.0 KiB dropped in run 1"),
        "offload_optimizer": ("4.0 KiB", "4.0 KiB copied to the host and back in run 1"),
    }
    assert notes(shown) == transferred
    assert heads(shown) == {"Offload during the step": "run 1:", "On host between steps": "run 1:"}
    assert "ok; transferred to the host: core_attn 2.0 KiB, optimizer state 4.0 KiB" in shown.run_bar.status.value

    reason = "the largest tensor saved there has 40960 elements"
    shown.state.lab.outcome = {"without_effect": {f"offload_modules:{m}": reason for m in ("core_attn", "expert_fc1")}}
    press(shown.run_bar.run)

    said = ("no effect", f"no effect in run 2: {reason}")
    assert notes(shown) == {f"offload_modules:{module}": said for module in ("core_attn", "expert_fc1")}
    assert heads(shown) == {"Offload during the step": "run 2:"}
    assert f"ok; without effect: core_attn, expert_fc1 ({reason})" in shown.run_bar.status.value
    receive(shown.runs.table, shown=1)
    assert notes(shown) == transferred
    shown.state.edit(offload_gradients=True)
    assert "offload_gradients" not in notes(shown), "the control no longer shows what the run set"
    shown.state.edit(offload_gradients=None)
    assert "run 1 (none): ok; transferred" in shown.run_bar.status.value
    shown.state.lab.outcome = {"status": "out_of_memory", "message": "no", "offloaded_bytes_by_module": {"mlp": 1}}
    press(shown.run_bar.run)
    assert notes(shown) == {}


def notes(shown: Panel) -> dict[str, tuple[str, str]]:
    """Returns the words of the notes about the shown run, and their sentences."""
    found = {
        name: re.search(r'title="([^"]*in run[^"]*)".*>(.+)</i>', n.value) for name, n in shown.controls.notes.items()
    }
    return {name: (match[2], match[1]) for name, match in found.items() if match}


def heads(shown: Panel) -> dict[str, str]:
    """Returns the run that the notes of a group are about, where it has any."""
    return _in_heads(shown, "<span>(.+)</span>")


def errors(shown: Panel) -> dict[str, str]:
    """Returns the rule that a group's controls break, where they break one."""
    return _in_heads(shown, '<div role="alert".*?>(.*)</div>')


def _in_heads(shown: Panel, pattern: str) -> dict[str, str]:
    found = {name: re.search(pattern, head.value) for name, head in shown.controls.heads.items()}
    return {name: match[1] for name, match in found.items() if match}


def test_what_offload_transferred_is_noted_at_the_setting_that_transferred_it(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    shown.state.lab.outcome = {"offloaded_bytes_by_group": {"optimizer state": 2**20}}
    for setting, other in (
        ("offload_optimizer_except_update", "offload_optimizer"),
        ("offload_optimizer", "offload_optimizer_except_update"),
    ):
        drive(shown, other, 0)
        drive(shown, setting, 1)
        press(shown.run_bar.run)
        assert "1.00 MiB copied to the host and back" in shown.controls.notes[setting].value
        assert shown.controls.notes[other].value == ""


def test_a_tick_without_effect_under_the_other_settings_says_so(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    drive(shown, "offload_modules:core_attn", True)
    note = shown.controls.notes["offload_modules:core_attn"]
    assert note.value == ""

    drive(shown, "recompute_granularity", 2)

    assert 'title="no effect: core_attn is recomputed' in note.value and note.value.endswith(">no effect</i>")
    drive(shown, "recompute_granularity", 0)
    assert note.value == ""


def test_the_table_chooses_pins_and_deletes(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    table = shown.runs.table
    for _ in range(3):
        press(shown.run_bar.run)
    assert (table.shown, table.pinned, len(table.rows)) == (3, 0, 3)

    receive(table, shown=1)
    press(button(shown, "pin"))
    assert (shown.state.shown.number, table.pinned) == (1, 1)
    assert shown.runs.pin.description == "Unpin"
    receive(table, shown=2)
    traces = {trace["uid"]: trace for trace in shown.timeline.chart.picture["traces"]}
    assert traces["pinned"]["visible"]
    assert shown.runs.pin.description == "Pin"

    press(button(shown, "delete"))

    assert [row["number"] for row in table.rows] == ["1", "3"]
    assert (table.shown, shown.state.shown.number, len(shown.state.lab.records)) == (3, 3, 2)
    drive(shown, "recompute_granularity", 1)
    press(button(shown, "reuse"))
    assert shown.controls.by_name["recompute_granularity"].value == "none"


def test_a_click_on_the_chart_and_a_typed_moment_tell_the_same(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    view, timeline = shown.timeline, shown.state.shown.record.timeline
    assert "at the peak" in view.breakdown.value
    assert view.number.value == timeline.peak_index() - timeline.num_opening_events + 1

    click(view.chart, 5)
    clicked = view.breakdown.value
    assert (shown.state.moment, view.number.value, view.slider.value) == (5, 5, 5)
    press(view.to_peak)
    assert shown.state.moment is None
    receive(view.number, value=5)

    assert view.breakdown.value == clicked
    assert "event 5," in clicked
    receive(view.slider, value=9)
    assert shown.state.moment == 9
    # The breakdown names what the timeline names, the largest first.
    index = timeline.num_opening_events - 1 + 9
    names = [name for name in timeline.breakdown(index) if name in view.breakdown.value]
    places = [view.breakdown.value.index(f"</i>{name}") for name in names]
    assert names == list(timeline.breakdown(index))
    assert places == sorted(places)
    press(shown.run_bar.run)
    assert shown.state.moment is None


def test_the_breakdown_groups_equal_layers_and_names_the_training_state() -> None:
    sizes = {"": 64, "decoder.layers.0.mlp": 8, "decoder.layers.1.mlp": 8}
    num_events = len(sizes)
    timeline = Timeline(
        nanoseconds=np.arange(num_events),
        delta_bytes=np.array([*sizes.values()]),
        pool=np.zeros(num_events, np.uint8),
        category=np.array([CATEGORIES.index(name) for name in ("parameters", "activations", "activations")], np.uint8),
        phase=np.full(num_events, PHASES.index("forward"), np.uint8),
        module=np.arange(num_events, dtype=np.int32),
        storage=np.arange(num_events, dtype=np.int32),
        modules=tuple(sizes),
        num_opening_events=0,
    )
    text = breakdown_html(timeline, num_events - 1, "device", is_peak=True, is_timed=False)
    text = text.replace("<wbr>", "")
    cells = re.findall(r"<td>(?:<i[^>]*></i>)?([^<]*)</td><td>([^<]*)</td>", text.partition("by module")[2])
    assert cells == [("parameters", "64"), ("mlp x\N{NO-BREAK SPACE}2", "16")]
    assert "by category (B)" in text, "a column has one unit, which its title names"
    assert "nothing now of" not in text
    at_first = breakdown_html(timeline, 0, "device", is_peak=False, is_timed=True)
    assert "event 2, forward" in text and "event 0, 0.000 ms, forward" in at_first
    assert re.search(r"nothing now of <i [^>]*></i>activations<", at_first), "each colour of the chart has a name"


def test_a_click_on_points_that_a_later_picture_has_replaced_asks_for_another(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    chart = shown.timeline.chart
    content = {"point": 5, "view": chart.picture["layout"]["uirevision"]}
    press(shown.run_bar.run)

    chart._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})

    assert shown.state.moment is None
    assert "click again" in shown.run_bar.status.value


def test_no_value_is_ever_beyond_its_sliders_end(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel(timeline=random_timeline(400))
    view, lab = shown.timeline, shown.state.lab
    seen: list[bool] = []
    for control in (view.slider, view.number):
        control.observe(
            lambda change: seen.append(0 <= change["owner"].value <= change["owner"].max), names=["value", "max"]
        )
    for num_events in (400, 50, 4000, 10):
        lab.timeline = random_timeline(num_events)
        press(shown.run_bar.run)
        receive(view.slider, value=view.slider.max)
        assert view.slider.value == num_events - 7

    for number in (2, 4, 3, 1):
        shown.state.show(number)
        assert shown.state.moment is None
    assert seen
    assert all(seen)


def test_switches_change_pool_and_axis(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel(timeline=random_timeline(300))
    press(shown.run_bar.run)
    view = shown.timeline

    receive(view.pool, index=1)
    receive(view.axis, index=1)

    layout = view.chart.picture["layout"]
    assert (shown.state.pool, shown.state.axis) == ("host", "event")
    assert "on the host" in layout["yaxis"]["title"]["text"]
    assert layout["xaxis"]["title"]["text"].startswith("memory events")
    assert "Allocated on the host" in view.breakdown.value
    shown.state.pool = "device"
    assert view.pool.value == "device"


def test_a_switch_chooses_where_the_bytes_axis_starts(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    chart, record = shown.timeline.chart, shown.state.shown.record
    start = chart.picture["layout"]["yaxis"]["range"][0]
    assert start * 2**20 == pytest.approx(record.static_bytes)

    receive(shown.timeline.floor, index=1)

    assert chart.picture["layout"]["yaxis"]["range"][0] == 0


def test_a_chart_that_starts_elsewhere_than_the_one_before_says_so(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    start, lab = shown.timeline.start, shown.state.lab
    press(shown.run_bar.run)
    press(shown.run_bar.run)
    assert start.value == "", "the same start"
    before = shown.state.shown.record.static_bytes
    lab.timeline = training_step(scale=1024 * 4)
    press(shown.run_bar.run)
    starts = [format_bytes(size) for size in (shown.state.shown.record.static_bytes, before)]
    words = f"The bytes axis starts at {starts[0]} (before: {starts[1]})."
    assert start.value == words
    shown.state.look_at(3)
    assert start.value == words, "the same run is drawn again"
    receive(shown.timeline.floor, index=1)
    press(shown.run_bar.run)
    assert start.value == ""


def test_every_control_that_can_be_pointed_at_says_what_it_is(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    kinds = (ipywidgets.widgets.widget_description.DescriptionWidget, ipywidgets.Button, ipywidgets.ToggleButton)
    silent = [w for w in inside(shown) if isinstance(w, kinds) and not isinstance(w, ipywidgets.HTML) and not w.tooltip]
    # The page would show the word null.
    assert [(type(w).__name__, w.description) for w in silent if w.description] == []
    for name, reason in shown.state.form.not_applicable(shown.state.scenario.architecture).items():
        assert "None" not in reason and " is 0.5" not in reason, name


def test_the_button_all_plain_takes_back_what_the_granularity_leaves(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    drive(shown, "offload_optimizer", 1)
    shown.state.edit(grad_reduce_in_bf16=True)
    press(button(shown, "plain"))
    assert shown.state.selection == (shown.state.lab.scenario, MemorySettings())


def test_a_deleted_run_can_be_brought_back_beside_the_words_that_say_so(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    undo = button(shown, "undo")
    assert undo.layout.display == "none"
    press(button(shown, "delete"))
    assert (shown.runs.table.rows, undo.layout.display) == ([], "flex")
    press(undo)
    assert (len(shown.runs.table.rows), shown.runs.table.base, undo.layout.display) == (1, 1, "none")


def test_the_text_table_says_what_the_chart_shows(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    assert shown.table.layout.display == "none"
    receive(shown.table_toggle, value=True)
    press(shown.run_bar.run)
    record = shown.state.shown.record

    assert shown.table.layout.display is None
    assert html.escape(record_table(record), quote=False) in shown.table.value
    press(button(shown, "pin"))
    press(shown.run_bar.run)
    assert "compared with the pinned run 1" in shown.table.value


def test_text_of_a_run_is_escaped_on_the_page(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    shown.state.lab.outcome = RuntimeError("<script>alert(1)</script>")
    press(shown.run_bar.run)

    for widget in inside(shown):
        if isinstance(widget, ipywidgets.HTML):
            assert "<script>" not in widget.value
    assert "<script>" not in json.dumps(shown.timeline.chart.picture["layout"])


@pytest.mark.parametrize("kind", ["run", "snapshot", "html", "csv"])
def test_exports_say_where_they_are(make_panel: Callable[..., Panel], tmp_path: Path, kind: str) -> None:
    shown = make_panel()
    receive(shown.runs.folder, value=str(tmp_path / "exports"))
    press(button(shown, f"export-{kind}"))
    assert "No run is shown" in shown.run_bar.status.value
    press(shown.run_bar.run)

    press(button(shown, f"export-{kind}"))

    (written,) = (tmp_path / "exports").iterdir()
    assert f"Exported {written}" in shown.run_bar.status.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no space left"), "no space left"),
        (RuntimeError("the browser is gone"), "RuntimeError: the browser is gone: export HTML instead"),
    ],
    ids=["disk", "browser"],
)
def test_an_export_that_fails_says_so_and_the_panel_lives_on(
    make_panel: Callable[..., Panel], monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    shown = make_panel()
    press(shown.run_bar.run)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(exports.go.Figure, "write_image", fail)
    monkeypatch.setattr(exports, "find_spec", lambda _: True)
    press(button(shown, "export-svg"))

    assert f"Not exported: {said}" in shown.state.notice
    assert shown.state.notice in shown.run_bar.status.value
    press(shown.run_bar.run)
    assert len(shown.state.runs) == 2


def test_the_lines_that_repeat_the_shown_run_are_on_the_page(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    drive(shown, "offload_parameters", 1)
    press(shown.run_bar.run)

    assert "MemorySettings(offload_parameters=True)\n" in shown.runs.repeat.value
    assert "memlab measure qwen3-moe-tiny --seq-length 64 --offload-parameters --backend cpu" in shown.runs.repeat.value


def test_copy_as_gives_a_framework_s_lines_for_the_shown_run(make_panel: Callable[..., Panel], tmp_path: Path) -> None:
    shown = make_panel()
    copy = shown.runs.copy_as
    copy.framework.value = "verl"
    assert (copy.lines.value, copy.lines.layout.display) == ("", "none")
    drive(shown, "offload_parameters", 1)
    press(shown.run_bar.run)
    drive(shown, "offload_optimizer", 1)
    assert copy.lines.value == shown.state.lines_to_copy
    first, second, *_ = copy.lines.value.splitlines()
    assert first == "# run 1 (on host parameters)" and second.startswith("# "), "the text can be pasted as it is"

    words = [line for line in copy.lines.value.splitlines() if line.startswith("++")]
    (tmp_path / "run.sh").write_text(" ".join(["python3 -m verl.trainer.main_ppo", *words]))
    scenario = shown.state.lab.scenario
    job = Job.read(tmp_path / "run.sh", architecture=scenario.architecture, version="2026-08-20")
    assert shown.state.shown.settings == MemorySettings(offload_parameters=True)
    of_verl = {"offload_gradients": True, "checkpoint_input_remedy": "release_storage"}
    assert job.settings == MemorySettings(offload_parameters=True, **of_verl), (
        "in verl, gradients leave with the parameters, and the inputs of checkpoints are always released"
    )
    assert job.scenario is not None
    assert (job.scenario.seq_length, job.scenario.micro_batch_size) == (scenario.seq_length, scenario.micro_batch_size)


def test_a_cell_that_is_run_again_has_the_same_panel() -> None:
    lab = FakeLab()
    shown = memlab.panel(lab)
    num_widgets = len(open_widgets)
    lab.submit(MemorySettings())

    assert memlab.panel(lab) is shown

    assert len(open_widgets) == num_widgets
    assert len(shown.runs.table.rows) == 1
    other = FakeLab()
    assert memlab.panel(other) is not shown
    memlab.panel(other).close()
    shown.close()


def test_the_panel_of_a_closed_lab_goes_when_another_lab_gets_one() -> None:
    before = set(open_widgets)
    first = FakeLab()
    kept = panel(first)
    press(kept.run_bar.run)
    first.closed = True
    assert panel(first) is kept, "its runs are there to look at"
    lab = weakref.ref(first)
    num_widgets = len(set(open_widgets) - before)

    second = panel(FakeLab())

    assert len(set(open_widgets) - before) == num_widgets
    del first
    gc.collect()
    assert lab() is None, "the closed panel, which IPython keeps in Out, has neither its lab nor the records"
    assert repr(kept) == "Panel(closed)"
    second.close()


def test_a_closed_panel_leaves_no_widget() -> None:
    before = set(open_widgets)
    lab = FakeLab()
    shown = panel(lab)
    press(shown.run_bar.run)
    shown.close()

    left = [widget for name, widget in open_widgets.items() if name not in before]
    assert [type(widget).__name__ for widget in left] == []
    lab.submit(MemorySettings())


def test_a_panel_has_one_model_for_all_plain_layouts_and_one_per_kind_of_style(
    make_panel: Callable[..., Panel],
) -> None:
    before = set(open_widgets)
    shown = make_panel()
    looks = [widget for name, widget in open_widgets.items() if name not in before and not hasattr(widget, "layout")]
    layouts = [look for look in looks if isinstance(look, ipywidgets.Layout)]

    assert sum(not look.get_state(drop_defaults=True) for look in layouts) == 1
    states = [(type(look), str(look.get_state(drop_defaults=True))) for look in looks if look not in layouts]
    assert len(states) == len(set(states))
    shown.state.table_open = True
    assert shown.table.layout.display is None
    assert shown.search._section.layout.display == "none", "a layout that changes is a widget's own"


def test_a_panel_costs_one_message_a_model_and_two_panels_fit_into_the_kernels_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[tuple[str, str, str]] = []
    lock = threading.Lock()

    class Recorder(comm.base_comm.BaseComm):  # type: ignore[misc]
        def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
            with lock:
                messages.append((msg_type, self.comm_id, json.dumps(data, default=str)))

    monkeypatch.setattr(comm, "create_comm", Recorder)
    lab = FakeLab()
    shown = panel(lab)

    opened = [model for kind, model, _ in messages]
    assert {kind for kind, *_ in messages} == {"comm_open"}
    assert len(opened) == len(set(opened)), "no model is opened twice"
    for number, (_, _, state) in enumerate(messages):
        assert set(re.findall(r"IPY_MODEL_(\w+)", state)) <= set(opened[:number]), "it names only models that exist"
    every = {part.model_id for widget in inside(shown) for part in (widget, widget.layout)}
    assert every <= set(opened)

    lab.closed = True
    second = panel(FakeLab())

    # libzmq drops messages beyond 1,000 that wait, and counts those that were sent in steps of 500.
    assert len(messages) - len(opened) <= 500, "the first panel goes and the second one comes"
    second.close()


def test_another_threads_widget_opens_at_once_while_a_panel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    read = panel_module.page_code

    def make_another(name: str) -> str:
        thread = threading.Thread(target=lambda: made.append(ipywidgets.Layout()))
        thread.start()
        thread.join()
        return read(name)

    monkeypatch.setattr(panel_module, "page_code", make_another)

    shown = panel(FakeLab())

    (look,) = made
    assert look.model_id in open_widgets
    look.close()
    shown.close()


def test_a_panel_that_cannot_be_made_leaves_later_widgets_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> str:
        raise ValueError("no such file")

    monkeypatch.setattr(panel_module, "page_code", fail)
    with pytest.raises(ValueError, match="no such file"):
        panel(FakeLab())

    look = ipywidgets.Layout()

    assert look.model_id in open_widgets
    look.close()


def test_a_hundred_runs_add_no_widget_and_no_trace(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    press(button(shown, "pin"))
    num_widgets = len(open_widgets)
    num_traces = len(shown.timeline.chart.picture["traces"])

    for _ in range(99):
        press(shown.run_bar.run)

    assert len(shown.runs.table.rows) == 100
    assert len(open_widgets) == num_widgets
    assert len(shown.timeline.chart.picture["traces"]) == num_traces


def test_all_widgets_together_take_less_than_a_notebook_may(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel(timeline=random_timeline(100_000))
    for _ in range(20):
        press(shown.run_bar.run)
    receive(shown.table_toggle, value=True)
    press(button(shown, "pin"))

    # As JupyterLab saves them: JSON, and buffers as base64, a third larger.
    num_bytes = 0
    for widget in inside(shown):
        state, _, buffers = _remove_buffers(widget.get_state())
        num_bytes += len(json.dumps(state, default=str)) + sum(len(buffer) * 4 // 3 for buffer in buffers)

    assert num_bytes < 900_000


def test_without_a_front_end_the_panel_is_its_text(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel()
    press(shown.run_bar.run)
    bundle = shown._repr_mimebundle_()

    assert bundle["text/plain"].endswith(text_twin(shown.state.shown, None))
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.model_id
    assert repr(shown).startswith("Panel(1 runs on ")


def test_the_page_gets_plotly_when_it_asks(make_panel: Callable[..., Panel], monkeypatch: pytest.MonkeyPatch) -> None:
    chart = make_panel().timeline.chart
    sent: list[Any] = []
    monkeypatch.setattr(chart, "send", lambda content, buffers: sent.append((content, buffers)))

    chart._handle_msg({"content": {"data": {"method": "custom", "content": {"question": "plotly"}}}, "buffers": []})

    ((content, buffers),) = sent
    assert content == {"answer": "plotly"}
    assert b"plotly.js" in buffers[0][:200]


def test_arrays_of_the_picture_travel_once(make_panel: Callable[..., Panel]) -> None:
    shown = make_panel(timeline=training_step(scale=1024))
    press(shown.run_bar.run)
    picture = shown.timeline.chart.picture
    stacked = [trace for trace in picture["traces"] if trace["visible"] and trace["uid"] in ("activations", "total")]

    assert len(stacked) == 2
    assert stacked[0]["x"] == stacked[1]["x"]
    total = np.frombuffer(picture["arrays"][stacked[1]["y"]["array"]])
    assert total.max() * 2**20 == shown.state.shown.record.peak_allocated_bytes
