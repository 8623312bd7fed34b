"""Jobs of reinforcement learning: the budgets of their passes, and what their phases hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.cli import main
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.job import Job
from memlab.lab.job_phases import phases_of, predict_phases
from memlab.lab.lab import Lab
from memlab.lab.progress import Progress
from memlab.lab.request import PassRequest, StepRequest
from memlab.lab.search_steps import stepping
from memlab.record.job_phases import JobPhase, JobPhases
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB
from memlab.views.text.job_phases import phases_table
from tests.unit.inside import inside
from tests.unit.job_files import read_job

ROLLOUT = "actor_rollout_ref.rollout"
VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=microsoft/phi-4 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 "
    "data.max_prompt_length=1024 data.max_response_length=3072"
)
OF_SEQUENCES = f"actor_rollout_ref.actor.use_dynamic_bsz=False {ROLLOUT}.log_prob_micro_batch_size_per_gpu=3"
LOCAL = "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=local"
CONTEXT = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
OFFLOADED = " ".join(f"actor_rollout_ref.actor.megatron.{name}_offload=True" for name in ("param", "grad", "optimizer"))
NEMO_RL = """policy:
  model_name: microsoft/phi-4
  megatron_cfg: {enabled: true}
  max_total_sequence_length: 4096
  train_micro_batch_size: 1
  logprob_batch_size: 2
  generation: {vllm_cfg: {gpu_memory_utilization: 0.7, tensor_parallel_size: 4}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
SKYRL = (
    "uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=microsoft/phi-4 "
    "trainer.micro_forward_batch_size_per_gpu=4 generator.inference_engine.gpu_memory_utilization=0.6"
)
SLIME = (
    "python3 train.py --hf-checkpoint microsoft/phi-4 --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate "
    "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --log-probs-max-tokens-per-gpu 16384 "
    "--rollout-max-response-len 2048 --sglang-mem-fraction-static 0.7"
)


@pytest.mark.parametrize(
    ("name", "text", "packed", "expected"),
    [
        ("run.sh", VERL, 2, {"seq_length": 8192, "gpu_memory_utilization": 0.5, "bucket_bytes": 2 * GIB}),
        (
            "run.sh",
            f"{VERL} actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=20480",
            2,
            {"seq_length": 20480, "engine_ranks": 2, "ranks_per_node": 8},
        ),
        (
            "run.sh",
            f"{VERL} {OF_SEQUENCES} {ROLLOUT}.free_cache_engine=False",
            None,
            {"seq_length": 12288, "micro_batch_size": 1, "engine_sleeps": False},
        ),
        ("run.sh", f"{VERL} {LOCAL} {ROLLOUT}.update_weights_bucket_megabytes=null", None, {"bucket_bytes": 2 * GIB}),
        ("config.yaml", NEMO_RL, 1, {"seq_length": 8192, "engine_ranks": 4, "bucket_bytes": None, "bucket_share": 0.3}),
        ("run.sh", SKYRL, None, {"seq_length": 6144, "micro_batch_size": 1, "gpu_memory_utilization": 0.6}),
        (
            "run.sh",
            (
                "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 "
                "--max_length 1024 --max_completion_length 3072 --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 "
                "--vllm_tensor_parallel_size 2 --sleep_level 1 --micro_batch_size 2 --global_batch_size 16"
            ),
            2,
            {
                "seq_length": 4096,
                "micro_batch_size": 2,
                "engine_sleeps": True,
                "engine_ranks": 2,
                "bucket_bytes": 0,
                "gpu_memory_utilization": 0.4,
                "has_reference_model": True,
                "offloads_for_generation_only": True,
                "is_colocated": True,
                "ranks_per_node": 8,
            },
        ),
        (
            "run.sh",
            f"{VERL} {CONTEXT} {ROLLOUT}.log_prob_max_token_len_per_gpu=10000",
            4,
            {"seq_length": 20000, "micro_batch_size": 1},
        ),
        ("run.sh", SLIME, 2, {"seq_length": 4096, "is_colocated": True, "bucket_bytes": GIB // 2}),
    ],
)
def test_the_budgets_of_training_and_of_log_probabilities_are_read(
    name: str, text: str, packed: int | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    job = read_job(text, tmp_path, name, version="2026-08-20" if "verl" in text else None)
    assert job.scenario is not None, job.not_supported
    assert job.scenario.packed_sequences == packed
    rollout = job.to_dict()["rollout"]
    assert {key: rollout[key] for key in expected} == expected


AWAY = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)


def test_the_training_step_of_the_phases_is_taken_again_only_after_another_one() -> None:
    job = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=128)
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=320, micro_batch_size=2, bucket_bytes=0)
    expected, progress = predict_phases(job, MemorySettings(), rollout), list[Progress]()
    with stepping(job, on_progress=progress.append) as steps:
        record = steps(MemorySettings())
        progress.clear()
        assert phases_of(record, steps, rollout) == expected
        assert not progress
        assert phases_of(record, steps, rollout) == expected, "not on a model that has taken a pass since"
        assert progress


@pytest.mark.parametrize("settings", [MemorySettings(), AWAY], ids=str)
def test_the_phases_of_a_job_are_those_of_a_live_model(
    settings: MemorySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = of_the_cpu_backend()
    monkeypatch.setattr("memlab.backends.simulated.backend", lambda _: on_cpu)
    gpu_memory_bytes, bucket_bytes = 8 * GIB, 4 * MIB
    job = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=128, packed_sequences=2)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=8, seq_length=320, gpu_memory_utilization=0.5, bucket_bytes=bucket_bytes
    )
    predicted = predict_phases(job, settings, rollout, gpu_memory_bytes)
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=128, packed_sequences=2, backend="cpu") as lab:
        step, passed = lab.step(settings), lab.forward_only(seq_length=320, warm_up=True)
        weights = [p.nbytes for p in inside(lab).model.engine.live.parameters()]
        parameters, reference = sum(weights) if settings == AWAY else 0, sum(weights)
        model = lab.scenario.architecture
        largest = 2 * model.vocab_size * model.hidden_size
    held = {phase.name: phase.training_bytes for phase in predicted.phases}
    expected = {
        "generation": step.static_bytes,
        "log-probabilities": passed.peak_allocated_bytes,
        "training step": step.peak_allocated_bytes,
        "weight sync": step.static_bytes + parameters + bucket_bytes,
    }
    assert held == pytest.approx(expected, rel=0, abs=256), "a live model holds a few numbers more between its steps"
    assert predicted.host_bytes_of_rank == pytest.approx(step.host_bytes, rel=1e-3)
    by_name = {phase.name: phase for phase in predicted.phases}
    assert by_name["training step"].engine_bytes == 0
    if settings == AWAY:
        by_share = replace(rollout, bucket_bytes=None, bucket_share=0.3)
        synced = predict_phases(job, settings, by_share, gpu_memory_bytes)
        engine_weights = 2 * job.architecture.num_parameters
        free = gpu_memory_bytes - synced.outside_torch_bytes - step.static_bytes - parameters - engine_weights
        assert synced.gathered_bytes == pytest.approx(0.3 * free, abs=256)
    # ms-swift's GRPO: a reference model, and offloading around generation alone.
    swift = replace(rollout, has_reference_model=True, offloads_for_generation_only=True, bucket_bytes=0)
    with_reference = predict_phases(job, settings, swift, gpu_memory_bytes)
    found = {phase.name: phase.training_bytes for phase in with_reference.phases}
    returned = sum(step.offloaded_bytes_by_group.values())
    assert found == pytest.approx(
        {
            "generation": expected["generation"] + (0 if settings == AWAY else reference),
            "log-probabilities": expected["log-probabilities"] + reference + max(0, returned - parameters),
            "training step": expected["training step"] + reference,
            "weight sync": step.static_bytes + returned + reference + largest,
        },
        rel=0,
        abs=1024,
    )
    on_host = with_reference.host_bytes_of_rank - predicted.host_bytes_of_rank
    assert on_host == (with_reference.reference_bytes if settings == AWAY else 0)
    assert "the reference model takes" in phases_table(with_reference)
    # An engine that generates with the training's parameters, and gradients that are freed for log-probabilities.
    shared = replace(
        rollout, engine_bytes=MIB, engine_has_own_weights=False, freed_for_log_probabilities=("gradients",)
    )
    of_shared = {phase.name: phase for phase in predict_phases(job, settings, shared).phases}
    assert of_shared["generation"].training_bytes == pytest.approx(step.static_bytes + parameters, abs=256)
    assert of_shared["weight sync"].training_bytes == pytest.approx(step.static_bytes + parameters, abs=256)
    assert (of_shared["generation"].engine_bytes, of_shared["weight sync"].engine_bytes) == (MIB, 0)
    gradients = 0 if settings == AWAY else 2 * reference  # fp32 beside parameters in bf16
    without = of_shared["log-probabilities"].training_bytes
    assert without == pytest.approx(expected["log-probabilities"] - gradients, abs=1024)
    left = gpu_memory_bytes - predicted.outside_torch_bytes - held["generation"]
    assert by_name["generation"].left_for_engine_bytes == left
    assert by_name["generation"].left_bytes == left - gpu_memory_bytes // 2


