"""Overlapped tensor parallel communication: what ranks compute with user buffers, what each holds, and what jobs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab import Lab, Layout, MemorySettings, Scenario, TrainingState
from memlab.backends import cuda
from memlab.config import without_effect
from memlab.config.user_buffers import buffer_sizes, user_buffer_bytes
from memlab.engines.megatron.layers.tensor_parallel import Overlap, Split
from memlab.engines.megatron.layers.torch_functions import Linear, NormLinear
from memlab.fitting.outside_torch import outside_torch_of
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from tests.unit.measured import assert_predicted, measured_rows
from tests.unit.ranks import on_ranks

MEASURED, OF_TWO = measured_rows("h200_user_buffers"), measured_rows("h200x2_user_buffers")
TP2 = Layout(tensor_model_parallel_size=2)
ON = TrainingState(tp_comm_overlap=True)
FP8 = replace(ON, fp8_format="hybrid", fp8_recipe="tensorwise")
WORKSPACE = 3 * (32 * 2**20 + 1024)
"""Of products with user buffers: a part for each of three streams (``cpp_extensions/gemm.py``)."""


@pytest.mark.parametrize(
    "overlap",
    [
        Overlap(gathers=True, scatters=True, gathers_again=True, scatters_beside=True),
        Overlap(gathers=True, scatters=True, scatters_backward=True),
    ],
)
def test_ranks_with_user_buffers_compute_what_they_do_without(overlap: Overlap) -> None:
    """A norm with its column-parallel linear, and a row-parallel linear, of 8 tokens on two ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs, grad = (torch.randn(8, 2, 6, generator=generator) for _ in range(2))
    weights = torch.randn(2, 4, 6, generator=generator), torch.randn(2, 6, 4, generator=generator)
    found: dict[tuple[int, bool], tuple[torch.Tensor, ...]] = {}

    def job(rank: int, group: Any) -> None:
        for is_on in (False, True):
            column, row = (Split(way, group, 2, True, overlap if is_on else Overlap()) for way in ("column", "row"))
            own = slice(4 * rank, 4 * rank + 4)
            leaves = [inputs[own].clone(), torch.ones(6), weights[0][rank].clone(), weights[1][rank].clone()]
            for leaf in leaves:
                leaf.requires_grad_().fuse_wgrad_accumulation = False  # type: ignore[attr-defined]
            inner = NormLinear.apply(leaves[0], leaves[1], None, leaves[2], None, 1e-5, column)
            output = Linear.apply(inner, leaves[3], row)
            found[rank, is_on] = output.detach(), *torch.autograd.grad(output, leaves, grad[own])

    on_ranks(2, job)
    for rank in range(2):
        for one, other in zip(found[rank, False], found[rank, True], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("llama-3.1-8b 2 layers TP2 x2 tp_comm_overlap=True", 1e-6),
        ("llama-3.1-8b 2 layers TP2 x1 recompute_granularity=full", 1e-6),
        ("llama-3.1-8b 2 layers TP2 x1 recompute_granularity=selective", 1e-5),
        ("llama-3.1-8b 2 layers TP2 x1 tp_comm_overlap=True tp_comm_bulk_dgrad=False tp_comm_bulk_wgrad", 1e-5),
        ("llama-3.1-8b 2 layers TP2 x1 tp_comm_overlap=True tp_comm_overlap_rs_dgrad", 1e-6),
        # The backward of a norm has a workspace in which each group of threads adds up the weight's gradient: 396 of
        # them, with 4,096 numbers of 4 bytes. memlab has none, and here it is at the peak.
        ("llama-3.1-8b 2 layers TP2 x2 fp8_format=hybrid fp8_recipe=tensorwise tp_comm_overlap=True", 1.2e-3),
        ("llama-3.1-8b 2 layers TP2 x2 fp8_format=hybrid fp8_recipe=delayed tp_comm_overlap=True", 1.2e-3),
    ],
)
def test_a_predicted_step_has_the_bytes_of_the_measured_one(name: str, error: float) -> None:
    """On an H200, whose two processes were two ranks: user buffers were real, all other collectives stood in for.

    Of all 19 jobs the peak is at most 0.001 % off in bf16 and 0.12 % in FP8, and the start 0.001 %.
    """
    assert_predicted(next(row for row in MEASURED if row["name"].startswith(name)), start=2e-5, peak=error)


