"""``memlab predict``: measure's flags and keys, ranks, and whether a step fits."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from memlab.cli import main
from memlab.commands import predict
from memlab.commands.shared import step_progress
from memlab.commands.shared.step_progress import ProgressLines
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting import does_it_fit
from memlab.fitting.candidates import candidates
from memlab.fitting.does_it_fit import Alternative, Verdict, judge_fit
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.lab.fit_with_steps import _StepsOfLab
from memlab.lab.lab import Lab
from memlab.lab.predictions import predict_measured, predict_ranks
from memlab.lab.progress import Progress
from memlab.lab.search_steps import SimulatedSteps, stepping
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB, parse_bytes
from tests.unit.inside import inside
from tests.unit.live import FULL

from .builders import AnsweredSteps, record_of

OUTSIDE_BYTES = estimate_outside_torch(Layout()).total_bytes

TINY = ["phi-4-tiny", "--num-layers", "2", "--seq-length", "64"]


def test_it_prints_the_keys_of_measure(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["measure", *TINY, "--backend", "cpu", "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)
    assert main(["predict", *TINY, "--json", "--out", str(tmp_path), "--snapshot"]) == 0
    predicted = json.loads(capfd.readouterr().out)
    assert predicted.keys() == measured.keys()
    assert predicted["scenario"] == measured["scenario"]
    assert predicted["loss"] is None and predicted["backend"] == "simulated"
    assert StepRecord.load(tmp_path).to_dict() == StepRecord.from_dict(predicted).to_dict()
    assert (tmp_path / "snapshot.pickle").exists()


def test_every_kind_of_rank_and_the_worst(capfd: pytest.CaptureFixture[str]) -> None:
    job = ["--world-size", "4", "--pipeline-model-parallel-size", "2", "--num-microbatches", "2", "--rank", "all"]
    assert main(["predict", *TINY, *job, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [rank["scenario"]["layout"]["rank"] for rank in found["ranks"]] == [0, 2]
    peaks = {rank["scenario"]["layout"]["rank"]: rank["peak_allocated_bytes"] for rank in found["ranks"]}
    assert found["worst_rank"] == max(peaks, key=lambda rank: peaks[rank])
    assert main(["predict", *TINY, *job]) == 0
    printed = capfd.readouterr().out
    assert "<- worst" in printed and " ms" not in printed, "a prediction tells no time"
    assert "every other one of the 4 ranks needs as much memory as one of these" in printed


def test_a_long_step_says_how_far_it_is_and_ctrl_c_keeps_the_part_that_was_taken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(ProgressLines):
        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            if progress.done == 3 and progress.module:
                os.kill(os.getpid(), signal.SIGINT)
                assert Lab._open is not None
                assert inside(Lab._open)._stop.wait(60)

    monkeypatch.setattr(step_progress, "_SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(predict, "ProgressLines", Interrupting)
    assert main(["predict", *TINY, "--json"]) == 130
    printed, told = capfd.readouterr()
    record = json.loads(printed)
    assert record["status"] == "interrupted" and 0 < record["static_bytes"] < record["peak_allocated_bytes"]
    assert "rank 0: warm-up forward decoder.layers.1, 2 of 8 passes through layers, about" in told
    assert "interrupted: the numbers are those of the part of the step that was taken" in told


def test_ctrl_c_after_the_verdict_keeps_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[list[Alternative]]:
        yield [Alternative(settings=FULL, peak_allocated_bytes=MIB, recomputed_operations=1.0, transferred_bytes=0)]
        raise KeyboardInterrupt

    monkeypatch.setattr(does_it_fit, "_alternatives", interrupted)
    memory = f"--gpu-memory={OUTSIDE_BYTES + 221 * MIB // 2}B"  # above the start, below the peak
    assert main(["predict", *TINY, memory]) == 130
    printed, told = capfd.readouterr()
    assert printed.startswith("does not fit ") and f"  {FULL}: peak 1.00 MiB" in printed
    assert "interrupted: the list of settings that would fit" in told


def test_what_would_fit_is_tried_for_a_limited_time_after_the_verdict_and_the_rest_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        plain = lab.step()
    memory = ["--gpu-memory", f"{OUTSIDE_BYTES + plain.static_bytes + 1}B"]
    choices = candidates(plain.settings, plain.scenario, depth=1)[1:]

    def as_json() -> Any:
        assert main(["predict", *TINY, *memory, "--json"]) == 1
        return json.loads(capfd.readouterr().out)["fit"]

    assert as_json()["not_tried"] == []
    monkeypatch.setattr(predict, "_SECONDS_FOR_ADVICE", 0)
    left = as_json()["not_tried"]
    assert sorted(left) == sorted(map(str, choices))
    assert main(["predict", *TINY, *memory]) == 1
    printed, _ = capfd.readouterr()
    verdict, advice = printed.index("does not fit"), printed.index("no other setting was tried: let memlab search")
    assert verdict < printed.index("peak phase") < printed.index("outside torch, estimated") < advice
    assert printed.splitlines()[-1].startswith(f"not tried, because 0 s were over: {'; '.join(left)}; predict")


def test_a_lab_tries_other_settings_for_as_long_as_it_is_given() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        record = lab.step()
        tight = OUTSIDE_BYTES + record.peak_allocated_bytes - 1
        whole, none = (lab.fit(record, tight, seconds=seconds) for seconds in (math.inf, 0))
        with pytest.raises(ValueError, match="seconds is -1, must be a number of at least 0"):
            lab.fit(record, tight, seconds=-1)
    choices = candidates(record.settings, record.scenario, depth=1)[1:]
    assert whole.verdict == none.verdict == "does not fit"
    assert (whole.num_tried, whole.not_tried, none.num_tried, none.alternatives) == (len(choices), (), 0, ())
    assert sorted(none.not_tried) == sorted(map(str, choices))


def test_a_step_that_is_stopped_ends_the_tries_and_is_one_of_those_that_were_not_tried() -> None:
    plain = record_of(None, backend="cuda", peak_allocated_bytes=GIB, static_bytes=GIB // 4)
    choices = candidates(plain.settings, plain.scenario, depth=1)[1:]
    tried: list[MemorySettings] = []

    def step(settings: MemorySettings) -> StepRecord:
        tried.append(settings)
        status = "ok" if len(tried) < 3 else "interrupted"
        return replace(plain, settings=settings, peak_allocated_bytes=GIB // 4, status=status)

    fit = judge_fit(plain, AnsweredSteps(step), GIB // 2 + OUTSIDE_BYTES)
    assert len(tried) == 3 and {choice.settings for choice in fit.alternatives} == set(tried[:2])
    assert {*fit.not_tried} == {str(choice) for choice in choices} - {str(each) for each in tried[:2]}


def test_what_cannot_fit_is_told_from_what_may_fit_under_several_settings(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        plain = lab.step()
    assert main(["predict", *TINY, "--gpu-memory", f"{OUTSIDE_BYTES + plain.static_bytes - 1}B"]) == 1
    verdict, reason, *_ = capfd.readouterr().out.splitlines()
    assert verdict.startswith("does not fit") and reason.startswith("no setting helps: a step starts with")
    assert main(["predict", *TINY, "--gpu-memory", f"{OUTSIDE_BYTES + plain.static_bytes + 1}B"]) == 1
    assert "let memlab search combine them" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--rank 1", "rank is 1, must be from 0 to 0"),
        ("--world-size 2 --context-parallel-size 4", "must be a multiple of 4 (tensor 1 x context 4 x pipeline 1)"),
        ("--world-size 3 --context-parallel-size 3", "into 6 chunks, two per rank: choose from 1, 2, 4, 8, 16, 32"),
        (
            "--world-size 2 --tensor-model-parallel-size 2",
            "must divide the 5 attention heads of phi-4-tiny, by a rule of Megatron-Core: choose from 1",
        ),
        ("--world-size 2 --pipeline-model-parallel-size 2 --num-layers 3", "must divide the 3 layers of phi-4-tiny"),
        (
            "--world-size 2 --virtual-pipeline-model-parallel-size 2",
            "must be 1 where pipeline_model_parallel_size is 1",
        ),
        (
            "--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --num-layers 4",
            "num_microbatches is 1, must be a multiple of the number of stages, 2, if the schedule is interleaved: choose from 2, 4, 6",
        ),
        ("--world-size 2 --expert-model-parallel-size 2", "must be 1, since phi-4-tiny is dense: choose 1"),
        ("--world-size 2 --expert-tensor-parallel-size 2", "and phi-4-tiny is dense: leave it out"),
        ("--world-size 0", "world_size is 0, must be a whole number of at least 1"),
        ("--world-size 2 --rank 2", "rank is 2, must be from 0 to 1, of 2 ranks (DP2): choose another rank or layout"),
        ("--tensor-model-parallel-size 0", "tensor_model_parallel_size is 0, must be a whole number of at least 1"),
        ("--rank first", "'first' is not a whole number"),
        ("--world-size 3 --pipeline-model-parallel-size 2", "the number of ranks is 3, must be a multiple of 2"),
        ("--gpu-memory 80Gi", "'80Gi' is not a size of memory: write a number and a unit, such as 80GiB"),
        ("--gpu-memory 80", "--gpu-memory is 80 B, must be more than the 2.424 GiB that CUDA and its libraries take"),
        ("--routing skewed:2", "phi-4-tiny has no experts: leave it out"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(flags: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *TINY, *flags.split()]) == 2
    printed, complaint = capfd.readouterr()
    assert printed == ""
    assert refusal in complaint and complaint.count("\n") == 1


def test_an_architecture_that_nobody_knows_is_refused_with_the_known(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "qwen3-30b"]) == 2
    complaint = capfd.readouterr().err
    assert "'qwen3-30b'" in complaint and "choose from qwen3-30b-a3b, " in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("shares", "refusal"),
    [
        ([0.1] * 8, "a sum of 0.8, must be from 0 to 1 with a sum of 1"),
        ([0.25] * 4, "routing has 4 shares, must be 8, one per expert"),
        ([1.0, *[0.0] * 7], "gives an expert 8 times the mean, must give it at most 4 times"),
        ({"first": 1}, "which does not contain a list"),
        ([True, "all"], "shares with True, must be from 0 to 1"),
    ],
)
def test_a_routing_file_that_cannot_be_is_refused(
    shares: object, refusal: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(shares))
    assert main(["predict", "qwen3-moe-tiny", "--routing", str(path)]) == 2
    complaint = capfd.readouterr().err
    assert refusal in complaint and complaint.count("\n") == 1
    assert "choose balanced, random:SEED" in complaint or "give a smaller factor or share" in complaint


def test_what_is_outside_torch_stands_apart_as_an_estimate(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *TINY, "--world-size", "2"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == str(estimate_outside_torch(Layout(data_parallel_size=2)))
    assert "outside torch, estimated and not counted above: 830.00 MiB for CUDA's context and libraries" in last


def test_a_step_that_does_not_fit_names_what_does() -> None:
    with stepping(Scenario.of("phi-4-tiny", num_layers=4, seq_length=2048)) as taken:
        tried: list[MemorySettings] = []

        def step(settings: MemorySettings) -> StepRecord:
            tried.append(settings)
            return taken(settings)

        steps = AnsweredSteps(step, taken.completes)
        plain = steps(MemorySettings())
        roomy = judge_fit(plain, steps, GIB + OUTSIDE_BYTES)
        assert roomy.fits and roomy.alternatives == () and len(tried) == 1
        assert roomy.margin_bytes == GIB - plain.peak_allocated_bytes

        tight = judge_fit(plain, steps, plain.peak_allocated_bytes - 8 * MIB + OUTSIDE_BYTES)
        assert not tight.fits and tight.margin_bytes == -8 * MIB
        assert tight.alternatives
        costs = [(choice.recomputed_operations, choice.transferred_bytes) for choice in tight.alternatives]
        assert costs == sorted(costs)
        for choice in tight.alternatives:
            assert taken(choice.settings).peak_allocated_bytes == choice.peak_allocated_bytes
            assert choice.peak_allocated_bytes <= plain.peak_allocated_bytes - 8 * MIB

        tried.clear()
        hopeless = judge_fit(plain, steps, plain.static_bytes - MIB + OUTSIDE_BYTES)
        assert not hopeless.fits and hopeless.alternatives == () and tried == []


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("1.5TiB", 1536 * GIB), ("4096", 4096), ("1KiB", 1024)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 gib", "1e3", "0", "0.0001"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size of memory"):
        parse_bytes(text)


def test_a_pass_without_backward_is_predicted_as_one() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        measured = [lab.forward_only(), lab.step()]
    again = predict_measured(measured)
    assert [record.forward_only for record in again] == [True, False]
    assert again[0].peak_allocated_bytes < again[1].peak_allocated_bytes


def test_steps_of_two_labs_are_predicted_in_two_with_experts_drawn_at_random() -> None:
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        record = lab.step()
    later, older = replace(record, step_index=2), record.versions | {"memlab": "0.3.0"}
    again = predict_measured([record, record, later, replace(later, step_index=3, versions=older)])
    assert [prediction.step_index for prediction in again] == [1, 1, 2, 1]
    assert {prediction.scenario.routing for prediction in again} == {Routing(kind="random", seed=record.scenario.seed)}


def test_every_rank_is_of_its_own_kind_where_each_draws_its_experts() -> None:
    job: dict[str, Any] = {"layout": Layout(data_parallel_size=4, expert_model_parallel_size=2)}
    assert Scenario.of(architecture="qwen3-moe-tiny", routing="random:0", **job).ranks_of_every_kind == (0, 1, 2, 3)
    assert Scenario.of(architecture="qwen3-moe-tiny", routing="skewed:2", **job).ranks_of_every_kind == (0, 1)
    assert Scenario.of(architecture="qwen3-moe-tiny", **job).ranks_of_every_kind == (0,)


def test_fitting_refuses_what_is_no_step_or_no_size_and_leaves_the_settings() -> None:
    with Lab("phi-4-tiny", num_layers=4, seq_length=2048, backend="simulated") as lab:
        record = lab.step()
        for size in (-5, 1.5, True):
            with pytest.raises(ValueError, match="give a size such as"):
                lab.fit(record, size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="did not finish"):
            lab.fit(replace(record, status="out_of_memory"), "80GiB")
        assert lab.fit(record, record.peak_allocated_bytes - 8 * MIB + OUTSIDE_BYTES).alternatives != ()
        assert lab.settings == MemorySettings() and lab.device_memory_bytes is None


def test_an_alternative_that_runs_out_of_memory_does_not_fit_though_its_partial_peak_would() -> None:
    plain = record_of(None, backend="cuda", peak_allocated_bytes=GIB, static_bytes=GIB // 4)
    tight = GIB // 2 + OUTSIDE_BYTES

    def alternatives(**other: Any) -> tuple[Alternative, ...]:
        steps = AnsweredSteps(
            lambda settings: replace(plain, settings=settings, peak_allocated_bytes=GIB // 2, **other)
        )
        return judge_fit(plain, steps, tight).alternatives

    assert alternatives() != () and alternatives(status="out_of_memory") == ()


@pytest.mark.parametrize("verdict", ["fits", "may fit"])
def test_a_setting_that_only_may_fit_is_not_said_to_make_a_step_fit(verdict: Verdict) -> None:
    choice = Alternative(
        settings=FULL, verdict=verdict, peak_allocated_bytes=GIB, recomputed_operations=0.0, transferred_bytes=0
    )
    record = record_of(None, backend="cuda", peak_allocated_bytes=2 * GIB, static_bytes=2 * GIB)
    short = judge_fit(record, AnsweredSteps(lambda _: pytest.fail("no setting helps")), GIB + OUTSIDE_BYTES)
    first, line = predict._alternative_settings(replace(short, alternatives=(choice,)))
    assert ("or may" in first) is line.endswith("may fit") is (verdict == "may fit")


def test_fit_is_refused_in_one_line_if_a_step_that_it_takes_is_stopped() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        record = lab.step()
        gpu_memory = (record.static_bytes + record.peak_allocated_bytes) // 2 + OUTSIDE_BYTES
        session, take = inside(lab), inside(lab).take
        session.take = lambda request: take(request, lambda _: lab.stop())  # type: ignore[assignment,method-assign,misc]
        with pytest.raises(
            ValueError, match=r"^the step under '.*' was stopped, so fit has no answer: call fit again$"
        ):
            lab.fit(record, gpu_memory)
        assert lab.settings == MemorySettings() and lab.records[-1].status == "interrupted"


def test_a_step_that_is_stopped_says_nothing_about_whether_it_completes_within_a_limit() -> None:
    record = record_of(None, peak_allocated_bytes=GIB // 2, peak_reserved_bytes=GIB, step_index=2)
    for of_pass in (None, record.scenario):
        session = Mock()
        session.take.return_value = replace(record, status="interrupted")
        with pytest.raises(ValueError, match="was stopped, so fit has no answer: call fit again"):
            _StepsOfLab(session, of_pass).completes(record, GIB)


def test_a_record_of_another_scenario_is_not_judged_by_steps_of_this_one() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=64, backend="simulated") as lab:
        record = lab.step()
        rank = replace(record.scenario, layout=Layout(data_parallel_size=2, rank=1))
        lab.set_workload(seq_length=128)
        refused = "had another {} than this lab has now, must have the same, .* take a step now, and give its record"
        with pytest.raises(ValueError, match=refused.format("seq_length")):
            lab.fit(record, "80GiB")
        with pytest.raises(ValueError, match=refused.format("seq_length, another layout")):
            lab.fit(replace(record, scenario=rank), "80GiB")
        assert len(lab.records) == 1


@pytest.mark.parametrize(
    ("step_index", "limit", "is_tried"),
    [(1, GIB, False), (2, GIB, True), (2, 11 * GIB // 10, True), (2, 2 * GIB, False)],
)
def test_what_a_used_lab_has_reserved_is_tried_again_where_that_may_decide(
    step_index: int, limit: int, is_tried: bool
) -> None:
    record = record_of(None, peak_allocated_bytes=GIB // 2, peak_reserved_bytes=GIB, step_index=step_index)
    session = Mock()
    session.take.return_value = replace(record, status="out_of_memory", message="fragmentation")
    assert _StepsOfLab(session, None).completes(record, limit) is not is_tried
    assert session.take.called is is_tried and (not is_tried or session.device_memory_bytes == limit)


@pytest.mark.parametrize(
    ("changes", "limit", "is_taken"),
    [({}, GIB, False), ({}, GIB - 1, True), ({"step_index": 2}, GIB, True), ({"backend": "cuda"}, GIB, True)],
)
def test_a_first_predicted_step_is_not_taken_again_within_what_it_reserved(
    changes: dict[str, Any], limit: int, is_taken: bool
) -> None:
    plain = record_of(None, peak_allocated_bytes=GIB // 2, peak_reserved_bytes=GIB, step_index=1)
    record = replace(plain, **({"backend": "simulated"} | changes))
    opened = Mock(side_effect=InterruptedError)
    steps = SimulatedSteps(opened, forward_only=False, on_progress=None)
    with pytest.raises(InterruptedError) if is_taken else nullcontext():
        assert steps.completes(record, limit)
    assert opened.called is is_taken


def test_a_pass_is_judged_by_passes_of_its_own_workload() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        trained = lab.step()
        record = lab.forward_only(seq_length=8192, warm_up=True)
        reserved = record.peak_reserved_bytes
        assert reserved is not None and trained.peak_allocated_bytes < record.peak_allocated_bytes < reserved
        lab.records.clear()
        # The pass allocates less and reserves more, so that only a pass with this limit shows whether it fits.
        tight = lab.fit(record, reserved - 1 + OUTSIDE_BYTES)
        assert lab.records and all(known.forward_only for known in lab.records)
        assert {known.scenario for known in lab.records} == {record.scenario}
        lab.records.clear()
        hopeless = lab.fit(record, record.peak_allocated_bytes - 1 + OUTSIDE_BYTES)
        assert (tight.fits, hopeless.fits, hopeless.alternatives, lab.records) == (True, False, (), [])
        assert lab.scenario == trained.scenario
    with (
        Lab("phi-4-tiny", num_layers=2, seq_length=64, packed_sequences=4, backend="simulated") as packing,
        pytest.raises(ValueError, match="had another packed_sequences than this lab has now"),
    ):
        packing.fit(record, "80GiB")


@pytest.mark.parametrize(("backend", "place"), [("cpu", "this CPU; it says nothing about a GPU"), ("cuda", "a GPU")])
def test_a_measured_step_is_not_said_to_be_predicted(backend: str, place: str) -> None:
    record = record_of(None, backend=backend, peak_allocated_bytes=GIB, static_bytes=GIB // 2)
    fit = judge_fit(record, lambda *_: pytest.fail("no other step is needed"), GIB + OUTSIDE_BYTES)
    assert (fit.verdict, fit.basis) == ("fits", f"a step that was measured on {place}")


@pytest.mark.parametrize(
    ("architecture", "num_layers", "seq_length", "eighths", "verdict"),
    [("phi-4-tiny", 4, 8192, 5, "fits"), ("qwen3-moe-tiny", 2, 4096, 1, "does not fit")],
)
def test_a_simulated_lab_answers_as_the_command(
    architecture: str, num_layers: int, seq_length: int, eighths: int, verdict: str
) -> None:
    """Within these limits, further steps of a lab answer otherwise than the first steps of a new process."""
    job: dict[str, Any] = {"num_layers": num_layers, "seq_length": seq_length}
    offload = MemorySettings(offload_modules=("qkv_linear",))
    with stepping(Scenario.of(architecture, **job)) as steps:
        record = steps(offload)
        assert record.peak_reserved_bytes is not None
        cached = record.peak_reserved_bytes - record.peak_allocated_bytes
        size = record.peak_allocated_bytes + eighths * cached // 8 + OUTSIDE_BYTES
        expected = judge_fit(record, steps, size)
    with Lab(architecture, backend="simulated", **job) as lab:
        fit = lab.fit(lab.step(offload), size)
    assert fit == expected and fit.verdict == verdict


def test_a_verdict_says_that_a_lab_cannot_start_over() -> None:
    state = TrainingState(fp8_format="hybrid")
    with Lab("phi-4-tiny", num_layers=1, seq_length=2048, state=state, backend="simulated") as lab:
        record = lab.step()
        assert record.peak_reserved_bytes is not None and record.peak_reserved_bytes > record.peak_allocated_bytes
        known = lab.fit(record, "80GiB")
        tried = lab.fit(record, record.peak_allocated_bytes + OUTSIDE_BYTES)
    assert "cannot start over" in tried.basis and "cannot start over" not in known.basis


@pytest.mark.slow
def test_what_fits_in_a_warm_lab_fits_in_a_fresh_one() -> None:
    job: dict[str, Any] = {"num_layers": 2, "seq_length": 4096, "backend": "simulated"}
    with Lab("qwen3-moe-tiny", **job) as warm:
        plain = warm.step()
        least, cached = plain.peak_allocated_bytes, plain.peak_reserved_bytes
        assert cached is not None and cached > least
        rooms = [least + share * (cached - least) // 4 for share in (0, 2, 6)]
        answers = []
        for room in rooms:
            warm.device_memory_bytes = room
            answers.append(warm.step().status)
    assert set(answers) == {"ok", "out_of_memory"}
    # A fresh lab that fits the smallest of these rooms fits the larger ones too.
    with Lab("qwen3-moe-tiny", **job) as fresh:
        fresh.device_memory_bytes = rooms[answers.index("ok")]
        assert fresh.step().status == "ok"


UNEVEN = [
    *("phi-4-tiny", "--num-layers", "4", "--seq-length", "8192", "--num-microbatches", "2", "--world-size", "2"),
    *("--pipeline-model-parallel-size", "2"),
]


def test_a_job_fits_where_each_rank_does_and_what_would_fit_does_on_all(capfd: pytest.CaptureFixture[str]) -> None:
    layout = Layout(pipeline_model_parallel_size=2)
    workload: dict[str, Any] = {"num_layers": 4, "seq_length": 8192, "num_microbatches": 2}
    first, last = predict_ranks("phi-4-tiny", layout, **workload).values()
    # The last stage needs less for torch, and more outside it: the loss has a group, the output layer has kernels.
    room = last.peak_allocated_bytes - 16 * MIB
    outside = [estimate_outside_torch(replace(layout, rank=rank)).total_bytes for rank in (0, 1)]
    assert first.peak_reserved_bytes is not None and first.peak_reserved_bytes < room + outside[1] - outside[0]
    budget = f"{outside[1] + room}B"
    codes = [main(["predict", *UNEVEN, "--gpu-memory", budget, "--rank", rank]) for rank in ("0", "1")]
    assert codes == [0, 1]
    capfd.readouterr()
    assert main(["predict", *UNEVEN, "--gpu-memory", budget, "--rank", "all", "--json"]) == 1
    fit = json.loads(capfd.readouterr().out)["fit"]
    assert fit["rank"] == 1 and fit["alternatives"]
    for choice in fit["alternatives"]:
        again = predict_ranks("phi-4-tiny", layout, MemorySettings.from_dict(choice["settings"]), **workload)
        first_again, last_again = again.values()
        peak = last_again.peak_allocated_bytes
        assert peak == pytest.approx(choice["peak_allocated_bytes"], rel=1e-2)
        assert peak <= room
        assert first_again.peak_allocated_bytes <= room + outside[1] - outside[0]


def test_a_rank_that_was_taken_by_default_says_that_others_differ(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *UNEVEN]) == 0
    assert "this is rank 0, one of 2 ranks; other ranks may need more or less memory" in capfd.readouterr().out
    assert main(["predict", *TINY, "--world-size", "2"]) == 0
    assert "other ranks" not in capfd.readouterr().out, "data parallel ranks are alike"


def test_an_alternative_of_a_small_model_may_be_to_offload() -> None:
    scenario = Scenario.of(architecture="phi-4-tiny", seq_length=512)

    def step(settings: MemorySettings) -> StepRecord:
        # No tensor of the model has as many elements as Megatron's default requires.
        transferred = {name: MIB for name in settings.offload_modules or () if not settings.min_offloaded_tensor_size}
        peak = 100 * MIB - sum(transferred.values())
        return record_of(
            None, settings, scenario=scenario, peak_allocated_bytes=peak, offloaded_bytes_by_module=transferred
        )

    fit = judge_fit(step(MemorySettings()), AnsweredSteps(step), 100 * MIB - 1 + OUTSIDE_BYTES)
    assert not fit.fits and fit.alternatives
    assert all(choice.settings.offload_modules and choice.transferred_bytes == MIB for choice in fit.alternatives)


def test_expandable_segments_are_advised_where_only_fragmentation_prevents_a_step_that_has_room_with_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(does_it_fit, "candidates", lambda own, *_, **__: [own])  # other settings: the tests below
    # Triton's buffer alone is nearly as large as the memory of this step.
    monkeypatch.setattr("memlab.engines.megatron.layers.kernel_timing.timed_at_first_call", lambda *_: None)
    job = ["predict", "qwen3-moe-tiny", "--num-layers", "2", "--seq-length", "2048"]
    how = ": add --expandable-segments to predict this"
    advice = f"the step fits with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True{how}"

    def predicted(mebibytes: int, *flags: str) -> tuple[int, list[str]]:
        exit_code = main([*job, "--gpu-memory", str(mebibytes * MIB + OUTSIDE_BYTES), *flags])
        return exit_code, capfd.readouterr().out.splitlines()

    exit_code, lines = predicted(270)
    assert exit_code == 1 and "the peak fits, but fragmentation leaves no block large enough" in lines[0]
    assert lines[-2:] == ["", advice]
    assert advice.replace(how, f",max_split_size_mb:512{how}") in predicted(270, "--max-split-size-mb", "512")[1]
    exit_code, lines = predicted(270, "--expandable-segments")
    assert exit_code == 0 and "fit" in lines[0] and advice not in lines
    assert advice not in predicted(256)[1], "no block is large enough then either"
    assert advice not in predicted(240)[1], "the peak does not fit"


def test_what_checkpoints_keep_is_offered_and_no_offload_next_to_full_recompute() -> None:
    settings = candidates(FULL, Scenario.of(architecture="qwen3-moe-tiny", seq_length=2048), depth=1, with_remedy=True)
    assert replace(FULL, checkpoint_input_remedy="detach") in settings
    assert not [choice for choice in settings if choice.offload_modules]
