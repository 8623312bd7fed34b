"""A real device that runs full: for each cause the verdict that names it, and the same step again afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.lab.lab import Lab
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB
from tests.unit.live import FULL

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=8192, backend="cuda") as lab:
        yield lab


def refused_step(lab: Lab) -> OutOfMemory:
    """Takes a step that does not fit, and holds its evidence against itself and against the timeline."""
    record = lab.step()
    assert record.status == "out_of_memory", record
    seen = record.out_of_memory
    assert seen is not None and seen.verdict is not None
    refusal = seen.failed_allocation
    assert record.message.startswith(f"{seen.verdict} in {refusal.phase}"), record.message
    assert sum(seen.alive_by_category.values()) == refusal.allocated_bytes
    assert refusal.missing_bytes > 0 or seen.verdict == "fragmentation"
    assert OutOfMemory.from_dict(seen.to_dict()) == seen
    return seen


def check_same_step(lab: Lab, plain: StepRecord) -> None:
    again = lab.step()
    assert again.status == "ok"
    assert again.loss == pytest.approx(plain.loss, rel=1e-5)
    assert again.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=1e-3)
    assert again.residual_bytes == plain.residual_bytes


def test_a_cap_is_a_spike_that_a_measured_setting_mends(lab: Lab) -> None:
    full = lab.step(FULL)
    plain = lab.step(MemorySettings())
    # Not nearer to the step that is to fit: the pieces between what is alive make no room for its logits.
    lab.device_memory_bytes = plain.peak_allocated_bytes - 128 * MIB
    seen = refused_step(lab)
    assert seen.verdict == "spike"
    assert seen.suggestion is not None and seen.suggestion.source == "measured"
    mended = lab.step(seen.suggestion.settings)
    assert mended.status == "ok", (mended.message, full.peak_reserved_bytes, plain.peak_reserved_bytes, seen)
    assert mended.loss == pytest.approx(plain.loss, rel=max(1e-5, loss_tolerance(mended, plain)))
    lab.device_memory_bytes = None
    lab.apply(plain.settings)
    check_same_step(lab, plain)


def test_a_tensor_that_somebody_else_made_with_torch_is_retention(lab: Lab) -> None:
    import torch

    plain = lab.step()
    torch.cuda.empty_cache()
    num_bytes = _free_bytes() - plain.activation_peak_bytes // 2
    foreign = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    seen = refused_step(lab)
    assert seen.verdict == "retention", seen.evidence
    assert seen.retained_by_module.get("", 0) >= num_bytes
    del foreign
    torch.cuda.empty_cache()
    check_same_step(lab, plain)


def test_what_is_held_beside_torch_is_outside_torch(lab: Lab) -> None:
    import torch

    plain = lab.step()
    torch.cuda.empty_cache()
    with _held_outside_torch(_free_bytes() - plain.activation_peak_bytes // 2) as num_bytes:
        seen = refused_step(lab)
    assert seen.verdict == "outside torch", seen.evidence
    assert (seen.failed_allocation.outside_bytes or 0) >= num_bytes
    check_same_step(lab, plain)


def test_a_device_in_pieces_is_fragmentation(lab: Lab) -> None:
    import torch

    plain = lab.step()
    torch.cuda.empty_cache()
    pins, fillers = [], []
    for _ in range(12):
        # One segment, then a small and a large part of it: with the large one free, the segment cannot be given back.
        segment = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del segment
        pins.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        fillers.append(torch.empty(960 * MIB, dtype=torch.uint8, device="cuda"))
    fillers.clear()
    lab.device_memory_bytes = torch.cuda.memory_reserved() + 512 * MIB
    seen = refused_step(lab)
    refusal = seen.failed_allocation
    assert seen.verdict == "fragmentation", seen.evidence
    assert refusal.largest_free_bytes is not None
    assert refusal.largest_free_bytes < refusal.requested_bytes <= refusal.unused_reserved_bytes
    pins.clear()
    lab.device_memory_bytes = None
    torch.cuda.empty_cache()
    check_same_step(lab, plain)


def test_a_step_that_no_meter_watches_gives_its_memory_back_too(lab: Lab) -> None:
    import torch

    plain = lab.step()
    torch.cuda.empty_cache()
    with _held_outside_torch(_free_bytes() - plain.activation_peak_bytes // 2):
        with pytest.raises(torch.OutOfMemoryError):
            lab.unmetered_step_seconds()
        with pytest.raises(torch.OutOfMemoryError):
            lab.groups_used()
    check_same_step(lab, plain)


def test_what_a_warm_lab_says_fits_does_so_in_a_fresh_one(lab: Lab) -> None:
    plain = lab.step()
    outside_bytes = estimate_outside_torch(plain.scenario.layout, plain.scenario.architecture).total_bytes
    fit = lab.fit(plain, plain.peak_allocated_bytes - 256 * MIB + outside_bytes)
    assert not fit.fits
    assert lab.device_memory_bytes is None
    cheapest = fit.alternatives[0].settings
    limit_bytes = fit.gpu_memory_bytes - outside_bytes
    lab.close()
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=8192, backend="cuda") as fresh:
        fresh.device_memory_bytes = limit_bytes
        record = fresh.step(cheapest)
        assert record.status == "ok", (cheapest, record.message)
        fresh.device_memory_bytes = None
        assert fresh.step(plain.settings).loss == pytest.approx(plain.loss, rel=1e-5)


def _free_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


@contextmanager
def _held_outside_torch(num_bytes: int) -> Iterator[int]:
    """Takes device memory from the CUDA runtime that torch has loaded, without torch's allocator."""
    import torch

    assert torch.version.cuda is not None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    block = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(num_bytes)) == 0
    try:
        yield num_bytes
    finally:
        assert runtime.cudaFree(block) == 0
