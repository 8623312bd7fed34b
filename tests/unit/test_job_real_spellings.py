"""Spellings and methods that public jobs have and that the small files of `test_jobs` do not."""

from pathlib import Path

import pytest

from memlab.jobs.job import Job

_VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 "
_SLIME = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --expert-model-parallel-size 8 "


@pytest.mark.parametrize(
    ("script", "version"),
    [
        (
            f'MODEL=${{DATA:-"${{HOME}}/verl"}}/Qwen3-30B-A3B\n{_VERL} actor_rollout_ref.model.path="$MODEL"',
            "2026-08-20",
        ),
        (f"{_SLIME} --hf-checkpoint $(pwd)/Qwen3-30B-A3B/ --seq-length 4096", None),
        (f"{_SLIME} --hf-checkpoint ${{FOLDER}}/Qwen3-30B-A3B --seq-length 4096", None),
        ("NPROC_PER_NODE=8 megatron sft --load ${FOLDER}/Qwen3-30B-A3B-mcore --expert_model_parallel_size 8", None),
    ],
)
def test_a_model_is_known_by_its_name_where_its_folder_is_not(script: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(script)
    job = Job.read(tmp_path / "run.sh", version=version)
    assert job.required()[0].architecture.name == "qwen3-30b-a3b"
    assert not [one for one in job.taken if "\0" in str(one.memlab_value)]
    (tmp_path / "run.sh").write_text(script.replace("Qwen3-30B-A3B", "$(ls models)"))
    assert "known only when the script runs" in " ".join(Job.read(tmp_path / "run.sh", version=version).warnings)


def test_sizes_that_a_given_architecture_replaces_are_said(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model:\n  num_layers: 8\n  num_moe_experts: 48\n  moe_router_topk: 8\n  qk_clip: true\n"
        "train:\n  micro_batch_size: 1\n  global_batch_size: 8\nddp: {grad_reduce_in_fp32: true}\n"
    )
    job = Job.read(path, architecture="qwen3-30b-a3b", world_size=8)
    assert job.required()[0].architecture.num_moe_experts == 128
    assert "--architecture qwen3-30b-a3b replaces model.num_moe_experts 48 (line 3) by 128" in job.warnings
    assert "model.qk_clip" in {one.key for one in job.not_modelled}
    path.write_text(path.read_text().replace("48", "128"))
    warnings = Job.read(path, architecture="qwen3-30b-a3b", world_size=8).warnings
    assert not [one for one in warnings if "replaces" in one]


@pytest.mark.parametrize("modules", ["core_attn mlp moe_act", '"[core_attn mlp moe_act]"'])
def test_several_values_of_a_test_of_megatron_lm_may_be_in_brackets(modules: str, tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text(
        "MODEL_ARGS:\n  --recompute-granularity: selective\n  --micro-batch-size: 1\n  --num-layers: 4\n"
        f"  --recompute-modules: {modules}\n"
    )
    job = Job.read(tmp_path / "model_config.yaml", architecture="phi-4-tiny")
    assert job.required()[1].recompute_modules == ("core_attn", "mlp", "moe_act")


@pytest.mark.parametrize(("method", "pairs"), [("sft", 1), ("dpo", 2), ("rm", 2)])
def test_methods_of_nemo_rl_without_generation_keep_everything_on_the_device(
    method: str, pairs: int, tmp_path: Path
) -> None:
    policy = (
        "policy:\n  model_name: microsoft/phi-4\n  train_micro_batch_size: 2\n  train_global_batch_size: 32\n"
        "  max_total_sequence_length: 2048\n  sequence_packing: {enabled: false}\n"
        "  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, sequence_parallel: false}\n"
        "cluster: {num_nodes: 1, gpus_per_node: 8}\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(f"{method}: {{max_num_epochs: 1}}\n{policy}")
    job = Job.read(path)
    scenario, settings = job.required()
    assert (scenario.micro_batch_size, scenario.num_microbatches) == (2 * pairs, 4)
    assert not (settings.offload_parameters or settings.offload_gradients or settings.offload_optimizer)
    assert job.rollout is None
    assert "policy.megatron_cfg.sequence_parallel" in {one.key for one in job.not_modelled}
    path.write_text(f"grpo: {{max_num_epochs: 1}}\n{policy}")
    job = Job.read(path)
    scenario, settings = job.required()
    assert (scenario.micro_batch_size, settings.offload_parameters) == (2, True)
    assert job.rollout is not None


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_slime_takes_the_allocator_from_the_environment_that_ray_gives_the_ranks(name: str, tmp_path: Path) -> None:
    environment = f'{{ \\"env_vars\\": {{ \\"X\\": \\"$(nproc)\\", \\"{name}\\": \\"expandable_segments:True\\" }} }}'
    (tmp_path / "run.sh").write_text(
        f'ENVIRONMENT="{environment}"\nray job submit --runtime-env-json="${{ENVIRONMENT}}" -- {_SLIME}'
        "--hf-checkpoint /models/Qwen3-30B-A3B --seq-length 4096"
    )
    assert Job.read(tmp_path / "run.sh").required()[0].allocator.expandable_segments


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_preference_methods_of_ms_swift_train_with_the_language_model_s_loss(method: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"NPROC_PER_NODE=8 megatron rlhf --rlhf_type {method} --model microsoft/phi-4 --max_length 1024"
    )
    state = Job.read(tmp_path / "run.sh").required()[0].state
    assert (state.loss, state.cross_entropy_loss_fusion) == ("cross_entropy", True)
