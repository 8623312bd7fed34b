"""Gradients, main parameters and moments in fewer bits: values on the CPU, bytes as on an H200, between steps and in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import memlab.lab.lab
from memlab.backends.fused_adam import FusedAdam, split_remainder, with_remainder
from memlab.backends.simulated import of_labs_before_0_4, of_the_cpu_backend
from memlab.backends.simulated_version import imitating
from memlab.config import without_effect
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.lab.lab import Lab
from memlab.record.transfer import GROUPS
from tests.unit.inside import inside
from tests.unit.live import random_settings

pytestmark = pytest.mark.versions

NONE = MemorySettings()
ALL_AWAY = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
BF16_GRADIENTS = TrainingState(grad_reduce_in_bf16=True)
PRECISION_AWARE = TrainingState(use_precision_aware_optimizer=True)


def moments(dtype: Any, **others: Any) -> TrainingState:
    return replace(PRECISION_AWARE, grad_reduce_in_bf16=True, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **others)


STATES = [
    BF16_GRADIENTS,
    PRECISION_AWARE,
    moments("bf16", main_grads_dtype="bf16"),
    moments("fp16", main_params_dtype="fp16"),
    replace(PRECISION_AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8"),
]


def steps_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, attribute: str, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        gradient = torch.randn(parameter.shape, generator=generator) * 0.01
        setattr(parameter, attribute, gradient.to(parameter.dtype) if attribute == "grad" else gradient)
        optimizer.step()


def start(dtype: torch.dtype) -> torch.nn.Parameter:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    return torch.nn.Parameter(values.to(dtype))


OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def torchs_weights(num_steps: int) -> torch.Tensor:
    weights = start(torch.float32)
    steps_of(torch.optim.AdamW([weights], **OPTIONS), weights, "grad", num_steps)
    return weights.detach()


def main_parameters(num_steps: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains bf16 parameters whose main parameters the optimizer holds; returns both, the latter in fp32."""
    weights = start(torch.bfloat16)
    optimizer = FusedAdam([weights], **OPTIONS, master_weights=True, use_decoupled_grad=True, **options)
    steps_of(optimizer, weights, "decoupled_grad", num_steps)
    stored = optimizer.state[weights]["master_param"]
    main = with_remainder(weights.detach(), stored) if stored.dtype == torch.int16 else stored
    if stored.dtype == torch.float16:
        main = stored.float() * optimizer._scales[weights]["master_param"]
    return weights.detach(), main


def test_fp32_moments_train_as_torchs_adamw_does() -> None:
    weights = start(torch.float32)
    steps_of(FusedAdam([weights], **OPTIONS), weights, "grad", 20)
    expected = torchs_weights(20)
    assert not torch.equal(expected, start(torch.float32))
    torch.testing.assert_close(weights.detach(), expected, rtol=1e-6, atol=5e-6)


def test_remainders_hold_the_fp32_main_parameters_exactly() -> None:
    whole_weights, whole = main_parameters(20)
    weights, main = main_parameters(20, store_param_remainders=True)
    assert torch.equal(main, whole)
    assert not torch.equal(main, weights.float())
    torch.testing.assert_close(weights.float(), whole_weights.float(), rtol=2**-8, atol=0)
    torch.testing.assert_close(main, torchs_weights(20), rtol=1e-6, atol=5e-6)


def test_a_remainder_is_what_bf16_lacks_for_every_bit_pattern() -> None:
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    high = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3FFF, 0x7F7E, -0x8000, -0x4080, -0x4001], dtype=torch.int32)
    weights = ((high[:, None] << 16) | low).flatten().view(torch.float32)
    parameter, remainder = torch.empty_like(weights, dtype=torch.bfloat16), torch.empty_like(weights, dtype=torch.int16)
    split_remainder(weights, parameter, remainder)
    assert torch.equal(with_remainder(parameter, remainder).view(torch.int32), weights.view(torch.int32))
    assert torch.all((parameter.float() - weights).abs() <= weights.abs() * 2**-8 + 2**-133)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.bfloat16, 0.002), (torch.float16, 1e-3), (torch.uint8, 0.02)], ids=str
)
def test_moments_of_fewer_bits_train_nearly_the_same(dtype: torch.dtype, error: float) -> None:
    # Adam moves each weight by about lr per step: 20 steps by at most 0.02.
    _, main = main_parameters(20, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, store_param_remainders=True)
    difference = (main - torchs_weights(20)).abs()
    assert 0 < difference.max() < error
    assert difference.mean() < error / 10


