"""Attention backends and fused rotation: the same numbers as what they replace, and the memory that an H200 needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

import memlab.lab.lab
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.engines.attention.flash_attention import flash_attention
from memlab.engines.attention.qkv_layout import in_known_layout
from memlab.engines.attention.unfused_attention import has_fused_softmax, unfused_attention
from memlab.engines.megatron.attention_environment import (
    attention_backend_chosen,
    check_environment,
    check_flash_attention_is_installed,
)
from memlab.engines.megatron.layers.fused_rope import fused_apply_rotary_pos_emb
from memlab.engines.transformer_engine_caches import simulated_causal_masks
from memlab.fitting.estimate import StepEstimate
from memlab.fitting.suggestions import suggestions
from memlab.lab.lab import Lab
from memlab.record.timeline import Timeline
from memlab.units import GIB, MIB
from memlab.vocabulary import PHASES, POOLS
from tests.unit.live import recompute

pytestmark = pytest.mark.versions

UNFUSED, FLASH = TrainingState(attention_backend="unfused"), TrainingState(attention_backend="flash")
FUSED_ROPE = TrainingState(apply_rope_fusion=True)
TOKENS, BATCH, HEADS, CHANNELS = 24, 2, 4, 8


def values(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


def with_gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    output = function(*inputs)
    upstream = values(*output.shape, seed=9, dtype=output.dtype).detach()
    return [output, *torch.autograd.grad(output, inputs, upstream)]


def torchs_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3, enable_gqa=True)
    return output.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("attention", [unfused_attention, flash_attention])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_is_torch_s_with_its_gradients(attention: Any, groups: int, dtype: torch.dtype) -> None:
    assert has_fused_softmax(dtype, BATCH * HEADS, TOKENS) == (dtype == torch.bfloat16), "both softmaxes are tested"
    inputs = [
        values(TOKENS, BATCH, heads, CHANNELS, seed=seed, dtype=dtype)
        for seed, heads in enumerate((HEADS, groups, groups))
    ]
    exact = with_gradients(torchs_attention, *(tensor.detach().double().requires_grad_() for tensor in inputs))
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for mine, reference in zip(with_gradients(lambda *qkv: attention(*qkv, 0.3), *inputs), exact, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), reference, **tolerance)


@pytest.mark.parametrize("rotated_channels", [CHANNELS, 6])
def test_the_fused_rotation_is_megatron_s_also_of_some_channels(rotated_channels: int) -> None:
    inputs = values(TOKENS, BATCH, HEADS, CHANNELS, seed=1, dtype=torch.float32)
    angles = values(TOKENS, 1, 1, rotated_channels // 2, seed=2, dtype=torch.float32).detach()
    freqs = torch.cat((angles, angles), dim=-1)
    for mine, megatrons in zip(
        with_gradients(lambda tensor: fused_apply_rotary_pos_emb(tensor, freqs), inputs),
        with_gradients(lambda tensor: _apply_rotary_pos_emb_bshd(tensor, freqs), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, megatrons)


@pytest.mark.parametrize("state", [UNFUSED, FLASH, FUSED_ROPE])
@pytest.mark.parametrize("architecture", [pytest.param("qwen3-moe-tiny", marks=pytest.mark.slow), "phi-4-tiny"])
def test_a_step_has_the_default_s_loss_and_a_simulated_one_its_bytes(
    architecture: str, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"num_layers": 2, "seq_length": 64, "micro_batch_size": 2}
    settings = (None, recompute("core_attn"))
    with Lab(architecture, backend="cpu", **small) as lab:
        loss = lab.step().loss
    with Lab(architecture, backend="cpu", state=state, **small) as lab:
        real = [lab.step(each) for each in settings]
    monkeypatch.setattr(memlab.lab.lab, "find_backend", lambda name: of_the_cpu_backend())
    with Lab(architecture, state=state, **small) as lab:
        fake = [lab.step(each) for each in settings]
    for on_cpu, simulated in zip(real, fake, strict=True):
        assert on_cpu.loss == pytest.approx(loss, rel=1e-3)
        assert on_cpu.activation_peak_bytes == simulated.activation_peak_bytes
        assert on_cpu.residual_bytes == simulated.residual_bytes == 0


@pytest.mark.parametrize(("state", "measured_gib"), [(UNFUSED, 38.065), (FUSED_ROPE, 35.948)])
def test_a_predicted_peak_is_the_h200_s(state: TrainingState, measured_gib: float) -> None:
    """Qwen3-30B-A3B, 2 layers, 4096 tokens, without memlab; TE 2.12.0, megatron-core 0.16.1, torch 2.11.0."""
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=4096, state=state, backend="simulated") as lab:
        assert lab.step().peak_allocated_bytes / GIB == pytest.approx(measured_gib, rel=2e-4)


def allocations(line: Timeline, phase: str, at_least: int = 0) -> list[int]:
    """Returns the bytes of each allocation of the first layer's attention in a phase, in their order."""
    module = line.modules.index("decoder.layers.0.self_attention.core_attention")
    chosen = (line.phase == PHASES.index(phase)) & (line.module == module) & (line.pool == POOLS.index("device"))
    return [size for size in line.delta_bytes[chosen].tolist() if size > 0 and size >= at_least]


