"""The simulated backend: to the byte what the CPU backend meters where both run, and what an H200 was seen to need."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.package_info import MINOR

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.backends import BACKEND_VARIABLE, find_backend
from memlab.backends.cuda_on_cpu import CUDA_API
from memlab.backends.fake_cuda import FakeCuda
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import ARCHITECTURES, find_architecture
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.storage_meter import simulated_meter
from memlab.record.step_record import StepRecord
from tests.unit import caching_allocator as reference
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, random_settings, recompute

pytestmark = pytest.mark.versions

SMALL = {"num_layers": 3, "seq_length": 64, "micro_batch_size": 2, "num_microbatches": 2}


QWEN, PHI = find_architecture("qwen3-moe-tiny"), find_architecture("phi-4-tiny")
OF_OTHER_PARTS = {
    "dense Qwen3's": replace(PHI, qk_layernorm=True, share_embeddings_and_output_weights=True),
    "Qwen2.5's": ARCHITECTURES["qwen2.5-tiny"],
    "GPT's": ARCHITECTURES["gpt-tiny"],
    "GLM's": replace(ARCHITECTURES["glm-4.5-tiny"], moe_layer_freq=(0, 1, 1, 0)),
    "Nemotron's": ARCHITECTURES["nemotron-tiny"],
    "Nemotron-H's": ARCHITECTURES["nemotron-h-tiny"],
    "Nemotron 3's": ARCHITECTURES["nemotron-3-tiny"],
    "gated delta net's": replace(ARCHITECTURES["qwen3-next-tiny"], linear_attention_freq=(1, 0, 1, 0)),
    "latent experts'": replace(ARCHITECTURES["nemotron-3-tiny"], moe_latent_size=48),
    "gpt-oss'": replace(ARCHITECTURES["gpt-oss-tiny"], moe_router_pre_softmax=True),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(QWEN, id="QWEN"),
        pytest.param(PHI, id="PHI"),
        # Those of Qwen have parts that QWEN or PHI has too, and a bias.
        *(
            pytest.param(model, id=name, marks=[pytest.mark.slow] if "Qwen" in name else [])
            for name, model in OF_OTHER_PARTS.items()
            if model.experimental_attention_variant is model.hybrid_override_pattern is None
            or MINOR < 17  # memlab has no newer gated delta net and layers of Mamba
        ),
    ],
)
def both(request: pytest.FixtureRequest) -> list[tuple[StepRecord, StepRecord, int]]:
    """The same steps on both backends, the simulated one without an allocator's rounding and workspaces."""
    drawn = [MemorySettings(), FULL, offload("qkv_linear", "core_attn")]
    with Lab(request.param, backend="cpu", **SMALL) as lab:
        if request.param in (QWEN, PHI):
            drawn += [recompute("layernorm", "core_attn"), random_settings(lab, random.Random(3))]
        real = _steps(lab, drawn)
        num_weights = sum(1 for _ in inside(lab).model.engine.live.chunk.parameters())
    with Lab(request.param, backend=of_the_cpu_backend(), **SMALL) as lab:
        fake = _steps(lab, drawn)
    # torch's AdamW counts its steps in a tensor of 4 bytes a weight, Transformer Engine's in a number.
    return list(zip(real, fake, [4 * num_weights] * len(drawn), strict=True))


def _steps(lab: Lab, drawn: list[MemorySettings]) -> list[StepRecord]:
    """Takes steps: what is recomputed is recomputed from the first step on; what is offloaded moves in the second."""
    return [lab.step(each, warm_up=each != FULL) for each in drawn]


def test_a_step_is_the_cpu_s_to_the_byte(both: list[tuple[StepRecord, StepRecord, int]]) -> None:
    for real, fake, step_counts in both:
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


def test_a_load_before_the_update_is_the_cpu_s() -> None:
    """A GPU's allocator reserves a segment for a load first, which may be the peak; the CPU has none."""
    settings = replace(FULL, offload_optimizer_except_update=True)
    peaks = {}
    for name, backend in (("real", "cpu"), ("fake", of_the_cpu_backend())):
        with Lab(PHI, backend=backend, **SMALL) as lab:
            peaks[name] = lab.step(settings)
    real, fake = peaks["real"], peaks["fake"]
    assert (real.peak_phase, fake.peak_phase) == ("optimizer", "optimizer")
    assert 0 <= real.peak_allocated_bytes - fake.peak_allocated_bytes < 1024  # AdamW's counts of steps


def test_every_module_makes_what_it_makes_on_the_cpu(both: list[tuple[StepRecord, StepRecord, int]]) -> None:
    for real, fake, step_counts in both:
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
            assert mine.num_bytes(live[-1][0]) == live[-1][1].size
        else:
            mine_block, true_block = live.pop(choose.randrange(len(live)))
            mine.free(mine_block)
            truth.free(true_block)
        if choose.random() < 0.02:
            mine.empty_cache()
            truth.empty_cache()
        assert mine.reserved_bytes == truth.totals[-1][2]


H200 = Path(__file__).parents[2] / "papermill_runs" / "baselines" / "h200"


def measured_on_an_h200(*cases: str) -> Iterator[tuple[dict[str, Any], MemorySettings, dict[str, Any]]]:
    """Yields scenario, settings and figures of steps that a lab took there, with Transformer Engine."""
    for path in (path for case in cases for path in sorted(H200.glob(f"{case}.json"))):
        for record in json.loads(path.read_text())["measured"]["records"].values():
            yield record["scenario"], MemorySettings(**record["settings"]), record["metrics"]


