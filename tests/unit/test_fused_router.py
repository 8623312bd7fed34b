"""The fused router of experts: Megatron's own probabilities, losses and gradients, and bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron.layers import fused_router
from memlab.lab.lab import Lab
from tests.unit.live import FULL, offload, recompute
from tests.unit.saved import saved_tensors

pytestmark = pytest.mark.versions

TOKENS, EXPERTS, CHOSEN = 32, 8, 3
SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64}


def options(**changed: Any) -> dict[str, Any]:
    """Returns the arguments of Megatron's ``topk_routing_with_score_function`` behind the first two."""
    plain = {"use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None}
    return plain | {"score_function": "softmax", "expert_bias": None} | changed


@pytest.mark.parametrize(
    "chosen",
    [
        options(),
        options(use_pre_softmax=True, scaling_factor=2.5),
        options(score_function="sigmoid", expert_bias=torch.linspace(-1, 1, EXPERTS), scaling_factor=1.8),
        options(score_function="sigmoid", num_groups=4, group_topk=2),
    ],
)
def test_choice_and_gradients_are_megatron_s(chosen: dict[str, Any]) -> None:
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
        weights = torch.rand(TOKENS, EXPERTS)
        if is_fused:
            probs, routing_map = fused_router.fused_topk_with_score_function(logits, CHOSEN, **chosen)
        else:
            probs, routing_map, *_ = moe_utils.topk_routing_with_score_function(logits, CHOSEN, **chosen)
        found.append((probs, routing_map, *torch.autograd.grad((probs * weights).sum(), logits)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_loss_and_gradients_are_megatron_s(score_function: str) -> None:
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
        of_scores = moe_utils.compute_routing_scores_for_aux_loss
        of_loss = moe_utils.switch_load_balancing_loss_func
        coefficient = "moe_aux_loss_coeff"
        if is_fused:
            of_scores, of_loss = fused_router.fused_compute_score_for_moe_aux_loss, fused_router.fused_moe_aux_loss
            coefficient = "coeff"
        routing_map, scores = of_scores(logits, CHOSEN, score_function)
        named = {"total_num_tokens": TOKENS, "topk": CHOSEN, "num_experts": EXPERTS, coefficient: 0.1}
        loss = of_loss(probs=scores, tokens_per_expert=routing_map.sum(dim=0), **named)
        found.append((routing_map, scores, loss, *torch.autograd.grad(loss, logits)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "state",
    [
        {"moe_router_fusion": True},
        pytest.param({"moe_router_force_load_balancing": True}, marks=pytest.mark.slow),
    ],
)
def test_every_setting_has_one_loss_and_the_predicted_bytes(state: dict[str, Any]) -> None:
    settings = (MemorySettings(), FULL, recompute("moe"), offload("expert_fc1", "moe_act"))
    with Lab("qwen3-moe-tiny", **SMALL, backend="cpu") as lab:
        loss = lab.step().loss
        lab.set_state(TrainingState(**state))
        real = [lab.step(each) for each in settings]
    with Lab("qwen3-moe-tiny", **SMALL, backend=of_the_cpu_backend(), state=TrainingState(**state)) as lab:
        fake = [lab.step(each) for each in settings]
    assert len({one.loss for one in real}) == 1
    assert (real[0].loss == pytest.approx(loss, rel=1e-5)) == ("moe_router_fusion" in state)
    for one, other in zip(real, fake, strict=True):
        for figure in ("activation_peak_bytes", "residual_bytes", "offloaded_bytes_by_module"):
            assert getattr(one, figure) == getattr(other, figure), (figure, one.settings)


def test_backward_needs_what_the_kernels_save() -> None:
    """``ctx.save_for_backward`` of ``pytorch/router.py``, with the types of ``csrc/extensions/router.cpp``, TE 2.16.1."""
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        fused_router.fused_topk_with_score_function(logits, CHOSEN, **options())
        routing_map, scores = fused_router.fused_compute_score_for_moe_aux_loss(logits, CHOSEN, "softmax")
        fused_router.fused_moe_aux_loss(scores, routing_map.sum(dim=0), TOKENS, EXPERTS, CHOSEN, 0.1)
    whole = torch.Size([TOKENS, EXPERTS])
    assert [(one.shape, one.dtype) for one in saved] == [
        (whole, torch.bool),
        (whole, torch.float32),
        (whole, torch.float32),
        (torch.Size([2]), torch.float32),
        (torch.Size([EXPERTS]), torch.int64),
    ]


def test_fp64_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_router_fusion is True with moe_router_dtype 'fp64', must have another"):
        TrainingState(moe_router_fusion=True, moe_router_dtype="fp64")


def test_random_logits_prefer_no_expert() -> None:
    state = TrainingState(moe_router_force_load_balancing=True)
    with pytest.raises(
        ValueError, match=r"^routing is skewed:2 with moe_router_force_load_balancing, must be balanced"
    ):
        Scenario.of("qwen3-moe-tiny", state=state, routing="skewed:2")
    assert Scenario.of("qwen3-moe-tiny", state=state, routing="random:7").routing.kind == "random"
