"""The panel without a widget: what is edited, what runs, which runs there are, and what they leave."""

from __future__ import annotations

import csv
import io
import json
import logging
import random
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlab.cli import build_parser, main
from memlab.commands.shared.asked_step import asked_step
from memlab.config import without_effect
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.routing import Routing, find_routing
from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.fitting.candidates import each_alone
from memlab.fitting.recompute_cost import recomputed_share
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.units import MIB
from memlab.views.panel import exports
from memlab.views.panel import state as state_module
from memlab.views.panel.chart_data import TRACES, chart_drawing, event_at, mark_moment
from memlab.views.panel.presets import PRESETS
from memlab.views.panel.run import Run, columns, rows
from memlab.views.panel.settings_form import SettingsForm
from memlab.views.panel.state import LabState

from .builders import TimelineBuilder, training_step
from .fake_lab import FakeLab

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CASES = [
    MemorySettings(),
    FULL,
    MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    MemorySettings(recompute_granularity="selective", recompute_modules=["moe", "core_attn"]),
    MemorySettings(offload_modules=["core_attn", "attn_proj"], min_offloaded_tensor_size=0),
    MemorySettings(offload_optimizer=True),
    MemorySettings(offload_optimizer=True, offload_gradients=False),
    MemorySettings(offload_gradients=True, offload_parameters=True),
]


def lab_state(**options: Any) -> tuple[FakeLab, LabState]:
    lab = FakeLab(**options)
    return lab, LabState(lab)


def run_with(state: LabState, **changes: Any) -> Run:
    state.edit(**changes)
    assert state.run() is not None, state.notice
    return state.shown


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_form_of_settings_gives_the_same_settings_back(settings: MemorySettings) -> None:
    scenario = Scenario.of(architecture="qwen3-moe-tiny")

    assert SettingsForm.of(settings, scenario).settings(scenario) == settings


def test_a_form_s_row_of_another_length_has_packed_sequences_as_long_as_the_lab_s() -> None:
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=64, packed_sequences=8)
    form = SettingsForm.of(MemorySettings(), scenario).with_values(seq_length=32)
    assert form.scenario(scenario) == scenario.with_tokens_of_a_row(32)
    assert form.scenario(scenario).packed_sequences == 4


def test_form_keeps_what_does_not_apply_and_leaves_it_out() -> None:
    _, state = lab_state()
    state.edit(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    state.edit(recompute_granularity="selective")
    assert state.settings == MemorySettings(recompute_granularity="selective", recompute_modules=["core_attn"])

    state.edit(recompute_granularity="full")

    assert (state.settings.recompute_method, state.settings.recompute_num_layers) == ("block", 2)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {"offload_modules": ("attn_proj",)},
            lambda: MemorySettings(offload_modules=["attn_proj"]),
        ),
        (
            {"recompute_granularity": "full", "recompute_num_layers": 3},
            lambda: check_on_model(replace(FULL, recompute_num_layers=3), Scenario.of("qwen3-moe-tiny")),
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ()},
            lambda: MemorySettings(recompute_granularity="selective", recompute_modules=[]),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": None},
            lambda: MemorySettings(recompute_granularity="full"),
        ),
        ({"min_offloaded_tensor_size": -1}, lambda: MemorySettings(min_offloaded_tensor_size=-1)),
        ({"seq_length": -1}, lambda: Scenario.of(architecture="qwen3-moe-tiny", seq_length=-1)),
        ({"micro_batch_size": 0}, lambda: Scenario.of(architecture="qwen3-moe-tiny", micro_batch_size=0)),
    ],
)
def test_refused_form_shows_exactly_the_rules_text_and_runs_nothing(changes: dict[str, Any], refused: Any) -> None:
    lab, state = lab_state()
    state.edit(**changes)
    with pytest.raises(ValueError) as rule:
        refused()

    assert (state.settings, state.validation_error) == (None, str(rule.value))
    assert state.notice == "", "nothing is ready while Run is disabled"
    assert state.run() is None
    assert state.notice == f"Not started: {rule.value}"
    assert lab.submitted == []

    state.form = SettingsForm.of(MemorySettings(), lab.scenario)
    assert (state.settings, state.validation_error) == (MemorySettings(), "")
    assert state.notice == "Ready: change a setting, then press Run."


