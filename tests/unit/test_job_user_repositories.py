"""Jobs in repositories of users: an earlier framework beside them, forks of it, and files that only their start names."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.config.architectures import ARCHITECTURES, published_architecture
from memlab.jobs.any_model import of_any_model
from memlab.jobs.job import Job
from memlab.views.text.job import job_table

DECORATOR = '@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)\ndef main(config): ...\n'
DEFAULTS = """\
trainer: {nnodes: 1, n_gpus_per_node: 4}
data: {max_prompt_length: 100, max_response_length: 28}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-0.5B, use_remove_padding: true}
  actor: {entropy_coeff: 0.001, ppo_mini_batch_size: 32, ppo_micro_batch_size_per_gpu: null, an_own_switch: false}
  rollout: {n: 1}
"""
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.tensor_model_parallel_size=1 {}\n"
ROWS = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
LEGACY = "trainer.use_legacy_worker_impl"


def _checkout(folder: Path, release: str) -> Path:
    (folder / "verl" / "trainer" / "config").mkdir(parents=True)
    (folder / "verl" / "version").mkdir()
    (folder / "verl" / "version" / "version").write_text(f"{release}\n")
    (folder / "verl" / "trainer" / "main_ppo.py").write_text(DECORATOR)
    (folder / "verl" / "trainer" / "config" / "ppo_trainer.yaml").write_text(DEFAULTS)
    (folder / "mine").mkdir()
    return folder / "mine"


def _read(file: Path, text: str, version: str | None = None) -> Job:
    file.write_text(text)
    return Job.read(file, version=version)


def _named(job: Job) -> set[str]:
    return {one.key for one in job.not_modelled}


@pytest.mark.parametrize(("release", "is_earlier"), [("0.5.0.dev", True), ("0.10.0.dev", False)])
def test_the_configuration_of_an_earlier_verl_that_a_job_lies_beside_has_the_defaults(
    release: str, is_earlier: bool, tmp_path: Path
) -> None:
    job = _read(_checkout(tmp_path, release) / "run.sh", VERL.format(ROWS))
    values = {one.key: one.value for one in job.taken}
    assert values["trainer.n_gpus_per_node"] == (4 if is_earlier else 8)
    assert ("actor_rollout_ref.actor.entropy_coeff" in _named(job)) is is_earlier
    assert (LEGACY in _named(job)) is is_earlier
    assert any(f"says verl {release}" in one for one in job.warnings) is is_earlier
    # What is the checkout's own and memlab does not know is counted, and is not the job's.
    assert not any(key.endswith("an_own_switch") for key in _named(job))
    assert any("1 keys of the framework's own configuration" in one for one in job.warnings) is is_earlier


@pytest.mark.parametrize(
    ("file", "text", "is_legacy"),
    [
        ("requirements-verl.txt", "torch\nverl==0.7.1\n", True),
        ("pyproject.toml", '[project]\ndependencies = ["verl[vllm]==0.8.0"]\n', False),
        ("setup.py", 'setup(install_requires=["verl == 0.3.0.post1"])\n', True),
        ("requirements.txt", "notverl==0.1\nmy-verl==0.2\n# verl==0.3 is too old\nverl>=0.4\n", None),
    ],
)
def test_the_release_that_a_repository_requires_decides(
    file: str, text: str, is_legacy: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / file).write_text(text)
    job = _read(tmp_path / "scripts" / "run.sh", VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))
    assert (LEGACY in _named(job)) is bool(is_legacy)
    assert any("requires verl" in one for one in job.warnings) is (is_legacy is not None)
    assert any("use_no_sync" in key for key in _named(job)) is (is_legacy is None)


@pytest.mark.parametrize(("release", "rows", "steps"), [("0.2.0.dev", 4, 2), ("0.10.0.dev", 1, 4)])
def test_rows_of_all_ranks_are_divided_by_the_ranks_as_the_earlier_workers_do(
    release: str, rows: int, steps: int, tmp_path: Path
) -> None:
    keys = "actor_rollout_ref.actor.ppo_micro_batch_size=16 data.max_prompt_length=100 data.max_response_length=28"
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.actor.ppo_mini_batch_size=32"
    job = _read(_checkout(tmp_path, release) / "run.sh", VERL.format(f"{keys} {model}"))
    scenario = job.required()[0]
    assert scenario.seq_length == 128 * rows
    assert scenario.num_microbatches == steps
    assert ("actor_rollout_ref.actor.ppo_micro_batch_size" in _named(job)) is (rows == 1)


@pytest.mark.parametrize(
    ("default", "engine"),
    [("ppo_trainer", "fsdp2"), ("ppo_megatron_trainer", "megatron"), ("one_step_off_ppo_megatron_trainer", "megatron")],
)
def test_the_name_of_verl_s_configuration_in_a_job_s_defaults_decides_the_engine(
    default: str, engine: str, tmp_path: Path
) -> None:
    text = (
        f"hydra: {{searchpath: ['pkg://verl.trainer.config']}}\ndefaults: [{default}, _self_]\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-0.6B}, actor: {ppo_micro_batch_size_per_gpu: 1}}\n"
    )
    job = _read(tmp_path / "mine.yaml", text, "0.9.1")
    assert job.required()[0].engine == engine
    assert not any("are not beside" in one or "no key chooses an engine" in one for one in job.warnings[1:])


@pytest.mark.parametrize("where", ["pkg://verl.trainer.config", "file://verl/trainer/config"])
@pytest.mark.parametrize("start", ["$PROJECT_DIR", "$(pwd)"])
def test_a_configuration_is_found_below_the_folder_where_the_job_is_started(
    where: str, start: str, tmp_path: Path
) -> None:
    folder = _checkout(tmp_path, "0.5.0")
    (folder / "config").mkdir()
    own = f"hydra: {{searchpath: ['{where}']}}\ndefaults: [ppo_trainer, _self_]\ndata: {{max_response_length: 156}}\n"
    (folder / "config" / "small.yaml").write_text(own)
    command = f'--config-path="{start}/mine/config" --config-name=small {ROWS}'
    job = _read(folder / "run.sh", VERL.format(command))
    values = {one.key: one.value for one in job.taken}
    assert (values["data.max_response_length"], values["trainer.n_gpus_per_node"]) == (156, 4)
    assert not any("not beside" in one or "of another machine" in one for one in job.warnings)
    elsewhere = VERL.format(f"--config-path=/data/other/config --config-name=small {ROWS}")
    told = _read(folder / "run.sh", elsewhere)
    assert {one.key: one.value for one in told.taken}["data.max_response_length"] == 156
    (said,) = [one for one in told.warnings if "has the folder of another machine" in one]
    assert str(folder / "config" / "small.yaml") in said


def test_a_configuration_of_another_folder_is_not_the_one_that_a_job_names(tmp_path: Path) -> None:
    """Hydra looks in the folder of ``--config-path``, or in that of the program."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "ppo.yaml").write_text("data: {max_prompt_length: 7, max_response_length: 9}\n")
    for start in ("--config-path=conf/exp1 --config-name=ppo", "--config-name=exp1/ppo", "--config-name=ppo"):
        job = _read(tmp_path / "scripts" / "run.sh", VERL.format(f"{start} {ROWS}"))
        assert all(one.value != 7 for one in job.taken if one.key == "data.max_prompt_length")
        assert any("is not beside the script, so memlab takes the framework's own" in one for one in job.warnings)