def test_a_row_is_filled_up_to_what_the_layout_divides(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"{VERL} {CONTEXT} actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8191 data.max_response_length=3071"
    )
    scenario, _ = Job.read(tmp_path / "run.sh", version="2026-08-20").required()
    assert scenario.seq_length == 2 * 8191 // 8 * 8, "tensor 2 x two chunks on each of two ranks"
    assert scenario.sequence_lengths == (4096, 4096, 4092, 4092), "as many as fill it, each of 2 x 2 chunks"
    (tmp_path / "run.sh").write_text(
        f"{VERL} data.max_response_length=3071".replace("use_dynamic_bsz=True", "use_dynamic_bsz=False")
    )
    assert Job.read(tmp_path / "run.sh", version="2026-08-20").required()[0].seq_length == 4096, "padded to two ranks"


SWIFT = "NPROC_PER_NODE=8 megatron rlhf --model microsoft/phi-4 --max_length 1024 "


@pytest.mark.parametrize(
    ("flags", "has_reference_model"),
    [("", True), ("--beta 0", True), ("--tuner_type lora", False), ("--train_type lora", False)],
)
def test_a_reference_model_is_kept_where_all_parameters_are_trained(
    flags: str, has_reference_model: bool, tmp_path: Path
) -> None:
    job = read_job(f"{SWIFT} --rlhf_type grpo {flags}", tmp_path)
    assert job.rollout is not None
    assert job.rollout.has_reference_model == has_reference_model
    job = read_job(f"{SWIFT} --rlhf_type dpo --tensor_model_parallel_size 2 {flags}", tmp_path)
    assert job.scenario is not None
    assert job.rollout is None
    assert job.scenario.state.reference_model == ("copy" if has_reference_model else "without_adapters")
    assert not job.not_modelled