@pytest.mark.parametrize("architecture", ["qwen3-moe-tiny", "phi-4-tiny"])
def test_what_does_not_apply_is_what_is_refused_or_without_effect_by_itself(architecture: str) -> None:
    model = ARCHITECTURES[architecture]
    form = SettingsForm.of(MemorySettings(recompute_granularity="selective"), Scenario.of(architecture=model))
    reasons = form.not_applicable(model)

    for field, module in [
        *product(["recompute_modules"], RECOMPUTE_MODULES),
        *product(["offload_modules"], OFFLOAD_MODULES),
    ]:
        values: dict[str, Any] = {field: [module, "core_attn"] if module == "attn_proj" else [module]}
        settings = MemorySettings(**(values | ({"recompute_granularity": "selective"} if "recompute" in field else {})))
        try:
            check_on_model(settings, Scenario.of(model))
            reason = without_effect.of_settings(settings, model).get(f"{field}:{module}")
        except ValueError as error:
            reason = str(error)
        assert reasons.get(f"{field}:{module}") == reason
    assert ("offload_modules:expert_fc1" in reasons) == ("recompute_modules:moe" in reasons) == (not model.routes)
    assert "offload_modules:attn_norm" in reasons


def test_run_takes_settings_and_workload_to_the_lab() -> None:
    lab, state = lab_state()
    run = run_with(state, recompute_granularity="full", seq_length=128, micro_batch_size=2)

    assert lab.submitted == [FULL]
    assert (lab.scenario.seq_length, lab.scenario.micro_batch_size) == (128, 2)
    assert run.record is lab.records[0]
    assert (state.busy, state.progress, state.notice) == (False, None, "run 1 (full uniform 1): ok")


def test_who_waits_for_a_run_finds_it_in_the_state() -> None:
    lab, state = lab_state()
    lab.holds = True
    running = state.run()
    seen: list[Any] = []
    running.add_done_callback(lambda done: seen.append((done.result(), state.shown.record, state.busy)))

    lab.end()

    assert seen == [(lab.records[0], lab.records[0], False)]
    lab.outcome = RuntimeError("no")
    running = state.run()
    lab.end()
    with pytest.raises(RuntimeError, match="no"):
        running.result()


def test_second_press_is_refused_in_the_labs_words() -> None:
    lab, state = lab_state()
    lab.holds = True
    state.run()
    assert state.busy

    assert state.run() is None

    assert state.notice == "Not started: this lab is busy with a step (none): wait for it, or stop it"
    assert state.busy
    assert len(lab.submitted) == 1
    lab.end()
    assert not state.busy
    assert state.notice.endswith(
        "ok. Run was pressed during this step and started nothing: press it again for another step."
    )
    lab.holds = False
    assert run_with(state).is_ok and "meanwhile" not in state.notice and "started nothing" not in state.notice


def test_stop_ends_the_step_in_a_row_and_says_so_when_nothing_runs() -> None:
    lab, state = lab_state()
    lab.holds = True
    state.stop()
    assert state.notice == "Nothing is running: press Run first."
    state.run()

    state.stop()

    assert not state.busy
    (row,) = rows(state.runs, None)
    assert row["status"] == "stopped"
    assert row["peak"].startswith("> ")
    assert (
        row["message"] == "stopped in forward: run the step again; until then its peak is a lower bound, marked with >"
    )
    lab.holds = False
    assert run_with(state).is_ok


def test_progress_reaches_the_state_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, state = lab_state()
    lab.holds = True
    now, seen = [100.0], []
    monkeypatch.setattr(state_module.time, "monotonic", lambda: now[0])
    state.run()
    state.observe(lambda change: seen.append(change["new"]), names=["progress"])

    for done in range(100):
        lab.progress(done=done, total=100)
        now[0] += 0.01
    lab.end()

    assert [progress and progress.done for progress in seen] == [*range(0, 100, 10), None]


def test_out_of_memory_is_a_row_with_what_to_do() -> None:
    lab, state = lab_state()
    lab.outcome = {"status": "out_of_memory", "message": "1 GiB requested: recompute a layer", "loss": None}
    run = run_with(state)

    row = rows(state.runs, None)[0]
    assert (row["status"], row["message"]) == ("out of memory", "1 GiB requested: recompute a layer")
    assert row["peak"].startswith("> ")
    assert state.notice == f"{run}: 1 GiB requested: recompute a layer"
    assert "out of memory" in chart_drawing(run, None).layout["title"]["text"]


