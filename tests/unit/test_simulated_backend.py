"""The simulated backend: to the byte what the CPU backend meters where both run, and what an H200 was seen to need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import memlab.lab
from memlab.backends import find_backend
from memlab.lab import Lab
from memlab.meter.caching_allocator import CachingAllocator
from memlab.meter.storages import StorageMeter
from memlab.record import StepRecord
from memlab.settings import MemorySettings
from tests.unit import caching_allocator as reference
from tests.unit.live import FULL, offload, random_settings, recompute

SMALL = {"num_layers": 3, "seq_length": 64, "micro_batch_size": 2, "num_microbatches": 2}


@pytest.fixture(params=["qwen3-moe-tiny", "phi-4-tiny"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes the same steps on both backends, the simulated one without an allocator's rounding and workspaces."""
    exact = replace(find_backend("simulated"), meter=StorageMeter, fill_workspaces=lambda is_moe: None)

    def step(*settings: MemorySettings) -> Iterator[tuple[StepRecord, StepRecord, int]]:
        with Lab(request.param, backend="cpu", **SMALL) as lab:
            drawn = settings or tuple(random_settings(lab, random.Random(3)) for _ in range(8))
            real = [lab.step(each) for each in drawn]
            num_weights = sum(1 for _ in lab._stepper.live.chunk.parameters())
        monkeypatch.setattr(memlab.lab, "find_backend", lambda name: exact)
        with Lab(request.param, **SMALL) as lab:
            fake = [lab.step(each) for each in drawn]
        # torch's AdamW counts its steps in a tensor of 4 bytes a weight, Transformer Engine's in a number.
        return zip(real, fake, [4 * num_weights] * len(drawn), strict=True)

    return step


def test_a_step_is_the_cpu_s_to_the_byte(both: Any) -> None:
    for real, fake, step_counts in both():
        assert _without_steps(real.peak_by_category, step_counts) == fake.peak_by_category, real.settings
        for name in ("residual_bytes", "recomputed_bytes", "offloaded_bytes_by_module", "without_effect", "loss"):
            expected = None if name == "loss" else getattr(real, name)
            assert getattr(fake, name) == expected, (name, real.settings)
        assert real.activation_peak_bytes - fake.activation_peak_bytes == (
            step_counts if real.settings.offload_optimizer else 0
        )
        assert _without_steps(real.offloaded_bytes_by_group, step_counts) == fake.offloaded_bytes_by_group
        assert real.host_bytes - fake.host_bytes == (step_counts if real.settings.offload_optimizer else 0)


def _without_steps(sizes: dict[str, int], step_counts: int) -> dict[str, int]:
    return {name: size - (step_counts if name == "optimizer state" else 0) for name, size in sizes.items()}


def test_every_module_makes_what_it_makes_on_the_cpu(both: Any) -> None:
    settings = (MemorySettings(), FULL, recompute("layernorm", "core_attn"), offload("qkv_linear", "core_attn"))
    for real, fake, step_counts in both(*settings):
        before = {"": real.peak_by_module[""] - step_counts}
        assert real.peak_by_module | before == fake.peak_by_module


@pytest.mark.parametrize("seed", range(5))
def test_the_allocator_is_the_reference(seed: int) -> None:
    choose = random.Random(seed)
    mine, truth = CachingAllocator(), reference.CachingAllocator()
    live: list[tuple[Any, Any]] = []
    for _ in range(600):
        if len(live) < 30 or choose.random() < 0.5:
            size = int(2 ** choose.uniform(4, 25))
            live.append((mine.allocate(size), truth.malloc(size)))
            assert live[-1][0].num_bytes == live[-1][1].size
        else:
            mine_block, true_block = live.pop(choose.randrange(len(live)))
            mine.free(mine_block)
            truth.free(true_block)
        if choose.random() < 0.02:
            mine.empty_cache()
            truth.empty_cache()
        assert mine.reserved_bytes == truth.totals[-1][2]


MEASURED = {
    "qwen3-30b-a3b": {
        MemorySettings(): (62003295232, 5663978496),
        FULL: (60175209472, 3701768192),
    },
    "phi-4": {MemorySettings(): (48559149056, 5421997056)},
}
"""4 layers, 4096 tokens, on one H200 (torch 2.11.0+cu130, Transformer Engine 2.12.0, megatron-core 0.16.1, 2026-11-20):
allocated peak, and what of it is above the step's start."""

STATIC = {
    "qwen3-30b-a3b": {"parameters": 6230638592, "gradients": 12459257856},
    "phi-4": {"parameters": 4781598720, "gradients": 9563197440, "optimizer state": 28689592320},
}


@pytest.mark.parametrize("architecture", MEASURED)
def test_at_full_width_it_is_what_an_h200_needed(architecture: str) -> None:
    with Lab(architecture, num_layers=4, seq_length=4096, backend="simulated") as lab:
        for settings, (peak, activation_peak) in MEASURED[architecture].items():
            record = lab.step(settings)
            assert record.peak_allocated_bytes == pytest.approx(peak, rel=1e-4)
            assert record.activation_peak_bytes == pytest.approx(activation_peak, rel=1e-3)
            assert STATIC[architecture].items() <= record.peak_by_category.items()


def test_a_limit_is_the_allocator_s() -> None:
    with Lab("phi-4-tiny", backend="simulated", **SMALL) as lab:
        plain = lab.step()
        assert plain.peak_reserved_bytes is not None
        lab.device_memory_bytes = plain.peak_reserved_bytes
        assert lab.step().status == "ok"
        lab.device_memory_bytes = plain.static_bytes
        refused = lab.step(MemorySettings(offload_modules=("core_attn",)))
        assert refused.status == "out_of_memory"
        assert refused.out_of_memory is not None
        assert refused.out_of_memory.refusal.reserved_bytes <= plain.static_bytes + 20 * 1024**2
        lab.device_memory_bytes = None
        assert lab.step(plain.settings).peak_allocated_bytes == plain.peak_allocated_bytes


def test_it_takes_no_memory_and_gives_everything_back() -> None:
    with Lab("qwen3-moe-tiny", backend="simulated", **SMALL) as lab:
        lab.step()
        assert all(parameter.is_meta for parameter in lab._stepper.live.chunk.parameters())
        left = lab.drop()
        assert lab._stepper.meter.live_bytes() == 0, left
    assert torch.zeros(2, device="cpu").tolist() == [0.0, 0.0]


def test_auto_never_takes_it() -> None:
    assert find_backend("auto").name in ("cpu", "cuda")
