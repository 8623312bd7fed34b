"""The rules of memory settings: what is refused, in which words, and what Megatron takes and ignores."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from memlab.config import without_effect
from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MODULES, OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings, validation_error
from memlab.config.validation import RuleError

MOE, DENSE = find_architecture("qwen3-moe-tiny"), find_architecture("phi-4-tiny")

REFUSED = [
    ({"recompute_granularity": "some"}, ["recompute_granularity", "'some'", "full, selective"]),
    ({"recompute_granularity": "full"}, ["recompute_method", "uniform", "block"]),
    ({"recompute_granularity": "full", "recompute_method": "all"}, ["'all'", "uniform, block"]),
    ({"recompute_granularity": "full", "recompute_method": "uniform"}, ["recompute_num_layers", "for example 1"]),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0},
        ["recompute_num_layers is 0", "at least 1"],
    ),
    ({"recompute_method": "uniform"}, ["recompute_method", "granularity is None"]),
    ({"recompute_num_layers": 2}, ["recompute_num_layers", "granularity is None"]),
    ({"recompute_modules": ["mlp"]}, ["recompute_modules", "'selective'"]),
    (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "recompute_modules": ["mlp"],
        },
        ["recompute_modules", "'full'"],
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["attention"]},
        ["['attention']", "core_attn, layernorm"],
    ),
    ({"recompute_granularity": "selective", "recompute_modules": []}, ["recompute_modules", "empty"]),
    ({"recompute_granularity": "selective", "recompute_modules": "mlp"}, ["'mlp'", "list", "['mlp']"]),
    ({"offload_modules": []}, ["offload_modules", "empty"]),
    ({"offload_modules": "moe_act"}, ["'moe_act'", "list", "['moe_act']"]),
    ({"offload_modules": 42}, ["42", "list"]),
    ({"offload_modules": ["fc1"]}, ["['fc1']", "expert_fc1"]),
    ({"offload_modules": ["attn_proj"]}, ["'attn_proj' without 'core_attn'", "add 'core_attn'"]),
    (
        {"offload_modules": ["moe_act"], "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ["['moe_act']", "recompute of 'moe'"],
    ),
    (
        {"offload_modules": ["core_attn"], "min_offloaded_tensor_size": -1},
        ["min_offloaded_tensor_size is -1", "at least 0", "use 0 to offload tensors of any size"],
    ),
    ({"min_offloaded_tensor_size": 1.5}, ["min_offloaded_tensor_size is 1.5"]),
    ({"offload_optimizer": 1}, ["offload_optimizer is 1"]),
    ({"offload_parameters": "yes"}, ["offload_parameters is 'yes'", "True or False"]),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[str(values) for values, _ in REFUSED])
def test_a_broken_rule_is_refused_in_one_line_with_value_and_remedy(
    values: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        MemorySettings(**values)  # type: ignore[arg-type]
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"offload_modules": ["expert_fc1"]},
            ["offload_modules", "['expert_fc1']", "phi-4-tiny is dense", "core_attn"],
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, ["recompute_modules", "mlp"]),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5},
            ["recompute_num_layers is 5", "4 layers", "1 to 4"],
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
            ["recompute_num_layers is 3", "do not divide", "1, 2, 4"],
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused_on_that_model(values: dict[str, object], words: list[str]) -> None:
    settings = MemorySettings(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as refusal:
        check_on_model(settings, Scenario.of(DENSE, num_layers=4))
    assert [word for word in words if word not in str(refusal.value)] == []


def test_settings_that_mean_the_same_are_equal() -> None:
    assert MemorySettings(offload_modules=["moe_act", "core_attn", "moe_act"]) == MemorySettings(
        offload_modules=("core_attn", "moe_act")
    )
    assert MemorySettings(recompute_granularity="selective") == MemorySettings(
        recompute_granularity="selective", recompute_modules=["core_attn"]
    )
    assert len({MemorySettings(), MemorySettings(offload_gradients=False)}) == 1


def test_gradients_go_with_the_optimizer_or_alone_but_never_with_the_parameters() -> None:
    assert MemorySettings(offload_optimizer=True).offload_gradients is True
    assert MemorySettings(offload_optimizer=True, offload_gradients=False).offload_gradients is False
    assert MemorySettings(offload_gradients=True).offload_optimizer is False
    assert MemorySettings(offload_parameters=True).offload_gradients is False


def test_numpy_s_whole_numbers_are_whole_numbers_and_its_other_numbers_are_not() -> None:
    given = MemorySettings(offload_modules=["moe_act"], min_offloaded_tensor_size=np.int64(3))
    assert given == MemorySettings(offload_modules=["moe_act"], min_offloaded_tensor_size=3)
    assert type(given.min_offloaded_tensor_size) is int, "JSON has no other"
    with pytest.raises(RuleError, match=r"min_offloaded_tensor_size is .*3\.0.*, must be a whole number"):
        MemorySettings(offload_modules=["moe_act"], min_offloaded_tensor_size=np.float64(3))  # type: ignore[arg-type]


def test_settings_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MemorySettings().min_offloaded_tensor_size = -1  # type: ignore[misc]
    with pytest.raises(ValueError, match="core_attn"):
        dataclasses.replace(MemorySettings(offload_modules=["core_attn", "attn_proj"]), offload_modules=("attn_proj",))


def test_settings_survive_json() -> None:
    settings = MemorySettings(
        recompute_granularity="selective",
        recompute_modules=["moe_act"],
        offload_modules=list(OFFLOAD_MODULES),
        offload_optimizer=True,
    )
    assert MemorySettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(ValueError, match="recompute_granularity"):
        MemorySettings.from_dict({"granularity": "full"})


def test_a_fused_norm_is_named_as_the_reason_that_a_setting_does_nothing() -> None:
    settings = MemorySettings(
        offload_modules=["attn_norm", "mlp_norm"],
        recompute_granularity="selective",
        recompute_modules=["layernorm", "mlp"],
    )
    assert set(without_effect.of_settings(settings, MOE)) == {"offload_modules:attn_norm", "recompute_modules:mlp"}
    assert set(without_effect.of_settings(settings, DENSE)) == {
        "offload_modules:attn_norm",
        "offload_modules:mlp_norm",
        "recompute_modules:layernorm",
    }
    assert "fused into linear_qkv" in without_effect.of_settings(settings, MOE)["offload_modules:attn_norm"]


@pytest.mark.parametrize("names", [["QKV_Linear", "core-attn"], ["qkv_linear, core_attn"], ["qkv_linear", "Core_Attn"]])
def test_names_of_modules_in_other_spellings_are_told_as_megatron_has_them(names: list[str]) -> None:
    with pytest.raises(RuleError, match=r"one by one: write \['qkv_linear', 'core_attn'\]"):
        MemorySettings(offload_modules=names)  # type: ignore[arg-type]
    for unknown in ([""], ["core_attn nope"]):
        with pytest.raises(RuleError, match="which memlab does not model: choose from"):
            MemorySettings(offload_modules=unknown)  # type: ignore[arg-type]


def test_a_minimum_size_without_offload_modules_is_said_to_do_nothing() -> None:
    reasons = without_effect.of_settings(MemorySettings(min_offloaded_tensor_size=0), MOE)
    assert list(reasons) == ["min_offloaded_tensor_size"]


def test_the_short_name_tells_settings_apart() -> None:
    names = [
        str(MemorySettings()),
        str(MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)),
        str(MemorySettings(offload_modules=["moe_act"], offload_parameters=True)),
    ]
    assert names == ["none", "full uniform 2", "offload moe_act, on host parameters"]


def test_a_refusal_is_the_rule_s_text_or_nothing() -> None:
    assert validation_error(offload_modules=["core_attn"]) is None
    assert (validation_error(offload_modules=["attn_proj"]) or "").startswith(
        "offload_modules has 'attn_proj' without 'core_attn'"
    )


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("gradients", [None, False, True])
def test_the_fields_that_are_named_make_equal_settings(optimizer: bool, gradients: bool | None) -> None:
    settings = MemorySettings(offload_optimizer=optimizer, offload_gradients=gradients, offload_modules=["core_attn"])
    assert MemorySettings(**settings.changed()) == settings
    assert MemorySettings().changed() == {}


def test_offload_beside_full_recompute_is_refused_on_pipeline_stages_alone() -> None:
    settings = MemorySettings(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        offload_modules=["qkv_linear"],
    )
    check_on_model(settings, Scenario.of(MOE, num_layers=4))
    with pytest.raises(ValueError, match="on pipeline stages, because"):
        check_on_model(settings, Scenario.of(MOE, num_layers=4, layout=Layout(pipeline_model_parallel_size=2)))


def test_one_name_that_is_no_list_is_told_to_become_one_only_where_it_is_a_module() -> None:
    with pytest.raises(RuleError, match=r"must be a list of module names: write \['core_attn'\] for a single one"):
        MemorySettings(offload_modules="core_attn")  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=r"is 'all', must be a list of module names: name some of .*core_attn"):
        MemorySettings(offload_modules="all")  # type: ignore[arg-type]


def test_the_settings_say_what_each_module_is() -> None:
    assert {*MODULES} == {*RECOMPUTE_MODULES, *OFFLOAD_MODULES}
