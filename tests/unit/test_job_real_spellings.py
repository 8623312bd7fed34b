"""Spellings and methods that public jobs have and that the small files of `test_jobs` do not."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from memlab.config.architectures import find_architecture, published_architecture
from memlab.config.model_restrictions import check_on_model
from memlab.jobs.arguments import read_overrides
from memlab.jobs.entries import Entries
from memlab.jobs.frameworks.registry import TABLES
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.jobs.yaml_tree import flat, read_yaml
from tests.unit.job_files import read_job

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
        (
            f"{_SLIME} --hf-checkpoint ${{HUB}}/models--Qwen--Qwen3-30B-A3B/snapshots/${{COMMIT}} --seq-length 4096",
            None,
        ),
        ("NPROC_PER_NODE=8 megatron sft --load ${FOLDER}/Qwen3-30B-A3B-mcore --expert_model_parallel_size 8", None),
    ],
)
def test_a_model_is_known_by_its_name_where_its_folder_is_not(script: str, version: str | None, tmp_path: Path) -> None:
    job = read_job(script, tmp_path, version=version)
    assert job.required()[0].architecture.name == "qwen3-30b-a3b"
    assert not [one for one in job.taken if "\0" in str(one.memlab_value)]
    (tmp_path / "run.sh").write_text(script.replace("Qwen3-30B-A3B", "$(ls models)"))
    assert "known only when the job runs" in " ".join(Job.read(tmp_path / "run.sh", version=version).warnings)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b"),
        ("/cache/hub/models--Qwen--Qwen3-30B-A3B/snapshots/ad44e777bcd18fa416d9da3bd8f70d33ebb85d39/", "qwen3-30b-a3b"),
        ("models--Qwen--Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("/models/microsoft/phi-4/snapshots/main", "phi-4"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("/data/Qwen3-Coder-30B-A3B-Instruct-FP8", "qwen3-30b-a3b"),
        ("Qwen3-Coder-30B-A3B_torch_dist", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", None),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", None),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("Qwen/Qwen3.5-9B", None),
        ("snapshots/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("/snapshots/main", None),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", None),
        ("Qwen/Qwen3-Embedding-8B", None),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("/models/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-32B", "qwen2.5-32b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("Qwen/Qwen2.5-Coder-72B", None),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b"),
        (
            "/models/models--meta-llama--Llama-2-7b-chat-hf/snapshots/f5db02db724555f92da89c216ac04704f23d4590",
            "llama-2-7b",
        ),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Large-Instruct-2411", "mistral-large-123b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_a_public_name_is_known_in_every_form(name: str, architecture: str | None) -> None:
    found = published_architecture(name)
    assert (None if found is None else found.name) == architecture
    is_path = name.startswith("/") and "/models--" not in name  # where a job runs, and perhaps a mistake here
    if found is not None and not is_path:  # wherever a command takes an architecture
        assert find_architecture(name) == found
    else:
        with pytest.raises(ValueError, match="is neither a known name nor a Hugging Face config"):
            find_architecture(name)


def test_llama_has_the_fusions_of_its_own_provider(tmp_path: Path) -> None:
    """``llama_bridge.py`` of Megatron-Bridge fuses SwiGLU and rotary embeddings; Qwen's providers fuse neither."""
    path = tmp_path / "run.sh"
    for model, is_fused in (("meta-llama/Llama-3.1-8B", True), ("Qwen/Qwen3-8B", False)):
        script = f"{_VERL.replace('8 ', '1 ')} actor_rollout_ref.model.path={model} trainer.n_gpus_per_node=8"
        path.write_text(script)
        job = Job.read(path, version="2026-08-20")
        state = job.required()[0].state
        assert (state.bias_activation_fusion, state.apply_rope_fusion) == (is_fused, is_fused)
    key = "actor_rollout_ref.actor.megatron.override_transformer_config"
    path.write_text(
        script.replace("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B") + f" +{key}.bias_activation_fusion=false"
    )
    job = Job.read(path, version="2026-08-20", overrides=[f"{key}.apply_rope_fusion=false"])
    state = job.required()[0].state
    assert (state.bias_activation_fusion, state.apply_rope_fusion) == (False, False)


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
    assert scenario.layout.sequence_parallel is False
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
    (tmp_path / "run.sh").write_text(f'{_BASES["slime"]} --train-env-vars \'{{"{name}": "expandable_segments:True"}}\'')
    assert Job.read(tmp_path / "run.sh").required()[0].allocator.expandable_segments


@pytest.mark.parametrize("flag", ["--runtime-env-json=", "--runtime-env-json "])
@pytest.mark.parametrize("framework", ["verl", "skyrl", "ms-swift", "megatron-lm"])
def test_any_job_takes_the_allocator_from_the_environment_that_ray_gives_the_ranks(
    framework: str, flag: str, tmp_path: Path
) -> None:
    variables = '{"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}'
    (tmp_path / "run.sh").write_text(f"ray job submit {flag}'{{\"env_vars\": {variables}}}' -- {_BASES[framework]}")
    version = "before-2026-08-20" if framework == "verl" else None
    architecture = "qwen3-30b-a3b" if framework == "megatron-lm" else None
    job = Job.read(tmp_path / "run.sh", architecture=architecture, version=version)
    allocator = job.required()[0].allocator
    # What a framework sets by code drops the options of the variable (parseArgs in c10/core/AllocatorConfig.cpp).
    sets_segments = framework in ("verl", "skyrl")
    found = (allocator.max_split_size_mb, allocator.expandable_segments)
    assert found == ((None, True) if sets_segments else (128, False))
    assert any("drops max_split_size_mb" in line for line in job.warnings) == sets_segments