@pytest.mark.parametrize(
    ("version", "tokens", "forward", "num_backward"),
    [
        # ``torch.empty``, baddbmm and the softmax make scores; only its gradient is made, and overwritten up to 2.18.
        ("2.18", 2048, [2, 2, 2], 1),
        ("2.19", 2048, [2, 2, 2], 2),
        # Both of torch's softmax are fp32, then probabilities; the gradient of each is a tensor.
        ("2.16", 16384, [2, 2, 4, 4, 2], 5),
    ],
)
def test_the_scores_exist_as_often_as_in_transformer_engine(
    version: str, tokens: int, forward: list[int], num_backward: int
) -> None:
    versions = Versions(transformer_engine=version)
    with Lab(
        "qwen3-moe-tiny", num_layers=1, seq_length=tokens, state=UNFUSED, versions=versions, backend="simulated"
    ) as lab:
        line = lab.step().timeline
        scores = lab.scenario.architecture.num_attention_heads * tokens**2
    assert [size / scores for size in allocations(line, "forward", 2 * scores)] == forward
    assert len(allocations(line, "backward", 2 * scores)) == num_backward


def test_flash_attention_and_cudnn_accumulate_the_query_s_gradient_in_fp32() -> None:
    """What one layer's backward allocates for it: rows of ``mha_bwd`` in flash-attn's flash_api.cpp, and cuDNN's
    workspace, which an H200 allocated beside them to 256 bytes."""
    sizes = {"num_layers": 1, "seq_length": 4096, "backend": "simulated"}
    tokens, heads, channels = 4096, 32, 128
    accumulated, per_head = 4 * tokens * heads * channels, 2 * tokens * heads * channels
    row_sums = 4 * tokens * heads
    workspace = accumulated + 2 * per_head + row_sums + 256
    with Lab("qwen3-30b-a3b", **sizes) as lab:
        of_cudnn = allocations(lab.step().timeline, "backward")
    with Lab("qwen3-30b-a3b", state=FLASH, **sizes) as lab:
        of_flash = allocations(lab.step().timeline, "backward")
    rounded = -(-workspace // 512) * 512
    assert of_cudnn.count(rounded) == 1 and rounded not in of_flash
    assert sum(of_flash) - (sum(of_cudnn) - rounded) == accumulated + 2 * per_head + row_sums


def test_scores_that_te_s_kernel_refuses_keep_a_mask_for_the_process_and_a_closed_lab_frees_it() -> None:
    with Lab("qwen3-moe-tiny", num_layers=1, seq_length=16384, state=UNFUSED, backend="simulated") as lab:
        record = lab.step()
        assert simulated_causal_masks[16384].nbytes == 256 * MIB
        assert record.residual_bytes == 0
    assert not simulated_causal_masks


def test_transformer_engine_chooses_again_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = {"backend_selection_requires_update": False}
    engine = "transformer_engine.pytorch.attention.dot_product_attention"
    monkeypatch.setitem(sys.modules, f"{engine}.dot_product_attention", SimpleNamespace(_attention_backends=remembered))
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    with attention_backend_chosen("auto"):
        assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert not remembered["backend_selection_requires_update"], "the default lets TE keep its choice"
    with attention_backend_chosen("unfused"):
        assert (os.environ["NVTE_FLASH_ATTN"], os.environ["NVTE_UNFUSED_ATTN"]) == ("0", "1")
        assert remembered.pop("backend_selection_requires_update")
        check_environment("auto")  # the next lab's: the running one's variables are not the user's
    assert remembered.pop("backend_selection_requires_update")
    assert "NVTE_FUSED_ATTN" not in os.environ
    assert os.environ["NVTE_UNFUSED_ATTN"] == "1"


def test_a_variable_or_a_package_that_contradicts_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = "transformer_engine.pytorch.attention.dot_product_attention"
    absent = SimpleNamespace(FlashAttentionUtils=SimpleNamespace(is_installed=False, v3_is_installed=False))
    monkeypatch.setitem(sys.modules, f"{engine}.utils", absent)
    with pytest.raises(ValueError, match="finds no flash-attn that it supports: install"):
        check_flash_attention_is_installed()
    for name in ("NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"):  # Megatron sets them where it builds a model outside a job
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    check_environment("unfused")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN is '0' in the environment, must be 1 or unset with"):
        check_environment("auto")


def test_recompute_of_unfused_attention_is_suggested_where_its_probabilities_do_not_fit() -> None:
    sizes = {"num_layers": 4, "seq_length": 4096, "state": UNFUSED, "backend": "simulated"}
    with Lab("qwen3-moe-tiny", **sizes) as lab:
        without, with_recompute = (lab.step(each).peak_allocated_bytes for each in (None, recompute("core_attn")))
    with Lab("qwen3-moe-tiny", **sizes) as lab:
        lab.device_memory_bytes = (without + with_recompute) // 2
        estimate = StepEstimate(lab.step(), [])
    (estimated,) = (one.peak_bytes for one in suggestions(estimate) if one.settings == recompute("core_attn"))
    assert estimated <= with_recompute < without == pytest.approx(estimate.expected_peak_bytes, rel=0.2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"state": UNFUSED, "layout": Layout(context_parallel_size=2)},
            "'unfused' with context_parallel_size 2, which",
        ),
        ({"state": FLASH, "dtype": "fp32"}, "'flash' with dtype fp32, must be auto or unfused"),
        ({"state": TrainingState(attention_backend="fused"), "dtype": "fp32"}, "'fused' with dtype fp32"),
    ],
)
def test_what_transformer_engine_refuses_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Scenario.of("phi-4-tiny", seq_length=64, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("widths", "turned", "copied"),
    [
        ((8, 8, 8), False, False),  # heads side by side, as linear_qkv of a model without groups writes them
        ((16, 8, 8), False, True),  # two heads share a key
        ((8, 8, 8), True, True),  # a rotary embedding has made another query
    ],
)
def test_slices_of_linear_qkv_are_copied_where_transformer_engine_knows_no_such_layout(
    widths: tuple[int, ...], turned: bool, copied: bool
) -> None:
    slices = list(torch.randn(6, 2, 4, sum(widths)).split(widths, dim=-1))
    slices[0] = slices[0].reshape(6, 2, -1, 8)
    slices[0] = slices[0] * 2 if turned else slices[0]
    kept = in_known_layout(*slices)
    assert [one.data_ptr() != other.data_ptr() for one, other in zip(kept, slices, strict=True)][1:] == [copied] * 2
