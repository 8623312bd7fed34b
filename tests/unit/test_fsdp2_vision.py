"""Vision towers under FSDP2: transformers' own model with images, live, predicted, and compared with plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import Lab, TrainingState
from memlab.backends.simulated import predicting
from memlab.config.architectures import ARCHITECTURES
from memlab.config.parameters import kept_bytes
from memlab.config.scenario import Scenario
from memlab.config.vision import VISION_TOWERS
from memlab.fitting.does_it_fit import basis_of
from memlab.fitting.measured_margin import measured_margin

transformers = pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers")

GEMMA = replace(ARCHITECTURES["gemma-3-270m"], name="gemma-3-tiny", vocab_size=1024)
TINY = {
    "gemma-3-tiny": GEMMA,
    "qwen3-vl-tiny": ARCHITECTURES["qwen3-dense-tiny"],
    "qwen2.5-vl-tiny": ARCHITECTURES["qwen2.5-tiny"],
}
TOKENS, IMAGES, PATCHES = 128, 2, 64
PUBLISHED = {
    "gemma-3-4b": 4_300_079_472,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
}
"""https://huggingface.co/google/gemma-3-4b-it, Qwen/Qwen3-VL-4B-Instruct, Qwen/Qwen2.5-VL-3B-Instruct and likewise."""
BOTH = [(name, freeze) for name in TINY for freeze in (True, False)]


def of(name: str = "gemma-3-tiny", freeze: bool = True, images: int | None = IMAGES, **state: Any) -> Scenario:
    options = {"vision_tower": name, "images_per_sequence": images, "freeze_vision_tower": freeze}
    options["patches_per_image"] = PATCHES if name.startswith("qwen") else None
    return Scenario.of(
        TINY[name], num_layers=2, seq_length=TOKENS, engine="fsdp2", state=TrainingState(**options | state)
    )


def model_of(scenario: Scenario, attention: str) -> Any:
    from memlab.engines.fsdp2.hugging_face import build_model

    torch.manual_seed(1)
    return build_model(scenario, torch.float32, attention=attention)


def test_a_tower_that_is_not_there_is_not_frozen() -> None:
    state = TrainingState(freeze_vision_tower=True)
    scenario = Scenario.of("phi-4-tiny", num_layers=1, seq_length=TOKENS, engine="fsdp2", state=state)
    assert all(weight.requires_grad for weight in model_of(scenario, "sdpa").parameters())