@pytest.mark.parametrize("flag", ["--runtime-env=", "--runtime-env "])
@pytest.mark.parametrize("framework", ["verl", "ms-swift", "megatron-lm", "slime"])
def test_any_job_takes_the_variables_of_the_file_that_ray_is_given(framework: str, flag: str, tmp_path: Path) -> None:
    """Over those of the script, as Ray sets them in the workers; without the file, a warning names it."""
    (tmp_path / "env.yaml").write_text(
        "working_dir: .\nenv_vars:\n  PYTORCH_CUDA_ALLOC_CONF: 'max_split_size_mb:128'\n"
    )
    start = "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\nray job submit --no-wait"
    # With its engine on the same GPUs, verl makes settings of its own.
    apart = " actor_rollout_ref.hybrid_engine=False" if framework == "verl" else ""
    (tmp_path / "run.sh").write_text(f"{start} {flag}env.yaml -- {_BASES[framework]}{apart}")

    def read() -> Job:
        version = "before-2026-08-20" if framework == "verl" else None
        architecture = "qwen3-30b-a3b" if framework == "megatron-lm" else None
        return Job.read(tmp_path / "run.sh", architecture=architecture, version=version)

    assert read().required()[0].allocator.max_split_size_mb == 128
    (tmp_path / "env.yaml").unlink()
    assert read().required()[0].allocator.max_split_size_mb == 64
    assert any("'env.yaml' is not beside the script" in line for line in read().warnings)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_preference_methods_of_ms_swift_train_with_the_language_model_s_loss(method: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"NPROC_PER_NODE=8 megatron rlhf --rlhf_type {method} --model microsoft/phi-4 --max_length 1024"
    )
    state = Job.read(tmp_path / "run.sh").required()[0].state
    assert (state.loss, state.cross_entropy_loss_fusion) == ("cross_entropy", True)


_ACTOR = "actor_rollout_ref.actor"
_TRANSFORMER = {
    "bridge": "model.",
    "verl": f"{_ACTOR}.megatron.override_transformer_config.",
    "nemo-rl": "policy.megatron_cfg.model_overrides.",
    "skyrl": "trainer.policy.megatron_config.transformer_config_kwargs.",
    "megatron-lm": "",
    "slime": "",
}
"""What stands before the names of Megatron's TransformerConfig."""
_BASES = {
    "bridge": "model: {hf_model_id: Qwen/Qwen3-30B-A3B}\ntrain: {micro_batch_size: 1}\nddp: {grad_reduce_in_fp32: true}\n",
    "nemo-rl": "policy:\n  model_name: Qwen/Qwen3-30B-A3B\n  megatron_cfg: {enabled: true, activation_checkpointing: false}\n",
    "verl": f"{_VERL} actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B {_ACTOR}.ppo_micro_batch_size_per_gpu=1",
    "skyrl": "python main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B "
    "trainer.gradient_checkpointing=false",
    "megatron-lm": "python pretrain_gpt.py --num-layers 48 --micro-batch-size 1 --bf16",
    "slime": f"{_SLIME} --hf-checkpoint /models/Qwen3-30B-A3B --seq-length 4096",
    "ms-swift": "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B",
}


def _job(framework: str, folder: Path, *overrides: str) -> Job:
    path = folder / ("run_config.yaml" if framework in ("bridge", "nemo-rl") else "run.sh")
    path.write_text(_BASES[framework])
    architecture = "qwen3-30b-a3b" if framework == "megatron-lm" else None
    version = "2026-08-20" if framework == "verl" else None
    return Job.read(path, format_name=framework, overrides=overrides, version=version, architecture=architecture)


@pytest.mark.parametrize("framework", _TRANSFORMER)
def test_the_old_name_of_recomputing_moe_layers_is_read_as_megatron_reads_it(framework: str, tmp_path: Path) -> None:
    prefix = _TRANSFORMER[framework]
    key = f"{prefix}moe_layer_recompute=true"
    job = _job(framework, tmp_path, key)
    scenario, settings = job.required()
    assert settings.recompute_modules == ("core_attn", "moe")
    # Lines for a job without recompute take the old name away too.
    lines = written(
        framework, scenario, replace(settings, recompute_granularity=None, recompute_modules=None), source=job
    ).lines
    assert any(re.search(r"moe.layer.recompute\b", line) for line in lines)
    if framework == "nemo-rl":  # where activation_checkpointing decides the rest
        return
    modules = f"{prefix}recompute_modules=[layernorm]"
    assert _job(framework, tmp_path, key, modules).required()[1].recompute_modules == ("layernorm", "moe")
    full = [f"{prefix}recompute_granularity=full"] + ["trainer.gradient_checkpointing=true"] * (framework == "skyrl")
    job = _job(framework, tmp_path, key, *full)
    assert "moe_layer_recompute is true with full recompute" in f"{job.cannot_start} {job.not_supported}"


@pytest.mark.parametrize("framework", _TRANSFORMER)
def test_both_fusions_are_read_by_every_framework_s_names(framework: str, tmp_path: Path) -> None:
    prefix = "policy.megatron_cfg." if framework == "nemo-rl" else _TRANSFORMER[framework]
    names = [f"bias_{'activation' if prefix else 'swiglu'}_fusion", "gradient_accumulation_fusion"]
    for is_on in (True, False):
        keys = [f"{prefix}{name}={is_on}" for name in names]
        if not prefix and not is_on:
            keys = [f"no_{name}=true" for name in names]
        state = _job(framework, tmp_path, *keys).required()[0].state
        assert (state.bias_activation_fusion, state.gradient_accumulation_fusion) == (is_on, is_on)


