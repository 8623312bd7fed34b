"""Variables of the environment that change a training GPU's memory are named, wherever a job sets them."""

from pathlib import Path

import pytest

from memlab.jobs.bounds import changes_the_step
from memlab.jobs.environment import is_outside_torch
from memlab.jobs.job import Job

_MEGATRON_LM = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8
 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8 --bf16"""
_FILES = {
    "exported": ("job.sh", "export {name}={value}\n" + _MEGATRON_LM.replace("\n", " \\\n")),
    "bridge": (
        "job.yaml",
        "model:\n  hf_model_id: meta-llama/Llama-3.2-1B\ntrain: {{micro_batch_size: 1}}\nenv_vars:\n  {name}: '{value}'\n",
    ),
    "nemo-rl": ("job.yaml", "policy:\n  megatron_cfg:\n    enabled: true\n    env_vars:\n      {name}: '{value}'\n"),
    "nemo-rl-dtensor": (
        "job.yaml",
        "policy:\n  dtensor_cfg:\n    enabled: true\n    env_vars: {{{name}: '{value}'}}\n",
    ),
    "verl": (
        "job.sh",
        (
            "python3 -m verl.trainer.main_ppo +ray_kwargs.ray_init.runtime_env.env_vars.{name}=\"'{value}'\" "
            "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"
        ),
    ),
    "slime": (
        "job.sh",
        (
            """ray job submit --runtime-env-json='{{"env_vars": {{"{name}": "{value}", "A": "$B"}}}}' -- python3 train.py """
            "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-layers 4\n"
        ),
    ),
}


def _named(folder: Path, framework: str, name: str, value: str) -> dict[str, str]:
    file, text = _FILES[framework]
    (folder / file).write_text(text.format(name=name, value=value))
    job = Job.read(folder / file)
    assert not any(one.key.endswith(name) and one.effect == "unknown" for one in job.not_modelled)
    return {one.key.rpartition(".")[2]: one.effect for one in job.not_modelled}


@pytest.mark.parametrize("framework", _FILES)
def test_a_variable_is_named_wherever_a_framework_gives_its_ranks_one(tmp_path: Path, framework: str) -> None:
    assert _named(tmp_path, framework, "NCCL_ALGO", "Ring")["NCCL_ALGO"] == "either"


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "either"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", "either"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", None),  # torch's own on Hopper
        ("CUBLASLT_WORKSPACE_SIZE", "65536", "either"),
        ("TORCHDYNAMO_DISABLE", "1", "either"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", None),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "either"),
        ("NVTE_CPU_OFFLOAD_V1", "1", None),  # Megatron-LM requires it for offload, which memlab measured with it
        ("CUDA_MODULE_LOADING", "EAGER", "more"),
        ("NCCL_NVLS_ENABLE", "1", "more"),
        ("NCCL_NVLS_ENABLE", "0", None),
        ("NCCL_LL128_BUFFSIZE", "1024", "either"),
        ("NCCL_MAX_NCHANNELS", "4", "either"),
        ("NCCL_IB_TIMEOUT", "22", None),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", None),
    ],
)
def test_what_a_variable_changes(tmp_path: Path, name: str, value: str, effect: str | None) -> None:
    assert _named(tmp_path, "exported", name, value).get(name) == effect


def test_an_engines_variables_are_not_the_trainings(tmp_path: Path) -> None:
    text = "policy:\n  megatron_cfg: {enabled: true}\n  generation: {vllm_cfg: {env_vars: {NCCL_ALGO: Ring}}}\n"
    (tmp_path / "job.yaml").write_text(text)
    assert not any("NCCL_ALGO" in one.key for one in Job.read(tmp_path / "job.yaml").not_modelled)


@pytest.mark.parametrize(("key", "is_outside"), [("env_vars.NCCL_PROTO", True), ("CUBLAS_WORKSPACE_CONFIG", False)])
def test_what_torch_does_not_allocate_leaves_the_range_of_the_peak_alone(key: str, *, is_outside: bool) -> None:
    assert is_outside_torch(key) is is_outside
    assert changes_the_step(key) is not is_outside
