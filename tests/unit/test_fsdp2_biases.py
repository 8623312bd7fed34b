"""What cuBLASLt keeps for torch's products with a bias, against allocators of H200s."""

from __future__ import annotations

import pytest

from memlab import Lab, MemorySettings
from tests.unit.measured import assert_fsdp2_predicted, measured_by_name

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
ROWS = measured_by_name("h200_plain_fsdp_combined")
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = MemorySettings(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, selective_ac=True
)


@pytest.mark.parametrize(
    "name",
    [
        "model=glm-4-9b num_layers=8 seq_length=4096 num_ranks=8 one_process",
        "model=glm-4-9b num_layers=8 seq_length=8192 num_ranks=8 checkpointing one_process fp32_sharded_params",
    ],
)
def test_between_steps_and_reserved_is_what_an_h200_had_to_the_byte(name: str) -> None:
    assert_fsdp2_predicted(ROWS[name], start=0.0, reserved=0.0)


@pytest.mark.parametrize(("model", "has_biases"), [("qwen2.5-tiny", True), ("qwen3-dense-tiny", False)])
def test_each_thread_that_adds_biases_has_a_mebibyte(model: str, has_biases: bool) -> None:
    """Forward has one; backward has another under checkpoints, but for those that keep the products with a bias."""
    kept = []
    with Lab(model, seq_length=64, dtype="bf16", engine="fsdp2", backend="simulated") as lab:
        for settings in (MemorySettings(), FULL, SELECTIVE, MemorySettings()):
            lab.step(settings)
            kept.append(lab.step(settings).static_bytes)
    assert [each - kept[0] for each in kept] == [0, has_biases * 2**20, 0, 0]
