"""The search for what fits: its front against every candidate's own step, what it leaves out, and the command."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from memlab.cli import main
from memlab.commands.shared.process import terminated_as_by_ctrl_c
from memlab.config import without_effect
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model, checkpoints_moe_layers
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.fitting.candidates import added_offload, candidates
from memlab.fitting.does_it_fit import Fit, Steps, basis_of, judge, judge_fit, transferred_bytes
from memlab.fitting.layouts import Step
from memlab.fitting.measured_margin import (
    MARGIN_WITH_EXPERTS,
    MARGIN_WITHOUT_EXPERTS,
    measured_margin,
    needs_whole_reserve,
)
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.prediction import Predict, Prediction
from memlab.fitting.recompute_cost import recomputed_operations, recomputed_share, share_text
from memlab.fitting.search import SearchInterrupted, search
from memlab.lab import search_workers
from memlab.lab.background_search import BackgroundSearch
from memlab.lab.lab import Lab
from memlab.lab.search_steps import stepping
from memlab.lab.search_workers import _interrupted_while_waiting, front_of, open_workers
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB, format_bytes, remaining
from memlab.views.text.search import most_saved_lines, search_table
from tests.unit.live import FULL, offload, recompute

from .builders import AnsweredSteps, record_of

OUTSIDE_BYTES = estimate_outside_torch(Layout()).total_bytes
PLAIN = MemorySettings()
TINY = ["phi-4-tiny", "--num-layers", "2", "--seq-length", "64"]
Figures = tuple[int, float, int]


NO_OTHER = AnsweredSteps(lambda _: pytest.fail("no other step is needed"))


def predicting(steps: Steps, limit_bytes: int) -> Predict:
    """On whatever rank a search asks for."""
    return lambda scenario, settings: Prediction.of(steps(settings), steps, limit_bytes, communicated_bytes={})


def pareto(rows: list[Figures]) -> set[Figures]:
    """By definition: no other row is no heavier in all and lighter in one."""
    return {
        row
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
    }


def figures(found: SearchResult) -> set[Figures]:
    return {(point.peak_allocated_bytes, *point.work) for point in found.front}


@pytest.mark.parametrize(
    ("scenario", "base"),
    [
        (Scenario.of(architecture="phi-4-tiny", num_layers=2, seq_length=64), PLAIN),
        pytest.param(
            Scenario.of(architecture="qwen3-moe-tiny", num_layers=2, seq_length=64),
            MemorySettings(
                recompute_granularity="selective",
                recompute_modules=("layernorm",),
                offload_modules=("qkv_linear", "core_attn", "attn_proj"),
                min_offloaded_tensor_size=0,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense", "moe with a base"],
)
def test_the_front_is_that_of_every_candidate_s_own_step(scenario: Scenario, base: MemorySettings) -> None:
    with stepping(scenario) as steps:
        taken: dict[MemorySettings, StepRecord] = {}

        def predict(_: Scenario, settings: MemorySettings) -> Prediction:
            taken[settings] = steps(settings)
            return Prediction.of(taken[settings], steps, GIB, communicated_bytes={})

        found = search(base, [scenario], predict, GIB)
        # What the search has stepped is not stepped again here: below, a new lab repeats a part of it.
        records = [taken.get(settings) or steps(settings) for settings in candidates(base, scenario)]
    before = records[0].without_effect.keys()
    records = [record for record in records if not record.without_effect.keys() - before]
    rows = {
        record.settings: (
            record.peak_allocated_bytes,
            recomputed_operations(record.settings, scenario),
            transferred_bytes(record),
        )
        for record in records
    }
    assert figures(found) == pareto(list(rows.values()))
    assert {point.settings: (point.peak_allocated_bytes, *point.work) for point in found.points}.items() <= rows.items()
    assert (found.num_candidates, found.num_left) == (len(records), 0)
    assert found.num_pruned == len(records) - len(found.points)
    assert len(found.front) > 4
    with Lab(scenario.architecture, num_layers=2, seq_length=64, backend="simulated") as lab:
        for one in found.front[::3]:
            assert lab.step(one.settings).peak_allocated_bytes == one.peak_allocated_bytes


def machine(seed: int, scenario: Scenario) -> AnsweredSteps:
    """A model of steps: each module frees and transfers its own bytes, with a little noise, as real ones were seen to."""
    drawn = random.Random(seed)
    frees = {name: drawn.randint(1, 400) * MIB for name in sorted({*recompute_names(), *offload_names()})}
    moves = {name: drawn.randint(1, 400) * MIB for name in offload_names()}

    def step(settings: MemorySettings) -> StepRecord:
        noise = random.Random(f"{seed} {settings}").randint(0, MIB // 8)
        offloaded = {name: moves[name] for name in settings.offload_modules or ()}
        freed = sum(frees[name] for name in settings.recompute_modules or ()) + sum(frees[name] for name in offloaded)
        if settings.recompute_granularity == "full":
            blocks = settings.recompute_num_layers if settings.recompute_method == "block" else scenario.num_layers
            freed = freed * (scenario.num_layers - (blocks or 0)) // scenario.num_layers + (blocks or 0) * 40 * MIB
        return record_of(
            None,
            settings=settings,
            scenario=scenario,
            peak_allocated_bytes=60 * GIB - freed + noise,
            offloaded_bytes_by_module=offloaded,
        )

    return AnsweredSteps(step)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def recompute_names() -> tuple[str, ...]:
    return ("core_attn", "layernorm", "mlp", "moe", "moe_act")


def offload_names() -> tuple[str, ...]:
    return ("attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_pruned_is_not_on_the_front_of_a_job_whose_ranks_save_by_different_modules(seed: int) -> None:
    scenarios = [
        Scenario.of("qwen3-30b-a3b", num_layers=12, layout=Layout(pipeline_model_parallel_size=2, rank=rank))
        for rank in (0, 1)
    ]
    steps = [machine(10 * seed + rank, scenario) for rank, scenario in enumerate(scenarios)]

    def predict(scenario: Scenario, settings: MemorySettings) -> Prediction:
        step = steps[scenario.layout.rank]
        return Prediction.of(step(settings), step, 59 * GIB, communicated_bytes={})

    found = search(PLAIN, scenarios, predict, 59 * GIB)
    every = []
    for settings in candidates(PLAIN, scenarios[0]):
        ranks = [predict(scenario, settings) for scenario in scenarios]
        peak, moved = (
            max(values) for values in zip(*((r.peak_allocated_bytes, r.transferred_bytes) for r in ranks), strict=True)
        )
        every.append((peak, recomputed_operations(settings, scenarios[0]), moved))
    assert figures(found) == pareto(every)
    assert len(found.points) < found.num_candidates and {point.rank for point in found.points} == {0, 1}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_pruned_is_not_on_the_front(seed: int) -> None:
    scenario = Scenario.of(architecture="qwen3-30b-a3b", num_layers=6)
    step = machine(seed, scenario)
    found = search(PLAIN, [scenario], predicting(step, 59 * GIB), 59 * GIB)
    wanted = candidates(PLAIN, scenario)
    records = [step(settings) for settings in wanted]
    every = [
        (r.peak_allocated_bytes, recomputed_operations(r.settings, scenario), transferred_bytes(r)) for r in records
    ]
    assert figures(found) == pareto(every)
    assert len(found.points) < len(wanted) == found.num_candidates
    coarse = search(PLAIN, [scenario], predicting(step, 59 * GIB), 59 * GIB, resolution_bytes=GIB // 4)
    assert len(coarse.front) < len(found.front) and len(coarse.points) < len(found.points)
    # Whatever a fine front offers, the coarse one has no heavier in work, and less than a quarter GiB above.
    for point in found.front:
        assert any(
            other.peak_allocated_bytes < point.peak_allocated_bytes + GIB // 4
            and all(a <= b for a, b in zip(other.work, point.work, strict=True))
            for other in coarse.front
        )


def test_candidates_are_allowed_have_an_effect_and_do_what_the_base_does() -> None:
    scenario = Scenario.of(architecture="qwen3-30b-a3b")
    wanted = candidates(PLAIN, scenario)
    assert wanted[0] == PLAIN and len(set(wanted)) == len(wanted)
    for settings in wanted:
        check_on_model(settings, scenario)
        assert without_effect.of_settings(settings, scenario.architecture) == {}
    assert {PLAIN, FULL, recompute("moe"), recompute("layernorm", "moe_act")} <= set(wanted)
    assert replace(offload("expert_fc1", "moe_act"), min_offloaded_tensor_size=1024**2) in wanted
    assert MemorySettings(offload_parameters=True) in wanted
    uniform = {s.recompute_num_layers for s in wanted if s.recompute_method == "uniform"}
    assert uniform == {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}
    assert {s.recompute_num_layers for s in wanted if s.recompute_method == "block"} == set(range(6, 48, 6))

    base = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=24)
    base = replace(base, checkpoint_input_remedy="detach", offload_modules=("moe_act",))
    more = candidates(base, scenario)
    assert {s.recompute_num_layers for s in more if s.recompute_method == "block"} == {24, 30, 36, 42}
    assert all("moe_act" in (s.offload_modules or ()) and s.checkpoint_input_remedy == "detach" for s in more)
    detached = candidates(MemorySettings(checkpoint_input_remedy="detach"), scenario)
    by_remedy = {checkpoints_moe_layers(s, scenario.architecture): s.checkpoint_input_remedy for s in detached[1:]}
    assert by_remedy == {True: "detach", False: None}

    small = Scenario.of(architecture="phi-4-tiny", seq_length=64)
    sizes = {s.min_offloaded_tensor_size for s in candidates(PLAIN, small) if s.offload_modules}
    assert sizes == {0}, "of a small model Megatron's default would move nothing"


@pytest.mark.parametrize("base", [PLAIN, recompute("layernorm"), MemorySettings(offload_modules=("qkv_linear",))])
@pytest.mark.parametrize("family", ["phi-4-tiny", "qwen3-moe-tiny"])
def test_one_addition_at_a_time_is_part_of_all_and_offload_starts_at_zero_elements_on_a_small_model(
    family: str, base: MemorySettings
) -> None:
    small = Scenario.of(architecture=family, seq_length=64)
    one_more, every = candidates(base, small, depth=1, with_remedy=True), candidates(base, small, with_remedy=True)
    assert one_more[0] == every[0] == base
    assert set(one_more) <= set(every)
    for settings in one_more[1:]:
        added = added_offload(settings, base)
        modules = set(settings.recompute_modules or ()) - set(base.recompute_modules or ())
        assert len(added) + len(modules) + (settings.recompute_granularity == "full") == 1
        assert settings.min_offloaded_tensor_size == 0 or not added, "Megatron's default would leave all on the device"
    assert any(added_offload(settings, base) for settings in one_more)
    large = candidates(base, Scenario.of(architecture="qwen3-30b-a3b"), depth=1)
    assert {settings.min_offloaded_tensor_size for settings in large} == {base.min_offloaded_tensor_size}


def test_every_number_of_first_layers_is_tried_on_request() -> None:
    scenario = Scenario.of(architecture="qwen3-30b-a3b")
    blocks = {
        s.recompute_num_layers for s in candidates(PLAIN, scenario, every_block=True) if s.recompute_method == "block"
    }
    assert blocks == set(range(1, 48))


def test_a_base_that_offloads_too_little_is_searched_without_estimates_of_its_own_modules() -> None:
    # Megatron's default size keeps the base's module on a small model's device; with 0 it is transferred as well.
    small = Scenario.of(architecture="phi-4-tiny", num_layers=2, seq_length=64)
    base = MemorySettings(offload_modules=("qkv_linear",))
    drawn = machine(0, small)

    def step(settings: MemorySettings) -> StepRecord:
        return drawn(settings if settings.min_offloaded_tensor_size == 0 else replace(settings, offload_modules=None))

    every = candidates(base, small)
    records = [replace(step(settings), settings=settings) for settings in every]
    rows = [(r.peak_allocated_bytes, recomputed_operations(r.settings, small), transferred_bytes(r)) for r in records]
    found = search(base, [small], predicting(AnsweredSteps(step), 59 * GIB), 59 * GIB)
    assert figures(found) == pareto(rows)


def test_a_stage_of_a_pipeline_counts_its_own_layers() -> None:
    scenario = Scenario.of(architecture="qwen3-30b-a3b", layout=Layout(pipeline_model_parallel_size=4, rank=3))
    whole = Scenario.of(architecture="qwen3-30b-a3b")
    assert scenario.num_layers_of_stage == 12
    assert recomputed_operations(FULL, scenario) * 4 == recomputed_operations(FULL, whole)
    assert {s.recompute_num_layers for s in candidates(PLAIN, scenario) if s.recompute_method == "uniform"} == {
        1, 2, 3, 4, 6, 12,
    }  # fmt: skip


def test_a_recomputed_share_is_that_of_six_operations_per_parameter_and_token() -> None:
    """Forward takes two operations per parameter and token, backward four; a short sequence has little attention."""
    scenario = Scenario.of(architecture="phi-4", seq_length=16)
    model = scenario.architecture
    of_output_layer = model.vocab_size * model.hidden_size
    of_layers = model.num_parameters - 2 * of_output_layer
    expected = 2 * of_layers / (6 * (of_layers + of_output_layer))
    assert recomputed_share(FULL, scenario) == pytest.approx(expected, rel=1e-3)
    first = replace(scenario, layout=Layout(pipeline_model_parallel_size=2))
    assert recomputed_share(FULL, first) == pytest.approx(1 / 3), "the first stage has no output layer"
    assert recomputed_share(PLAIN, scenario) == 0
    assert [share_text(share) for share in (0.0, 1e-5, 0.012, 1 / 3)] == ["0.0%", "<0.1%", "1.2%", "33.3%"]


def test_a_search_says_how_long_it_takes_at_least_and_at_most_and_what_is_the_best_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((0.0, 10.0, 20.0, 30.0))
    monkeypatch.setattr(search_workers.time, "monotonic", lambda: next(seconds))
    report = search_workers.progress_in_lines(search_workers.tell)
    points = [point(101, 0, 0, fits=False), point(90, 8, 0, layers=2), point(80, 9, 0, layers=3)]
    for number, (num_left, num_likely) in enumerate(((9, 9), (12, 3), (8, 0))):
        found = replace(search_of(*points[: number + 1]), num_left=num_left)
        report(points[number], found, lambda num_likely=num_likely: num_likely)
    first, second, third = capsys.readouterr().err.splitlines()
    assert [line.partition("; best so far: ")[2] for line in (first, second, third)] == ["", "'full block 2' fits", ""]
    assert first.startswith("1 predicted, at most 9 to go: ")
    assert "at most 12 to go, about 30 s to 2 min left: " in second
    assert "at most 8 to go, at most about 80 s left: " in third


def test_only_what_is_recomputed_costs_operations() -> None:
    mlp, norm = (
        MemorySettings(recompute_granularity="selective", recompute_modules=(name,)) for name in ("mlp", "layernorm")
    )
    moe, dense = (Scenario.of(architecture=name) for name in ("qwen3-30b-a3b", "phi-4"))
    assert recomputed_operations(mlp, moe) == recomputed_operations(norm, dense) == 0
    assert recomputed_operations(mlp, dense) == dense.num_layers * 3 * 2 * 5120 * 17920
    assert recomputed_operations(norm, moe) > 0
    uneven = Layout(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)
    one, three = (
        MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=count)
        for count in (1, 3)
    )
    first, last = (
        Scenario.of(architecture="phi-4", num_layers=4, layout=replace(uneven, rank=rank)) for rank in (0, 1)
    )
    assert recomputed_operations(three, first) == recomputed_operations(one, first)
    assert recomputed_operations(three, last) == 3 * recomputed_operations(one, last)


def point(peak_mib: int, operations: float, moved_mib: int, *, fits: bool = True, layers: int = 1) -> Point:
    settings = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=layers)
    return Point(
        settings=settings,
        peak_allocated_bytes=peak_mib * MIB,
        recomputed_operations=operations,
        transferred_bytes=moved_mib * MIB,
        host_bytes=moved_mib * MIB,
        verdict="fits" if fits else "does not fit",
    )


def search_of(*points: Point, room_mib: int = 100, resolution_mib: int = 10) -> SearchResult:
    return SearchResult(
        scenario=Scenario.of(architecture="qwen3-moe-tiny"),
        base=PLAIN,
        limit_bytes=room_mib * MIB,
        outside_torch_bytes=0,
        resolution_bytes=resolution_mib * MIB,
        points=points,
        num_candidates=len(points),
        num_pruned=0,
    )


def test_the_room_parts_what_fits_from_what_does_not() -> None:
    over, within = point(101, 0, 0, fits=False), point(99, 0, 1)
    assert search_of(over, within).front == (over, within), "2 MiB apart, and the room between them"
    assert search_of(over, within).cheapest == (within,)
    alike = point(92, 0, 2)
    assert search_of(within, alike).front == (within,), "7 MiB apart on one side: the cheaper one"
    in_pieces = point(95, 0, 0, fits=False)
    assert search_of(in_pieces, within).cheapest == (within,)
    assert search_of(in_pieces, within).front == (within, in_pieces)
    assert search_of(over).cheapest == ()


def test_the_verdict_comes_first_and_says_by_how_much_and_on_what_basis() -> None:
    may_fit = replace(point(99, 0, 1), verdict="may fit")
    assert search_of(may_fit).verdict == (
        "'full block 1' may fit 100.00 MiB, with 1.00 MiB to spare, not enough for \"fits\": the step may need more "
        "than predicted, and not every free byte can be used; based on a predicted "
        "step with balanced routing; on H200s, steps of models with experts needed up to 0.3% more than predicted "
        "(rounded up)"
    )
    surer = point(90, 5, 2, layers=2)
    assert "; 'full block 2' fits, with more extra work; based on" in search_of(may_fit, surer).verdict
    assert search_table(search_of(surer)).startswith(
        "'full block 2' fits 100.00 MiB, with 10.00 MiB to spare; based on"
    )
    assert search_of(surer).to_dict()["verdict"] == search_of(surer).verdict


def test_settings_that_were_not_predicted_are_counted_with_the_reason() -> None:
    text = " ".join(search_table(replace(search_of(point(90, 0, 1)), num_candidates=4, num_pruned=3)).split())
    assert "1 of 4 settings predicted" in text
    assert "3 not predicted: an estimate" in text
    assert "at least as good in peak, recompute and transfer" in text
    assert "not predicted" not in search_table(search_of(point(90, 0, 1)))


def test_a_step_may_fit_where_its_peak_is_within_the_limit_but_not_within_the_limit_less_the_measured_margin() -> None:
    for family, margin in (("qwen3-moe-tiny", MARGIN_WITH_EXPERTS), ("phi-4-tiny", MARGIN_WITHOUT_EXPERTS)):
        record = record_of(None, scenario=Scenario.of(family), peak_allocated_bytes=GIB)
        limits = (GIB - 1, GIB, int(GIB * (1 + margin.share)) - 2, int(GIB * (1 + margin.share)) + 2)
        found = [judge(record, NO_OTHER, limit) for limit in limits]
        assert found == ["does not fit", "may fit", "may fit", "fits"]
        on_cpu = [judge(replace(record, backend="cpu"), NO_OTHER, limit) for limit in limits]
        assert on_cpu == ["does not fit", "fits", "fits", "fits"], "the margin was measured on GPUs"


def test_the_margin_is_wider_where_experts_are_spread_and_micro_batches_follow_each_other() -> None:
    spread = Layout(expert_model_parallel_size=2, data_parallel_size=2)
    margins = [
        measured_margin(Scenario.of("qwen3-moe-tiny", layout=layout, num_microbatches=number))
        for layout, number in ((Layout(), 3), (spread, 1), (spread, 3))
    ]
    assert margins == sorted(set(margins))
    state = TrainingState(model_classes="automodel", moe_token_dispatcher_type="allgather")
    fsdp2 = Scenario.of("qwen3-moe-tiny", engine="fsdp2", layout=spread, num_microbatches=3, state=state)
    assert measured_margin(fsdp2) == margins[-1], "under FSDP2 no limit with spread experts was measured"
    assert needs_whole_reserve(fsdp2)
    assert not needs_whole_reserve(replace(fsdp2, layout=Layout(data_parallel_size=2), state=TrainingState()))


def test_a_step_fits_only_with_all_fp8_gathers_that_torch_may_keep() -> None:
    job = Scenario.of("phi-4-tiny")
    record = record_of(None, scenario=job, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, kept_gather_bytes=MIB)
    needed = int((GIB + MIB) * (1 + MARGIN_WITHOUT_EXPERTS.share)) + 2
    limits = (GIB - 1, GIB, needed - 4, needed)
    steps = AnsweredSteps(lambda _: pytest.fail("no other step is needed"), lambda *_: True)
    verdicts = [judge(record, steps, limit) for limit in limits]
    assert verdicts == ["does not fit", "may fit", "may fit", "fits"]


def test_a_step_fits_only_with_all_that_waiting_blocks_may_add() -> None:
    record = record_of(
        None, scenario=Scenario.of("phi-4-tiny"), peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, late_free_bytes=MIB
    )
    needed = int((GIB + MIB) * (1 + MARGIN_WITHOUT_EXPERTS.share)) + 2
    steps = AnsweredSteps(lambda _: pytest.fail("no other step is needed"), lambda *_: True)
    verdicts = [judge(record, steps, limit) for limit in (GIB - 1, GIB, needed - 4, needed)]
    assert verdicts == ["does not fit", "may fit", "may fit", "fits"]


def test_a_verdict_names_the_reserved_bytes_where_they_decide() -> None:
    """With several micro-batches the step is sure to complete only with all that torch reserves without a limit."""
    job = Scenario.of("phi-4-tiny", num_microbatches=2)
    record = record_of(None, scenario=job, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB + 100 * MIB)
    steps = AnsweredSteps(lambda _: pytest.fail("no other step is needed"), lambda *_: True)
    certain = round((GIB + 100 * MIB) * (1 + MARGIN_WITHOUT_EXPERTS.share))
    outside = estimate_outside_torch(job.layout).total_bytes
    for limit_bytes, verdict, decides in (
        (GIB + 1, "may fit", False),
        (GIB + 50 * MIB, "may fit", True),
        (certain - 1, "may fit", True),
        (certain + 2 * MIB, "fits", True),
    ):
        fit = judge_fit(record, steps, limit_bytes + outside)
        assert (fit.verdict, fit.certain_bytes == certain) == (verdict, decides), limit_bytes
        assert (f"sure to complete with {format_bytes(certain)}" in str(fit)) == decides
        assert (f"needed more: {format_bytes(2 * MIB)} to spare even so" in str(fit)) == (verdict == "fits")


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_verdict_names_the_gathers_that_torch_may_keep(recipe: str) -> None:
    state, over_ranks = TrainingState(fp8_format="e4m3", fp8_recipe=recipe), Layout(tensor_model_parallel_size=2)
    assert "may keep of FP8 gathers" in basis_of(Scenario.of("phi-4", layout=over_ranks, state=state))
    frees_them = {"layout": over_ranks, "state": state, "versions": Versions(torch="2.14")}
    for without in ({"state": state}, {"layout": over_ranks}, frees_them):
        assert "gathers" not in basis_of(Scenario.of("phi-4", **without))


def test_a_verdict_that_more_memory_outside_torch_would_change_says_so() -> None:
    job = Scenario.of("phi-4-tiny", layout=Layout(data_parallel_size=2))
    outside = estimate_outside_torch(job.layout)
    record = record_of(None, scenario=job, peak_allocated_bytes=GIB, static_bytes=GIB // 2)

    def judged(gpu_memory_bytes: int) -> Fit:
        return judge_fit(record, NO_OTHER, gpu_memory_bytes)

    between = judged((outside.total_bytes + outside.most_bytes) // 2 + GIB)
    assert (between.verdict, between.verdict_with_most_outside) == ("fits", "does not fit")
    short = format_bytes(outside.most_bytes - (outside.total_bytes + outside.most_bytes) // 2)
    most = (
        f"; does not fit if they take {format_bytes(outside.most_bytes)}, the most that is likely: short by {short} of "
        "allocated bytes; "
    )
    assert f" if CUDA and NCCL take {format_bytes(outside.total_bytes)}, as expected, with " in f"{between}"
    assert most in f"{between}"
    roomy = judged(outside.most_bytes + 2 * GIB)
    assert roomy.verdict == roomy.verdict_with_most_outside == "fits" and "the most that is likely" not in str(roomy)


def test_the_two_kinds_of_work_are_not_mixed() -> None:
    recomputes, moves, both = point(90, 5.0, 0), point(90, 0, 5, layers=2), point(90, 5.0, 5, layers=3)
    found = search_of(recomputes, moves, both)
    assert set(found.front) == {recomputes, moves}
    assert found.cheapest == (moves, recomputes)
    assert SearchResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_command_prints_what_single_steps_give(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "front.html"
    room = [f"--gpu-memory={OUTSIDE_BYTES + GIB}B", "--max-steps", "4"]
    assert main(["search", *TINY, *room, "--json", "--out", str(page)]) == 0
    printed, told = capfd.readouterr()
    found = json.loads(printed)
    assert len(found["points"]) == 4 and found["num_left"] > 0 and "at most" in told
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        for one in found["points"]:
            record = lab.step(MemorySettings.from_dict(one["settings"]))
            assert one["peak_allocated_bytes"] == record.peak_allocated_bytes
    assert found["points"][0]["on_front"] and found["points"][0]["is_cheapest"]
    assert "CUT SHORT" in page.read_text() and "Plotly.newPlot" in page.read_text()
    assert main(["search", *TINY, *room, "--out", str(page)]) == 2
    assert "which already exists: choose another file or remove it" in capfd.readouterr().err


@pytest.mark.parametrize(("free_bytes", "end"), [(MIB, ": no predicted setting fits"), (GIB, "")])
def test_the_command_says_first_what_no_setting_changes(
    capfd: pytest.CaptureFixture[str], free_bytes: int, end: str
) -> None:
    outside_bytes = estimate_outside_torch(Layout(pipeline_model_parallel_size=2)).total_bytes
    split = ["--pipeline-model-parallel-size", "2", "--world-size", "2", "--num-microbatches", "2", "--alone"]
    main(["search", *TINY, *split, "--engines", "1", f"--gpu-memory={outside_bytes + free_bytes}B", "--json"])
    printed, told = capfd.readouterr()
    first, second, *_ = told.splitlines()
    found = re.match(
        r"under all settings, .* of rank (\d) take at least (\S+) MiB .*; torch may hold \S+ \S+?(: .*)?$", first
    )
    assert found is not None and (found[3] or "") == end
    least, peaks = float(found[2]) * MIB, [point["peak_allocated_bytes"] for point in json.loads(printed)["points"]]
    assert MIB < least <= min(peaks)
    assert second.startswith("rank 0 alone: none: ") and "rank 1 alone" not in told


def test_the_command_ranks_each_setting_alone(capfd: pytest.CaptureFixture[str]) -> None:
    room = [f"--gpu-memory={OUTSIDE_BYTES + GIB}B", "--alone", "--engines", "1"]
    assert main(["search", *TINY, *room, "--json"]) == 0
    points = json.loads(capfd.readouterr().out)["points"]
    assert main(["search", *TINY, *room]) == 0
    *before, table, note = capfd.readouterr().out.split("\n\n")
    assert before[0].startswith("'none' fits ")
    rows = table.splitlines()[-len(points) :]
    shown = [[float(value) for value in re.findall(r"-?\d+\.\d\d(?= )", row)][:2] for row in rows]
    assert note.startswith("host copies: bytes per step; memlab does not know how fast the link to the host is")
    peaks = sorted(point["peak_allocated_bytes"] for point in points)
    plain = points[0]["peak_allocated_bytes"]
    assert shown == [[round(peak / MIB, 2), round((plain - peak) / MIB, 2)] for peak in peaks]
    room[0] = f"--gpu-memory={OUTSIDE_BYTES + MIB}B"
    assert main(["search", *TINY, *room]) == 1
    assert capfd.readouterr().out.startswith("no setting alone fits: search combinations, without --alone")
    assert main(["search", *TINY, *room, "--max-steps", "2"]) == 1
    assert capfd.readouterr().out.startswith("nothing that was tried fits: predict more settings, or search ")


def test_where_nothing_fits_it_says_what_is_missing_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *TINY, f"--gpu-memory={OUTSIDE_BYTES + MIB}B", "--max-steps", "2"]) == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert (
        printed.startswith("nothing that was tried fits: ")
        and "predict more settings; search again with 'optimizer on host except update'; or take more devices"
        in printed
    )


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("", "the following arguments are required: --gpu-memory"),
        (
            "--gpu-memory 2GiB",
            "--gpu-memory is 2.000 GiB, must be more than the 2.424 GiB that CUDA and its libraries take",
        ),
        ("--gpu-memory 80GiB --max-steps 0", "--max-steps is 0, must be at least 1"),
        ("--gpu-memory 80GiB --alone --largest tokens", "--alone cannot be combined with --largest"),
        ("--gpu-memory 80GiB --alone --gpus 8", "--alone cannot be combined with --gpus"),
        ("--gpu-memory 80GiB --rank every", "'every' is not a whole number"),
        ("--gpu-memory 80GiB --out front.png", "--out is front.png, must be a file that ends in .html"),
        ("--gpu-memory 80GiB --offload-modules attn_proj", "offload_modules has 'attn_proj' without 'core_attn'"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(flags: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *TINY, *flags.split()]) == 2
    printed, complaint = capfd.readouterr()
    assert printed == ""
    assert refusal in complaint and complaint.count("\n") == 1


def test_a_search_in_the_background_ends_in_what_it_found() -> None:
    def run(scenario: Scenario, **changes: Any) -> tuple[list[str], SearchResult | str]:
        lines: list[str] = []
        ended: list[SearchResult | str] = []
        BackgroundSearch(
            scenario, PLAIN, GIB, resolution_bytes=MIB, on_line=lines.append, on_end=ended.append, **changes
        ).wait()
        return lines, ended[0]

    lines, found = run(Scenario.of(architecture="phi-4-tiny", num_layers=1, seq_length=32))
    assert isinstance(found, SearchResult) and found.cheapest[0].settings == PLAIN
    assert len(lines) == len(found.points)
    _, on_cpu = run(Scenario.of(architecture="phi-4-tiny", num_layers=1, seq_length=32), backend="cpu")
    with Lab("phi-4-tiny", num_layers=1, seq_length=32, backend="cpu") as lab:
        measured = lab.step().peak_allocated_bytes
    assert isinstance(on_cpu, SearchResult)
    # Counters of a few bytes are not predicted; a GPU's workspaces alone are several times the step.
    assert on_cpu.points[0].peak_allocated_bytes == pytest.approx(measured, rel=1e-3)


def test_a_search_in_the_background_that_is_stopped_keeps_what_it_found() -> None:
    ended: list[SearchResult | str] = []
    scenario = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)

    def stop_at_the_second(line: str) -> None:
        if line.startswith("2 predicted"):
            found.stop()

    found = BackgroundSearch(
        scenario, PLAIN, MIB, resolution_bytes=MIB, on_line=stop_at_the_second, on_end=ended.append
    )
    found.wait()
    assert isinstance(ended[0], SearchResult)
    assert len(ended[0].points) >= 2 and ended[0].num_left > 0


def test_ctrl_c_during_a_search_ends_its_wait_and_nothing_that_may_hold_a_lock() -> None:
    future = Future[int]()
    looks: list[bool] = []

    def interrupt_and_wait(after_seconds: float, *, waits: bool = True) -> None:
        with _interrupted_while_waiting() as wait_for_one:
            if after_seconds:
                threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                os.kill(os.getpid(), signal.SIGINT)
                looks.extend(future.done() for _ in range(100))  # each takes the lock of the future
            if waits:
                wait_for_one({future})

    with pytest.raises(KeyboardInterrupt):
        interrupt_and_wait(0)
    assert looks == [False] * 100
    with pytest.raises(KeyboardInterrupt):
        interrupt_and_wait(0, waits=False)
    with pytest.raises(KeyboardInterrupt):
        interrupt_and_wait(0.2)
    future.set_result(1)
    with _interrupted_while_waiting() as wait_for_one:
        wait_for_one({future})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_setting_alone_begins_with_what_saves_most_and_what_does_without_its_kind_of_work() -> None:
    scenario, limit_bytes = Scenario.of(architecture="qwen3-moe-tiny"), 59 * GIB
    alone = search(PLAIN, [scenario], predicting(machine(1, scenario), limit_bytes), limit_bytes, alone=True)
    base = replace(alone.points[0], peak_allocated_bytes=100 * MIB, recomputed_operations=0, transferred_bytes=0)

    def lines(*others: tuple[MemorySettings, int, int, int]) -> list[str]:
        points = [
            replace(
                base,
                settings=settings,
                peak_allocated_bytes=peak * MIB,
                recomputed_operations=operations,
                transferred_bytes=copied * MIB,
            )
            for settings, peak, operations, copied in others
        ]
        return most_saved_lines(replace(alone, points=(base, *points)))

    first, second, third = offload("core_attn"), offload("moe_act"), recompute("moe")
    share = share_text(alone.recomputed_share(replace(base, settings=third)))
    most = "'offload core_attn' saves most: 40.00 MiB (40%); it copies 30.00 MiB to the host and back"
    assert lines((first, 60, 0, 30), (second, 70, 0, 5), (third, 80, 9, 0)) == [
        most,
        f"without extra copies, 'recompute moe' saves most: 20.00 MiB (20%); it recomputes {share} of a step",
    ]
    assert lines((first, 60, 0, 30), (second, 90, 0, 5)) == [most], "nothing saves without copies"
    (free,) = lines((first, 60, 0, 0), (third, 70, 9, 0))
    assert free.endswith("; it needs no extra recompute and no extra copies")
    assert lines((first, 100, 0, 30)) == ["no setting alone lowers the peak of 'none'"]


@pytest.mark.parametrize(
    ("free", "at_most", "number"),
    [(9 * GIB, 99, 4), (9 * GIB, 3, 3), (9 * GIB, 0, 1), (GIB, 99, 1), (99 * GIB, 99, 16)],
)
def test_processes_of_a_search_leave_half_of_the_free_host_memory_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: int, at_most: int, number: int
) -> None:
    monkeypatch.setattr(search_workers, "num_cores", lambda: 16)
    monkeypatch.setattr(search_workers, "free_host_memory_bytes", lambda: free)
    with open_workers(at_most=at_most) as workers:
        assert len(workers._processes) == number
    wanted = max(1, min(16, at_most))
    said = f"only {number} of {wanted} processes predict: {format_bytes(free)} of host memory are free, of which they"
    told = capsys.readouterr().err
    assert (said in told) == (number < wanted) == bool(told), told


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (
            False,
            r"^The search ended \(none cannot be predicted: lost 3 times: engine .* was ended by signal 9 .*\): change",
        ),
        (True, "^Stopped: search again, or choose settings by hand.$"),
    ],
)
def test_a_search_in_the_background_whose_processes_die_or_that_is_stopped_at_once_says_so(
    stops: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_workers, "SERVED", f"tests.unit.served_calls:{'Slow' if stops else 'Mortal'}")
    ended: list[SearchResult | str] = []
    scenario = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    running = BackgroundSearch(scenario, PLAIN, GIB, resolution_bytes=MIB, on_line=str, on_end=ended.append)
    if stops:
        running.stop()
    running.wait()
    assert isinstance(ended[0], str) and re.match(words, ended[0]), ended


def test_the_end_of_a_search_is_reported_once_even_if_its_progress_could_not_be() -> None:
    def fail(line: str) -> None:
        raise RuntimeError(f"no widget for {line[:1]}")

    ended: list[SearchResult | str] = []
    scenario = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    BackgroundSearch(scenario, PLAIN, GIB, resolution_bytes=MIB, on_line=fail, on_end=ended.append).wait()
    assert ended == ["The search was lost (RuntimeError: no widget for 1): search again."]


def test_processes_find_what_one_process_finds_and_judge_every_kind_of_rank_even_if_one_is_killed() -> None:
    layout = Layout(pipeline_model_parallel_size=2)
    job = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=32, num_microbatches=2, layout=layout)
    scenarios = [replace(job, layout=replace(layout, rank=rank)) for rank in job.ranks_of_every_kind]
    options: dict[str, Any] = {"resolution_bytes": 1, "max_steps": 6}
    with open_workers(1) as workers:
        alone = front_of(PLAIN, scenarios, workers, GIB, **options)
    assert alone.ranks == (0, 1) and len(alone.points) == 6
    with Lab(scenarios[alone.points[0].rank], backend="simulated") as lab:
        assert lab.step().peak_allocated_bytes == alone.points[0].peak_allocated_bytes
    with open_workers(2) as workers:
        waiting = threading.Timer(0.1, kill_a_process)
        waiting.start()
        together = front_of(PLAIN, scenarios, workers, GIB, **options)
    assert together == alone


def test_an_error_in_a_step_that_is_predicted_ahead_is_that_of_this_step_alone_and_is_told_each_time_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnlyPlain:
        def predict(self, scenario: Scenario, settings: MemorySettings, *_: object) -> str:
            if settings != PLAIN:
                raise ValueError(f"no {settings}")
            return "predicted"

        def close(self) -> None: ...

    monkeypatch.setattr(search_workers, "Predictor", OnlyPlain)
    job = Scenario.of("phi-4-tiny")
    other = replace(job, seq_length=64)
    with open_workers(1) as workers:
        assert workers.predict(other, PLAIN, GIB) == "predicted"
        ahead = Step(other, FULL, GIB)  # of the same scenario as the last step, so it is predicted first
        assert workers.predict(job, PLAIN, GIB, lambda: iter([ahead]), num_scenarios=2) == "predicted"
        assert workers.known(*ahead) is None
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^no full"):
                workers.predict(*ahead)


def test_the_remaining_time_is_that_of_as_many_steps_as_are_left() -> None:
    assert remaining(20.0, 10, 30) == ", about 60 s left"
    assert remaining(100.0, 10, 30) == ", about 5 min left"
    assert remaining(8.0, 1, 30) == remaining(20.0, 10, 0) == ""


def kill_a_process() -> None:
    """Kills one process of a search as soon as there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            for process in child.children():
                process.kill()
                return
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_and_a_time_limit_show_what_was_found_until_then(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "memlab", "search", "qwen3-moe-tiny", "--num-layers", "4", "--seq-length", "64"]
    command += ["--gpu-memory", "8GiB", "--resolution", "1B", "--engines", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("3 predicted"):
            assert process.poll() is None
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        table, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert started and not psutil.wait_procs(started, timeout=10)[1], "engines end with the search"
    assert "these settings fit with the least extra work" in table and "CUT SHORT" in table
    assert "Traceback" not in complaint


@pytest.mark.parametrize("of_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_a_request_to_terminate_ends_a_search_as_ctrl_c_does(of_ctrl_c: Any) -> None:
    handlers = signal.signal(signal.SIGINT, of_ctrl_c), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), terminated_as_by_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, handlers[0])
    assert signal.getsignal(signal.SIGTERM) == handlers[1]


