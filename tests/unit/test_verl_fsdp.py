"""verl's jobs with FSDP: their fields and defaults, what the engine does not have, and which jobs they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from tests.unit.job_files import read_job

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FSDP = f"{ACTOR}.fsdp_config"
START = (
    f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {MODEL}.path=Qwen/Qwen3-8B {ACTOR}.strategy=fsdp2 "
    f"{ACTOR}.ppo_mini_batch_size=64 {ACTOR}.ppo_micro_batch_size_per_gpu=1 data.max_prompt_length=1024 "
    "data.max_response_length=3072 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
)
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
UNITS = {"separate_embeddings": "both", "reshard_root_after_forward": True}
FLASH = {"attn_implementation": "flash_attention_2", "loss_of_transformers": "logprobs_flash_attn"}
STATE = {"fp32_sharded_params": True, "reshard_after_forward": "all"} | UNITS | FLASH
BY_ROW = {"loss_of_transformers": "logprobs_by_row"}
ONE_UNIT = {"separate_embeddings": "none", "reshard_root_after_forward": False}


def read(folder: Path, keys: str = "", version: str | None = "0.9.1") -> Job:
    return read_job(START + keys, folder, version=version)


def test_a_job_is_read_with_the_defaults_of_verl(tmp_path: Path) -> None:
    job = read(tmp_path)
    assert job.required() == (
        Scenario.of(
            "qwen3-8b",
            seq_length=4096,
            num_microbatches=8,
            engine="fsdp2",
            layout=Layout(data_parallel_size=8),
            allocator=AllocatorSettings(expandable_segments=True),
            state=TrainingState(**STATE),  # type: ignore[arg-type]
        ),
        MemorySettings(**WHOLE_LAYERS),  # type: ignore[arg-type]
    )
    assert job.framework == "verl-fsdp" and not job.guesses
    assert not job.not_modelled


def test_fsdp_does_not_read_megatron_s_section_of_adapters(tmp_path: Path) -> None:
    """It reads ``lora_rank`` (verl/workers/engine/fsdp/transformer_impl.py, 1dda039b)."""
    job = read(tmp_path, " ".join(f"{MODEL}.lora.{each}" for each in ("rank=8", "alpha=16", "type=lora", "merge=true")))
    assert job.required()[0].state.lora is None
    assert {f"{MODEL}.lora.rank", f"{MODEL}.lora.type"} <= job.without_effect.keys()


@pytest.mark.parametrize(
    ("keys", "state", "settings"),
    [
        (f"{FSDP}.model_dtype=bf16", {"fp32_sharded_params": False}, {}),
        (f"{FSDP}.mixed_precision.reduce_dtype=bf16", {"grad_reduce_in_bf16": True}, {}),
        (
            f"+{FSDP}.mixed_precision.param_dtype=fp32",
            {"fp32_sharded_params": False, "attn_implementation": "sdpa"} | BY_ROW,
            {},
        ),
        (f"+{MODEL}.override_config.attn_implementation=eager", {"attn_implementation": "eager"} | BY_ROW, {}),
        (
            f"{ACTOR}.strategy=fsdp {FSDP}.use_orig_params=True",
            ONE_UNIT | {"fsdp_version": 1, "use_orig_params": True},
            {},
        ),
        (
            f"{ACTOR}.strategy=fsdp {FSDP}.offload_policy=True {FSDP}.optimizer_offload=True",  # FSDP2 reads the policy
            ONE_UNIT | {"fsdp_version": 1},
            {"offload_optimizer": True},
        ),
        (
            f"{FSDP}.reshard_after_forward=False",
            {"reshard_after_forward": "none", "reshard_root_after_forward": False},
            {},
        ),
        # torch 2.13 takes the number 1 for False (``_get_post_forward_mesh_info``).
        (f"{FSDP}.reshard_after_forward=1", {"reshard_after_forward": "none", "reshard_root_after_forward": False}, {}),
        (f"{FSDP}.fsdp_size=4", {"dp_replicate_size": 2}, {}),
        (f"{FSDP}.fsdp_size=-1", {}, {}),
        (f"{FSDP}.forward_prefetch=True", {"fsdp2_forward_prefetch_depth": 1}, {}),
        (f"{FSDP}.use_no_sync_for_gradient_accumulation=True", {"defer_fsdp_grad_sync": True}, {}),
        (f"{MODEL}.enable_gradient_checkpointing=False", {}, dict.fromkeys(WHOLE_LAYERS)),
        (f"{FSDP}.param_offload=True", {}, {"offload_parameters": True, "offload_gradients": True}),
        (f"{FSDP}.optimizer_offload=True", {}, {"offload_optimizer": True, "offload_gradients": False}),
        (f"{FSDP}.offload_policy=True {FSDP}.param_offload=True", {"fsdp_cpu_offload": True}, {}),
    ],
)
def test_types_shards_and_what_leaves_the_device(
    keys: str, state: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    scenario, found = read(tmp_path, keys).required()
    assert scenario.state == TrainingState(**(STATE | state))
    assert found == MemorySettings(**(WHOLE_LAYERS | {"offload_gradients": False} | settings))
    assert scenario.dtype == ("fp32" if "param_dtype=fp32" in keys else "bf16")


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", {}),
        (f"{ACTOR}.strategy=fsdp", {}),
        (f"{ACTOR}.strategy=fsdp {MODEL}.lora_rank=8", {}),
        (f"{MODEL}.use_remove_padding=False", {f"{MODEL}.use_remove_padding": "more"}),
        (f"{ACTOR}.entropy_coeff=0.01", {f"{ACTOR}.entropy_coeff": "more"}),
        (f"{ACTOR}.entropy_coeff=0.01 {ACTOR}.entropy_from_logits_with_chunking=True",
         {f"{ACTOR}.entropy_coeff": "more", f"{ACTOR}.entropy_from_logits_with_chunking": "less"}),
        (f"{MODEL}.use_liger=True", {f"{MODEL}.use_liger": "less"}),
        (f"+{MODEL}.override_config.hidden_size=2048", {f"{MODEL}.override_config.hidden_size": "either"}),
        (f"+{MODEL}.override_config.attn_implementation=flash_attention_2", {}),
        # flash-attn, the default, takes 16 bits only.
        (f"+{FSDP}.mixed_precision.param_dtype=fp32",
         {f"{MODEL}.override_config.attn_implementation": "either", f"{ACTOR}.policy_loss": "less"}),
        (f"+{MODEL}.override_config.attn_implementation=flex_attention",
         {f"{MODEL}.override_config.attn_implementation": "either", f"{ACTOR}.policy_loss": "less"}),
        (f"{MODEL}.lora_rank=32 {FSDP}.model_dtype=bf16", {f"{MODEL}.lora_rank": "less"}),
        (f"{MODEL}.use_fused_kernels=True", {f"{MODEL}.use_fused_kernels": "less"}),
        (f"{ACTOR}.optim.optimizer=AdamW8bit {ACTOR}.optim.optimizer_impl=torchao.optim",
         {f"{ACTOR}.optim.optimizer": "either"}),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_named(keys: str, missing: dict[str, str], tmp_path: Path) -> None:
    job = read(tmp_path, keys)
    assert job.scenario is not None
    found = {one.key: one.effect for one in job.not_modelled}
    assert found == missing


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    state = read(tmp_path, f"{MODEL}.lora_rank=32 {MODEL}.lora_alpha=64").required()[0].state
    peft = {"target_modules": (), "exclude_modules": ("lm_head",), "enable_input_require_grads": True}
    assert state.lora == LoRA(rank=32, alpha=64, fsdp2_library="peft", **peft)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "keys", "adapts_experts", "said"),
    [
        ("Qwen/Qwen3-30B-A3B", "", True, "0.20 or newer, which adapts experts too"),  # all-linear, verl's default
        ("Qwen/Qwen3-30B-A3B", "[q_proj,down_proj]", True, "0.20 or newer, which adapts experts too"),
        ("Qwen/Qwen3-30B-A3B", "[q_proj,k_proj,v_proj,o_proj]", False, None),
        ("mistralai/Mixtral-8x7B-v0.1", "[q_proj,w1,w2,w3]", True, "0.20 or newer, which adapts experts too"),
        ("mistralai/Mixtral-8x7B-v0.1", "[q_proj,down_proj]", False, None),
        ("Qwen/Qwen2.5-7B", "", False, None),
    ],
)
def test_experts_have_the_adapters_of_the_newest_peft(
    model: str, keys: str, adapts_experts: bool, said: str | None, tmp_path: Path
) -> None:
    """verl asks for no version: findings/peft_adapters_of_fused_experts_keep_all_experts_again.sh."""
    targets = f" {MODEL}.target_modules={keys}" if keys else ""
    job = read(tmp_path, f"{ACTOR}.strategy=fsdp2 {MODEL}.lora_rank=8 {MODEL}.path={model}{targets}")
    lora = job.required()[0].state.lora
    assert lora is not None and lora.fused_experts is adapts_experts
    assert [one for one in job.warnings if "PEFT" in one] == [one for one in job.warnings if said and said in one]
    assert not [one.key for one in job.not_modelled if "lora" in one.key or "target_modules" in one.key]


def test_adapters_of_experts_fail_under_fsdp1(tmp_path: Path) -> None:
    """Seen with PEFT 0.21.2 and torch 2.13 on two ranks over gloo, in PEFT's forward of the router."""
    job = read(tmp_path, f"{ACTOR}.strategy=fsdp {MODEL}.lora_rank=8 {MODEL}.path=Qwen/Qwen3-30B-A3B")
    lora = job.required()[0].state.lora
    assert lora is not None and not lora.fused_experts
    assert any("then fail under FSDP1 in the first step" in one for one in job.warnings)