@pytest.mark.parametrize(
    ("flags", "has_reference_model", "is_missed"),
    [
        ("", False, False),
        ("actor_rollout_ref.actor.use_kl_loss=True", True, False),
        ("algorithm.use_kl_in_reward=True", True, False),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.lora.rank=8", False, False),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.megatron.param_offload=True", False, False),
        (f"actor_rollout_ref.actor.use_kl_loss=True {OFFLOADED}", False, False),
        (
            f"algorithm.use_kl_in_reward=True {OFFLOADED} actor_rollout_ref.ref.megatron.param_offload=False",
            False,
            True,
        ),
    ],
)
def test_verl_keeps_a_reference_model_where_a_penalty_needs_one(
    flags: str, has_reference_model: bool, is_missed: bool, tmp_path: Path
) -> None:
    job = read_job(f"{VERL} {flags}", tmp_path, version="2026-08-20")
    assert job.rollout is not None and job.scenario is not None
    assert job.rollout.has_reference_model == has_reference_model
    missed = [one.bound_bytes for one in job.not_modelled if one.key.endswith("ref.megatron.param_offload")]
    expected = pytest.approx(job.scenario.architecture.num_parameters, rel=1e-4)  # 2 bytes, shared by two ranks
    assert missed == ([expected] if is_missed else [])