def test_fp16_main_parameters_are_scaled_to_their_largest_value() -> None:
    _, main = main_parameters(20, master_weight_dtype=torch.float16, store_param_remainders=True)
    expected = torchs_weights(20)
    torch.testing.assert_close(main, expected, rtol=0.01, atol=1e-4 * float(expected.abs().max()))


def test_two_bf16_moments_that_are_updated_in_place_are_those_of_the_copies_rounded() -> None:
    # The kernel computes in fp32 either way, and only what is stored is rounded.
    both = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    copied, stored = (start(torch.float32) for _ in range(2))
    with imitating(Versions(transformer_engine="2.12")):
        old = FusedAdam([copied], **OPTIONS, **both)
    with imitating(Versions(transformer_engine="2.13")):
        new = FusedAdam([stored], **OPTIONS, **both)
    for optimizer, weights in ((old, copied), (new, stored)):
        steps_of(optimizer, weights, "grad", 20)
    assert torch.equal(copied, stored)
    for name in ("exp_avg", "exp_avg_sq"):
        assert new.state[stored][name].dtype == torch.bfloat16
        assert torch.equal(new.state[stored][name], old.state[copied][name])


@pytest.mark.parametrize(
    ("state", "version", "copies"),
    [
        (moments("bf16"), "2.12", True),
        (moments("bf16"), "2.13", False),
        (moments("bf16"), "2.16", False),
        (replace(moments("bf16"), exp_avg_dtype="fp32"), "2.16", True),
        (moments("fp16"), "2.16", True),
        (moments("fp8"), "2.16", True),
        (moments("bf16", main_params_dtype="fp16"), "2.16", True),
        (moments("fp32"), "2.16", False),
    ],
    ids=str,
)
def test_only_two_bf16_moments_need_no_copies_and_only_since_transformer_engine_2_13(
    state: TrainingState, version: str, copies: bool
) -> None:
    versions = Versions(transformer_engine=version)
    with Lab("phi-4-tiny", num_layers=2, seq_length=16, state=state, versions=versions, backend="simulated") as lab:
        record = lab.step()
    assert record.timeline is not None
    added = record.timeline.peak_bytes(phases=["optimizer"]) - record.static_bytes
    assert (added > record.peak_by_category["parameters"]) == copies


@pytest.mark.parametrize(
    "state", [STATES[-1], *(pytest.param(one, marks=pytest.mark.slow) for one in STATES[:-1])], ids=str
)
def test_settings_change_no_loss_and_leave_nothing_in_any_precision(
    state: TrainingState, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab(num_layers=2, seq_length=16, state=state)
    first = lab.step(NONE)
    rng = random.Random(str(state))
    for _ in range(4):
        settings = random_settings(lab, rng)
        record = lab.step(settings, warm_up=False)
        assert record.loss == first.loss, settings
    away = lab.step(ALL_AWAY)
    assert away.loss == first.loss
    assert not lab.audit_residency().complaints
    last = lab.step(NONE)
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes"):
        assert getattr(last, name) == getattr(first, name), name
    assert last.residual_bytes == 0
    assert not lab.audit_residency().complaints


@pytest.mark.parametrize("state", STATES, ids=str)
def test_fake_tensors_take_the_same_bytes_in_any_precision(
    state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "state": state}

    def steps(backend: str) -> list[dict[str, Any]]:
        with Lab("qwen3-moe-tiny", backend=backend, **shape) as lab:
            records = [lab.step(each) for each in (NONE, ALL_AWAY)]
            num_weights = sum(1 for _ in inside(lab).model.engine.live.chunk.parameters())
        # torch's AdamW counts its steps in a tensor of 4 bytes per weight.
        counts = 4 * num_weights if backend == "cpu" and not state.use_precision_aware_optimizer else 0
        found = []
        for record in records:
            peak, offloaded = dict(record.peak_by_category), dict(record.offloaded_bytes_by_group)
            peak["optimizer state"] -= counts
            peak["temporary"] = peak["temporary"] // 512 * 512  # the CPU's norm of the gradients has fewer numbers
            offloaded = {name: size - counts * (name == "optimizer state") for name, size in offloaded.items()}
            found.append({"peak": peak, "phase": record.peak_phase, "offloaded": offloaded})
        return found

    real = steps("cpu")
    monkeypatch.setattr(memlab.lab.lab, "find_backend", lambda name: of_the_cpu_backend())
    assert steps("simulated") == real


def test_copies_of_bf16_gradients_are_gradients_until_the_next_step(open_lab: Callable[..., Any]) -> None:
    lab = open_lab(num_layers=2, seq_length=16, state=BF16_GRADIENTS)
    record = lab.step(NONE)
    num_parameters = record.peak_by_category["parameters"] // 2
    weights = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
    assert record.peak_phase == "optimizer"
    assert record.peak_by_category["gradients"] == 2 * num_parameters + 4 * weights
    assert record.static_bytes >= 6 * weights  # the copies of the step before
    freed = lab.offload("gradients").transferred_bytes["gradients"]
    assert freed == 2 * num_parameters + 4 * weights


def test_an_update_that_runs_out_of_memory_can_be_repeated(open_lab: Callable[..., Any]) -> None:
    state = moments("fp8", main_params_dtype="fp16")
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=16, backend="cpu", state=state) as untouched:
        expected = untouched.step()
    lab = open_lab(num_layers=2, seq_length=16, state=state)
    for share in (0.6, 0.7, 0.9):  # in the first update: while it allocates the state, and after that
        lab.device_memory_bytes = int(share * expected.peak_allocated_bytes)
        failed = lab.step(warm_up=False)
        assert (failed.status, failed.peak_phase) == ("out_of_memory", "optimizer")
    lab.device_memory_bytes = None
    record = lab.step()
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes"):
        assert getattr(record, name) == getattr(expected, name), name
    assert lab.groups_used()["optimizer"] == GROUPS