@pytest.mark.parametrize(
    ("strategy", "model", "targets", "adapted"),
    [
        ("fsdp", "Qwen/Qwen2.5-7B", "q_proj,gate", ("q_proj",)),
        ("fsdp2", "Qwen/Qwen2.5-7B", "q_proj,w1", ("q_proj",)),
        ("fsdp", "mistralai/Mixtral-8x7B-v0.1", "q_proj,w1,w2,w3", None),
        ("fsdp", "Qwen/Qwen3-30B-A3B", "q_proj,gate", None),
    ],
)
def test_names_of_routed_layers_refuse_no_job_whose_adapters_memlab_does_not_have(
    strategy: str, model: str, targets: str, adapted: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """PEFT passes over names that no module has; adapters that memlab lacks are named."""
    start = f"{ACTOR}.strategy={strategy} {MODEL}.lora_rank=8 {MODEL}.path={model}"
    job = read(tmp_path, f"{start} {MODEL}.target_modules=[{targets}]")
    lora = job.required()[0].state.lora
    assert (None if lora is None else lora.target_modules) == adapted
    assert (f"{MODEL}.lora_rank" in {one.key for one in job.not_modelled}) is (adapted is None)
    assert any("PEFT adapts the other ones" in one for one in job.warnings) is (adapted is not None)


def test_the_policy_without_adapters_is_the_reference_where_memlab_lacks_the_adapters_too(tmp_path: Path) -> None:
    keys = f"{MODEL}.lora_rank=32 {FSDP}.model_dtype=bf16 {ACTOR}.use_kl_loss=True"
    job = read(tmp_path, keys)
    assert f"{MODEL}.lora_rank" in {one.key for one in job.not_modelled}
    assert job.rollout is not None and job.rollout.reference_pass is None


@pytest.mark.parametrize(
    ("keys", "lacks", "at_least"),
    [
        (f"{ACTOR}.strategy=fsdp_turbo {FSDP}.model_dtype=bf16", "the engine fsdp_turbo", (2, 2, 4)),
        ("model_engine=fsdp_turbo", "the engine fsdp_turbo", (4, 4, 8)),
        (f"{MODEL}.path=zai-org/GLM-4.5-Air", "the family glm4_moe under FSDP2", None),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(
    keys: str, lacks: str, at_least: tuple[int, ...] | None, tmp_path: Path
) -> None:
    job = read(tmp_path, keys)
    assert job.scenario is None and job.lacks == (lacks,) and job.at_least
    if at_least is not None:
        of_a_rank = 8_190_735_360 // 8  # as Qwen publishes the model: 8.2 billion parameters
        assert tuple(job.at_least.values()) == tuple(size * of_a_rank for size in at_least)


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_micro_batches_of_which_a_step_is_no_multiple_are_refused(engine: str, tmp_path: Path) -> None:
    """``prepare_micro_batches`` in verl/workers/engine/utils.py (0.9.1 and 1dda039b)."""
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    for size, is_refused in ((3, True), (4, False)):
        (tmp_path / "run.sh").write_text(
            START.replace(f"{ACTOR}.strategy=fsdp2 ", "").replace(f"{micro}=1", f"{micro}={size}")
            + f" model_engine={engine}"
        )
        job = Job.read(tmp_path / "run.sh", version="0.9.1")
        assert ("has 8 sequences in a step" in str(job.cannot_start)) is is_refused


def test_groups_of_shards_have_all_ranks(tmp_path: Path) -> None:
    job = read(tmp_path, f"{FSDP}.fsdp_size=3")
    assert job.cannot_start is not None and f"{FSDP}.fsdp_size is 3, must divide the 8 ranks" in job.cannot_start
    assert job.refused_fields == (f"{FSDP}.fsdp_size",)


def test_another_model_does_not_take_away_what_the_engine_lacks(tmp_path: Path) -> None:
    read(tmp_path, "model_engine=fsdp_turbo")
    job = Job.read(tmp_path / "run.sh", architecture="qwen3-4b")
    assert job.scenario is None and job.lacks == ("the engine fsdp_turbo",)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (f"{MODEL}.lora_rank=16 {MODEL}.lora_adapter_path=/saved", f"{MODEL}.lora_adapter_path"),
        (f"{MODEL}.lora_adapter_path=/saved", None),  # ``_is_lora`` asks for the rank
        ("algorithm.adv_estimator=gae critic.fsdp.param_offload=true", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=gae critic.fsdp.param_offload=true critic.fsdp.optimizer_offload=true", None),
    ],
)
def test_saved_adapters_and_a_critic_on_the_device_are_said(keys: str, named: str | None, tmp_path: Path) -> None:
    """FSDP has no ``grad_offload``: gradients leave with the parameters (``offload_fsdp2_model_to_cpu``)."""
    found = [one.key for one in read(tmp_path, keys).not_modelled]
    assert found == ([named] if named else [])


def test_a_job_is_not_written_for_another_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, settings = read(tmp_path).required()
    assert "engine" in written("slime", scenario, settings).unsaid
    assert "engine" not in written("automodel", scenario, settings).unsaid
    assert main(["job", str(tmp_path / "run.sh"), "--as", "slime"]) == 2
    others = "automodel, verl, verl-sft, nemo-rl, skyrl, skyrl-sft, or"
    assert f"for engine 'megatron', and engine is 'fsdp2': choose one of {others}" in capsys.readouterr().err
    assert main(["job", str(tmp_path / "run.sh"), "--as", "verl"]) == 0
    assert main(["job", str(tmp_path / "run.sh"), "--as", "automodel"]) == 0


@pytest.mark.parametrize("version", ["0.9.1", "2026-08-20", None, "before-2026-08-20"])
def test_the_micro_batch_that_reduces_gradients_depends_on_the_version(version: str | None, tmp_path: Path) -> None:
    """``_gradient_sync_context`` in transformer_impl.py: 0.9.0 and 1dda039b have no key for it, 0.9.1 has."""
    key = f"{FSDP}.use_no_sync_for_gradient_accumulation"
    job = read(tmp_path, version=version)
    bounds = {one.key: one.bound_bytes for one in job.not_modelled}
    scenario = job.required()[0]
    assert scenario.state.defer_fsdp_grad_sync is (version == "2026-08-20")
    is_known = version in ("0.9.1", "2026-08-20")
    assert bounds == ({} if is_known else {key: 4 * scenario.architecture.num_parameters})
    assert not read(tmp_path, f"{key}=False", version=version).not_modelled
    one = read(tmp_path, "trainer.n_gpus_per_node=64", version=version)
    assert one.required()[0].num_microbatches == 1 and not one.not_modelled


@pytest.mark.parametrize(("workers", "is_named"), [("disable", False), ("enable", True), ("auto", True)])
def test_workers_from_before_the_engines_are_named(workers: str, is_named: bool, tmp_path: Path) -> None:
    job = read(tmp_path, f"+trainer.use_legacy_worker_impl={workers}", version="0.9.1")
    assert [one.effect for one in job.not_modelled] == ["either"] * is_named


SFT = (
    "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B engine=fsdp "
    "data.use_dynamic_bsz=False data.max_length=4096 data.train_batch_size=16 data.micro_batch_size_per_gpu=1 "
)


def test_the_sft_trainer_has_the_same_engine(tmp_path: Path) -> None:
    job = read_job(SFT + "engine.strategy=fsdp2 engine.model_dtype=bf16 optim.lr=1e-5", tmp_path, version="0.9.1")
    scenario, settings = job.required()
    assert job.framework == "verl-sft-fsdp" and settings == MemorySettings(**WHOLE_LAYERS)  # type: ignore[arg-type]
    assert scenario == Scenario.of(
        "qwen3-8b",
        seq_length=4096,
        num_microbatches=4,
        engine="fsdp2",
        layout=Layout(data_parallel_size=4),
        state=TrainingState(**(STATE | {"fp32_sharded_params": False})),  # type: ignore[arg-type]
    )
    assert not job.not_modelled
    job = read_job(SFT.replace("per_gpu=1", "per_gpu=2"), tmp_path, version="0.9.1")
    assert not job.not_modelled
    scenario = job.required()[0]
    assert (scenario.seq_length, scenario.packed_sequences, scenario.state.fsdp_version) == (8192, 2, 1)


@pytest.mark.parametrize(
    ("keys", "tokens", "passes"),
    [
        ("", 4096, 16),
        (f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=4096", 8192, 2),
    ],
)
def test_ranks_that_exchange_heads_share_rows(keys: str, tokens: int, passes: int, tmp_path: Path) -> None:
    """A row has the budgets of both ranks (``prepare_micro_batches`` in verl/workers/engine/utils.py, 0.9.1)."""
    scenario, _ = read(tmp_path, f"{FSDP}.ulysses_sequence_parallel_size=2 {keys}").required()
    layout = scenario.layout
    assert (layout.context_parallel_size, layout.data_parallel_size, scenario.ranks_of_shards) == (2, 4, 8)
    assert (scenario.seq_length, scenario.num_microbatches) == (tokens, passes)
    assert scenario.state.cp_comm_type == "a2a"


def test_fsdp_turbo_has_ranks_and_checkpoints_of_its_own_keys(tmp_path: Path) -> None:
    section = f"{FSDP}.turbo_config"
    sizes = ["fully_shard_parallel_size=4", "expert_parallel_size=2", "ulysses_parallel_size=2"]
    keys = " ".join(f"{section}.distributed.{size}" for size in sizes)
    # Hydra's own grammar, which is no YAML.
    keys += f" '+{section}.distributed.fsdp_plan.apply_modules={{model.layers.\\{{*\\}}:{{}},lm_head:{{}}}}'"
    path = read(tmp_path, f"{ACTOR}.strategy=fsdp_turbo {keys} +{section}.memory.recompute=True").path
    scenario, settings = Job.read(path, version="0.9.1", fields_only=True).required()
    assert (scenario.layout.context_parallel_size, scenario.state.dp_replicate_size) == (2, 2)
    assert settings.recompute_granularity == "full"
    assert Job.read(path, version="0.9.1").scenario is None  # its memory is not predicted
    with pytest.raises(ValueError, match=rf"line 1: {section}.memory.recompute is 'maybe', must be true or false"):
        read(tmp_path, f"{ACTOR}.strategy=fsdp_turbo +{section}.memory.recompute=maybe")
