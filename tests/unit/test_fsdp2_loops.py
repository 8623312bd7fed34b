"""What verl's and NeMo Automodel's loops do otherwise under FSDP2: units that are sharded, and losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from memlab import Lab, Layout, TrainingState
from memlab.backends.simulated import predicting
from memlab.config.scenario import Scenario

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
from memlab.engines.fsdp2.losses import loss_of_logprobs

SIZES: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}
VERL = {"separate_embeddings": "both", "reshard_root_after_forward": True, "reshard_after_forward": "all"}
LOSSES = ("cross_entropy", "masked_cross_entropy", "logprobs_flash_attn", "logprobs_by_row")


def of(state: dict[str, Any], ranks: int = 1, model: str = "llama-3-tiny") -> Scenario:
    layout = Layout(data_parallel_size=ranks)
    return Scenario.of(model, **SIZES, layout=layout, state=TrainingState(fp32_sharded_params=True, **state))


@pytest.mark.parametrize("by_row", [True, False])
def test_log_probabilities_and_their_gradient_are_torchs(by_row: bool) -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64).float().requires_grad_()
    tokens = torch.randint(7, (2, 5))
    truth = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, dims=1).flatten())
    (expected,) = torch.autograd.grad(truth, logits)
    loss = loss_of_logprobs(logits * 1, tokens, by_row=by_row)  # backward writes over what it gets
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_a_live_step_needs_what_is_predicted(loss: str) -> None:
    scenario = of(VERL | {"loss_of_transformers": loss})
    with Lab(scenario, backend="cpu") as lab:
        live = lab.step()
    with Lab(scenario, backend=predicting("cpu")) as lab:
        predicted = lab.step()
    assert predicted.peak_by_category == live.peak_by_category and live.residual_bytes == 0


def test_losses_hold_the_logits_and_copies_while_backward_begins() -> None:
    """Where the logits are most of a step: one more copy in bf16 where a loop holds the output, none in fp32."""
    tiny = of({})
    rows = replace(tiny, seq_length=256, architecture=replace(tiny.architecture, vocab_size=2**13))
    peaks = {}
    with Lab(rows, backend=predicting("cpu")) as lab:
        for loss in LOSSES:
            lab.set_state(replace(rows.state, loss_of_transformers=loss))
            peaks[loss] = lab.step().activation_peak_bytes
    logits = 2 * rows.seq_length * rows.architecture.vocab_size
    held, released, flash, by_row = peaks.values()
    assert held - released == logits
    assert flash < by_row < released


def test_units_change_in_place_as_in_a_new_lab() -> None:
    verl = replace(of(VERL, ranks=2), seq_length=2048)
    kept = replace(verl, state=replace(verl.state, reshard_root_after_forward=False))
    with Lab(kept, backend=predicting("cpu")) as lab:
        before = lab.step().peak_by_category
        lab.set_state(verl.state)
        changed = lab.step().peak_by_category
    with Lab(verl, backend=predicting("cpu")) as lab:
        assert lab.step().peak_by_category == changed != before


def test_what_does_nothing_is_named() -> None:
    assert of(VERL).without_effect() == {}
    assert "separate_embeddings" in of(VERL | {"fsdp_version": 1}).without_effect()
    kept = of(VERL | {"reshard_after_forward": "none"}).without_effect()
    assert kept["reshard_root_after_forward"] == "reshard_after_forward is none"