BF16_MOMENTS = moments("bf16", main_grads_dtype="bf16")
H200_BYTES = [
    ("2.12", "phi-4", BF16_GRADIENTS, 34286853120, 34286855680),
    ("2.12", "phi-4", moments("fp32"), 24032674816, 28018842624),
    ("2.12", "phi-4", BF16_MOMENTS, 17201115136, 31902150656),
    ("2.16", "phi-4", BF16_MOMENTS, 17199017984, 21185185792),
    ("2.12", "phi-4", moments("fp16"), 17201115648, 30874751488),
    ("2.12", "phi-4", moments("fp32", main_params_dtype="fp16"), 24032683008, 30869500928),
    ("2.12", "qwen3-30b-a3b", PRECISION_AWARE, 30154626048, 34872064000),
    ("2.12", "qwen3-30b-a3b", BF16_MOMENTS, 18941633536, 34517721088),
    ("2.16", "qwen3-30b-a3b", BF16_MOMENTS, 18942682112, 23660103680),
]
"""Transformer Engine, architecture with 2 layers, state, bytes at the start of a step of 4096 tokens and at its peak
(2026-11-22 and 2026-11-28)."""


@pytest.mark.parametrize(("engine", "architecture", "state", "start_bytes", "peak_bytes"), H200_BYTES)
def test_predictions_are_what_an_h200_needed(
    engine: str, architecture: str, state: TrainingState, start_bytes: int, peak_bytes: int
) -> None:
    versions = Versions(transformer_engine=engine)
    backend = of_labs_before_0_4()  # which measured them
    with Lab(architecture, num_layers=2, seq_length=4096, backend=backend, state=state, versions=versions) as lab:
        record = lab.step()
    assert record.static_bytes == pytest.approx(start_bytes, rel=1e-4)
    assert record.peak_allocated_bytes == pytest.approx(peak_bytes, rel=1e-4)
    stores_less = {state.exp_avg_dtype, state.main_params_dtype} != {"fp32"} or state == BF16_GRADIENTS
    assert record.peak_phase == ("optimizer" if stores_less and engine == "2.12" else "forward")


def test_options_that_change_nothing_say_so() -> None:
    alone = TrainingState(use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    assert "which is fp32 without grad_reduce_in_bf16" in without_effect.of_state(alone)["main_grads_dtype"]
    assert not without_effect.of_state(replace(alone, grad_reduce_in_bf16=True))
    state = replace(alone, grad_reduce_in_bf16=True, main_params_dtype="fp16")
    idle = without_effect.of_scenario(Scenario.of("phi-4-tiny", dtype="fp32", state=state))
    assert set(idle) == {"grad_reduce_in_bf16", "main_grads_dtype", "main_params_dtype"}
    assert not without_effect.of_scenario(Scenario.of("phi-4-tiny", state=state))
