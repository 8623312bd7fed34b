"""What public job files showed: keys that a framework reads, and that memlab took for others or for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.any_model import of_any_model
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.job import Job
from tests.unit.job_files import read_job

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


def nemo_rl(folder: Path, chunk: str = "null", deferred: str = "true", speculative: str = "null") -> Job:
    return read_job(NEMO_RL.format(chunk=chunk, deferred=deferred, speculative=speculative), folder, "job.yaml")


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
    assert effects(read_job(f"{VERL} +{key}=mtp", tmp_path))[key].effect == "more"


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
    found = effects(read_job(f"{job} --colocate", tmp_path)).get(flag.partition(" ")[0])
    assert (found and found.effect) == effect
    assert flag.partition(" ")[0] not in effects(read_job(job, tmp_path)), "an engine on other GPUs"


@pytest.mark.parametrize("value", ["none", "null"])
def test_a_written_default_says_what_the_default_says(value: str, tmp_path: Path) -> None:
    key = "trainer.policy.megatron_config.moe_router_load_balancing_type"
    written, left_out = read_job(f"{SKYRL} {key}={value}", tmp_path), read_job(SKYRL, tmp_path)
    assert written.required()[0] == left_out.required()[0]


@pytest.mark.parametrize("key", ["freeze_vit", "freeze_aligner", "freeze_llm"])
def test_parts_of_a_model_that_memlab_does_not_know_may_be_frozen(key: str, tmp_path: Path) -> None:
    of_images = read_job(f"{SWIFT.format(model='Qwen/Qwen2.5-VL-7B-Instruct')} --{key} true", tmp_path)
    assert effects(of_images)[key].effect == "less"
    of_text = read_job(f"{SWIFT.format(model='Qwen/Qwen3-8B')} --{key} true", tmp_path)
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
    job = read_job(f"NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-8B --max_length 2048 {flags}", tmp_path)
    is_in_step = job.required()[0].state.reference_model == "copy" and "gkd" in flags
    assert ("teacher_model" in effects(job) or is_in_step) == has_teacher
    assert ("teacher_model" in job.without_effect) == ("--teacher_model " in flags and not has_teacher)


def test_gkd_without_an_engine_trains_on_the_data(tmp_path: Path) -> None:
    gkd = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type gkd --model Qwen/Qwen3-8B --max_length 2048"
    assert read_job(gkd, tmp_path).required()[0].seq_length == 2048 + 512
    assert read_job(f"{gkd} --use_vllm false", tmp_path).required()[0].seq_length == 2048


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
    job = read_job(before + SWIFT.format(model="Qwen/Qwen3-8B"), tmp_path)
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
    assert any("Ascend's NPUs" in line for line in read_job(f"{VERL} {override}", tmp_path).warnings)


def test_verl_on_another_device_is_named(tmp_path: Path) -> None:
    assert "NVIDIA" in effects(read_job(f"{VERL} trainer.device=npu", tmp_path))["trainer.device"].reason
    assert "trainer.device" not in effects(read_job(f"{VERL} trainer.device=cuda", tmp_path))


def test_two_buffers_of_megatron_fsdp_need_more_and_its_bound_covers_each_strategy(tmp_path: Path) -> None:
    """``fsdp_double_buffer`` in megatron/core/distributed/distributed_data_parallel_config.py."""
    flags = "--use-megatron-fsdp --fsdp-double-buffer --data-parallel-sharding-strategy optim"
    job = read_job(f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} {flags}", tmp_path)
    assert effects(job)["fsdp_double_buffer"].effect == "more"
    assert "use_megatron_fsdp" in job.without_effect["data_parallel_sharding_strategy"]


@pytest.mark.parametrize(("dtype", "is_named"), [("bf16", True), ("fp16", True), ("fp32", False), ("auto", False)])
@pytest.mark.parametrize("tensors", ["grads", "params"])
def test_types_of_megatron_fsdp_s_own_tensors_are_named(
    tensors: str, dtype: str, is_named: bool, tmp_path: Path
) -> None:
    flags = f"--use-megatron-fsdp --megatron-fsdp-main-{tensors}-dtype {dtype}"
    found = effects(read_job(f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} {flags}", tmp_path))
    assert (f"megatron_fsdp_main_{tensors}_dtype" in found) is is_named


@pytest.mark.parametrize(("program", "is_named"), [("pretrain_gpt.py", False), ("examples/mimo/train_llava.py", True)])
def test_a_program_that_memlab_does_not_know_is_named(program: str, is_named: bool, tmp_path: Path) -> None:
    said = f"the script starts {Path(program).name}, a program that memlab does not know"
    of_a_model = read_job(f"torchrun --nproc-per-node 8 {program} {SIZES}", tmp_path)
    assert any(line.startswith(said) for line in of_a_model.warnings) == is_named
    assert not of_a_model.causes
    without_sizes = read_job(f"torchrun --nproc-per-node 8 {program} --micro-batch-size 1", tmp_path)
    assert any(line.startswith(said) for line in without_sizes.causes) == is_named


RECIPE = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe {name} model.hf_model_id=Qwen/Qwen3-8B "


@pytest.mark.parametrize(
    ("name", "is_lora"),
    [("own_peft_config", True), ("own_sft_config --mode lora", True), ("own_sft_config --mode sft", False)],
)
def test_a_recipe_of_adapters_is_named_as_such_although_memlab_does_not_know_it(
    name: str, is_lora: bool, tmp_path: Path
) -> None:
    assert ("peft" in effects(read_job(RECIPE.format(name=name), tmp_path))) == is_lora


def test_what_an_unknown_recipe_may_set_refuses_no_job_for_certain(tmp_path: Path) -> None:
    job = read_job(
        RECIPE.format(name="own_sft_config") + "train.micro_batch_size=4 train.global_batch_size=8", tmp_path
    )
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
    job = read_job(RECIPE.format(name="own_sft_config") + f"dataset.{key}.packed_sequence_size=3072", tmp_path)
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
    job = read_job(text, tmp_path)
    assert any("each task of #SBATCH" in line for line in job.warnings) == (ranks is not None)
    assert job.required()[0].layout.world_size == (ranks or 1)
    of_torchrun = read_job(text.replace("python", "torchrun --nnodes 1 --nproc-per-node 4"), tmp_path)
    assert of_torchrun.required()[0].layout.world_size == 4


@pytest.mark.parametrize(
    ("options", "words", "ranks"),
    [
        ("#SBATCH --nodes=4", "--nnodes ${SLURM_JOB_NUM_NODES}", 32),
        ("#SBATCH -N 2", "--nnodes $SLURM_NNODES", 16),
        ("#SBATCH --nodes=4", "--nnodes 1", 8),
        ("#SBATCH --nodes=2-4", "--nnodes ${SLURM_JOB_NUM_NODES}", None),
    ],
)
def test_slurm_s_variables_have_the_nodes_that_the_script_asks_for(
    options: str, words: str, ranks: int | None, tmp_path: Path
) -> None:
    text = f"#!/bin/bash\n{options}\ntorchrun {words} --nproc-per-node 8 pretrain_gpt.py {SIZES}"
    job = read_job(text.replace("--global-batch-size 8", "--global-batch-size 32"), tmp_path)
    assert any("of #SBATCH --nodes" in one for one in job.warnings) is (ranks is not None and "SLURM" in words)
    if ranks is not None:
        assert job.required()[0].layout.world_size == ranks


@pytest.mark.parametrize(
    ("options", "count", "nodes"),
    [
        ("#PBS -l select=4:ncpus=8:mpiprocs=2:ngpus=8", "$(sort -u $PBS_NODEFILE | wc -l)", 4),
        ("#PBS -l select=4:ncpus=8:mpiprocs=2:ngpus=8", "$(wc -l < $PBS_NODEFILE)", 8),
        ("#PBS -l select=4", "$(cat ${PBS_NODEFILE} | sort | uniq | wc -l)", 4),
        ("#PBS -q long -l walltime=1:00:00,select=2", '$(wc -l < "$PBS_NODEFILE")', 2),
        ("#PBS -l nodes=2:ppn=8", "$(sort $PBS_NODEFILE | uniq | wc -l)", 2),
        ("#PBS -l select=1:ncpus=4+3:ncpus=8", "$(sort -u $PBS_NODEFILE | wc -l)", 4),
        ("#PBS -l select=1:mpiprocs=2+2:mpiprocs=3", "$(wc -l < $PBS_NODEFILE)", 8),
        ("#PBS -l select=4", "2", None),
        ("##PBS -l select=4", "$(wc -l < $PBS_NODEFILE)", None),
        ("export A=1\n#PBS -l select=4", "$(wc -l < $PBS_NODEFILE)", None),
    ],
)
def test_nodes_that_a_script_counts_in_pbs_s_file_are_those_that_it_asks_for(
    options: str, count: str, nodes: int | None, tmp_path: Path
) -> None:
    start = f"#!/bin/bash\n#PBS -j oe\n{options}\nNODES={count}\ntorchrun --nnodes $NODES --nproc-per-node 8 "
    job = read_job(
        f"{start}pretrain_gpt.py {SIZES}".replace("--global-batch-size 8", "--global-batch-size 64"), tmp_path
    )
    assert any("that the script asks PBS for" in one for one in job.warnings) is (nodes is not None)
    if nodes is not None:
        assert job.required()[0].layout.world_size == 8 * nodes


def test_arguments_in_one_quoted_word_are_read(tmp_path: Path) -> None:
    plain = read_job(f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES}", tmp_path).required()
    quoted = read_job(f'./entry.sh 8 "--nproc-per-node 8 {SIZES}"', tmp_path)
    assert quoted.required() == plain
    assert any("are one quoted word of a program" in one for one in quoted.warnings)
    overrides = "actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size=8 trainer.n_gpus_per_node=4"
    of_verl = read_job(f"bash entry.sh '{overrides}'", tmp_path)
    assert of_verl.framework.startswith("verl") and "world_size 4" not in str(of_verl.not_supported)


def test_a_decoder_with_rows_of_its_own_length_is_named(tmp_path: Path) -> None:
    """In examples/multimodal, ``seq_length`` counts the tokens of an image."""
    job = read_job(f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --decoder-seq-length 16384", tmp_path)
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
    job = read_job(f"{start} --max_completion_length 1024 {flags}", tmp_path)
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
            "--tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-gpu 8192 --use-dynamic-batch-size "
            "--rollout-max-prompt-len 1000 "
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
    job = read_job(text, tmp_path)
    assert job.scenario is not None, (job.cannot_start, job.not_supported)
    assert job.scenario.seq_length >= 32768
    assert any("the longest sequence has" in warning for warning in job.warnings)


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ("use_dynamic_bsz=True ppo_max_token_len_per_gpu=8192", 8192),
        ("use_dynamic_bsz=True ppo_max_token_len_per_gpu=8192 megatron.context_parallel_size=2", 16384),
        ("use_dynamic_bsz=True ppo_max_token_len_per_gpu=40960", 40960),
    ],
)
def test_a_sequence_above_the_budget_of_a_row_stops_verl(keys: str, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo model_engine=megatron trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.max_prompt_length=1000 data.max_response_length=32768 "
        + " ".join(f"actor_rollout_ref.actor.{key}" for key in keys.split())
    )
    job = Job.read(path, version="2026-08-20")
    assert job.required()[0].seq_length == tokens
    assert any("the job stops at a longer sequence" in line for line in job.warnings) is (tokens < 33768)


GRPO = (
    "NPROC_PER_NODE=2 megatron rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B-Instruct --max_completion_length 2048 "
)
DPO = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-4B --max_length 1024 --global_batch_size 16 "
SFT = f"{SLIME} --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns "


def test_a_job_without_a_longest_prompt_has_rows_of_its_answers_in_each_pass(tmp_path: Path) -> None:
    """Not passes for log-probabilities over one token, and not the model's usual length without the answers."""
    job = read_job(f"{GRPO} --micro_batch_size 8 --global_batch_size 128", tmp_path)
    scenario, _ = job.required()
    assert (scenario.seq_length, scenario.packed_sequences) == (8 * 2048, 8)
    assert job.rollout is not None
    assert job.rollout.of_log_probabilities(scenario).seq_length == 8 * 2048
    assert any("sequences as long as an answer, 2,048 tokens" in one for one in job.warnings)


