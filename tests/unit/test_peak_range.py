"""The two ends of a predicted peak, and that no bound decides alone."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.analysis.limits import Limit
from memlab.backends.cpu import cuda_replaced
from memlab.cli import main
from memlab.commands.shared.job_flags import writable_as
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.candidates import candidates
from memlab.fitting.does_it_fit import Verdict, judge, judge_phases
from memlab.fitting.measured_margin import MARGIN_WITHOUT_EXPERTS
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.fitting.peak_range import KEPT_GATHERS, UNCOLLECTED, PeakRange, with_lower_end
from memlab.fitting.prediction import Prediction
from memlab.fitting.search import search
from memlab.jobs.bounds import bound_bytes
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.frameworks.keys import Effect
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.jobs.job import Job
from memlab.jobs.writing import unsaid, writable
from memlab.lab.lab import Lab
from memlab.lab.search_steps import stepping
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.storage_meter import simulated_meter
from memlab.record.job_phases import JobPhase, JobPhases
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB
from memlab.views.text.job import job_table
from memlab.views.text.job_phases import phases_table
from memlab.views.text.peak_range import range_lines
from memlab.views.text.record import record_table
from memlab.views.text.search import nothing_fits_line
from tests.unit.builders import AnsweredSteps, record_of
from tests.unit.measured import measured_rows

JOB = Scenario.of("phi-4-tiny")
BY_CATEGORY = {"parameters": 200 * MIB, "gradients": 300 * MIB, "optimizer state": 400 * MIB, "activations": 100 * MIB}
LORA = """NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-30B-A3B --tuner_type lora --lora_rank 8 --lora_bias all \\
  --expert_model_parallel_size 2 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
  --max_length 3000 --gradient_accumulation_fusion false