def test_error_in_the_step_is_a_row_and_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    lab, state = lab_state()
    lab.outcome = RuntimeError("mat1 and mat2 do not fit")
    with caplog.at_level(logging.ERROR, "memlab.views.panel.state"):
        assert state.run() is not None
    run = state.shown

    assert rows(state.runs, None)[0]["status"] == "error"
    assert run.message.startswith("RuntimeError: mat1 and mat2 do not fit: ")
    assert caplog.records[0].exc_info[1] is lab.outcome
    assert "mat1 and mat2" in chart_drawing(run, None).annotations[0]["text"]
    lab.outcome = {}
    assert run_with(state).is_ok
    assert [run.status for run in state.runs] == ["error", "ok"]


def test_unforeseen_error_of_a_press_is_a_row_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab, state = lab_state()
    monkeypatch.setattr(lab, "submit", lambda *_, **__: 1 / 0)

    assert state.run() is None

    assert state.shown.message.startswith("ZeroDivisionError: division by zero: ")
    assert caplog.records[0].exc_info[0] is ZeroDivisionError
    assert not state.busy


def test_a_drawing_that_fails_leaves_the_panel_ready_for_the_next_run() -> None:
    lab, state = lab_state()
    state.observe(lambda _: 1 / 0, names=["shown"])

    assert state.run().result(timeout=10) is lab.records[0]

    assert not state.busy


def test_steps_of_a_cell_are_taken_up_once() -> None:
    lab, state = lab_state()
    lab.submit(FULL)
    lab.submit(MemorySettings())

    state.refresh()
    state.refresh()

    assert [run.record for run in state.runs] == lab.records
    assert state.shown.number == 2


def test_without_a_run_nothing_is_pinned_or_used_again() -> None:
    _, state = lab_state()
    for act in (state.pin, state.reuse):
        state.say("")
        act()
        assert (state.pinned, state.notice) == (None, "No run is shown: choose one in the table first.")


def test_pinned_run_is_what_the_others_are_held_against() -> None:
    lab, state = lab_state()
    run_with(state)
    state.pin()
    lab.outcome = {"peak_allocated_bytes": lab.records[0].peak_allocated_bytes - 1024, "step_seconds": 0.2102}
    run_with(state, recompute_granularity="full")

    first, second = rows(state.runs, state.pinned)
    assert (first["difference"], second["difference"]) == ("", "\N{MINUS SIGN}<0.01")
    assert second["loss"] == "same"
    assert (first["recomputed"], first["copied"]) == ("", "")
    assert second["recomputed"] == f"{recomputed_share(state.runs[1].settings, state.runs[1].scenario):.1%}"
    assert second["step_time"] == "210.2", "a CPU's time is no cost, so it is not compared"
    assert first["step_time"].endswith(" (first)"), "it takes longer than those that follow"
    assert columns(state.runs)["step_time"] == "step on CPU (ms)"
    on_gpu = [replace(run, backend="cuda") for run in state.runs]
    assert rows(on_gpu, on_gpu[0])[1]["step_time"] == "210.2 (+100%)"
    assert columns(on_gpu)["step_time"] == "step time (ms)"
    state.show(1)
    state.pin()
    assert state.pinned is None
    assert rows(state.runs, None)[1]["difference"] == ""


def test_a_column_of_bytes_has_one_unit_and_the_difference_a_sign() -> None:
    lab, state = lab_state()
    for peak in (30 * 2**20, 30 * 2**20 + 700 * 2**10, 2**20, 30 * 2**20):
        lab.outcome = {"peak_allocated_bytes": peak}
        run_with(state)
    shown = rows(state.runs, state.base)
    assert [row["peak"] for row in shown] == ["30.00", "30.68", "1.00", "30.00"]
    assert [row["difference"] for row in shown] == ["", "+0.68", "\N{MINUS SIGN}29.00", "0.00"]
    titles = columns(state.runs, state.base)
    assert (titles["peak"], titles["difference"]) == ("peak (MiB)", "peak vs run 1 (MiB)")
    assert "loss" not in titles, "it is the same in all runs"
    lab.outcome = {"loss": 1.5}
    run_with(state)
    assert "loss" in columns(state.runs, state.base)