@pytest.mark.parametrize(
    ("flags", "sequences"),
    [("", 2), ("--micro_batch_size 4", 8), ("--micro_batch_size 2 --packing true", 2), ("--tuner_type lora", 2)],
)
def test_dpo_of_ms_swift_has_two_sequences_for_each_of_a_batch(flags: str, sequences: int, tmp_path: Path) -> None:
    """``_rlhf_data_collator`` and ``PackingDataset`` of ms-swift 4.6.0: packing fills a row with pairs."""
    job = read_job(f"{DPO} {flags}", tmp_path)
    scenario, _ = job.required()
    assert scenario.micro_batch_size == sequences
    of_batch = int(flags.split()[1]) if "micro_batch_size" in flags else 1
    assert scenario.num_microbatches == 16 // (4 * of_batch)
    assert ("rlhf_type" in effects(job)) == ("packing" in flags)


def test_stages_of_dpo_in_ms_swift_have_the_reference_model_too(tmp_path: Path) -> None:
    """``forward_step`` in swift/megatron/trainers/dpo_trainer.py joins the outputs before they are sent."""
    job = read_job(f"{DPO} --pipeline_model_parallel_size 2", tmp_path)
    assert job.required()[0].state.reference_model == "copy"
    assert not {"rlhf_type", "ref_model"} & effects(job).keys()