@pytest.mark.parametrize("start", ["", "--config-path=config --config-name=mine "])
@pytest.mark.parametrize(("program", "is_own"), [("main_ppo", True), ("main_video_ppo", False)])
def test_a_program_that_a_fork_adds_to_verl_is_not_verl_s_own(
    program: str, is_own: bool, start: str, tmp_path: Path
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("data: {max_prompt_length: 100, max_response_length: 28}\n")
    text = VERL.replace("main_ppo", program).format(f"{start}{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    job = _read(tmp_path / "run.sh", text)
    assert any("is no program of verl's own" in one for one in job.warnings) is not is_own


def test_lengths_that_a_configuration_leaves_open_are_asked_for(tmp_path: Path) -> None:
    text = VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B data.max_response_length=null")
    job = _read(tmp_path / "run.sh", text)
    assert [one for one in job.warnings if "data.max_response_length is null" in one and "--set" in one]
    assert "how long sequences are" in job.guesses


NEMO = """\
policy:
  model_name: Qwen/Qwen3-0.6B
  max_total_sequence_length: 256
  train_global_batch_size: 8
  train_micro_batch_size: 1
  {}
  generation: {{colocated: {{enabled: true}}}}
grpo: {{num_prompts_per_step: 8, num_generations_per_prompt: 1}}
cluster: {{gpus_per_node: 2, num_nodes: 1}}
"""


@pytest.mark.parametrize(
    ("engines", "title", "question"),
    [
        ("dtensor_cfg: {enabled: false}", "nemo-rl", "asks for one that is true"),
        (
            "dtensor_cfg: {enabled: false}\n  dtensor_v2_cfg: {enabled: true, expert_parallel_size: 8}",
            "nemo-rl",
            "policy.dtensor_v2_cfg.enabled is true, a key that NVIDIA's NeMo-RL does not have",
        ),
        ("dtensor_cfg: {enabled: false}\n  megatron_cfg: {enabled: true}", "nemo-rl", None),
    ],
)
def test_no_engine_is_taken_where_nemo_rl_has_none(
    engines: str, title: str, question: str | None, tmp_path: Path
) -> None:
    """``Policy`` of NVIDIA's NeMo-RL (7ea279ab) raises without one; forks have others."""
    job = _read(tmp_path / "grpo.yaml", NEMO.format(engines))
    assert job.framework.startswith(title)
    assert (job.scenario is None) is (question is not None)
    assert question is None or question in str(job.not_supported)


def test_megatron_lm_reads_the_file_of_yaml_cfg_in_place_of_all_flags(tmp_path: Path) -> None:
    """``parse_args`` of Megatron-LM (core 0.16.1, d98e8a64) returns the file's arguments."""
    (tmp_path / "gpt.yaml").write_text(
        "language_model: {num_layers: 4, hidden_size: 512, num_attention_heads: 8, ffn_hidden_size: null, "
        "add_bias_linear: false, normalization: RMSNorm}\n"
        "model_parallel: {tensor_model_parallel_size: 2, bf16: true}\n"
        "encoder_num_layers: null\nswiglu: true\nseq_length: 128\nmicro_batch_size: 2\nglobal_batch_size: 8\n"
        "position_embedding_type: rope\nuntie_embeddings_and_output_weights: true\nvocab_size: 1000\n"
        "hidden_dropout: 0.0\nattention_dropout: 0.0\n"
    )
    text = (
        "torchrun --nproc_per_node 4 pretrain_gpt.py --yaml-cfg config/gpt.yaml --micro-batch-size 16 --data-path x\n"
    )
    job = _read(tmp_path / "run.sh", text.replace("config/", ""))
    scenario = job.required()[0]
    assert (scenario.num_layers, scenario.layout.tensor_model_parallel_size) == (4, 2)
    assert (scenario.micro_batch_size, scenario.num_microbatches) == (2, 2)
    assert any("so these change nothing: --micro-batch-size, --data-path" in one for one in job.warnings)
    lost = _read(tmp_path / "lost.sh", text)
    assert any("config/gpt.yaml" in one and "is not beside the script" in one for one in lost.warnings)


@pytest.mark.parametrize(
    ("layers", "experts", "groups", "is_gated"),
    [
        ("activation_func: swiglu, num_moe_experts: 8, moe_router_topk: 2, num_query_groups: 4", 8, 4, True),
        ("activation_func: squaredrelu, num_moe_experts: null, num_query_groups: null", None, 8, False),
    ],
)
def test_the_sections_of_yaml_cfg_decide_as_megatron_core_s_config_does(
    layers: str, experts: int | None, groups: int, is_gated: bool, tmp_path: Path
) -> None:
    """``core_transformer_config_from_yaml`` takes them, and neither ``swiglu`` nor ``group_query_attention``."""
    (tmp_path / "gpt.yaml").write_text(
        f"language_model: {{num_layers: 4, hidden_size: 512, num_attention_heads: 8, {layers}, "
        "add_bias_linear: false, normalization: RMSNorm, hidden_dropout: 0.0, attention_dropout: 0.0, "
        "moe_grouped_gemm: true}\n"
        "model_parallel: {virtual_pipeline_model_parallel_size: 2, bf16: true, deallocate_pipeline_outputs: false}\n"
        f"swiglu: {str(not is_gated).lower()}\ngroup_query_attention: {str(groups == 8).lower()}\nseq_length: 128\n"
        "micro_batch_size: 2\nglobal_batch_size: 8\nposition_embedding_type: rope\nvocab_size: 1000\n"
        "untie_embeddings_and_output_weights: true\n"
    )
    job = _read(tmp_path / "run.sh", "torchrun --nproc_per_node 4 pretrain_gpt.py --yaml-cfg gpt.yaml\n")
    scenario = job.required()[0]
    architecture = scenario.architecture
    assert (architecture.num_moe_experts, architecture.num_query_groups) == (experts, groups)
    assert architecture.gated_linear_unit is is_gated
    assert scenario.layout.virtual_pipeline_model_parallel_size == 1
    assert not job.not_modelled


@pytest.mark.parametrize("test", ["[ $NODE_RANK == 0 ]", "test $NODE_RANK -eq 0"])
@pytest.mark.parametrize("given", ["", "NODE_RANK=0\n"])
def test_a_condition_on_a_variable_of_the_cluster_hides_no_job(test: str, given: str, tmp_path: Path) -> None:
    """Without the variable, the shell refuses the condition: the script counts on what starts it."""
    command = VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    job = _read(tmp_path / "run.sh", f"{given}if {test}; then\n{command}else\nsleep 10\nfi\n")
    assert job.required()[0].num_microbatches > 1
    assert any("memlab cannot decide whether the script runs this command" in one for one in job.warnings) is (
        not given
    )


@pytest.mark.parametrize("folder", ["/workspace/mine", "${PROJECT_ROOT:-/workspace/mine}", "$HOME/mine"])
def test_a_script_that_another_one_starts_by_the_path_of_another_machine_is_read(folder: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B data.max_prompt_length=${LONGEST:-4} actor_rollout_ref"
    (tmp_path / "scripts" / "base.sh").write_text(VERL.format(f'{ROWS} {model}.rollout.n=2 "$@"'))
    start = f'LONGEST=100 bash "{folder}/scripts/base.sh" data.max_response_length=28\n'
    job = _read(tmp_path / "scripts" / "run.sh", start)
    scenario = job.required()[0]
    assert scenario.seq_length == 2 * 128
    assert any("the script starts base.sh, and memlab reads the job of that one" in one for one in job.warnings)


@pytest.mark.parametrize("before", ["", "bash prepare.sh\n"])
def test_what_a_line_gives_to_a_script_that_is_not_there_is_no_whole_job(before: str, tmp_path: Path) -> None:
    (tmp_path / "prepare.sh").write_text("export HF_HOME=/models\n")
    start = f"{before}bash /workspace/lost.sh actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B {ROWS}\n"
    job = _read(tmp_path / "run.sh", start)
    assert "the script starts '/workspace/lost.sh', which is not near" in job.causes[0]


def test_what_a_line_gives_to_a_script_without_a_job_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "entry.sh").write_text('ssh "$NODE" "run $*"\n')
    job = _read(tmp_path / "run.sh", f"bash entry.sh actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B {ROWS}\n")
    assert job.required()[0].architecture.name == "qwen2.5-0.5b"
    assert "the script starts 'entry.sh', which starts no job that memlab can read" in job.causes[0]


@pytest.mark.parametrize(("program", "is_own"), [("pretrain_gpt.py", True), ("pretrain_mine.py", False)])
def test_a_rule_of_the_framework_is_no_definite_refusal_of_another_program(
    program: str, is_own: bool, tmp_path: Path
) -> None:
    flags = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --seq-length 128 --swiglu "
        "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --normalization RMSNorm --bf16 "
        "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
        "--expert-model-parallel-size 4 --num-experts 0"
    ).replace(" --num-experts 0", "")
    job = _read(tmp_path / "run.sh", f"torchrun --nproc_per_node 8 {program} {flags}\n")
    assert (job.cannot_start is not None) is is_own
    assert is_own or "pretrain_mine.py, a program of the job's own, may not" in str(job.not_supported)


@pytest.mark.parametrize(
    ("program", "is_own"),
    [
        ("skyrl_train.entrypoints.main_base", True),
        ("skyrl.train.entrypoints.main_base", True),
        ("examples.train.algorithms.dapo.main_dapo", True),
        ("examples/dapo/main_dapo.py", True),
        ("examples.train.mini_swe_agent.main_mini_swe", False),
        ("best.main", False),
    ],
)
def test_a_program_that_may_train_on_other_sequences_than_skyrl_s_is_told(
    program: str, is_own: bool, tmp_path: Path
) -> None:
    keys = "trainer.policy.model.path=Qwen/Qwen3-0.6B trainer.strategy=fsdp2 trainer.micro_train_batch_size_per_gpu=1"
    job = _read(tmp_path / "run.sh", f"python {'' if program.endswith('.py') else '-m '}{program} {keys}\n")
    assert any("is a program that memlab does not know" in one for one in job.warnings) is not is_own


def test_a_policy_without_a_gpu_is_asked_for(tmp_path: Path) -> None:
    """NeMo-RL's configurations of users leave the cluster's size to what starts them."""
    text = NEMO.format("megatron_cfg: {enabled: true}").replace("gpus_per_node: 2", "gpus_per_node: 1")
    other = "{enabled: false, resources: {gpus_per_node: 1, num_nodes: 1}}"
    job = _read(tmp_path / "grpo.yaml", text.replace("colocated: {enabled: true}", f"colocated: {other}"))
    assert job.cannot_start is None
    assert "--set cluster.num_nodes=2" in str(job.not_supported)


@pytest.mark.parametrize(
    ("nodes", "tensor", "gym", "ranks"),
    [
        (5, 4, "{should_use_nemo_gym: true, nemo_gym: {num_gpu_nodes: 1}}", 4),
        (5, 2, "{should_use_nemo_gym: true, nemo_gym: {num_gpu_nodes: 1}}", 6),
        (4, 4, "{should_use_nemo_gym: true, nemo_gym: {num_gpu_nodes: 0}}", 4),
        (4, 4, "{should_use_nemo_gym: false, nemo_gym: {num_gpu_nodes: 1}}", 4),
    ],
)
def test_nodes_of_nemo_gym_are_of_the_cluster_where_only_then_the_layout_fits(
    nodes: int, tensor: int, gym: str, ranks: int, tmp_path: Path
) -> None:
    """super-v3 and ultra-v3 take them from ``cluster.num_nodes``, and main does not: which one is said."""
    text = NEMO.format(f"megatron_cfg: {{enabled: true, tensor_model_parallel_size: {tensor}}}")
    text = text.replace("num_nodes: 1", f"num_nodes: {nodes}") + f"\nenv: {gym}\n"
    other = "{enabled: false, resources: {gpus_per_node: 2, num_nodes: 2}}"
    job = _read(tmp_path / "grpo.yaml", text.replace("colocated: {enabled: true}", f"colocated: {other}"))
    assert job.cannot_start is None
    assert job.required()[0].layout.world_size == ranks
    said = [one for one in job.warnings if "NeMo-Gym nodes beside cluster.num_nodes" in one]
    assert bool(said) is (nodes == 5)
    assert all(("takes them from it, as" in one) is (tensor == 4) for one in said)


@pytest.mark.parametrize(("engine", "of_prompt"), [("dp", 2), ("megatron", 1)])
def test_rows_of_all_ranks_count_prompts_in_the_first_verl(engine: str, of_prompt: int, tmp_path: Path) -> None:
    """``fsdp_workers.py`` multiplies all three sizes by ``rollout.n`` then, and ``megatron_workers.py`` none."""
    rows = " ".join(
        f"actor_rollout_ref.{key}_micro_batch_size=16" for key in ("actor.ppo", "rollout.log_prob", "ref.log_prob")
    )
    keys = f"{rows} actor_rollout_ref.rollout.n=2 model_engine={engine} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    job = _read(_checkout(tmp_path, "0.1") / "run.sh", VERL.format(keys))
    values = {one.key: one.memlab_value for one in job.taken}
    assert job.required()[0].seq_length == 128 * 16 // 4 * of_prompt
    assert [values[key.partition("=")[0]] for key in rows.split()] == [16 // 4 * of_prompt] * 3


@pytest.mark.parametrize(("prompts", "is_told"), [(64, False), (16, True)])
def test_a_mini_batch_of_more_prompts_than_a_step_is_told_with_dynamic_batches(
    prompts: int, is_told: bool, tmp_path: Path
) -> None:
    actor = "actor_rollout_ref.actor"
    keys = (
        f"{actor}.use_dynamic_bsz=true {actor}.ppo_mini_batch_size=64 data.train_batch_size={prompts} "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    )
    job = _read(tmp_path / "run.sh", VERL.format(keys))
    assert job.cannot_start is None
    assert any("verl does not check with dynamic batches" in one for one in job.warnings) is is_told


def test_torchrun_s_module_switch_stands_before_its_other_flags(tmp_path: Path) -> None:
    """``-m`` of torchrun has no value, and argparse gives ``--nproc_per_node=4`` none of the words after it."""
    text = "torchrun -m --nnodes 2 --nproc_per_node=4 verl.trainer.fsdp_sft_trainer data.train_batch_size=16 {}\n"
    job = _read(tmp_path / "sft.sh", text.format("model.partial_pretrain=Qwen/Qwen2.5-0.5B"))
    values = {one.key: one.value for one in job.taken}
    assert (values["nnodes"], values["nproc_per_node"], values["data.train_batch_size"]) == (2, 4, 16)


@pytest.mark.parametrize("has_fsdp2", [False, True])
def test_the_earlier_sft_trainer_has_the_defaults_of_its_checkout(has_fsdp2: bool, tmp_path: Path) -> None:
    folder = _checkout(tmp_path, "0.2.0.dev")
    trainer = tmp_path / "verl" / "trainer"
    source = DECORATOR.replace("ppo_trainer", "sft_trainer")
    (trainer / "fsdp_sft_trainer.py").write_text(source + ("FSDP = 'fsdp2'\n" if has_fsdp2 else ""))
    (trainer / "config" / "sft_trainer.yaml").write_text(
        "data: {max_length: 384}\nmodel: {enable_gradient_checkpointing: false}\nuse_remove_padding: false\n"
    )
    text = "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen2.5-0.5B\n"
    job = _read(folder / "sft.sh", text)
    values = {one.key: one.value for one in job.taken}
    assert (values["data.max_length"], values["model.enable_gradient_checkpointing"]) == (384, False)
    assert any("says verl 0.2.0.dev" in one and "does not see what its trainer" in one for one in job.warnings)
    assert "config_name" not in _named(job)
    assert any(one.key == "model.strategy" and one.memlab_value == "fsdp" for one in job.taken) is not has_fsdp2


@pytest.mark.parametrize("folder", ["verl", "Agents", "examples/Agents"])
def test_a_checkout_below_the_repository_is_found(folder: str, tmp_path: Path) -> None:
    """Of verl in a folder of its name, or in the one with the program to which the script goes; others are not it."""
    _checkout(tmp_path / folder, "0.2.0.dev")
    (tmp_path / "examples" / "Agents").mkdir(parents=True, exist_ok=True)
    go = "" if folder == "verl" else "cd Agents\n"
    job = _read(tmp_path / "examples" / "run.sh", go + VERL.format(ROWS))
    assert {one.key: one.value for one in job.taken}["trainer.n_gpus_per_node"] == 4
    assert LEGACY in _named(job)


@pytest.mark.parametrize("program", ["verl.agent_trainer.main_ppo", "verl/own/main_ppo.py", "verl.main_ppo"])
def test_a_program_elsewhere_in_a_fork_of_verl_is_not_verl_s_own(program: str, tmp_path: Path) -> None:
    start = program if program.endswith(".py") else f"-m {program}"
    text = VERL.replace("-m verl.trainer.main_ppo", start).format(
        f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
    )
    assert any("is no program of verl's own" in one for one in _read(tmp_path / "run.sh", text).warnings)


SKYRL = (
    "python -m {}.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen2.5-0.5B "
    "trainer.placement.policy_num_gpus_per_node=2 {}\n"
)


@pytest.mark.parametrize(
    ("file", "text", "key", "is_on"),
    [
        ("skyrl/train/config/config.py", "class TrainerConfig:\n    use_sample_packing: bool = True\n", "", False),
        ("skyrl-train/skyrl_train/config/ppo_base_config.yaml", "trainer: {use_sample_packing: true}\n", "", False),
        ("skyrl/train/config/config.py", "    use_expandable_segments: bool = True\n", "", True),
        ("unrelated/config.py", "", "", True),
        ("skyrl/train/config/config.py", "", "trainer.use_expandable_segments=true", True),
    ],
)
def test_an_earlier_skyrl_does_not_choose_the_allocator(
    file: str, text: str, key: str, is_on: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "scripts").mkdir()
    job = _read(tmp_path / "scripts" / "run.sh", SKYRL.format("skyrl.train", key))
    assert job.required()[0].allocator.expandable_segments is is_on
    says = any("is of an earlier SkyRL" in one for one in job.warnings)
    assert says is ("skyrl" in file and "use_expandable_segments" not in text)


def test_a_file_that_a_script_sources_from_the_top_of_its_repository_is_read(tmp_path: Path) -> None:
    (tmp_path / "exp" / "lib").mkdir(parents=True)
    (tmp_path / "exp" / "lib" / "sizes.sh").write_text("LAYERS=6\n")
    (tmp_path / "sizes.sh").write_text("LAYERS=7\n")
    model = "--hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    for name, layers in (("exp/lib/sizes.sh", 6), ("sizes.sh", None)):
        text = f"source {name}\npython pretrain_gpt.py --num-layers ${{LAYERS:-5}} {model} --tensor-model-parallel-size 1\n"
        job = _read(tmp_path / "exp" / "run.sh", text)
        assert (job.required()[0].architecture.num_layers == layers) is (layers is not None)
        assert any(f"sources {name}, which is not beside it" in one for one in job.warnings) is (layers is not None)


@pytest.mark.parametrize(("place", "is_cause"), [("before", True), ("after", False)])
def test_where_a_script_stops_after_its_job_is_no_cause(place: str, is_cause: bool, tmp_path: Path) -> None:
    job = VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    parts = (
        ["set -u\n", "echo $OUTPUT_FOLDER\n", job] if place == "before" else ["set -u\n", job, "echo $OUTPUT_FOLDER\n"]
    )
    causes = _read(tmp_path / "run.sh", "".join(parts)).causes
    assert any("unless OUTPUT_FOLDER is set" in one for one in causes) is is_cause


def test_rows_of_a_program_with_a_first_turn_have_all_turns(tmp_path: Path) -> None:
    """``_update_right_side`` of Search-R1 (a14dc3a4) keeps max_prompt_length tokens behind max_start_length ones."""
    keys = "data.max_prompt_length=96 data.max_response_length=10 data.max_start_length=32 data.max_obs_length=20"
    text = VERL.format(f"{ROWS} {keys} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    job = _read(tmp_path / "run.sh", text)
    assert job.required()[0].seq_length == 2 * (32 + 96)
    assert "data.max_start_length" not in _named(job)
    assert any("at most the 96 of data.max_prompt_length" in one for one in job.warnings)
    without = _read(tmp_path / "run.sh", f"{text.rstrip()} +do_search=false\n")
    assert without.required()[0].seq_length == 2 * (96 + 10), "its trainer generates one response, as verl's does"


def test_a_configuration_in_a_package_of_the_repository_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine" / "config").mkdir(parents=True)
    (tmp_path / "mine" / "config" / "unified.yaml").write_text(
        "data: {max_prompt_length: 100, max_response_length: 28}\nrollout: {nnodes: 1, n_gpus_per_node: 8}\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen2.5-0.5B}, actor: {ppo_micro_batch_size_per_gpu: 2}}\n"
    )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "train.py").write_text(
        DECORATOR.replace('"config"', '"pkg://mine.config"').replace("ppo_trainer", "unified")
    )
    job = _read(tmp_path / "recipes" / "run.sh", "python train.py actor_rollout_ref.hybrid_engine=True\n")
    assert job.required()[0].seq_length == 256
    # ``rollout`` is another program's own section here, and its job says that the engine is on the same GPUs.
    assert not any("has GPUs of its own" in one for one in job.warnings)


def test_the_flags_of_ray_are_not_the_job_s(tmp_path: Path) -> None:
    text = (
        "ray job submit --submission-id mine --no-wait --address http://h -- python3 train.py --actor-num-nodes 1 "
        "--actor-num-gpus-per-node 2 --rollout-batch-size 4 --num-steps-per-rollout 1 --rollout-max-response-len 64 "
        "--hf-checkpoint Qwen/Qwen3-0.6B --n-samples-per-prompt 1 --tensor-model-parallel-size 1\n"
    )
    assert not _named(_read(tmp_path / "run.sh", text)) & {"submission_id", "no_wait", "address"}


@pytest.mark.parametrize("prompts", [4, 400])
def test_a_row_of_slime_is_full_where_prompts_may_be_of_any_length(prompts: int, tmp_path: Path) -> None:
    """With prompts of unknown length, few short responses do not bound the row, and the warning says the budget."""
    text = (
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 2 --hf-checkpoint Qwen/Qwen3-0.6B "
        f"--use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-batch-size {prompts} --n-samples-per-prompt 1 "
        "--num-steps-per-rollout 1 --rollout-max-response-len 64 --tensor-model-parallel-size 1\n"
    )
    job = _read(tmp_path / "run.sh", text)
    scenario = job.required()[0]
    assert scenario.seq_length == 4096
    assert scenario.packed_sequences <= prompts
    assert any("memlab takes rows of the budget, 4,096 tokens" in one for one in job.warnings)


@pytest.mark.parametrize(
    ("start", "is_needed"),
    [
        ("while [[ $# -gt 0 ]]; do case $1 in --model) MODEL=$2; shift 2;; *) break;; esac; done\n", False),
        ('if [ "$#" -ge 1 ]; then MODEL=$1; fi\n', False),
        ("MODEL=$1\n", True),
    ],
)
def test_arguments_that_a_script_reads_only_if_there_are_any_are_no_cause(
    start: str, is_needed: bool, tmp_path: Path
) -> None:
    """``Causes first`` names what keeps a job from starting; such a script starts without arguments."""
    text = f"MODEL=Qwen/Qwen2.5-0.5B\n{start}" + VERL.format(f"{ROWS} actor_rollout_ref.model.path=$MODEL")
    job = _read(tmp_path / "run.sh", text)
    assert any("is started with values" in one for one in job.causes) is is_needed
    assert is_needed or any("cannot decide whether the script gives MODEL this value" in one for one in job.warnings)


@pytest.mark.parametrize("start", ["[ -f {0} ] && source {0}\n", "if [[ -r {0} ]]; then . {0}; fi\n", "source {0}\n"])
def test_a_file_that_is_sourced_only_where_it_is_there_is_no_cause(start: str, tmp_path: Path) -> None:
    text = start.format("./secrets.env") + VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    job = _read(tmp_path / "run.sh", text)
    is_cause = start.startswith("source")
    assert any("secrets.env does not exist" in one for one in job.causes) is is_cause
    assert any("sources secrets.env where it is there" in one for one in job.warnings) is not is_cause


@pytest.mark.parametrize(
    ("test", "is_cause"),
    [
        ('[[ -n "${SECRETS:-}" && -f "$SECRETS" ]] || true', False),
        ('[[ -z "${SECRETS:-}" || -f "$SECRETS" ]] || true', False),
        ('[[ -z "${SECRETS:-}" && -f "$SECRETS" ]] || true', True),
        ('[[ -f /etc/x && -f "$SECRETS" ]] || true', False),
        ('[[ -f "$SECRETS" ]] || true', True),
    ],
)
def test_after_set_u_a_script_stops_only_at_what_a_condition_expands(test: str, is_cause: bool, tmp_path: Path) -> None:
    """Bash expands the right side of ``&&`` and ``||`` between ``[[ ]]`` only where the left one is not enough."""
    text = f"set -u\n{test}\n" + VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B")
    causes = _read(tmp_path / "run.sh", text).causes
    assert any("unless SECRETS is set" in one for one in causes) is is_cause


@pytest.mark.parametrize(
    ("launcher", "flags", "is_definite"),
    [
        ("torchrun --nproc_per_node 2", "", True),
        ("mpirun --display-allocation --npernode 2 python", "--tokenizer-type NullTokenizer", True),
        ("mpirun -np 2 python", "--use-mpi", False),
        ("torchrun --nproc_per_node 2", "--use-z-loss --wandb-name x", False),
    ],
)
def test_a_rule_of_megatron_lm_is_no_definite_refusal_of_a_fork_with_flags_of_its_own(
    launcher: str, flags: str, is_definite: bool, tmp_path: Path
) -> None:
    """``parse_args`` of Megatron-LM stops at a flag that it does not have, so such a job is not of it."""
    text = (
        f"export NVTE_FUSED_ATTN=0\n{launcher} pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --vocab-size 512 --bf16 "
        f"--tensor-model-parallel-size 1 {flags}\n"
    )
    job = _read(tmp_path / "run.sh", text)
    assert (job.cannot_start is not None) is is_definite
    assert is_definite or "flags of its own such as --use-" in str(job.not_supported)


def test_a_file_s_recipe_of_megatron_bridge_is_below_its_values(tmp_path: Path) -> None:
    """As NVIDIA's Nemotron names it (e27b3713): ``recipe: {_target_: a function}``, and the file overrides that."""
    target = "megatron.bridge.recipes.qwen.qwen3_600m_sft_config"
    text = f"recipe: {{_target_: {target}}}\nmodel: {{num_layers: 4}}\ntrain: {{micro_batch_size: 2}}\nddp: {{}}\n"
    job = _read(tmp_path / "own.yaml", text)
    values = {one.key: one.value for one in job.taken}
    assert (values["model.num_layers"], values["train.micro_batch_size"]) == (4, 2)
    assert values["recipe"] == "qwen3_600m_sft_config"
    assert any("memlab has its values of Megatron-Bridge" in one for one in job.warnings)
    other = _read(tmp_path / "other.yaml", text.replace("qwen3_600m_sft_config", "mine_config"))
    assert any("memlab does not know the recipe" in one for one in other.warnings)


@pytest.mark.parametrize("folder", ["/home/somebody/a/scripts/config", "<your_path>/scripts/config", "/scripts/config"])
def test_a_configuration_of_another_machine_s_folder_is_found_by_its_end(folder: str, tmp_path: Path) -> None:
    (tmp_path / "scripts" / "config").mkdir(parents=True)
    (tmp_path / "scripts" / "config" / "mine.yaml").write_text(
        "data: {max_prompt_length: 100, max_response_length: 28}\n"
    )
    (tmp_path / "mine.yaml").write_text("data: {max_prompt_length: 7}\n")
    start = f'--config-path="{folder}" --config-name=mine.yaml {ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B'
    job = _read(tmp_path / "scripts" / "run.sh", VERL.format(start))
    assert job.required()[0].seq_length == 256
    assert not any("is not beside the script" in one for one in job.warnings)


def test_the_configuration_beside_a_program_of_one_s_own_is_read_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "tool" / "trainer" / "config").mkdir(parents=True)
    (tmp_path / "tool" / "trainer" / "main_ppo.py").write_text(DECORATOR)
    (tmp_path / "tool" / "trainer" / "config" / "ppo_trainer.yaml").write_text(DEFAULTS)
    job = _read(tmp_path / "run.sh", VERL.replace("verl.trainer", "tool.trainer").format(ROWS))
    assert {one.key: one.value for one in job.taken}["trainer.n_gpus_per_node"] == 4


@pytest.mark.parametrize(
    ("program", "file", "is_read"),
    [
        ("boot.py ${ENTRY:-run_mine.py}", "exp/config.yaml", True),
        ("mine.py", "exp/config.yaml", True),
        ("eval_mine.py", "exp/config.yaml", False),
        ("mine.py", "exp/other.yaml", False),
        ("mine.py", "missing.yaml", False),
    ],
)
def test_a_program_of_one_s_own_with_a_configuration_of_a_framework_is_its_job(
    program: str, file: str, is_read: bool, tmp_path: Path
) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "config.yaml").write_text(NEMO.format("megatron_cfg: {enabled: true}"))
    (tmp_path / "exp" / "other.yaml").write_text("seed: 1\n")
    (tmp_path / "run.sh").write_text(f"uv run python {program} --config {file} policy.train_micro_batch_size=4\n")
    if not is_read:
        with pytest.raises(ValueError, match="is of no format that memlab reads"):
            Job.read(tmp_path / "run.sh")
        return
    job = Job.read(tmp_path / "run.sh")
    assert job.framework.startswith("nemo-rl")
    assert {one.key: one.value for one in job.taken}["policy.train_micro_batch_size"] == 4
    assert any("takes it for a training by NeMo-RL's own program" in one for one in job.warnings)


