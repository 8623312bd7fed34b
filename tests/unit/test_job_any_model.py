"""What a job's file says is read beside a model that memlab does not have, where no model can change it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memlab.cli import main
from memlab.config.architectures import Architecture
from memlab.jobs.any_model import OfAnyModel, of_any_model
from memlab.jobs.job import Job

SWIFT = """
NPROC_PER_NODE=16 megatron sft --model {model} --tuner_type lora --lora_rank 16 --max_length 2048 \\
    --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 {more} --sequence_parallel true \\
    --micro_batch_size 2 --global_batch_size 32 --recompute_granularity full --recompute_method uniform \\
    --recompute_num_layers 1 --gradient_accumulation_fusion false
"""
NEMO_RL = """
policy:
  model_name: {model}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  logprob_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  sequence_packing: {{enabled: false}}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 3
    num_layers_in_first_pipeline_stage: 6
    sequence_parallel: true
    bias_activation_fusion: false
    optimizer: {{use_precision_aware_optimizer: true}}
    distributed_data_parallel_config: {{grad_reduce_in_fp32: false}}
  generation:
    backend: vllm
    vllm_cfg: {{tensor_parallel_size: 4, gpu_memory_utilization: 0.7}}
    colocated: {{enabled: true}}
cluster: {{num_nodes: 3, gpus_per_node: 4}}
grpo: {{num_prompts_per_step: 8, num_generations_per_prompt: 8}}
"""
AUTOMODEL_STAGES = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 4}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: someone/another-model
dataset: {seq_length: 1024}
distributed:
  strategy: fsdp2
  pp_size: 2
  pipeline: {pp_schedule: interleaved1f1b, layers_per_stage: 2, round_virtual_stages_to_pp_multiple: up}
"""


def _common(path: Path, *, version: str | None = None) -> OfAnyModel | None:
    return of_any_model(
        Job.read(path, version=version), lambda model: Job.read(path, architecture=model, version=version)
    )