@pytest.mark.parametrize(
    "chunks",
    [
        "--num_layers_per_virtual_pipeline_stage 9",
        "--num_virtual_stages_per_pipeline_rank 2",
        "--pipeline_model_parallel_layout 'Et*9|(t*9|)*2t*9L'",
    ],
)
def test_a_reference_model_beside_chunks_of_stages_is_bounded(chunks: str, tmp_path: Path) -> None:
    job = read_job(f"{DPO} --pipeline_model_parallel_size 2 {chunks}", tmp_path)
    row, scenario = effects(job)["rlhf_type"], job.required()[0]
    assert (row.effect, row.reason) == ("more", "pipeline stages send and keep the reference model's outputs too")
    assert scenario.layout.virtual_pipeline_model_parallel_size == 2
    assert effects(job)["ref_model"].bound_bytes == pytest.approx(scenario.architecture.num_parameters, rel=0.2)


def test_rows_of_ms_swift_with_padding_need_their_mask_and_no_more(tmp_path: Path) -> None:
    """``_data_collator`` in swift/template/base.py makes a mask of bool for each row; rows are predicted at their longest."""
    job = read_job(f"{SWIFT.format(model='Qwen/Qwen3-8B')} --micro_batch_size 4 --padding_free false", tmp_path)
    assert effects(job)["padding_free"].bound_bytes == 4 * 2048**2


