"""Arguments that a job takes from a second place: a file in front of the flags, and variables of a launcher."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from memlab.jobs.job import Job
from tests.unit.job_files import read_job

ARGUMENTS = """\
model: Qwen/Qwen3-30B-A3B
tensor_model_parallel_size: 2
sequence_parallel: true
expert_model_parallel_size: 8
micro_batch_size: 1
global_batch_size: 8
max_length: 4096
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
"""
AS_JSON = """\
{"model": "Qwen/Qwen3-30B-A3B", "tensor_model_parallel_size": 2, "sequence_parallel": true, "expert_model_parallel_size": 8,
\t"micro_batch_size": 1, "global_batch_size": 8, "max_length": 4096, "recompute_granularity": "full",
\t"recompute_method": "uniform", "recompute_num_layers": 1}
"""


def read(folder: Path, script: str, **files: str) -> Job:
    """Returns the job of a script that lies beside other files."""
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return read_job(script, folder)


def layout_and_length(job: Job) -> tuple[int, int, int, int]:
    """Returns tensor and expert parallel size, ranks, and the tokens of a sequence."""
    scenario, settings = job.required()
    assert (settings.recompute_granularity, settings.recompute_num_layers) == ("full", 1)
    layout = scenario.layout
    ranks = layout.tensor_model_parallel_size, layout.expert_model_parallel_size, layout.world_size
    return *ranks, scenario.seq_length


@pytest.mark.parametrize(
    ("command", "length"),
    [
        ("megatron sft job.yaml", 4096),
        ("megatron sft job.yaml --model Qwen/Qwen3-30B-A3B --max_length 1024", 1024),
        ("megatron sft --config job.yaml", 4096),
        ("megatron sft --max_length 1024 --config job.yaml", 1024),
        ("megatron sft --config=job.yaml --max_length 2048", 2048),
        ("megatron pt ./job.yaml --max_length 2048", 2048),
        ("megatron sft $JOB", 4096),
        ("megatron sft job.json --max_length 2048", 2048),
        ("torchrun --nproc_per_node 8 swift/cli/_megatron/sft.py job.yaml", 4096),
        ("python swift/cli/_megatron/main.py sft job.yaml --max_length=512", 512),
    ],
)
def test_ms_swift_reads_the_file_of_arguments_below_the_flags(tmp_path: Path, command: str, length: int) -> None:
    """``parse_yaml_args`` puts the file's arguments in the place of the first word, so a later flag replaces them."""
    script = f"export NPROC_PER_NODE=8\nJOB=job.yaml\n{command}\n"
    job = read(tmp_path, script, job_yaml=ARGUMENTS, job_json=AS_JSON)

    assert layout_and_length(job) == (2, 8, 8, length)


def test_ms_swift_finds_a_file_that_is_named_from_a_folder_above(tmp_path: Path) -> None:
    """Its own examples are started in the folder of the repository."""
    folder = tmp_path / "examples" / "yaml"
    folder.mkdir(parents=True)

    job = read(folder, "NPROC_PER_NODE=8 megatron sft examples/yaml/job.yaml", job_yaml=ARGUMENTS)

    assert layout_and_length(job) == (2, 8, 8, 4096)


def test_ms_swift_takes_only_the_first_argument_for_a_file(tmp_path: Path) -> None:
    """A later word that ends in ``.yaml`` is the value of the flag before it."""
    script = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --external_plugins job.yaml"
    scenario, _ = read(tmp_path, script, job_yaml=ARGUMENTS).required()

    assert scenario.layout.tensor_model_parallel_size == 1


def test_a_missing_file_of_arguments_is_named(tmp_path: Path) -> None:
    job = read(tmp_path, "NPROC_PER_NODE=8 megatron sft other.yaml --model Qwen/Qwen3-30B-A3B")

    assert any("other.yaml" in warning and "is unknown" in warning for warning in job.warnings)


def test_the_file_of_arguments_alone_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("ENV:\n  NPROC_PER_NODE: 8\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True\n" + ARGUMENTS)

    job = Job.read(path)

    assert layout_and_length(job) == (2, 8, 8, 4096)
    assert job.required()[0].allocator.expandable_segments


