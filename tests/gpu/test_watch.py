"""`memlab.watch` on a real GPU: its bytes are those of torch's own count."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_the_bytes_of_a_watched_step_are_those_that_torch_counts() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    import memlab

    layers = [torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="cuda") for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 256, 512, device="cuda")
    for _ in range(2):
        opening = torch.cuda.memory_allocated()
        with memlab.watch(model, optimizer) as run:
            loss = model(x).square().mean()
            loss.backward()
            gradient_bytes = sum(parameter.grad.nbytes for parameter in model.parameters())
            optimizer.step()
            peak, ending = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        assert run.timeline is not None
        assert run.static_bytes == opening
        assert run.peak_allocated_bytes == peak
        assert run.timeline.bytes_at(len(run.timeline) - 1) == ending
        at_end = run.timeline.breakdown(len(run.timeline) - 1, with_rounding=False)
        assert at_end["gradients"] == gradient_bytes
        assert at_end["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
        assert at_end["optimizer state"] == 2 * at_end["parameters"], "Adam's step counters are on the host"
        assert "activations" in run.peak_by_category
        optimizer.zero_grad()
