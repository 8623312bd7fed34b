"""Settings on a live model: what they save, that they change no number, and that they leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.config.settings import MemorySettings
from tests.unit.inside import inside
from tests.unit.live import FULL, gradients_of_step, offload, random_settings, recompute, settings_with_all_pairs

NONE = MemorySettings()
FAMILIES = ["qwen3-moe-tiny", "phi-4-tiny"]
EVERY_MODULE = {
    "qwen3-moe-tiny": [
        *(recompute(name) for name in ("core_attn", "layernorm", "mlp", "moe", "moe_act")),
        *(offload(name) for name in ("attn_norm", "qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act")),
        offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    ],
    "phi-4-tiny": [
        *(recompute(name) for name in ("core_attn", "layernorm", "mlp")),
        *(offload(name) for name in ("attn_norm", "qkv_linear", "core_attn", "mlp_norm")),
        offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
    ],
}
BETWEEN_STEPS = [
    MemorySettings(offload_parameters=True),
    MemorySettings(offload_gradients=True),
    MemorySettings(offload_optimizer=True),
    MemorySettings(offload_optimizer=True, offload_gradients=False),
    MemorySettings(offload_parameters=True, offload_optimizer=True),
]
BLOCK = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
PAIRS = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"dtype": "bf16", "num_layers": 4}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"dtype": "fp32", "num_layers": 2, "num_microbatches": 2}, id="fp32"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3-moe-tiny", pytest.param("phi-4-tiny", marks=pytest.mark.slow)])
def test_loss_and_every_gradient_are_bit_identical_under_every_setting(
    family: str, model: dict[str, Any], open_lab: Callable[..., Any]
) -> None:
    lab = open_lab(family, seq_length=32, **model)
    loss, gradients = gradients_of_step(lab, NONE)
    assert sum(float(gradient.abs().sum()) for gradient in gradients) > 0
    for settings in (FULL, PAIRS, BLOCK, *EVERY_MODULE[family], *BETWEEN_STEPS, NONE):
        # What is recomputed is recomputed from the first step on; what is offloaded moves in the second.
        moves = settings.offload_modules is not None or settings in BETWEEN_STEPS
        other_loss, other_gradients = gradients_of_step(lab, settings, warm_up=moves)
        assert other_loss == loss, settings
        for mine, others in zip(gradients, other_gradients, strict=True):
            assert torch.equal(mine, others), settings


@pytest.mark.parametrize("family", [pytest.param("qwen3-moe-tiny", marks=pytest.mark.slow), "phi-4-tiny"])
def test_random_settings_leave_flags_and_peak_as_a_fresh_model_has_them(
    family: str, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab(family, num_layers=2, seq_length=16)
    first = lab.step(NONE)
    for settings in settings_with_all_pairs(lab, random.Random(20261120), num_draws=200):
        record = lab.step(settings, warm_up=False)
        assert record.loss == first.loss, settings
        live, fresh = (
            inside(lab)
            .worker.submit(
                lambda settings=settings: (
                    flags(inside(lab).model.engine.live.chunk.module),
                    fresh_flags(lab, settings),
                )
            )
            .result()
        )
        assert live == fresh, settings
    last = lab.step(NONE)
    assert last.peak_allocated_bytes == first.peak_allocated_bytes
    assert (last.static_bytes, last.residual_bytes, last.host_bytes) == (first.static_bytes, 0, first.host_bytes)


@pytest.mark.slow  # a minute for each model
@pytest.mark.parametrize("family", [*FAMILIES, "llama-3-tiny", "qwen3-dense-tiny", "qwen2.5-tiny"])
def test_200_random_settings_change_no_number_and_each_leads_back_to_the_first_peak(
    family: str, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab(family, num_layers=2, seq_length=16)
    loss, gradients = gradients_of_step(lab, NONE)
    first = lab.step(NONE)  # beside the copies of the gradients, which are its residual
    dice = random.Random(20261128)
    for _ in range(200):
        settings = random_settings(lab, dice)
        other_loss, other_gradients = gradients_of_step(lab, settings, warm_up=settings.offload_modules is not None)
        assert other_loss == loss, settings
        for mine, others in zip(gradients, other_gradients, strict=True):
            assert torch.equal(mine, others), settings
        del other_gradients, others
        last = lab.step(NONE)  # after a warm-up, which brings back what is on the host between steps
        assert last.peak_allocated_bytes == first.peak_allocated_bytes, settings
        for figure in ("static_bytes", "residual_bytes", "host_bytes"):
            assert getattr(last, figure) == getattr(first, figure), (figure, settings)


def flags(model: torch.nn.Module) -> dict[str, object]:
    """Every plain value that any module or its config holds, by name: what a forward could read."""
    # Set at run time: the current micro-batch, and whether Megatron has marked the parameters as staying.
    of_a_run = {"current_microbatch", "disable_param_offloading", "training", "timers"}
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        values = {
            key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        }
        config = vars(module.config) if hasattr(module, "config") else {}
        values |= {
            f"config.{key}": value
            for key, value in config.items()
            if isinstance(value, bool | int | float | str | list | None)
        }
        found |= {f"{name}.{key}": value for key, value in values.items() if key.split(".")[-1] not in of_a_run}
    return found


def fresh_flags(lab: Any, settings: MemorySettings) -> dict[str, object]:
    """The flags of a model that Megatron builds with the settings."""
    from memlab.engines.megatron.build import gpt_model
    from memlab.engines.megatron.megatron_config import transformer_config

    return flags(gpt_model(lab.scenario, transformer_config(lab.scenario, settings), lab.backend.layer_provider))


@pytest.mark.parametrize("family", FAMILIES)
def test_full_recompute_lowers_the_activation_peak(family: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab(family, num_layers=8)
    plain, full = lab.step(NONE), lab.step(FULL)
    assert full.activation_peak_bytes < plain.activation_peak_bytes * 0.75
    assert plain.recomputed_bytes == 0 < full.recomputed_bytes


@pytest.mark.parametrize("name", ["layernorm", "moe", "moe_act"])
def test_selective_recompute_lowers_the_activation_peak(name: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, selective = lab.step(NONE), lab.step(recompute(name))
    assert selective.activation_peak_bytes < plain.activation_peak_bytes
    assert selective.recomputed_bytes > 0


def test_only_a_checkpointed_moe_layer_keeps_its_input_and_gradient(
    open_lab: Callable[..., Any],
) -> None:
    # verl #5251: (input + gradient) x segments = 2 x tokens x hidden x 2 bytes x segments.
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    tokens, hidden, layers = 128, lab.scenario.architecture.hidden_size, 4
    assert lab.step(NONE).residual_bytes == 0
    assert lab.step(FULL).residual_bytes == 2 * tokens * hidden * 2 * layers
    assert lab.step(PAIRS).residual_bytes == 2 * tokens * hidden * 2 * layers // 2
    assert lab.step(recompute("moe")).residual_bytes == 2 * tokens * hidden * 2 * layers
    assert lab.step(recompute("moe_act")).residual_bytes == 0
    dense = open_lab("phi-4-tiny")
    assert dense.step(FULL).residual_bytes == 0


def test_offload_modules_move_what_the_record_says_to_the_host(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    plain, moved = lab.step(NONE), lab.step(offload("expert_fc1", "moe_act"))
    architecture = lab.scenario.architecture
    rows = 128 * architecture.moe_router_topk
    # The last group of a name stays, so 3 of 4 layers move: the experts' input, and fc1's output with the row weights.
    assert moved.offloaded_bytes_by_module == {
        "expert_fc1": 3 * rows * architecture.hidden_size * 2,
        "moe_act": 3 * rows * (2 * architecture.moe_ffn_hidden_size * 2 + 4),
    }
    assert moved.activation_peak_bytes < plain.activation_peak_bytes
    # Beside the copies the host holds the batch and, while a generator is forked, its states.
    copies = sum(moved.offloaded_bytes_by_module.values())
    assert copies < moved.host_bytes <= copies + plain.host_bytes


def test_an_offload_that_does_nothing_says_why(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=2)
    small = lab.step(MemorySettings(offload_modules=["moe_act"]))
    assert "under min_offloaded_tensor_size 1048576" in small.without_effect["offload_modules:moe_act"]
    assert "fused into linear_qkv" in lab.step(offload("attn_norm")).without_effect["offload_modules:attn_norm"]
    recomputed = MemorySettings(
        recompute_granularity="selective", recompute_modules=["core_attn"], offload_modules=["core_attn"]
    )
    assert "recompute" in lab.step(recomputed).without_effect["offload_modules:core_attn"]
    one_layer = open_lab("qwen3-moe-tiny", num_layers=1).step(offload("moe_act"))
    assert one_layer.offloaded_bytes_by_module == {}
    assert "last group" in one_layer.without_effect["offload_modules:moe_act"]


def test_a_refused_setting_leaves_the_model_as_it_was(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    before = lab.step(FULL)
    standing = inside(lab).worker.submit(lambda: flags(inside(lab).model.engine.live.chunk.module)).result()
    for refused in (
        offload("moe_act"),
        MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3),
    ):
        with pytest.raises(ValueError):
            lab.step(refused)
    assert lab.settings == FULL
    assert inside(lab).worker.submit(lambda: flags(inside(lab).model.engine.live.chunk.module)).result() == standing
    assert lab.step().peak_allocated_bytes == before.peak_allocated_bytes
