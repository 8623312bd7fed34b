"""Settings of activation offload that megatron-core has since 0.18 or 0.19: refused before it, changed in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megatron.core
import pytest
from megatron.core.package_info import MINOR
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.config import model_restrictions, without_effect
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model, not_in_megatron
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import NEWER_SETTINGS, MemorySettings
from memlab.lab.lab import Lab
from memlab.regression.case_measurements import _on
from memlab.views.panel.panel import panel
from tests.unit.fake_lab import FakeLab
from tests.unit.live import offload

pytestmark = pytest.mark.versions

OFFLOAD = offload("qkv_linear", "expert_fc1", "moe_act")
HALF = replace(OFFLOAD, activation_offload_fraction=0.5)
needs_0_19 = pytest.mark.skipif(MINOR < 19, reason="needs megatron-core 0.19")


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"activation_offload_fraction": 0.5}, 19),
        ({"delta_offload_bytes_across_pp_ranks": 1}, 19),
        ({"fine_grained_offloading_max_inflight_offloads": 0}, 18),
    ],
    ids=str,
)
def test_a_setting_that_the_installed_version_lacks_is_refused(
    values: dict[str, Any], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, settings = Scenario.of("phi-4-tiny"), MemorySettings(**values)
    monkeypatch.setattr(model_restrictions, "_megatron_version", lambda: (0, first - 1))
    (name,) = values
    refused = rf"^{name} is {values[name]}, but .* 0\.{first - 1} does not have this setting.* 0\.{first}$"
    with pytest.raises(ValueError, match=refused):
        check_on_model(settings, scenario)
    check_on_model(OFFLOAD, Scenario.of("qwen3-moe-tiny"))
    monkeypatch.setattr(model_restrictions, "_megatron_version", lambda: (0, first))
    check_on_model(settings, scenario)
    assert list(without_effect.of_settings(settings, scenario.architecture)) == [name], "no offload_modules are named"


def test_a_version_that_lacks_a_setting_has_no_such_field() -> None:
    fields = TransformerConfig.__dataclass_fields__
    assert {name for name in NEWER_SETTINGS if name in fields} == {
        name for name in NEWER_SETTINGS if not not_in_megatron(options_of(MemorySettings)[name])
    }


def test_the_version_is_the_installed_one_and_known_without_megatron() -> None:
    major, minor = model_restrictions._megatron_version()
    assert megatron.core.__version__.startswith(f"{major}.{minor}.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"activation_offload_fraction": 1.5},
            "activation_offload_fraction is 1.5, must be a number of at least 0 and at",
        ),
        ({"activation_offload_fraction": True}, "activation_offload_fraction is True"),
        ({"delta_offload_bytes_across_pp_ranks": -1}, "delta_offload_bytes_across_pp_ranks is -1, must be a whole"),
        ({"fine_grained_offloading_max_inflight_offloads": 1.0}, "max_inflight_offloads is 1.0, must be a whole"),
    ],
    ids=str,
)
def test_values_beyond_megatron_s_ranges_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySettings(**values)


def test_baselines_from_before_do_not_differ() -> None:
    assert set(NEWER_SETTINGS).isdisjoint(_on(OFFLOAD.to_dict()))
    assert _on(HALF.to_dict())["activation_offload_fraction"] == 0.5
    assert "activation_offload_fraction 0.5" in str(HALF)
    assert MemorySettings.from_dict(HALF.to_dict()) == MemorySettings(**HALF.changed()) == HALF


@needs_0_19
def test_a_fraction_changes_in_place_what_is_offloaded() -> None:
    with Lab("qwen3-moe-tiny", num_layers=4, seq_length=64, backend="cpu") as lab:
        plain, whole, half = lab.step(MemorySettings()), lab.step(OFFLOAD), lab.step(HALF)
        none = lab.step(replace(OFFLOAD, activation_offload_fraction=0.0))
        again = lab.step(OFFLOAD)
        with pytest.raises(ValueError, match=r"must have 1 and 0"):
            lab.audit_offload(HALF)
    assert len({record.loss for record in (plain, whole, half, none)}) == 1
    assert plain.peak_allocated_bytes == none.peak_allocated_bytes > half.peak_allocated_bytes
    assert half.peak_allocated_bytes > whole.peak_allocated_bytes == again.peak_allocated_bytes
    assert whole.offloaded_bytes_by_module == again.offloaded_bytes_by_module
    moved = [sum(record.offloaded_bytes_by_module.values()) for record in (none, half, whole)]
    assert moved[0] == 0 < moved[1] < moved[2]
    assert "activation_offload_fraction 0" in none.without_effect["offload_modules:moe_act"]


@pytest.mark.skipif(MINOR < 18, reason="needs megatron-core 0.18")
def test_waiting_for_each_transfer_moves_the_same_bytes() -> None:
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        whole = lab.step(OFFLOAD)
        waiting = lab.step(replace(OFFLOAD, fine_grained_offloading_max_inflight_offloads=0))
    assert whole.loss == waiting.loss
    assert whole.offloaded_bytes_by_module == waiting.offloaded_bytes_by_module


@needs_0_19
@pytest.mark.parametrize("stage", [0, 1])
def test_a_later_stage_leaves_more_on_the_device(stage: int) -> None:
    layout = Layout(pipeline_model_parallel_size=2, rank=stage)
    with Lab("qwen3-moe-tiny", num_layers=8, seq_length=64, backend="simulated", layout=layout) as lab:
        whole = lab.step(OFFLOAD)
        differs = lab.step(replace(OFFLOAD, delta_offload_bytes_across_pp_ranks=1))
    moved, fewer = (sum(each.offloaded_bytes_by_module.values()) for each in (whole, differs))
    assert (fewer < moved) == (stage == 1)
    assert ("delta_offload_bytes_across_pp_ranks" in differs.without_effect) == (stage == 0)


LATER = {
    "activation_offload_fraction": 0.5,
    "delta_offload_bytes_across_pp_ranks": 1024,
    "fine_grained_offloading_max_inflight_offloads": 0,
}


def test_each_control_of_the_panel_gives_what_the_api_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_restrictions, "_megatron_version", lambda: (0, 19))
    shown = panel(FakeLab(), predict=False)
    state, controls = shown.state, shown.controls.by_name
    state.toggle("offload_modules", "core_attn", on=True)
    for name, value in LATER.items():
        assert not controls[name].disabled
        controls[name].value = value
    assert state.settings == MemorySettings(offload_modules=["core_attn"], min_offloaded_tensor_size=0, **LATER)
    controls["fine_grained_offloading_max_inflight_offloads"].value = -1
    assert state.settings is not None and state.settings.fine_grained_offloading_max_inflight_offloads is None
    controls["activation_offload_fraction"].value = 1.5
    assert (
        "activation_offload_fraction is 1.5, must be"
        in shown.controls.heads["Offload, in newer versions of megatron-core"].value
    )
    shown.close()


def test_the_panel_shows_and_refuses_what_the_installed_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_restrictions, "_megatron_version", lambda: (0, 16))
    shown = panel(FakeLab(), predict=False)
    for name in LATER:
        assert shown.controls.by_name[name].disabled
        assert "megatron-core 0.16 does not have this setting (0.1" in shown.controls.notes[name].value
    shown.state.edit(activation_offload_fraction=0.5)  # as a record of another machine had it
    fraction = shown.controls.by_name["activation_offload_fraction"]
    assert (
        "megatron-core 0.16 does not have this setting"
        in shown.controls.heads["Offload, in newer versions of megatron-core"].value
    )
    assert shown.state.settings is None and not fraction.disabled, "it can be taken back"
    fraction.value = 1.0
    assert shown.state.settings == MemorySettings() and fraction.disabled
    shown.close()
