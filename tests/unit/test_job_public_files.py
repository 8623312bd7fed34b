"""What public job files showed: keys that a framework reads, and that memlab took for others or for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.job import Job

NEMO_RL = """\
policy:
  model_name: Qwen/Qwen3-30B-A3B
  logprob_chunk_size: {chunk}
  megatron_cfg: {{enabled: true, expert_model_parallel_size: 8, defer_fp32_logits: {deferred}}}
  generation: {{vllm_kwargs: {{speculative_config: {speculative}}}}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
grpo: {{num_prompts_per_step: 4}}
"""
SWIFT = "NPROC_PER_NODE=8 megatron sft --model {model} --tensor_model_parallel_size 2 --max_length 2048 "
SLIME = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /root/Qwen3-30B-A3B "
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B "
    "trainer.placement.policy_num_gpus_per_node=8 "
)
VERL = (
    "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
    "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=True "
)
SIZES = """--num-layers 32 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 32 --swiglu
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--vocab-size 32064 --bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 """.replace("\n", " ")


def script(folder: Path, text: str) -> Job:
    (folder / "run.sh").write_text(text)
    return Job.read(folder / "run.sh")


def nemo_rl(folder: Path, chunk: str = "null", deferred: str = "true", speculative: str = "null") -> Job:
    (folder / "job.yaml").write_text(NEMO_RL.format(chunk=chunk, deferred=deferred, speculative=speculative))
    return Job.read(folder / "job.yaml")


def effects(job: Job) -> dict[str, NotModelled]:
    return {one.key: one for one in job.not_modelled}


@pytest.mark.parametrize(("text", "chunk"), [("1024", 1024), ("2048", 2048), ("null", None)])
def test_nemo_rl_computes_log_probabilities_in_chunks_when_it_trains_too(
    text: str, chunk: int | None, tmp_path: Path
) -> None:
    """``LossPostProcessor`` in nemo_rl/models/megatron/train.py at 7ea279ab gives the loss the same chunks."""
    assert nemo_rl(tmp_path, text).required()[0].state.logprobs_chunk_size == chunk


def test_nemo_rl_refuses_chunks_of_logits_that_are_copied_whole(tmp_path: Path) -> None:
    """``_validate_chunking_config`` in nemo_rl/models/megatron/setup.py."""
    job = nemo_rl(tmp_path, "1024", deferred="false")
    assert job.cannot_start is not None
    assert job.cannot_start.startswith(
        "policy.logprob_chunk_size is 1024 without policy.megatron_cfg.defer_fp32_logits"
    )
    assert nemo_rl(tmp_path, "null", deferred="false").cannot_start is None


def test_an_engine_of_nemo_rl_with_a_draft_model_needs_more(tmp_path: Path) -> None:
    key = "policy.generation.vllm_kwargs.speculative_config.method"
    job = nemo_rl(tmp_path, speculative="{method: deepseek_mtp, num_speculative_tokens: 1}")
    assert effects(job)[key].effect == "more"
    assert not any("speculative" in one for one in effects(nemo_rl(tmp_path)))


def test_an_engine_of_verl_with_a_draft_model_needs_more(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method"
    assert effects(script(tmp_path, f"{VERL} +{key}=mtp"))[key].effect == "more"


@pytest.mark.parametrize(
    ("flag", "effect"),
    [
        ("sglang_enable_dp_attention", "more"),
        ("sglang_speculative_algorithm EAGLE", "more"),
        ("sglang_quantization fp8", "less"),
        ("sglang_cpu_offload_gb 4", "less"),
        ("sglang_max_running_requests 512", None),
    ],
)
def test_keys_of_slime_s_engine_that_change_its_weights(flag: str, effect: str | None, tmp_path: Path) -> None:
    """With attention that is data parallel, SGLang keeps the whole attention on each of the engine's GPUs."""
    job = f"{SLIME} --{flag.replace('_', '-')}"
    found = effects(script(tmp_path, f"{job} --colocate")).get(flag.partition(" ")[0])
    assert (found and found.effect) == effect
    assert flag.partition(" ")[0] not in effects(script(tmp_path, job)), "an engine on other GPUs"


@pytest.mark.parametrize("value", ["none", "null"])
def test_a_written_default_says_what_the_default_says(value: str, tmp_path: Path) -> None:
    key = "trainer.policy.megatron_config.moe_router_load_balancing_type"
    written, left_out = script(tmp_path, f"{SKYRL} {key}={value}"), script(tmp_path, SKYRL)
    assert (effects(written)[key].effect, effects(written)[key].bound_bytes) == (
        effects(left_out)[key].effect,
        effects(left_out)[key].bound_bytes,
    )


@pytest.mark.parametrize("key", ["freeze_vit", "freeze_aligner", "freeze_llm"])
def test_parts_of_a_model_that_memlab_does_not_know_may_be_frozen(key: str, tmp_path: Path) -> None:
    of_images = script(tmp_path, f"{SWIFT.format(model='Qwen/Qwen2.5-VL-7B-Instruct')} --{key} true")
    assert effects(of_images)[key].effect == "less"
    of_text = script(tmp_path, f"{SWIFT.format(model='Qwen/Qwen3-8B')} --{key} true")
    assert key not in effects(of_text)
    assert "only multimodal models" in of_text.without_effect[key]


@pytest.mark.parametrize(
    ("flags", "has_teacher"),
    [
        ("--rlhf_type gkd --teacher_model Qwen/Qwen3-32B", True),
        ("--rlhf_type gkd --teacher_model Qwen/Qwen3-8B", True),
        ("--rlhf_type gkd --teacher_model Qwen/Qwen3-8B --tuner_type lora", False),
        ("--rlhf_type gkd --teacher_model Qwen/Qwen3-32B --tuner_type lora", True),
        ("--rlhf_type gkd --teacher_model Qwen/Qwen3-8B --adapters out", False),
        ("--rlhf_type grpo --teacher_model Qwen/Qwen3-32B", True),
        ("--rlhf_type dpo --teacher_model Qwen/Qwen3-32B", False),
        ("--rlhf_type gkd --teacher_model_server http://localhost:8000", False),
    ],
)
def test_ms_swift_loads_a_teacher_unless_it_is_the_student_without_adapters(
    flags: str, has_teacher: bool, tmp_path: Path
) -> None:
    """``_check_teacher`` in swift/megatron/arguments/megatron_args.py (main of August 2026)."""
    job = script(tmp_path, f"NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-8B --max_length 2048 {flags}")
    assert ("teacher_model" in effects(job)) == has_teacher
    assert ("teacher_model" in job.without_effect) == ("--teacher_model " in flags and not has_teacher)


def test_gkd_without_an_engine_trains_on_the_data(tmp_path: Path) -> None:
    gkd = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type gkd --model Qwen/Qwen3-8B --max_length 2048"
    assert script(tmp_path, gkd).required()[0].seq_length == 2048 + 512
    assert script(tmp_path, f"{gkd} --use_vllm false").required()[0].seq_length == 2048


@pytest.mark.parametrize(
    ("before", "devices"),
    [
        ("ASCEND_RT_VISIBLE_DEVICES=0,1 ", "Ascend's NPUs"),
        ("export ASCEND_RT_VISIBLE_DEVICES=0,1\n", "Ascend's NPUs"),
        ("export HIP_VISIBLE_DEVICES=${HIP_VISIBLE_DEVICES:-0,1}\n", "AMD's GPUs"),
        ("export HCCL_CONNECT_TIMEOUT=1500\n", "Ascend's NPUs"),
        ("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True ", "Ascend's NPUs"),
        ("export VLLM_ASCEND_ENABLE_NZ=0\n", "Ascend's NPUs"),
        ("NPUS_PER_NODE=16\necho $NPUS_PER_NODE\n", "Ascend's NPUs"),
        ("export MIOPEN_USER_DB_PATH=/tmp\n", "AMD's GPUs"),
        ("CUDA_VISIBLE_DEVICES=0,1 ", None),
        ("export NCCL_DEBUG=WARN RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1\n", None),
    ],
)
def test_a_job_for_devices_of_another_maker_is_warned_of(before: str, devices: str | None, tmp_path: Path) -> None:
    job = script(tmp_path, before + SWIFT.format(model="Qwen/Qwen3-8B"))
    said = [line for line in job.warnings if "is set, as jobs on" in line]
    assert len(said) == (devices is not None)
    assert devices is None or devices in said[0]


@pytest.mark.parametrize(
    "override",
    [
        "ray_kwargs.ray_init.runtime_env.env_vars.HCCL_CONNECT_TIMEOUT=1500",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True",
    ],
)
def test_keys_that_only_jobs_on_npus_have_are_a_sign_of_them(override: str, tmp_path: Path) -> None:
    """MindSpeed reads ``use_flash_attn``, which Megatron-Core's configuration does not have."""
    assert any("Ascend's NPUs" in line for line in script(tmp_path, f"{VERL} {override}").warnings)


def test_verl_on_another_device_is_named(tmp_path: Path) -> None:
    assert "NVIDIA" in effects(script(tmp_path, f"{VERL} trainer.device=npu"))["trainer.device"].reason
    assert "trainer.device" not in effects(script(tmp_path, f"{VERL} trainer.device=cuda"))


def test_two_buffers_of_megatron_fsdp_need_more_and_its_bound_covers_each_strategy(tmp_path: Path) -> None:
    """``fsdp_double_buffer`` in megatron/core/distributed/distributed_data_parallel_config.py."""
    flags = "--use-megatron-fsdp --fsdp-double-buffer --data-parallel-sharding-strategy optim"
    job = script(tmp_path, f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} {flags}")
    assert effects(job)["fsdp_double_buffer"].effect == "more"
    assert "use_megatron_fsdp" in job.without_effect["data_parallel_sharding_strategy"]


@pytest.mark.parametrize(("program", "is_named"), [("pretrain_gpt.py", False), ("examples/mimo/train_llava.py", True)])
def test_a_program_that_memlab_does_not_know_is_named(program: str, is_named: bool, tmp_path: Path) -> None:
    said = f"the script starts {Path(program).name}, a program that memlab does not know"
    of_a_model = script(tmp_path, f"torchrun --nproc-per-node 8 {program} {SIZES}")
    assert any(line.startswith(said) for line in of_a_model.warnings) == is_named
    assert not of_a_model.causes
    without_sizes = script(tmp_path, f"torchrun --nproc-per-node 8 {program} --micro-batch-size 1")
    assert any(line.startswith(said) for line in without_sizes.causes) == is_named


RECIPE = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe {name} model.hf_model_id=Qwen/Qwen3-8B "


@pytest.mark.parametrize(
    ("name", "is_lora"),
    [("own_peft_config", True), ("own_sft_config --mode lora", True), ("own_sft_config --mode sft", False)],
)
def test_a_recipe_of_adapters_is_named_as_such_although_memlab_does_not_know_it(
    name: str, is_lora: bool, tmp_path: Path
) -> None:
    assert ("peft" in effects(script(tmp_path, RECIPE.format(name=name)))) == is_lora


def test_what_an_unknown_recipe_may_set_refuses_no_job_for_certain(tmp_path: Path) -> None:
    job = script(tmp_path, RECIPE.format(name="own_sft_config") + "train.micro_batch_size=4 train.global_batch_size=8")
    assert job.cannot_start is None
    assert job.not_supported is not None
    assert job.not_supported.startswith("memlab does not know what the recipe 'own_sft_config' sets")
    (tmp_path / "job.yaml").write_text(
        "model: {hf_model_id: Qwen/Qwen3-8B, num_layers: 7, pipeline_model_parallel_size: 2}\ntrain: {micro_batch_size: 1}\n"
    )
    of_a_file = Job.read(tmp_path / "job.yaml", world_size=2)
    assert of_a_file.cannot_start is None
    assert "the recipe below the file" in str(of_a_file.not_supported)


@pytest.mark.parametrize("key", ["packed_sequence_specs", "offline_packing_specs"])
def test_bridge_s_rows_have_the_packed_tokens(key: str, tmp_path: Path) -> None:
    """The class was renamed after 0.6.2 (src/megatron/bridge/data/builders at 067f987d)."""
    job = script(tmp_path, RECIPE.format(name="own_sft_config") + f"dataset.{key}.packed_sequence_size=3072")
    assert job.required()[0].seq_length == 3072


SLURM = (
    "#!/bin/bash\n#SBATCH --job-name=x\n{options}\n\n# comment\nsrun --container-image=x python pretrain_gpt.py "
    + SIZES
)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8  # one a GPU", 16),
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node 4", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks=8", 8),
        ("#SBATCH --job-name=x --nodes=2 --ntasks-per-node=8", 16),
        ("#SBATCH -N 2 -n16  # --ntasks-per-node=4", 16),
        ("#SBATCH --nodes=2 --ntasks-per-node=${RANKS}", None),
        ("#SBATCH -N2\n#SBATCH -n16", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8", None),
        ("#SBATCH --ntasks-per-node=8", 8),
        ("#SBATCH --nodes=<nodes>\n#SBATCH --ntasks-per-node=8", None),
        ("#SBATCH --nodes=2-4\n#SBATCH --ntasks-per-node=8", None),
        ("export A=1\n#SBATCH --ntasks-per-node=8", None),
        ("##SBATCH --ntasks-per-node=8", None),
    ],
)
def test_tasks_of_slurm_are_the_ranks(options: str, ranks: int | None, tmp_path: Path) -> None:
    text = SLURM.format(options=options).replace("--global-batch-size 8", "--global-batch-size 16")
    job = script(tmp_path, text)
    assert any("each task of #SBATCH" in line for line in job.warnings) == (ranks is not None)
    assert job.required()[0].layout.world_size == (ranks or 1)
    of_torchrun = script(tmp_path, text.replace("python", "torchrun --nnodes 1 --nproc-per-node 4"))
    assert of_torchrun.required()[0].layout.world_size == 4