"""
ALWAYS = AnsweredSteps(lambda _: pytest.fail("no other step is needed"), lambda *_: True)


def step_record(**changes: Any) -> StepRecord:
    values = {"peak_allocated_bytes": 1000 * MIB, "peak_reserved_bytes": 1000 * MIB, "peak_by_category": BY_CATEGORY}
    return record_of(None, **{"scenario": JOB} | values | changes)


def missing(key: str, effect: Effect) -> NotModelled:
    return NotModelled(key, True, effect, "for a test")


def margin_of(num_bytes: int) -> int:
    return round(num_bytes * MARGIN_WITHOUT_EXPERTS.share)


def test_a_measured_peak_and_one_of_a_cpu_are_no_range() -> None:
    for backend in ("cuda", "cpu"):
        record = step_record(backend=backend, kept_gather_bytes=0)
        assert PeakRange.of(record, [missing("tuner_type", "less")]) == PeakRange.exactly(1000 * MIB)


@pytest.mark.parametrize(
    ("key", "lower_mib"),
    [
        ("policy.megatron_cfg.peft.enabled", 200),  # the weights stay
        ("freeze_llm", 200),
        ("cpu_offloading", 900),
        ("recompute_loss_function", 900),
        ("disable_parameter_transpose_cache", 800),
    ],
)
def test_what_takes_memory_away_takes_no_more_than_is_there(key: str, lower_mib: int) -> None:
    found = PeakRange.of(step_record(), [missing(key, "less")])
    assert found.lower_bytes == lower_mib * MIB
    assert found.upper_bytes == 1000 * MIB + margin_of(1000 * MIB)
    assert [cause.num_bytes for cause in found.named_causes] == [(1000 - lower_mib) * MIB]
    twice = PeakRange.of(step_record(), [missing(key, "less"), missing(key, "less")])
    assert twice.lower_bytes == found.lower_bytes, "two keys for one thing count once"


def test_what_is_in_no_category_of_the_peak_takes_nothing() -> None:
    on_host = step_record(peak_by_category={"parameters": 900 * MIB, "activations": 100 * MIB})
    found = PeakRange.of(on_host, [missing("tuner_type", "less")])
    assert found.lower_bytes == 900 * MIB, "gradients and optimizer state are on the host"


def test_causes_of_both_signs_move_both_ends() -> None:
    record = step_record(kept_gather_bytes=7 * MIB, uncollected_bytes=30 * MIB)
    bound = bound_bytes(missing("entropy_coeff", "either"), JOB, MemorySettings())
    assert bound
    found = PeakRange.of(record, [missing("entropy_coeff", "either")])
    assert found.lower_bytes == 970 * MIB - bound
    assert found.upper_bytes == 1007 * MIB + bound + margin_of(1007 * MIB + bound)
    assert [cause.name for cause in found.named_causes] == [KEPT_GATHERS, UNCOLLECTED, "entropy_coeff"]
    assert PeakRange.from_dict(json.loads(json.dumps(found.to_dict()))) == found


MAY_ADD: list[Effect] = ["more", "either", "unknown"]
MAY_TAKE: list[Effect] = ["less", "either", "unknown"]


@pytest.mark.parametrize("effect", ["more", "less", "either", "unknown"])
@pytest.mark.parametrize("limit_mib", [900, 1100])
def test_an_effect_of_unknown_size_decides_only_with_its_sign(effect: Effect, limit_mib: int) -> None:
    record = step_record()
    peak = PeakRange.of(record, [missing("a_key_of_a_test", effect)])
    without = judge(record, ALWAYS, limit_mib * MIB)
    assert without == ("fits" if limit_mib > 1000 else "does not fit")
    can_change_it = effect in (MAY_ADD if without == "fits" else MAY_TAKE)
    assert judge(record, ALWAYS, limit_mib * MIB, peak) == ("may fit" if can_change_it else without)
    assert "by bytes that memlab does not know" in " ".join(range_lines(peak))


@pytest.mark.parametrize(
    ("limit_mib", "verdict"), [(199, "does not fit"), (201, "may fit"), (999, "may fit"), (1002, "fits")]
)
def test_a_verdict_is_certain_only_beyond_both_ends(limit_mib: int, verdict: Verdict) -> None:
    record = step_record()
    assert judge(record, ALWAYS, limit_mib * MIB, PeakRange.of(record, [missing("tuner_type", "less")])) == verdict


def test_adapters_of_a_job_whose_optimizer_is_on_the_host_save_less_than_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    for flags, per_parameter in (("", 4 + 8 + 4), (" --optimizer_cpu_offload true", 4 + 4)):
        path.write_text(LORA.rstrip() + flags + "\n")
        job = Job.read(path)
        (lora,) = [one for one in job.not_modelled if one.key == "tuner_type"]
        scenario, _ = job.required()
        assert lora.bound_bytes is not None
        experts = 48 * 3 * 2048 * 768 * 128 // 2
        others = scenario.architecture.num_parameters - 2 * experts
        of_state = per_parameter - 4  # gradients are whole on each rank; of the experts, two ranks hold each
        assert lora.bound_bytes == pytest.approx(4 * (experts + others) + of_state * (experts / 2 + others / 4), 1e-4)
        assert "of gradients and optimizer state, and in activations" in job_table(job)


def test_a_job_with_adapters_may_fit_and_says_both_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lora.sh"
    path.write_text(LORA)
    job = ["predict", "--job", str(path), "--num-layers", "2", "--num-microbatches", "1"]
    found: dict[str, Any] = {}
    for memory, code, verdict in (("40GiB", 0, "fits"), ("5GiB", 1, "does not fit")):
        assert main([*job, "--gpu-memory", memory, "--json"]) == code, memory
        found = json.loads(capfd.readouterr().out)
        assert found["fit"]["verdict"] == verdict
    ends = found["peak_range"]
    assert ends == found["fit"]["peak_range"]
    weights = found["peak_by_category"]["parameters"]
    assert weights < ends["lower_bytes"] < weights + 2 * GIB < ends["peak_allocated_bytes"] < ends["upper_bytes"]
    assert main([*job, "--gpu-memory", "10GiB"]) == 3
    printed = capfd.readouterr().out
    assert "rank 0 may fit 10.000 GiB" in printed.splitlines()[0]
    assert f"its peak is {ends['lower_bytes'] / GIB:.3f} GiB to {ends['upper_bytes'] / GIB:.3f} GiB" in printed
    assert "no setting helps" not in printed and "would make it fit" not in printed
    assert (
        "tuner_type: lower by at most" in printed and "what decides: the peak of a measured step of the job" in printed
    )


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    texts = [capsys.readouterr().out, (Path(__file__).parents[2] / "labs" / "book" / "commands.md").read_text()]
    for text in texts:
        for code, word in (("0", "fits"), ("1", "does not fit"), ("3", "may fit")):
            assert re.search(rf"{code}( |[^.;]*){word}", " ".join(text.split())), (code, text)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlaps", [False, True])
def test_only_the_collector_frees_a_discarded_cpu_optimizer_and_its_copies(fraction: float, overlaps: bool) -> None:
    """Megatron's own optimizer: its hooks' closures refer to it, and so does nothing else."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from memlab.engines.megatron.cpu_optimizer import uncollected_copies

    labels = Labels()
    meter = simulated_meter(labels)
    with cuda_replaced(), labelled_by(labels), meter.watching():
        weights = [torch.nn.Parameter(torch.empty(1024, dtype=torch.bfloat16, device="cuda")) for _ in range(4)]
        before = meter.live_bytes()
        gc.collect()
        gc.disable()
        try:
            optimizer = HybridDeviceOptimizer(
                [{"params": weights}],
                offload_fraction=fraction,
                cpu_optimizer_cls=torch.optim.AdamW,
                gpu_optimizer_cls=torch.optim.AdamW,
                param_update_in_fp32=True,
                overlap_cpu_optimizer_d2h_h2d=overlaps,
            )
            named = sum(copy.nbytes for copy in uncollected_copies([optimizer]))
            assert named == meter.live_bytes() - before == round((1 - fraction) * 4) * 1024 * 4
            hooks = [hook for part in optimizer.sub_optimizers for hook in part._optimizer_step_post_hooks.values()]
            assert hooks and all(cell.cell_contents is optimizer for hook in hooks for cell in hook.__closure__)
            alive = weakref.ref(optimizer)
            del optimizer, hooks
            assert alive() is not None and meter.live_bytes() - before == named
            gc.collect()
            assert alive() is None and meter.live_bytes() == before
        finally:
            gc.enable()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_the_lower_end_without_manual_gc_is_the_peak_with_it(fraction: float, overlaps: bool) -> None:
    state = TrainingState(
        optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, overlap_cpu_optimizer_d2h_h2d=overlaps
    )
    records = {}
    for manual_gc in (False, True):
        job = Scenario.of("phi-4-tiny", num_layers=2, seq_length=64, state=replace(state, manual_gc=manual_gc))
        with stepping(job) as steps:
            records[manual_gc] = steps(MemorySettings())
    ends = PeakRange.of(records[False])
    assert ends.lower_bytes == records[True].peak_allocated_bytes < ends.peak_allocated_bytes
    exact = PeakRange.of(records[True])
    assert exact.is_exact and exact.lower_bytes == exact.peak_allocated_bytes and records[True].uncollected_bytes == 0
    assert "copies that wait for Python's gc" in record_table(records[False])
    assert "--manual-gc" in range_lines(ends)[-1]