_MEMORY = [
    ("bridge", "model.fp32_residual_connection", "true", "more"),
    ("bridge", "model.activation_func_fp8_input_store", "true", "less"),
    ("bridge", "model.cp_comm_type", "all_gather", "either"),
    ("megatron-lm", "mla_down_proj_fusion", "true", "either"),
    ("bridge", "optimizer.store_param_remainders", "false", "more"),
    ("bridge", "ddp.nccl_ub", "true", "either"),
    ("bridge", "comm_overlap.delay_wgrad_compute", "true", "more"),
    ("bridge", "dist.use_megatron_fsdp", "true", "less"),
    ("bridge", "env_vars.NVTE_FLASH_ATTN", "0", "either"),
    ("bridge", "model.teacher", "llama", "more"),
    ("bridge", "dataset.enable_in_batch_packing", "true", "either"),
    ("bridge", "dataset.defer_in_batch_packing_to_step", "true", "either"),
    ("bridge", "dataset.pack_sequences_in_batch", "true", "either"),
    ("bridge", "dataset.packing_buffer_size", "100", "either"),
    ("bridge", "dataset.inter_document_masking", "true", "either"),
    ("bridge", "dataset.skip_getting_attention_mask_from_dataset", "false", "more"),
    ("bridge", "dataset.dataset_kwargs.get_attention_mask_from_fusion", "false", "more"),
    ("bridge", "dataset.micro_batch_size", "4", "either"),
    ("bridge", "model.kd_config.intermediate_layer_pairs", "[[decoder,decoder]]", "more"),
    ("bridge", "model.kd_config.skip_lm_loss", "false", "more"),
    ("verl", "actor_rollout_ref.rollout.name", "sglang", "either"),
    ("verl", "actor_rollout_ref.rollout.name", "trtllm", "more"),
    ("verl", "actor_rollout_ref.rollout.engine_kwargs.vllm.quantization", "fp8", "less"),
    ("verl", "actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_algorithm", "EAGLE", "more"),
    ("skyrl", "generator.backend", "sglang", "either"),
    ("skyrl", "generator.inference_engine.engine_init_kwargs.kv_cache_memory_bytes", "1000", "either"),
    ("nemo-rl", "policy.generation.backend", "sglang", "either"),
    ("nemo-rl", "policy.generation.refit_transport", "nixl", "more"),
    ("nemo-rl", "policy.generation.vllm_kwargs.cpu_offload_gb", "4", "less"),
    ("verl", "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nixl.device", "cpu", "less"),
    ("verl", "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rollout_dtype", "float32", "either"),
    ("verl", f"{_ACTOR}.calculate_sum_pi_squared", "true", "more"),
    ("verl", f"{_ACTOR}.qat.enable", "true", "either"),
    ("verl", "actor_rollout_ref.model.mtp.enable", "true", "more"),
    ("verl", "actor_rollout_ref.model.override_config.model_config.num_hidden_layers", "4", "either"),
    ("nemo-rl", "policy.megatron_cfg.moe_layer_recompute", "true", "less"),
    ("nemo-rl", "policy.hf_config_overrides.num_hidden_layers", "4", "either"),
    ("nemo-rl", "policy.draft.enabled", "true", "more"),
    ("bridge", "peft", "dora", "less"),
    ("skyrl", "trainer.bf16", "false", "more"),
    ("slime", "rollout_top_p", "0.9", "more"),
    ("ms-swift", "task_type", "generative_reranker", "more"),
    ("ms-swift", "linear_decoupled_in_proj", "true", "either"),
    ("ms-swift", "freeze_parameters_ratio", "1.0", "less"),
    ("ms-swift", "freeze_parameters", "model.embed_tokens", "less"),
    ("ms-swift", "freeze_parameters_regex", ".*mlp.*", "less"),
]


@pytest.mark.parametrize(
    ("megatron", "fsdp", "engine", "of_megatron_alone"),
    [
        ("verl", "verl-fsdp", "actor_rollout_ref.rollout.", {"enable_rollout_routing_replay"}),
        ("nemo-rl", "nemo-rl-dtensor", "policy.generation.", set[str]()),
        ("skyrl", "skyrl-fsdp", "generator.", set[str]()),
    ],
)
def test_what_concerns_the_inference_engine_is_named_whatever_trains(
    megatron: str, fsdp: str, engine: str, of_megatron_alone: set[str]
) -> None:
    names = [{row.name for row in TABLES[one].missing if row.name.startswith(engine)} for one in (megatron, fsdp)]
    assert names[0] - names[1] == {f"{engine}{name}" for name in of_megatron_alone}
    assert names[0]


@pytest.mark.parametrize("section", ["policy.megatron_cfg", "policy.dtensor_cfg"])
@pytest.mark.parametrize("away", [True, False])
def test_nemo_rl_sends_weights_to_other_gpus_from_buffers_that_the_environment_decides(
    section: str, away: bool, tmp_path: Path
) -> None:
    """``get_target_packed_tensor_size`` in nemo_rl/utils/packed_tensor.py (7ea279ab)."""
    key = f"{section}.env_vars.NRL_REFIT_NUM_BUFFERS"
    other = f"{section}.env_vars.SOME_OTHER"
    (tmp_path / "grpo.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 64\n  train_micro_batch_size: 1\n"
        f"  max_total_sequence_length: 4096\n  {section.partition('.')[2]}:\n    enabled: true\n    env_vars:\n"
        "      NRL_REFIT_NUM_BUFFERS: '1'\n      NCCL_DEBUG: WARN\n      SOME_OTHER: '1'\n"
        f"  generation:\n    colocated:\n      enabled: {str(not away).lower()}\n"
        "      resources:\n        num_nodes: 1\n        gpus_per_node: 8\n"
        "cluster:\n  gpus_per_node: 8\n  num_nodes: 2\ngrpo: {}\n"
    )
    job = Job.read(tmp_path / "grpo.yaml")
    named = {one.key: one.effect for one in job.not_modelled}
    assert named.get(key) == ("either" if away else None) and named[other] == "unknown"
    assert f"{section}.env_vars.NCCL_DEBUG" in job.without_effect


def test_buffers_of_the_sender_concern_the_training_s_gpus_wherever_the_engine_is(tmp_path: Path) -> None:
    """``NIXLCheckpointEngine`` of NeMo-RL (7ea279ab) keeps two on each rank, unless it releases them."""
    key, away = "policy.generation.refit_transport", "policy.generation.colocated.enabled=false"
    job = _job("nemo-rl", tmp_path, f"{key}=nixl", away)
    assert key in {one.key for one in job.not_modelled}
    assert job.rollout is not None and not job.rollout.is_colocated


@pytest.mark.parametrize(("framework", "key", "value", "effect"), _MEMORY)
def test_a_key_that_changes_memory_is_never_said_to_have_no_effect(
    framework: str, key: str, value: str, effect: str, tmp_path: Path
) -> None:
    job = _job(framework, tmp_path, f"{key}={value}")
    assert {one.key: one.effect for one in job.not_modelled}.get(key) == effect
    off = {"false": "true", "true": "false"}.get(value, "null")
    if key != "env_vars.NVTE_FLASH_ATTN":
        assert key not in {one.key for one in _job(framework, tmp_path, f"{key}={off}").not_modelled}