def test_a_decoder_with_rows_of_its_own_length_is_named(tmp_path: Path) -> None:
    """In examples/multimodal, ``seq_length`` counts the tokens of an image."""
    job = script(tmp_path, f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --decoder-seq-length 16384")
    assert effects(job)["decoder_seq_length"].effect == "either"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 2048 + 1024),
        ("--lmbda 1", 2048 + 1024),
        ("--lmbda 0.1 --vllm_mode colocate", 2048 + 1024),
        ("--lmbda 0", 2048),
    ],
)
def test_gkd_trains_on_answers_of_its_student(flags: str, tokens: int, tmp_path: Path) -> None:
    """swift/megatron/trainers/gkd_trainer.py (4.6.0) encodes prompt and answer without a limit of their sum."""
    start = SWIFT.format(model="Qwen/Qwen3-8B").replace("megatron sft", "megatron rlhf --rlhf_type gkd")
    job = script(tmp_path, f"{start} --max_completion_length 1024 {flags}")
    assert job.required()[0].seq_length == tokens
    assert (job.rollout is not None) == (tokens > 2048)


@pytest.mark.parametrize("variable", ["export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1\n", ""])
def test_slimes_training_in_4_bits_is_named_wherever_its_variable_is_set(variable: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    ray = "" if variable else """--runtime-env-json '{"env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}' """
    path.write_text(
        f"{variable}ray job submit {ray}-- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
        "--hf-checkpoint Qwen/Qwen3-30B-A3B --max-tokens-per-gpu 8192 --use-dynamic-batch-size\n"
    )
    named = {one.key: one.effect for one in Job.read(path).not_modelled}
    assert named.get("OPEN_TRAINING_INT4_FAKE_QAT_FLAG") == "more"


@pytest.mark.parametrize(
    "text",
    [
        (
            "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen/Qwen3-30B-A3B "
            "--tensor-model-parallel-size 2 --max-tokens-per-gpu 8192 --use-dynamic-batch-size --rollout-max-prompt-len 1000 "
            "--rollout-max-response-len 32768"
        ),
        (
            "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B "
            "trainer.placement.policy_num_gpus_per_node=8 trainer.policy.megatron_config.tensor_model_parallel_size=2 "
            "trainer.max_tokens_per_microbatch=8192 trainer.max_prompt_length=1000 "
            "generator.sampling_params.max_generate_length=32768"
        ),
    ],
)
def test_a_sequence_above_the_budget_of_a_row_is_a_row_of_its_own(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    job = Job.read(path)
    assert job.scenario is not None, (job.cannot_start, job.not_supported)
    assert job.scenario.seq_length >= 32768
    assert any("the longest sequence has" in warning for warning in job.warnings)
