"""The CUDA backend: Megatron with Transformer Engine on the real allocator, held against torch's own counters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.config.settings import MemorySettings
from memlab.record.transfer import GROUPS
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")

MIB = 1024**2
FAMILIES = pytest.mark.parametrize("family", ["qwen3-30b-a3b", "phi-4"])
ALL_ON_HOST = MemorySettings(offload_parameters=True, offload_optimizer=True)


def settings_of(family: str) -> list[MemorySettings]:
    dense = [MemorySettings(), FULL, recompute("core_attn"), offload("qkv_linear", "core_attn", "attn_proj")]
    moe = [recompute("moe_act", "layernorm"), offload("expert_fc1", "moe_act", "mlp_norm"), ALL_ON_HOST]
    return dense + (moe if family.startswith("qwen") else [recompute("mlp"), ALL_ON_HOST])


@FAMILIES
def test_the_timeline_s_peaks_are_torch_s_to_the_byte(family: str, open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab(family)
    for settings in settings_of(family):
        record = lab.step(settings)
        stats = torch.cuda.memory_stats()
        assert record.peak_allocated_bytes == torch.cuda.max_memory_allocated(), settings
        assert record.peak_active_bytes == stats["active_bytes.all.peak"], settings
        assert record.peak_reserved_bytes == stats["reserved_bytes.all.peak"], settings
        assert record.timeline.total_bytes()[-1] == torch.cuda.memory_allocated(), settings


@FAMILIES
def test_at_least_99_percent_of_the_bytes_carry_a_label(family: str, open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab(family)
    for settings in settings_of(family):
        lab.step(settings)
        assert inside(lab).model.meter.labelled_share >= 0.99, settings


@FAMILIES
def test_every_byte_between_steps_has_a_name(family: str, open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab(family)
    for settings in (MemorySettings(), offload("core_attn", "qkv_linear")):
        assert lab.step(settings).residual_bytes == 0


def test_a_checkpoint_of_an_moe_layer_keeps_its_input_and_gradient(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab()
    hidden = lab.scenario.architecture.hidden_size
    assert lab.step(FULL).residual_bytes == 2 * 2048 * hidden * 2 * 2  # input and gradient, bf16, two checkpoints
    detached = MemorySettings(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        checkpoint_input_remedy="detach",
    )
    assert lab.step(detached).residual_bytes == 0


@FAMILIES
def test_the_loss_is_the_same_under_every_setting(family: str, open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab(family)
    plain = lab.step()
    for settings in settings_of(family):
        record = lab.step(settings)
        assert record.loss == pytest.approx(plain.loss, rel=max(1e-5, loss_tolerance(record, plain))), settings


@FAMILIES
def test_parameters_gradients_and_optimizer_state_are_as_many_bytes_as_they_must_be(
    family: str, open_gpu_lab: Callable[..., Any]
) -> None:
    lab = open_gpu_lab(family)
    away = lab.step(ALL_ON_HOST)
    count = sum(parameter.numel() for parameter in inside(lab).model.engine.live.chunk.parameters())
    for group, num_bytes in zip(GROUPS, (2 * count, 4 * count, 12 * count), strict=True):
        # DDP pads its buckets.
        assert away.offloaded_bytes_by_group[group] == pytest.approx(num_bytes, rel=1e-3)
    held = away.host_reserved_bytes
    assert held <= 1.02 * (
        away.offloaded_bytes_by_group["parameters"] + away.offloaded_bytes_by_group["optimizer state"]
    )
    assert away.timeline.bytes_at(len(away.timeline) - 1) < 600 * MIB


def test_out_of_memory_is_a_record_and_the_model_steps_again(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab()
    plain = lab.step()
    lab.device_memory_bytes = plain.static_bytes + plain.activation_peak_bytes // 2
    failed = lab.step()
    assert failed.status == "out_of_memory"
    lab.device_memory_bytes = None
    again = lab.step()
    assert (again.loss, again.status) == (plain.loss, "ok")
    assert again.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=1e-4)


def test_closing_gives_everything_back_five_times(open_gpu_lab: Callable[..., Any]) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        lab = open_gpu_lab()
        lab.step(FULL)
        lab.step(offload("expert_fc1", "moe_act"))
        lab.close()
        gc.collect()
        assert torch.cuda.memory_allocated() - before <= 64 * MIB


def test_pageable_memory_is_a_choice(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab("phi-4", num_layers=1)
    plain = lab.step()
    lab.pinned_host_memory = False
    assert lab.step(ALL_ON_HOST).host_reserved_bytes < 64 * MIB
    assert lab.step().loss == plain.loss


def test_auto_takes_the_gpu_and_says_so() -> None:
    from memlab.backends import find_backend

    backend = find_backend("auto")
    assert (backend.name, backend.reason) == ("cuda", "a CUDA device and Transformer Engine are available")


def test_watching_which_groups_a_step_touches_changes_no_number(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab("phi-4")
    plain = lab.step()
    used = lab.groups_used()
    assert used["optimizer"] == GROUPS
    assert used["hand over"] == ("parameters",)
    # torch.compile gives a function up for good that it meets under a dispatch mode.
    again = lab.step()
    assert (again.loss, again.peak_allocated_bytes) == (plain.loss, pytest.approx(plain.peak_allocated_bytes, rel=1e-3))


def test_the_audit_of_residency_is_silent_until_something_is_wrong(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab()
    plain = lab.step()
    lab.offload(*GROUPS)
    assert lab.audit_residency().complaints == ()
    lab.load(*GROUPS)
    assert lab.audit_residency().complaints == ()
    for fault in ("size_not_saved", "inverted_condition", "gradients_held_by_main_parameters"):
        with lab.residency_fault(fault):
            if fault.startswith("gradients"):
                lab.step()
            lab.offload(*GROUPS)
            if not fault.startswith("gradients"):
                lab.load("gradients")
            assert any("gradients" in complaint for complaint in lab.audit_residency().complaints), fault
    assert lab.step().loss == plain.loss


@FAMILIES
def test_the_audit_of_offload_adds_up(family: str, open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab(family)
    account = lab.audit_offload(offload("core_attn"))
    terms = account.terms()
    assert sum(terms.values()) == account.expected_bytes > 0
    # What nobody named is at most the rests that the allocator leaves unsplit.
    assert abs(terms["added by offload itself"]) <= 16 * MIB
    assert [held for held in account.still_resident if not held.holders] == []