def test_the_environment_of_the_command_stands_above_that_of_the_file(tmp_path: Path) -> None:
    """``parse_yaml_args`` sets a variable of ``ENV`` only where the environment has none."""
    script = "NPROC_PER_NODE=16 megatron sft job.yaml"
    text = ARGUMENTS.replace("global_batch_size: 8", "global_batch_size: 16") + "ENV: {NPROC_PER_NODE: 8}\n"
    job = read(tmp_path, script, job_yaml=text)

    assert layout_and_length(job)[2] == 16


UNDER_RAY = """\
rlhf_type: grpo
model: Qwen/Qwen3-30B-A3B
max_length: 4096
max_completion_length: 4096
micro_batch_size: 2
global_batch_size: 16
offload_model: true
offload_optimizer: true
colocate_groups: [[train, rollout]]
train:
  gpus: 8
  expert_model_parallel_size: 8
  micro_batch_size: 1
rollout:
  gpus: 8
  micro_batch_size: 7
  vllm_tensor_parallel_size: 2
  vllm_gpu_memory_utilization: 0.4
"""


def test_a_job_under_ray_takes_the_training_group(tmp_path: Path) -> None:
    """``parse_ray_yaml``: ``train`` stands above the shared keys, and only the file of ``--config`` is read."""
    script = "megatron rlhf --use_ray true --config ray.yaml --micro_batch_size 4"
    job = read(tmp_path, script, ray_yaml=UNDER_RAY)
    scenario, settings = job.required()

    assert (scenario.layout.world_size, scenario.layout.expert_model_parallel_size) == (8, 8)
    assert (scenario.seq_length, scenario.micro_batch_size) == (8192, 1)
    assert settings.offload_parameters
    assert job.rollout is not None
    assert (job.rollout.engine_ranks, job.rollout.gpu_memory_utilization) == (2, 0.4)
    assert job.rollout.is_colocated
    assert any("--micro_batch_size" in warning for warning in job.warnings)


def test_a_separate_rollout_under_ray_has_its_own_gpus(tmp_path: Path) -> None:
    text = UNDER_RAY.replace("colocate_groups: [[train, rollout]]\n", "").replace(
        "gpus: 8\n  micro", "gpus: 4\n  micro"
    )
    job = read(tmp_path, "megatron rlhf --use_ray --config ray.yaml", ray_yaml=text)

    assert job.required()[0].layout.world_size == 8
    assert job.rollout is not None
    assert not job.rollout.is_colocated


def test_rlhf_without_a_type_is_dpo(tmp_path: Path) -> None:
    """``MegatronRLHFArguments`` of ms-swift 4.6.0."""
    job = read(tmp_path, "NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8")

    scenario, _ = job.required()
    assert (scenario.state.reference_model, scenario.micro_batch_size) == ("copy", 2)


MODEL_ARGS = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --pipeline-model-parallel-size: $PP
  --num-layers-per-virtual-pipeline-stage: ${LAYERS_PER_VP}
  --expert-model-parallel-size: ${EP}
  --expert-tensor-parallel-size: 1
  --sequence-parallel: true
  --micro-batch-size: ${MBS}
  --global-batch-size: 256
  --seq-length: ${SEQ_LEN}
  --num-layers: 48
  --hidden-size: 2048
  --ffn-hidden-size: 6144
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 4
  --kv-channels: 128
  --qk-layernorm: true
  --vocab-size: 151936
  --make-vocab-size-divisible-by: 1187
  --swiglu: true
  --normalization: RMSNorm
  --disable-bias-linear: true
  --position-embedding-type: rope
  --untie-embeddings-and-output-weights: true
  --num-experts: 128
  --moe-router-topk: 8
  --moe-ffn-hidden-size: 768
  --moe-router-pre-softmax: false
  --recompute-modules: "[moe_act layernorm]"
  --recompute-granularity: selective
  --wandb-exp-name: Qwen3-TP${TP}PP${PP}-${COMMENT}
  --bf16: true