@pytest.mark.slow  # tests/unit/test_accuracy.py has such steps too
@pytest.mark.parametrize("architecture", ["qwen3-30b-a3b", "phi-4"])
def test_at_full_width_it_is_what_an_h200_needed(architecture: str) -> None:
    wanted = [
        (scenario, settings, metrics)
        for scenario, settings, metrics in measured_on_an_h200("quickstart-*4096", "recompute-*4096")
        if scenario["architecture"] == architecture
    ]
    assert len(wanted) > 10
    scenario = wanted[0][0]
    assert all(scenario == other for other, _, _ in wanted)
    with Lab(
        architecture, num_layers=scenario["num_layers"], seq_length=scenario["seq_length"], backend="simulated"
    ) as lab:
        records: dict[MemorySettings, StepRecord] = {}  # the two labs have some settings in common
        for _, settings, metrics in wanted:
            record = records.setdefault(settings, records.get(settings) or lab.step(settings))
            for name, tolerance in (("peak_allocated_bytes", 1e-4), ("activation_peak_bytes", 1e-3)):
                assert getattr(record, name) == pytest.approx(metrics[name], rel=tolerance), (settings, name)
            for category in ("parameters", "gradients"):
                assert record.peak_by_category[category] == metrics[f"peak_by_category/{category}"], settings
            # Rests that the allocator leaves unsplit hang on what was cached: here all of a family's steps follow another.
            assert record.residual_bytes == pytest.approx(metrics["residual_bytes"], abs=2**20), settings
            moved = record.offloaded_bytes_by_module
            prefix = "offloaded_bytes_by_module/"
            expected = {name.removeprefix(prefix): size for name, size in metrics.items() if name.startswith(prefix)}
            # Transformer Engine's attention also keeps the state of its random numbers: 32 bytes a layer.
            assert moved == {name: pytest.approx(size, rel=1e-6) for name, size in expected.items()}, settings


def test_a_limit_is_the_allocator_s() -> None:
    with Lab("phi-4-tiny", backend="simulated", **SMALL) as lab:
        plain = lab.step()
        assert plain.peak_reserved_bytes is not None
        lab.device_memory_bytes = plain.peak_reserved_bytes
        assert lab.step().status == "ok"
        lab.device_memory_bytes = plain.static_bytes
        for settings in (plain.settings, MemorySettings(offload_modules=("core_attn",))):
            refused = lab.step(settings)
            assert refused.status == "out_of_memory", settings
        assert refused.out_of_memory is not None
        assert refused.out_of_memory.failed_allocation.reserved_bytes <= plain.static_bytes + 20 * 1024**2
        lab.device_memory_bytes = None
        assert lab.step(plain.settings).peak_allocated_bytes == plain.peak_allocated_bytes


def test_it_takes_no_memory_and_gives_everything_back() -> None:
    with Lab("qwen3-moe-tiny", backend="simulated", **SMALL) as lab:
        lab.step()
        assert all(parameter.is_meta for parameter in inside(lab).model.engine.live.chunk.parameters())
        left = lab.drop()
        assert inside(lab).model.meter.live_bytes() == 0, left
    assert torch.zeros(2, device="cpu").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["Stream", "Event", "CUDAGraph", "graph"])
def test_a_library_that_is_imported_meanwhile_finds_classes(name: str) -> None:
    """transformers annotates with ``torch.cuda.CUDAGraph | None``, and is imported where a model of FSDP2 is built."""
    assert isinstance(CUDA_API[name], type)


def test_auto_never_takes_it() -> None:
    assert find_backend("auto").name in ("cpu", "cuda")


def test_nothing_is_decided_by_a_tensor_without_values() -> None:
    """Each was true, so that code went on as if a condition held of which nothing is known."""
    with FakeCuda(), pytest.raises(RuntimeError, match=r"test_simulated_backend.py: .* asks whether a tensor without"):
        bool(torch.ones(1, device="cuda") > 0)


def test_the_meter_sees_a_view_only_if_it_would_find_something_new() -> None:
    labels = Labels()
    meter, operations = simulated_meter(labels), list[Any]()
    count, hidden = meter.storages.after_operation, torch.empty(4, 128, device="meta")

    def after_operation(results: Any, arguments: Any = ()) -> None:
        operations.append(results)
        count(results, arguments)

    meter.storages.after_operation = after_operation  # type: ignore[method-assign]
    with labelled_by(labels), FakeCuda(), meter.watching():
        tensor = torch.empty(4, 128, device="cuda", requires_grad=True)
        allocation, num_seen = meter.storages.allocation_of(tensor), len(operations)
        views = [tensor.view(-1), tensor.detach(), tensor.data, tensor[1:], tensor.expand_as(tensor)]
        assert len(operations) == num_seen
        assert all(meter.storages.allocation_of(view) is allocation for view in views)
        assert views[0].requires_grad and not views[1].requires_grad
        copy = tensor[[0, 2]]
        assert meter.storages.allocation_of(copy) not in (None, allocation)
        hidden.view(-1)
        assert meter.storages.allocation_of(hidden) is not None, "made where the meter did not see it"


@pytest.mark.parametrize("name", ["cpu", "simulated"])
def test_a_lab_that_leaves_the_backend_open_is_on_the_one_in_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, name)
    with Lab("phi-4-tiny", num_layers=1, seq_length=16) as lab:
        assert lab.backend.name == name