@pytest.mark.parametrize("number", [0, 8, pytest.param(6, marks=pytest.mark.slow)])
def test_a_predicted_rank_has_the_bytes_of_the_measured_one(number: int) -> None:
    """On two H200s, where NCCL did all else: dense in bf16, with rows of 16,384 tokens, and Qwen3-30B-A3B.

    The largest errors of all 18 ranks are 0.12 % of the peak in FP8, and 0.032 % elsewhere, of Qwen3-30B-A3B, with user
    buffers and without; of the start 0.053 %.
    """
    for rank in (0, 1):
        start, peak = (6e-4, 4e-4) if number == 6 else (1e-6, 2e-5)
        assert_predicted(OF_TWO[number], rank, start=start, peak=peak)


def test_memory_outside_torch_is_in_its_range_with_user_buffers() -> None:
    """Jobs that were the first of their processes; later ones keep the groups and buffers of those before them."""
    first = [row for row in OF_TWO if row["is_first_of_process"]]
    assert len(first) == 4
    for row in first:
        state = TrainingState.of_options(row["state"])
        job = Scenario.of(row["model"], seq_length=row["seq_length"], layout=TP2, state=state)
        stated = outside_torch_of(job)
        for rank in row["ranks"]:
            assert stated.total_bytes <= rank["steps"][-1]["outside_torch_bytes"] <= stated.most_bytes, row["name"]
            # The first collective of a process is NCCL's, which sets the buffers up: 840 MiB in all four.
            taken = rank["outside_torch_bytes"]
            buffers = taken["after user buffers"] - taken["before user buffers"] - 840 * 2**20
            assert buffers == pytest.approx(user_buffer_bytes(job), abs=2 * 2**20)


def test_only_the_workspace_is_added_between_steps() -> None:
    starts = {}
    for state in (TrainingState(), ON, replace(ON, tp_comm_overlap_ring_exchange=("fc2_fprop",))):
        with Lab("qwen3-dense-tiny", num_layers=2, seq_length=64, layout=TP2, state=state, backend="simulated") as lab:
            starts[state] = lab.step(MemorySettings()).static_bytes
    plain, overlapped, ring = starts.values()
    assert overlapped - plain == WORKSPACE
    assert ring == overlapped, "a larger user buffer is outside torch"


def test_user_buffers_have_the_sizes_of_the_job() -> None:
    """By hand: 4,096 tokens x 4,096 elements are 32 MiB in bf16 and 16 in FP8, and two ranks' ring has three halves."""
    job = Scenario.of("llama-3.1-8b", seq_length=4096, layout=TP2, state=ON)
    assert set(buffer_sizes(job).values()) == {32 * 2**20}
    assert len(buffer_sizes(job)) == 12
    ring = replace(job, state=replace(FP8, tp_comm_overlap_ring_exchange=("fc2_fprop", "proj_fprop")))
    assert sorted(buffer_sizes(ring).values()) == [16 * 2**20] * 8 + [32 * 2**20] * 2 + [48 * 2**20] * 2
    halved = replace(job, layout=replace(TP2, context_parallel_size=2))
    assert set(buffer_sizes(halved).values()) == {16 * 2**20}
    for other in (replace(job, state=TrainingState()), replace(job, layout=Layout())):
        assert user_buffer_bytes(other) == 0


