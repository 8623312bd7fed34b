"""NeMo Automodel's own classes of Llama, Qwen2 and Qwen3 in the engine fsdp2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.backends.simulated import predicting
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
from memlab.engines.fsdp2.adapters import _FusedMlp, add_adapters
from memlab.engines.fsdp2.automodel_classes import change_classes
from memlab.engines.fsdp2.hugging_face import build_model
from tests.unit.automodel_classes import assert_saves_and_computes

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def of(model: str, classes: Any, **more: Any) -> Scenario:
    sizes: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}
    return Scenario.of(model, **sizes | more, state=TrainingState(model_classes=classes))


@pytest.mark.parametrize(
    ("model", "classes", "measured"),
    [
        ("llama-3-tiny", "automodel", 732_928),
        ("llama-3-tiny", "automodel_0.7.0", 739_840),
        ("qwen2.5-tiny", "automodel", 732_928),
        ("qwen3-dense-tiny", "automodel", 981_760),
        ("qwen3-dense-tiny", "automodel_0.7.0", 989_952),
    ],
)
def test_they_save_as_much_as_the_classes_themselves_and_compute_what_transformers_does(
    model: str, classes: str, measured: int
) -> None:
    """Bytes that Automodel's own classes saved for backward on a CPU (torch 2.13, transformers 5.24), two layers."""
    assert_saves_and_computes(of(model, classes), "sdpa", measured, deviation=None)


@pytest.mark.parametrize("classes", ["automodel", "automodel_0.7.0"])
def test_a_live_step_needs_what_is_predicted_and_checkpoints_change_in_place(classes: str) -> None:
    scenario, records = of("llama-3-tiny", classes, seq_length=512), {}
    for backend in ("cpu", predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            records[backend] = [lab.step(settings) for settings in (MemorySettings(), FULL, MemorySettings())]
    live, predicted = ([one.peak_by_category for one in steps] for steps in records.values())
    assert predicted == live and live[0] == live[2] != live[1]
    assert all(step.residual_bytes == 0 for steps in records.values() for step in steps)


def test_checkpoints_of_parts_keep_four_inputs_of_a_layer() -> None:
    peaks = []
    for num_layers in (4, 5):
        scenario = of("llama-3-tiny", "automodel", num_layers=num_layers, seq_length=512)
        with Lab(scenario, backend=predicting("cpu")) as lab:
            peaks.append(lab.step(FULL).activation_peak_bytes)
    assert peaks[1] - peaks[0] == 4 * 2 * 512 * scenario.architecture.hidden_size


def test_longer_rows_have_the_positions_of_a_new_model() -> None:
    scenario, backend = of("llama-3-tiny", "automodel"), predicting("cpu")
    with Lab(scenario, backend=backend) as lab:
        lab.step()
        lab.set_workload(seq_length=256)
        changed = [lab.step(), lab.forward_only(seq_length=512)]
    with Lab(replace(scenario, seq_length=256), backend=backend) as lab:
        new = [lab.step(), lab.forward_only(seq_length=512)]
    assert [one.peak_by_category for one in changed] == [one.peak_by_category for one in new]
    with Lab(scenario, backend="cpu") as lab:
        lab.step()
        lab.forward_only(seq_length=128)


@pytest.mark.parametrize(("classes", "is_fused"), [("transformers", True), ("automodel", False)])
def test_mlps_with_adapters_are_fused_only_in_the_classes_of_transformers(classes: Any, is_fused: bool) -> None:
    """Automodel builds its own classes on the meta device, on one rank too, where it fuses none."""
    lora = LoRA(rank=8, target_modules=("*_proj",), fsdp2_library="automodel")
    scenario = replace(of("llama-3-tiny", classes), state=TrainingState(lora=lora, model_classes=classes))
    module = build_model(scenario, torch.bfloat16, attention="sdpa")
    change_classes(module, scenario)
    add_adapters(module, scenario)
    assert {isinstance(layer.mlp.forward, _FusedMlp) for layer in module.model.layers} == {is_fused}


def test_ranks_that_share_a_sequence_have_positions_up_to_their_last_chunk() -> None:
    static = []
    for rank in (0, 1):
        scenario = of("llama-3-tiny", "automodel")
        scenario = replace(scenario, layout=Layout(context_parallel_size=2, rank=rank))
        with Lab(scenario, backend=predicting("cpu")) as lab:
            static.append(lab.step().static_bytes)
    assert static[0] - static[1] == 2 * 2 * 16 * scenario.architecture.kv_channels


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("phi-4-tiny", Layout(), "phi-4-tiny is of the family phi3, of which NeMo Automodel has no class"),
        ("llama-3-tiny", Layout(tensor_model_parallel_size=2, sequence_parallel=True), "and sequence_parallel, which"),
    ],
)
def test_what_they_cannot_be_is_named(model: str, layout: Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(of(model, "transformers"), layout=layout, state=TrainingState(model_classes="automodel"))