@pytest.mark.parametrize(
    ("framework", "override", "key"),
    [
        ("nemo-rl", "policy.megatron_cfg.peft={enabled: true, dim: 8}", "policy.megatron_cfg.peft.enabled"),
        (
            "nemo-rl",
            "policy.hf_config_overrides={num_hidden_layers: 4}",
            "policy.hf_config_overrides.num_hidden_layers",
        ),
        ("skyrl", "trainer.policy.model.lora={rank:32,alpha:16}", "trainer.policy.model.lora.rank"),
    ],
)
def test_a_mapping_on_a_command_line_is_as_many_keys(framework: str, override: str, key: str, tmp_path: Path) -> None:
    job = _job(framework, tmp_path, override)
    assert key in {one.key for one in (*job.not_modelled, *job.taken)}
    text = _BASES["skyrl"] + f" '{override}'"
    job = read_job(text, tmp_path)
    assert framework != "skyrl" or key in {one.key for one in (*job.not_modelled, *job.taken)}


@pytest.mark.parametrize(
    ("flags", "is_offloaded"),
    [
        ("", False),
        ("--colocate", True),
        ("--colocate --no-offload-train", False),
        ("--offload-train", True),
        ("--colocate --no-offload-train --offload", True),
        ("--no-offload-train --advantage-estimator ppo", True),
    ],
)
def test_slime_offloads_what_its_flags_decide_together(flags: str, is_offloaded: bool, tmp_path: Path) -> None:
    job = read_job(f"{_BASES['slime']} {flags}", tmp_path)
    assert job.required()[1].offload_optimizer == is_offloaded
    assert ("advantage_estimator" in {one.key for one in job.not_modelled}) == ("ppo" in flags)


@pytest.mark.parametrize(("flags", "passes"), [("", 4), ("--global-batch-size 16", 2), ("--rollout-batch-size 2", 1)])
def test_a_step_of_slime_is_a_part_of_a_rollout(flags: str, passes: int, tmp_path: Path) -> None:
    sizes = "--num-steps-per-rollout 2 --rollout-batch-size 16 --n-samples-per-prompt 4 --micro-batch-size 1"
    assert read_job(f"{_BASES['slime']} {sizes} {flags}", tmp_path).required()[0].num_microbatches == passes


@pytest.mark.parametrize("nodes", ["$(wc -l hosts)", "$SLURM_NNODES"])
def test_ranks_of_ms_swift_that_only_a_run_shows_are_said(nodes: str, tmp_path: Path) -> None:
    job = read_job(f"export NNODES={nodes}\n{_BASES['ms-swift']} --expert_model_parallel_size 2", tmp_path)
    assert job.required()[0].layout.world_size == 2
    assert job.warnings[0].startswith(
        "NNODES is known only when the job runs, so memlab takes the smallest number of ranks"
    )
    job = Job.read(tmp_path / "run.sh", overrides=["NNODES=2"])
    assert job.required()[0].layout.world_size == 16


@pytest.mark.parametrize("framework", [name for name in _TRANSFORMER if name != "megatron-lm"])
@pytest.mark.parametrize(
    "key",
    [
        "experimental_attention_variant=dsa",
        "heterogeneous_layers=true",
    ],
)
def test_layers_of_another_kind_are_another_model(framework: str, key: str, tmp_path: Path) -> None:
    end = "block_specs" if _TRANSFORMER[framework] else "layers_config_path"
    key = key.replace("heterogeneous_layers", f"heterogeneous_{end}")
    job = _job(framework, tmp_path, _TRANSFORMER[framework] + key)
    assert f"memlab does not have what the job asks for: {_TRANSFORMER[framework]}{key.partition('=')[0]}" in str(
        job.not_supported
    )


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("framework", "prefix"),
    [
        ("verl", "ray_kwargs.ray_init.runtime_env.env_vars"),
        ("nemo-rl", "policy.megatron_cfg.env_vars"),
        ("bridge", "env_vars"),
    ],
)
def test_the_allocator_is_taken_from_the_environment_of_a_configuration(
    framework: str, prefix: str, name: str, tmp_path: Path
) -> None:
    job = _job(framework, tmp_path, f"{prefix}.{name}=expandable_segments:True")
    assert job.required()[0].allocator.expandable_segments


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16_with_fp8_current_scaling_mixed", ("hybrid", "tensorwise", True)),
        ("bf16-with-fp8-delayed-scaling-mixed", ("hybrid", "delayed", True)),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", ("hybrid", "blockwise", True)),
        ("nemotron_3_super_bf16_with_nvfp4_mixed", (None, "delayed", False)),
        ("bf16_with_fp8_subchannel_scaling_mixed", ("hybrid", "blockwise", False)),
        ("{bf16: true, fp8: hybrid}", ("hybrid", "tensorwise", False)),
        ("{fp8: e4m3, fp8_recipe: blockwise, fp8_param: null}", ("e4m3", "blockwise", False)),
        ("{fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: true}", ("hybrid", "tensorwise", True)),
        ("bf16_mixed", (None, "delayed", False)),
        ("{}", (None, "delayed", False)),
        ("my_recipe", (None, "delayed", False)),
    ],
)
def test_bridge_s_mixed_precision_is_a_name_or_fields(
    precision: str, expected: tuple[str | None, str, bool], tmp_path: Path
) -> None:
    path = tmp_path / "run_config.yaml"
    layers = "model.first_last_layers_bf16: true\n" if "nvfp4" in precision else ""
    path.write_text(_BASES["bridge"] + layers + f"mixed_precision: {precision}\n")
    job = Job.read(path)
    state = job.required()[0].state
    assert (state.fp8_format, state.fp8_recipe, state.fp8_param_gather) == expected
    assert any("does not know the mixed_precision" in one for one in job.warnings) == (precision == "my_recipe")
    # FP4 reads ``first_last_layers_bf16`` too (``get_fp4_context`` in megatron/core/fp4_utils.py, 0.16.1).
    assert ("stay in bf16" in str(job.not_modelled)) == any(name in precision for name in ("current", "nvfp4"))


@pytest.mark.parametrize("precision", ["fp16_mixed", "fp16_with_mxfp8_mixed", "{fp16: true, bf16: false}"])
def test_bridge_s_jobs_in_fp16_are_not_predicted_in_bf16(precision: str, tmp_path: Path) -> None:
    path = tmp_path / "run_config.yaml"
    path.write_text(_BASES["bridge"] + f"mixed_precision: {precision}\n")
    for architecture in (None, "qwen3-30b-a3b"):
        assert "memlab computes in bf16 or fp32" in str(Job.read(path, architecture=architecture).not_supported)