"""


@pytest.mark.parametrize(
    ("given", "chunks"),
    [
        ("TP=2 PP=4 EP=8 MBS=2 SEQ_LEN=8192 LAYERS_PER_VP=false", 1),
        ("TP=2 PP=4 EP=8 MBS=2 SEQ_LEN=8192 LAYERS_PER_VP=6", 2),
    ],
)
def test_variables_of_the_launcher_are_given_with_set(tmp_path: Path, given: str, chunks: int) -> None:
    """MoE Model Zoo's launcher puts them in with ``envsubst``, and leaves out a flag whose value is ``false``."""
    job = read_job(MODEL_ARGS, tmp_path, "Qwen3-30B-A3B.yaml", overrides=given.split(), world_size=64)
    scenario, settings = job.required()
    layout = scenario.layout

    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (2, 4)
    assert (layout.expert_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (8, chunks)
    assert (scenario.micro_batch_size, scenario.seq_length, scenario.num_microbatches) == (2, 8192, 16)
    assert settings.recompute_modules == ("layernorm", "moe_act")
    assert scenario.allocator.expandable_segments
    assert not any("known only when the job runs" in warning for warning in job.warnings)


def test_a_value_that_only_the_launcher_knows_is_asked_for_and_has_an_effect(tmp_path: Path) -> None:
    job = read_job(MODEL_ARGS, tmp_path, "Qwen3-30B-A3B.yaml", overrides=["LAYERS_PER_VP=false"])

    for key in ("tensor_model_parallel_size", "micro_batch_size", "seq_length"):
        assert any(f"{key} is known only when the job runs" in line for line in job.warnings)
        assert key not in job.without_effect


def test_flags_that_several_jobs_of_a_test_share_are_read(tmp_path: Path) -> None:
    """Megatron-LM's own tests put them under an anchor, and merge them with ``<<``."""
    path = tmp_path / "model_config.yaml"
    shared = MODEL_ARGS.partition("MODEL_ARGS:\n")[2]
    path.write_text(f"BASE: &BASE\n{shared}MODEL_ARGS:\n  <<: *BASE\n  --expert-model-parallel-size: 4\n")
    job = Job.read(path, overrides=["TP=1", "PP=1", "MBS=1", "SEQ_LEN=4096", "LAYERS_PER_VP=false"])

    assert job.required()[0].layout.expert_model_parallel_size == 4
    assert job.required()[0].architecture.name == "qwen3-30b-a3b"


def test_a_variable_of_the_launcher_that_nobody_gives_is_named(tmp_path: Path) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(MODEL_ARGS)

    job = Job.read(path, overrides=["TP=2", "PP=4", "MBS=1", "SEQ_LEN=4096", "LAYERS_PER_VP=false"])

    assert any("expert_model_parallel_size is known only when the job runs" in warning for warning in job.warnings)
    assert not any("tensor_model_parallel_size is known" in warning for warning in job.warnings)


SLIME = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /root/Qwen3-30B-A3B
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 4096
--rollout-max-context-len 8192 --rollout-batch-size 32 --global-batch-size 32 --attention-dropout 0 --hidden-dropout 0
""".replace("\n", " ")


def test_files_of_slime_stand_above_its_flags(tmp_path: Path) -> None:
    """``--custom-config-path`` sets arguments after parsing, and ``--megatron-config-path`` then those of the actor."""
    script = SLIME + "--custom-config-path custom.yaml --megatron-config-path roles.yaml"
    roles = """\
megatron:
- {name: critic, role: critic, overrides: {recompute_granularity: selective}}
- {name: default, role: actor, overrides: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1,
   num_nodes: 7}}
"""
    job = read(
        tmp_path, script, custom_yaml="max_tokens_per_gpu: 8192\nrecompute_granularity: selective\n", roles_yaml=roles
    )
    scenario, settings = job.required()

    assert scenario.seq_length == 8192
    assert (settings.recompute_granularity, settings.recompute_num_layers) == ("full", 1)
    assert scenario.layout.world_size == 8


def test_a_missing_file_of_slime_is_named(tmp_path: Path) -> None:
    job = read(tmp_path, SLIME + "--custom-config-path /root/other.yaml")

    assert any("/root/other.yaml" in warning and "is unknown" in warning for warning in job.warnings)


def test_the_launcher_of_the_model_zoo_reads_the_file_of_its_model(tmp_path: Path) -> None:
    """``sbatch_benchmarking.sh`` puts its environment into model_configs/benchmarking/MODEL.yaml and appends its flags."""
    models, scripts = tmp_path / "model_configs" / "benchmarking", tmp_path / "best_practice" / "qwen3"
    models.mkdir(parents=True)
    scripts.mkdir(parents=True)
    (models / "Qwen3-30B-A3B.yaml").write_text(MODEL_ARGS)
    script = """\