def step_of(scenario: Scenario, attention: str, *, own: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns bytes that are saved for backward, without parameters, and gradients, of memlab's pass or transformers'."""
    from memlab.engines.fsdp2.vision import ImagesPlaced, inputs_with_images

    model = model_of(scenario, attention)
    tokens = torch.arange(TOKENS).view(1, TOKENS) % 200
    inputs = inputs_with_images(scenario, tokens)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    if not own and hasattr(model.model.language_model, "_deepstack_process"):
        del model.model.language_model._deepstack_process  # transformers' own is the class's
    parameters = {each.untyped_storage()._cdata for each in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in parameters:
            saved[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if own:
            with ImagesPlaced():
                logits = model(**inputs).logits
        else:
            logits = model(**inputs).logits
        loss = model.loss_function(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
    loss.backward()
    num_bytes = sum(each.untyped_storage().nbytes() for each in saved.values())
    return num_bytes, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("name", "freeze"), BOTH)
def test_saved_bytes_and_gradients_are_those_of_transformers_in_plain_torch(
    name: str, freeze: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    scenario = of(name, freeze)
    ours, gradients = step_of(scenario, "memlab_eager", own=True)
    theirs, expected = step_of(scenario, "eager", own=False)
    assert gradients.keys() == expected.keys()
    assert any("vision_tower" in each or "visual" in each for each in gradients) is not freeze
    for each, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[each], rtol=0, atol=0)
    assert ours == theirs


@pytest.mark.parametrize(("name", "freeze"), BOTH)
def test_a_prediction_is_the_step_of_the_cpu_to_the_byte(name: str, freeze: bool) -> None:
    records = []
    for backend in (predicting("cpu"), "cpu"):
        with Lab(of(name, freeze), backend=backend) as lab:
            lab.step()
            records.append(lab.step())
    predicted, live = records
    # Qwen's models keep a number for each row from step to step (``rope_deltas``), which a prediction leaves out.
    of_rows = 8 * name.startswith("qwen")
    assert predicted.static_bytes + of_rows == live.static_bytes
    # A LayerNorm of the tower keeps mean and deviation of each patch in fp32 on a GPU, and in bf16 on a CPU.
    norms = 0 if freeze or name.startswith("qwen2.5") else 2 * 3 + 1  # Qwen2.5-VL has RMSNorm
    more = norms * IMAGES * PATCHES * 2 * 2
    # Of the sizes of their images, a prediction has no tensors of 24 bytes an image, and some of others.
    assert abs(predicted.peak_allocated_bytes - live.peak_allocated_bytes - more) <= 1024 * name.startswith("qwen")
    kept = kept_bytes(of(name, freeze))
    assert live.static_bytes >= kept.parameters + kept.optimizer > 0.98 * live.static_bytes


def test_a_step_fits_only_with_what_a_measured_one_reserved_more_than_predicted() -> None:
    """Of 18 jobs of an H200 one reserved 0.29 % more than predicted, and none more."""
    assert 0.0029 <= measured_margin(of()).share < 0.02
    assert "vision tower" in measured_margin(of()).steps


def test_a_frozen_tower_has_no_moments() -> None:
    tower = VISION_TOWERS["gemma-3-tiny"]
    trained, frozen = (kept_bytes(of(freeze=freeze)) for freeze in (False, True))
    assert trained.parameters == frozen.parameters
    assert trained.optimizer - frozen.optimizer == 4 * tower.num_parameters


@pytest.mark.parametrize("name", VISION_TOWERS)
def test_a_tower_has_the_published_numbers_of_parameters(name: str) -> None:
    from memlab.engines.fsdp2.hugging_face import build_model

    tower = VISION_TOWERS[name]
    patches = tower.patches_of_token if tower.patches_of_image is None else None
    state = TrainingState(vision_tower=name, images_per_sequence=1, patches_per_image=patches)
    language = ARCHITECTURES[tower.language_model]
    scenario = Scenario.of(language, num_layers=1, engine="fsdp2", state=state)
    with torch.device("meta"):
        built = build_model(scenario, torch.bfloat16, attention="sdpa").num_parameters()
    of_tower = tower.num_parameters + tower.num_parameters_of_projector
    assert built == language.with_layers(1).num_parameters + of_tower
    if name in PUBLISHED:
        assert language.num_parameters + of_tower == PUBLISHED[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": None}, "images_per_sequence is not given, which the data decides: give the number"),
        ({"images": 9}, "whose 153 tokens, with one behind each, must fit into the 128 of a sequence"),
        ({"attn_implementation": "flash_attention_2"}, "with attn_implementation 'flash_attention_2'"),
        ({"vision_tower": "gemma-3-4b"}, "must be beside gemma-3-4b-text"),
        ({"patches_per_image": 64}, "must be left out, since this tower scales each image to one size"),
        ({"name": "qwen3-vl-tiny", "patches_per_image": None}, "must be given, a multiple of 4: the data decides"),
    ],
)
def test_what_a_tower_does_not_have_is_refused_with_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        of(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "is_told"), [("qwen2.5-vl-7b", True), ("qwen3-vl-8b", False), ("gemma-3-4b", False)])
def test_a_verdict_says_that_windows_are_those_of_images_near_a_square(name: str, is_told: bool) -> None:
    tower = VISION_TOWERS[name]
    sizes = {} if tower.patches_of_image else {"patches_per_image": 1024}
    state = TrainingState(vision_tower=name, images_per_sequence=1, **sizes)
    scenario = Scenario.of(tower.language_model, num_layers=1, engine="fsdp2", state=state)
    assert ("images are as near to a square" in basis_of(scenario)) is is_told
