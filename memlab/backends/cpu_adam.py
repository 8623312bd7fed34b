"""The Adam that updates on the host: Megatron's ``CPUAdam``, which is torch's AdamW, on tensors in host memory."""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import on_host


class HostAdam(torch.optim.AdamW):
    """AdamW whose state counts as host memory: here, host and device are the same RAM."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        with on_host():
            return super()._init_group(*args, **kwargs)


class FakeHostAdam(torch.optim.AdamW):
    """Allocates what torch's AdamW does (``torch/optim/adam.py``, 2.11, ``_init_group``), and computes nothing.

    These are a step and both moments for each parameter, pageable; the fused update makes no temporaries.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes missing state, and touches the tensors that the update touches."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                parameter.addcmul_(state["exp_avg"].add_(parameter.grad), state["exp_avg_sq"])