@pytest.mark.parametrize(
    ("framework", "key"),
    [
        ("slime", "train_backend=fsdp"),
        ("slime", "debug_rollout_only=true"),
        ("slime", "fp16=true"),
        ("verl", "actor_rollout_ref.actor.megatron.override_transformer_config.fp16=true"),
    ],
)
def test_another_model_takes_nothing_away_that_the_job_does(framework: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(_BASES[framework])
    version = "2026-08-20" if framework == "verl" else None
    job = Job.read(path, format_name=framework, overrides=[key], version=version, architecture="phi-4")
    assert f"memlab does not have what the job asks for: {key.partition('=')[0]}" in str(job.not_supported)


def test_what_bridge_s_mixed_precision_says_replaces_what_the_other_sections_say(tmp_path: Path) -> None:
    path = tmp_path / "run_config.yaml"
    text = _BASES["bridge"].replace("A3B}", "A3B, fp8: hybrid}")
    path.write_text(text + "mixed_precision: {fp8: null, grad_reduce_in_fp32: false}\n")
    state = Job.read(path).required()[0].state
    assert (state.fp8_format, state.grad_reduce_in_bf16) == (None, True)


_PHI = [
    "num_layers",
    "40",
    "hidden_size",
    "5120",
    "ffn_hidden_size",
    "17920",
    "num_attention_heads",
    "40",
    "kv_channels",
    "128",
    "padded_vocab_size",
    "100352",
    "normalization",
    "RMSNorm",
    "swiglu",
    "True",
    "add_bias_linear",
    "False",
    "position_embedding_type",
    "rope",
    "hidden_dropout",
    "0.0",
    "bf16",
    "True",
    "untie_embeddings_and_output_weights",
    "True",
    "attention_dropout",
    "0.0",
    "gradient_accumulation_fusion",
    "False",
    "world_size",
    "8",
    "micro_batch_size",
    "1",
    "global_batch_size",
    "8",
    "seq_length",
    "1024",
]


def _log(folder: Path, **arguments: object) -> Job:
    """Reads a log of Megatron-LM with these arguments, by the names that it prints."""
    values = dict(zip(_PHI[::2], _PHI[1::2], strict=True)) | arguments
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    text = ["-" * 24 + " arguments " + "-" * 24, *lines, "-" * 20 + " end of arguments " + "-" * 21]
    return read_job("\n".join(text), folder, "train.log")


def test_a_log_has_the_destinations_of_megatron_lm_s_flags(tmp_path: Path) -> None:
    placed = {"optimizer_cpu_offload": True, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    job = _log(tmp_path, fp8="hybrid", fp8_recipe="tensorwise", pin_cpu_grads=False, pin_cpu_params=False, **placed)
    state = job.required()[0].state
    assert (state.fp8_format, state.fp8_recipe, state.pin_cpu_grads, state.pin_cpu_params) == (
        "hybrid",
        "tensorwise",
        False,
        False,
    )
    assert not [one for one in job.not_modelled if one.effect == "unknown"]
    job = _log(tmp_path, fp8=None, pin_cpu_grads=True, pin_cpu_params=True, **placed)
    assert (job.required()[0].state.fp8_format, job.required()[0].state.pin_cpu_grads) == (None, True)


def test_query_groups_without_a_number_are_one_as_for_megatron_lm(tmp_path: Path) -> None:
    assert _log(tmp_path, group_query_attention=True).required()[0].architecture.num_query_groups == 1
    assert _log(tmp_path, group_query_attention=True, num_query_groups=10).required()[0].architecture.name == "phi-4"
    assert (
        _log(tmp_path, group_query_attention=False, num_query_groups=1).required()[0].architecture.num_query_groups
        == 40
    )


@pytest.mark.parametrize("missing", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_an_overlap_that_megatron_lm_refuses_is_found(missing: str, tmp_path: Path) -> None:
    needed = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    assert _log(tmp_path, overlap_param_gather=True, **needed).required()[0].state.overlap_param_gather
    job = _log(tmp_path, overlap_param_gather=True, **(needed | {missing: False}))
    assert f"overlap_param_gather is on without {missing}, which the arguments of Megatron-LM require" in str(
        job.cannot_start
    )


@pytest.mark.parametrize(
    ("framework", "keys"),
    [
        ("bridge", "ddp.{}"),
        ("nemo-rl", "policy.megatron_cfg.distributed_data_parallel_config.{}"),
        ("ms-swift", "{}"),
    ],
)
def test_an_overlap_that_only_megatron_lm_refuses_starts_elsewhere(framework: str, keys: str, tmp_path: Path) -> None:
    """Megatron-Core's DDP gathers each buffer as one bucket then; 25 of 198 recipes of NeMo-RL set this."""
    texts = [f"{keys.format('overlap_param_gather')}=true", f"{keys.format('overlap_grad_reduce')}=false"]
    state = _job(framework, tmp_path, *texts).required()[0].state
    assert (state.overlap_param_gather, state.overlap_grad_reduce) == (True, False)


def test_nemo_rl_s_own_rule_is_named_as_its_own(tmp_path: Path) -> None:
    fused = "policy.megatron_cfg.use_fused_linear_logprobs=true"
    assert "with overlap_param_gather, which NeMo-RL refuses" in str(_job("nemo-rl", tmp_path, fused).cannot_start)
    gather = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=false"
    assert _job("nemo-rl", tmp_path, fused, gather).cannot_start is None


def test_cpu_offload_without_the_precision_aware_optimizer_is_predicted_with_a_warning(tmp_path: Path) -> None:
    needed = {"use_distributed_optimizer": True, "optimizer_cpu_offload": True}
    warning = "which the arguments of Megatron-LM (core 0.16.1) refuse"
    job = _log(tmp_path, **needed)
    assert job.required()[0].state.optimizer_cpu_offload and warning in " ".join(job.warnings)
    assert warning not in " ".join(_log(tmp_path, **needed, use_precision_aware_optimizer=True).warnings)


_FP8 = "fp8_cfg: {enabled: true, fp8: hybrid, fp8_recipe: tensorwise}"


@pytest.mark.parametrize(
    ("base", "child", "fp8"),
    [
        (_FP8, "fp8_cfg: null", None),
        (_FP8, "fp8_cfg: {fp8: e4m3}", "e4m3"),
        (_FP8, "fp8_cfg: {enabled: false, fp8_param: true}", None),
        (_FP8, "fp8_cfg: {}", "hybrid"),
        ("fp8_cfg: null", _FP8, "hybrid"),
        ("fp8_cfg: {}", _FP8, "hybrid"),
    ],
)
def test_a_value_over_a_mapping_of_the_defaults_replaces_all_of_it(
    base: str, child: str, fp8: str | None, tmp_path: Path
) -> None:
    text = "{defaults}policy:\n  {model}megatron_cfg:\n    enabled: true\n    {line}\n"
    (tmp_path / "base.yaml").write_text(text.format(defaults="", model="model_name: microsoft/phi-4\n  ", line=base))
    job = read_job(text.format(defaults="defaults: base.yaml\n", model="", line=child), tmp_path, "child.yaml")
    assert job.required()[0].state.fp8_format == fp8
    assert "policy.megatron_cfg.fp8_cfg" not in {one.key for one in job.not_modelled}
    job = Job.read(tmp_path / "child.yaml", overrides=["policy.megatron_cfg.fp8_cfg=null"])
    assert job.required()[0].state.fp8_format is None


@pytest.mark.parametrize(
    ("text", "options", "missing"),
    [
        ("expandable_segments:True,garbage_collection_threshold: 8e-1", {"garbage_collection_threshold": 0.8}, {}),
        ("expandable_segments:True, max_split_size_mb: 64", {"max_split_size_mb": 64}, {}),
        ("backend:cudaMallocAsync,expandable_segments:True", {}, {"backend": "either"}),
        ("backend:native,pinned_use_background_threads:True,expandable_segments:True", {}, {}),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True", {}, {"roundup_power2_divisions": "more"}),
        ("expandable_segments:True,roundup_bypass_threshold_mb:4", {}, {"roundup_bypass_threshold_mb": "unknown"}),
        ("expandable_segments:True,expandable=1", {}, {"expandable=1": "unknown"}),
    ],
)
def test_each_option_of_the_allocator_is_taken_or_named(
    text: str, options: dict[str, float], missing: dict[str, str], tmp_path: Path
) -> None:
    job = read_job(f"export PYTORCH_CUDA_ALLOC_CONF='{text}'\n{_BASES['slime']}", tmp_path)
    assert job.required()[0].allocator.changed() == {"expandable_segments": True} | options
    named = {one.key: one.effect for one in job.not_modelled if "ALLOC_CONF" in one.key}
    assert named == {f"PYTORCH_CUDA_ALLOC_CONF.{name}": effect for name, effect in missing.items()}


@pytest.mark.parametrize("option", ["garbage_collection_threshold:1", "expandable_segments:on", "max_split_size_mb:8"])
def test_an_option_of_the_allocator_that_torch_refuses_is_refused(option: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"export PYTORCH_ALLOC_CONF={option}\n{_BASES['slime']}")
    assert f"{option.partition(':')[0]} is " in str(Job.read(path).not_supported)


def test_an_allocator_that_only_a_run_shows_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"export PYTORCH_ALLOC_CONF=$(cat options)\n{_BASES['slime']}")
    assert any("PYTORCH_ALLOC_CONF is known only when the job runs" in one for one in Job.read(path).warnings)
    job = Job.read(path, overrides=["PYTORCH_ALLOC_CONF=expandable_segments:True"])
    assert job.required()[0].allocator.expandable_segments


@pytest.mark.parametrize("framework", _BASES)
def test_a_version_that_memlab_does_not_know_is_refused(framework: str, tmp_path: Path) -> None:
    gradients = [f"{_ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=true"] * (framework == "verl")
    job = _job(framework, tmp_path, *gradients)
    rule = "must be 0.9.1 or 2026-08-20 or before-2026-08-20" if framework == "verl" else "leave it out"
    with pytest.raises(ValueError, match=f"--framework-version is 'banana'.*{rule}"):
        Job.read(job.path, format_name=framework, overrides=gradients, version="banana")


def test_megatron_lm_makes_masks_unless_told_otherwise(tmp_path: Path) -> None:
    def masks(job: Job) -> bool:
        return job.required()[0].state.create_attention_mask_in_dataloader

    assert masks(_log(tmp_path))
    assert masks(_log(tmp_path, create_attention_mask_in_dataloader=True))
    assert not masks(_log(tmp_path, create_attention_mask_in_dataloader=False))
    assert not masks(_job("slime", tmp_path)), "its batches have no mask"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([], "algorithm.adv_estimator"),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator"),
        (["critic.enable=true", "algorithm.adv_estimator=grpo"], "critic.enable"),
        (["algorithm.adv_estimator=grpo"], None),
        (["critic.enable=false"], None),
        ([f"critic.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")], None),
        ([f"critic.megatron.offload.{part}.target=cpu" for part in ("param", "optimizer")], None),
    ],
)
def test_a_critic_of_verl_is_said_unless_it_is_offloaded(keys: list[str], named: str | None, tmp_path: Path) -> None:
    missing = {one.key: one.effect for one in _job("verl", tmp_path, *keys).not_modelled if "critic" in one.reason}
    assert missing == ({named: "more"} if named else {})


