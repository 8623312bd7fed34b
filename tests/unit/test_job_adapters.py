"""Adapters in job files: each framework's own keys and defaults, what memlab has none of, and what ``--as`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.config.lora import CANONICAL, LINEARS, LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.lab.job_phases import _gathered_bytes
from tests.unit.job_files import read_job

PPO = "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B "
ACTOR = "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=true "
GRPO = "python examples/run_grpo.py policy.model_name=Qwen/Qwen3-8B policy.megatron_cfg.enabled=true "
SKYRL = "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-8B "
RECIPE = "torchrun --nproc_per_node=1 run_recipe.py --recipe qwen3_8b_peft_1gpu_h100_bf16_config "
SWIFT = "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-8B --max_length 2048 --tuner_type lora "
VERL_LORA = "actor_rollout_ref.model.lora"
CANONICAL_OF_SKYRL = "trainer.policy.megatron_config.lora_config.lora_type=canonical_lora"
OF_PARTS_OF_VERL = f"{VERL_LORA}.target_modules='[linear_q,linear_k,linear_v]' +{VERL_LORA}.normalize_moe_lora=true"
CANONICAL_OF_BRIDGE = (
    "peft._target_=megatron.bridge.peft.canonical_lora.CanonicalLoRA "
    "peft.target_modules='[linear_proj,linear_fc1_gate,linear_fc1_up]'"
)
LATENT = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj")
SPLIT = "--tensor_model_parallel_size 2 --sequence_parallel true --expert_tensor_parallel_size 1"
OF_SWIFT: Any = {"library": "mcore_bridge", "enable_input_require_grads": True}
PEFT, LORA = "policy.megatron_cfg.peft", "trainer.policy.model.lora"


@pytest.mark.parametrize(
    ("command", "lora"),
    [
        (PPO + ACTOR, None),
        (f"{PPO}{ACTOR}actor_rollout_ref.model.lora.rank=16", LoRA(rank=16)),
        (
            PPO
            + ACTOR
            + " ".join(
                f"actor_rollout_ref.model.lora.{each}"
                for each in ("rank=64", "alpha=128", "target_modules='[linear_qkv]'")
            ),
            LoRA(rank=64, alpha=128, target_modules=("linear_qkv",)),
        ),
        (f"{GRPO}{PEFT}.dim=8 {PEFT}.target_modules='[linear_qkv]'", None),
        (
            f"{GRPO}{PEFT}.enabled=true {PEFT}.dim=128 {PEFT}.alpha=256 {PEFT}.target_modules='[linear_proj]'",
            LoRA(rank=128, alpha=256, dropout_position="post", target_modules=("linear_proj",)),
        ),
        (f"{GRPO}{PEFT}.enabled=true", LoRA(rank=8, dropout_position="post", target_modules=())),
        (
            f"{GRPO}{PEFT}.enabled=true {PEFT}.exclude_modules='[output_layer]'",
            LoRA(rank=8, dropout_position="post", target_modules=(), exclude_modules=("output_layer",)),
        ),
        (f"{SKYRL}{LORA}.rank=32", LoRA(rank=32, alpha=16)),
        (f"{SKYRL}{LORA}.rank=0", None),
        (f"{SKYRL}{LORA}.rank=8 {CANONICAL_OF_SKYRL}", LoRA(rank=8, alpha=16, target_modules=CANONICAL)),
        (
            f"{PPO.replace('8B', '30B-A3B')}{ACTOR}{VERL_LORA}.rank=16 {VERL_LORA}.type=canonical_lora {OF_PARTS_OF_VERL}",
            LoRA(rank=16, target_modules=CANONICAL[:3], normalize_moe_lora=True),
        ),
        (
            f"{RECIPE}peft.share_expert_adapters=false {CANONICAL_OF_BRIDGE}",
            LoRA(rank=8, alpha=16, target_modules=CANONICAL[3:6], share_expert_adapters=False),
        ),
        (RECIPE, LoRA(rank=8, alpha=16, target_modules=("linear_qkv", "linear_proj"))),
        (
            f"{RECIPE}peft.dim=64 peft.dropout=0.1",
            LoRA(rank=64, alpha=16, dropout=0.1, target_modules=("linear_qkv", "linear_proj")),
        ),
        (SWIFT, LoRA(rank=8, dropout=0.05, library="mcore_bridge", enable_input_require_grads=True)),
        (
            f"{SWIFT}--lora_rank 16 --lora_dropout 0 --target_modules linear_qkv linear_proj",
            LoRA(rank=16, target_modules=LINEARS[:2], library="mcore_bridge", enable_input_require_grads=True),
        ),
        (
            SWIFT.replace("Qwen/Qwen3-8B", "moonshotai/Moonlight-16B-A3B-Instruct"),
            LoRA(rank=8, dropout=0.05, target_modules=(*LINEARS, *LATENT), **OF_SWIFT),
        ),
        (
            SWIFT.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
            LoRA(rank=8, dropout=0.05, target_modules=(*LINEARS, "in_proj", "out_proj"), **OF_SWIFT),
        ),
        (
            f"{SWIFT.replace('Qwen/Qwen3-8B', 'moonshotai/Moonlight-16B-A3B')}{SPLIT}",
            LoRA(rank=8, dropout=0.05, target_modules=(*LINEARS, *LATENT), **OF_SWIFT),
        ),
        (SWIFT.replace("lora", "full"), None),
        (f"{RECIPE.replace('peft_1gpu', 'sft_4gpu').replace('node=1', 'node=4')}peft_scheme=lora", None),
    ],
)
def test_adapters_are_read_with_the_framework_s_defaults(command: str, lora: LoRA | None, tmp_path: Path) -> None:
    job = read_job(command, tmp_path)
    assert job.scenario is not None and job.scenario.state.lora == lora
    assert not [one for one in job.not_modelled if "adapters" in one.reason]


@pytest.mark.parametrize(
    ("command", "key", "what"),
    [
        (
            f"{PPO}{ACTOR}actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.type=dora",
            "actor_rollout_ref.model.lora.rank",
            "no adapters of the kind dora",
        ),
        (f"{GRPO}{PEFT}.enabled=true {PEFT}.target_modules='[router]'", f"{PEFT}.enabled", "of other linears"),
        (
            f"{PPO}{ACTOR}{VERL_LORA}.rank=16 {VERL_LORA}.type=canonical_lora",
            f"{VERL_LORA}.rank",
            "no canonical adapters of linear_qkv, linear_proj, linear_fc1, linear_fc2, on which Megatron-Bridge fails",
        ),
        (
            f"{SKYRL}{LORA}.rank=8 {LORA}.target_modules='[linear_q]'",
            f"{LORA}.rank",
            "no adapters of parts of linears, which only the canonical form of Megatron-Bridge has",
        ),
        (f"{RECIPE}peft.experts_shared_outer_loras=true", "peft", "no half of an adapter that experts share"),
        (f"{SWIFT}--expert_tensor_parallel_size 2", "tuner_type", "of ms-swift under expert tensor parallelism"),
        (f"{SWIFT}--target_modules all-linear all-router", "tuner_type", "no adapters of other linears"),
        (SWIFT.replace("lora", "longlora"), "tuner_type", "no adapters of the kind longlora"),
    ],
)
def test_adapters_that_memlab_has_none_of_are_named_and_bounded(
    command: str, key: str, what: str, tmp_path: Path
) -> None:
    job = read_job(command, tmp_path)
    (row,) = [one for one in job.not_modelled if one.key == key]
    assert job.scenario is not None and job.scenario.state.lora is None
    assert row.effect == "less" and what in row.reason and row.bound_bytes


@pytest.mark.parametrize(
    "command", [f"{RECIPE}peft.dim=0", f"{SWIFT}--lora_rank 0", f"{GRPO}{PEFT}.enabled=true {PEFT}.dim=0"]
)
def test_a_rank_of_zero_is_no_rank_of_adapters(command: str, tmp_path: Path) -> None:
    """Megatron-Bridge divides by it, and mcore-bridge refuses it; verl and SkyRL add no adapters."""
    job = read_job(command, tmp_path)
    assert "must be a whole number of at least 1" in str(job.not_supported or job.cannot_start)


def test_keys_of_adapters_have_no_effect_without_adapters(tmp_path: Path) -> None:
    given = "--lora_dtype float16 --target_regex x --modules_to_save head --lora_bias all"
    job = read_job(f"{SWIFT.replace('lora', 'full')}{given}", tmp_path)
    assert not job.not_modelled
    assert {"lora_dtype", "target_regex", "modules_to_save", "lora_bias"} <= job.without_effect.keys()


@pytest.mark.parametrize(
    ("framework", "others", "lines"),
    [
        ("bridge", {}, ("  _target_: megatron.bridge.peft.lora.LoRA", "  dim: 16")),
        ("verl", {}, ("actor_rollout_ref.model.lora.rank=16",)),
        ("nemo-rl", {}, ("      enabled: true", "      dim: 16")),
        ("skyrl", {}, (f"{LORA}.rank=16",)),
        (
            "ms-swift",
            {"library": "mcore_bridge", "enable_input_require_grads": True},
            ("--tuner_type lora", "--lora_rank 16"),
        ),
        ("megatron-lm", {}, ()),
    ],
)
def test_adapters_are_written_or_named(framework: str, others: dict[str, Any], lines: tuple[str, ...]) -> None:
    scenario = Scenario.of("qwen3-8b", state=TrainingState(lora=LoRA(rank=16, **others)))
    text = written(framework, scenario, MemorySettings())
    assert all(any(line in one for one in text.lines) for line in lines), text.lines
    assert ("lora_rank" in text.unsaid) == (framework == "megatron-lm")
    parts = Scenario.of("qwen3-8b", state=TrainingState(lora=LoRA(rank=16, target_modules=CANONICAL)))
    unsaid = written(framework, parts, MemorySettings()).unsaid
    assert ("lora_target_modules" in unsaid) == (framework in ("megatron-lm", "ms-swift", "nemo-rl"))
    all_linears = Scenario.of("qwen3-8b", state=TrainingState(lora=LoRA(rank=16, target_modules=())))
    unsaid = written(framework, all_linears, MemorySettings()).unsaid
    assert ("lora_target_modules" in unsaid) == (framework in ("megatron-lm", "ms-swift"))


@pytest.mark.parametrize(
    ("command", "sends_adapters", "is_told"),
    [
        (f"{SKYRL}{LORA}.rank=32", False, False),
        (f"{SKYRL}{LORA}.rank=32 trainer.policy.megatron_config.lora_config.merge_lora=false", True, False),
        (f"{SKYRL}trainer.policy.megatron_config.lora_config.merge_lora=false", False, False),
        (f"{PPO}{ACTOR}actor_rollout_ref.model.lora.rank=16", False, True),
        (f"{PPO}{ACTOR}actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.merge=true", False, False),
    ],
)
def test_what_a_weight_sync_sends_of_adapters(
    command: str, sends_adapters: bool, is_told: bool, tmp_path: Path
) -> None:
    job = read_job(command, tmp_path)
    assert job.rollout is not None and job.rollout.sends_adapters == sends_adapters
    assert any("later ones only the adapters" in warning for warning in job.warnings) == is_told
    if job.scenario is not None and sends_adapters:  # the largest is that of linear_fc1, of rank 32 and 24,576 rows
        assert _gathered_bytes(job.scenario, job.rollout, None) == 2 * 32 * 24_576


@pytest.mark.parametrize(("letter", "is_on"), [("n", False), ("f", False), ("Y", True), ("t", True)])
def test_a_letter_is_a_truth_for_ms_swift(letter: str, is_on: bool, tmp_path: Path) -> None:
    """As ``string_to_bool`` of transformers 5.24 takes it."""
    flags = f"--tensor_model_parallel_size 2 --sequence_parallel {letter}"
    (tmp_path / "run.sh").write_text(f"NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-8B --max_length 2048 {flags}\n")
    assert Job.read(tmp_path / "run.sh").required()[0].layout.sequence_parallel is is_on