# The first was right; memlab called the others "fits" although they failed.
@pytest.mark.parametrize("number", [4, 8, *(pytest.param(each, marks=pytest.mark.slow) for each in (7, 10))])
def test_a_step_of_several_micro_batches_never_fits_where_a_gpu_ran_out_of_memory(number: int) -> None:
    limits = [Limit.from_dict(row) for row in measured_rows("h200_microbatch_limits")]
    assert len(limits) >= 8
    limit = limits[number]
    with stepping(routed_by_chance(limit.scenario)) as steps:
        record = steps(limit.settings)
        assert judge(record, steps, limit.fails_bytes) != "fits", str(limit.settings)
        assert judge(record, steps, int((limit.peak_reserved_bytes or 0) * 1.01)) == "fits", str(limit.settings)


@pytest.mark.parametrize(
    ("left_mib", "effect", "verdict"),
    [
        (50, "less", "fits"),
        (50, "unknown", "may fit"),
        (-50, "more", "does not fit"),
        (-50, "less", "may fit"),
        (-900, "less", "does not fit"),
        (-900, "unknown", "may fit"),
    ],
)
def test_phases_are_judged_by_both_ends_too(left_mib: int, effect: Effect, verdict: Verdict) -> None:
    key = "a_key_of_a_test" if effect != "less" else "tuner_type"
    peak = PeakRange.of(step_record(), [missing(key, effect)])
    assert effect != "less" or peak.less_bytes == 800 * MIB
    phase = JobPhase(name="training step", training_bytes=GIB, engine_bytes=0, left_for_engine_bytes=left_mib * MIB)
    phases = JobPhases(
        rank=0,
        is_colocated=True,
        gpu_memory_bytes=2 * GIB,
        outside_torch_bytes=0,
        gathered_bytes=0,
        phases=(phase,),
        host_bytes_of_rank=0,
        ranks_per_node=1,
    )
    assert judge_phases(phases, peak) == verdict
    text = phases_table(phases, peak)
    assert ("does not fit" in text) == (verdict == "does not fit"), text


