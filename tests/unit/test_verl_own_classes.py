"""verl's engines that memlab does not predict: their fields are all named, by the engines' own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.jobs.any_model import of_any_model
from memlab.jobs.job import Job

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
TRAINER = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {model}.path=Qwen/Qwen3-8B model_engine={engine} "
    "{actor}.ppo_mini_batch_size=64 {actor}.ppo_micro_batch_size_per_gpu=1 data.max_prompt_length=1024 "
    "data.max_response_length=3072 {keys}"
)
SFT = (
    "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B engine={engine} "
    "data.train_batch_size=64 data.max_length=2048 data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2 {keys}"
)
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_num_layers": 1}


def fields(folder: Path, command: str, **words: str) -> tuple[Job, dict[str, Any]]:
    """Returns a job, and what is the same for models of all kinds."""
    (folder / "run.sh").write_text(command.format(actor=ACTOR, model=MODEL, **words))

    def read(model: Any) -> Job:
        return Job.read(folder / "run.sh", architecture=model, fields_only=True)

    job = Job.read(folder / "run.sh")
    common = of_any_model(job, read)
    assert common is not None
    found = common.to_dict()
    parts = ("workload", "layout", "state", "settings", "rollout")
    return job, {name: value for part in parts for name, value in found.get(part, {}).items()} | found["model"]


@pytest.mark.parametrize(
    ("engine", "keys", "said"),
    [
        (
            "veomni",
            "{actor}.veomni.ulysses_parallel_size=2 {actor}.veomni.param_offload=True",
            WHOLE_LAYERS
            | {"context_parallel_size": 2, "data_parallel_size": 4, "offload_parameters": True}
            | {"reshard_after_forward": "all", "fp32_sharded_params": True, "fsdp2_forward_prefetch_depth": 1},
        ),
        (
            "veomni",
            "{actor}.veomni.mixed_precision=False {actor}.veomni.enable_full_shard=False {actor}.veomni.fsdp_size=4",
            {"fp32_sharded_params": False, "reshard_after_forward": "none", "dp_replicate_size": 2},
        ),
        (
            "torchtitan",
            "{actor}.torchtitan.tensor_parallel_size=2 {actor}.torchtitan.activation_checkpoint=full",
            WHOLE_LAYERS | {"tensor_model_parallel_size": 2, "data_parallel_size": 4, "adam_implementation": "fused"},
        ),
    ],
)
def test_an_engine_of_the_trainer_has_its_own_keys(
    engine: str, keys: str, said: dict[str, Any], tmp_path: Path
) -> None:
    job, found = fields(tmp_path, TRAINER, engine=engine, keys=keys.format(actor=ACTOR))
    assert job.scenario is None and job.framework == f"verl-{engine}" and not job.questions
    assert job.not_supported is not None and f"model_engine {engine}" in job.not_supported
    assert {name: found[name] for name in said} == said
    assert found["fields"]["num_layers"] == 36 and found["num_microbatches"] * found["data_parallel_size"] == 64
    assert not [one.key for one in job.not_modelled if one.effect == "unknown"]


@pytest.mark.parametrize(("shards", "copies"), [(-1, 1), (4, 1), (2, 2), (8, 1)])
def test_ranks_that_share_a_row_have_shards_of_their_own_under_veomni(shards: int, copies: int, tmp_path: Path) -> None:
    """``VeOmniEngine`` (1dda039b) counts copies of the data, to which ``fsdp_mesh`` of veomni 0.1.12 adds these ranks."""
    keys = "{actor}.veomni.ulysses_parallel_size=2 {actor}.veomni.fsdp_size=" + str(shards)
    _, found = fields(tmp_path, TRAINER, engine="veomni", keys=keys.format(actor=ACTOR))
    assert found.get("dp_replicate_size", 1) == copies


@pytest.mark.parametrize(
    ("keys", "is_on_host"),
    [
        ("", False),
        (" {actor}.veomni.param_offload=True", True),
        (" actor_rollout_ref.ref.veomni.param_offload=True", True),
        (" {actor}.veomni.param_offload=True actor_rollout_ref.ref.veomni.param_offload=False", False),
    ],
)
def test_veomni_moves_a_reference_model_as_the_policy_unless_told_otherwise(
    keys: str, is_on_host: bool, tmp_path: Path
) -> None:
    keys = f"{ACTOR}.use_kl_loss=True +trainer.use_legacy_worker_impl=disable{keys.format(actor=ACTOR)}"
    job, found = fields(tmp_path, TRAINER, engine="veomni", keys=keys)
    assert found["reference_pass"]["is_on_host"] is is_on_host
    assert not [one.key for one in job.not_modelled if one.effect == "unknown" or "legacy" in one.key]


FUSED = (
    "optim=automodel optim.optimizer=FusedAdam optim.optimizer_impl=transformer_engine.pytorch.optimizers.fused_adam "
    "optim.master_weights=true optim.store_param_remainders=true optim.exp_avg_dtype=bf16 optim.exp_avg_sq_dtype=bf16 "
)


@pytest.mark.parametrize(
    ("engine", "keys", "said"),
    [
        (
            "automodel",
            "engine.ep_size=8 engine.activation_checkpointing=True engine.model_dtype=bf16 engine.dp_replicate_size=2 "
            + FUSED,
            WHOLE_LAYERS
            | {"expert_model_parallel_size": 8, "reshard_after_forward": "all_but_last", "fp32_sharded_params": False}
            | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "master_weights": True}
            | {"store_param_remainders": True, "defer_fsdp_grad_sync": True, "dp_replicate_size": 2},
        ),
        ("veomni", "", WHOLE_LAYERS | {"fp32_sharded_params": True, "defer_fsdp_grad_sync": False}),
        ("torchtitan", "", {"fp32_sharded_params": True, "recompute_granularity": None}),
    ],
)
def test_an_engine_of_fine_tuning_has_its_own_keys(
    engine: str, keys: str, said: dict[str, Any], tmp_path: Path
) -> None:
    job, found = fields(tmp_path, SFT, engine=engine, keys=keys)
    assert job.scenario is None and job.framework == f"verl-sft-{engine}" and not job.questions
    assert {name: found[name] for name in said} == said
    assert (found["seq_length"], found["num_microbatches"], found["data_parallel_size"]) == (4096, 4, 8)
    assert not [one.key for one in job.not_modelled if one.effect == "unknown"]


def test_what_only_the_engine_s_classes_read_is_named(tmp_path: Path) -> None:
    keys = f"{ACTOR}.veomni.moe_implementation=fused_triton {ACTOR}.veomni.rms_norm_implementation=triton"
    job, _ = fields(tmp_path, TRAINER, engine="veomni", keys=f"{keys} {ACTOR}.veomni.swiglu_mlp_implementation=eager")
    named = {one.key.rpartition(".")[2] for one in job.not_modelled}
    assert {"moe_implementation", "rms_norm_implementation"} <= named and "swiglu_mlp_implementation" not in named