def test_adapters_in_the_language_model_say_that_other_parts_are_trained_whole(tmp_path: Path) -> None:
    """``_prepare_full_vit`` in swift/megatron/utils/utils.py."""
    whole, of_llm = (
        effects(read_job(f"{SWIFT.format(model=model)} --tuner_type {kind}", tmp_path))
        for kind, model in (("lora", "Qwen/Qwen3-8B"), ("lora_llm", "Qwen/Qwen2.5-VL-7B-Instruct"))
    )
    assert "tuner_type" not in whole
    assert of_llm["tuner_type"].reason.endswith("are trained whole, and come on top")


@pytest.mark.parametrize("batch", ["--use-dynamic-batch-size --max-tokens-per-gpu 8192", "--micro-batch-size 1"])
def test_a_job_that_only_trains_has_no_phases_of_an_engine(batch: str, tmp_path: Path) -> None:
    """``update_weights`` in slime/backends/megatron_utils/actor.py returns at once with ``--debug-train-only``."""
    assert read_job(f"{SFT} {batch}", tmp_path).rollout is None
    with_passes = read_job(f"{SLIME} --load-debug-rollout-data data {batch}", tmp_path).rollout
    assert with_passes is not None
    assert (with_passes.computes_log_probabilities, with_passes.bucket_bytes) == (True, 0)


@pytest.mark.parametrize(
    ("batch", "tokens"), [("--use-dynamic-batch-size --max-tokens-per-gpu 8192", 8192), ("--micro-batch-size 2", 8192)]
)
def test_sequences_of_data_that_nothing_bounds_are_said(batch: str, tokens: int, tmp_path: Path) -> None:
    """``generate_rollout`` in slime/rollout/sft_rollout.py cuts none; slime's placeholder for the length is 4,096."""
    said = "the file does not say how long the data's sequences are"
    job = read_job(f"{SFT} {batch}", tmp_path)
    assert job.required()[0].seq_length == tokens
    assert any(said in one for one in job.warnings)
    known = read_job(f"{SFT} {batch} --rollout-max-context-len 2048", tmp_path)
    assert not any(said in one for one in known.warnings)