def test_the_largest_workload_has_an_end_although_an_effect_has_none() -> None:
    rows = [missing("a_key_of_a_test", "unknown"), missing("tuner_type", "less"), missing("other_key", "either")]
    found = with_lower_end(rows, JOB, MemorySettings())
    assert [one.effect for one in found] == ["more", "less", "more"]
    peak = PeakRange.of(step_record(), found)
    assert judge(step_record(), ALWAYS, 199 * MIB, peak) == "does not fit"


def test_what_concerns_the_inference_engine_changes_no_training_step() -> None:
    keys = ("actor_rollout_ref.rollout.quantization", "policy.generation.vllm_cfg.precision")
    assert PeakRange.of(step_record(), [missing(key, "less") for key in keys]).is_exact


def test_what_a_framework_cannot_express_is_not_proposed() -> None:
    job = Scenario.of("qwen3-30b-a3b", num_layers=4, layout=Layout(data_parallel_size=2))
    base = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn",))
    proposed = candidates(base, job)[::7]  # each field is in many of them
    for name, framework in FRAMEWORKS.items():
        is_allowed = writable(name, job, base)
        allowed = [settings for settings in proposed if is_allowed(settings)]
        assert base in allowed
        new = {field for settings in allowed for field in unsaid(framework, job, settings)}
        assert new <= unsaid(framework, job, base).keys(), name
    bridge = writable("bridge", job, base)
    assert bridge(
        replace(
            base, recompute_granularity="full", recompute_modules=None, recompute_method="block", recompute_num_layers=1
        )
    )
    assert not bridge(replace(base, offload_optimizer_except_update=True))


