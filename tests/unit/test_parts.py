"""The parts of layers against the live Megatron model: on every rank the same parameters, by name, shape and number."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.layout import Layout
from memlab.config.parameters import kept_bytes, parameters_of_rank
from memlab.config.scenario import Dtype, Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.of_old_core import skip_if_newer_core_changed

_IN_LAYER = re.compile(r".*decoder\.layers\.\d+\.(.+)")
_OF_AN_EXPERT = re.compile(r"(mlp\.experts\.linear_fc\d\.(?:weight|bias))\d+")
MODELS = [
    ARCHITECTURES[name]
    for name in (
        "llama-3-tiny",
        "qwen2.5-tiny",
        "gpt-tiny",
        "nemotron-tiny",
        "deepseek-tiny",
        "glm-4.5-tiny",
        "gpt-oss-tiny",
        "minimax-tiny",
        "olmoe-tiny",
        "qwen2-moe-tiny",
        "nemotron-h-tiny",
        "nemotron-3-tiny",
        "qwen3-next-tiny",
        "qwen3-moe-tiny",
    )
]
LATENT_EXPERTS = replace(MODELS[-1], name="latent experts", moe_latent_size=48)
MODELS += [LATENT_EXPERTS]
MODELS += [replace(MODELS[-2], name="dense first", moe_layer_freq=(0, 1, 1, 1))]
MODELS += [replace(MODELS[-1], name="every second", moe_layer_freq=(1, 0, 1, 0))]
PRECISION_AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
SPREAD = Layout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, expert_model_parallel_size=2, rank=1)
LAYOUTS = [
    Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, rank=1),
    Layout(pipeline_model_parallel_size=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, layout) for model in MODELS for layout in LAYOUTS),
        *((model, SPREAD) for model in MODELS if model.routes and not model.norms_all_heads_fused),
        *((model, Layout(tensor_model_parallel_size=2)) for model in MODELS if not model.routes),
    ],
    ids=lambda value: value.name if isinstance(value, Architecture) else str(value),
)
def test_a_rank_has_the_parameters_that_megatron_builds(model: Architecture, layout: Layout) -> None:
    skip_if_newer_core_changed(model)
    live: Counter[tuple[str, tuple[int, ...]]] = Counter()
    numbers: Counter[str] = Counter()
    with Lab(model, num_layers=4, seq_length=64, num_microbatches=4, layout=layout, backend="simulated") as lab:
        scenario = lab.scenario
        for chunk in inside(lab).model.engine.live.chunks:
            for name, parameter in chunk.named_parameters():
                if (in_layer := _IN_LAYER.match(name)) is not None:
                    live[_OF_AN_EXPERT.sub(r"\1", in_layer[1]), tuple(parameter.shape)] += 1
                kind = "vocabulary" if in_layer is None else "experts" if ".experts." in name else "layers"
                numbers[kind] += parameter.numel()
    ranks = layout.expert_model_parallel_size
    assert live == {
        (weight.name, layout.shape_of(weight)): count * max(1, weight.num_experts // ranks)
        for weight, count in model.weights_of(scenario.layers_of_rank).items()
    }
    assert parameters_of_rank(scenario)._asdict() == {"experts": 0} | numbers


@pytest.mark.parametrize(
    ("model", "layout", "state", "dtype"),
    [
        ("phi-4-tiny", Layout(), {}, "bf16"),
        ("phi-4-tiny", Layout(data_parallel_size=4), {"use_distributed_optimizer": False}, "fp32"),
        ("phi-4-tiny", Layout(data_parallel_size=4, pipeline_model_parallel_size=2, rank=4), {}, "bf16"),
        ("qwen3-moe-tiny", Layout(expert_model_parallel_size=2, data_parallel_size=2), {}, "bf16"),
        ("qwen3-moe-tiny", Layout(expert_model_parallel_size=2, data_parallel_size=4), {"use_distributed_optimizer": False}, "bf16"),
        ("llama-3-tiny", Layout(tensor_model_parallel_size=2, data_parallel_size=2), PRECISION_AWARE, "bf16"),
    ],
)  # fmt: skip
def test_what_a_rank_keeps_is_known_without_a_model(
    model: str, layout: Layout, state: dict[str, Any], dtype: Dtype
) -> None:
    """To padding and scales, which tiny tensors have most of, and from below: no layout is left out that would fit."""
    of_run: dict[str, Any] = {"state": TrainingState(**state), "dtype": dtype, "layout": layout, "backend": "simulated"}
    with Lab(model, num_layers=2, seq_length=64, **of_run) as lab:
        kept, found = kept_bytes(lab.scenario), lab.step(warm_up=False).peak_by_category
    for expected, name in zip(kept, ("parameters", "gradients", "optimizer state"), strict=True):
        assert expected <= found[name] < 1.02 * expected, name


def test_a_rank_without_experts_has_a_dense_model_s_workspaces_and_says_which_settings_are_idle() -> None:
    mixed = replace(ARCHITECTURES["qwen3-moe-tiny"], moe_layer_freq=(0, 0, 1, 1))
    found = {}
    for rank in (0, 1):
        layout = Layout(pipeline_model_parallel_size=2, rank=rank)
        with Lab(mixed, num_layers=4, seq_length=64, layout=layout, backend="simulated") as lab:
            record = lab.step(
                MemorySettings(recompute_granularity="selective", recompute_modules=("moe_act",)), warm_up=False
            )
        found[rank] = record.peak_by_category["workspace"]
        assert ("recompute_modules:moe_act" in record.without_effect) == (rank == 0)
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        dense = lab.step(warm_up=False).peak_by_category["workspace"]
    of_cublas = 2 * 32 * 2**20  # only the output layer of the dense model is a matrix product of torch itself
    assert found[1] - found[0] >= 128 * 2**20 + of_cublas
    assert found[0] == pytest.approx(dense - of_cublas, abs=2**20)


def test_olmoe_s_norms_take_all_heads_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab("olmoe-tiny", num_layers=1, seq_length=32, backend="cpu") as lab:
        measured = lab.step()
        norm = inside(lab).model.engine.live.layers[0].self_attention.q_layernorm
        inputs = torch.randn(3, 2, 4, 32, dtype=torch.bfloat16)
        row = torch.nn.functional.rms_norm(inputs.flatten(2).float(), (128,), eps=1e-5)
        assert torch.allclose(norm(inputs).flatten(2).float(), row, atol=2e-2)
    monkeypatch.setattr("memlab.lab.lab.find_backend", lambda name: of_the_cpu_backend())
    with Lab("olmoe-tiny", num_layers=1, seq_length=32, backend="simulated") as lab:
        predicted = lab.step()
    assert predicted.activation_peak_bytes == measured.activation_peak_bytes
    with pytest.raises(ValueError, match="must be 1 for olmoe-tiny"):
        Lab("olmoe-tiny", layout=Layout(tensor_model_parallel_size=2), backend="simulated")


def test_latent_experts_are_refused_where_no_code_has_them() -> None:
    with pytest.raises(ValueError, match="engine is 'fsdp2' with moe_latent_size 48"):
        Scenario.of(LATENT_EXPERTS, engine="fsdp2")  # a Qwen3-MoE otherwise
    shared = replace(LATENT_EXPERTS, moe_shared_expert_intermediate_size=64)
    with pytest.raises(ValueError, match="moe_shared_expert_overlap is True with moe_latent_size 48"):
        Scenario.of(shared, state=TrainingState(moe_shared_expert_overlap=True))