def test_flags_of_a_program_with_a_configuration_are_overrides_or_named(tmp_path: Path) -> None:
    """Automodel's ``parse_cli_argv`` reads ``--key value``; what another program's flags set is not known."""
    (tmp_path / "config.yaml").write_text(
        "step_scheduler: {global_batch_size: 64, local_batch_size: 8}\ndistributed: {strategy: fsdp2, tp_size: 1}\n"
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: Qwen/Qwen2.5-0.5B\n"
    )
    flags = "--distributed.tp_size 2 --step_scheduler.global_batch_size=8 --distributed.activation_checkpointing"
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node=8 mine.py --config config.yaml {flags}\n")
    job = Job.read(tmp_path / "run.sh")
    values = {one.key: one.value for one in job.taken}
    assert values["distributed.tp_size"] == 2
    assert values["step_scheduler.global_batch_size"] == 8
    assert values["distributed.activation_checkpointing"] is True
    assert values["step_scheduler.local_batch_size"] == 8, "of the file"
    (tmp_path / "config.yaml").write_text(NEMO.format("megatron_cfg: {enabled: true}"))
    (tmp_path / "run.sh").write_text("python mine.py --config config.yaml --micro-batch 4\n")
    assert any("does not see what --micro" in one for one in Job.read(tmp_path / "run.sh").warnings)


