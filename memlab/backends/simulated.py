"""A GPU that is not there: Megatron's own code on fake tensors, of any size, accounted for as torch's allocator would.

Everything stands in that stands in on the CPU, with fake tensors in the place of CUDA's. No value is computed: where
Megatron reads one that decides about memory (which expert gets how many tokens), it reads one that was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from memlab.backends import Backend, fake_collectives
from memlab.backends.chosen_routing import chosen_routing
from memlab.backends.cpu import stand_in
from memlab.backends.fake_calls import FAKE, FakeCuda
from memlab.backends.meta_result_cache import MetaResultCache
from memlab.meter.simulated_meter import SimulatedMeter
from memlab.model.layers.fake_layers import FakeProvider
from memlab.model.retention.te_caches import hold_fake_workspaces


def backend(reason: str) -> Backend:
    """Returns the simulated backend: the live model at any size, without values."""
    return Backend(
        name="simulated",
        reason=reason,
        layer_provider=FakeProvider,
        distributed_backend="simulated",
        active=on_fake_tensors,
        meter=SimulatedMeter,
        fill_workspaces=lambda is_moe: hold_fake_workspaces(grouped=is_moe),
        computes=False,
    )


@contextmanager
def on_fake_tensors() -> Iterator[None]:
    """Lets Megatron run on this thread as if there were a CUDA device, for the block."""
    with stand_in(FakeCuda), ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: FAKE))
        stack.enter_context(patch.object(torch.distributed, "all_gather_object", _gather_own))
        stack.enter_context(patch.object(torch.distributed, "batch_isend_irecv", fake_collectives.exchange))
        for module, name, value in _megatron_parts():
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(MetaResultCache())
        yield


def _megatron_parts() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads

    yield optimizer, "USING_PYTORCH_OPTIMIZER", False
    yield optimizer, "Adam", FusedAdam
    yield clip_grads, "l2_norm_impl", _norm
    yield from chosen_routing()


def _gather_own(gathered: list[Any], own: Any, group: Any = None) -> None:
    """Answers for the other ranks: Megatron gathers only the kinds of parameters that there are (``optimizer``)."""
    gathered[:] = [own] * len(gathered)


def _norm(chunk_size: int, overflow: torch.Tensor, tensors: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Stands for ``multi_tensor_l2norm``, one kernel over all gradients."""
    return torch.empty(1, dtype=torch.float32, device=FAKE), None


class FusedAdam(torch.optim.AdamW):
    """Keeps what Transformer Engine's keeps (``transformer_engine/pytorch/optimizers/fused_adam.py``, 2.12.0).

    That is both moments of each parameter in fp32; the step is a number, and an update makes no temporaries.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool, **options: Any) -> None:
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes the moments where they are missing, and touches what the kernel does."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                parameter.addcmul_(state["exp_avg"].add_(parameter.grad), state["exp_avg_sq"])
