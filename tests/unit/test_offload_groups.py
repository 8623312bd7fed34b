"""Groups of activation offload that Megatron 0.19's manager mixes up: memlab refuses what the installed version fails with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.package_info import MINOR

from memlab.config import model_restrictions, without_effect
from memlab.config.architectures import Architecture, find_architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab

pytestmark = pytest.mark.versions

SELECTIVE = {"recompute_granularity": "selective"}
STAGES = {"layout": Layout(pipeline_model_parallel_size=2)}
UNEVEN_STAGES = {"layout": Layout(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)}
CHUNKS = {"layout": Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)}


def dense_in(*pattern: int) -> Architecture:
    """An MoE model in which the layers with 0 are dense."""
    return replace(find_architecture("qwen3-moe-tiny"), num_layers=len(pattern), moe_layer_freq=pattern)


def case(
    model: str | Architecture, settings: dict[str, Any], num_layers: int, num_microbatches: int, **others: Any
) -> Any:
    workload = {"num_layers": num_layers, "num_microbatches": num_microbatches, "seq_length": 64, **others}
    name = model if isinstance(model, str) else f"dense in {model.moe_layer_freq}"
    return pytest.param(model, settings, workload, id=f"{name} {settings} {num_layers}x{num_microbatches} {others}")


MIXED_UP = [
    case("phi-4-tiny", {"offload_modules": ("core_attn", "attn_proj")}, 1, 2),
    case("phi-4-tiny", {"offload_modules": ("qkv_linear", "core_attn"), "min_offloaded_tensor_size": 0}, 1, 3),
    case("qwen3-moe-tiny", {"offload_modules": ("core_attn", "mlp_norm")}, 2, 2, **STAGES),
    case("qwen3-moe-tiny", {"offload_modules": ("expert_fc1", "moe_act"), "activation_offload_fraction": 0.5}, 1, 2),
    case("qwen3-moe-tiny", {"offload_modules": ("core_attn", "moe_act")}, 4, 2, **CHUNKS),
    case(
        "phi-4-tiny",
        {"offload_modules": ("core_attn",), "activation_offload_fraction": 0.0, "min_offloaded_tensor_size": 0},
        *(2, 2),
    ),
    case("phi-4-tiny", {"offload_modules": ("core_attn",), "delta_offload_bytes_across_pp_ranks": 1}, 4, 2, **STAGES),
    case(dense_in(0, 1), {"offload_modules": ("expert_fc1", "moe_act")}, 2, 2),
    case(dense_in(1, 0), {"offload_modules": ("expert_fc1", "moe_act")}, 2, 2),
    case(dense_in(1, 0, 1, 1), {"offload_modules": ("expert_fc1", "moe_act")}, 4, 2, **STAGES),
]
KEPT_APART = [
    case("phi-4-tiny", {"offload_modules": ("core_attn", "attn_proj")}, 1, 1),
    case("phi-4-tiny", {"offload_modules": ("core_attn", "attn_proj")}, 2, 2),
    case("phi-4-tiny", {"offload_modules": ("core_attn",)}, 1, 2),
    case("phi-4-tiny", {"offload_modules": ("attn_norm", "core_attn", "mlp_norm")}, 1, 2),
    case("qwen3-moe-tiny", {"offload_modules": ("mlp_norm", "expert_fc1", "moe_act")}, 1, 2),
    case(
        "qwen3-moe-tiny",
        {"offload_modules": ("core_attn", "moe_act")} | SELECTIVE | {"recompute_modules": ("core_attn",)},
        1,
        2,
    ),
    case(
        "phi-4-tiny",
        {"offload_modules": ("qkv_linear", "core_attn"), "recompute_granularity": "full"}
        | {"recompute_method": "block", "recompute_num_layers": 1},
        *(1, 2),
    ),
    case("qwen3-moe-tiny", {"offload_modules": ("core_attn", "moe_act")}, 8, 2, **CHUNKS),
    case(dense_in(0, 1, 0), {"offload_modules": ("core_attn", "moe_act")}, 3, 2),
    case(dense_in(1, 0), {"offload_modules": ("core_attn", "mlp_norm", "moe_act")}, 2, 2),
    case(dense_in(0, 1), {"offload_modules": ("moe_act",)}, 2, 3),
    case(dense_in(0, 1, 1), {"offload_modules": ("core_attn", "moe_act")}, 3, 2, **UNEVEN_STAGES),
]


def run(model: str | Architecture, settings: MemorySettings, workload: dict[str, Any]) -> None:
    """Takes two steps on each stage."""
    layout = workload.get("layout", Layout())
    for rank in range(layout.world_size):
        with Lab(model, backend="simulated", **workload | {"layout": replace(layout, rank=rank)}) as lab:
            lab.step(settings, warm_up=False)
            lab.step(warm_up=False)


@pytest.mark.parametrize(("model", "settings", "workload"), MIXED_UP)
def test_what_megatron_0_19_mixes_up_is_refused(
    model: str | Architecture, settings: dict[str, Any], workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_restrictions, "_megatron_version", lambda: (0, 19))
    with pytest.raises(ValueError, match=r"^[a-z_]+ (has|is) .*the second step fails \('Chunk mismatch'.*\): [^\n]+$"):
        check_on_model(MemorySettings(**settings), Scenario.of(model, **workload))


@pytest.mark.parametrize(("model", "settings", "workload"), MIXED_UP)
def test_megatron_itself_fails_with_what_is_refused(
    model: str | Architecture, settings: dict[str, Any], workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = MemorySettings(**settings)
    if MINOR < 19 and without_effect._given_of_newer(chosen):
        pytest.skip("needs megatron-core 0.19")
    monkeypatch.setattr(model_restrictions, "_check_offload_groups", lambda *_: None)
    with pytest.raises(AssertionError, match="Chunk mismatch") if MINOR >= 19 else nullcontext():
        run(model, chosen, workload)


@pytest.mark.parametrize(("model", "settings", "workload"), KEPT_APART)
def test_what_is_not_refused_runs(
    model: str | Architecture, settings: dict[str, Any], workload: dict[str, Any]
) -> None:
    run(model, MemorySettings(**settings), workload)