def test_an_estimate_outside_torch_names_user_buffers() -> None:
    job = Scenario.of("llama-3.1-8b", seq_length=4096, layout=TP2, state=ON)
    without = outside_torch_of(replace(job, state=TrainingState()))
    stated = outside_torch_of(job)
    assert stated.user_buffer_bytes == user_buffer_bytes(job) > 12 * 32 * 2**20
    assert stated.total_bytes > without.total_bytes + stated.user_buffer_bytes
    assert "for user buffers" in str(stated)
    assert "for user buffers" not in str(without)


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        ("llama-3.1-8b", {"layout": replace(TP2, sequence_parallel=False)}, "sequence_parallel, must have it"),
        ("llama-3.1-8b", {"layout": Layout(tensor_model_parallel_size=16)}, "must have at most 8"),
        ("llama-3.1-8b", {"dtype": "fp32"}, "must be bf16"),
        ("llama-3.1-8b", {"state": replace(FP8, fp8_recipe="blockwise")}, "user buffers do not take"),
        ("llama-3.1-8b", {"state": replace(FP8, tp_comm_overlap_rs_dgrad=True)}, "rs_dgrad and fp8_format"),
        ("llama-3.1-8b", {"state": replace(ON, mtp_num_layers=1)}, "has no user buffer"),
        ("deepseek-v2-lite", {}, "latent attention"),
    ],
)
def test_what_user_buffers_are_refused_beside(model: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Scenario.of(model, **{"layout": TP2, "state": ON, **values})


def test_one_tensor_parallel_rank_has_nothing_to_overlap() -> None:
    assert "tp_comm_overlap" in without_effect.of_scenario(Scenario.of("llama-3.1-8b", state=ON))
    for given, rule in ((("qkv_fprop",), "choose from proj_fprop, fc2_fprop"), ("proj_fprop", "must be a list")):
        with pytest.raises(ValueError, match=rule):
            TrainingState(tp_comm_overlap=True, tp_comm_overlap_ring_exchange=given)
    assert TrainingState(tp_comm_overlap_ring_exchange=()).tp_comm_overlap_ring_exchange == ()


BRIDGE = """
model: {hf_model_id: meta-llama/Llama-3.1-8B, tensor_model_parallel_size: 2, sequence_parallel: true, seq_length: 4096}
train: {micro_batch_size: 1, global_batch_size: 8}
ddp: {grad_reduce_in_fp32: true}
comm_overlap:
  tp_comm_overlap: true
"""
METHODS = """  tp_comm_overlap_cfg:
    proj_fprop: {method: ring_exchange, num_sm: 1}
    fc2_fprop: {method: pipeline, num_sm: 16, fp8_buf: [false]}
    qkv_dgrad: {method: bulk}
"""


def _job(text: str, path: Path, **given: Any) -> Job:
    path.write_text(text)
    return Job.read(path, world_size=2, **given)


def test_a_job_of_bridge_says_how_its_buffers_are_used(tmp_path: Path) -> None:
    job = _job(BRIDGE + METHODS, tmp_path / "run_config.yaml")
    scenario, settings = job.required()
    assert scenario.state.tp_comm_overlap_ring_exchange == ("proj_fprop",)
    assert not [one for one in job.not_modelled if "tp_comm" in one.key]
    lines = "\n".join(written("bridge", scenario, settings).lines)
    assert "tp_comm_overlap" in lines
    in_fp8 = _job(BRIDGE + METHODS + "mixed_precision: bf16_with_fp8_delayed_scaling_mixed", tmp_path / "fp8.yaml")
    (missing,) = [one for one in in_fp8.not_modelled if "tp_comm" in one.key]
    assert missing.key == "comm_overlap.tp_comm_overlap_cfg.fc2_fprop.fp8_buf", "a list with False in it is true"


@pytest.mark.parametrize(
    ("lines", "ring", "named"),
    [
        ("  tp_comm_overlap_cfg: {proj_fprop: {_target_: PATH.RingExchangeOverlapCfg}}", ("proj_fprop",), []),
        (
            "  tp_comm_overlap_cfg: {proj_fprop: {_target_: PATH.RingExchangeOverlapCfg, method: bulk}}",
            (),
            ["tp_comm_overlap_cfg.proj_fprop.method"],
        ),
        ("  tp_comm_overlap_cfg: {_target_: PATH.TransformerLayerTPOverlapCfg}", (), []),
        ("  tp_comm_overlap_cfg: {_target_: PATH.userbuffers_fp8_h100}", (), ["tp_comm_overlap_cfg._target_"]),
        ("  tp_comm_overlap_cfg: {proj_dgrad: {method: bulk}}", (), ["tp_comm_overlap_cfg.proj_dgrad.method"]),
        ("  tp_comm_overlap_cfg: {fc2_fprop: {method: ring}}", (), ["tp_comm_overlap_cfg.fc2_fprop.method"]),
        ("  tp_comm_overlap_cfg: {fc3_fprop: {method: bulk}}", (), ["tp_comm_overlap_cfg.fc3_fprop.method"]),
        ("  tp_comm_overlap_cgf: file.yaml", (), ["tp_comm_overlap_cgf"]),
    ],
)
def test_what_memlab_does_not_read_of_the_overlap_is_named(
    lines: str, ring: tuple[str, ...], named: list[str], tmp_path: Path
) -> None:
    text = BRIDGE + lines.replace("PATH", "megatron.bridge.training.comm_overlap")
    job = _job(text, tmp_path / "run_config.yaml")
    assert job.required()[0].state.tp_comm_overlap_ring_exchange == ring
    assert [one.key for one in job.not_modelled if "overlap" in one.key] == [f"comm_overlap.{one}" for one in named]


@pytest.mark.parametrize(
    ("replaced", "by", "is_on", "is_missing"),
    [
        ("tp_comm_overlap: true", "tp_comm_overlap: false", False, False),
        ("sequence_parallel: true", "sequence_parallel: false", False, False),
        ("sequence_parallel: true", "sequence_parallel: true, tp_comm_overlap: false", True, False),
        ("ddp:", "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8}\nddp:", False, True),
        ("meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V2-Lite", False, True),
    ],
)
def test_a_job_of_bridge_has_user_buffers_where_its_start_makes_them(
    replaced: str, by: str, is_on: bool, is_missing: bool, tmp_path: Path
) -> None:
    job = _job(BRIDGE.replace(replaced, by), tmp_path / "run_config.yaml")
    assert job.required()[0].state.tp_comm_overlap == is_on
    assert ("comm_overlap.tp_comm_overlap" in {one.key for one in job.not_modelled}) == is_missing


MEGATRON_LM = """torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 4096 --num-attention-heads 32
--ffn-hidden-size 14336 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 --swiglu
--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --vocab-size 128256
--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap
""".replace("\n", " ")


def test_flags_of_megatron_lm_switch_parts_of_the_overlap_off(tmp_path: Path) -> None:
    flags = "--disable-tp-comm-overlap-rs --no-tp-comm-bulk-dgrad --tp-comm-overlap-rs-dgrad"
    job = _job(MEGATRON_LM + flags, tmp_path / "run.sh")
    scenario, settings = job.required()
    assert scenario.state.tp_comm_overlap
    assert scenario.state.tp_comm_overlap_rs_dgrad
    assert not scenario.state.tp_comm_overlap_rs
    assert not scenario.state.tp_comm_bulk_dgrad
    assert "--disable-tp-comm-overlap-rs" in written("megatron-lm", scenario, settings).lines
    with_file = _job(MEGATRON_LM + "--tp-comm-overlap-cfg buffers.yaml", tmp_path / "file.sh")
    assert "tp_comm_overlap_cfg" in {one.key for one in with_file.not_modelled}
    refused = _job(MEGATRON_LM.replace("--sequence-parallel", ""), tmp_path / "refused.sh")
    assert "split sequences" in str(refused.cannot_start)


def test_a_gpu_takes_no_step_with_user_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine asks for them in its first linear."""
    for name in ("require_started_ranks", "check_allocator", "check_environment"):
        monkeypatch.setattr(cuda, name, lambda _: None)
    cuda.check(Scenario.of("llama-3-tiny", seq_length=64, layout=TP2))
    with pytest.raises(ValueError, match="tp_comm_overlap is True, but memlab makes no user buffers on a GPU"):
        cuda.check(Scenario.of("llama-3-tiny", seq_length=64, layout=TP2, state=ON))
