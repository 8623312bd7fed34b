"""Rules of verl and SkyRL that concern no memory: jobs that their own validation refuses are refused, others are not.

The refused and the accepted settings are among random ones that went through ``validate_config`` and the configs of
verl 0.9.1, through ``validate_cfg`` of SkyRL 0.3.0, and through Megatron-Bridge 0.6.2 with megatron-core 0.19.2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.job import Job

_ACTOR, _ROLLOUT, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_VERL = {
    "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B",
    "algorithm.adv_estimator": "grpo",
    f"{_ACTOR}.ppo_mini_batch_size": 64,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{_ROLLOUT}.name": "vllm",
    "trainer.n_gpus_per_node": 8,
}
_POLICY, _ENGINE, _ALGORITHM = "trainer.policy", "generator.inference_engine", "trainer.algorithm"
_OF_SKYRL, _CORRECTION = f"{_POLICY}.megatron_config", f"{_ALGORITHM}.off_policy_correction"
_SKYRL = {
    f"{_POLICY}.model.path": "Qwen/Qwen3-30B-A3B",
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.micro_train_batch_size_per_gpu": 1,
}


def read(folder: Path, program: str, keys: dict[str, object], version: str | None = None) -> Job:
    """Reads a launch script that gives a program these keys."""
    (folder / "run.sh").write_text(f"python3 -m {program} " + " ".join(f"{key}={value}" for key, value in keys.items()))
    return Job.read(folder / "run.sh", version=version)


@pytest.mark.parametrize("engine", ["megatron", "dp"])
@pytest.mark.parametrize(
    ("refused", "accepted", "is_of"),
    [
        ({f"{_ROLLOUT}.mode": "sync"}, {f"{_ROLLOUT}.mode": "async"}, ""),
        ({f"{_ROLLOUT}.name": "hf"}, {f"{_ROLLOUT}.name": "sglang"}, ""),
        ({f"{_ROLLOUT}.pipeline_model_parallel_size": 2}, {f"{_ROLLOUT}.pipeline_model_parallel_size": 1}, ""),
        ({f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True}, {f"{_ROLLOUT}.log_prob_use_dynamic_bsz": False}, ""),
        ({f"{_ROLLOUT}.expert_parallel_size": 8}, {f"{_ROLLOUT}.expert_parallel_size": 2}, ""),
        ({f"{_ROLLOUT}.tensor_model_parallel_size": 3}, {f"{_ROLLOUT}.tensor_model_parallel_size": 4}, ""),
        ({f"{_ACTOR}.ppo_micro_batch_size": 8}, {f"{_ACTOR}.ppo_micro_batch_size": "null"}, ""),
        ({f"{_ROLLOUT}.log_prob_micro_batch_size": 8}, {}, ""),
        ({f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "null"}, {}, ""),
        ({f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "null"}, {}, ""),
        ({f"{_CRITIC}.enable": True, f"{_CRITIC}.ppo_micro_batch_size_per_gpu": "null"}, {}, ""),
        ({"data.train_batch_size": 252}, {"data.train_batch_size": 256}, ""),
        ({f"{_OPTIM}.lr_scheduler_type": "linear"}, {f"{_OPTIM}.lr_scheduler_type": "cosine"}, "dp"),
        ({f"{_ACTOR}.loss_agg_mode": "mean"}, {f"{_ACTOR}.loss_agg_mode": "token-sum"}, ""),
        ({f"{_MEGATRON}.dtype": "bf16"}, {f"{_MEGATRON}.dtype": "bfloat16"}, "megatron"),
        ({f"{_MEGATRON}.use_mbridge": False}, {f"{_MEGATRON}.use_mbridge": True}, "megatron"),
        ({f"{_MEGATRON}.grad_offload": True}, {}, "megatron"),
        ({f"{_MEGATRON}.router_replay.mode": "record"}, {f"{_MEGATRON}.router_replay.mode": "R2"}, "megatron"),
        ({f"{_OPTIM}.exp_avg_dtype": "fp8"}, {f"{_OPTIM}.exp_avg_dtype": "bf16"}, "megatron"),
        ({f"{_MEGATRON}.dynamic_context_parallel": True}, {f"{_MEGATRON}.max_seqlen_per_dp_cp_rank": 4096}, "megatron"),
        (
            {f"{_TRANSFORMER}.moe_token_dispatcher_type": "allgather"},
            {f"{_TRANSFORMER}.variable_seq_lengths": False},
            "megatron",
        ),
        (
            {f"{_TRANSFORMER}.overlap_moe_expert_parallel_comm": True},
            {f"{_MEGATRON}.expert_model_parallel_size": 2},
            "megatron",
        ),
    ],
)
def test_verl(engine: str, refused: dict[str, object], accepted: dict[str, object], is_of: str, tmp_path: Path) -> None:
    if is_of not in ("", engine):
        return
    start = {"model_engine": engine} | _VERL
    assert read(tmp_path, "verl.trainer.main_ppo", start | refused, "0.9.1").cannot_start is not None
    takes_both = not refused.keys() & (accepted.keys() | start.keys()) and accepted
    kept = {**(refused if takes_both else {}), **accepted}
    assert read(tmp_path, "verl.trainer.main_ppo", start | kept, "0.9.1").cannot_start is None


def test_a_job_of_an_unknown_version_of_verl_is_warned_of_what_later_versions_refuse(tmp_path: Path) -> None:
    """verl takes ``rollout.mode=sync`` until 0.6."""
    keys = {"model_engine": "dp", f"{_ROLLOUT}.mode": "sync"} | _VERL
    unknown, earlier = (read(tmp_path, "verl.trainer.main_ppo", keys, one) for one in (None, "before-2026-08-20"))
    assert unknown.cannot_start is earlier.cannot_start is None
    assert [any("must be async" in text for text in job.warnings) for job in (unknown, earlier)] == [True, False]


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("refused", "accepted", "is_of"),
    [
        ({f"{_ALGORITHM}.use_kl_in_reward": "true"}, {f"{_ALGORITHM}.use_kl_loss": "false"}, ""),
        ({f"{_ALGORITHM}.advantage_estimator": "gae"}, {f"{_ALGORITHM}.advantage_estimator": "rloo"}, ""),
        ({f"{_ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"}, {f"{_ALGORITHM}.max_seq_len": 4096}, ""),
        ({f"{_ALGORITHM}.loss_reduction": "mean"}, {f"{_ALGORITHM}.loss_reduction": "token_mean"}, ""),
        ({f"{_POLICY}.language_model_only": "true"}, {f"{_ENGINE}.language_model_only": "true"}, ""),
        ({"generator.merge_stepwise_output": "true"}, {"generator.step_wise_trajectories": "true"}, ""),
        ({"generator.sampling_params.logprobs": 5}, {"generator.sampling_params.logprobs": 1}, ""),
        ({f"{_ENGINE}.num_engines": 4}, {f"{_ENGINE}.tensor_parallel_size": 2}, ""),
        ({f"{_ENGINE}.num_engines": 2}, {"trainer.placement.colocate_all": "false"}, ""),
        ({"trainer.train_batch_size": 300}, {"trainer.train_batch_size": 512}, ""),
        (
            {f"{_ALGORITHM}.loss_reduction": "token_mean_legacy", "generator.step_wise_trajectories": "true"},
            {"generator.step_wise_trajectories": "false"},
            "",
        ),
        (
            {f"{_ALGORITHM}.policy_loss_type": "kl_cov", f"{_CORRECTION}.sequence_mask_metric": "product"},
            {f"{_CORRECTION}.sequence_mask_metric": "null"},
            "",
        ),
        ({f"{_CORRECTION}.tis_ratio_type": "mean"}, {f"{_CORRECTION}.tis_ratio_type": "token"}, ""),
        ({f"{_CORRECTION}.sequence_mask_metric": "sum"}, {f"{_CORRECTION}.sequence_mask_metric": "geometric"}, ""),
        ({"trainer.max_ckpts_to_keep": 0}, {"trainer.max_ckpts_to_keep": -1}, ""),
        (
            {f"{_POLICY}.model.lora.rank": 8, f"{_POLICY}.model.lora.alpha": 8, f"{_ENGINE}.backend": "sglang"},
            {f"{_ENGINE}.backend": "vllm"},
            "",
        ),
        ({f"{_ENGINE}.backend": "sglang"}, {f"{_ENGINE}.backend": "vllm"}, "megatron"),
        ({f"{_ENGINE}.weight_sync_backend": "gloo"}, {f"{_ENGINE}.weight_sync_backend": "nccl"}, "megatron"),
        ({f"{_POLICY}.sequence_parallel_size": 2}, {f"{_POLICY}.sequence_parallel_size": 1}, "megatron"),
        ({"trainer.critic.model.path": "Qwen/Qwen3-8B"}, {"trainer.critic.model.path": "null"}, "megatron"),
        ({f"{_OF_SKYRL}.moe_token_dispatcher_type": "allgather"}, {}, "megatron"),
        (
            {f"{_OF_SKYRL}.context_parallel_size": 2, "trainer.remove_microbatch_padding": "false"},
            {"trainer.remove_microbatch_padding": "true"},
            "megatron",
        ),
        (
            {"trainer.ref.megatron_config.context_parallel_size": 2, "trainer.use_sample_packing": "false"},
            {"trainer.ref.megatron_config.context_parallel_size": 1},
            "megatron",
        ),
        (
            {
                f"{_OF_SKYRL}.pipeline_model_parallel_size": 2,
                f"{_OF_SKYRL}.transformer_config_kwargs.virtual_pipeline_model_parallel_size": 2,
            },
            {f"{_OF_SKYRL}.pipeline_model_parallel_size": 1},
            "megatron",
        ),
    ],
)
def test_skyrl(
    strategy: str, refused: dict[str, object], accepted: dict[str, object], is_of: str, tmp_path: Path
) -> None:
    if is_of not in ("", strategy):
        return
    start, program = {"trainer.strategy": strategy} | _SKYRL, "skyrl.train.entrypoints.main_base"
    assert read(tmp_path, program, start | refused).cannot_start is not None
    kept = refused | accepted if accepted else {}
    assert read(tmp_path, program, start | kept).cannot_start is None


@pytest.mark.parametrize("key", ["remove_microbatch_padding", "use_sample_packing"])
def test_skyrls_sft_trainer_splits_no_padded_rows(key: str, tmp_path: Path) -> None:
    """It refuses them before packing rows of a budget switches the key on (``validate_sft_cfg`` of 0.3.0)."""
    keys = {"model.path": "Qwen/Qwen3-8B", "max_length": 4096, key: "false", "use_sequence_packing": "true"}
    split = keys | {"megatron_config.context_parallel_size": 2}
    refused, job = (read(tmp_path, "skyrl.train.main_sft", one) for one in (split, keys))
    assert f"{key} is False, must be true with context parallelism" in (refused.cannot_start or "")
    assert job.cannot_start is None
    assert job.not_modelled == ()
    assert job.without_effect[key] == "use_sequence_packing switches it on"


def test_skyrl_has_no_chunks_of_a_model_on_one_stage(tmp_path: Path) -> None:
    """Its workers do not tell Megatron of them, and Megatron-Bridge reads them with several stages only."""
    key = f"{_OF_SKYRL}.transformer_config_kwargs.virtual_pipeline_model_parallel_size"
    job = read(tmp_path, "skyrl.train.entrypoints.main_base", {"trainer.strategy": "megatron", key: 2} | _SKYRL)
    assert job.scenario is not None
    assert job.scenario.layout.virtual_pipeline_model_parallel_size == 1
    assert key in job.without_effect


@pytest.mark.parametrize(
    ("keys", "unknown"),
    [
        ({f"{_ALGORITHM}.use_kl_in_reward": "true"}, f"{_ALGORITHM}.use_kl_loss"),
        ({f"{_ALGORITHM}.advantage_estimator": "gae"}, "trainer.critic.model.path"),
        ({f"{_ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"}, f"{_ALGORITHM}.max_seq_len"),
        ({f"{_ENGINE}.run_engines_locally": "false"}, f"{_ENGINE}.external_server_urls"),
    ],
)
def test_a_value_that_only_the_running_job_knows_refuses_no_job(
    keys: dict[str, object], unknown: str, tmp_path: Path
) -> None:
    start = {"trainer.strategy": "fsdp"} | _SKYRL | keys | {unknown: "$VALUE"}
    job = read(tmp_path, "skyrl.train.entrypoints.main_base", start)
    assert job.cannot_start is None
    assert (job.not_supported or "").startswith(f"{unknown} is known only when the job runs")


def test_an_earlier_checkout_of_skyrl_is_warned_of_later_rules(tmp_path: Path) -> None:
    """Releases before 0.3 set ``max_seq_len`` from the lengths (``validate_cfg`` of skyrl-train 0.2)."""
    folder = tmp_path / "skyrl-train" / "skyrl_train" / "config"
    folder.mkdir(parents=True)
    (folder / "ppo_base_config.yaml").write_text("trainer: {strategy: fsdp2}\n")
    keys = {"trainer.strategy": "fsdp2", f"{_ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"}
    job = read(tmp_path, "skyrl_train.entrypoints.main_base", _SKYRL | keys)
    assert job.cannot_start is None
    assert any("needs trainer.algorithm.max_seq_len" in text for text in job.warnings)


def test_an_option_of_earlier_releases_of_skyrl_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Forks of releases before 0.3 start their examples with it."""
    keys = {"trainer.strategy": "fsdp", f"{_ENGINE}.async_engine": "false"}
    job = read(tmp_path, "skyrl.train.entrypoints.main_base", _SKYRL | keys)
    assert job.cannot_start is None
    assert any("which SkyRL refuses since 0.3" in text for text in job.warnings)
