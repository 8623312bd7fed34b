"""The CPU backend on a machine that has Transformer Engine and a GPU: it must take neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memlab.config.settings import MemorySettings
from tests.unit.live import FULL, offload, recompute

pytestmark = pytest.mark.gpu
# torch_functions and the stand-ins are seen at work without either in tests/unit.
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")


@pytest.mark.parametrize("family", ["qwen3-moe-tiny", "phi-4-tiny"])
def test_the_cpu_backend_steps_alike_with_transformer_engine_installed(
    family: str, open_lab: Callable[..., Any]
) -> None:
    import torch

    lab = open_lab(family)
    before = torch.cuda.memory_allocated()
    losses = {
        lab.step(settings).loss
        for settings in (
            MemorySettings(),
            FULL,
            recompute("layernorm"),
            offload("qkv_linear", "core_attn"),
            MemorySettings(offload_parameters=True, offload_optimizer=True),
        )
    }
    assert len(losses) == 1
    assert torch.cuda.memory_allocated() == before