@pytest.mark.parametrize(("turns", "is_named"), [("2", False), ("4", True), ("null", False)])
def test_chunks_that_take_turns_otherwise_are_said(turns: str, is_named: bool, tmp_path: Path) -> None:
    sizes = [f"model.{name}pipeline_model_parallel_size=2" for name in ("", "virtual_")]
    key = "model.microbatch_group_size_per_vp_stage"
    job = _job("bridge", tmp_path, f"{key}={turns}", *sizes, "train.global_batch_size=4")
    assert job.scenario is not None
    assert (key in {one.key for one in job.not_modelled}) == is_named


@pytest.mark.parametrize(
    ("turns", "passes", "refusal"),
    [
        ("3", 5, "give a number of micro-batches that is a multiple of 2"),
        ("1", 4, "must be from 2 .stages. to 4 .micro-batches., by a rule of Megatron-Core"),
        ("8", 4, "must be from 2 .stages. to 4 .micro-batches., by a rule of Megatron-Core"),
        (
            "3",
            4,
            "leaves 1 of 4 micro-batches, must leave none or at least 2, one per stage, by a rule of Megatron-Core",
        ),
        ("null", 3, "must be a multiple of the number of stages, 2, if the schedule is interleaved"),
    ],
)
def test_turns_that_megatron_takes_are_not_called_impossible(
    turns: str, passes: int, refusal: str, tmp_path: Path
) -> None:
    sizes = [f"model.{name}pipeline_model_parallel_size=2" for name in ("", "virtual_")]
    job = _job(
        "bridge",
        tmp_path,
        f"model.microbatch_group_size_per_vp_stage={turns}",
        *sizes,
        f"train.global_batch_size={passes}",
    )
    assert re.search(refusal, f"{job.cannot_start} {job.not_supported}")
    # The file overrides a recipe that memlab does not know, so the refusal is not certain.
    assert ("the framework refuses the job" in str(job.not_supported)) == (turns != "3" or passes != 5)


