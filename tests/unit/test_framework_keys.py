"""Every key of a framework is used, not modelled, or without effect; a default that memlab does not model is said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memlab.jobs.frameworks import without_effect
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.jobs.frameworks.without_effect import has_no_effect, keys_without_effect
from memlab.jobs.job import Job

_ACTOR = "actor_rollout_ref.actor"
_VERL_MODEL = f"{_ACTOR}.megatron.override_transformer_config"
_SKYRL_MODEL = "trainer.policy.megatron_config.transformer_config_kwargs"
_SCRIPTS = {
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={model} algorithm.adv_estimator=grpo "
    f"trainer.n_gpus_per_node=1 {_ACTOR}.ppo_micro_batch_size_per_gpu=1 {_ACTOR}.ppo_mini_batch_size=1 "
    f"{_ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=True data.max_prompt_length=2048 "
    "data.max_response_length=2048 ",
    "skyrl": "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path={model} "
    "trainer.placement.policy_num_gpus_per_node=1 trainer.policy_mini_batch_size=1 generator.n_samples_per_prompt=1 "
    "trainer.max_prompt_length=2048 generator.sampling_params.max_generate_length=2048 ",
}


def read(framework: str, folder: Path, keys: str = "", model: str = "Qwen/Qwen3-30B-A3B") -> Job:
    path = folder / "run.sh"
    path.write_text(_SCRIPTS[framework].format(model=model) + keys)
    return Job.read(path)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_key_is_in_one_list_only(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert not framework.names() & set(framework.without_effect)
    assert len({row.name for row in framework.missing}) == len(framework.missing)
    assert not {key for key in framework.without_effect if "*" in key.removesuffix(".*").removesuffix("_*")}


def test_a_refused_value_of_the_optimizers_own_section_is_named_with_its_line(tmp_path: Path) -> None:
    key = f"{_ACTOR}.optim.override_optimizer_config.exp_avg_dtype"
    with pytest.raises(ValueError, match=f"line 1: {key} is 'int3', must be one of bf16"):
        read("verl", tmp_path, f"{key}=int3")


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("start", ["model.moe_", "optimizer.", "ddp.", "train.", "checkpoint.", f"{_ACTOR}.", f"{_VERL_MODEL}.moe_", "actor_rollout_ref.rollout.", "dataset.", "model.kd_config.", "trainer.", f"{_SKYRL_MODEL}.moe_", "generator."])  # fmt: skip
def test_a_key_that_nobody_read_is_not_called_without_effect(name: str, start: str) -> None:
    assert not FRAMEWORKS[name].knows(f"{start}of_the_next_release")


def test_a_line_of_a_list_names_the_keys_that_bash_makes_of_it() -> None:
    lists = sorted(Path(without_effect.__file__).with_name("keys_without_effect").glob("*.txt"))
    lines = [line for path in lists for line in path.read_text().splitlines() if line and line[0] != "#"]
    script = "set -f\nprintf '%s\\n' " + " ".join(lines)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("the truth is bash, which is not installed")
    # Not as an argument, of which Linux takes 128 KiB: all lists together have 100.
    in_bash = subprocess.run([bash], input=script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [key for path in lists for _, key in without_effect.headed_keys(path.stem)] == in_bash
    assert len(in_bash) > len(lines) and not [key for key in in_bash if {*key} & {*"{},"}]


def test_only_what_a_framework_passes_on_unread_is_an_open_mapping() -> None:
    keys = keys_without_effect("verl")
    assert has_no_effect("actor_rollout_ref.rollout.engine_kwargs.vllm.of_the_next_release", keys)
    assert not has_no_effect("actor_rollout_ref.rollout.engine_kwargs_of_the_next_release", keys)


# On an H200 (TE 2.12.0, megatron-core 0.16.1), unfused SwiGLU took 0.30 GB more with 2 layers of Qwen3-30B-A3B, and
# 1.17 GB more with 4 layers of phi-4, without recompute. By hand: 6 bytes per row of an expert and 4 bytes per token,
# times the MLP's width; with full recompute, those of one layer.
@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_bridges_qwen_models_have_the_unfused_activation_and_verl_fuses_gradients(
    framework: str, tmp_path: Path
) -> None:
    prefix = _VERL_MODEL if framework == "verl" else _SKYRL_MODEL
    state = read(framework, tmp_path).required()[0].state
    assert (state.bias_activation_fusion, state.gradient_accumulation_fusion) == (False, framework == "verl")
    keys = f"{prefix}.bias_activation_fusion=True {prefix}.gradient_accumulation_fusion={framework == 'skyrl'}"
    state = read(framework, tmp_path, keys).required()[0].state
    assert (state.bias_activation_fusion, state.gradient_accumulation_fusion) == (True, framework == "skyrl")


@pytest.mark.parametrize(
    ("framework", "key", "num_bytes"),
    [
        ("verl", f"{_ACTOR}.calculate_sum_pi_squared=True", 4 * 4 * 4096 * 151_936 // 2),
        (
            "skyrl",
            "trainer.vocab_entropy_chunk_size=64 trainer.algorithm.use_entropy_loss=true",
            2 * 4 * 4096 * 151_936 // 2,
        ),
        ("verl", f"{_ACTOR}.megatron.router_replay.mode=R3", 2 * 8 * 4096 * 8 * 48 * (2 // 2 + 1)),
    ],
)
def test_tensors_of_the_loss_and_of_the_router_are_bounded(
    framework: str, key: str, num_bytes: int, tmp_path: Path
) -> None:
    """By hand: 4,096 tokens, shared by 2 ranks, with 48 layers, 8 experts a token and 2 micro-batches of one row.

    Of the chosen experts, one whole row is on the device too, twice.
    """
    sizes = {
        "verl": f"trainer.n_gpus_per_node=2 {_ACTOR}.megatron.tensor_model_parallel_size=2 "
        f"data.max_prompt_length=2048 data.max_response_length=2048 {_ACTOR}.ppo_mini_batch_size=2 ",
        "skyrl": "trainer.placement.policy_num_gpus_per_node=2 "
        "trainer.policy.megatron_config.tensor_model_parallel_size=2 trainer.max_prompt_length=2048 "
        "generator.sampling_params.max_generate_length=2048 ",
    }
    job = read(framework, tmp_path, sizes[framework] + key)
    (row,) = [one for one in job.not_modelled if key.startswith(one.key)]
    assert row.bound_bytes == num_bytes


# What simulated steps with Megatron's own router change by, 2 layers of Qwen3-30B-A3B and 4,096 tokens.
@pytest.mark.parametrize(
    ("override", "measured"),
    [
        ("moe_input_jitter_eps=0.01", 33_556_480),
    ],
)
def test_what_another_router_keeps_is_bounded(override: str, measured: int, tmp_path: Path) -> None:
    tokens = "data.max_prompt_length=2048 data.max_response_length=2048"
    job = read("verl", tmp_path, f"{_VERL_MODEL}.num_layers=2 {tokens} +{_VERL_MODEL}.{override}")
    (row,) = [one for one in job.not_modelled if one.key == f"{_VERL_MODEL}.{override.partition('=')[0]}"]
    assert row.bound_bytes is not None and measured <= row.bound_bytes <= 4 * measured + 4 * 4096 * (128 + 2 * 5 * 8)


@pytest.mark.parametrize(
    ("override", "of_a_parameter", "of_a_share"),
    [
        ("override_ddp_config.reduce_scatter_with_fp32_accumulation=True", 4, 4),
        ("override_ddp_config.param_name_patterns_for_fp32_local_accumulation=[norm]", 4, 0),
        ("override_ddp_config.num_distributed_optimizer_instances=2", 12, -12),
    ],
)
def test_what_gradients_and_optimizer_need_otherwise_is_bounded(
    override: str, of_a_parameter: int, of_a_share: int, tmp_path: Path
) -> None:
    """By hand: a dense model on 8 data parallel ranks, with gradients in fp32 and 12 bytes of state per parameter."""
    key = f"{_ACTOR}.megatron.{override.partition('=')[0]}"
    batch = f"trainer.n_gpus_per_node=8 {_ACTOR}.ppo_mini_batch_size=8"
    job = read("verl", tmp_path, f"{batch} +{_ACTOR}.megatron.{override}", "Qwen/Qwen3-8B")
    (row,) = [one for one in job.not_modelled if one.key == key]
    parameters = job.required()[0].architecture.num_parameters
    assert row.bound_bytes == pytest.approx(parameters * (of_a_parameter + of_a_share / 8), rel=1e-6)


def test_an_interleaved_pipeline_without_overlap_is_said_and_another_one_is_not(tmp_path: Path) -> None:
    key = f"{_VERL_MODEL}.overlap_p2p_comm=False"
    layers = (
        f"trainer.n_gpus_per_node=2 {_ACTOR}.megatron.pipeline_model_parallel_size=2 {_ACTOR}.ppo_mini_batch_size=4"
    )
    job = read("verl", tmp_path, f"{key} {layers}")
    assert job.without_effect[key.partition("=")[0]] == "the pipeline is not interleaved"
    job = read("verl", tmp_path, f"{key} {layers} {_ACTOR}.megatron.virtual_pipeline_model_parallel_size=2")
    assert [one.effect for one in job.not_modelled if one.key == key.partition("=")[0]] == ["less"]
