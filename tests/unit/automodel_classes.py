"""NeMo Automodel's own classes beside those of transformers whose parameters they take."""

from __future__ import annotations

import torch

from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.automodel_classes import change_classes
from memlab.engines.fsdp2.hugging_face import build_model
from tests.unit.saved import saved_tensors, storage_bytes


def assert_saves_and_computes(
    scenario: Scenario, attention: str, num_bytes: int, *, is_balanced: bool = False, deviation: float | None = 0.02
) -> None:
    """Checks what a model saves for backward, and that its logits are those of transformers.

    Args:
        is_balanced: Whether a gate that balances experts makes other logits.
        deviation: Of all parameters; None leaves them as transformers draws them.
    """
    tokens = torch.arange(64).unsqueeze(0)
    torch.manual_seed(0)
    module = build_model(scenario, torch.bfloat16, attention=attention)
    for each in module.parameters() if deviation else ():
        torch.nn.init.normal_(each, std=deviation)
    expected = module(input_ids=tokens).logits
    change_classes(module, scenario)
    with saved_tensors() as saved:
        found = module(input_ids=tokens).logits
    assert sum(storage_bytes(saved, apart_from=(*module.parameters(), *module.buffers())).values()) == num_bytes
    if not is_balanced:
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    found.float().square().mean().backward()
    assert all(one.grad is not None for one in module.parameters())