def test_a_script_that_ends_before_it_starts_another_one_says_so_first(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))
    job = _read(tmp_path / "run.sh", "echo superseded\nexit 3\nbash job.sh\n")
    assert job.causes[0].startswith("line 2: the script ends here in any case (exit 3)")


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("models/qwen2.5_0.5b/global_step_29/huggingface", "qwen2.5-0.5b"),
        ("/ckpt/Qwen3-4B-Base/checkpoint-100/", "qwen3-4b"),
        ("/ckpt/Qwen3-4B/actor", "qwen3-4b"),
        ("/ckpt/sft/global_step_29/huggingface", None),
        ("/ckpt/Qwen3-4B/my-own-model", None),
    ],
)
def test_a_checkpoint_below_a_folder_with_a_models_name_is_that_model_and_said(
    path: str, model: str | None, tmp_path: Path
) -> None:
    text = VERL.format(f"{ROWS} actor_rollout_ref.model.path={path}")
    job = _read(tmp_path / "run.sh", text)
    assert (None if job.scenario is None else job.scenario.architecture.name) == model
    assert any("memlab takes" in one and "give --architecture for another" in one for one in job.warnings) is bool(
        model
    )


@pytest.mark.parametrize(
    ("file", "words", "beside", "said"),
    [
        ("run_llama3.2-3b-it.sh", "", "", "llama-3.2-3b"),
        ("run.sh", "trainer.experiment_name=grpo_Qwen3-4B_lr1e-6", "", "qwen3-4b"),
        ("run.sh", "", "OUT=./save/sft/\nMODEL_PATH=Qwen/Qwen2.5-3B\n", "qwen2.5-3b"),
        ("run.sh", "", "OUT=./save/sft_other/\nMODEL_PATH=Qwen/Qwen2.5-3B\n", None),
        ("run.sh", "trainer.experiment_name=qwen3-4bit", "", None),
    ],
)
def test_a_job_with_a_model_of_no_name_asks_with_what_the_names_around_it_say(
    file: str, words: str, beside: str, said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "sft.sh").write_text(beside)
    job = _read(tmp_path / file, VERL.format(f"{ROWS} {words} actor_rollout_ref.model.path=./save/sft/step_5/actor"))
    why = job.not_supported or ""
    assert "a name that memlab does not know" in why
    assert why.partition("(the job's names say ")[2].partition(")")[0] == (said or "")