def test_a_search_in_another_thread_leaves_signals_alone() -> None:
    def search() -> Any:
        with terminated_as_by_ctrl_c():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(search).result() == signal.getsignal(signal.SIGTERM)


def test_a_step_with_a_limit_starts_in_a_process_of_its_own() -> None:
    # What a step without a limit has reserved is in pieces: within it, a later step would seem to need more.
    scenario = Scenario.of(architecture="phi-4-tiny", num_layers=1, seq_length=512)
    with stepping(scenario) as steps:
        unlimited = steps(PLAIN)
        reserved = unlimited.peak_reserved_bytes
        assert reserved is not None
        limit = (unlimited.peak_allocated_bytes + reserved) // 2
        after_others = steps(PLAIN, limit)
        again = steps(PLAIN)
    with stepping(scenario) as steps:
        alone = steps(PLAIN, limit)
    assert (after_others.status, after_others.peak_reserved_bytes) == (alone.status, alone.peak_reserved_bytes)
    assert again.peak_reserved_bytes == reserved


@pytest.mark.parametrize(
    "allocator",
    [
        AllocatorSettings(),
        AllocatorSettings(expandable_segments=True),
        pytest.param(AllocatorSettings(max_split_size_mb=21), marks=pytest.mark.slow),
        AllocatorSettings(garbage_collection_threshold=0.8),
    ],
    ids=["default", "expandable", "whole blocks", "collected"],
)
def test_the_requests_of_a_step_complete_within_a_limit_if_and_only_if_a_step_with_the_limit_does(
    allocator: AllocatorSettings,
) -> None:
    offloads = replace(offload("qkv_linear", "core_attn"), min_offloaded_tensor_size=0)
    scenario = Scenario.of("phi-4-tiny", num_layers=2, seq_length=1024, allocator=allocator)
    answers = set()
    with stepping(scenario) as steps:
        for settings in (PLAIN, FULL, offloads):
            record, requests = steps(settings), steps.requests
            assert requests is not None and record.peak_reserved_bytes is not None
            peak, tried = record.peak_allocated_bytes, record.peak_reserved_bytes - record.peak_allocated_bytes
            said = {peak + tried * part // 64: False for part in range(65)}
            said = {limit: requests.completes_within(limit) for limit in said}
            # A step is taken on each side of every change of the answer, and at both ends.
            changes = [pair for pair in pairwise(said) if said[pair[0]] != said[pair[1]]]
            for limit in sorted({min(said), max(said), *chain(*changes)}):
                completes = steps(settings, limit).status == "ok"
                assert said[limit] == completes, f"{settings} within {limit}"
                answers.add(completes)
    assert answers == {True, False}


def test_a_record_of_other_steps_is_judged_by_a_step_of_its_own() -> None:
    scenario = Scenario.of(architecture="phi-4-tiny", num_layers=1, seq_length=512)
    with stepping(scenario) as steps:
        record = steps(PLAIN)
        assert record.peak_reserved_bytes is not None
        # Each limit takes a step below. Only the last one is enough.
        limits = [record.peak_allocated_bytes, record.peak_reserved_bytes - MIB, record.peak_reserved_bytes]
        own = [steps.completes(record, limit) for limit in limits]
        steps(FULL)
        assert [steps.completes(record, limit) for limit in limits] == own and True in own and False in own
        again = steps(PLAIN)
        with pytest.raises(ValueError, match="moe"):
            steps(MemorySettings(recompute_granularity="selective", recompute_modules=("moe",)))
        # The refused step has sent no requests, which complete within any limit.
        assert [steps.completes(again, limit) for limit in limits] == own


def test_ctrl_c_before_anything_was_found_is_no_search() -> None:
    def interrupted(settings: MemorySettings) -> StepRecord:
        raise KeyboardInterrupt

    scenario = Scenario.of(architecture="phi-4-tiny", num_layers=2, seq_length=64)
    with pytest.raises(KeyboardInterrupt) as error:
        search(PLAIN, [scenario], predicting(AnsweredSteps(interrupted), GIB), GIB)
    assert not isinstance(error.value, SearchInterrupted)


def test_a_search_of_each_setting_alone_changes_one_thing_and_leaves_none_out() -> None:
    scenario = Scenario.of(architecture="qwen3-moe-tiny")
    found = search(PLAIN, [scenario], predicting(machine(1, scenario), GIB), GIB, alone=True)
    assert found.num_pruned == found.num_left == 0 and found.points[0].settings == PLAIN
    modules = [*(point.settings.recompute_modules or () for point in found.points)]
    assert max(map(len, modules)) == 1
    assert all(len(point.settings.offload_modules or ()) <= 1 for point in found.points)
    names = {f"{point.settings}" for point in found.points}
    assert {"full uniform 1", "optimizer on host except update"} <= names
    assert not [
        point for point in found.points if point.settings.offload_modules and point.settings.recompute_granularity
    ]