export MODEL=Qwen3-30B-A3B
export MBS=1 SEQ_LEN=4096 LAYERS_PER_VP=false
TP=2 PP=1 EP=8 NNODES=4 bash ./sbatch_benchmarking.sh --recompute-granularity full --recompute-method uniform \\
  --recompute-num-layers 1
"""
    job = read(scripts, script)

    assert layout_and_length(job) == (2, 8, 32, 4096)
    assert any("adds flags of its own" in warning for warning in job.warnings)


def test_a_size_that_only_the_tokenizer_has_is_the_published_models(tmp_path: Path) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(MODEL_ARGS.replace("--vocab-size: 151936", "--tokenizer-model: Qwen/Qwen3-30B-A3B"))
    job = Job.read(path, overrides=["TP=1", "PP=1", "EP=8", "MBS=1", "SEQ_LEN=4096", "LAYERS_PER_VP=false"])

    assert job.required()[0].architecture.vocab_size == 151936
    assert any("the tokenizer's own number of tokens" in warning for warning in job.warnings)


@pytest.mark.parametrize(
    "text",
    ['{"fsdp_config": {"fsdp_version": 2}, "num_processes": 8}', '{"model": "x", "per_device_train_batch_size": 1}'],
)
def test_json_of_other_programs_is_no_job_of_ms_swift(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="is of no format"):
        read_job(text, tmp_path, "fsdp.json")


_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        _BOMB + "ENV: {A: *a39, NPROC_PER_NODE: 8}\n" + ARGUMENTS,
        ARGUMENTS + "colocate_groups: [[{a: 1}, train], 7, [[rollout]]]\ntrain: 8\n",
        ARGUMENTS + "ENV: 8\n",
        _BOMB + "MODEL_ARGS: {--num-layers: *a39}\n",
        _BOMB + "MODEL_ARGS: {--num-layers: [1, *a39]}\nENV_VARS: {A: *a39}\n",
    ],
)
def test_a_file_of_arguments_of_any_shape_is_read_or_refused_at_once(tmp_path: Path, text: str) -> None:
    with suppress(ValueError):
        assert len(str(read_job(text, tmp_path, "job.yaml").to_dict())) < 1_000_000


_GOES_ON = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --max_length 2048 --adapters out/ckpt"


def test_saved_adapters_have_their_own_rank(tmp_path: Path) -> None:
    """``_load_adapter_config`` of ms-swift 4.6.0 sets what the folder's file has, also over a flag."""
    without = read_job(_GOES_ON, tmp_path)
    assert [one for one in without.warnings if "adapter_config.json" in one]
    (tmp_path / "out" / "ckpt").mkdir(parents=True)
    (tmp_path / "out" / "ckpt" / "adapter_config.json").write_text('{"r": 64, "lora_alpha": 128, "lora_dropout": 0.0}')
    for flags in ("", " --lora_rank 16"):
        job = read_job(_GOES_ON + flags, tmp_path)
        lora = job.required()[0].state.lora
        assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (64, 128, 0)
        assert not [one for one in job.warnings if "adapter_config.json" in one]
    (tmp_path / "out" / "ckpt" / "adapter_config.json").write_text('{"r": 64, "bias": "all"}')
    assert "biases that are trained" in str(read_job(_GOES_ON, tmp_path).not_modelled)
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\nmax_length: 2048\nadapters: []\n")
    job = read_job("NPROC_PER_NODE=8 megatron sft job.yaml\n", tmp_path)
    assert job.required()[0].state.lora is None


def test_ranks_that_are_set_and_not_exported_do_not_reach_the_job(tmp_path: Path) -> None:
    job = "megatron sft --model Qwen/Qwen3-8B --max_length 2048"
    for text, ranks, is_said in ((f"NPROC_PER_NODE=4\n{job}", 1, True), (f"export NPROC_PER_NODE=4\n{job}", 4, False)):
        found = read_job(text, tmp_path)
        assert found.required()[0].layout.world_size == ranks
        assert any("NPROC_PER_NODE and does not export it" in one for one in found.warnings) == is_said
