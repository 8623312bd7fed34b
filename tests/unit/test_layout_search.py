"""The search through layouts: what it leaves out does not fit, and what it shows is what single predictions give."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from memlab import Lab
from memlab.cli import main
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting import layouts
from memlab.fitting.candidates import candidates
from memlab.fitting.does_it_fit import Verdict
from memlab.fitting.layouts import (
    SIZES,
    FittingLayout,
    Known,
    LayoutSearch,
    LayoutSearchInterrupted,
    Step,
    deciding_ranks,
    layouts_of,
    search_layouts,
)
from memlab.fitting.least_peak import bytes_at_peak, least_peak_bytes, least_peak_with
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.prediction import Prediction
from memlab.lab.search_steps import Predictor, stepping
from memlab.units import GIB, MIB
from memlab.views.text.layouts import layouts_table
from tests.unit.inside import inside

PLAIN = MemorySettings()
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = MemorySettings(recompute_granularity="selective", recompute_modules=("moe",))
STATES = (TrainingState(), TrainingState(grad_reduce_in_bf16=True, use_precision_aware_optimizer=True))


def job_of(family: str, num_gpus: int) -> Scenario:
    return Scenario.of(family, num_layers=2, seq_length=64, layout=Layout(data_parallel_size=num_gpus))


@pytest.mark.parametrize(("family", "state"), [("phi-4-tiny", STATES[0]), ("qwen3-moe-tiny", STATES[1])])
def test_a_rank_never_needs_less_than_what_a_layout_is_left_out_by(family: str, state: TrainingState) -> None:
    every = layouts_of(replace(job_of(family, 4), state=state), {})
    most = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    for job in every[:: len(every) // 3]:
        last = job.layout.world_size - 1
        with stepping(replace(job, layout=replace(job.layout, rank=last))) as step:
            record = step(most, None)
        peak = record.peak_allocated_bytes - record.peak_by_category["workspace"]
        assert peak / 4 < least_peak_bytes(job, PLAIN) <= peak, job


def test_the_first_or_the_last_stage_needs_the_most() -> None:
    layout = Layout(pipeline_model_parallel_size=4)
    job = Scenario.of("phi-4-tiny", num_layers=4, seq_length=32, num_microbatches=4, layout=layout)
    assert [one.layout.rank for one in deciding_ranks(job)] == [0, 3]
    peaks = {}
    for rank in job.ranks_of_every_kind:
        with stepping(replace(job, layout=replace(layout, rank=rank))) as step:
            peaks[rank] = step(PLAIN, None).peak_allocated_bytes
    assert len(peaks) == 4 and max(peaks[1], peaks[2]) < min(peaks[0], peaks[3])
    uneven = replace(job, num_layers=5, layout=replace(layout, num_layers_in_first_pipeline_stage=2))
    assert len(deciding_ranks(uneven)) == 4, "the middle may need more"


def test_with_adapters_a_stage_in_the_middle_may_need_the_most() -> None:
    layout = Layout(pipeline_model_parallel_size=3)
    state = TrainingState(lora=LoRA(target_modules=("*.layers.3.*.linear_qkv",)))
    sizes = {"num_layers": 12, "seq_length": 512, "num_microbatches": 3}
    job = Scenario.of("qwen2.5-0.5b", layout=layout, state=state, **sizes)
    peaks = []
    for rank in range(3):
        with stepping(replace(job, layout=replace(layout, rank=rank))) as step:
            record = step(PLAIN, None)
            peaks.append(record.peak_allocated_bytes - record.static_bytes)
    assert peaks[0] < peaks[1], "the first stage keeps nothing of its layers before the first adapter"
    assert [one.layout.rank for one in deciding_ranks(job)] == [0, 1, 2]


def test_whole_sequences_stay_whole_in_every_layout() -> None:
    given = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    every = layouts_of(job_of("qwen2.5-tiny", 4), given)
    assert every and not any(one.layout.sequence_parallel for one in every)


@pytest.mark.parametrize(
    ("layout", "kind", "expected"),
    [
        (Layout(pipeline_model_parallel_size=2), "send", 2 * 64 * 128 * 2),  # the first stage: forward only
        # Of keys and values of 2 query groups: once in forward, and twice in backward, with the gradients.
        (Layout(context_parallel_size=2), "send", 3 * (2 * 32 * 2 * 32 * 2) * 2 * 2),
        # Half of two copies of each token to the other rank and back, in forward and in backward, and as many
        # probabilities (fp32) there and back.
        (Layout(expert_model_parallel_size=2, data_parallel_size=2), "all-to-all", 64 * (4 * 128 * 2 + 2 * 4) * 2 * 2),
    ],
    ids=["PP2", "CP2", "EP2"],
)
def test_what_a_rank_sends_is_what_it_has_that_others_need(layout: Layout, kind: str, expected: int) -> None:
    job = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=64, num_microbatches=2, layout=layout)
    assert sent_in_a_step(job, PLAIN)[kind] == expected


def sent_in_a_step(job: Scenario, settings: MemorySettings, *, replay: bool = True) -> dict[str, int]:
    with Lab(job, backend="simulated", replay=replay) as lab:
        lab.step(settings)
        return lab.sent_bytes


@pytest.mark.parametrize(
    ("family", "layout", "num_microbatches", "settings"),
    [
        ("phi-4-tiny", Layout(context_parallel_size=2, data_parallel_size=2), 1, PLAIN),
        ("qwen3-moe-tiny", Layout(tensor_model_parallel_size=2, context_parallel_size=2), 2, FULL),
        ("qwen3-moe-tiny", Layout(expert_model_parallel_size=2, data_parallel_size=2), 2, MOE),
        # Micro-batches are inserted.
        ("qwen3-moe-tiny", Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 7, PLAIN),
        ("qwen3-moe-tiny", Layout(context_parallel_size=2, pipeline_model_parallel_size=2, rank=3), 7, MOE),
    ],
)
def test_replayed_passes_send_what_stepped_ones_do(
    family: str, layout: Layout, num_microbatches: int, settings: MemorySettings
) -> None:
    # As many as it takes until a stage replays layers, also where it recomputes some of them.
    num_layers = 6 if layout.pipeline_model_parallel_size > 1 else 4
    job = Scenario.of(family, num_layers=num_layers, seq_length=64, num_microbatches=num_microbatches, layout=layout)
    assert sent_in_a_step(job, settings) == sent_in_a_step(job, settings, replay=False)


def test_a_prediction_says_what_the_rank_sends_whatever_was_predicted_before_it() -> None:
    layout = Layout(expert_model_parallel_size=2, data_parallel_size=2)
    job = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=64, num_microbatches=2, layout=layout)
    predictor = Predictor()
    predicted = {settings: predictor.predict(job, settings, GIB) for settings in (MOE, PLAIN, FULL)}
    predictor.close()
    for settings, prediction in predicted.items():
        assert prediction.communicated_bytes == sent_in_a_step(job, settings), settings


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_step_of_a_lab_sends_as_much_if_passes_updates_or_the_whole_step_are_repeated(overlaps: bool) -> None:
    sent: dict[bool, list[Counter[str]]] = {False: [], True: []}
    layout = Layout(data_parallel_size=2, context_parallel_size=2)
    state = TrainingState(overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)
    arguments: dict[str, Any] = {"num_layers": 6, "seq_length": 64, "layout": layout, "state": state}
    for replay, of_steps in sent.items():
        with Lab("phi-4-tiny", **arguments, backend="simulated", replay=replay) as lab:
            stepper: Any = inside(lab).stepper
            for settings in (PLAIN, PLAIN, FULL, FULL, FULL):
                lab.step(settings, warm_up=False)
                of_steps.append(stepper.sent_bytes)
    assert sent[True] == sent[False]
    gathered = [of_step["all-gather"] for of_step in sent[True]]
    assert (gathered[0] == gathered[1]) != overlaps, "the first step gathers no parameters before its passes"


def test_every_layout_keeps_the_ranks_and_the_sequences_of_a_step() -> None:
    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16), num_microbatches=2)
    every = layouts_of(job, {})
    assert len({str(one.layout) for one in every}) == len(every) > 100
    assert {one.layout.world_size for one in every} == {16}
    assert {one.tokens_per_step for one in every} == {job.tokens_per_step}
    assert every[0].layout == replace(job.layout, expert_tensor_parallel_size=1)
    assert {one.layout.tensor_model_parallel_size for one in every} == {1, 2, 4, 8}, "8 ranks share 4 query groups"
    given = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8}
    assert {one for one in every if one.layout.tensor_model_parallel_size == 2} >= set(layouts_of(job, given))


def predicted_by_size(step: Step) -> Prediction:
    """A model of steps: tensor parallelism and recompute lower the peak, the last stage is the worst."""
    layout, full = step.rank.layout, step.settings.recompute_granularity == "full"
    share = 1 if step.settings.recompute_granularity is None else 2
    peak = 96 * GIB // layout.tensor_model_parallel_size // (4 if full else share)
    peak += 2 * GIB * layout.pipeline_stage
    return Prediction(
        rank=layout.rank,
        peak_allocated_bytes=peak,
        peak_range=PeakRange.exactly(peak),
        peak_reserved_bytes=peak,
        start_bytes=0,
        transferred_bytes=0,
        host_bytes=0,
        verdict="fits" if peak <= step.limit_bytes else "does not fit",
        without_effect=frozenset(),
    )


def test_the_cheapest_layout_recomputes_least_and_is_no_larger_than_another() -> None:
    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16))
    asked: list[Step] = []

    def predict(step: Step) -> Prediction:
        asked.append(step)
        return predicted_by_size(step)

    found = search_layouts(job, {}, PLAIN, 70 * GIB, predict)
    best = found.fitting[0]
    assert (best.layout.tensor_model_parallel_size, best.settings, best.recomputed_share) == (2, PLAIN, 0.0)
    assert found.verdict.startswith(f"{best.layout} with 'none' fits 16 GPUs of 70.000 GiB, with ")
    recomputing = [one for one in found.fitting if one.settings != PLAIN]
    assert recomputing and all(one.layout.tensor_model_parallel_size == 1 for one in recomputing)
    assert 0 < min(one.recomputed_share for one in recomputing) < 1, "one module is enough"
    counts = (len(found.fitting), found.num_too_large, found.num_not_fitting, found.num_no_better)
    assert sum(counts) == found.num_layouts and min(counts[0], counts[1], counts[3]) > 0
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == found.verdict
    doubtful = replace(found, fitting=(replace(best, verdict="may fit"), *found.fitting[1:]))
    assert f" rules: {counts[0] - 1} fit, 1 may fit; " in " ".join(layouts_table(doubtful).split())
    failed = {step.rank.layout for step in asked if not predicted_by_size(step).fits}
    plain = [step.rank for step in asked if step.settings == PLAIN]
    of_jobs = {replace(layout, rank=0) for layout in failed}
    assert all(sum(replace(rank.layout, rank=0) == one for rank in plain) == 1 for one in of_jobs), (
        "the first rank that does not fit decides"
    )


def test_a_layout_that_is_likely_to_fit_is_tried_first_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16))
    reported: list[FittingLayout | None] = []
    keep = lambda job, found, num_left: reported.append(found)  # noqa: E731
    found = search_layouts(job, {}, PLAIN, 70 * GIB, predicted_by_size, on_layout=keep)
    first = reported[0]
    assert first is not None and first.verdict == "fits" and first.settings == PLAIN
    assert first not in found.fitting, "others that are no larger fit too"
    monkeypatch.setattr(layouts, "_surest_first", lambda searches, base: searches)
    assert search_layouts(job, {}, PLAIN, 70 * GIB, predicted_by_size) == found


def test_steps_that_are_predicted_ahead_are_asked_for_and_change_nothing() -> None:
    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16))
    likely: list[Callable[[Known], Iterator[Step]]] = []
    ahead: dict[Step, Prediction] = {}
    asked: set[Step] = set()

    def predict(step: Step) -> Prediction:
        asked.add(step)
        for following in islice(likely[0](ahead.get), 2):
            ahead[following] = predicted_by_size(following)
        return predicted_by_size(step)

    found = search_layouts(job, {}, PLAIN, 70 * GIB, predict, look_ahead=likely.append)
    assert found == search_layouts(job, {}, PLAIN, 70 * GIB, predicted_by_size)
    assert len(ahead.keys() & asked) > len(ahead) / 2


def test_each_layout_is_reported_with_how_many_may_follow_and_the_last_one_with_none() -> None:
    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16))
    reported: list[int] = []

    def report(tried: Scenario, found: FittingLayout | None, num_left: int) -> None:
        reported.append(num_left)

    search_layouts(job, {}, PLAIN, 70 * GIB, predicted_by_size, on_layout=report)
    follow = range(len(reported) - 1, -1, -1)
    assert all(at_most >= number for at_most, number in zip(reported, follow, strict=True)) and reported[-1] == 0


def test_ctrl_c_keeps_the_layouts_that_were_found() -> None:
    calls: list[Step] = []

    def interrupted(step: Step) -> Prediction:
        calls.append(step)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return predicted_by_size(step)

    job = Scenario.of("qwen3-30b-a3b", layout=Layout(data_parallel_size=16))
    with pytest.raises(LayoutSearchInterrupted) as error:
        search_layouts(job, {}, PLAIN, 70 * GIB, interrupted)
    assert error.value.found.fitting and error.value.found.num_left > 0


def test_the_command_shows_what_single_predictions_give(capfd: pytest.CaptureFixture[str]) -> None:
    layout = Layout(data_parallel_size=2)
    num_excluded = gc.get_freeze_count()
    with stepping(job_of("phi-4-tiny", 2)) as step:
        assert 0 < gc.get_freeze_count() <= num_excluded, "else closing a small lab collects all of torch and Megatron"
        peak = step(PLAIN, None).peak_allocated_bytes
    memory = (
        f"--gpu-memory={estimate_outside_torch(layout).total_bytes + peak + GIB}B"  # other layouts take more outside
    )
    flags = ["phi-4-tiny", "--num-layers", "2", "--seq-length", "64", "--gpus", "2", "--engines", "1"]
    assert main(["search", *flags, memory, "--json"]) == 0
    printed, told = capfd.readouterr()
    found = json.loads(printed)
    assert found["fitting"][0]["peak_allocated_bytes"] == peak and "DP2: fits with 'none'" in told
    assert found["verdict"].startswith("DP2 with 'none' fits 2 GPUs")
    sent = found["fitting"][0]["communicated_bytes"]
    assert sent["reduce-scatter"] == 2 * sent["all-gather"], "fp32 gradients one way, bf16 parameters the other"
    assert found["num_no_better"] > 0 and len(found["fitting"]) == 1
    only = "--tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 1 --as megatron-lm"
    assert main(["search", *flags, memory, *only.split()]) == 0
    assert "# lines of the job, for megatron-lm:\n# torchrun --nnodes 1 --nproc-per-node 2\n" in capfd.readouterr().out
    too_little = f"--gpu-memory={estimate_outside_torch(layout).total_bytes + MIB}B"
    assert main(["search", *flags, too_little]) == 1
    assert capfd.readouterr().out.startswith("no layout fits 2 GPUs of ")


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--gpus 0", "world_size is 0, must be a whole number of at least 1"),
        ("--gpus 4 --world-size 2", "--world-size is 2, but --gpus 4"),
        ("--gpus 4 --largest tokens", "--largest cannot be combined with --gpus"),
        ("--gpus 4 --data-parallel-size 4", "--data-parallel-size cannot be combined with --gpus"),
        (
            "--gpus 4 --pipeline-model-parallel-layout Et|tL",
            "--pipeline-model-parallel-layout cannot be combined with --gpus",
        ),
        (
            "--gpus 4 --pipeline-model-parallel-size 3",
            "--gpus is 4, but phi-4-tiny has no layout of that many ranks with pipeline",
        ),
    ],
)
def test_bad_input_exits_with_2_and_one_line(flags: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "phi-4-tiny", "--gpu-memory", "80GiB", *flags.split()]) == 2
    complaint = capfd.readouterr().err
    assert refusal in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3-moe-tiny", {}),
        pytest.param(
            "qwen3-moe-tiny",
            {"num_microbatches": 3, "layout": Layout(pipeline_model_parallel_size=2)},
            marks=pytest.mark.slow,
        ),
        pytest.param("phi-4-tiny", {"layout": Layout(context_parallel_size=2)}, marks=pytest.mark.slow),
        ("qwen3-moe-tiny", {"seq_length": 2048, "state": TrainingState(fp8_format="e4m3", fp8_recipe="tensorwise")}),
    ],
)
def test_a_step_with_recompute_never_needs_less_than_the_step_without_it_shows(
    family: str, more: dict[str, Any]
) -> None:
    job = Scenario.of(family, **{"num_layers": 4, "seq_length": 512} | more)
    with stepping(job) as step:
        at_peak = bytes_at_peak(step(PLAIN))
        tried = [each for each in candidates(PLAIN, job, depth=1) if each.recompute_granularity is not None]
        peaks = {settings: step(settings).peak_allocated_bytes for settings in tried}
    least = {settings: least_peak_with(settings, at_peak) for settings in tried}
    assert all(least[settings] <= peaks[settings] for settings in tried)
    assert len(set(least.values())) == len(tried) > 2, "each setting has a bound of its own"
    full = next(each for each in tried if each.recompute_granularity == "full")
    assert 0 < least[full] == min(least.values())
    with stepping(job) as step:
        assert bytes_at_peak(step(full)) == {}, "what it recomputes is not at its peak"


def test_settings_that_cannot_fit_are_not_predicted_and_the_most_recompute_only_where_less_does_not_do() -> None:
    job = Scenario.of("llama-3.2-1b", layout=Layout(data_parallel_size=8))
    given = dict.fromkeys(SIZES, 1)
    at_peak = {"": 50 * GIB, "layer.mlp": 20 * GIB, "layer.self_attention.core_attention": 4 * GIB, "layer": 6 * GIB}

    def asked_with(limit_bytes: int, of_mlp: int) -> tuple[list[str], LayoutSearch]:
        asked: list[str] = []
        peaks = {"none": 80 * GIB, "recompute mlp": of_mlp, "full uniform 4": 55 * GIB}

        def predict(step: Step) -> Prediction:
            asked.append(str(step.settings))
            peak = peaks[asked[-1]]
            verdict: Verdict = "fits" if peak <= step.limit_bytes else "does not fit"
            shown = at_peak if step.settings == PLAIN else {}
            range_ = PeakRange.exactly(peak)
            return replace(predicted_by_size(step), peak_range=range_, verdict=verdict, requested_at_peak=shown)

        outside = estimate_outside_torch(job.layout).total_bytes
        return asked, search_layouts(job, given, PLAIN, limit_bytes + outside, predict)

    asked, found = asked_with(limit_bytes=70 * GIB, of_mlp=65 * GIB)
    assert asked == ["none", "recompute mlp"] and str(found.fitting[0].settings) == asked[-1]
    asked, found = asked_with(limit_bytes=64 * GIB, of_mlp=65 * GIB)
    assert asked == ["none", "recompute mlp", "full uniform 4"] and str(found.fitting[0].settings) == asked[-1]
    asked, found = asked_with(limit_bytes=59 * GIB, of_mlp=65 * GIB)
    assert asked == ["none", "full uniform 4"]
    asked, found = asked_with(limit_bytes=49 * GIB, of_mlp=65 * GIB)
    assert asked in ([], ["none"]) and not found.fitting
