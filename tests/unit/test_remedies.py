"""Three remedies for the input that an MoE layer's checkpoint keeps: what each frees, and that none changes the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch

from memlab.config.settings import CheckpointInputRemedy, MemorySettings
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import PHASES
from tests.unit.inside import inside
from tests.unit.live import FULL, gradients_of_step, recompute

pytestmark = pytest.mark.versions

KEPT_SHARE = {None: 1.0, "detach": 0.0, "clear_gradient": 0.5, "release_storage": 0.0}


LAYERS, TOKENS, HIDDEN = 4, 256, 128
INPUT_BYTES = TOKENS * HIDDEN * 2
"""Of a checkpoint's input; its gradient takes as many."""


def remedied(remedy: Any, settings: MemorySettings = FULL) -> MemorySettings:
    return replace(settings, checkpoint_input_remedy=remedy)


@pytest.fixture(scope="module")
def steps() -> dict[Any, StepRecord]:
    """A step under full recompute with each remedy."""
    with Lab("qwen3-moe-tiny", backend="cpu", num_layers=LAYERS, seq_length=TOKENS) as lab:
        return {remedy: lab.step(remedied(remedy)) for remedy in KEPT_SHARE}


@pytest.mark.parametrize(
    "settings",
    [FULL, recompute("moe"), pytest.param(replace(FULL, recompute_num_layers=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_each_remedy_frees_its_share_of_what_checkpoints_keep(
    open_lab: Callable[..., Lab], settings: MemorySettings
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    # Input and gradient: tokens x hidden x 2 bytes each, once a checkpoint (verl #5251).
    num_checkpoints = 2 // (settings.recompute_num_layers or 1)
    kept = 2 * 128 * 128 * 2 * num_checkpoints
    for remedy, share in KEPT_SHARE.items():
        record = lab.step(remedied(remedy, settings))
        assert (remedy, record.residual_bytes) == (remedy, kept * share)
        assert len(lab.retained()) == (0 if remedy == "detach" else num_checkpoints)
        assert record.without_effect == {}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_remedy_changes_a_bit_of_loss_or_gradients(open_lab: Callable[..., Lab], dtype: str) -> None:
    expected_loss, expected = gradients_of_step(open_lab("qwen3-moe-tiny", dtype=dtype), FULL)
    for remedy in get_args(CheckpointInputRemedy):
        loss, gradients = gradients_of_step(open_lab("qwen3-moe-tiny", dtype=dtype), remedied(remedy))
        assert loss == expected_loss
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True)), remedy


def test_every_remedy_lowers_the_peak_too(steps: dict[Any, StepRecord]) -> None:
    peaks = {remedy: record.peak_allocated_bytes for remedy, record in steps.items()}
    # Backward ends at layer 0 with the inputs and gradients of the three above it kept, or not.
    assert all(peaks[remedy] < peaks[None] for remedy in get_args(CheckpointInputRemedy)), peaks


def test_what_a_remedy_frees_decides_whether_the_teeth_of_backward_rise_or_fall(steps: dict[Any, StepRecord]) -> None:
    changes = {}
    for remedy, record in steps.items():
        timeline = record.timeline
        assert timeline is not None
        allocated, in_backward = timeline.total_bytes("device"), timeline.phase == PHASES.index("backward")
        layers = [timeline.modules[module].split(".")[2:3] for module in timeline.module]
        of_layer = {layer: [held == [str(layer)] for held in layers] for layer in (3, 2, 1, 0)}
        teeth = [allocated[in_backward & of_layer[layer]].max() for layer in of_layer]
        changes[remedy] = [int(lower - upper) for upper, lower in pairwise(teeth)]
    falls = [-INPUT_BYTES] * 3
    # The last layer's incoming gradient is freed after it. That of every other layer is a leaf's, which stays.
    rises = [0, INPUT_BYTES, INPUT_BYTES]
    assert changes == {None: rises, "detach": falls, "clear_gradient": [0, 0, 0], "release_storage": falls}


def test_releasing_storages_copies_each_gradient_once_and_no_other_remedy_does(steps: dict[Any, StepRecord]) -> None:
    timelines = {remedy: record.timeline for remedy, record in steps.items()}
    allocated = {remedy: timeline.allocated_bytes_in("backward") for remedy, timeline in timelines.items() if timeline}
    copies = LAYERS * INPUT_BYTES
    assert allocated == dict.fromkeys(KEPT_SHARE, allocated[None]) | {"release_storage": allocated[None] + copies}


def test_a_storage_that_something_else_refers_to_is_never_emptied(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    loss = lab.step(FULL).loss
    with lab.tap(1):
        record = lab.step(remedied("release_storage"))
    # Layer 2's checkpoint keeps its input, which is tapped, and its gradient; the others keep nothing.
    assert (record.status, record.loss, record.residual_bytes) == ("ok", loss, 2 * 128 * 128 * 2)
    reason = record.without_effect["checkpoint_input_remedy"]
    assert reason.startswith("on 1 checkpoint input, left alone because")
    assert lab.step(remedied("release_storage")).without_effect == {}
    with pytest.raises(ValueError, match="from 0 to 3"), lab.tap(4):
        pass
    with lab.tap(3, every=True):
        starts = [lab.step(MemorySettings(), warm_up=False).static_bytes for _ in range(3)]
    assert [later - earlier for earlier, later in pairwise(starts)] == [128 * 128 * 2] * 2, "a leak of one output"


def test_unguarded_the_remedy_leaves_a_tap_with_an_empty_storage_and_a_clean_record(
    open_lab: Callable[..., Lab],
) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    clean = lab.step(remedied("release_storage"))
    with lab.tap(1, guarded=False) as tap:
        assert tap.look() is None, "nothing has passed yet"
        record = lab.step()
        dangling = tap.look()
    assert dangling is not None
    assert dangling.is_dangling
    assert (dangling.shape, dangling.tensor_bytes, dangling.storage_bytes) == ((128, 1, 128), 128 * 128 * 2, 0)
    assert "use after free" in str(dangling)
    assert (record.status, record.loss, record.residual_bytes, record.without_effect) == ("ok", clean.loss, 0, {})
    assert tap.look() is None, "it lets go with the block"
    assert inside(lab).model.engine.spares_shared, "the guard is back with the block's end"
    with lab.tap(1) as tap:
        assert lab.step().without_effect, "the next tap is guarded again"
        intact = tap.look()
    assert intact is not None
    assert (intact.is_dangling, intact.storage_bytes) == (False, 128 * 128 * 2)


def test_a_guarded_tap_inside_an_unguarded_one_does_not_guard_it(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    with lab.tap(0, guarded=False) as tap:
        with lab.tap(1):
            pass
        lab.step(remedied("release_storage"))
        tapped = tap.look()
        with lab.tap(0) as inner:
            lab.step()
            seen = inner.look()
    assert tapped is not None and seen is not None
    assert (tapped.storage_bytes, seen.storage_bytes) == (0, 0)
    assert inside(lab).model.engine.spares_shared


def test_steps_under_a_tap_are_not_steady_and_a_warm_up_follows_them(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("phi-4-tiny")
    before = lab.step()
    with lab.tap(0, every=True):
        tapped = [lab.step() for _ in range(2)]
    after = lab.step()
    assert [record.is_steady for record in (before, *tapped, after)] == [True, False, False, True]
    assert before.static_bytes == tapped[0].static_bytes < tapped[1].static_bytes
    assert after.static_bytes == before.static_bytes
    assert [record.step_index - before.step_index for record in (*tapped, after)] == [1, 2, 4]


def test_a_remedy_without_a_checkpointed_moe_layer_says_so_and_does_nothing(open_lab: Callable[..., Lab]) -> None:
    for architecture, settings in (("qwen3-moe-tiny", recompute("core_attn")), ("phi-4-tiny", FULL)):
        lab = open_lab(architecture)
        plain = lab.step(settings)
        for remedy in get_args(CheckpointInputRemedy):
            record = lab.step(remedied(remedy, settings))
            assert record.peak_allocated_bytes == plain.peak_allocated_bytes
            assert "contains a router" in record.without_effect["checkpoint_input_remedy"]


def test_the_step_that_the_meter_is_held_against_has_the_remedy_too(
    open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    lab.step(remedied("detach"))
    lab.unmetered_step_seconds()
    assert lab.retained() == []
