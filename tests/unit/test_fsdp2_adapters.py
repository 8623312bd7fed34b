"""Adapters of PEFT and of NeMo Automodel beside transformers' linears: their places, sizes, gradients and kept bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import Lab, Layout, MemorySettings
from memlab.backends.simulated import predicting
from memlab.config import without_effect
from memlab.config.architectures import find_architecture
from memlab.config.families import FAMILIES
from memlab.config.lora import LibraryOfFsdp2, LoRA
from memlab.config.parameters import kept_bytes
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.transformers_linears import adapted_linears
from memlab.engines.fsdp2.adapters import PeftParameter

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions


def model_of(name: str, lora: LoRA, **options: Any) -> Any:
    from memlab.engines.fsdp2.adapters import add_adapters
    from memlab.engines.fsdp2.hugging_face import build_model

    state = TrainingState(lora=lora)
    scenario = Scenario.of(name, num_layers=2, seq_length=16, engine="fsdp2", state=state, **options)
    torch.manual_seed(0)
    model = build_model(scenario, torch.float32, attention="sdpa")
    add_adapters(model, scenario)
    return model, scenario


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi-4-tiny", ("linear_qkv", "down_proj")),
        ("llama-3-tiny", ("*.layers.1.*_proj",)),
        ("qwen2.5-tiny", ()),
        ("qwen3-moe-tiny", ("linear_qkv", "down_proj")),
        ("qwen3-moe-tiny", ()),
    ],
)
def test_the_adapters_are_those_that_are_counted(name: str, targets: tuple[str, ...]) -> None:
    excluded = () if targets else ("output_layer", "*.o_proj")
    lora = LoRA(rank=4, target_modules=targets, exclude_modules=excluded)
    model, scenario = model_of(name, lora)
    trained = [each for each in model.parameters() if each.requires_grad]
    linears = [*adapted_linears(scenario.architecture, 2, lora)]
    assert {tuple(each.shape) for each in trained} == {
        shape for one in linears for shape in ((4, one.inputs), (one.outputs, 4))
    }
    count = sum(4 * (one.inputs + one.outputs) for one in linears)
    assert sum(each.numel() for each in trained) == count
    frozen = 2 * find_architecture(name).with_layers(2).num_parameters
    assert kept_bytes(scenario) == (frozen + 4 * count, 4 * count, 8 * count), "the adapters are in fp32"


@pytest.mark.parametrize(
    ("name", "targets", "shapes"),
    [
        ("qwen3-moe-tiny", (), {"gate_up_proj": (128, 64, 128), "down_proj": (128, 32, 64), "weight": (8, 4, 128)}),
        ("qwen3-moe-tiny", ("q_proj", "down_proj"), {"down_proj": (128, 32, 64)}),
        ("qwen3-moe-tiny", ("gate", "gate_proj", "up_proj"), {"gate_up_proj": (128, 64, 128), "weight": (8, 4, 128)}),
        ("mixtral-tiny", ("w1", "w2", "w3"), {"gate_up_proj": (128, 64, 128), "down_proj": (128, 32, 64)}),
        ("mixtral-tiny", ("q_proj", "down_proj"), {}),
        ("llama-3-tiny", (), {}),
    ],
)
def test_experts_have_the_adapters_that_peft_gives_them(
    name: str, targets: tuple[str, ...], shapes: dict[str, tuple[int, int, int]]
) -> None:
    """Outputs, width and inputs of rank 4 as PEFT 0.20.0 and 0.21.2 make them beside transformers 5.24."""
    model, scenario = model_of(name, LoRA(rank=4, target_modules=targets, fused_experts=True))
    found = {
        module.adapted.name: (module.lora_B.out_features, module.lora_A.out_features, module.lora_A.in_features)
        for module in model.model.layers[1].modules()
        if isinstance(module, PeftParameter)
    }
    assert found == shapes
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert kept_bytes(scenario).optimizer == 8 * count


@pytest.mark.parametrize(("is_full", "peak"), [(False, 4_179_820), (True, 3_750_460)])
def test_adapters_of_experts_take_what_peft_s_own_take(is_full: bool, peak: int) -> None:
    """Bytes with PEFT 0.21.2's own adapters in the same lab (torch 2.13); without a router, which a CPU casts to fp32."""
    lora = LoRA(rank=4, target_modules=("q_proj", "down_proj"), fused_experts=True, enable_input_require_grads=True)
    state = TrainingState(lora=lora, fp32_sharded_params=True)
    full = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    settings = full if is_full else MemorySettings()
    scenario = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=64, engine="fsdp2", state=state)
    for backend in ("cpu", predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            lab.step(settings)
            record = lab.step(settings)
        assert (record.static_bytes, record.peak_allocated_bytes) == (2_411_648, peak)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ("q_proj", "gate_proj")}, "names gate_proj and not all of gate_proj, up_proj"),
        ({"dropout": 0.1, "target_modules": ()}, "lora_dropout is 0.1 with lora_fused_experts"),
        ({"fsdp2_library": "automodel"}, "lora_fused_experts is True with lora_fsdp2_library"),
    ],
)
def test_adapters_of_experts_that_peft_refuses_are_refused(options: dict[str, Any], words: str) -> None:
    lora = LoRA(rank=4, fused_experts=True, **options)
    with pytest.raises(ValueError, match=words):
        Scenario.of("qwen3-moe-tiny", seq_length=16, engine="fsdp2", state=TrainingState(lora=lora))