def test_arguments_that_a_variable_holds_are_cut_where_they_stand(tmp_path: Path) -> None:
    """Not in the line of the file that sets the variable."""
    (tmp_path / "model.sh").write_text("# sizes\nMODEL_ARGS=(\n  --num-layers 4\n)\n")
    start = 'source "$(dirname "$0")/model.sh"\n\nset -e\n'
    job = read_job(f"{start}{SLIME} --colocate\n  ${{MODEL_ARGS[@]}} --rollout-batch-size 4\n", tmp_path)
    assert job.causes[0].startswith(
        "line 5: '--num-layers' is an argument without a command, since line 4 does not end"
    )
    assert job.causes[0].endswith("correct line 4")


R3 = "actor_rollout_ref.actor.megatron.router_replay.mode"


def test_kept_experts_of_a_budget_of_tokens_are_those_of_all_micro_batches(tmp_path: Path) -> None:
    """Where two full rows are predicted, the experts of all rows of a step are kept nevertheless."""
    budget = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"
    sizes = "trainer.n_gpus_per_node=8 data.max_prompt_length=512 data.max_response_length=512"
    sequences = "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4"
    job = read_job(f"{VERL} {R3}=R3 {budget} {sizes} {sequences}", tmp_path)
    scenario, _ = job.required()
    assert scenario.num_microbatches == 2
    rows = 64 * 4 // 8 * 1024 // 2048
    layers, chosen = 48, 8
    whole_row = 8 * 2048 * chosen * layers
    assert effects(job)[R3].bound_bytes == 2 * 8 * 2048 * chosen * layers * rows + 2 * whole_row
    by_engine = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert effects(read_job(f"{VERL} {by_engine}=True {budget} {sizes}", tmp_path))[by_engine].bound_bytes == whole_row


@pytest.mark.parametrize("key", ["use_routing_replay", "use_rollout_routing_replay"])
def test_slime_keeps_chosen_experts_on_the_host_and_copies_those_in_flight(key: str, tmp_path: Path) -> None:
    """``RoutingReplay`` in slime/utils/routing_replay.py: pinned buffers, and copies of 4 bytes each."""
    job = read_job(f"{SLIME} --micro-batch-size 1 --seq-length 1024 --{key.replace('_', '-')}", tmp_path)
    assert effects(job)[key].bound_bytes == 4 * 1024 * 8 * 48


def test_the_entropy_of_slime_has_a_bound(tmp_path: Path) -> None:
    """The logits in fp32, the entropy's gradient, and where a mask leaves tokens out the probabilities of all."""
    job = read_job(f"{SLIME} --micro-batch-size 1 --seq-length 1024 --entropy-coef 0.01 --rollout-top-p 0.9", tmp_path)
    vocabulary = job.required()[0].architecture.vocab_size
    assert effects(job)["entropy_coef"].bound_bytes == 3 * 4 * 1024 * vocabulary


def test_nemo_rl_s_guide_stands_for_the_model_whose_checkpoint_it_makes(tmp_path: Path) -> None:
    """``policy.model_name`` in examples/configs/recipes/llm/performance/grpo-deepseek-v3-32n8g.yaml at 7ea279ab."""
    guide = "Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md"
    (tmp_path / "job.yaml").write_text(NEMO_RL.format(chunk="null", deferred="true", speculative="null"))
    job = Job.read(tmp_path / "job.yaml", overrides=[f"policy.model_name={guide}"])
    assert job.required()[0].architecture.name == "deepseek-v3"
    assert any("deepseek.md" in warning for warning in job.warnings)


@pytest.mark.parametrize(("is_fp8", "is_read"), [("false", False), ("true", True)])
def test_options_of_fp8_change_nothing_in_bf16(is_fp8: str, is_read: bool, tmp_path: Path) -> None:
    keys = {
        f"policy.megatron_cfg.model_overrides.{name}"
        for name in ("disable_parameter_transpose_cache", "first_last_layers_bf16", "fp8_dot_product_attention")
    }
    (tmp_path / "job.yaml").write_text(NEMO_RL.format(chunk="null", deferred="true", speculative="null"))
    given = [*(f"{key}=true" for key in keys), f"policy.megatron_cfg.fp8_cfg.enabled={is_fp8}"]
    job = Job.read(tmp_path / "job.yaml", overrides=given)
    job.required()
    assert keys <= (effects(job).keys() if is_read else job.without_effect.keys())


def test_verl_s_longest_position_changes_nothing_of_rotary_embeddings(tmp_path: Path) -> None:
    """``override_config`` of verl 0.9.1 has the model's values in a section ``model_config``."""
    key = "actor_rollout_ref.model.override_config.model_config.max_position_embeddings"
    assert key in read_job(f"{VERL} +{key}=10240", tmp_path).without_effect


