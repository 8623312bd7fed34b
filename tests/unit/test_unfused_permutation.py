"""Tokens that are sorted by their experts without a fused kernel: numbers, bytes by hand, and what is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megatron.core
import pytest
import torch

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.lora import LoRA
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron.layers.unfused_permutation import selecting_by_mask
from memlab.lab.lab import Lab
from tests.unit.live import FULL, offload, recompute
from tests.unit.saved import saved_tensors

pytestmark = pytest.mark.versions

TOKENS, EXPERTS, CHOSEN = 64, 8, 2
SMALL: dict[str, Any] = {"num_layers": 3, "seq_length": TOKENS}
UNFUSED = TrainingState(moe_permute_fusion=False)


def test_selecting_is_megatron_s_own_and_saves_the_same() -> None:
    from megatron.core.transformer.moe.moe_utils import permute

    tokens, probs = (torch.randn(TOKENS, width, requires_grad=True) for width in (16, EXPERTS))
    chosen = probs.detach().topk(CHOSEN, dim=1).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, value=True)
    found = []
    for function in (permute, selecting_by_mask(permute)):
        with saved_tensors() as saved:
            permuted, permuted_probs, order, *_ = function(
                tokens, routing_map, probs=probs, num_out_tokens=TOKENS * CHOSEN, fused=False
            )
        found.append(
            (
                permuted,
                permuted_probs,
                order,
                *torch.autograd.grad([(permuted * permuted_probs[:, None]).sum()], [tokens, probs]),
            )
        )
        found[-1] += (sorted(tensor.shape for tensor in saved),)
    for one, other in zip(*found, strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)


@pytest.mark.parametrize(
    "lora", [None, pytest.param(LoRA(rank=4, target_modules=("linear_fc1", "linear_fc2")), marks=pytest.mark.slow)]
)
def test_every_setting_has_the_loss_of_the_fused_kernel_and_the_predicted_bytes(lora: LoRA | None) -> None:
    settings = [MemorySettings(), FULL, recompute("moe_act")]
    settings += [] if lora else [recompute("moe"), offload("expert_fc1", "moe_act")]
    state = replace(UNFUSED, lora=lora)
    with Lab("qwen3-moe-tiny", **SMALL, backend="cpu", state=replace(state, moe_permute_fusion=True)) as lab:
        loss = lab.step().loss
    with Lab("qwen3-moe-tiny", **SMALL, backend="cpu", state=state) as lab:
        real = [lab.step(each) for each in settings]
    with Lab("qwen3-moe-tiny", **SMALL, backend=of_the_cpu_backend(), state=state) as lab:
        fake = [lab.step(each) for each in settings]
    for one, other in zip(real, fake, strict=True):
        assert one.loss == pytest.approx(loss, rel=1e-4)
        for figure in ("activation_peak_bytes", "residual_bytes", "offloaded_bytes_by_module"):
            assert getattr(one, figure) == getattr(other, figure), (figure, one.settings)


def test_what_a_layer_keeps_by_hand() -> None:
    """Fused: an int32 map of [tokens, 2 experts + 1], and twice the int32 place of each row among the chunks.

    Unfused: the int64 token of each row, and of all experts the mask and the fp32 probabilities; from 0.19 on, which
    sorts the mask, the int64 places of all. The order of the experts, in int64, is then on the host.
    """

    def of_a_layer(*, is_fused: bool) -> int:
        peaks = []
        for num_layers in (2, 3):
            state, sizes = TrainingState(moe_permute_fusion=is_fused), SMALL | {"num_layers": num_layers}
            with Lab("qwen3-moe-tiny", **sizes, backend=of_the_cpu_backend(), state=state) as lab:
                peaks.append(lab.step().peak_allocated_bytes)
        return peaks[1] - peaks[0]

    rows = TOKENS * CHOSEN
    fused = 4 * TOKENS * (2 * EXPERTS + 1) + 2 * 4 * rows + 8 * EXPERTS
    unfused = 8 * rows + (1 + 4 if megatron.core.__version__.startswith("0.16") else 8) * TOKENS * EXPERTS
    assert of_a_layer(is_fused=True) - of_a_layer(is_fused=False) == fused - unfused