def test_a_preset_is_the_same_whatever_the_controls_had_before() -> None:
    _, state = lab_state()
    workload = {"seq_length": 128, "micro_batch_size": 2}
    state.edit(**workload)
    plain = state.form
    unread = {"recompute_method": "block", "recompute_num_layers": 2, "recompute_modules": ("moe",)}
    state.edit(min_offloaded_tensor_size=7, offload_optimizer=True, **unread)
    state.edit(grad_reduce_in_bf16=True)
    state.take("plain", PRESETS["plain"])
    assert state.form == plain and state.form.values["seq_length"] == 128
    assert state.notice == ("The controls show the preset 'plain'. 'smallest tensor (elements)' was 7 and is now 0.")
    state.edit(offload_optimizer=True)
    assert state.notice == "Ready: change a setting, then press Run.", "the controls no longer show it"
    lab, _ = lab_state()
    lab.settings = MemorySettings(min_offloaded_tensor_size=0)
    opened_with_none = LabState(lab)
    opened_with_none.take("plain", PRESETS["plain"])
    assert opened_with_none.form.values["min_offloaded_tensor_size"] == 0, "the lab's author has set it"


def test_settings_that_are_taken_say_that_they_change_the_smallest_tensor() -> None:
    _, state = lab_state()
    state.take_settings(MemorySettings(offload_modules=["core_attn"]))
    assert state.notice.endswith("'smallest tensor (elements)' was 0 and is now 1048576.")
    state.take_settings(FULL)
    assert state.notice == f"The controls show '{FULL}': press Run to take the step."


def test_a_ticked_module_is_what_a_search_means_by_its_name() -> None:
    lab, state = lab_state()
    for settings in each_alone(lab.settings, lab.scenario):
        if len(settings.offload_modules or ()) == 1:
            state.take("plain", PRESETS["plain"])
            state.toggle("offload_modules", settings.offload_modules[0], on=True)
            assert state.settings == settings


