"""The checks of the exercises: one line for each goal, reached or not yet, and no exception for a missed one."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.model_restrictions import check_on_model
from memlab.config.routing import find_routing
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.exercises.checks import check, failure
from memlab.exercises.formulas import FormulaCheck
from memlab.exercises.records import Attempt
from memlab.lab.lab import Lab
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import MIB, format_bytes
from tests.unit.builders import job_of, record_of, scenario, training_step
from tests.unit.live import FULL, offload, recompute

TAKEN = record_of(training_step())
PLAIN = replace(TAKEN, timeline=None)
"""Without a timeline, so that these tests can give it other numbers."""
HALF_OF_THE_LAYERS = MemorySettings(
    recompute_granularity="full", recompute_method="block", recompute_num_layers=scenario().num_layers // 2
)


AWAY = {"gradients": 4, "optimizer state": 12}


def job_with(**changes: Any) -> StepRecord:
    """The plain step of another job."""
    return replace(PLAIN, scenario=replace(PLAIN.scenario, **changes))


def with_settings(settings: MemorySettings, **changes: Any) -> StepRecord:
    return replace(PLAIN, settings=settings, **changes)


def with_state(**options: Any) -> StepRecord:
    return replace(PLAIN, scenario=replace(PLAIN.scenario, state=TrainingState(**options)))


def test_reached_goals_print_a_line_each_and_chain(capsys: pytest.CaptureFixture[str]) -> None:
    moved = with_settings(offload("moe_act"), offloaded_bytes_by_module={"moe_act": 1})
    assert check(PLAIN).offloads_nothing().runs_on(1).fits("80GiB")
    assert check(moved).moves("moe_act").residual_is_zero().recomputes_less_than(1).without_remedy()
    full = with_settings(FULL, recomputed_bytes=2)
    assert check(full).recomputes_whole_layers().recomputes_more_than(1).same_loss_as(PLAIN)
    detached = with_settings(replace(FULL, checkpoint_input_remedy="detach"))
    assert check(detached).remedy_empties_no_storage()
    peak, start, activations = PLAIN.peak_allocated_bytes, PLAIN.static_bytes, PLAIN.activation_peak_bytes
    assert check(full).peak_below(peak + 1).starts_below(start + 1).activation_peak_below(activations + 1)
    assert check(PLAIN).host_below(PLAIN.host_bytes + 1).without_settings().offloads_only_activations()
    assert check(moved).moves().same_job_as(PLAIN).same_job_as(PLAIN.scenario, "layout", "exp_avg_dtype")
    away = with_settings(MemorySettings(offload_optimizer=True), offloaded_bytes_by_group=AWAY)
    assert check(away).leaves_on_device("parameters")
    assert check(PLAIN).with_state(exp_avg_dtype="fp32", manual_gc=False)
    assert check(away).leaves_activations_alone().adds_options_to(TrainingState(), 0)
    fused = with_state(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    assert check(fused).adds_options_to(TrainingState(), 1)
    in_chunks = with_state(loss="logprobs", logprobs_chunk_size=512)  # no other loss of the lab reads the size
    assert check(in_chunks).adds_options_to(TrainingState(), 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26
    assert all(line.startswith("reached: ") for line in lines)


@pytest.mark.parametrize(
    ("record", "goal", "line"),
    [
        (PLAIN, ("activation_peak_below", 1), "the activation peak is "),
        (PLAIN, ("peak_below", 1), "the peak of the step is "),
        (PLAIN, ("starts_below", 1), "the start of the step is "),
        # CUDA and its libraries take more than the 2 GiB, so nothing is left for the step.
        (PLAIN, ("fits", "2GiB"), "the peak of the step is "),
        (PLAIN, ("runs_on", 8), "the layout's number of ranks is 1, must be 8. Hint: each rank has a GPU of its own"),
        (
            replace(PLAIN, host_bytes=3 * MIB),
            ("host_below", MIB),
            "the peak of the host is 3.00 MiB, must be below 1.0",
        ),
        (PLAIN, ("recomputes_more_than", 0), "backward recomputes 0 B, must be above 0 B. Hint: set recompute_granul"),
        *(
            (
                replace(
                    with_settings(recompute("mlp")), without_effect={"recompute_modules:mlp": "all layers are MoE"}
                ),
                goal,
                "Hint: recompute of mlp had no effect: all layers are MoE.",
            )
            for goal in (("recomputes_more_than", 0), ("peak_below", 1), ("activation_peak_below", 1))
        ),
        (PLAIN, ("recomputes_whole_layers",), "the settings are 'none', must recompute every layer as a whole"),
        (with_settings(recompute("mlp")), ("recomputes_whole_layers",), "the settings are 'recompute mlp', must"),
        (with_settings(HALF_OF_THE_LAYERS), ("recomputes_whole_layers",), "the settings are 'full block"),
        (
            with_settings(replace(FULL, checkpoint_input_remedy="detach")),
            ("without_remedy",),
            "checkpoint_input_remedy is 'detach', must be None. Hint: leave the remedy out.",
        ),
        (
            replace(PLAIN, residual_bytes=3 * MIB),
            ("residual_is_zero",),
            "the residual after the step is 3.00 MiB, must be zero",
        ),
        (
            replace(with_settings(offload("moe_act")), without_effect={"offload_modules:moe_act": "all is too small"}),
            ("activation_peak_below", 1),
            "below 1 B. Hint: moe_act transferred nothing to the host: all is too small.",
        ),
        (
            replace(PLAIN, offloaded_bytes_by_group={"parameters": MIB}),
            ("activation_peak_below", 1),
            "below 1 B. Hint: the activation peak counts from the start of the step; what leaves the device between",
        ),
        (
            with_settings(HALF_OF_THE_LAYERS, residual_bytes=1),
            ("residual_is_zero", "look at the remedies"),
            "Hint: look",
        ),
        (PLAIN, ("fits", "2GiB", "divide more"), "Hint: divide more."),
        (
            replace(PLAIN, recomputed_bytes=2),
            ("recomputes_less_than", 2),
            "what backward recomputes is 2 B, must be below 2 B: it is as much",
        ),
        (
            replace(PLAIN, recomputed_bytes=2),
            ("recomputes_less_than", 1),
            "must recompute nothing. Hint: leave recompute_gran",
        ),
        (PLAIN, ("moves", "moe_act"), "moe_act transferred nothing to the host: not among offload_modules"),
        (
            replace(PLAIN, without_effect={"offload_modules:moe_act": "all is under min_offloaded_tensor_size"}),
            ("moves", "moe_act"),
            "moe_act transferred nothing to the host: all is under min_offloaded_tensor_size",
        ),
        (
            with_settings(offload("moe_act"), offloaded_bytes_by_module={"moe_act": 1}),
            ("offloads_nothing",),
            "moe_act transferred activations to the host, must transfer none",
        ),
        (
            with_settings(MemorySettings(offload_optimizer=True), offloaded_bytes_by_group=AWAY),
            ("offloads_nothing",),
            (
                "gradients and optimizer state left the device, must stay there during the step and after it. Hint: leave "
                "offload_gradients and offload_optimizer out: offload_optimizer also sets offload_gradients."
            ),
        ),
        (
            with_settings(MemorySettings(offload_optimizer_except_update=True)),
            ("offloads_only_activations",),
            (
                "optimizer state left the device, must stay there during the step and after it. Hint: leave "
                "offload_optimizer_except_update out."
            ),
        ),
        (PLAIN, ("moves",), "no activation was transferred to the host, must transfer some. Hint: set offload_modules"),
        (
            PLAIN,
            ("leaves_on_device", "parameters"),
            (
                "the step itself leaves parameters, gradients and optimizer state on the device, must leave only "
                "parameters. Hint: which setting offloads gradients and optimizer state?"
            ),
        ),
        (
            with_settings(FULL),
            ("without_settings",),
            "the memory settings are 'full uniform 1', must be none. Hint: run lab.apply(MemorySettings()), because",
        ),
        (
            PLAIN,
            ("peak_below", PLAIN.peak_allocated_bytes),
            f"must be below {format_bytes(PLAIN.peak_allocated_bytes)}",
        ),
        (
            PLAIN,
            ("peak_below", PLAIN.peak_allocated_bytes - 1),
            f"is {PLAIN.peak_allocated_bytes:,} bytes, must be below ",
        ),
        (with_settings(FULL), ("leaves_activations_alone",), "are 'full uniform 1', must not recompute or offload"),
        (with_settings(offload("moe_act")), ("leaves_activations_alone",), "must not recompute or offload activations"),
        (
            PLAIN,
            ("adds_options_to", TrainingState(manual_gc=True), 0),
            "of the exercise: 1 (manual_gc), must be at most 0. Hint: keep those of the exercise: manual_gc.",
        ),
        *(
            (
                with_state(**other),
                ("adds_options_to", TrainingState(), 1),
                f"the job differs in {next(iter(other))}, must",
            )
            for other in ({"lora": LoRA(rank=8)}, {"num_labels": 1}, {"moe_expert_capacity_factor": 0.05})
        ),
        (
            with_state(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", manual_gc=True),
            ("adds_options_to", TrainingState(), 1),
            "2 (manual_gc and cross_entropy_loss_fusion), must be at most 1. Hint: leave out what the goals do not need.",
        ),
        (
            replace(PLAIN, forward_only=True),
            ("peak_below", 10**15),
            "that of a forward-only pass, must be that of a tr",
        ),
        *(
            (
                not_steady,
                ("peak_below", 10**15),
                (
                    "the step is not steady (no equal step came right before it), must be steady. Hint: take it again with "
                    "lab.step(...) alone, which takes a warm-up step first: without warm_up=False, without a tap, and not "
                    "right after a forward-only pass."
                ),
            )
            for not_steady in (replace(PLAIN, is_steady=False), JobRecord.of([PLAIN, replace(PLAIN, is_steady=False)]))
        ),
        (PLAIN, ("moves", "core_attn", "moe_act"), "core_attn and moe_act transferred nothing to the host: not among"),
        (
            replace(PLAIN, peak_allocated_bytes=1),
            ("peak_below", 10**15),
            "peak_allocated_bytes of the record is 1, but ",
        ),
        (
            with_settings(replace(FULL, checkpoint_input_remedy="release_storage")),
            ("remedy_empties_no_storage",),
            "which empties storages, must only drop references. Hint: choose a remedy that",
        ),
        (
            with_settings(FULL),
            ("remedy_empties_no_storage",),
            "checkpoint_input_remedy is None, must be a remedy. Hint",
        ),
        (replace(PLAIN, loss=1.0), ("same_loss_as", PLAIN), "a memory setting changes no number"),
        (PLAIN, ("same_loss_as", replace(PLAIN, status="out_of_memory", message="too large")), "ended early (too larg"),
        (replace(PLAIN, status="out_of_memory", message="too large"), ("peak_below", 10**15), "ended early (too large"),
    ],
)
def test_a_missed_goal_prints_one_line_and_silences_the_goals_after_it(
    record: StepRecord, goal: tuple[Any, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = goal
    missed = getattr(check(record), name)(*arguments).residual_is_zero().peak_below(0)
    assert not missed
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith("not yet: ")
    assert line in printed
    assert not printed.endswith("?.")


@pytest.mark.parametrize(
    "numbers",
    [
        {"static_bytes": 1},
        {"peak_allocated_bytes": 1},
        {"peak_allocated_bytes": 1, "peak_by_category": {"activations": 1}},
        {"activation_peak_bytes": 1},
        {"host_bytes": 1},
        {"recomputed_bytes": 1},
        {"residual_bytes": 1},
        {"offloaded_bytes_by_module": {"moe_act": 1}},
    ],
    ids="+".join,
)
def test_a_record_with_a_number_changed_by_hand_is_refused(
    numbers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(TAKEN).peak_below(10**15)
    assert check(JobRecord.of([TAKEN])).peak_below(10**15)
    capsys.readouterr()
    for record in (TAKEN, JobRecord.of([TAKEN])):
        assert not check(replace(record, **numbers)).peak_below(10**15)
        line = capsys.readouterr().out
        assert line.startswith("not yet: ") and line.endswith(". Hint: hand in the record as the step returned it.\n")
        assert line.count("\n") == 1 and next(iter(numbers)).split("_")[0] in line


@pytest.mark.parametrize(
    ("changed", "but", "line"),
    [
        (
            {"seq_length": 128},
            (),
            (
                f"seq_length is 128, must be {PLAIN.scenario.seq_length}. Hint: change only the memory settings; an open Lab "
                f"keeps an earlier change until lab.set_workload(seq_length={PLAIN.scenario.seq_length}) changes it back."
            ),
        ),
        (
            {"num_layers": 2},
            ("layout", "state"),
            f"num_layers is 2, must be {PLAIN.scenario.num_layers}. Hint: change only the layout and the training state.",
        ),
        (
            {"state": TrainingState(optimizer_cpu_offload=True)},
            ("exp_avg_dtype",),
            (
                "optimizer_cpu_offload is True, must be False. Hint: change only exp_avg_dtype; an open Lab keeps an earlier "
                "change until lab.set_state(TrainingState()) changes it back."
            ),
        ),
        ({"routing": find_routing("skewed:3")}, (), "routing is skewed:3, must be balanced. Hint: change only the"),
        ({"architecture": ARCHITECTURES["phi-4"]}, (), "architecture is 'phi-4', must be 'qwen3-30b-a3b'"),
        (
            {"architecture": replace(PLAIN.scenario.architecture, hidden_size=1024)},
            (),
            f"hidden_size is 1024, must be {PLAIN.scenario.architecture.hidden_size}",
        ),
        ({"layout": Layout(data_parallel_size=2)}, ("state",), "data_parallel_size is 2, must be 1"),
        ({"layout": Layout(data_parallel_size=2, rank=1)}, ("data_parallel_size",), "rank is 1, must be 0"),
        ({"num_microbatches": 2}, ("layout",), "num_microbatches is 2, must be 1"),
        (
            {"num_microbatches": 2},
            ("layout", "num_microbatches"),
            f"tokens_per_step is {2 * PLAIN.scenario.seq_length}, must be {PLAIN.scenario.seq_length}",
        ),
        ({"versions": Versions(transformer_engine="2.12")}, ("state",), "versions is Transformer Engine 2.12"),
    ],
)
def test_another_job_is_refused_and_its_first_other_part_named(
    changed: dict[str, Any], but: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check(job_with(**changed)).same_job_as(PLAIN, *but)
    assert capsys.readouterr().out.startswith(f"not yet: {line}")


def test_a_prediction_does_not_stand_for_a_step_of_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    ran = replace(PLAIN, backend="cpu")
    predicted = replace(PLAIN, backend="simulated")
    assert not check(predicted).same_job_as(ran).peak_below(1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "not yet: the backend of the record is 'simulated', must be 'cpu'. Hint: take the step with lab."
    )
    assert check(predicted).same_job_as(predicted), "the exercise is about predictions"
    assert check(predicted).same_job_as(ran.scenario), "the exercise names no step"


def test_an_answer_of_another_kind_misses_the_goal_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for answer, subject in ((lambda: 3, "a function"), (3, "numbers"), (PLAIN, "the record of a step")):
        judged: Any = check(answer)
        assert not judged.complains_like(PLAIN)
        assert capsys.readouterr().out == (
            f"not yet: the check got {subject}, must get an audit. Hint: change only the marked line: the check itself "
            "takes the audit.\n"
        )
    thirds: Any = check(Fraction(each, 3) for each in (3, 6))  # type: ignore[call-overload]
    assert thirds.is_exactly([1, 2])


def test_where_settings_can_change_next_to_nothing_the_hint_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"parameters": 990, "optimizer state": 1000, "temporary": 10}
    in_the_optimizer = replace(PLAIN, peak_allocated_bytes=2000, peak_by_category=kept)
    assert not check(in_the_optimizer).peak_below(1000)
    assert "more than 99 % of the memory" in capsys.readouterr().out


def test_what_an_exercise_allows_to_change_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    two = job_with(layout=Layout(data_parallel_size=2))
    assert check(two).same_job_as(PLAIN, "layout")
    assert check(two).same_job_as(job_with(num_microbatches=2), "layout", "num_microbatches")
    bf16 = job_with(state=TrainingState(use_precision_aware_optimizer=True, exp_avg_dtype="bf16"))
    assert check(bf16).same_job_as(PLAIN, "state")
    job = job_of(Layout(pipeline_model_parallel_size=2))
    other_worst = replace(job, scenario=job.rank(1 - job.worst_rank).scenario)
    assert check(other_worst).same_job_as(job), "which rank is the worst is not part of the job"
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "reached: the job is the same"
    with pytest.raises(ValueError, match="a scenario has no part 'tokens', must be one of architecture, "):
        check(PLAIN).same_job_as(PLAIN, "tokens")


def test_a_state_that_the_exercise_forbids_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(PLAIN).with_state(manual_gc=False, exp_avg_dtype="bf16")
    assert (
        capsys.readouterr().out
        == "not yet: exp_avg_dtype is 'fp32', must be 'bf16'. Hint: write exp_avg_dtype='bf16'.\n"
    )


def test_recompute_that_raises_the_peak_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for modules, is_named in ((["core_attn"], True), (["moe", "core_attn"], True), (["moe"], False)):
        settings = MemorySettings(recompute_granularity="selective", recompute_modules=modules)
        record = with_settings(settings, recomputed_bytes=1)
        for goal in (check(record).peak_below, check(record).activation_peak_below):
            assert not goal(1, "recompute more")
            said = capsys.readouterr().out
            assert ("makes a layer keep more: leave it out; " in said) is is_named
            assert said.endswith("recompute more.\n"), "without core_attn, the exercise's own hint is what to do next"


def test_an_answer_that_is_refused_prints_one_line_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Attempt() as answer:
        answer.record = with_settings(MemorySettings(recompute_granularity="half"))
    assert not check(answer).runs_on(1).fits("80GiB")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not yet: this answer is refused: recompute_granularity is 'half', must be one of")
    with pytest.raises(AttributeError, match="no goal 'runs_in'"):
        check(answer).runs_in(1)
    with Attempt() as answer:
        answer.record = PLAIN
    assert check(answer).runs_on(1)
    for mistake in (lambda: MemorySettings(modules=["mlp"]), lambda: None.loss):  # type: ignore[call-arg,attr-defined]
        with Attempt() as answer:
            mistake()
        assert not check(answer).runs_on(1)
        out = capsys.readouterr().out
        assert "Error: " in out
        assert "fault of memlab" not in out
    with Attempt() as answer:
        check_on_model(None, PLAIN.scenario)  # type: ignore[arg-type]
    assert not check(answer).runs_on(1)
    assert "memlab.config.model_restrictions, line " in capsys.readouterr().out
    with pytest.raises(KeyError), Attempt():
        raise KeyError("a mistake of another kind")
    assert not check(Attempt()).runs_on(1)


def test_a_check_as_the_last_expression_of_a_cell_shows_nothing_more() -> None:
    from IPython.core.formatters import DisplayFormatter

    shown = check(PLAIN).residual_is_zero()
    assert repr(shown) == ""
    assert DisplayFormatter().format(shown) == ({}, {})


def test_any_row_of_numbers_is_an_answer() -> None:
    for row in (range(2, 5, 2), deque([2, 4]), {"a": 2, "b": 4}.values(), map(int, "24")):
        assert check(row).is_exactly([2, 4])


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        *(
            (
                wrong,
                f"the check got an answer of the type {kinds}, must get one number per case. Hint: replace only the 0",
            )
            for wrong, kinds in (
                ([], "list with nothing"),
                (["2*h*t", 3], "list with int and str"),
                ([True], "list with bool"),
                ({"case 1": 3}, "dict with str"),
                (iter(["3"]), "list_iterator with str"),
                ("2*h*t", "str"),
            )
        ),
        (
            None,
            "the check got an answer of the type NoneType, must get one number per case. Hint: begin the marked line as",
        ),
        (lambda: 3, "the check got a function, must get one number per case. Hint: replace only the 0"),
        (PLAIN, "the check got the record of a step, must get one number per case. Hint: replace only the 0"),
    ],
)
def test_what_is_no_formula_is_refused_in_one_line_with_what_to_give(
    answer: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = check(answer)
    assert not judged.is_exactly([3]).is_about([3], "bytes", "")
    assert not judged
    printed = capsys.readouterr().out
    assert printed.startswith(f"not yet: {line}") and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            MemorySettings(),
            "an answer of the type MemorySettings, must get the record of a step. Hint: write lab.step(...) ",
        ),
        (
            TrainingState(),
            "an answer of the type TrainingState, must get the record of a step. Hint: write lab.step(state=",
        ),
        (
            None,
            "an answer of the type NoneType, must get the record of a step. Hint: begin the marked line as it began, for example with 'mine =', and run its cell",
        ),
        ("full", "an answer of the type str, must get the record of a step. Hint: give what lab.step(...) returned"),
        (3, "numbers, must get the record of a step. Hint: give what lab.step(...) returned"),
        (
            Attempt(),
            "an answer of the type NoneType, must get the record of a step. Hint: begin the marked line as it began, for example with 'mine =', and run its cell",
        ),
    ],
)
def test_what_is_no_record_is_refused_in_one_line_with_what_to_give(
    answer: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check(answer).same_job_as(PLAIN).peak_below(3)
    printed = capsys.readouterr().out
    assert printed.startswith(f"not yet: the check got {line}") and printed.count("\n") == 1


def test_a_formula_must_hold_for_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([2.0, 4]).is_exactly([2, 4])
    assert check(6 / 2).is_exactly(3)
    assert not check([2, 2]).is_exactly([2, 4]), "the line does not give the second number away"
    assert not check([1, 2]).is_exactly([2, 4])
    assert not check(2).is_exactly([2, 4])
    assert not check(5).is_exactly(3, "count again")
    assert not check(0.1 + 0.2 + 3e9).is_exactly(3 * 10**9)
    assert check(3.3e9 / 1.1).is_exactly(3 * 10**9), "a division rounds"
    counted = [2, 4]
    assert not check(counted).is_exactly(counted) and not check(counted).is_about(counted, "bytes", "")
    assert check([*counted]).is_about(counted, "bytes", "") and not check([2, 3]).is_about(counted, "bytes", "count")
    assert not check(math.inf).is_exactly(3) and not check(math.nan).is_exactly(3)
    assert capsys.readouterr().out.splitlines() == [
        "reached: the formula gives 2 and 4 bytes, exactly as many as memlab counted",
        "reached: the formula gives 3 bytes, exactly as many as memlab counted",
        "not yet: the formula gives 2 bytes for case 2, too few. Hint: ask of each module which tensors it keeps.",
        "not yet: the formula gives 1 bytes for case 1, 1 too few. Hint: ask of each module which tensors it keeps.",
        "not yet: the formula gives 1 result, must give 2, one per case. Hint: replace only the 0 in the marked line.",
        "not yet: the formula gives 5 bytes, 2 too many. Hint: count again.",
        "not yet: the formula gives 3,000,000,000.3 bytes, 0.3 too many. Hint: ask of each module which tensors it keeps.",
        "reached: the formula gives 3,000,000,000 bytes, exactly as many as memlab counted",
        *["not yet: these are the numbers with which the check compares, must be a formula in letters"] * 2,
        "reached: 2 and 4 bytes: right to within 1%",
        "not yet: the formula gives 3 bytes for case 2, too small. Hint: count.",
        "not yet: the formula gives inf bytes, must be finite. Hint: ask of each module which tensors it keeps.",
        "not yet: the formula gives nan bytes, must be finite. Hint: ask of each module which tensors it keeps.",
    ]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ([2, 3], "2 for case 1, which is right per token, must give the bytes of all tokens of a case"),
        ([8 / 2**10, 24 / 2**10], "0.01 for case 1, which is right in KiB, must give bytes"),
        ([8 / 10**9, 24 / 10**9], "8e-09 for case 1, which is right in GB, must give bytes"),
        ([8 / 2**30, 24 / 2**30], "7e-09 for case 1, which is right in GiB, must give bytes"),
        ([-8, -24], "-8 for case 1, which is right but for its sign, must have the other one"),
        # Right in another unit for one case only.
        ([2, 4], "2 bytes for case 1, "),
        ([-8, 24], "-8 bytes for case 1, "),
        ([math.inf, 3], "inf bytes"),
    ],
)
def test_a_right_formula_in_another_unit_is_told_so(
    answer: list[float], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exactly = partial(FormulaCheck.is_exactly, num_bytes=[8, 24], tokens=[4, 8])
    about = partial(FormulaCheck.is_about, values=[8, 24], unit="bytes", hint="", tokens=[4, 8])
    in_part = partial(about, within=(0, 0.01))
    for goal in (exactly, about, in_part):
        assert not goal(check(answer))
        assert capsys.readouterr().out.startswith(f"not yet: the formula gives {line}")


def test_an_answer_without_a_value_is_told_of_steps_only_where_a_step_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not check(None).peak_below(1)
    assert "lab.apply(...) gives None" in capsys.readouterr().out
    assert not check(None).is_exactly(1)
    line = capsys.readouterr().out
    assert line.endswith("for example with 'mine =', and run its cell before the check.\n")


def test_each_case_has_its_own_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([1000, 2001.0]).is_about([1000, 2000], "bytes", "count", within=(0, 0.01))
    assert not check([1001, 2000]).is_about([1000, 2000], "bytes", "count", within=(0, 0.01))
    assert not check([1000, 2100]).is_about([1000, 2000], "bytes", "count", within=(0, 0.01))
    reached, first, second = capsys.readouterr().out.splitlines()
    assert reached == "reached: 1,000 and 2,001 bytes: right exactly for case 1, else to within 1%"
    assert first == "not yet: the formula gives 1,001 bytes for case 1, too large. Hint: count."
    assert "for case 2, too large" in second
    for within, how in (
        ((0.01, 0), "exactly for case 2, else to within 1%"),
        ((0, 0), "exactly"),
        ((0.01, 0.02), "to within 2%"),
    ):
        assert check([1000, 2000]).is_about([1000, 2000], "bytes", "count", within=within)
        assert capsys.readouterr().out.endswith(f": right {how}\n")


def test_a_share_in_per_cent_is_told_so_and_only_zeros_are_right_in_every_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not check([66.7, 50]).is_about([2 / 3, 0.5], "as R", "")
    assert "66.7 for case 1, which is right in per cent, must give a share from 0 to 1" in capsys.readouterr().out
    assert not check([66.7, 66.7]).is_about([2 / 3, 0.5], "as R", "")
    assert "66.7 as R for case 1, must be a share from 0 to 1; if it is in per cent, divide" in capsys.readouterr().out
    assert not check([0.02, 0.05]).is_about([2, 5], "tokens", "count")
    assert "right in" not in capsys.readouterr().out
    assert check([0, 0]).is_exactly([0, 0], tokens=[4, 8])


def test_an_option_of_the_settings_given_to_the_step_is_told_where_it_belongs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, ending in (
        ("recompute_modules", ": write lab.step(MemorySettings(recompute_modules=...))"),
        ("manual_gc", ": write lab.step(state=TrainingState(manual_gc=...))"),
        ("remedy", ": write lab.step(MemorySettings(checkpoint_input_remedy=...))"),
        ("offload_optimizer", ": write lab.step(MemorySettings(offload_optimizer=...))"),
        ("o", "unexpected keyword argument 'o'"),
        ("no_such_word", "unexpected keyword argument 'no_such_word'"),
        ("mlp", "'mlp'"),
        ("seq_length", ": leave seq_length out, or call lab.set_workload(seq_length=...)"),
    ):
        with Attempt() as answer:
            Lab.step(None, **{option: ["moe"]})  # type: ignore[arg-type]
        assert not check(answer).peak_below(1)
        assert capsys.readouterr().out.rstrip(".\n").endswith(ending)


def test_a_training_state_given_without_its_name_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with Attempt() as answer:
        Lab.step(None, MemorySettings(), TrainingState())  # type: ignore[arg-type, call-arg]
    assert not check(answer).peak_below(1)
    assert capsys.readouterr().out.endswith(": name what follows the settings, such as state=TrainingState(...)\n")


def two_of(values: list[int]) -> None:
    _first, _last = values


GIVEN = {"manual_gc": True}


@pytest.mark.parametrize(
    ("mistake", "action"),
    [
        (
            lambda: MemorySettings() | {"recompute_granularity": "full"},  # type: ignore[operator]
            "write dataclasses.replace(settings, option=value)",
        ),
        (lambda: setattr(MemorySettings(), "offload_parameters", True), "write dataclasses.replace(settings, option="),
        (lambda: MemorySettings(granularity="full"), "write recompute_granularity=..."),  # type: ignore[call-arg]
        (
            lambda: MemorySettings(fine_grained_activation_offloading=True),  # type: ignore[call-arg]
            "'fine_grained_activation_offloading': leave it out: offload_modules alone switches",
        ),
        (lambda: MemorySettings("full"), "name its fields, such as"),  # type: ignore[call-arg]
        (lambda: TrainingState(**GIVEN, manual_gc=False), "give it once"),  # type: ignore[arg-type]
        (lambda: Layout(pp=4), "write Layout.from_text('TP2 DP4')"),  # type: ignore[call-arg]
        (lambda: Layout("PP4 DP2"), "write Layout.from_text('TP2 DP4')"),  # type: ignore[misc]
        (lambda: "TP2".data_parallel_size, "refused: layout is 'TP2', must be Layout(...): "),  # type: ignore[attr-defined]
        (lambda: "TP2 PP4".data_parallel_size, "must be Layout(...): write Layout.from_text('TP2 PP4')"),  # type: ignore[attr-defined]
        (
            lambda: two_of([1, 2, 2, 3]),
            "too many values to unpack (expected 2): give as many values as there are names",
        ),
        (lambda: two_of([1]), ": give as many values as there are names"),
        (lambda: two_of(1), ": give as many values as there are names"),  # type: ignore[arg-type]
        (lambda: TrainingState(grad_in_bf16=True), "write grad_reduce_in_bf16=..."),  # type: ignore[call-arg]
        (
            lambda: TrainingState(manual_gc=True, manual_gc_interval=1),  # type: ignore[call-arg]
            "write manual_gc=..., or leave manual_gc_interval out",
        ),
    ],
)
def test_an_error_of_python_s_is_told_the_way_out(
    mistake: Callable[[], object], action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Attempt() as answer:
        mistake()
    assert not check(answer).runs_on(1)
    assert action in capsys.readouterr().out


def test_a_setting_that_offloads_nothing_is_an_offload_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(with_settings(offload("qkv_linear"))).offloads_nothing()
    assert "the settings name qkv_linear to offload, which had no effect" in capsys.readouterr().out


def test_a_failure_of_megatron_s_is_a_text_without_addresses() -> None:
    def mismatch() -> None:
        raise AssertionError("Chunk mismatch <megatron.Handler object at 0x7f15c5eb21d0>")

    assert failure(mismatch) == "AssertionError: Chunk mismatch <megatron.Handler>"
    assert failure(lambda: None) == ""
    dead = weakref.proxy({1})  # nothing else refers to the set
    assert failure(lambda: len(dead)) == "ReferenceError: weakly-referenced object no longer exists"
    with pytest.raises(ValueError, match="is a user's mistake"):
        failure(lambda: (_ for _ in ()).throw(ValueError("is a user's mistake")))


def test_the_distance_between_the_ranks_of_a_job_is_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(Layout(pipeline_model_parallel_size=2))
    assert job.spread_bytes > 0
    assert check(job).ranks_differ_by_less_than(job.spread_bytes + 1)
    assert not check(job).ranks_differ_by_less_than(job.spread_bytes)
    assert not check(PLAIN).ranks_differ_by_less_than(1)
    assert not check(job).peak_below(1)
    reached, missed, none, peak = capsys.readouterr().out.splitlines()
    assert reached.startswith("reached: the spread of the ranks' peaks is ")
    assert missed.startswith("not yet: the spread of the ranks' peaks is ")
    assert missed.endswith("Hint: compare rank(0).peak_by_category and rank(1).peak_by_category of the record.")
    assert none.startswith("not yet: the record is that of one rank, must be that of a job")
    assert peak.startswith(f"not yet: the highest peak, that of rank {job.worst_rank}, is ")


def test_a_limit_is_named_before_a_module_that_the_model_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {"offload_modules:attn_norm": "it is fused", "offload_modules:moe_act": "min_offloaded_tensor_size is 9"}
    record = replace(with_settings(offload("attn_norm", "moe_act")), without_effect=reasons)
    assert not check(record).peak_below(1)
    assert "Hint: moe_act transferred nothing to the host: min_offloaded_tensor_size is 9" in capsys.readouterr().out


def test_a_setting_without_effect_is_named_before_any_other_hint(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(Layout(pipeline_model_parallel_size=2))
    reason = {"offload_modules:moe_act": "all is too small"}
    without_effect = replace(job, settings=offload("moe_act"), without_effect=reason, offloaded_bytes_by_module={})
    assert not check(without_effect).ranks_differ_by_less_than(1, "offload more")
    assert not check(without_effect).peak_below(1, "offload more")
    for line in capsys.readouterr().out.splitlines():
        assert line.endswith("Hint: moe_act transferred nothing to the host: all is too small.")


def test_an_option_of_the_training_state_without_effect_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    reason = {"cross_entropy_fusion_impl": "only cross_entropy_loss_fusion reads it"}
    assert not check(replace(PLAIN, without_effect=reason)).peak_below(1, "fuse the loss")
    line = capsys.readouterr().out
    assert line.endswith("cross_entropy_fusion_impl had no effect: only cross_entropy_loss_fusion reads it.\n")


def test_an_exercise_gives_a_hint_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(Layout(pipeline_model_parallel_size=2))
    assert not check(job).peak_below(1, "look at the first stage")
    assert not check(job).ranks_differ_by_less_than(1, "look at the first stage")
    assert not check(job).host_below(0, "look at the first stage")
    assert not check(PLAIN).activation_peak_below(1, "look at the first stage")
    assert [line[-30:] for line in capsys.readouterr().out.splitlines()] == ["Hint: look at the first stage."] * 4
