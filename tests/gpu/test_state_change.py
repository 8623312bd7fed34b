"""The training state of a live lab changes on a real GPU: the bytes are those of a fresh lab, and the way back is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memlab.config.training_state import TrainingState

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")

# Remainders of blocks of up to 1 MiB stay unsplit, depending on what is cached.
SLACK_BYTES = 16 * 1024**2
PLAIN = TrainingState()
STATES = [
    TrainingState(grad_reduce_in_bf16=True),
    TrainingState(use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="bf16"),
    TrainingState(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", apply_rope_fusion=True),
    TrainingState(attention_backend="unfused"),
    TrainingState(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    TrainingState(fp8_format="hybrid", fp8_recipe="delayed"),
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_changed_state_equals_a_fresh_lab_s_and_the_way_back_frees_everything(
    open_gpu_lab: Callable[..., Any], state: TrainingState
) -> None:
    fresh = open_gpu_lab(state=state)
    wanted = fresh.step()
    fresh.close()
    lab = open_gpu_lab()
    plain = lab.step()
    changed = lab.step(state=state)
    back = lab.step(state=PLAIN)
    for record, same in ((changed, wanted), (back, plain)):
        assert record.loss == same.loss
        assert record.static_bytes == pytest.approx(same.static_bytes, abs=SLACK_BYTES)
        assert record.peak_allocated_bytes == pytest.approx(same.peak_allocated_bytes, abs=SLACK_BYTES)
        assert record.host_bytes == same.host_bytes
        assert record.peak_phase == same.peak_phase


def test_every_state_in_one_lab_leaves_nothing_behind(open_gpu_lab: Callable[..., Any]) -> None:
    lab = open_gpu_lab("phi-4")
    plain = lab.step()
    for state in STATES:
        assert lab.step(state=state).status == "ok"
    back = lab.step(state=PLAIN)
    assert back.static_bytes == pytest.approx(plain.static_bytes, abs=SLACK_BYTES)
    assert back.loss == plain.loss
