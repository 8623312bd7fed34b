"""What is said of losses holds of the megatron-core that is installed; with another one these tests say what moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import Lab, MemorySettings
from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.config.architectures import ARCHITECTURES
from memlab.exercises.checks import check
from memlab.record.step_record import StepRecord
from tests.unit.live import FULL, offload, recompute

# So many experts a token that the order in which softmax adds them shows.
MANY_EXPERTS = replace(ARCHITECTURES["qwen3-moe-tiny"], name="many-experts-tiny", num_moe_experts=64, moe_router_topk=8)


def steps() -> tuple[StepRecord, ...]:
    with Lab(MANY_EXPERTS, num_layers=3, seq_length=512, backend="cpu") as lab:
        every = (MemorySettings(), FULL, recompute("moe"), recompute("moe_act", "layernorm"), offload("moe_act"))
        return tuple(lab.step(settings, warm_up=False) for settings in every)  # which changes no loss


def test_losses_are_equal_to_the_bit_exactly_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    topk: Callable[..., Any] = torch.topk

    def largest_last_where_any_order_will_do(*args: Any, **options: Any) -> Any:
        values, indices = topk(*args, **options | {"sorted": True})
        return (values, indices) if options.get("sorted", True) else (values.flip(-1), indices.flip(-1))

    # On some machines torch sorts although it need not: no loss would differ there.
    monkeypatch.setattr(torch, "topk", largest_last_where_any_order_will_do)
    plain, *others = steps()
    for other in others:
        tolerance = loss_tolerance(plain, other)
        assert (other.loss == plain.loss) == (tolerance == 0.0), other.settings
        assert other.loss == pytest.approx(plain.loss, rel=tolerance, abs=0.0), other.settings


def test_the_order_of_the_experts_is_all_of_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    topk: Callable[..., Any] = torch.topk

    def always_sorted(*args: Any, **options: Any) -> Any:
        return topk(*args, **options | {"sorted": True})

    monkeypatch.setattr(torch, "topk", always_sorted)
    assert len({record.loss for record in steps()}) == 1


def test_an_exercise_takes_a_loss_that_upstream_rounds_otherwise_and_no_other(
    open_lab: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, full = (replace(record, versions={"megatron-core": "0.19.2"}) for record in (lab.step(), lab.step(FULL)))
    assert check(replace(full, loss=plain.loss * (1 + 5e-5))).same_loss_as(plain)
    assert "within 0.0001" in capsys.readouterr().out
    assert not check(replace(full, loss=plain.loss * (1 + 2e-4))).same_loss_as(plain)
    assert not check(replace(plain, loss=plain.loss * (1 + 5e-5))).same_loss_as(plain)
    assert capsys.readouterr().out.count("changes no number") == 2
