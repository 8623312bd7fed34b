"""Settings to begin with: plain Megatron, and what recipes of frameworks set, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field

from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState

_FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Memory settings and training state that belong together."""

    settings: MemorySettings = field(default_factory=MemorySettings)
    state: TrainingState = field(default_factory=TrainingState)
    source: str = ""
    """The file of the framework that sets them, at the commit at which it was read."""


PRESETS = {
    "plain": Preset(),
    "verl: GRPO of Qwen3-30B-A3B": Preset(
        settings=MemorySettings(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            offload_parameters=True,
            offload_gradients=True,
            offload_optimizer=True,
        ),
        source="verl 1f4a45bc, examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh",
    ),
    "slime: GRPO of Qwen3-30B-A3B": Preset(
        settings=_FULL,
        state=TrainingState(
            optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True, use_precision_aware_optimizer=True
        ),
        source="slime 128cb0e7, scripts/run-qwen3-30B-A3B.sh",
    ),
    "NeMo-RL: GRPO, defaults": Preset(
        state=TrainingState(
            use_precision_aware_optimizer=True,
            grad_reduce_in_bf16=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        source="NeMo-RL 00294d9b, examples/configs/grpo_math_1B.yaml",
    ),
    "SkyRL: Megatron, defaults": Preset(
        settings=_FULL, source="SkyRL 898eb390, skyrl/train/config/megatron_config/policy.yaml"
    ),
}
"""By the words that the panel shows. What concerns the layout, the workload or inference is left out."""