@pytest.mark.parametrize("target", ["linear_fc1", "*_proj"])
def test_what_recomputes_in_backward_has_the_gradients_of_what_keeps_all(target: str) -> None:
    gradients = []
    libraries: tuple[LibraryOfFsdp2, ...] = ("peft", "automodel")
    for library in libraries:
        targets = (target,) if target.startswith("*") else (target, "linear_proj")
        model, _ = model_of("llama-3-tiny", LoRA(rank=4, fsdp2_library=library, target_modules=targets), dtype="fp32")
        for number, each in enumerate(model.parameters()):
            if each.requires_grad:  # the second matrix is zero at first, so that the first would have no gradient
                torch.nn.init.normal_(each, 0, 0.1, generator=torch.Generator().manual_seed(number))
        tokens = torch.arange(32).view(2, 16)
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.requires_grad])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for one, other in zip(*gradients, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_peft_leaves_the_experts_of_some_models_out() -> None:
    """As PEFT 0.21.2 adapts tiny models of transformers 5.24.0: of these, not with all-linear either."""
    left_out = {family for family, row in FAMILIES.items() if row.experts and not row.linears_of_expert}
    assert left_out == {"gpt_oss", "qwen2_moe", "qwen3_5_moe_text"}


def test_names_of_experts_are_without_effect() -> None:
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=16, engine="fsdp2", state=TrainingState(lora=LoRA(rank=4)))
    said = without_effect.of_scenario(scenario)
    assert said["lora_target_modules"] == "no linear of transformers' model is named linear_fc1 or linear_fc2"


@pytest.mark.parametrize(("excluded", "is_idle"), [("linear_q", True), ("*.v_proj", False), ("output_layer", False)])
def test_excluded_names_that_no_linear_has_are_named(excluded: str, is_idle: bool) -> None:
    lora = LoRA(rank=4, target_modules=(), exclude_modules=(excluded,))
    scenario = Scenario.of("llama-3-tiny", seq_length=16, engine="fsdp2", state=TrainingState(lora=lora))
    assert ("lora_exclude_modules" in without_effect.of_scenario(scenario)) == is_idle


@pytest.mark.parametrize(("library", "is_idle"), [("peft", True), ("automodel", False)])
def test_adapters_in_fp32_have_no_remainders(library: LibraryOfFsdp2, is_idle: bool) -> None:
    lora = LoRA(rank=4, fsdp2_library=library)
    adam: dict[str, Any] = {"adam_implementation": "te_fused", "master_weights": True, "store_param_remainders": True}
    scenario = Scenario.of("llama-3-tiny", seq_length=16, engine="fsdp2", state=TrainingState(lora=lora, **adam))
    assert ("store_param_remainders" in without_effect.of_scenario(scenario)) == is_idle
    count = sum(4 * (one.inputs + one.outputs) for one in adapted_linears(scenario.architecture, 4, lora))
    assert kept_bytes(scenario).optimizer == (8 + (4 if is_idle else 2)) * count


OF_AUTOMODEL = LoRA(rank=8, target_modules=("*_proj",), fsdp2_library="automodel", dropout_position="post")


def test_tensor_parallel_ranks_divide_the_adapters_of_automodel_too() -> None:
    """Bytes of each of two live ranks over gloo (torch 2.13); what is saved is what Automodel's own adapters save."""
    sizes: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=False)
    scenario = Scenario.of("llama-3-tiny", **sizes, layout=layout, state=TrainingState(lora=OF_AUTOMODEL))
    with Lab(scenario, backend=predicting("cpu")) as lab:
        record = lab.step()
    assert (record.static_bytes, record.peak_allocated_bytes) == (635_264, 1_657_004)
    assert kept_bytes(scenario).optimizer == record.peak_by_category["optimizer state"] == 83_968


@pytest.mark.parametrize(
    ("lora", "sequence_parallel", "words"),
    [
        (LoRA(rank=8, target_modules=(), fsdp2_library="peft"), False, "and lora_rank"),
        (LoRA(rank=8, target_modules=(), fsdp2_library="automodel", dropout=0.1), False, "and lora_rank"),
        (OF_AUTOMODEL, True, "and sequence_parallel"),
        (replace(OF_AUTOMODEL, rank=3), False, "must divide lora_rank 3"),
    ],
)
def test_other_adapters_beside_tensor_parallel_ranks_are_refused(
    lora: LoRA, sequence_parallel: bool, words: str
) -> None:
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    with pytest.raises(ValueError, match=words):
        Scenario.of("llama-3-tiny", seq_length=16, engine="fsdp2", layout=layout, state=TrainingState(lora=lora))