def test_scripts_beside_a_job_are_read_only_for_a_model_of_no_name_and_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft.sh").write_text("OUT=./save/sft/\nMODEL_PATH=Qwen/Qwen2.5-3B\n")
    tried: list[Path] = []
    own = Path.read_text

    def read_text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        if path.name == "sft.sh":
            tried.append(path)
            raise PermissionError(path)
        return own(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text)
    for model, is_known in (("Qwen/Qwen2.5-3B", True), ("./save/sft/step_5/actor", False)):
        job = _read(tmp_path / "run.sh", VERL.format(f"{ROWS} actor_rollout_ref.model.path={model}"))
        assert (job.scenario is not None) is is_known
        assert bool(tried) is not is_known


def test_flags_of_what_launches_megatron_are_no_keys_of_a_job(tmp_path: Path) -> None:
    sizes = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64 --micro-batch-size 1"
    )
    text = f"srun -l --container-image $IMAGE --mpi pmix python -u pretrain_gpt.py {sizes} --an-own-flag 3\n"
    assert _named(_read(tmp_path / "run.sh", text)) == {"an_own_flag"}


@pytest.mark.parametrize("section", ["trainer", "trainer.policy"])
def test_liger_of_a_fork_of_skyrl_keeps_less_of_its_policy(section: str, tmp_path: Path) -> None:
    text = (
        "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-4B trainer.strategy=fsdp2 "
        f"trainer.placement.policy_num_gpus_per_node=8 {section}.use_liger_kernel=true trainer.ref.use_liger_kernel=true\n"
    )
    found = {one.key: one for one in _read(tmp_path / "run.sh", text).not_modelled if "liger" in one.key}
    assert {key: one.effect for key, one in found.items()} == {f"{section}.use_liger_kernel": "less"}


