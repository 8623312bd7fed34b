"""The calculator of lab 01: its formulas are those of the cheat sheet, and its sum is that of a predicted step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from memlab import Lab, MemorySettings, calculator
from memlab.analysis.by_hand import bytes_by_hand, formulas_of
from memlab.analysis.kept import kept_by_module
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.units import GIB
from tests.unit.live import FULL, recompute
from tests.unit.of_old_core import skip_if_newer_core_changed
from tests.unit.test_cheat_sheet import formulas, letters

SIZES = {"phi-4": (4, 4096), "qwen3-30b-a3b": (2, 1024), "phi-4-tiny": (2, 256), "qwen3-moe-tiny": (3, 512)}


@pytest.mark.parametrize("name", SIZES)
def test_each_part_is_what_the_cheat_sheet_s_formula_gives(name: str) -> None:
    model, (num_layers, tokens) = ARCHITECTURES[name], SIZES[name]
    kind, heading = ("MoE", "MoE layer (Qwen3's kind)") if model.routes else ("dense", "Dense layer (phi-4's kind)")
    of_model = letters(model, num_layers, tokens)

    def value(formula: str) -> int:
        return int(eval(formula, {}, of_model))  # noqa: S307  # a line of the cheat sheet

    sheet = formulas()
    rest = sheet["The rest of a step"]
    of_model["P"] = value(rest[f"P of {'an MoE' if model.routes else 'a dense'} model"])
    layer = {"none": sum(value(formula) for row, formula in sheet[heading].items() if row != "dense layer")}
    for row, formula in sheet["What a layer keeps under a setting"].items():
        if row.startswith(f"{kind}, "):
            layer[row.rpartition(" ")[2] if "full" not in row else "full"] = value(formula)
    choices = formulas_of(model)
    assert {*layer} == {*choices}
    for choice in choices:
        parts = bytes_by_hand(model, num_layers, tokens, choice)
        assert parts["kept by the layers"] == num_layers * layer[choice]
        for part, row in (("parameters", "bf16"), ("gradients", "fp32"), ("optimizer state", "fp32")):
            assert parts[part] == value(rest[f"{part}, {row}"])


@pytest.mark.parametrize("settings", [MemorySettings(), recompute("mlp")], ids=str)
def test_the_sum_is_within_a_hundredth_of_the_peak_of_a_predicted_step(settings: MemorySettings) -> None:
    with Lab("phi-4", num_layers=4, seq_length=4096, backend="simulated") as lab:
        peak = lab.step(settings).peak_allocated_bytes
    parts = bytes_by_hand(ARCHITECTURES["phi-4"], 4, 4096, "none" if settings == MemorySettings() else "mlp")
    assert sum(parts.values()) == pytest.approx(peak, rel=0.01)


PHI, QWEN, GPT = (ARCHITECTURES[name] for name in ("phi-4-tiny", "qwen3-moe-tiny", "gpt-tiny"))


LATENT = replace(ARCHITECTURES["deepseek-tiny"], num_moe_experts=None, moe_layer_freq=None, v_head_dim=16)
_DENSE = {"num_moe_experts": None, "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
DELTA_NET = replace(ARCHITECTURES["qwen3-next-tiny"], **_DENSE)


@pytest.mark.parametrize(
    "model",
    [
        *(PHI, replace(PHI, qk_layernorm=True, num_query_groups=1), QWEN, replace(QWEN, qk_layernorm=False)),
        LATENT,
        replace(LATENT, q_lora_rank=None, qk_layernorm=False, rope_type="rope"),
        *(GPT, replace(GPT, qk_layernorm=True, gated_linear_unit=True), replace(QWEN, normalization="LayerNorm")),
        *(replace(DELTA_NET, linear_attention_freq=(which,) * 4) for which in (1, 0)),
        replace(DELTA_NET, linear_attention_freq=(1,) * 4, linear_num_value_heads=2, linear_value_head_dim=64),
    ],
    ids=[
        *("phi-4's", "dense Qwen3's", "Qwen3-MoE's", "Mixtral's", "latent attention", "latent keys only"),
        *("GPT's", "GPT's with a gate", "LayerNorm"),
        *("gated delta net", "attention with a gate", "gated delta net with as many keys as values"),
    ],
)
def test_the_parts_of_a_layer_keep_what_is_metered(model: Architecture) -> None:
    skip_if_newer_core_changed(model)
    settings = {"none": MemorySettings(), "full": FULL, "mlp": recompute("mlp"), "core_attn": recompute("core_attn")}
    with Lab(model, num_layers=2, seq_length=128, backend="simulated") as lab:
        for name in formulas_of(model):
            metered = sum(kept_by_module(lab.step(settings[name])).values())
            assert sum(part.kept_bytes(128, name) for part in model.parts) == metered


def test_a_slider_changes_the_text_and_the_bar() -> None:
    shown = calculator("phi-4")
    assert repr(shown) == shown.text == shown._repr_mimebundle_()["text/plain"]
    assert shown.text.startswith("phi-4, 4 layers, 4,096 tokens, no recompute: 45.")
    assert "less than 80 GiB" in shown.text and "left:100.0000%" in shown.bar.value
    before = shown.parts
    shown.num_layers.value, shown.tokens.value = 8, 32_768
    assert sum(shown.parts.values()) > 80 * GIB
    assert "more than 80 GiB" in shown.text and "left:100.0000%" not in shown.bar.value
    assert shown.text.splitlines()[0] in shown.bar.value
    shown.recompute.value = "full"
    assert "8 layers, 32,768 tokens, full recompute" in shown.text
    assert shown.parts["kept by the layers"] == 8 * 32_768 * 2 * 5120
    assert shown.parts["gradients"] > before["gradients"]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%;background", shown.bar.value)]
    expected = 100 if "more than" in shown.text else 100 * sum(shown.parts.values()) / 80 / GIB
    assert sum(widths) == pytest.approx(expected, abs=len(widths) * 0.00005), "each has four decimals"


def test_a_model_without_a_formula_is_named() -> None:
    with pytest.raises(
        ValueError, match="deepseek-tiny has a router or shared experts, for which the cheat sheet has no"
    ):
        bytes_by_hand(ARCHITECTURES["deepseek-tiny"], 2, 128)


def test_a_calculator_for_experts_offers_what_has_a_formula() -> None:
    assert [value for _, value in calculator("qwen3-30b-a3b").recompute.options] == ["none", "full"]
    with pytest.raises(ValueError, match="recompute is 'mlp', must be one of none, full"):
        bytes_by_hand(ARCHITECTURES["qwen3-30b-a3b"], 1, 256, "mlp")
    for wrong, words in (
        ({"num_layers": 41}, "num_layers is 41, must be from 1 to 40"),
        ({"tokens": 0}, "tokens is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            calculator("phi-4", **wrong)