@pytest.mark.parametrize(
    ("name", "text", "dense", "with_experts"),
    [
        ("run.sh", SWIFT.replace("{more}", ""), "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
        ("job.yaml", NEMO_RL, "meta-llama/Llama-3.1-70B", "openai/gpt-oss-20b"),
    ],
)
def test_what_holds_for_any_model_holds_for_models_that_were_not_asked(
    name: str, text: str, dense: str, with_experts: str, tmp_path: Path
) -> None:
    (path := tmp_path / name).write_text(text.format(model="someone/New-Model-9B"))
    common = _common(path)
    assert common is not None and len(common.models) == 4
    for model in (dense, with_experts):
        (path := tmp_path / f"{model.rpartition('/')[2]}-{name}").write_text(text.format(model=model))
        scenario, settings = (job := Job.read(path)).required()
        told = scenario.to_dict() | {"workload": scenario.to_dict(), "settings": settings.to_dict()}
        told |= {"state": scenario.state.options(), "rollout": job.rollout.to_dict() if job.rollout else {}}
        for part, fields in common.values.items():
            own = {field: told[part][field] for field in fields if model == with_experts or "moe_" not in field}
            assert own.items() <= fields.items()
    assert common.values["layout"]["pipeline_model_parallel_size"] == (3 if name == "job.yaml" else 2)
    assert common.values["workload"]["num_microbatches"] == (16 if name == "job.yaml" else 4)
    assert common.values["state"]["grad_reduce_in_bf16"] == (name == "job.yaml")


def test_a_field_that_depends_on_the_model_is_named_and_has_no_value(tmp_path: Path) -> None:
    # memlab does not have adapters of shared experts beside their overlap.
    experts = "--expert_model_parallel_size 4 --moe_shared_expert_overlap true --target_modules linear_qkv linear_proj"
    (path := tmp_path / "run.sh").write_text(SWIFT.format(model="x/New", more=experts))
    common = _common(path)
    assert common is not None and common.values["layout"]["expert_model_parallel_size"] == 4
    assert common.values["state"]["lora_rank"] == 16
    assert common.values["state"]["moe_shared_expert_overlap"]  # one of the models has no shared experts
    path.write_text(path.read_text().replace("--max_length 2048", ""))
    common = _common(path)
    assert common is not None and "seq_length" in common.depends_on_model
    assert "seq_length" not in common.values["workload"]


@pytest.mark.parametrize(("more", "is_told"), [("", False), ("--target_modules linear_qkv linear_proj", True)])
def test_all_linears_are_those_of_the_model_itself(more: str, is_told: bool, tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(SWIFT.format(model="x/New", more=more))
    common = _common(path)
    assert common is not None
    assert ("lora_target_modules" in common.values["state"]) is is_told
    assert ("lora_target_modules" in common.depends_on_model) is not is_told


def test_a_backend_that_latent_attention_alone_lacks_is_told_with_a_doubt(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(SWIFT.format(model="x/New", more="--attention_backend flash"))
    common = _common(path)
    assert common is not None and "deepseek-v3" in common.models
    assert common.values["state"]["attention_backend"] == "flash"
    assert any(line.startswith("attention_backend flash: of models with latent attention") for line in common.warnings)
    path.write_text(path.read_text().replace("flash", "auto"))
    common = _common(path)
    assert common is not None and not any("latent attention" in line for line in common.warnings)


def test_what_the_provider_of_one_family_alone_sets_does_not_hold_for_any_model(tmp_path: Path) -> None:
    """Of Megatron-Bridge's families with shared experts, DeepSeek-V3's overlaps them, and Qwen2-MoE's does not."""
    (path := tmp_path / "job.yaml").write_text(
        "model: {hf_model_id: x/New, seq_length: 4096}\ndataset: {seq_length: 4096}\n"
        "train: {micro_batch_size: 1, global_batch_size: 8}\n"
    )

    def read(model: Architecture | str | None = None) -> Job:
        return Job.read(path, format_name="bridge", world_size=8, architecture=model)

    overlaps = [
        read(model).required()[0].state.moe_shared_expert_overlap for model in ("qwen1.5-moe-a2.7b", "deepseek-v3")
    ]
    assert overlaps == [False, True]
    common = of_any_model(read(), read)
    assert common is not None and "moe_shared_expert_overlap" in common.depends_on_model
    assert "moe_shared_expert_overlap" not in common.values["state"]


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("NPROC_PER_NODE=16", "NPROC_PER_NODE=6", "6 ranks"),
        ("pipeline_model_parallel_size 2", "pipeline_model_parallel_size 0", "must have sizes of at least 1"),
        ("pipeline_model_parallel_size 2", "pipeline_model_parallel_size 99999", "must have a multiple of 199998"),
    ],
)
def test_a_layout_that_no_model_can_have_is_refused(before: str, after: str, rule: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(SWIFT.format(model="x/New", more="").replace(before, after))
    common = _common(path)
    assert common is not None and rule in (common.cannot_start or "") and not common.values


def test_a_version_that_every_model_needs_is_asked_for(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=x/New trainer.nnodes=1 "
        "data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8\n"
    )
    common = _common(path)
    assert common is not None and "--framework-version" in common.questions[0] and not common.values
    common = _common(path, version="0.9.1")
    assert common is not None and common.values["workload"]["seq_length"] == 1024


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "run.sh").write_text(SWIFT.format(model="x/New", more=""))
    assert main(["job", str(path)]) == 1
    said = capsys.readouterr().out
    assert "of any model" in said and "tensor_model_parallel_size 2" in said and "recompute_method uniform" in said
    assert main(["job", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["of_any_model"]["layout"]["tensor_model_parallel_size"] == 2
    path.write_text(SWIFT.format(model="Qwen/Qwen3-8B", more=""))
    assert main(["job", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["of_any_model"] is None


def test_a_question_beside_a_model_that_memlab_has_says_nothing_against_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.actor.megatron.dtype=float16 trainer.nnodes=1 trainer.n_gpus_per_node=8\n"
    )
    assert main(["job", str(path)]) == 1
    said = capsys.readouterr().out
    assert "with any model, memlab has to know this too: " in said and "--framework-version" in said


_FP16 = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.nnodes=1 "
    "actor_rollout_ref.actor.megatron.dtype=float16 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8"
)


@pytest.mark.parametrize("version", ["0.9.1", None])
def test_a_job_of_verl_in_fp16_shows_its_fields(
    version: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(_FP16)
    assert main(["job", str(tmp_path / "run.sh"), *([] if version is None else ["--framework-version", version])]) == 1
    text = capsys.readouterr().out
    assert "tensor_model_parallel_size 2" in text.partition("used (")[0] and "fp16" in text


def test_a_job_in_fp16_that_breaks_a_rule_of_its_own_model_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a public job of verl, which leaves the experts' tensor parallel size out."""
    sizes = "tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"
    text = _FP16.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B").replace("tensor_model_parallel_size=2", sizes)
    (tmp_path / "run.sh").write_text(text)
    assert main(["job", str(tmp_path / "run.sh"), "--framework-version", "0.9.1", "--json"]) == 1
    common = json.loads(capsys.readouterr().out)["of_any_model"]
    assert "expert_model_parallel_size 8 x expert_tensor_parallel_size 2 is 16" in common["cannot_start"]


def test_a_rule_that_refuses_any_model_is_told_where_the_engine_lacks_some_of_them(tmp_path: Path) -> None:
    """A public job of verl has four parts of each sequence on two ranks, and a model that FSDP2's engine lacks."""
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=lmsys/gpt-oss-20b-bf16 trainer.nnodes=1 "
        "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 trainer.n_gpus_per_node=2"
    )
    common = _common(tmp_path / "run.sh", version="0.9.1")
    assert common is not None and "the job has 2 ranks, must have a multiple of 4" in str(common.cannot_start)


def test_chunks_of_a_pipeline_depend_on_the_depth_of_a_model_that_memlab_does_not_know(tmp_path: Path) -> None:
    """``calculate_virtual_stages`` in Automodel's pipelining/functional.py (36044ad3) divides the model's layers."""
    (tmp_path / "job.yaml").write_text(AUTOMODEL_STAGES)
    common = _common(tmp_path / "job.yaml")
    assert common is not None
    assert "virtual_pipeline_model_parallel_size" in common.depends_on_model
    assert common.values["layout"]["pipeline_model_parallel_size"] == 2
    assert "virtual_pipeline_model_parallel_size" not in common.values["layout"]


def test_whether_automodel_has_a_class_of_its_own_is_not_known_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(AUTOMODEL_STAGES.split("  pp_size", maxsplit=1)[0])
    common = _common(tmp_path / "job.yaml")
    assert common is not None
    assert "model_classes" in common.depends_on_model
    assert "model_classes" not in common.values["state"]
