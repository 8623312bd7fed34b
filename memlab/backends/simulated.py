"""A GPU that is not there: Megatron's own code on fake tensors, of any size, accounted for as torch's allocator would.

Everything stands in that stands in on the CPU, with fake tensors in the place of CUDA's. No value is computed: where
Megatron reads one that decides about memory (which expert gets how many tokens), it reads one that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.backends import Backend, fake_collectives  # noqa: F401  # registers kernels
from memlab.backends.cpu import stand_in
from memlab.backends.fake_calls import FAKE, FakeCuda
from memlab.meter.simulated import SimulatedMeter
from memlab.model.engine_caches import hold_fake_workspaces
from memlab.model.fake_layers import FakeProvider


def backend(reason: str) -> Backend:
    """Returns the simulated backend: the live model at any size, without values."""
    return Backend(
        name="simulated",
        reason=reason,
        layer_provider=FakeProvider,
        distributed_backend="fake",
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
        for module, name, value in _megatron_parts():
            stack.enter_context(patch.object(module, name, value))
        yield


def _megatron_parts() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    yield optimizer, "USING_PYTORCH_OPTIMIZER", False
    yield optimizer, "Adam", FusedAdam
    yield clip_grads, "l2_norm_impl", _norm
    yield MoEAlltoAllTokenDispatcher, "preprocess", _with_routing(MoEAlltoAllTokenDispatcher.preprocess)


def _gather_own(gathered: list[Any], own: Any, group: Any = None) -> None:
    """Answers for the other ranks: Megatron gathers only the kinds of parameters that there are (``optimizer``)."""
    gathered[:] = [own] * len(gathered)


def _norm(chunk_size: int, overflow: torch.Tensor, tensors: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Stands for ``multi_tensor_l2norm``, one kernel over all gradients."""
    return torch.empty(1, dtype=torch.float32, device=FAKE), None


def _with_routing(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a dispatcher count the tokens of each expert in a routing that was chosen."""

    def preprocess_chosen(dispatcher: Any, routing_map: torch.Tensor) -> Any:
        num_tokens, num_experts = routing_map.shape
        with _disable_current_modes():
            chosen = torch.arange(num_tokens * dispatcher.config.moe_router_topk) % num_experts
            chosen = torch.nn.functional.one_hot(chosen.view(num_tokens, -1), num_experts).sum(1).bool()
        return preprocess(dispatcher, chosen)

    return preprocess_chosen


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
