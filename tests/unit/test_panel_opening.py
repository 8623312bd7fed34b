"""The row that opens a lab for `memlab.panel()`: what it asks `Lab` for, what it refuses, and the panel that it shows."""

from __future__ import annotations

from typing import Any

import ipywidgets
import pytest

from memlab import ARCHITECTURES, LoRA, TrainingState, Versions, panel
from memlab.views.panel.opening import Opening


class Asked:
    """Stands in for a lab that was opened."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options, self.is_closed = name, options, False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def row() -> Opening:
    return Opening(lambda lab: ipywidgets.HTML(lab.name), Asked)  # type: ignore[arg-type]  # a test's substitute


def test_each_model_can_be_opened_with_the_layers_that_the_row_proposes(row: Opening) -> None:
    assert set(row.model.options) == set(ARCHITECTURES)
    for name in row.model.options:
        row.model.value = name
        row.open_button.click()
        assert isinstance(row.lab, Asked), row.said.value
        assert row.lab.name == name
        assert row.lab.options["engine"] == ("fsdp2" if ARCHITECTURES[name].only_in_transformers else "megatron")
        assert row.lab.options["backend"] == ("auto" if name.endswith("-tiny") else "simulated")
        assert 1 <= row.lab.options["num_layers"] <= 4


def test_the_row_says_how_much_of_a_predicted_model_is_open(row: Opening) -> None:
    row.model.value = "qwen3-30b-a3b"
    row.open_button.click()
    assert "qwen3-30b-a3b is predicted, 4 of 48 layers on one GPU." in row.said.value
    row.layers.value = 48
    row.open_button.click()
    assert "qwen3-30b-a3b is predicted, all 48 layers on one GPU." in row.said.value


def test_engine_versions_and_adapters_are_those_of_the_controls(row: Opening) -> None:
    row.model.value, row.layers.value, row.engine.value = "llama-3.1-8b", 2, "fsdp2"
    row.versions["transformer_engine"].value = "2.12"
    row.open_button.click()
    assert isinstance(row.lab, Asked), row.said.value
    assert row.lab.options["engine"] == "fsdp2" and row.lab.options["num_layers"] == 2
    assert row.lab.options["versions"] == Versions(transformer_engine="2.12")
    row.engine.value, row.lora_rank.value = "megatron", 8
    row.open_button.click()
    assert row.lab.options["state"] == TrainingState(lora=LoRA(rank=8))


def test_a_refusal_stands_beside_the_button_and_leaves_the_open_lab_alone(row: Opening) -> None:
    row.open_button.click()
    first, shown = row.lab, row.children
    row.layers.value = 0
    row.open_button.click()
    assert "Not opened: num_layers is 0, must be " in row.said.value
    assert row.lab is first and row.children == shown and not row.open_button.disabled
    row.model.value = "llama-3-tiny"
    row.open_button.click()
    assert isinstance(first, Asked) and first.is_closed and isinstance(row.lab, Asked)
    assert [child.value for child in row.children[1:]] == ["llama-3-tiny"]


def test_a_lab_that_was_closed_for_one_that_cannot_be_opened_is_not_kept(row: Opening) -> None:
    row.open_button.click()
    first = row.lab

    def refused(name: str, **options: Any) -> Any:
        raise ValueError("no GPU is free")

    row._open_lab = refused
    row.open_button.click()
    assert isinstance(first, Asked) and first.is_closed and row.lab is None
    assert "Not opened: no GPU is free" in row.said.value and len(row.children) == 1


def test_panel_without_a_lab_asks_for_one_and_shows_its_panel() -> None:
    row = panel(predict=False)
    row.model.value, row.layers.value, row.lora_rank.value = "phi-4-tiny", 1, 4
    row.open_button.click()
    assert row.lab is not None, row.said.value
    with row.lab as lab:
        assert lab.scenario.state.lora == LoRA(rank=4)
        assert row.children[1] is panel(lab) and not row.children[1].what_if.is_on
        assert "phi-4-tiny trains in this process." in row.said.value
