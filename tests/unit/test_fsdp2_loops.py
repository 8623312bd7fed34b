"""What verl's and NeMo Automodel's loops do otherwise under FSDP2: units that are sharded, and losses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from memlab import Lab, Layout, TrainingState
from memlab.backends.simulated import predicting
from memlab.config import without_effect
from memlab.config.scenario import Scenario

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
from memlab.engines.fsdp2.losses import loss_of_logprobs

SIZES: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}
VERL = {"separate_embeddings": "both", "reshard_root_after_forward": True, "reshard_after_forward": "all"}
LOSSES = ("cross_entropy", "masked_cross_entropy", "logprobs_flash_attn", "logprobs_by_row", "topk_logits")


def of(state: dict[str, Any], ranks: int = 1, model: str = "llama-3-tiny") -> Scenario:
    layout = Layout(data_parallel_size=ranks)
    return Scenario.of(model, **SIZES, layout=layout, state=TrainingState(fp32_sharded_params=True, **state))


@pytest.mark.parametrize("by_row", [True, False])
def test_log_probabilities_and_their_gradient_are_torchs(by_row: bool) -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64).float().requires_grad_()
    tokens = torch.randint(7, (2, 5))
    truth = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
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


def test_a_teacher_s_pass_has_a_copy_of_the_logits_in_fp32_and_what_topk_makes_on_a_gpu() -> None:
    """``TopkLogitsPostProcessor`` in nemo_rl/models/automodel/train.py (7ea279ab)."""
    tiny = of({"loss_of_transformers": "topk_logits"})
    rows = replace(tiny, seq_length=256, architecture=replace(tiny.architecture, vocab_size=2**13))
    found = []
    for backend in ("cpu", predicting("cpu")):
        with Lab(rows, backend=backend) as lab:
            found.append(lab.forward_only().peak_by_category)
    live, predicted = (dict(each) for each in found)
    logits = rows.seq_length * rows.architecture.vocab_size
    of_topk = predicted.pop("temporary") - (of_loss := live.pop("temporary"))
    assert predicted == live
    assert 6 * logits < of_loss < 6.2 * logits
    assert 0 < of_topk < 0.4 * logits


def test_losses_hold_the_logits_and_copies_while_backward_begins() -> None:
    """Where the logits are most of a step: one more copy in bf16 where a loop holds the output, none in fp32."""
    tiny = of({})
    rows = replace(tiny, seq_length=256, architecture=replace(tiny.architecture, vocab_size=2**13))
    peaks = {}
    with Lab(rows, backend=predicting("cpu")) as lab:
        for loss in LOSSES[:4]:
            lab.set_state(replace(rows.state, loss_of_transformers=loss))
            peaks[loss] = lab.step().activation_peak_bytes
    logits = 2 * rows.seq_length * rows.architecture.vocab_size
    held, released, flash, by_row = peaks.values()
    assert held - released == logits
    assert flash < by_row < released


def test_units_change_in_place_as_in_a_new_lab() -> None:
    verl = replace(of(VERL, ranks=2), seq_length=1024)
    kept = replace(verl, state=replace(verl.state, reshard_root_after_forward=False))
    with Lab(kept, backend=predicting("cpu")) as lab:
        before = lab.step().peak_by_category
        lab.set_state(verl.state)
        changed = lab.step().peak_by_category
    with Lab(verl, backend=predicting("cpu")) as lab:
        assert lab.step().peak_by_category == changed != before


ULYSSES = {"cp_comm_type": "a2a", "attn_implementation": "flash_attention_2", "loss_of_transformers": LOSSES[2]}


@pytest.mark.parametrize(
    ("state", "more", "measured"),
    [
        ({}, {}, (3_051_392, 5_558_684)),
        ({}, {"packed_sequences": 4}, (3_051_392, 5_595_696)),
        ({"fsdp_version": 1}, {}, (3_051_396, 5_689_760)),
    ],
)
def test_ranks_exchange_heads_around_flash_attn(
    state: dict[str, Any], more: dict[str, Any], measured: tuple[int, int]
) -> None:
    """Bytes of each of two live ranks over gloo (torch 2.13), at the start of a step and at its peak."""
    scenario = replace(of(VERL | ULYSSES | state), layout=Layout(context_parallel_size=2), **more)
    with Lab(scenario, backend=predicting("cpu")) as lab:
        record = lab.step()
    assert (record.static_bytes, record.peak_allocated_bytes) == measured


@pytest.mark.parametrize(
    ("state", "ranks", "words"),
    [
        ({"attn_implementation": "sdpa"}, 2, "attn_implementation 'sdpa', must be 'flash_attention_2'"),
        ({"loss_of_transformers": "cross_entropy"}, 2, "loss_of_transformers 'cross_entropy', must be logprobs_flash"),
        ({}, 8, "context_parallel_size 8 must divide the 4 heads of llama-3-tiny"),
    ],
)
def test_what_ulysses_needs_is_named(state: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(of(VERL | ULYSSES | state), layout=Layout(context_parallel_size=ranks))


@pytest.mark.parametrize("loss", LOSSES)
def test_log_probabilities_of_a_divided_vocabulary_are_refused(loss: str) -> None:
    refused = pytest.raises(ValueError, match=f"loss_of_transformers '{loss}', which memlab does not predict together")
    with refused if loss.startswith("logprobs") else nullcontext():
        replace(of({"loss_of_transformers": loss}), layout=Layout(tensor_model_parallel_size=2))


def test_what_does_nothing_is_named() -> None:
    assert without_effect.of_scenario(of(VERL)) == {}
    assert "separate_embeddings" in without_effect.of_scenario(of(VERL | {"fsdp_version": 1}))
    kept = without_effect.of_scenario(of(VERL | {"reshard_after_forward": "none"}))
    assert kept["reshard_root_after_forward"] == "reshard_after_forward is none"
