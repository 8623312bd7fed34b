"""The loss: what each way to compute it allocates, and that all of them compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.backends.fused_cross_entropy import te_parallel_cross_entropy
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from tests.unit.live import gradients_of_step
from tests.unit.ranks import on_ranks

UNFUSED = TrainingState()
NATIVE = TrainingState(cross_entropy_loss_fusion=True)
TE = TrainingState(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")


def predicted(state: TrainingState, **options: Any) -> StepRecord:
    with Lab("phi-4", num_layers=2, backend="simulated", state=state, **{"seq_length": 4096, **options}) as lab:
        return lab.step()


@pytest.mark.parametrize(
    ("state", "bytes_on_h200", "phase"),
    [(NATIVE, 36_498_746_368, "forward"), (TE, 34_279_841_792, "backward")],
    ids=["native", "te"],
)
def test_a_fused_loss_allocates_what_it_did_on_an_h200(state: TrainingState, bytes_on_h200: int, phase: str) -> None:
    record = predicted(state)
    assert record.peak_allocated_bytes == pytest.approx(bytes_on_h200, abs=4096)
    assert record.peak_phase == phase


def test_each_tensor_rank_copies_its_part_of_the_logits() -> None:
    part = 4096 * 100_352 // 2
    peaks = [
        predicted(state, layout=Layout(tensor_model_parallel_size=2)).peak_allocated_bytes
        for state in (UNFUSED, NATIVE)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(4 * part, rel=0.01)


@pytest.mark.parametrize("state", [NATIVE, TE], ids=["native", "te"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_fused_loss_has_the_values_of_the_unfused_one(
    open_lab: Callable[..., Lab], state: TrainingState, dtype: str
) -> None:
    # 96 is no power of 2, so that dividing by it rounds.
    small: dict[str, Any] = {"architecture": "phi-4-tiny", "num_layers": 1, "seq_length": 96, "dtype": dtype}
    expected, gradients = gradients_of_step(open_lab(**small), MemorySettings())
    loss, of_fused = gradients_of_step(open_lab(**small, state=state), MemorySettings())
    assert loss == pytest.approx(expected, rel=1e-6)
    # TE rounds each gradient twice in the logits' type; the native fusion rounds it to bf16, whatever that type is.
    tolerance = 1e-6 if dtype == "fp32" and state is TE else 0.01
    for buffer, other in zip(gradients, of_fused, strict=True):
        assert (other - buffer).norm() <= tolerance * buffer.norm()
        assert other.norm() > 0


def test_tensor_ranks_compute_together_what_one_rank_does() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 2, 40, generator=generator)
    labels = torch.randint(40, (6, 2), generator=generator)
    weights = torch.randn(6, 2, generator=generator)

    expected = logits.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(expected.permute(0, 2, 1), labels, reduction="none")
    losses.backward(weights)
    assert expected.grad is not None
    of_ranks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def job(rank: int, group: Any) -> None:
        part = logits[:, :, 20 * rank : 20 * (rank + 1)].clone().requires_grad_()
        together = te_parallel_cross_entropy(part * 1, labels, group)
        of_ranks[rank] = together.detach(), *torch.autograd.grad(together, part, weights)

    on_ranks(2, job)
    for rank in range(2):
        torch.testing.assert_close(of_ranks[rank][0], losses.detach())
        torch.testing.assert_close(of_ranks[rank][1], expected.grad[:, :, 20 * rank : 20 * (rank + 1)])