@pytest.mark.parametrize("is_distributed", [True, False])
@pytest.mark.parametrize(("dtype", "reduces_in_bf16"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_fsdp_spreads_no_more_than_a_rank_has(dtype: str, reduces_in_bf16: bool, is_distributed: bool) -> None:
    state = TrainingState(use_distributed_optimizer=is_distributed, grad_reduce_in_bf16=reduces_in_bf16)
    job: dict[str, Any] = {"layout": Layout(data_parallel_size=8), "state": state, "dtype": dtype}
    with Lab("phi-4-tiny", backend="simulated", **job) as lab:
        held = lab.step().peak_by_category
    spread = sum(held[name] for name in ("parameters", "gradients", *(["optimizer state"] * (not is_distributed))))
    bound = bound_bytes(
        NotModelled("use_megatron_fsdp", None, "either", ""), Scenario.of("phi-4-tiny", **job), MemorySettings()
    )
    assert bound is not None and 0.98 * spread * 7 / 8 <= bound <= spread * 7 / 8


def test_no_advice_names_what_the_framework_cannot_express() -> None:
    job = Scenario.of("phi-4-tiny", num_layers=2, seq_length=64)

    def predict(scenario: Scenario, settings: MemorySettings) -> Prediction:
        record = step_record(scenario=scenario, settings=settings)
        return Prediction.of(record, ALWAYS, MIB, communicated_bytes={})

    for name, is_advised in ((None, True), ("bridge", False)):
        found = search(MemorySettings(), [job], predict, MIB, is_allowed=writable_as(name, job, MemorySettings()))
        assert ("optimizer on host except update" in nothing_fits_line(found)) is is_advised, name
        proposed = [point for point in found.points if point.settings.offload_optimizer_except_update]
        assert bool(proposed) is is_advised, name


DENSE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 2048 --ffn-hidden-size 8192 "
    "--num-attention-heads 16 --group-query-attention --num-query-groups 8 --seq-length 4096 --micro-batch-size 1 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16 --vocab-size 32000 "
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion "
)


@pytest.mark.parametrize(
    ("flags", "codes", "cause"),
    [
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", (0, 3), "use_megatron_fsdp: lower by at most"),
        ("--cpu-offloading-num-layers 2", (0, 3), "cpu_offloading_num_layers: lower by at most"),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            (0, 3),
            "(--manual-gc frees the copies before the first step)",
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --manual-gc", (0, 1), ""),
        ("--a-flag-that-nobody-knows 7", (3, 3), "higher or lower by bytes that memlab does not know"),
        ("", (0, 1), ""),
    ],
)
def test_the_exit_code_of_a_script_s_verdict(
    flags: str, codes: tuple[int, int], cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(DENSE + flags + "\n")
    assert main(["predict", "--job", str(path), "--json"]) == 0
    outside = estimate_outside_torch(Layout(data_parallel_size=8)).total_bytes
    peak = json.loads(capfd.readouterr().out)["peak_allocated_bytes"]
    for memory, code in ((2 * peak, codes[0]), (peak - MIB, codes[1])):
        assert main(["predict", "--job", str(path), "--gpu-memory", f"{memory + outside}B"]) == code, memory
        printed = capfd.readouterr().out
        assert cause in printed
        assert ("the real peak is" in printed) is bool(cause)


@pytest.mark.parametrize(
    ("layers", "tensor", "stages", "recompute", "measured"),
    [
        (2, 2, 1, False, 134_258_688),
        (8, 4, 1, False, 822_292_480),
        (8, 4, 1, True, 218_116_096),
        (8, 2, 4, False, 587_333_632),
        (8, 2, 4, True, 184_549_376),
    ],
)
def test_whole_rows_on_each_tensor_parallel_rank_are_bounded(
    layers: int, tensor: int, stages: int, recompute: bool, measured: int
) -> None:
    """What simulated steps need more without sequence parallelism: layers with an all-reduce in place of its collectives."""
    layout = Layout(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages)
    scenario = Scenario.of("llama-3.1-8b", num_layers=layers, seq_length=4096, num_microbatches=stages, layout=layout)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings = MemorySettings(**full if recompute else {})
    bound = bound_bytes(missing("sequence_parallel", "more"), scenario, settings)
    assert bound is not None and measured <= bound <= 2 * measured
    with_experts = Scenario.of("qwen3-moe-tiny", layout=Layout(tensor_model_parallel_size=2))
    assert bound_bytes(missing("sequence_parallel", "more"), with_experts, MemorySettings()) is None