def test_a_configuration_in_the_container_of_nemo_rl_has_what_its_repository_has(tmp_path: Path) -> None:
    start = "uv run python examples/run_grpo.py --config examples/configs/grpo_math_8B.yaml cluster.num_nodes=2\n"
    job = _read(tmp_path / "run.sh", start)
    values = {one.key: one.value for one in job.taken}
    assert values["policy.model_name"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert job.scenario is not None
    assert (job.scenario.seq_length, job.scenario.layout.world_size) == (4096, 16)
    assert any("takes what it has in NeMo-RL's" in one and "grpo_math_8B.yaml" in one for one in job.warnings)

    base = "/opt/nemo-rl/examples/configs/grpo_math_70B_megatron.yaml"
    own = f"defaults: {base}\ncluster: {{num_nodes: 4}}\npolicy: {{precision: bfloat16}}\n"
    job = _read(tmp_path / "own.yaml", own)
    assert job.scenario is not None
    assert job.scenario.layout.pipeline_model_parallel_size == 4
    assert job.scenario.layout.world_size == 32
    assert any("takes what it has in NeMo-RL's" in one for one in job.warnings)

    # A file of the user's own is taken as it is, whatever its name.
    (tmp_path / "examples" / "configs").mkdir(parents=True)
    (tmp_path / "examples" / "configs" / "grpo_math_8B.yaml").write_text(
        "policy: {model_name: Qwen/Qwen3-4B}\ngrpo: {}\n"
    )
    job = _read(tmp_path / "run.sh", start)
    assert job.scenario is not None
    assert (job.scenario.architecture.name, job.scenario.layout.world_size) == ("qwen3-4b", 2)


@pytest.mark.parametrize("start", ['"<your_path>"/mine_of_verl', "$(pwd)/mine_of_verl", "/home/a/b/mine_of_verl"])
def test_a_checkout_in_the_path_of_modules_has_the_version(start: str, tmp_path: Path) -> None:
    _checkout(tmp_path / "mine_of_verl", "0.3.1.dev")
    (tmp_path / "requirements.txt").write_text("verl==0.4.0\n")
    (tmp_path / "scripts").mkdir()
    job = _read(tmp_path / "scripts" / "run.sh", f"export PYTHONPATH={start}:$PYTHONPATH\n" + VERL.format(ROWS))
    assert any("says verl 0.3.1.dev" in one for one in job.warnings)


def test_a_variable_that_only_the_starting_script_reads_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B $@"))
    (tmp_path / "run.sh").write_text("set -u\nbash job.sh data.max_prompt_length=$TOKENS\n")
    assert any("unless TOKENS is set" in one for one in Job.read(tmp_path / "run.sh").causes)
    job = Job.read(tmp_path / "run.sh", overrides=["TOKENS=100"])
    assert not job.causes
    assert {one.key: one.value for one in job.taken}["data.max_prompt_length"] == 100
    with pytest.raises(ValueError, match="--set has the key 'TOKEN'"):
        Job.read(tmp_path / "run.sh", overrides=["TOKEN=100"])


@pytest.mark.parametrize("number", [1, 2])
def test_the_only_configuration_of_a_name_is_that_of_a_program_that_calculates_its_folder(
    number: int, tmp_path: Path
) -> None:
    source = tmp_path / "mine" / "trainers" / "main.py"
    source.parent.mkdir(parents=True)
    for folder in (source.parent, source.parent.parent):
        (folder / "__init__.py").write_text("")
    source.write_text(
        '@hydra.main(config_path=str(ROOT), config_name="own", version_base=None)\ndef main(config): ...\n'
    )
    for folder in ("a", "b")[:number]:
        (tmp_path / "configs" / folder).mkdir(parents=True)
        (tmp_path / "configs" / folder / "own.yaml").write_text(DEFAULTS)
    job = _read(tmp_path / "run.sh", f"python3 -m mine.trainers.main actor_rollout_ref.rollout.name=vllm {ROWS}\n")
    assert {one.key: one.value for one in job.taken}["trainer.n_gpus_per_node"] == (4 if number == 1 else 8)
    assert any("may have a configuration of its own" in one for one in job.warnings) is (number == 2)


@pytest.mark.parametrize(("tokens", "is_said"), [(64, False), (100, False), (300, True)])
def test_prompts_of_the_rollout_that_are_longer_than_the_datas_are_said(
    tokens: int, is_said: bool, tmp_path: Path
) -> None:
    words = (
        f"{ROWS} data.max_prompt_length=100 data.max_response_length=28 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    )
    job = _read(tmp_path / "run.sh", VERL.format(f"{words} actor_rollout_ref.rollout.prompt_length={tokens}"))
    assert any(f"prompt_length is {tokens}, and data.max_prompt_length 100" in one for one in job.warnings) is is_said


@pytest.mark.parametrize("number", [1, 2])
def test_a_named_configuration_of_a_program_that_is_not_there_is_the_only_one_of_its_repository(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    for folder in ("a", "b")[:number]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.yaml").write_text(DEFAULTS)
    (tmp_path / "scripts").mkdir()
    text = f"python3 -m recipe.mine.main --config-name=own actor_rollout_ref.rollout.name=vllm {ROWS}\n"
    job = _read(tmp_path / "scripts" / "run.sh", text)
    assert {one.key: one.value for one in job.taken}["trainer.n_gpus_per_node"] == (4 if number == 1 else 8)
    assert any("the configuration 'own' is not beside" in one for one in job.warnings) is (number == 2)
    assert any("own.yaml, the only file of that name" in one for one in job.warnings) is (number == 1)


def test_a_report_names_what_memlab_does_not_know_once_and_the_keys_of_configurations_by_section(
    tmp_path: Path,
) -> None:
    many = "".join(f"  key{number}: 1\n" for number in range(9))
    (tmp_path / "verl_own.yaml").write_text(f"{DEFAULTS}own_section:\n{many}")
    start = f"python3 -m mine.main --config-path=. --config-name=verl_own {ROWS} own_section.key0=2 another.key=1"
    file = tmp_path / "run.sh"
    job = _read(file, f"{start} actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=x/own\n")
    text = job_table(job, of_any_model(job, lambda model: Job.read(file, architecture=model)))
    assert "of any model" in text
    assert text.count("another.key") == 1
    assert text.count("own_section.key0") == 1
    assert "8 of own_section, such as own_section.key1" in text
    for warning in job.warnings:
        assert text.count(warning) == 1


def test_one_head_of_keys_and_values_of_a_fork_is_said(tmp_path: Path) -> None:
    sizes = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64 --micro-batch-size 1"
    )
    for kind, effects in (("multiquery", ["less"]), ("multihead", [])):
        job = _read(tmp_path / "run.sh", f"python pretrain_gpt.py {sizes} --attention-head-type {kind}\n")
        assert [one.effect for one in job.not_modelled if one.key == "attention_head_type"] == effects


@pytest.mark.parametrize(
    ("release", "trainer", "is_refused"),
    [
        ("0.1", "def fit(self): ...\n", False),
        (
            "0.2.0.dev",
            "assert config.data.train_batch_size >= config.actor_rollout_ref.actor.ppo_mini_batch_size\n",
            True,
        ),
        ("0.2.0.dev", "", True),
        ("0.7.1", "def fit(self): ...\n", True),
    ],
)
def test_a_mini_batch_of_more_prompts_than_a_step_has_is_refused_by_a_verl_that_checks_it(
    release: str, trainer: str, is_refused: bool, tmp_path: Path
) -> None:
    """Where it does not, ``batch.split`` gives one mini-batch of all sequences, of which micro-batches are parts."""
    folder = _checkout(tmp_path, release)
    if trainer:
        (tmp_path / "verl" / "trainer" / "ppo").mkdir()
        (tmp_path / "verl" / "trainer" / "ppo" / "ray_trainer.py").write_text(trainer)
    rows = "actor_rollout_ref.rollout.log_prob_micro_batch_size=640 actor_rollout_ref.actor.ppo_micro_batch_size=256"
    words = (
        f"{rows} data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=8"
    )
    job = _read(folder / "run.sh", VERL.format(words))
    assert (job.cannot_start is not None and "more than the 16 prompts" in job.cannot_start) is is_refused
    if not is_refused:
        assert job.scenario is not None
        assert job.rollout is not None
        assert (job.scenario.packed_sequences, job.scenario.num_microbatches) == (32, 1)
        assert job.rollout.seq_length == 32 * 128
        assert any("updates once with all 16" in one for one in job.warnings)


def test_a_program_of_nemo_rl_without_a_configuration_reads_that_of_its_repository(tmp_path: Path) -> None:
    job = _read(tmp_path / "run.sh", "uv run examples/run_grpo_math.py cluster.gpus_per_node=8\n")
    assert job.scenario is not None
    assert (job.scenario.architecture.name, job.scenario.layout.world_size) == ("qwen2.5-1.5b", 8)
    assert any("takes what it has in NeMo-RL's repository" in one for one in job.warnings)
    assert published_architecture("Qwen/Qwen2.5-7B-Instruct-1M") == ARCHITECTURES["qwen2.5-7b"]


def test_what_cannot_change_the_memory_is_not_asked_for_and_not_warned_of(tmp_path: Path) -> None:
    lines = VERL.format(f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B").strip()
    policy = "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.offload_policy"
    for switch in (True, False):
        job = _read(tmp_path / "run.sh", f"{lines} {policy}={switch}\n")
        assert any("param_offload is off" in one for one in job.warnings) is not switch
    job = _read(tmp_path / "run.sh", f"ray job submit --runtime-env env.yaml -- {lines}\n")
    assert any("for Ray 'env.yaml' is not" in one for one in job.warnings)
    job = _read(tmp_path / "run.sh", f"{{ {lines}; }}\n")
    assert job.framework == "verl-fsdp"
    job = _read(tmp_path / "run.sh", lines.replace("Qwen/Qwen2.5-0.5B", "a-model-of-mine") + "\n")
    with pytest.raises(ValueError, match="a-model-of-mine") as caught:
        job.required()
    assert "phi-4" not in str(caught.value)


@pytest.mark.parametrize(("flag", "is_cause"), [("--master-addr $1", False), ("--master-addr=$1", False), ("$1", True)])
def test_an_argument_that_says_where_ranks_meet_is_no_cause(flag: str, is_cause: bool, tmp_path: Path) -> None:
    job = _read(tmp_path / "run.sh", f"torchrun {flag} pretrain_gpt.py --num-layers 2\n")
    assert any("started with values" in one for one in job.causes) is is_cause


TRAIN = """\
export GPUS=${GPUS:-2}
BATCH=${BATCH:-8}
RESPONSES=4
python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B trainer.n_gpus_per_node=$GPUS \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$BATCH actor_rollout_ref.rollout.n=$RESPONSES
"""


def test_a_script_that_another_one_starts_has_what_that_one_exports_and_may_change_it(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(TRAIN)
    start = "export GPUS=4\nexport RESPONSES=16\nBATCH=2\n"
    for line in ("bash train.sh", "exec bash train.sh", "./train.sh"):
        job = _read(tmp_path / "run.sh", f"{start}{line}\n")
        values = {one.key: one.value for one in job.taken}
        assert values["trainer.n_gpus_per_node"] == 4
        # What is not exported does not reach the other script, which sets what it likes.
        assert values["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == 8
        assert values["actor_rollout_ref.rollout.n"] == 4


def test_a_search_in_a_file_is_no_job_and_decides(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(TRAIN)
    search = "grep -q 'actor_rollout_ref.rollout.n={}' train.sh"
    job = _read(tmp_path / "run.sh", f"if ! {search.format('$RESPONSES')}; then exit 1; fi\nbash train.sh\n")
    assert [one.value for one in job.taken if one.key == "trainer.n_gpus_per_node"] == [2]
    assert not any("cannot decide" in one or "would stop" in one for one in job.warnings)
    for pattern, ranks in (("$RESPONSES", 4), ("none of it", 2)):
        choice = f"if {search.format(pattern)}; then export GPUS=4; fi\nbash train.sh\n"
        job = _read(tmp_path / "run.sh", choice)
        assert [one.value for one in job.taken if one.key == "trainer.n_gpus_per_node"] == [ranks]


def test_a_job_whose_keys_are_all_in_its_configuration_is_found(tmp_path: Path) -> None:
    folder = _checkout(tmp_path, "0.5.0.dev")
    (folder / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\nhydra: {{searchpath: [../verl]}}\n{DEFAULTS}")
    job = _read(folder / "run.sh", "python3 -m verl.trainer.main_ppo --config-path=mine --config-name=mine\n")
    assert job.framework == "verl-fsdp"
    assert not job.causes


def test_words_behind_a_comment_in_a_continued_command_are_named_and_read(tmp_path: Path) -> None:
    job = _read(
        tmp_path / "run.sh",
        "ray job submit --address a \\\n  # -- python3 old.py \\\n  -- " + TRAIN[TRAIN.index("python3") :],
    )
    assert any("'--' is an argument without a command, since line 2 is a comment" in one for one in job.causes)
    assert any(one.key == "actor_rollout_ref.model.path" for one in job.taken)


@pytest.mark.parametrize(("agents", "count"), [(1, 1), (5, 4)])
def test_the_turns_of_search_r1_repeat_the_prompts_of_a_step(agents: int, count: int, tmp_path: Path) -> None:
    """64 prompts x 5 on 4 ranks, mini-batches of 256 sequences in micro-batches of 64: four of them on each rank."""
    keys = (
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B data.train_batch_size=64 actor_rollout_ref.rollout.n=1 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=64 "
        f"actor_rollout_ref.model.use_remove_padding=true +actor_rollout_ref.rollout.n_agent={agents}"
    )
    folder = _checkout(tmp_path, "0.1")
    (tmp_path / "verl" / "trainer" / "ppo").mkdir()
    (tmp_path / "verl" / "trainer" / "ppo" / "ray_trainer.py").write_text("")
    job = _read(folder / "run.sh", VERL.format(keys))
    assert job.required()[0].num_microbatches == count
    assert any("updates once with all" in one for one in job.warnings) is (agents == 1)


@pytest.mark.parametrize(("release", "is_on"), [("0.1", False), ("0.5.0.dev", True), ("0.5.0", False)])
def test_a_checkout_that_never_switches_expandable_segments_on_leaves_them_off(
    release: str, is_on: bool, tmp_path: Path
) -> None:
    folder = _checkout(tmp_path, release)
    if is_on:
        (tmp_path / "verl" / "utils").mkdir()
        (tmp_path / "verl" / "utils" / "device.py").write_text("def set_expandable_segments(enable): ...\n")
    keys = f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    job = _read(folder / "run.sh", VERL.format(keys))
    assert job.required()[0].allocator.expandable_segments is is_on
    job = _read(folder / "run.sh", f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{VERL.format(keys)}")
    assert job.required()[0].allocator.expandable_segments


def test_a_checkpoint_names_the_model_of_a_configuration_without_one(tmp_path: Path) -> None:
    text = "model: {{tensor_model_parallel_size: 1{}}}\ntrain: {{micro_batch_size: 1, global_batch_size: 4}}\n"
    start = "checkpoint: {pretrained_checkpoint: /c/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16}\n"
    job = _read(tmp_path / "job.yaml", text.format("") + start)
    assert job.required()[0].architecture.name == "nemotron-3-nano-30b"
    assert any("as the checkpoint is called from which it starts" in one for one in job.warnings)
    # A job that gives a size is another model.
    job = _read(tmp_path / "job.yaml", text.format(", num_layers: 4") + start)
    assert not any("as the checkpoint is called" in one for one in job.warnings)


def test_a_reward_model_is_without_effect_or_trained_or_only_an_engine(tmp_path: Path) -> None:
    keys = f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
    for own, is_trained in (("", False), ("reward_model.enable=true", True)):
        text = VERL.format(f"{keys} {own} reward_model.model.optim.lr=1 reward_model.own=2")
        job = _read(tmp_path / "run.sh", text)
        assert any("a reward model is trained" in one.reason for one in job.not_modelled) is is_trained
        assert ("reward_model.own" in job.without_effect) is not is_trained


def test_a_trainer_of_verl_that_memlab_does_not_know_is_named_and_not_refused(tmp_path: Path) -> None:
    keys = (
        f"{ROWS} actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B data.train_batch_size=32 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=128"
    )
    job = _read(
        tmp_path / "run.sh", VERL.format(keys).replace("verl.trainer.main_ppo", "verl.experimental.vla.main_sac")
    )
    assert any("is a trainer of verl's that memlab does not know" in one for one in job.warnings)
    job.required()


def test_a_program_of_nemo_rl_that_is_started_as_a_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "policy: {max_total_sequence_length: 640, dtensor_cfg: {enabled: true}}\ncluster: {gpus_per_node: 2}\n"
    )
    values = []
    for program in ("-m examples.run_grpo", "examples/run_grpo.py"):
        job = _read(tmp_path / "run.sh", f"python {program} --config job.yaml grpo.num_prompts_per_step=3\n")
        values.append({one.key: one.value for one in job.taken})
    assert values[0] == values[1]
    assert values[0]["policy.max_total_sequence_length"] == 640


def test_a_configuration_in_a_folder_of_another_machine_is_the_one_whose_path_ends_alike(tmp_path: Path) -> None:
    (tmp_path / "examples" / "configs").mkdir(parents=True)
    (tmp_path / "examples" / "configs" / "mine.yaml").write_text("policy: {max_total_sequence_length: 640}\n")
    for name, is_found in (("/no/such/examples/configs/mine.yaml", True), ("/no/such/mine.yaml", False)):
        text = f"python examples/run_grpo.py --config {name} cluster.gpus_per_node=2\n"
        job = _read(tmp_path / "run.sh", text)
        assert any(one.value == 640 for one in job.taken) is is_found
        assert any("has the folder of another machine" in one for one in job.warnings) is is_found


def test_padded_rows_are_named_once(tmp_path: Path) -> None:
    """With a budget of tokens, where the key and the budget each have a reason."""
    keys = (
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B model_engine=megatron "
        "actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.model.use_remove_padding=false"
    )
    job = _read(tmp_path / "run.sh", VERL.format(keys))
    assert sum("rows are padded" in one.reason for one in job.not_modelled) == 1


_GROUPS = {
    "ppo_trainer.yaml": "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
    "  - _self_\ntrainer: {n_gpus_per_node: 8}\n",
    "own.yaml": "defaults:\n  - ppo_trainer\n  - override model_engine: megatron\n  - _self_\n",
    "slash.yaml": "defaults:\n  - ppo_trainer\n  - override /model_engine: megatron\n  - _self_\n",
    "model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp\n",
    "model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron\n",
    "actor/dp_actor.yaml": "strategy: fsdp\nppo_micro_batch_size_per_gpu: 1\nfsdp_config: {param_offload: true}\n",
    "actor/megatron_actor.yaml": "strategy: megatron\nppo_micro_batch_size_per_gpu: 2\n"
    "megatron: {tensor_model_parallel_size: 2, override_ddp_config: {grad_reduce_in_fp32: true}}\n",
}


@pytest.mark.parametrize(
    ("name", "overrides", "engine", "rows"),
    [
        ("ppo_trainer", "", "fsdp2", 1),
        ("ppo_trainer", "model_engine=megatron", "megatron", 2),
        ("own", "", "megatron", 2),
        ("slash", "", "megatron", 2),
        ("own", "model_engine=dp", "fsdp2", 1),
        ("ppo_trainer", "actor@actor_rollout_ref.actor=megatron_actor model_engine=megatron", "megatron", 2),
    ],
)
def test_one_group_of_a_configuration_names_the_option_of_another(
    name: str, overrides: str, engine: str, rows: int, tmp_path: Path
) -> None:
    """As verl's ppo_trainer.yaml since 0.7; a command's choice counts over a file's, and that over another file's."""
    for file, text in _GROUPS.items():
        (tmp_path / "config" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "config" / file).write_text(text)
    (tmp_path / "train.py").write_text(DECORATOR.replace("ppo_trainer", name))
    command = f"python train.py {overrides} actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo"
    job = _read(tmp_path / "run.sh", f"{command} actor_rollout_ref.actor.ppo_mini_batch_size=16\n")
    values = {one.key: one.value for one in job.taken}
    assert values["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == rows
    assert values.get("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 1) == rows
    assert (job.scenario is None or job.scenario.engine == engine) and not [
        one for one in job.warnings if "not beside the file" in one
    ]


@pytest.mark.parametrize(("overrides", "length"), [("", 640), ("data=b-long", 1024), ("data=null", 512)])
def test_groups_of_one_name_in_two_files_have_their_own_options(overrides: str, length: int, tmp_path: Path) -> None:
    """Hydra tells groups by their folder and by the mapping that gets their keys; an option may have a hyphen, or be null."""
    nested = "defaults:\n  - ../sizes@megatron: {}\n  - _self_\nstrategy: megatron\nppo_micro_batch_size_per_gpu: 1\n"
    for file, text in {
        "ppo_trainer.yaml": "defaults:\n  - critic@critic: c\n  - actor@actor_rollout_ref.actor: a\n  - data: a\n"
        "  - _self_\ntrainer: {n_gpus_per_node: 8}\n",
        "critic/c.yaml": nested.format("large"),
        "actor/a.yaml": nested.format("small"),
        "sizes/large.yaml": "tensor_model_parallel_size: 4\n",
        "sizes/small.yaml": "tensor_model_parallel_size: 2\n",
        "data/a.yaml": "max_prompt_length: 640\n",
        "data/b-long.yaml": "max_prompt_length: 1024\n",
    }.items():
        (tmp_path / "config" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "config" / file).write_text(text)
    (tmp_path / "train.py").write_text(DECORATOR)
    command = f"python train.py {overrides} actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo"
    job = _read(tmp_path / "run.sh", f"{command} actor_rollout_ref.actor.ppo_mini_batch_size=16\n")
    values = {one.key: one.value for one in job.taken}
    assert values["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == 2
    assert values["data.max_prompt_length"] == length
    assert not [one for one in job.warnings if "not beside the file" in one]