def test_a_share_that_is_none_is_said(tmp_path: Path) -> None:
    job = read_job(f"{SKYRL} generator.gpu_memory_utilization=60", tmp_path)
    assert job.rollout is not None
    assert job.rollout.gpu_memory_utilization is None
    assert "share of the GPU's memory is 60, must be from 0 to 1" in job.warnings[0]


def test_a_budget_below_one_is_refused_in_one_line_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log_prob_max_token_len_per_gpu is -5, must be a whole number of at least 1"):
        read_job(f"{VERL} {ROLLOUT}.log_prob_max_token_len_per_gpu=-5", tmp_path, version="2026-08-20")


def test_phases_of_which_nothing_is_known_have_no_verdict() -> None:
    phase = JobPhase(name="generation", training_bytes=MIB, engine_bytes=None, left_for_engine_bytes=GIB)
    phases = JobPhases(
        rank=0,
        is_colocated=True,
        gpu_memory_bytes=GIB,
        outside_torch_bytes=0,
        gathered_bytes=None,
        phases=(phase,),
        host_bytes_of_rank=0,
        ranks_per_node=1,
    )
    assert phases.to_dict()["fits"] is None
    assert replace(phases, phases=(phase, replace(phase, engine_bytes=0))).fits is None, "an engine of unknown size"
    assert replace(phases, phases=(replace(phase, left_for_engine_bytes=-1),)).fits is False, "with any engine"
    assert replace(phases, phases=(replace(phase, engine_bytes=0),)).fits is True
    assert replace(phases, phases=(phase, replace(phase, engine_bytes=2 * GIB))).fits is False


def test_predict_shows_the_phases_of_a_job_and_judges_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replays, take = [], Lab.take

    def seen(lab: Lab, request: StepRequest | PassRequest, *rest: Any) -> StepRecord:
        if isinstance(request, PassRequest):
            replays.append(inside(lab).model.replay.is_on)
        return take(lab, request, *rest)

    monkeypatch.setattr(Lab, "take", seen)
    path = tmp_path / "run.sh"
    path.write_text(f"{VERL} {OFFLOADED} actor_rollout_ref.rollout.gpu_memory_utilization=0.99")
    small = ["qwen3-moe-tiny", "--num-layers", "2", "--seq-length", "512", "--num-microbatches", "1"]
    command = ["predict", *small, "--job", str(path), "--framework-version", "2026-08-20", "--gpu-memory", "80GiB"]
    assert main([*command, "--json"]) == 1, "the engine leaves no room for what is outside torch"
    phases = json.loads(capfd.readouterr().out)["phases"]
    assert [phase["name"] for phase in phases["phases"]] == [
        "generation", "log-probabilities", "training step", "weight sync"
    ]  # fmt: skip
    assert (phases["fits"], phases["ranks_per_node"]) == (False, 8)
    assert main([*command, "--no-replay"]) == 1
    assert replays == [True, False]
    out = capfd.readouterr().out
    assert re.search("generation does not fit: short by .* of allocated bytes\n", out)
    assert "host memory of a node" in out


def test_a_forward_only_prediction_has_the_budget_of_the_job_s_log_probabilities(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{VERL} {ROLLOUT}.log_prob_max_token_len_per_gpu=1024 data.max_response_length=0")
    command = [
        "predict",
        "qwen3-moe-tiny",
        "--num-layers",
        "1",
        "--job",
        str(path),
        "--framework-version",
        "2026-08-20",
    ]
    assert main([*command, "--forward-only", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["forward_only"]
    assert (record["scenario"]["seq_length"], record["scenario"]["packed_sequences"]) == (1024, 1)
    assert "phases" not in record
