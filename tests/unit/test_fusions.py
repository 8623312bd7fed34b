"""Fused accumulation of gradients and the unfused activation: the same numbers, and the memory of plain Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.backends import cuda
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.transformer_engine_caches import simulated_unused_gradients
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.live import FULL, gradients_of_step, offload, recompute

pytestmark = pytest.mark.versions

FUSED = TrainingState(gradient_accumulation_fusion=True)
BOTH = TrainingState(gradient_accumulation_fusion=True, bias_activation_fusion=False)
SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64}
OF_KIND = {
    "qwen3-moe-tiny": [recompute("moe_act", "core_attn"), offload("expert_fc1", "moe_act")],
    "phi-4-tiny": [recompute("mlp"), offload("qkv_linear", "core_attn", "attn_proj")],
    "qwen3-dense-tiny": [],  # its embedding is also its output layer
}


@pytest.mark.parametrize(
    "name", ["qwen3-moe-tiny", pytest.param("phi-4-tiny", marks=pytest.mark.slow), "qwen3-dense-tiny"]
)
def test_every_setting_has_the_numbers_of_the_plain_state_and_the_predicted_bytes(name: str) -> None:
    settings = [MemorySettings(), FULL, *OF_KIND[name]]
    with Lab(name, backend="cpu", **SMALL) as lab:
        loss, exact = gradients_of_step(lab, MemorySettings(), warm_up=False)
    with Lab(name, backend="cpu", **SMALL, state=BOTH) as lab:
        real = [lab.step(each) for each in settings]
        recomputed = gradients_of_step(lab, FULL)[1]
        kept = gradients_of_step(lab, MemorySettings())[1]
    assert all(map(torch.equal, recomputed, kept))
    torch.testing.assert_close(kept, exact, rtol=0.05, atol=2e-3)  # unfused, each gradient is rounded to bf16
    with Lab(name, backend=of_the_cpu_backend(), **SMALL, state=BOTH) as lab:
        fake = [lab.step(each) for each in settings]
        num_weights = sum(1 for _ in inside(lab).model.engine.live.parameters())
    for one, other in zip(real, fake, strict=True):
        assert one.loss == loss
        # torch's AdamW counts its steps in a tensor of 4 bytes a weight.
        assert one.static_bytes - other.static_bytes == 4 * num_weights
        for figure in ("activation_peak_bytes", "residual_bytes", "offloaded_bytes_by_module", "without_effect"):
            assert getattr(one, figure) == getattr(other, figure), (figure, one.settings)


@pytest.mark.parametrize(
    ("name", "num_layers", "shapes", "activation_bytes"),
    [
        # An H200 had 0.67 and 1.71 GB more at rest with the fusion, and peaks of 0.30 and 1.17 GB more with the unfused
        # activation: plain Megatron-Core 0.16.1, TE 2.12.0, one sequence of 4096 tokens.
        ("qwen3-30b-a3b", 2, [(151936, 2048), (5120, 2048), (2048, 4096), (1536, 2048), (2048, 768)], 0.30e9),
        ("phi-4", 4, [(100352, 5120), (7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920)], 1.17e9),
    ],
)
def test_predictions_are_what_plain_megatron_needed_more(
    name: str, num_layers: int, shapes: list[tuple[int, int]], activation_bytes: float
) -> None:
    records = []
    for state in (TrainingState(), BOTH):
        with Lab(name, num_layers=num_layers, seq_length=4096, state=state, backend="simulated") as lab:
            records.append(lab.step())
    plain, both = records
    assert both.static_bytes - plain.static_bytes == sum(2 * rows * columns for rows, columns in shapes)
    more_bytes = both.activation_peak_bytes - plain.activation_peak_bytes
    assert more_bytes == pytest.approx(activation_bytes, abs=0.005e9)


def test_unused_gradients_are_workspace_once_for_every_shape_and_leave_with_the_model(
    open_lab: Callable[..., Lab],
) -> None:
    lab = open_lab("qwen3-moe-tiny", **SMALL, state=FUSED)
    record = lab.step()
    # Query, key and value together, the attention's projection, the experts' two, and the output layer.
    shapes = {(256, 128), (128, 128), (128, 64)}
    assert {key[:2] for key in simulated_unused_gradients} == shapes
    assert record.residual_bytes == 0
    lab.set_state(TrainingState())
    assert not simulated_unused_gradients


def test_a_gpu_without_apex_refuses_the_fusion_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "check_allocator", lambda allocator: None)
    monkeypatch.setattr(cuda, "check_environment", lambda backend: None)
    cuda.check(Scenario.of("phi-4-tiny", seq_length=64))
    with pytest.raises(ValueError, match=r"needs Apex' module fused_weight_gradient_mlp_cuda .*: install") as error:
        cuda.check(Scenario.of("phi-4-tiny", seq_length=64, state=FUSED))
    assert "\n" not in str(error.value)
