"""What the selected settings would need, before Run: next to a live lab by a prediction, on a simulated lab by a step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.pareto_front import SearchResult
from memlab.lab import prediction_process, search_workers
from memlab.lab.background_search import BackgroundSearch
from memlab.lab.prediction_process import PredictionProcess
from memlab.ranks.local_processes import LocalProcess
from memlab.record.notebook_result import RUN_FOLDER_VARIABLE
from memlab.record.step_record import StepRecord
from memlab.views.panel.panel import Panel
from memlab.views.panel.run import columns, rows
from memlab.views.panel.state import LabState, _Pressed
from memlab.views.panel.what_if import WhatIf

from .builders import record_of, training_step
from .fake_lab import FakeBackend, FakeJobLab, FakeLab

FULL = {"recompute_granularity": "full"}


class HeldProcess:
    """Predicts when a test says so: twice as much memory for each question."""

    def __init__(self) -> None:
        self.asked: Queue[MemorySettings] = Queue()
        self.goes_on: Queue[str] = Queue()
        self.num_answers = 0
        self.num_starts = 0

    def start(self) -> None:
        self.num_starts += 1

    def predict(self, scenario: Scenario, settings: MemorySettings, backend: str) -> StepRecord:
        self.asked.put(settings)
        refusal = self.goes_on.get(timeout=60)
        if refusal:
            raise ValueError(refusal)
        self.num_answers += 1
        return record_of(training_step(scale=2**self.num_answers), settings, scenario=scenario)


@pytest.fixture
def what_if() -> Iterator[WhatIf]:
    made = WhatIf(LabState(FakeLab()), HeldProcess())
    made.is_on = True
    yield made
    made.close()


def wait_until(what_if: WhatIf, name: str, holds: Callable[[Any], bool]) -> None:
    happened = threading.Event()
    what_if.observe(lambda change: holds(change["new"]) and happened.set(), names=[name])
    assert holds(getattr(what_if, name)) or happened.wait(60)


def test_the_last_selection_is_predicted_and_no_older_answer_is_shown(what_if: WhatIf) -> None:
    state, process = what_if._state, what_if._process
    shown = []
    what_if.observe(lambda change: shown.append(change["new"]), names=["predicted"])
    state.edit(offload_optimizer=True)
    assert process.asked.get(timeout=60) == MemorySettings(offload_optimizer=True)
    state.edit(offload_parameters=True)
    state.edit(offload_optimizer=False)
    assert what_if.words == "predicting the peak ..."
    process.goes_on.put("")
    assert process.asked.get(timeout=60) == MemorySettings(offload_parameters=True), "what came between is not asked"
    assert shown == []
    process.goes_on.put("")
    wait_until(what_if, "predicted", lambda record: record is not None)
    assert [record.settings for record in shown] == [MemorySettings(offload_parameters=True)]
    assert what_if.words.startswith("predicted peak ")

    state.edit(offload_parameters=False, offload_optimizer=True)
    assert what_if.predicted.settings == MemorySettings(offload_optimizer=True), "an answer is asked for once"


def test_the_process_is_started_before_the_first_question_but_not_in_a_headless_run(
    what_if: WhatIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert what_if._process.num_starts == 1
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, "a folder")
    headless = WhatIf(LabState(FakeLab()), HeldProcess())
    headless.is_on = True
    assert headless._process.num_starts == 0
    headless.close()


def test_settings_that_break_a_rule_are_not_predicted_and_a_refusal_is_said(what_if: WhatIf) -> None:
    state = what_if._state
    state.toggle("offload_modules", "attn_proj", on=True)
    assert (what_if.predicted, what_if.words) == (None, f"not possible: {state.validation_error}")
    what_if._process.goes_on.put("it cannot be built")
    state.toggle("offload_modules", "core_attn", on=True)
    wait_until(what_if, "notice", lambda notice: "predicting" not in notice)
    assert what_if.words == "not predicted: it cannot be built"


def test_after_a_run_the_words_have_both_figures_and_the_difference_to_the_first_run(what_if: WhatIf) -> None:
    state, lab = what_if._state, what_if._state.lab
    state.run()
    assert what_if.words == f"peak {lab.records[0].peak_allocated_bytes / 2**20:.2f} MiB"
    what_if._process.goes_on.put("")
    state.edit(offload_optimizer=True)
    wait_until(what_if, "predicted", lambda record: record is not None)
    assert what_if.words.startswith("predicted peak ") and what_if.words.endswith("more than run 1")
    lab.timeline = training_step(scale=2048)
    state.run()
    assert "MiB (50%) less than run 1; predicted " in what_if.words


@pytest.fixture
def simulated() -> Iterator[WhatIf]:
    lab = FakeLab()
    lab.backend = FakeBackend("simulated")
    made = WhatIf(LabState(lab), None)
    made.is_on = True
    yield made
    made.close()


def tick(what_if: WhatIf, **changes: Any) -> None:
    """Changes the form, and waits for the step that follows."""
    shown = threading.Event()
    what_if._state.observe(lambda _: shown.set(), names=["shown"])
    what_if._state.edit(**changes)
    assert shown.wait(60)


def test_on_a_simulated_lab_a_change_is_drawn_at_once_and_run_keeps_it(simulated: WhatIf) -> None:
    state, lab = simulated._state, simulated._state.lab
    assert state.axis == "event", "the times of a prediction are not those of a step"
    state.run()
    tick(simulated, offload_optimizer=True)
    assert (state.shown, len(state.runs), len(lab.records)) == (state.tried, 1, 1)
    assert state.shown.settings == MemorySettings(offload_optimizer=True)
    state.pin()
    assert state.pinned is None and "press Run to keep it" in state.notice
    state.delete()
    assert len(state.runs) == 1
    num_steps = len(lab.submitted)

    state.run()

    assert len(lab.submitted) == num_steps, "the step is not taken again"
    assert [run.settings for run in state.runs] == [MemorySettings(), MemorySettings(offload_optimizer=True)]
    assert state.shown is state.runs[1] and lab.records[1] is state.runs[1].record
    tick(simulated, offload_optimizer=False)
    assert state.shown is state.runs[0], "a run of the table is shown instead of another step"


def test_a_panel_shows_a_tried_step_after_a_run_and_nothing_after_the_last_deletion() -> None:
    lab = FakeLab()
    lab.backend = FakeBackend("simulated")
    shown = Panel(lab)
    state = shown.state
    state.run()
    state.edit(offload_optimizer=True)
    state.try_out()
    assert state.shown is state.tried and (shown.runs.table.shown, state.busy) == (0, False)
    assert state.notice.endswith("press Run to keep it in the table")
    assert "<b>Controls:</b> predicted peak " in shown.run_bar.verdict.value
    state.show(1)
    state.delete()
    assert (state.runs, state.shown, shown.runs.table.shown) == ((), None, 0)
    shown.close()


def test_run_during_a_tried_step_keeps_it_when_it_ends(simulated: WhatIf) -> None:
    state, lab = simulated._state, simulated._state.lab
    lab.holds = True
    busy = threading.Event()
    state.observe(lambda change: change["new"] and busy.set(), names=["busy"])
    state.edit(offload_optimizer=True)
    assert busy.wait(60)
    running = state.run()
    lab.end()
    running.result(60)
    assert [run.settings for run in state.runs] == [MemorySettings(offload_optimizer=True)]


def test_run_keeps_what_was_selected_when_it_was_pressed(simulated: WhatIf) -> None:
    state, lab = simulated._state, simulated._state.lab
    lab.holds = True
    busy, tried = threading.Event(), threading.Event()
    state.observe(lambda change: change["new"] and busy.set(), names=["busy"])
    state.observe(
        lambda change: change["new"] and change["new"].settings.offload_parameters and tried.set(), names=["tried"]
    )
    state.edit(offload_optimizer=True)
    assert busy.wait(60)
    running = state.run()
    state.edit(offload_parameters=True)
    lab.holds = False
    lab.end()
    running.result(60)
    assert tried.wait(60)
    with state.lock:
        assert [run.settings for run in state.runs] == [MemorySettings(offload_optimizer=True)]


@pytest.mark.parametrize("stops", [False, True])
def test_run_for_other_settings_than_those_that_are_tried_follows_whatever_the_controls_do(
    simulated: WhatIf, stops: bool
) -> None:
    state, lab = simulated._state, simulated._state.lab
    lab.holds = True
    busy, ready = threading.Event(), threading.Event()
    state.observe(lambda change: (busy if change["new"] else ready).set(), names=["busy"])
    state.edit(offload_optimizer=True)
    assert busy.wait(60)
    state.edit(offload_parameters=True)
    pressed, wanted = state.run(), state.settings
    assert pressed is state.run(), "pressed twice, it runs once"
    simulated.is_on = False
    state.edit(offload_optimizer=False)
    assert state.run() is None and "Press Run again" in state.notice
    lab.holds = False
    if stops:
        state.stop()
        assert pressed.cancelled() and ready.wait(60)
    else:
        lab.end()
        assert pressed.result(60).settings == wanted
    with state.lock:
        assert [run.settings for run in state.runs] == ([] if stops else [wanted])
        assert not state.busy and len(lab.submitted) == (1 if stops else 2)


def test_a_run_that_could_not_follow_leaves_the_running_step_busy(simulated: WhatIf) -> None:
    state, lab = simulated._state, simulated._state.lab
    simulated.is_on = False
    lab.holds = True
    state.run()
    selection = state.selection
    assert selection is not None and state.busy
    state._start_pressed(_Pressed(state.form, selection[1], selection))
    assert state.busy, "another step is running"
    lab.end()
    assert not state.busy


def test_an_unforeseen_error_is_said_and_logged_and_the_next_selection_is_predicted(
    what_if: WhatIf, caplog: pytest.LogCaptureFixture
) -> None:
    state, process = what_if._state, what_if._process
    answer, process.predict = process.predict, lambda *_: 1 // 0
    state.edit(offload_optimizer=True)
    wait_until(what_if, "notice", lambda notice: "predicting" not in notice)
    assert what_if.words == (
        "not predicted (ZeroDivisionError: integer division or modulo by zero): change a setting to try again"
    )
    assert "Traceback" in caplog.text and "could not be predicted" in caplog.text
    process.predict = answer
    process.goes_on.put("")
    state.edit(offload_parameters=True)
    wait_until(what_if, "predicted", lambda record: record is not None)


def test_of_a_job_the_worst_rank_of_the_shown_run_is_predicted() -> None:
    lab = FakeJobLab()
    state = LabState(lab)
    what_if = WhatIf(state, HeldProcess())
    for _ in range(10):
        what_if._process.goes_on.put("")
    what_if.is_on = True
    state.edit(offload_optimizer=True)
    for worst, lost in ((0, ()), (1, (0,))):
        lab.lost = lost
        state.run()
        wait_until(what_if, "predicted", lambda record, worst=worst: record and record.scenario.layout.rank == worst)
    what_if.close()


def test_a_prediction_says_what_the_step_costs_and_what_does_nothing_in_the_panel_s_words(what_if: WhatIf) -> None:
    state, process = what_if._state, what_if._process
    reason = "the largest tensor saved there has 16 elements, under min_offloaded_tensor_size 1048576"
    of_state = {"main_grads_dtype": "only the command line reads it"}

    def predict(scenario: Scenario, settings: MemorySettings, backend: str) -> StepRecord:
        values = {"without_effect": {"offload_modules:core_attn": reason} | of_state}
        values["offloaded_bytes_by_group"] = {"parameters": 2**20, "gradients": 2**30}
        return record_of(training_step(), settings, scenario=scenario, **values)

    process.predict = predict
    state.edit(recompute_granularity="full", offload_modules=("core_attn",))
    wait_until(what_if, "predicted", lambda record: record is not None)
    (recomputed,) = [each for each in what_if.words.split("; ") if each.startswith("recomputed: ")]
    state.run()
    (row,), titles = rows(state.runs, None), columns(state.runs)
    assert recomputed == f"recomputed: {row['recomputed']} of a step"
    assert titles["recomputed"] == "recomputed (share of a step)"
    assert titles["copied"] == "host copies each way (MiB)"
    state.edit(offload_parameters=True)
    wait_until(what_if, "predicted", lambda record: record is not None)
    assert "; host copies each way: 1.00 MiB; " in what_if.words, "gradients are dropped, not copied"
    assert "without effect: core_attn (the largest tensor saved there has 16 elements" in what_if.words
    assert what_if.words.endswith("under 'smallest tensor (elements)' 1048576)")


def test_two_threads_start_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    class Serving:
        def __init__(self, *_: object, **__: object) -> None:
            time.sleep(0.1)  # the other thread asks meanwhile
            started.append(self)

        def submit(self, method: str) -> None: ...

    monkeypatch.setattr(prediction_process, "Balanced", Serving)
    process = PredictionProcess()
    threads = [threading.Thread(target=process.start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1


def test_the_process_predicts_the_backend_that_is_asked_for_and_gives_way() -> None:
    scenario, process = Scenario.of("phi-4-tiny", num_layers=1, seq_length=64), PredictionProcess()
    with process.start() as serving:
        on_cpu, on_gpu, again = (
            process.predict(scenario, MemorySettings(), backend).peak_allocated_bytes
            for backend in ("cpu", "cuda", "cpu")
        )
        of_experts = MemorySettings(recompute_granularity="selective", recompute_modules=["moe"])
        with pytest.raises(ValueError, match="phi-4-tiny"):
            process.predict(scenario, of_experts, "cpu")
        (number,) = (
            one._process.pid for one in serving._ranks.engines if isinstance(one, LocalProcess) and one._process
        )
        assert os.getpriority(os.PRIO_PROCESS, number or 0) > os.getpriority(os.PRIO_PROCESS, 0)
    assert on_cpu == again < on_gpu, "the cpu backend rounds nothing"


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ("StillBorn", "ended with code 1; it printed last: .*RuntimeError: no space is left"),
        ("Mortal", "was ended by signal 9.*"),
    ],
)
def test_a_process_that_ends_names_the_reason_and_another_one_answers_the_next_question(
    served: str, words: str
) -> None:
    process = PredictionProcess(f"tests.unit.served_calls:{served}")
    question = Scenario.of("phi-4-tiny", num_layers=1), MemorySettings(), "cpu"
    with process.start() as serving:
        message = rf"^the process that predicts was lost once: engine 0 \(.*\) lost its process, which {words}: change"
        with pytest.raises(ValueError, match=message):
            process.predict(*question)
        if served == "Mortal":
            answer: object = process.predict(*question[:2], "cuda")
            assert answer == "alive"
        assert len(serving) == 1


def test_no_process_that_predicts_takes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def refuse(places: object, served: str, variables: dict[str, str], **_: object) -> None:
        given.append(variables)
        raise OSError("no process")

    for module in (prediction_process, search_workers):
        monkeypatch.setattr(module, "Balanced", refuse)
    with pytest.raises(OSError, match="no process"):
        PredictionProcess().start()
    ended: list[SearchResult | str] = []
    BackgroundSearch(
        Scenario.of("phi-4-tiny"), MemorySettings(), 2**30, resolution_bytes=1, on_line=str, on_end=ended.append
    ).wait()
    assert ended == ["The search was lost (OSError: no process): search again."]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in given] == ["", ""]
