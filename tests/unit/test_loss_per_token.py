"""Gradients that are divided by the tokens of the whole batch: their values, bytes, communicator and defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab import Lab, Layout, MemorySettings, StepRecord, TrainingState
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import find_architecture
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.jobs.job import Job
from memlab.units import MIB
from tests.unit.measured import measured_rows

MEASURED = measured_rows(*(f"{machine}_per_token_loss" for machine in ("h200", "h200x2", "h200x4")))
MEGATRON_LM = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 --micro-batch-size 1 "
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --normalization RMSNorm --bf16 "
    "--max-position-embeddings 4096 --disable-bias-linear --position-embedding-type rope --vocab-size 128256"
)
PER_TOKEN = TrainingState(calculate_per_token_loss=True)


def test_every_measured_rank_is_within_its_range() -> None:
    """The broadcast over the group of pipeline stages took 388 to 390 MiB of one rank, 288 where two stages send in
    batches and 484 to 486 where they are interleaved, all as predicted, and a job without it was outside that range."""
    assert {row["config"].get("calculate_per_token_loss", False) for row in MEASURED} == {True, False}
    for row in MEASURED:
        state = TrainingState.of_options(row["state"] | row["config"])
        layout = Layout() if row["layout"] == "one rank" else Layout.from_text(row["layout"])
        for rank in row["ranks"]:
            model, own = find_architecture(row["model"]), replace(layout, rank=rank["rank"])
            held = rank["steps"][-1]["outside_torch_bytes"]
            stated, other = (
                estimate_outside_torch(own, model, replace(state, calculate_per_token_loss=is_on))
                for is_on in (state.calculate_per_token_loss, not state.calculate_per_token_loss)
            )
            assert stated.total_bytes <= held <= stated.most_bytes, row["name"]
            assert not other.total_bytes <= held <= other.most_bytes, row["name"]


@pytest.mark.parametrize(
    ("layout", "mebibytes"),
    [("DP2", 388), ("TP2 EP2 ETP1", 388), ("PP2", 484 - 196), ("PP2 VP2", 484), ("PP4", 484 - 196)],
)
def test_the_group_of_stages_takes_what_its_own_sends_have_not(layout: str, mebibytes: int) -> None:
    both = Layout.from_text(layout)
    plain, per_token = (estimate_outside_torch(both, None, state) for state in (TrainingState(), PER_TOKEN))
    assert per_token.nccl_bytes - plain.nccl_bytes == mebibytes * MIB
    assert (
        estimate_outside_torch(both, None, PER_TOKEN, trains=False).nccl_bytes
        == estimate_outside_torch(both, None, TrainingState(), trains=False).nccl_bytes
    ), "nothing sends gradients"


def test_a_step_is_the_cpu_s_to_the_byte_and_its_loss_the_mean_of_equal_micro_batches() -> None:
    def step(backend: Any, state: TrainingState) -> StepRecord:
        work = {"num_layers": 2, "seq_length": 64, "num_microbatches": 3}
        with Lab("qwen3-moe-tiny", backend=backend, state=state, **work) as lab:
            return lab.step(MemorySettings(offload_optimizer=True))

    plain, live = (step("cpu", state) for state in (TrainingState(), PER_TOKEN))
    assert live.loss == pytest.approx(plain.loss, rel=1e-6)
    predicted = step(of_the_cpu_backend(), PER_TOKEN)
    for record in (live, predicted):
        record.peak_by_category.pop("optimizer state", None)  # torch's AdamW counts its steps in tensors
    assert live.peak_by_category == predicted.peak_by_category


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --max_length 4096", True),
        ("NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --calculate_per_token_loss false", False),
        ("NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --task_type seq_cls --num_labels 2", False),
        ("NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-8B", False),
        ("NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --calculate_per_token_loss true", True),
        (f"{MEGATRON_LM} --calculate-per-token-loss", True),
        (MEGATRON_LM, False),
    ],
)
def test_jobs_divide_so_where_they_say_it_and_ms_swift_where_it_trains_a_language_model_alone(
    text: str, is_on: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    assert Job.read(path).required()[0].state.calculate_per_token_loss == is_on


@pytest.mark.parametrize(
    ("model", "context", "is_on"),
    [("Qwen/Qwen3-VL-8B-Instruct", 1, False), ("Qwen/Qwen3-VL-8B-Instruct", 2, True), ("Qwen/Qwen3-8B", 2, False)],
)
def test_verl_divides_so_where_megatron_bridge_builds_qwen3_vl_with_context_parallelism(
    model: str, context: int, is_on: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    actor = "actor_rollout_ref.actor"
    path.write_text(
        f"python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer actor_rollout_ref.model.path={model} "
        f"{actor}.strategy=megatron {actor}.megatron.context_parallel_size={context} trainer.n_gpus_per_node=8 "
        f"data.max_prompt_length=1024 data.max_response_length=1024 {actor}.ppo_micro_batch_size_per_gpu=1"
    )
    job = Job.read(path, version="2026-08-20")
    assert job.scenario is not None
    assert job.scenario.state.calculate_per_token_loss == is_on


def test_nemo_rl_always_divides_so_whatever_a_job_says(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "policy: {model_name: Qwen/Qwen3-8B, max_total_sequence_length: 4096, train_micro_batch_size: 1, "
        "train_global_batch_size: 64, megatron_cfg: {enabled: true, calculate_per_token_loss: false}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    job = Job.read(path)
    assert job.scenario is not None
    assert job.scenario.state.calculate_per_token_loss
    assert "policy.megatron_cfg.calculate_per_token_loss" in job.without_effect