@pytest.mark.parametrize("method", ["block", "uniform"])
def test_recompute_of_more_layers_than_there_are_recomputes_all(method: str, tmp_path: Path) -> None:
    recompute = ("recompute_granularity=full", f"recompute_method={method}", "recompute_num_layers=80")
    job = _job("bridge", tmp_path, *(f"model.{key}" for key in recompute))
    scenario, settings = job.required()
    assert settings.recompute_num_layers == scenario.num_layers < 80
    assert "recompute_num_layers is 80" in " ".join(job.warnings)
    check_on_model(settings, scenario)


@pytest.mark.parametrize(
    ("overlap", "ranks", "expected"),
    [
        ("", 8, (False, False, None)),
        ("comm_overlap: {tp_comm_overlap: false}", 8, (True, True, 2**27)),
        ("comm_overlap: {tp_comm_overlap: true, overlap_param_gather: false}", 8, (True, False, 2**27)),
        ("comm_overlap: {tp_comm_overlap: true, bucket_size: 1000}", 8, (True, True, 1000)),
        ("comm_overlap: {tp_comm_overlap: true}", 1, (False, False, None)),
    ],
)
def test_bridge_s_overlap_below_a_recipe_replaces_that_of_its_buckets(
    overlap: str, ranks: int, expected: tuple[bool, bool, int | None], tmp_path: Path
) -> None:
    """``_get_optimizer_overlap_cfgs`` in training/comm_overlap.py: by the copies of the model, unless the job says it."""
    job = read_job(f"{_BASES['bridge']}{overlap}\n", tmp_path, "run_config.yaml", world_size=ranks)
    state = job.required()[0].state
    assert (state.overlap_grad_reduce, state.overlap_param_gather, state.ddp_bucket_size) == expected
    assert "comm_overlap.tp_comm_overlap" not in {one.key for one in job.not_modelled}, "no tensor parallel ranks"


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ("", 151_936),
        ("model.should_pad_vocab=true", 151_936),
        ("tokenizer.use_tokenizer_vocab_size=true", 151_680),
        (
            "tokenizer.use_tokenizer_vocab_size=true model.tensor_model_parallel_size=4 model.sequence_parallel=true",
            152_064,
        ),
        ("tokenizer.use_tokenizer_vocab_size=true model.make_vocab_size_divisible_by=1", 151_669),
        (
            "tokenizer.use_tokenizer_vocab_size=true tokenizer.tokenizer_type=NullTokenizer tokenizer.vocab_size=1000",
            1024,
        ),
        ("model.vocab_size=1000", 1000),
    ],
)
def test_bridge_s_vocabulary_is_the_model_s_or_the_tokenizer_s_padded(keys: str, tokens: int, tmp_path: Path) -> None:
    """``_validate_and_set_vocab_size`` in training/setup.py; Qwen3's tokenizer has 151,669 tokens, padded to 128 x TP."""
    job = _job("bridge", tmp_path, *keys.split())
    assert job.required()[0].architecture.vocab_size == tokens
    assert "how many tokens the tokenizer has" not in job.guesses


@pytest.mark.parametrize(("given", "taken", "newer"), [(1024, 1152, 1024), (1000, 1024, None)])
def test_the_null_tokenizer_of_megatron_lm_has_one_token_more_until_0_17(
    given: int, taken: int, newer: int | None, tmp_path: Path
) -> None:
    sizes = "--hidden-size 64 --num-attention-heads 2 --num-layers 2 --seq-length 64 --max-position-embeddings 64"
    flags = f"{sizes} --micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size {given}"
    job = read_job(f"torchrun --nproc-per-node 1 pretrain_gpt.py {flags}\n", tmp_path)
    assert job.required()[0].architecture.vocab_size == taken
    said = f"for 0.18 or later give --set padded_vocab_size={newer}"
    assert any(said in line for line in job.warnings) == (newer is not None)
    if newer is not None:
        later = Job.read(tmp_path / "run.sh", overrides=[f"padded_vocab_size={newer}"])
        assert later.required()[0].architecture.vocab_size == newer


@pytest.mark.parametrize(("packed", "seq_length"), [("16384", 16384), ("-1", 2048), ("null", 2048)])
def test_rows_of_bridge_are_as_long_as_what_is_packed_into_them(packed: str, seq_length: int, tmp_path: Path) -> None:
    keys = ("dataset.seq_length=2048", f"dataset.packed_sequence_specs.packed_sequence_size={packed}")
    scenario = _job("bridge", tmp_path, *keys).required()[0]
    assert (scenario.seq_length, scenario.packed_sequences) == (seq_length, 1 if packed == "16384" else None)


def test_only_sequence_parallelism_needs_a_length_that_ranks_can_share(tmp_path: Path) -> None:
    lengths = ("tensor_model_parallel_size=4", "seq_length=262", "world_size=4")
    whole, split = (_job("megatron-lm", tmp_path, *lengths, f"sequence_parallel={on}") for on in ("false", "true"))
    assert "experts Megatron-Core does not train without it" in str(whole.cannot_start)
    in_fp8 = _job("megatron-lm", tmp_path, *lengths, "sequence_parallel=false", "fp8_format=hybrid")
    assert in_fp8.cannot_start == whole.cannot_start
    assert "must divide the 262 tokens of a sequence" in str(split.cannot_start)


