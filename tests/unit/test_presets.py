"""Presets: each is what its framework's file or defaults set, fits every model that memlab knows, and comes into the controls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memlab.config.architectures import ARCHITECTURES
from memlab.config.families import FAMILIES
from memlab.config.model_restrictions import check_on_model
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.views.panel.panel import panel
from memlab.views.panel.presets import PRESETS

from .fake_lab import FakeLab

MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_its_source_and_every_model_takes_it(name: str) -> None:
    preset = PRESETS[name]
    framework = name.partition(":")[0]
    assert name == "plain" or preset.source.startswith(framework), "framework and file"
    for architecture in ARCHITECTURES.values():
        if architecture.multi_latent_attention and architecture.rope_type == "rope" and preset.state.apply_rope_fusion:
            continue  # Megatron-Core refuses it
        has_flash = architecture.softmax_type == "vanilla" and architecture.window_size is None
        has_flash &= architecture.has_kernel_of_flash_attn_2
        if preset.state.attention_backend == "flash" and not has_flash:
            continue  # Transformer Engine has no such kernel, or memlab does not predict it
        if preset.engine != "fsdp2" and architecture.only_in_transformers:
            continue  # memlab has it with FSDP2 only
        if preset.engine == "fsdp2" and not FAMILIES[architecture.family].fsdp2:
            continue  # the engine does not build it
        scenario = Scenario.of(architecture, state=preset.state, engine=preset.engine or "megatron")
        check_on_model(preset.settings, scenario)


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        ("verl", " ".join([
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=phi-4",
            *(f"{MEGATRON}.{part}_offload=True" for part in ("param", "grad", "optimizer")),
            f"{MEGATRON}.override_transformer_config.recompute_granularity=full",
            f"{MEGATRON}.override_transformer_config.recompute_method=uniform",
            f"{MEGATRON}.override_transformer_config.recompute_num_layers=1",
        ])),
        ("NeMo-RL", "policy: {model_name: phi-4, megatron_cfg: {enabled: true}}\ngrpo: {num_prompts_per_step: 8}"),
        ("SkyRL", "uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=phi-4"),
    ],
)  # fmt: skip
def test_a_preset_is_what_a_job_with_these_keys_has(framework: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / ("config.yaml" if text.startswith("policy") else "run.sh")
    path.write_text(text)
    version = "2026-08-20" if framework == "verl" else None
    scenario, settings = Job.read(path, format_name=framework.lower(), version=version).required()
    preset = next(preset for name, preset in PRESETS.items() if name.startswith(framework))
    names = [name for name in options_of(TrainingState) if "moe_" in name and not name.startswith("lora_")]
    of_experts = {name: getattr(TrainingState(), name) for name in names}
    of_dense_model = replace(preset.state, **of_experts)  # phi-4 has no router
    assert (preset.settings, of_dense_model) == (settings, scenario.state)


def test_a_preset_sets_the_controls_which_name_it_until_they_change() -> None:
    shown = panel(FakeLab())
    choice, state = shown.presets.choice, shown.state
    assert choice.value == "plain"
    name = next(name for name in PRESETS if name.startswith("slime"))
    choice.value = name
    assert state.settings == PRESETS[name].settings
    assert state.selection[0].state == PRESETS[name].state
    assert PRESETS[name].source in state.notice
    state.edit(offload_optimizer=False)
    assert choice.value == "choose a preset"
    choice.value = "plain"
    assert (state.settings, state.selection[0].state) == (MemorySettings(), TrainingState())
    shown.close()


def test_a_lab_that_cannot_run_a_preset_s_attention_takes_the_preset_without_it() -> None:
    lab = FakeLab()
    lab.scenario = replace(lab.scenario, dtype="fp32")
    shown = panel(lab)
    name = next(name for name in PRESETS if name.startswith("verl"))
    shown.presets.choice.value = name
    assert shown.presets.choice.value == name
    assert shown.state.settings == PRESETS[name].settings
    assert shown.state.selection is not None
    assert shown.state.selection[0].state == replace(PRESETS[name].state, attention_backend="auto")
    assert "attention_backend auto" in shown.state.notice
    shown.close()


def test_a_framework_s_preset_is_not_named_by_who_only_chose_the_same_settings() -> None:
    shown = panel(FakeLab())
    choice, state = shown.presets.choice, shown.state
    name = next(name for name in PRESETS if name.startswith("SkyRL"))
    full = PRESETS[name].settings
    state.edit(**full.changed())
    assert state.settings == full
    assert choice.value == "choose a preset"
    choice.value = name
    assert choice.value == name, "it was chosen"
    shown.close()