@pytest.mark.parametrize(
    ("multiple", "tokens", "is_padded"), [(None, 2000, False), (0, 2000, False), (1, 2000, False), (512, 2048, True)]
)
def test_a_collater_of_automodel_that_rounds_lengths_up_pads_every_row(
    multiple: int | None, tokens: int, is_padded: bool, tmp_path: Path
) -> None:
    """``pad_within_micro`` in nemo_automodel/components/datasets/utils.py (36044ad3)."""
    rounded = "" if multiple is None else f", pad_seq_len_divisible: {multiple}"
    (tmp_path / "job.yaml").write_text(
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"
        "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, "
        "pretrained_model_name_or_path: Qwen/Qwen3-8B, torch_dtype: bf16}\n"
        "step_scheduler: {local_batch_size: 1, global_batch_size: 8}\ndataset: {seq_length: 2000}\n"
        f"dataloader: {{collate_fn: {{_target_: nemo_automodel.default_collater{rounded}}}}}\n"
    )
    job = Job.read(tmp_path / "job.yaml")
    assert job.required()[0].seq_length == tokens
    assert any("attention then has a mask" in one.reason for one in job.not_modelled) is is_padded


@pytest.mark.parametrize(("variant", "is_named"), [("dsa", True), ("gated_delta_net", False)])
@pytest.mark.parametrize("framework", ["megatron-lm", "bridge"])
def test_what_another_kind_of_attention_reads_changes_memory_where_the_job_has_it(
    framework: str, variant: str, is_named: bool, tmp_path: Path
) -> None:
    """``DSAIndexer`` in megatron/core/transformer/experimental_attention_variant/dsa.py (d98e8a64)."""
    if framework == "megatron-lm":
        (tmp_path / "run.sh").write_text(
            f"torchrun pretrain_gpt.py --num-layers 4 {SIZES} --dsa-indexer-n-heads 64 --dsa-indexer-topk 2048 "
            f"--experimental-attention-variant {variant}"
        )
        job, start = Job.read(tmp_path / "run.sh"), ""
    else:
        keys = f"experimental_attention_variant: {variant}, dsa_indexer_n_heads: 64, dsa_indexer_topk: 2048"
        sizes = "num_layers: 4, hidden_size: 512, seq_length: 4096"
        (tmp_path / "job.yaml").write_text(f"model: {{{sizes}, {keys}}}\ntrain: {{micro_batch_size: 1}}\n")
        job, start = Job.read(tmp_path / "job.yaml"), "model."
    for key in (f"{start}dsa_indexer_n_heads", f"{start}dsa_indexer_topk"):
        assert (key in effects(job)) is is_named
        assert (key in job.without_effect) is not is_named


def test_another_entry_point_of_skyrl_trains_with_an_engine_of_its_own(tmp_path: Path) -> None:
    """``main`` in skyrl/train/entrypoints/main_base.py (a9564572)."""
    for strategy in ("fsdp", "megatron"):
        text = SKYRL.replace("strategy=megatron", f"strategy={strategy}")
        assert read_job(text, tmp_path).not_supported is None
        job = read_job(f"{text} trainer.override_entrypoint=integrations.arctic_rl.entrypoint", tmp_path)
        assert job.not_supported is not None and "another program trains" in job.not_supported
        assert not job.at_least


@pytest.mark.parametrize(("offloads", "is_named"), [("True", False), ("False", True)])
def test_a_critic_of_fsdp_is_told_wherever_its_tensors_are(offloads: str, is_named: bool, tmp_path: Path) -> None:
    job = read_job(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "critic.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.strategy=fsdp "
        f"critic.fsdp.param_offload={offloads} critic.fsdp.optimizer_offload={offloads}",
        tmp_path,
    )
    assert ("algorithm.adv_estimator" in effects(job)) is is_named
    assert any("a critic takes steps of its own" in one for one in job.warnings) is not is_named


def test_classes_of_automodel_are_not_of_other_frameworks(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {seq_length: 4096}\ntrain: {micro_batch_size: 1}\n")
    common = of_any_model(
        Job.read(tmp_path / "job.yaml"), lambda model: Job.read(tmp_path / "job.yaml", architecture=model)
    )
    assert common is not None
    assert "model_classes" not in common.depends_on_model