def test_peaks_that_are_written_alike_are_the_same() -> None:
    lab, state = lab_state()
    first = run_with(state)
    peak = first.record.peak_allocated_bytes
    for difference, words in ((0, "the same as"), (8, "the same as"), (peak // 3000, "about the same as")):
        lab.outcome = {"peak_allocated_bytes": peak + difference}
        assert state.compared(run_with(state)) == f", {words} run 1"


def test_settings_that_offload_nothing_leave_the_smallest_tensor_as_it_is() -> None:
    lab, state = lab_state()
    lab.settings = MemorySettings(min_offloaded_tensor_size=0)
    state = LabState(lab)
    assert state.settings == MemorySettings(), "no module reads it"
    run_with(state, recompute_granularity="full")
    assert state.is_selected(state.shown)
    state.reuse()
    state.form = state.form.with_settings(FULL)
    assert (state.form.values["min_offloaded_tensor_size"], state.settings) == (0, FULL)
    state.toggle("offload_modules", "core_attn", on=True)
    assert state.settings.min_offloaded_tensor_size == 0
    state.form = state.form.with_settings(MemorySettings(offload_modules=["core_attn"], min_offloaded_tensor_size=7))
    assert state.form.values["min_offloaded_tensor_size"] == 7
    of_a_cell = replace(FULL, min_offloaded_tensor_size=0)
    lab.submit(of_a_cell)
    state.refresh()
    state.reuse()
    assert state.is_selected(state.shown), "a size that is not read makes no other step"


def test_a_deleted_run_comes_back_until_the_next_run() -> None:
    lab, state = lab_state()
    for _ in range(3):
        run_with(state)
    state.show(2)
    state.pin()
    runs, deleted = state.runs, state.shown
    state.delete()

    state.undo_delete()

    assert (state.runs, state.shown, state.pinned, state.deleted) == (runs, deleted, deleted, None)
    assert any(record is deleted.record for record in lab.records)
    state.refresh()
    assert state.runs == runs, "its record is not taken for another run"
    state.delete()
    run_with(state)
    state.undo_delete()
    assert "none to bring back" in state.notice
    assert [run.number for run in state.runs] == [1, 3, 4]


def test_delete_forgets_the_run_and_its_record() -> None:
    lab, state = lab_state()
    for _ in range(3):
        run_with(state)
    state.show(2)
    state.pin()
    record = state.shown.record

    state.delete()

    assert all(kept is not record for kept in lab.records)
    assert [run.number for run in state.runs] == [1, 3]
    assert (state.shown.number, state.pinned) == (3, None)
    state.delete()
    state.delete()
    assert (state.runs, state.shown, lab.records) == ((), None, [])
    state.delete()
    assert state.notice == "No run is shown: choose one in the table first."
    assert run_with(state).number == 4


def test_reuse_puts_a_runs_settings_back_into_the_form() -> None:
    _, state = lab_state()
    run_with(state, recompute_granularity="full", seq_length=32, offload_optimizer=True)
    run = state.shown
    state.form = SettingsForm.of(MemorySettings(), run.scenario)
    state.edit(seq_length=64)

    state.reuse()

    assert state.settings == run.settings
    assert state.form.values["seq_length"] == 32


def test_a_record_that_arrives_during_a_delete_stays() -> None:
    lab, state = lab_state()
    for _ in range(3):
        run_with(state)

    class Records(list[Any]):
        """Appends as the worker does, whenever the list is changed from outside."""

        def __setitem__(self, at: Any, value: Any) -> None:
            self.append("arrived")
            super().__setitem__(at, value)

        def __delitem__(self, at: Any) -> None:
            self.append("arrived")
            super().__delitem__(at)

    first, second, third = lab.records
    lab.records = Records(lab.records)
    state.show(2)
    state.delete()

    assert lab.records == [first, third, "arrived"]
    assert second not in lab.records


def test_show_and_look_at_refuse_what_is_not_there() -> None:
    _, state = lab_state()
    run = run_with(state)

    with pytest.raises(ValueError, match="there is no run 7: choose from 1"):
        state.show(7)
    with pytest.raises(ValueError, match="moment is -1, but the shown run has"):
        state.look_at(-1)
    last = len(run.record.timeline) - run.record.timeline.num_opening_events
    state.look_at(last)
    with pytest.raises(ValueError, match=f"moment is {last + 1}, but"):
        state.look_at(last + 1)


def test_chart_has_the_same_traces_whatever_it_shows() -> None:
    lab, state = lab_state()
    full = run_with(state, recompute_granularity="full")
    empty = Run(number=9, scenario=lab.scenario, settings=FULL, backend="cpu", error="RuntimeError: no")
    names = [name.replace(" ", "-") for name in TRACES]

    for shown, pinned in product([None, full, empty], repeat=2):
        for pool, axis, moment in product(["device", "host"], ["time", "event"], [None, 3]):
            drawing = mark_moment(chart_drawing(shown, pinned, pool, axis), shown, moment, pool, axis)
            json.dumps(drawing.to_dict()["layout"])  # the page gets it as it is
            figure = drawing.figure()  # which refuses what plotly does not know
            assert [trace.uid for trace in figure.data] == names
            assert not any(len(trace.x) for trace in figure.data if not trace.visible)


def test_pinned_run_lies_over_the_shown_one_in_its_unit() -> None:
    lab, state = lab_state()
    plain = run_with(state)
    lab.timeline = training_step(scale=1024, recompute=True)
    full = run_with(state, recompute_granularity="full")

    figure = chart_drawing(full, plain).figure()
    traces = {trace.uid: trace for trace in figure.data}

    unit_bytes = full.record.peak_allocated_bytes / max(traces["total"].y)
    assert max(traces["pinned"].y) * unit_bytes == plain.record.peak_allocated_bytes
    assert traces["pinned"].name.startswith("pinned: run 1, none, peak ")
    assert figure.layout.yaxis.range[1] > max(traces["pinned"].y)
    assert figure.layout.xaxis.range[1] >= max(traces["pinned"].x)
    assert not {trace.uid: trace for trace in chart_drawing(plain, plain).figure().data}["pinned"].visible


def test_a_short_run_under_a_longer_pinned_one_ends_where_it_ended_with_its_label_inside() -> None:
    lab, state = lab_state()
    lab.timeline = training_step(scale=1024)
    pinned = run_with(state)
    short = TimelineBuilder(phase="forward")
    for _ in range(20):
        short.event(2**20, "activations", after=0.01)
    short.phase = "idle"
    short.event(-(2**20), "activations", after=9000.0)
    lab.timeline = short.build()
    shown = run_with(state)

    alone, over = chart_drawing(shown, None).figure(), chart_drawing(shown, pinned).figure()

    assert over.layout.xaxis.range[1] > 2 * alone.layout.xaxis.range[1]
    assert (alone.layout.annotations[-1].xanchor, over.layout.annotations[-1].xanchor) == ("right", "left")
    (total,) = (trace for trace in over.data if trace.uid == "total")
    assert max(total.x) == pytest.approx(0.2)
    label = over.layout.annotations[-1]
    assert label.showarrow, "it is above the pinned run"
    assert (label.ax, label.xshift) == (label.x, 0), "the line from the label ends at the mark"


def test_axis_starts_at_zero_for_a_pinned_run_far_below_it() -> None:
    lab, state = lab_state()
    step = TimelineBuilder()
    step.phase = "load"
    step.event(2**20, "parameters", after=1.0)
    lab.timeline = step.build()
    on_host = run_with(state, offload_parameters=True)
    lab.timeline = training_step(scale=1024)
    plain = run_with(state, offload_parameters=False)

    assert chart_drawing(plain, None).layout["yaxis"]["range"][0] > 0
    assert chart_drawing(plain, on_host).layout["yaxis"]["range"][0] == 0


@pytest.mark.parametrize("axis", ["time", "event"])
def test_a_click_names_the_event_whose_mark_then_stands_there(axis: Any) -> None:
    _, state = lab_state()
    run = run_with(state)
    timeline = run.record.timeline
    total = next(trace for trace in chart_drawing(run, None, axis=axis).figure().data if trace.uid == "total")

    for point in (0, 17, len(total.x) - 1):
        moment = event_at(timeline, point, "device", axis)
        figure = mark_moment(chart_drawing(run, None, axis=axis), run, moment, "device", axis).figure()
        mark = next(trace for trace in figure.data if trace.uid == "moment")
        assert mark.x[1] == pytest.approx(total.x[point])
        assert mark.y[1] == total.y[point]


def random_run(rng: random.Random) -> Run:
    architecture = ARCHITECTURES[rng.choice(["qwen3-moe-tiny", "phi-4-tiny"])]
    scenario = Scenario.of(
        architecture=architecture,
        num_layers=rng.choice([None, 2]),
        seq_length=rng.choice([None, 64]),
        micro_batch_size=rng.choice([1, 2]),
        num_microbatches=rng.choice([1, 3]),
        seed=rng.choice([1234, 0]),
        dtype=rng.choice(["bf16", "fp32"]),
        expert_buffers=architecture.routes and rng.choice([True, False]),
    )
    settings = rng.choice([case for case in CASES if architecture.routes or "moe" not in str(case)])
    return Run(number=1, scenario=scenario, settings=settings, backend="cpu")


@pytest.mark.parametrize("seed", range(20))
def test_the_command_and_the_line_repeat_the_run(seed: int) -> None:
    run = random_run(random.Random(seed))

    words = shlex.split(exports.measure_command(run))
    arguments = vars(build_parser().parse_args(words[1:]))

    given = {name: value for name, value in arguments.items() if value is not None}
    assert words[0] == "memlab"
    assert Scenario.of(**{name: given[name] for name in Scenario.__slots__ if name in given}) == run.scenario
    assert MemorySettings(**{name: given[name] for name in MemorySettings.__slots__ if name in given}) == run.settings
    assert arguments["backend"] == "cpu"
    assert eval(exports.settings_line(run.settings), {"MemorySettings": MemorySettings}) == run.settings  # noqa: S307


def test_the_command_of_an_unknown_model_says_what_to_fill_in() -> None:
    scenario = Scenario.of(architecture=replace(ARCHITECTURES["phi-4-tiny"], name="mine"))
    run = Run(number=1, scenario=scenario, settings=MemorySettings(), backend="cpu")

    assert exports.measure_command(run) == "memlab measure path/to/mine/config.json --backend cpu"


def test_a_run_exports_to_folders_of_its_own(tmp_path: Path) -> None:
    _, state = lab_state()
    run = run_with(state)

    first, second = exports.save_run(run, tmp_path / "new"), exports.save_run(run, tmp_path / "new")

    assert first.name == "qwen3-moe-tiny-run-1"
    assert second.name == "qwen3-moe-tiny-run-1-2"
    loaded = StepRecord.load(first)
    assert loaded == run.record
    assert np.array_equal(loaded.timeline.delta_bytes, run.record.timeline.delta_bytes)
    broken = Run(number=2, scenario=run.scenario, settings=run.settings, backend="cpu", error="RuntimeError: no")
    with pytest.raises(ValueError, match=r"run 2 \(none\) ended in an error and has no record to save"):
        exports.save_run(broken, tmp_path)


def test_the_page_holds_chart_and_table_and_needs_no_network(tmp_path: Path) -> None:
    _, state = lab_state()
    run = run_with(state)

    page = exports.save_page(chart_drawing(run, None).figure(), "a <table>", run, tmp_path).read_text(encoding="utf-8")

    assert "<pre>a &lt;table&gt;</pre></body>" in page
    assert "Plotly.newPlot" in page
    # plotly 6.0's own code has the address of a map's symbols, so that only tags count.
    assert not re.search(r'<(script|link|img)\b[^>]*(src|href)="http', page)


def test_a_picture_without_kaleido_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = lab_state()
    run = run_with(state)
    monkeypatch.setattr(exports, "find_spec", lambda _: None)

    with pytest.raises(
        ValueError, match="PNG needs kaleido, which is not installed: run pip install kaleido, or export"
    ):
        exports.save_picture(chart_drawing(run, None).figure(), run, tmp_path, "png")


def test_csv_has_a_row_a_run_with_plain_numbers() -> None:
    lab, state = lab_state()
    run_with(state)
    state.pin()
    lab.outcome = RuntimeError('no, "never"\nagain')
    state.run()

    table = list(csv.DictReader(io.StringIO(exports.table_csv(state.runs, state.pinned))))

    assert [row["number"] for row in table] == ["1", "2"]
    assert int(table[0]["peak_allocated_bytes"]) == lab.records[0].peak_allocated_bytes
    assert table[0]["repeat"].startswith("memlab measure qwen3-moe-tiny --seq-length 64")
    assert table[1]["message"].startswith('RuntimeError: no, "never"\nagain')


@pytest.mark.parametrize(
    "routing",
    [
        Routing(kind="shares", shares=(0.25, 0.05, *[0.7 / 6] * 6)),
        Routing(kind="skewed", factor=2.1234567890123),
        Routing(kind="counts", counts=((1, 2, 3, 4, 1, 2, 3, 4),)),
    ],
)
def test_the_command_repeats_a_routing_to_the_last_digit(routing: Routing) -> None:
    scenario = Scenario.of(architecture="qwen3-moe-tiny", routing=routing)
    run = Run(number=1, scenario=scenario, settings=MemorySettings(), backend="simulated")
    arguments = build_parser().parse_args(shlex.split(exports.measure_command(run))[1:])
    assert find_routing(arguments.routing) == routing


def test_the_command_of_a_forward_only_pass_and_of_a_step_out_of_memory_repeats_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        records = [lab.forward_only()]
        lab.device_memory_bytes = records[0].peak_allocated_bytes + MIB
        records.append(lab.step())
    for record, exit_code in zip(records, (0, 1), strict=True):
        run = Run(number=1, scenario=record.scenario, settings=record.settings, backend="simulated", record=record)
        assert main([*shlex.split(exports.measure_command(run))[1:], "--json"]) == exit_code
        again = StepRecord.from_dict(json.loads(capfd.readouterr().out))
        assert (again.status, again.forward_only) == (record.status, record.forward_only)
        limits = [one.out_of_memory and one.out_of_memory.failed_allocation.limit_bytes for one in (record, again)]
        assert limits[0] == limits[1]
    assert [record.status for record in records] == ["ok", "out_of_memory"]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("simulated", "memlab predict qwen3-moe-tiny --num-microbatches 2"),
        ("cuda", "memlab measure qwen3-moe-tiny --num-microbatches 2"),
    ],
)
def test_the_command_of_a_rank_of_a_job_repeats_its_layout(backend: str, words: str) -> None:
    layout = Layout(pipeline_model_parallel_size=2, data_parallel_size=2, rank=3 if backend == "simulated" else 0)
    scenario = Scenario.of(architecture="qwen3-moe-tiny", num_microbatches=2, layout=layout, routing="skewed:2")
    scenario = scenario if backend == "simulated" else replace(scenario, routing=Routing())
    command = exports.measure_command(Run(number=1, scenario=scenario, settings=MemorySettings(), backend=backend))
    assert command.startswith(words)
    arguments = build_parser().parse_args(shlex.split(command.partition("memlab ")[2]))
    measured_ranks = None if backend == "simulated" else arguments.ranks
    again = asked_step(arguments, rank=getattr(arguments, "rank", 0), measured_ranks=measured_ranks)
    assert again.scenario == scenario
    assert getattr(arguments, "routing", None) == ("skewed:2" if backend == "simulated" else None)