def test_the_loss_in_bf16_and_a_view_of_whole_embeddings_have_bounds(tmp_path: Path) -> None:
    """By hand: 20 bytes for each logit, and the other rank's half of the embedding's output, 2 bytes each."""
    keys = ("fp16_lm_cross_entropy=true", "clone_scatter_output_in_embedding=false", "seq_length=4096")
    sizes = ("tensor_model_parallel_size=2", "sequence_parallel=true")
    job = _job("bridge", tmp_path, *(f"model.{each}" for each in (*keys, *sizes)), "world_size=2")
    bounds = {one.key: one.bound_bytes for one in job.not_modelled}
    assert bounds["model.fp16_lm_cross_entropy"] == 20 * 4096 * 151936 // 2
    assert bounds["model.clone_scatter_output_in_embedding"] == 2 * 2048 * 2048


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kernel_that_memlab_replaces_is_named_by_the_job_s_own_key(ranks: int, tmp_path: Path) -> None:
    """Latent attention has no flash-attn 2 on any number of ranks; ranks that exchange heads have it."""
    values = (f"context_parallel_size={ranks}", "cp_comm_type=a2a", "attention_backend=flash")
    keys = [f"model.{value}" for value in values]
    for model, backend in (("moonshotai/Moonlight-16B-A3B", "auto"), ("Qwen/Qwen3-30B-A3B", "flash")):
        job = _job("bridge", tmp_path, f"model.hf_model_id={model}", *keys)
        assert job.required()[0].state.attention_backend == backend
        assert ("model.attention_backend" in {one.key for one in job.not_modelled}) == (backend == "auto")


def test_packed_rows_of_latent_attention_have_padded_values(tmp_path: Path) -> None:
    """``MultiLatentAttention.forward`` in mcore-bridge 1.6.5 and Megatron-Core 0.18.2 and 0.19.2; 0.16.1 pads none."""
    for model, packs, is_padded in (
        ("moonshotai/Moonlight-16B-A3B", "true", True),
        ("moonshotai/Moonlight-16B-A3B", "false --padding_free false", False),
        ("Qwen/Qwen3-30B-A3B", "true", False),
    ):
        path = tmp_path / "run.sh"
        path.write_text(
            f"{_BASES['ms-swift'].replace('Qwen/Qwen3-30B-A3B', model)} --max_length 4096 --packing {packs}"
        )
        job = Job.read(path)
        assert job.required()[0].state.pad_packed_values == is_padded
        assert not [one for one in job.not_modelled if "pad the values of packed rows" in one.reason]


def test_slime_s_megatron_pads_no_values_of_packed_rows(tmp_path: Path) -> None:
    """Megatron-Core 0.16.0 (1dcf0daf), for which flash-attn 2 does not take latent attention."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"{_SLIME} --hf-checkpoint moonshotai/Moonlight-16B-A3B --seq-length 4096 --attention-backend flash "
        "--no-rope-fusion --use-dynamic-batch-size --max-tokens-per-gpu 4096 --global-batch-size 64"
    )
    job = Job.read(path)
    state = job.required()[0].state
    assert not state.pad_packed_values
    assert state.attention_backend == "auto"
    assert "attention_backend" in {one.key for one in job.not_modelled}


SIZES_WITHOUT_TOKENS = (
    "MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 1024\n  --num-attention-heads: 16\n  --seq-length: 1024\n"
    "  --max-position-embeddings: 1024\n  --micro-batch-size: 1\n  --bf16: true\n"
)


def test_a_test_of_megatron_lm_that_generates_has_no_step_to_predict(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(f"MODE: inference\n{SIZES_WITHOUT_TOKENS}  --vocab-size: 50304\n")
    said = Job.read(path, world_size=1).not_supported or ""
    assert "MODE inference (line 1): it generates and does not train" in said
    path.write_text(f"MODE: pretraining\n{SIZES_WITHOUT_TOKENS}  --vocab-size: 50304\n")
    assert Job.read(path, world_size=1).scenario is not None


@pytest.mark.parametrize(
    ("kind", "file", "tokens"),
    [
        ("GPTSentencePieceTokenizer", "${DATA_PATH}/utils/nemotron_2_256k.model", 256000),
        ("Llama2Tokenizer", "${DATA_PATH}/tokenizer.model", 32000),
        ("GPTSentencePieceTokenizer", "${DATA_PATH}/other.model", None),
    ],
)
def test_tokens_are_those_of_a_known_tokenizer(kind: str, file: str, tokens: int | None, tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(f"{SIZES_WITHOUT_TOKENS}  --tokenizer-type: {kind}\n  --tokenizer-model: {file}\n")
    job = Job.read(path, world_size=1)
    if tokens is None:
        assert "vocab_size" in (job.not_supported or "")
        return
    assert job.required()[0].architecture.vocab_size == tokens
    assert any(f"{tokens:,}" in line for line in job.warnings)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("int(2)", 2), ("int('2')", 2), ("float( 1e-6 )", 1e-6), ("bool('true')", True),
        ("str(2)", "str(2)"),
    ],
)  # fmt: skip
def test_casts_of_hydra_are_read(value: str, read: object) -> None:
    entries = Entries()
    read_overrides([(f"actor.megatron.size={value}", 3)], entries)
    assert entries.by_key["actor.megatron.size"].value == read


@pytest.mark.parametrize("value", ["no", "off", "No", "'no'"])
def test_a_word_that_is_false_only_for_yaml_is_said(value: str) -> None:
    for override in (f"actor.offload={value}", f"+actor.offload={value}"):
        entries = Entries()
        read_overrides([(override, 3)], entries)
        assert any("counts as true" in one and one.startswith("line 3:") for one in entries.warnings)
        assert "if it is a switch" in entries.warnings[0]  # a project may be named off
    entries = Entries()
    read_overrides([("actor.offload=false", 3), ("actor.name=normal", 4)], entries)
    assert not entries.warnings


def test_tags_of_yaml_count_more_than_quotes() -> None:
    text = 'a: !!int "64"\nb: !!str 64\nc: !!float "1"\nd: !!bool "no"\ne: "64"\nf: !!null ""'
    read = {key: entry.value for key, entry in flat(read_yaml(text, "tags.yaml"), "tags.yaml").by_key.items()}
    assert read == {"a": 64, "b": "64", "c": 1, "d": False, "e": "64", "f": None}
