"""Who holds what after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memlab.config.settings import MemorySettings
from memlab.engines.retained_leaves import find_retained
from tests.unit.inside import inside
from tests.unit.live import FULL, recompute

pytestmark = pytest.mark.versions


def test_the_dispatcher_s_probabilities_hold_each_checkpoint_s_input_and_gradient(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    for settings, layers in ((FULL, 4), (recompute("moe"), 4), (MemorySettings(), 0), (recompute("moe_act"), 0)):
        record = lab.step(settings)
        retained = find_retained(inside(lab).model.engine.live, {})
        assert len(retained) == layers
        assert sum(leaf.input_bytes + leaf.gradient_bytes for leaf in retained) == record.residual_bytes
        for layer, leaf in enumerate(retained):
            assert leaf.holder == f"decoder.layers.{layer}.mlp.token_dispatcher.probs"
            assert leaf.shape == (128, 1, 128)
            assert "RouterGatingLinearFunction" in leaf.path
            assert leaf.path[-1] == "AccumulateGrad"
    assert find_retained(inside(open_lab("phi-4-tiny", num_layers=4)).model.engine.live, {}) == []
