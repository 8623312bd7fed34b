"""Settings to begin with: plain Megatron, and what recipes of frameworks set, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memlab.config.layout import Layout
from memlab.config.option import EngineName
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.building import settings_of, state_of
from memlab.jobs.entries import Entries
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.registry import FRAMEWORKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Memory settings and training state that belong together."""

    settings: MemorySettings = field(default_factory=MemorySettings)
    state: TrainingState = field(default_factory=TrainingState)
    source: str = ""
    """The file of the framework whose keys these are, at the commit at which it was read. Where it has no key, memlab's
    table of the framework's defaults decides."""
    engine: EngineName | None = None
    """The only engine that has it; None if every engine does."""

    @classmethod
    def of_job(cls, framework_name: str, source: str, **keys: Any) -> Preset:
        """Returns what a job with these keys has, read by the tables with which jobs are read."""
        framework, entries = FRAMEWORKS[framework_name], Entries()
        for key, value in keys.items():
            entries.add(key, value, None)
        version = framework.versions[0] if framework.versions else None
        reading = Reading(path=Path(source), entries=entries, version=version)
        framework.read(reading)
        state = state_of(reading, Layout())
        return cls(settings=settings_of(reading), state=state, source=source, engine=framework.engine)

    def on(self, scenario: Scenario) -> Preset:
        """Returns the preset for a lab: with the default attention backend if the scenario refuses the preset's."""
        backend = self.state.attention_backend
        try:
            replace(scenario, state=TrainingState(attention_backend=backend))
        except ValueError:
            source = f"{self.source}, but with attention_backend auto: this lab's model cannot run {backend} attention"
            return replace(self, state=replace(self.state, attention_backend="auto"), source=source)
        return self


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_VERL = "actor_rollout_ref.actor.megatron"

PRESETS = {
    "plain": Preset(),
    "verl: GRPO of Qwen3-30B-A3B": Preset.of_job(
        "verl",
        "verl 1f4a45bc, examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh",
        **{f"{_VERL}.{part}_offload": True for part in ("param", "grad", "optimizer")},
        **{f"{_VERL}.override_transformer_config.{name}": value for name, value in _FULL.items()},
    ),
    "slime: GRPO of Qwen3-30B-A3B": Preset.of_job(
        "slime",
        "slime 128cb0e7, scripts/run-qwen3-30B-A3B.sh",
        **_FULL,
        **dict.fromkeys(("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), True),
        use_precision_aware_optimizer=True,
        attention_backend="flash",
        colocate=True,
    ),
    "NeMo-RL: GRPO, defaults": Preset.of_job("nemo-rl", "NeMo-RL 00294d9b, examples/configs/grpo_math_1B.yaml"),
    "SkyRL: Megatron, defaults": Preset.of_job(
        "skyrl", "SkyRL 898eb390, skyrl/train/config/megatron_config/policy.yaml"
    ),
    "NeMo Automodel: phi-4 on SQuAD": Preset.of_job(
        "automodel",
        "NeMo Automodel 36044ad3, examples/llm_finetune/phi/phi_4_squad.yaml",
        **{"model.torch_dtype": "bf16", "distributed.activation_checkpointing": True},
    ),
}
"""By the words that the panel shows. What concerns the layout or the workload is left out."""
