"""What verl and SkyRL do with a job beside Megatron's own rules, as their code has it (verl 0.9.1, SkyRL 0.3.0)."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from tests.unit.job_files import read_job

ACTOR = "actor_rollout_ref.actor"
MODEL = f"{ACTOR}.megatron.override_transformer_config"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = "generator.inference_engine"
FP32 = f"{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=True"
VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path={model} " + FP32
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path={model} "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.policy.megatron_config.expert_model_parallel_size=8"
)


def verl(folder: Path, *keys: str, model: str = "Qwen/Qwen3-30B-A3B", version: str | None = None) -> Job:
    return read_job(" ".join((VERL.format(model=model), *keys)), folder, version=version)


def skyrl(folder: Path, *keys: str, model: str = "Qwen/Qwen3-30B-A3B", before: str = "") -> Job:
    return read_job(before + " ".join((SKYRL.format(model=model), *keys)), folder)


@pytest.mark.parametrize("others", [(), ("grad_offload=False",), ("grad_offload=True",), ("offload.grad.target=null",)])
def test_verl_s_gradients_leave_with_the_parameters(others: tuple[str, ...], tmp_path: Path) -> None:
    given = [f"{ACTOR}.megatron.{key}" for key in ("param_offload=True", "optimizer_offload=False", *others)]
    _, settings = verl(tmp_path, *given).required()
    assert (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer) == (True, True, False)


@pytest.mark.parametrize("program", ["-m verl.trainer.main_generation", "verl/trainer/main_eval.py"])
@pytest.mark.parametrize("engine", ["model_engine=megatron", ""])
def test_a_program_of_verl_that_trains_nothing_is_not_predicted(engine: str, program: str, tmp_path: Path) -> None:
    command = VERL.format(model="Qwen/Qwen3-8B").replace("-m verl.trainer.main_ppo", program)
    assert "does not train" in str(read_job(f"{command} {engine}", tmp_path).not_supported)


@pytest.mark.parametrize(
    ("program", "does"),
    [("main_domain_eval", ""), ("main_eval", "evaluates"), ("main_generation", "generates"), ("observe", "")],
)
def test_a_program_is_refused_by_its_whole_name(program: str, does: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL.format(model="Qwen/Qwen3-8B").replace("main_ppo", program))
    assert (f"it {does} and does not train" in str(Job.read(tmp_path / "run.sh").not_supported)) is bool(does)
    if program == "observe":  # SkyRL's program that serves is "serve"
        script = SKYRL.format(model="Qwen/Qwen3-8B").replace("skyrl.train.entrypoints.main_base", "mine.observe")
        assert "does not train" not in str(read_job(script, tmp_path).not_supported)


@pytest.mark.parametrize(("value", "is_told"), [("None", True), ("null", False), ("none", False)])
def test_a_null_that_hydra_reads_as_a_text_is_told(value: str, is_told: bool, tmp_path: Path) -> None:
    job = verl(tmp_path, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size={value}")
    assert any("write actor_rollout_ref" in one and one.endswith("=null") for one in job.warnings) is is_told


def test_verl_keeps_gradients_where_it_keeps_parameters(tmp_path: Path) -> None:
    key = f"{ACTOR}.megatron.grad_offload"
    job = verl(tmp_path, f"{key}=True")
    assert not job.required()[1].offload_gradients
    assert "where it offloads the parameters" in job.without_effect[key]


OPTIM = f"{ACTOR}.optim"


@pytest.mark.parametrize(
    ("keys", "is_bf16"),
    [
        ([f"{OPTIM}.use_precision_aware_optimizer=True", f"{OPTIM}.main_grads_dtype=bf16"], True),
        ([f"{OPTIM}.use_precision_aware_optimizer=True", f"{OPTIM}.main_grads_dtype=bfloat16"], True),
        ([f"{OPTIM}.use_precision_aware_optimizer=True", f"{OPTIM}.main_grads_dtype=fp32"], None),
        ([f"{OPTIM}.use_precision_aware_optimizer=False", f"{OPTIM}.main_grads_dtype=bf16"], None),
        ([f"{OPTIM}.main_grads_dtype=bf16"], None),
        (
            [
                f"{OPTIM}.override_optimizer_config.use_precision_aware_optimizer=True",
                f"{OPTIM}.override_optimizer_config.main_grads_dtype=bf16",
            ],
            None,
        ),
    ],
)
def test_verl_s_own_optimizer_keys_decide_how_gradients_are_reduced(
    keys: list[str], is_bf16: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(
        " ".join((VERL.format(model="Qwen/Qwen3-30B-A3B").replace(FP32, "model_engine=megatron "), *keys))
    )
    job = Job.read(tmp_path / "run.sh")
    if is_bf16 is None:
        assert "--framework-version 0.9.1 or before-2026-08-20" in str(job.not_supported)
        assert "\n" not in str(job.not_supported)
        assert not Job.read(tmp_path / "run.sh", version="0.9.1").required()[0].state.grad_reduce_in_bf16
    else:
        assert job.required()[0].state.grad_reduce_in_bf16
    both = Job.read(tmp_path / "run.sh", overrides=[FP32])
    assert not both.required()[0].state.grad_reduce_in_bf16, "a value that the job gives counts"


def test_an_unknown_type_in_verl_s_override_is_the_default_with_a_warning(tmp_path: Path) -> None:
    key = f"{OPTIM}.override_optimizer_config.main_grads_dtype"
    job = verl(tmp_path, f"+{key}=$(cat type)")
    assert job.required()[0].state.main_grads_dtype == "fp32"
    assert f"line 1: {key} is known only when the job runs, so memlab takes the default" in job.warnings[0]


def test_verl_s_own_types_are_read_only_with_the_precision_aware_optimizer(tmp_path: Path) -> None:
    moments = f"{OPTIM}.exp_avg_dtype=bf16", f"{OPTIM}.exp_avg_sq_dtype=bf16"
    job = verl(tmp_path, *moments)
    assert job.required()[0].state.exp_avg_dtype == "fp32"
    assert "use_precision_aware_optimizer" in job.without_effect[f"{OPTIM}.exp_avg_dtype"]
    on = f"{OPTIM}.use_precision_aware_optimizer=True"
    assert verl(tmp_path, on, *moments).required()[0].state.exp_avg_dtype == "bf16"
    other = f"{OPTIM}.override_optimizer_config.exp_avg_dtype=fp32"
    assert verl(tmp_path, on, *moments, other).required()[0].state.exp_avg_dtype == "fp32", "the override counts"


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_an_empty_list_of_modules_recomputes_nothing(framework: str, tmp_path: Path) -> None:
    prefix = MODEL if framework == "verl" else "trainer.policy.megatron_config.transformer_config_kwargs"
    read = verl if framework == "verl" else skyrl
    keys = ("recompute_granularity=selective", "recompute_method=null", "recompute_num_layers=null")
    selective = " ".join(f"{prefix}.{key}" for key in keys)
    assert read(tmp_path, selective).required()[1].recompute_modules == ("core_attn",)
    _, settings = read(tmp_path, selective, f"{prefix}.recompute_modules=[]").required()
    assert (settings.recompute_granularity, settings.recompute_modules) == (None, None)


def test_skyrl_s_default_number_of_layers_is_refused_with_selective_recompute(tmp_path: Path) -> None:
    key = "trainer.policy.megatron_config.transformer_config_kwargs.recompute"
    refused = skyrl(tmp_path, f"{key}_granularity=selective").cannot_start
    assert f"{key}_num_layers is 1 (default) with selective recompute, must be null there" in str(refused)
    _, settings = skyrl(tmp_path, f"{key}_granularity=selective {key}_num_layers=null").required()
    assert (settings.recompute_modules, settings.recompute_method) == (("core_attn",), None)


# By hand, from the published config.json of Qwen3-235B-A22B: 94 layers x 128 experts x 3 x 4096 x 1536 parameters are in
# experts, 227.1 of 235.1 billion. vLLM spreads them over tensor x data parallel ranks, the rest over tensor parallel ones.
EXPERTS = 94 * 128 * 3 * 4096 * 1536


@pytest.mark.parametrize(
    ("framework", "keys", "outside", "experts"),
    [
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=4", 4, 4),
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=4 {ROLLOUT}.data_parallel_size=32 {ROLLOUT}.expert_parallel_size=128", 4, 128),
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=4 {ROLLOUT}.data_parallel_size=32", 4, 128),
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=8 {ROLLOUT}.pipeline_model_parallel_size=2", 16, 16),
        ("verl", "", 2, 2),
        ("skyrl", f"{ENGINE}.tensor_parallel_size=2 {ENGINE}.data_parallel_size=4 {ENGINE}.expert_parallel_size=8", 2, 8),
        ("skyrl", f"{ENGINE}.tensor_parallel_size=2 {ENGINE}.pipeline_parallel_size=4", 8, 8),
        ("skyrl", f"{ENGINE}.data_parallel_size=8", 1, 8),
    ],
)  # fmt: skip
def test_the_engine_spreads_experts_over_its_data_parallel_ranks(
    framework: str, keys: str, outside: int, experts: int, tmp_path: Path
) -> None:
    read = verl if framework == "verl" else skyrl
    job = read(tmp_path, keys, "trainer.nnodes=16" if framework == "verl" else "", model="Qwen/Qwen3-235B-A22B")
    assert job.rollout is not None and job.scenario is not None
    rest = job.scenario.architecture.num_parameters - EXPERTS
    assert job.rollout.num_weights_of_engine(job.scenario) == rest // outside + EXPERTS // experts


def test_the_engine_of_a_large_job_of_verl_holds_7_5_gb_of_weights(tmp_path: Path) -> None:
    sizes = "tensor_model_parallel_size=4", "data_parallel_size=32", "expert_parallel_size=128"
    keys = [f"{ROLLOUT}.{size}" for size in sizes]
    job = verl(tmp_path, *keys, "trainer.nnodes=16", model="Qwen/Qwen3-235B-A22B")
    assert job.rollout is not None and job.scenario is not None
    assert "in any case" in job.without_effect[f"{ROLLOUT}.expert_parallel_size"]  # a rule derives it from the others
    assert 2 * job.rollout.num_weights_of_engine(job.scenario) == pytest.approx(7.5e9, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", 512 + 1024),
        ("trainer.max_prompt_length=1024 generator.sampling_params.max_generate_length=1000", 1024 + 1000),
        ("trainer.max_prompt_length=1024 generator.max_input_length=7000 generator.max_turns=6 generator.sampling_params.max_generate_length=1000", 8000),
        ("generator.max_input_length=null generator.sampling_params.max_generate_length=1000", 512 + 1000),
    ],
)  # fmt: skip
def test_skyrl_s_last_turn_begins_with_the_longest_input(keys: str, expected: int, tmp_path: Path) -> None:
    assert skyrl(tmp_path, keys).required()[0].seq_length == expected


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ("generator.max_input_length=7000", "is 7000 with trainer.max_prompt_length 512, must be the same"),
        ("generator.max_input_length=400", "must be the same with generator.max_turns 1"),
        ("generator.max_input_length=400 generator.max_turns=3", "must be at least as many"),
        ("generator.max_input_length=512", None),
    ],
)
def test_skyrl_refuses_an_input_length_that_its_turns_do_not_have(keys: str, rule: str | None, tmp_path: Path) -> None:
    """``validate_generator_cfg`` asserts it."""
    found = skyrl(tmp_path, keys).cannot_start
    assert rule in str(found) if rule else found is None


@pytest.mark.parametrize(
    ("before", "keys", "is_on"),
    [
        ("", "", True),
        ("", "trainer.use_expandable_segments=false", False),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False\n", "", True),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", "trainer.use_expandable_segments=false", True),
    ],
)
def test_skyrl_switches_expandable_segments_on_itself(before: str, keys: str, is_on: bool, tmp_path: Path) -> None:
    assert skyrl(tmp_path, keys, before=before).required()[0].allocator.expandable_segments == is_on


def test_skyrl_s_model_is_in_other_segments_where_it_stays_on_the_device(tmp_path: Path) -> None:
    assert not any("after the model is built" in line for line in skyrl(tmp_path).warnings)
    (warning,) = (
        line for line in skyrl(tmp_path, "trainer.placement.colocate_all=false").warnings if "segments" in line
    )
    assert "switched on after the model is built" in warning


def test_skyrl_s_sft_trainer_keeps_its_model_in_other_segments(tmp_path: Path) -> None:
    warnings = sft(tmp_path, f"{SKYRL_SFT}max_length=4096").warnings
    assert any("switched on after the model is built" in line for line in warnings)


def test_a_job_of_skyrl_without_a_strategy_is_not_megatron_s(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SKYRL.format(model="Qwen/Qwen3-30B-A3B").replace("trainer.strategy=megatron", ""))
    assert Job.read(tmp_path / "run.sh").framework == "skyrl-fsdp"


def sft(folder: Path, command: str) -> Job:
    return read_job(command, folder, version="0.9.1" if "verl" in command else None)


VERL_SFT = (
    "torchrun --nnodes=2 --nproc_per_node=8 {program} model=hf_model model.path=Qwen/Qwen3-30B-A3B engine=megatron "
    "optim=megatron engine.tensor_model_parallel_size=2 engine.expert_model_parallel_size=8 "
    "engine.expert_tensor_parallel_size=1 data.train_batch_size=64 "
)


@pytest.mark.parametrize(
    ("program", "keys", "workload"),
    [
        ("-m verl.trainer.sft_trainer", "data.use_dynamic_bsz=True data.max_token_len_per_gpu=4096", (4096, 1, 2)),
        ("verl/trainer/sft_trainer.py", "data.max_token_len_per_gpu=16384 data.max_length=16384", (16384, 1, 2)),
        ("-m verl.trainer.sft_trainer", "data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", (2048, 1, 4)),
        ("-m verl.trainer.sft_trainer", "data.use_dynamic_bsz=False data.max_length=2048", (8192, 1, 2)),
    ],
)
def test_verl_s_sft_trainer_is_read(program: str, keys: str, workload: tuple[int, int, int], tmp_path: Path) -> None:
    job = sft(tmp_path, VERL_SFT.format(program=program) + keys)
    scenario, settings = job.required()
    assert job.framework == "verl-sft"
    assert (scenario.layout.world_size, scenario.layout.tensor_model_parallel_size) == (16, 2)
    assert (scenario.layout.expert_model_parallel_size, scenario.layout.expert_tensor_size) == (8, 1)
    assert (scenario.seq_length, scenario.micro_batch_size, scenario.num_microbatches) == workload
    assert (scenario.state.loss, settings.recompute_granularity) == ("vocab_parallel_cross_entropy", None)
    assert (scenario.state.bias_activation_fusion, scenario.state.gradient_accumulation_fusion) == (False, True)
    assert not [one for one in job.not_modelled if one.effect == "unknown"]


def test_verl_s_sft_trainer_without_megatron_is_that_of_fsdp(tmp_path: Path) -> None:
    command = VERL_SFT.format(program="-m verl.trainer.sft_trainer").replace("engine=megatron ", "")
    assert sft(tmp_path, command).framework == "verl-sft-fsdp"


SKYRL_SFT = "python -m skyrl.train.main_sft model.path=Qwen/Qwen3-30B-A3B placement.num_gpus_per_node=8 "
_SIZES = "megatron_config.tensor_model_parallel_size=4 megatron_config.expert_model_parallel_size=8 megatron_config.expert_tensor_parallel_size=1"


@pytest.mark.parametrize(
    ("keys", "layout", "workload"),
    [
        (f"{_SIZES} max_length=4096 batch_size=16 micro_train_batch_size_per_gpu=1", (4, 1), (4096, 1, 8)),
        (f"{_SIZES} max_length=4096 batch_size=16", (4, 1), (8192, 1, 4)),
        (f"{_SIZES} max_length=4096 batch_size=16 remove_microbatch_padding=false", (4, 1), (4096, 2, 4)),
        ("max_length=2048 batch_size=16", (2, 2), (4096, 1, 4)),
        (f"{_SIZES} max_length=2048 max_tokens_per_microbatch=8192 use_sequence_packing=true batch_size=64", (4, 1), (8192, 1, 2)),
        (f"{_SIZES} max_length=2048 use_sequence_packing=true batch_size=64", (4, 1), (2048, 1, 2)),
    ],
)  # fmt: skip
def test_skyrl_s_sft_trainer_is_read(
    keys: str, layout: tuple[int, int], workload: tuple[int, int, int], tmp_path: Path
) -> None:
    job = sft(tmp_path, SKYRL_SFT + keys)
    scenario, settings = job.required()
    assert job.framework == "skyrl-sft"
    assert (scenario.layout.tensor_model_parallel_size, scenario.layout.pipeline_model_parallel_size) == layout
    assert (scenario.seq_length, scenario.micro_batch_size, scenario.num_microbatches) == workload
    assert (scenario.state.loss, settings.recompute_granularity) == ("logprobs", "full")
    assert not settings.offload_parameters
    assert scenario.allocator.expandable_segments
    assert not [one for one in job.not_modelled if one.effect == "unknown"]


def test_skyrl_s_sft_trainer_asks_for_a_length_that_it_does_not_bound(tmp_path: Path) -> None:
    assert "give --set max_length=TOKENS" in str(sft(tmp_path, SKYRL_SFT + _SIZES).not_supported)


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "dp"),
        ("model_engine=veomni", "veomni"),
        (f"actor@{ACTOR}=veomni_actor", "veomni"),
        (f"+actor@{ACTOR}=dp_actor model_engine=megatron", "dp"),
        (f"actor@{ACTOR}=megatron_actor", None),
        ("--config-name=ppo_trainer", "dp"),
        (f"model_engine=mlite {ACTOR}.engine.tp=1", "mlite"),
        ("model_engine=megatron", None),
        (f"{ACTOR}.strategy=megatron", None),
        ("--config-name='ppo_megatron_trainer.yaml'", None),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=1", None),
    ],
)
def test_a_job_of_verl_is_megatron_s_only_where_it_chooses_megatron(
    keys: str, engine: str | None, tmp_path: Path
) -> None:
    command = VERL.format(model="Qwen/Qwen3-30B-A3B").replace(FP32, "").replace("main_ppo", "main_ppo " + keys)
    job = read_job(command, tmp_path, version="0.9.1")
    assert job.framework == {"dp": "verl-fsdp", "veomni": "verl-veomni"}.get(str(engine), "verl")
    said = {
        "mlite": "model_engine mlite: memlab predicts verl's jobs with Megatron and FSDP only",
        "veomni": "models as VeOmni builds them",
    }.get(str(engine))
    assert said in str(job.not_supported) if said is not None else job.scenario is not None
    is_default = keys.startswith(("actor_rollout_ref.actor.fsdp_config", "--config-name=ppo_trainer"))
    assert any("no key chooses an engine" in line for line in job.warnings) is is_default


def test_a_job_of_verl_that_chooses_no_engine_trains_with_fsdp_and_is_warned_of(tmp_path: Path) -> None:
    job = read_job(VERL.format(model="Qwen/Qwen3-30B-A3B").replace(FP32, ""), tmp_path)
    assert job.required()[0].engine == "fsdp2"
    assert any("no key chooses an engine, and verl takes FSDP then" in line for line in job.warnings)


def test_mbridge_fuses_the_activation_and_not_the_accumulation(tmp_path: Path) -> None:
    def fusions(*keys: str) -> tuple[bool, bool]:
        state = verl(tmp_path, *keys).required()[0].state
        return state.bias_activation_fusion, state.gradient_accumulation_fusion

    vanilla = f"{ACTOR}.megatron.vanilla_mbridge=True"
    assert (fusions(), fusions(vanilla)) == ((False, True), (True, False))
    assert fusions(vanilla, f"{MODEL}.bias_activation_fusion=False") == (False, False)
    # engine/megatron.yaml has vanilla_mbridge True in 0.7.0 to 0.8.0, and False in 0.9.0.
    for release, expected in (("0.7.1", (True, False)), ("0.8.0", (True, False)), ("0.9.1", (False, True))):
        (tmp_path / "requirements.txt").write_text(f"verl=={release}\n")
        assert fusions() == expected


RECIPE = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe qwen3_30b_a3b_pretrain_config "


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            RECIPE
            + "model.tensor_model_parallel_size=4 model.sequence_parallel=true model.pipeline_model_parallel_size=2 "
            "model.expert_model_parallel_size=4 model.seq_length=4096 train.micro_batch_size=1 "
            "train.global_batch_size=32",
            (4, 2, 4, 4096, 1, 32),
        ),
        (RECIPE.replace("=8", "=16"), (1, 1, 16, 4096, 1, 64)),
        (RECIPE + "-tp 2 -ep 4 -gb 16 -sl 8192 model.sequence_parallel=true", (2, 1, 4, 8192, 1, 4)),
        (
            RECIPE + "-tp 2 --expert_model_parallel_size=4 -gb 16 dataset.seq_length=2048 model.sequence_parallel=true",
            (2, 1, 4, 2048, 1, 4),
        ),
        (
            RECIPE + "-tp 2 -ep 4 -gb 16 model.tensor_model_parallel_size=4 model.sequence_parallel=true",
            (4, 1, 4, 4096, 1, 8),
        ),
    ],
)
def test_a_recipe_of_bridge_has_its_values_below_the_overrides(
    command: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    job = sft(tmp_path, command)
    scenario, settings = job.required()
    layout, state = scenario.layout, scenario.state
    sizes = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.expert_model_parallel_size
    assert (*sizes, scenario.seq_length, scenario.micro_batch_size, scenario.num_microbatches) == expected
    # What qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config sets (recipes/qwen/h100/qwen3_moe.py, 0.6.2).
    assert (state.use_precision_aware_optimizer, state.grad_reduce_in_bf16, state.apply_rope_fusion) == (True,) * 3
    assert (state.cross_entropy_loss_fusion, state.cross_entropy_fusion_impl, state.manual_gc) == (True, "te", True)
    assert settings.recompute_granularity is None
    said = {one.key: one.value for one in job.not_modelled}
    assert said["model.cuda_graph_impl"] == "transformer_engine"
    assert (state.moe_token_dispatcher_type, state.moe_flex_dispatcher_backend) == ("flex", "hybridep")
    assert (state.bias_activation_fusion, state.gradient_accumulation_fusion) == (True, True), "the recipe fuses both"
    assert any("its values of Megatron-Bridge 0.6.2" in line for line in job.warnings)
    assert not state.moe_router_force_load_balancing, "as the performance recipe of the same name has it"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_70b_sft_config", "TP8 SP0 PP4"),
        ("llama3_70b_sft_32gpu_h100_bf16_config", "TP4 PP4 VP5 DP2"),
        ("gpt_oss_120b_pretrain_config", "TP2 PP4 EP16 ETP1 DP8"),
        ("gpt_oss_120b_pretrain_64gpu_h100_bf16_config", "PP4 EP8 DP16"),
        (
            "deepseek_v3_pretrain_config",
            f"TP2 PP16 EP64 ETP1 DP32 pipeline_model_parallel_layout=E{'tttt|' * 15}tmL",
        ),
    ],
)
def test_a_short_name_is_the_library_s_recipe_and_a_long_one_the_performance_recipe(
    name: str, text: str, tmp_path: Path
) -> None:
    # Both packages have the long name (recipes/ and perf_recipes/ of 0.6.2), and run_recipe.py takes the performance
    # recipe for it; the short one is an alias that only the library has.
    job = sft(tmp_path, f"torchrun run_recipe.py --recipe {name}")
    assert str(job.required()[0].layout) == text


@pytest.mark.parametrize("option", ["use_distributed_optimizer", "overlap_param_gather"])
@pytest.mark.parametrize(("ddp", "optimizer"), [(False, True), (True, False), (True, True), (False, False)])
def test_bridge_switches_on_in_both_sections_what_one_of_them_has(
    option: str, ddp: bool, optimizer: bool, tmp_path: Path
) -> None:
    others = "-ep 8 comm_overlap=null ddp.overlap_grad_reduce=true optimizer.use_precision_aware_optimizer=false "
    others += "ddp.overlap_param_gather=false " if option == "use_distributed_optimizer" else ""
    job = read_job(RECIPE + others + f"ddp.{option}={ddp} optimizer.{option}={optimizer}", tmp_path)
    assert getattr(job.required()[0].state, option) is (ddp or optimizer)
    off = {f"{section}.{option}" for section, is_on in (("ddp", ddp), ("optimizer", optimizer)) if not is_on}
    assert off & job.without_effect.keys() == (off if len(off) == 1 else set())


@pytest.mark.parametrize("is_on", [True, False])
def test_what_is_on_where_one_section_has_it_on_is_written_into_both(is_on: bool) -> None:
    scenario = Scenario.of("qwen3-8b", state=TrainingState(overlap_param_gather=is_on, overlap_grad_reduce=True))
    lines = written("bridge", scenario, MemorySettings()).lines
    assert lines.count(f"  overlap_param_gather: {str(is_on).lower()}") == 2


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ("", True),
        ("checkpoint.ckpt_format=fsdp_dtensor", False),
        ("checkpoint.save=null", True),
        ("checkpoint.save=null checkpoint.load=null", False),
    ],
)
def test_recipes_of_bridge_save_checkpoints_in_a_format_that_fsdp_refuses(
    overrides: str, is_refused: bool, tmp_path: Path
) -> None:
    """``recipes/common.py`` gives each a folder, and the format ``torch_dist`` (0.6.2)."""
    job = sft(tmp_path, f"{RECIPE}-ep 8 ddp.use_megatron_fsdp=true {overrides}")
    assert ("use_megatron_fsdp with checkpoints in another format" in str(job.cannot_start)) is is_refused


def test_a_recipe_s_optimizer_keeps_what_its_ddp_leaves_out(tmp_path: Path) -> None:
    command = "torchrun --nproc-per-node=8 run_recipe.py --recipe gpt_oss_20b_sft_config model.sequence_parallel=true"
    assert sft(tmp_path, command).required()[0].state.use_distributed_optimizer  # ddp has it off, the optimizer on


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ("-ep 8", None),  # of 1, as the model's
        ("-tp 2 -ep 8 model.sequence_parallel=true", 1),
        ("-tp 2 -ep 4 -etp 2 model.sequence_parallel=true", None),  # as the model's
        ("-tp 2 model.sequence_parallel=true", None),  # experts are not spread
    ],
)
def test_an_expert_of_bridge_is_whole_where_experts_are_spread(keys: str, size: int | None, tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node=8 run_recipe.py model.hf_model_id=Qwen/Qwen3-30B-A3B "
    assert sft(tmp_path, command + keys).required()[0].layout.expert_tensor_parallel_size == size


@pytest.mark.parametrize("option", ["--step_func vlm_step", "--step-func=qwen3_vl_step", "--step_func of_tomorrow"])
def test_a_step_of_another_kind_of_model_is_refused(option: str, tmp_path: Path) -> None:
    assert "which memlab does not have" in str(sft(tmp_path, f"{RECIPE} -ep 8 {option}").not_supported)
    assert sft(tmp_path, RECIPE + "-ep 8 --step_func gpt_step").scenario is not None


def test_options_of_a_recipe_s_command_are_keys(tmp_path: Path) -> None:
    job = sft(
        tmp_path, RECIPE + "-ep 8 --deterministic --lr 1e-4 --of_tomorrow 2 -ms 10 --dataset mock train.train_iters=2"
    )
    effects = {one.key: one.effect for one in job.not_modelled}
    assert (effects["deterministic"], effects["of_tomorrow"]) == ("either", "unknown")
    assert {"lr", "ms", "dataset", "train.train_iters"} <= set(job.without_effect)
    assert job.required()[0].layout.world_size == 8, "options before the program are torchrun's"


def test_a_recipe_s_program_alone_is_asked_for_its_sizes(tmp_path: Path) -> None:
    job = sft(tmp_path, "./scripts/training/run_recipe.py model.hf_model_id=Qwen/Qwen3-30B-A3B")
    assert any("overrides a recipe that memlab cannot read" in line for line in job.warnings)
    with pytest.raises(ValueError, match=r"^run\.sh has no arguments of bridge: give a script"):
        sft(tmp_path, "./scripts/training/run_recipe.py")


def test_a_model_and_a_mode_of_bridge_are_a_recipe(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node=4 run_recipe.py --model qwen3_30b_a3b --mode lora --dataset mock"
    job = sft(tmp_path, command)
    assert job.required()[0].layout.expert_model_parallel_size == 4
    assert "peft" not in {one.key for one in job.not_modelled}
    lora = job.required()[0].state.lora  # as the recipe has it in recipes/qwen/h100/qwen3_moe.py, 0.6.2
    assert lora == LoRA(rank=8, alpha=16, target_modules=("linear_qkv", "linear_proj"))


def test_a_recipe_that_memlab_does_not_know_is_named(tmp_path: Path) -> None:
    command = RECIPE.replace("qwen3_30b_a3b_pretrain_config", "gemma3_1b_pretrain_config")
    job = sft(tmp_path, command + "model.hf_model_id=Qwen/Qwen3-30B-A3B ")
    (warning,) = (line for line in job.warnings if "the recipe '" in line)
    assert "does not know the recipe 'gemma3_1b_pretrain_config'" in warning
    assert "give the run_config.yaml of a checkpoint" in warning


@pytest.mark.parametrize(
    ("overrides", "in_bf16", "said"),
    [
        ("ddp.grad_reduce_in_fp32=false", False, {"ddp.grad_reduce_in_fp32"}),
        ("ddp.grad_reduce_in_fp32=false mixed_precision.grad_reduce_in_fp32=false", True, set()),
        ("ddp.grad_reduce_in_fp32=false mixed_precision=bf16_mixed", False, set()),
        ("ddp.grad_reduce_in_fp32=true model.seq_length=16384", False, {"model.seq_length"}),
        ("ddp.grad_reduce_in_fp32=true model.seq_length=16384 dataset.seq_length=4096", False, set()),
    ],
)
def test_what_an_unknown_recipe_replaces_of_a_command_is_named(
    overrides: str, in_bf16: bool, said: set[str], tmp_path: Path
) -> None:
    """``mixed_precision.setup`` and ``sync_model_dataset_sequence_length`` of Megatron-Bridge (August 2026)."""
    command = RECIPE.replace("qwen3_30b_a3b_pretrain_config", "gemma3_1b_pretrain_config")
    job = sft(tmp_path, f"{command} model.hf_model_id=Qwen/Qwen3-30B-A3B {overrides}")
    scenario, _ = job.required()
    assert scenario.state.grad_reduce_in_bf16 == in_bf16
    assert {line.partition(":")[0] for line in job.warnings if "replaces it" in line} == said


@pytest.mark.parametrize(
    ("gpu", "precision", "state", "said"),
    [
        ("h100", "{fp8: hybrid, fp8_recipe: tensorwise}", {"non_tn_fp8_gemm": False}, []),
        ("gb200", "{fp8: hybrid, fp8_recipe: tensorwise}", {"non_tn_fp8_gemm": True}, []),
        ("gb200", "{fp8: hybrid, fp8_recipe: blockwise}", {"non_tn_fp8_gemm": False}, ["either"]),
        ("gb200", "bf16_with_mxfp8_mixed", {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, []),
    ],
)
def test_the_gpu_of_a_recipe_decides_whether_fp8_matrices_are_transposed(
    gpu: str, precision: str, state: dict[str, bool], said: list[str], tmp_path: Path
) -> None:
    """A recipe of the same name on an H100 transposes the matrices."""
    text = (
        f"recipe: llama3_8b_sft_8gpu_{gpu}_fp8cs_config\nworld_size: 8\nmodel: {{hf_model_id: meta-llama/Llama-3.1-8B}}\n"
        "ddp: {grad_reduce_in_fp32: true}\ntrain: {micro_batch_size: 1, global_batch_size: 8}\n"
        f"mixed_precision: {precision}\n"
    )
    job = read_job(text, tmp_path, "run_config.yaml")
    found = [one for one in job.not_modelled if one.key == "mixed_precision.fp8_recipe"]
    assert [one.effect for one in found] == said
    of_job = job.required()[0].state
    assert {name: getattr(of_job, name) for name in state} == state


@pytest.mark.parametrize("section", ["ddp", "optimizer"])
@pytest.mark.parametrize(
    "precision", ["{fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: true}", "{bf16: true}", "bf16_mixed"]
)
def test_mixed_precision_replaces_the_reuse_of_the_gradients_buffer(
    section: str, precision: str, tmp_path: Path
) -> None:
    """``update_config_with_precision_overrides`` (0.6.2) writes its own value, False, into the other sections."""
    key = "reuse_grad_buf_for_mxfp8_param_ag"
    text = (
        "world_size: 8\nmodel: {hf_model_id: meta-llama/Llama-3.1-8B, seq_length: 4096}\n"
        f"train: {{micro_batch_size: 1, global_batch_size: 8}}\nmixed_precision: {precision}\n"
        f"{section}: {{{key}: true}}\n"
    )
    (path := tmp_path / "run_config.yaml").write_text(text)
    job = Job.read(path, format_name="bridge")
    assert not job.required()[0].state.reuse_grad_buf_for_mxfp8_param_ag
    assert "mixed_precision" in job.without_effect[f"{section}.{key}"]
    assert f"{section}.{key}" not in {one.key for one in job.taken}


def test_a_job_of_a_model_that_megatron_s_layers_do_not_have_is_told_what_its_owner_can_do(tmp_path: Path) -> None:
    """Bridge has no other engine to choose."""
    (path := tmp_path / "run_config.yaml").write_text(
        "world_size: 8\nmodel: {hf_model_id: google/gemma-7b, seq_length: 4096}\n"
        "train: {micro_batch_size: 1, global_batch_size: 8}\n"
    )
    said = Job.read(path, format_name="bridge").not_supported or ""
    assert "gemma-7b, whose GELU gates" in said and "give --architecture" in said and "choose engine" not in said


@pytest.mark.parametrize(
    ("precision", "fp8", "replaced"),
    [
        ("", "e4m3", set()),
        ("mixed_precision: bf16_mixed\n", None, {"fp8", "fp8_recipe"}),
        ("mixed_precision: {bf16: true}\n", None, {"fp8", "fp8_recipe"}),
        ("mixed_precision: {bf16: true, fp8: hybrid}\n", "hybrid", {"fp8", "fp8_recipe"}),
        ("mixed_precision: {bf16: true, fp8: e4m3, fp8_recipe: blockwise}\n", "e4m3", set()),
        ("mixed_precision: bf16_with_mxfp8_mixed\n", "e4m3", {"fp8_recipe"}),
    ],
)
def test_mixed_precision_replaces_the_fp8_of_the_model(
    precision: str, fp8: str | None, replaced: set[str], tmp_path: Path
) -> None:
    """``update_config_with_precision_overrides`` sets each field of a ``MixedPrecisionConfig``, also to its default."""
    (path := tmp_path / "job.yaml").write_text(
        "model: {hf_model_id: Qwen/Qwen3-8B, fp8: e4m3, fp8_recipe: blockwise}\ndataset: {seq_length: 4096}\n"
        f"train: {{micro_batch_size: 1, global_batch_size: 8}}\n{precision}"
    )
    job = Job.read(path, format_name="bridge", world_size=8)
    assert job.required()[0].state.fp8_format == fp8
    warned = [line for line in job.warnings if "when the job starts" in line]
    assert {line.split()[0] for line in warned} == {f"model.{name}" for name in replaced}
    assert {one.key for one in job.taken}.isdisjoint(f"model.{name}" for name in replaced)
