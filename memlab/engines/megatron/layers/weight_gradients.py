"""Gradients of weights, by themselves or fused: added to Megatron's buffer by the product that computes them.

A fused linear still has to return a gradient, so that autograd calls the hooks of Megatron's DDP. Transformer Engine
returns an unused one in the weight's type, of which it keeps one for every shape (``get_dummy_wgrad`` in
``transformer_engine/pytorch/module/base.py``, 2.12.0 and 2.16.1). So does Megatron's own output layer, whose product is
Apex' (``megatron/core/tensor_parallel/layers.py``, 0.16.1 and 0.19.2).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.engines.transformer_engine_caches import simulated_unused_gradients
from memlab.meter.labels import keeping, one_kernel


def set_fusion(weight: torch.nn.Parameter, config: TransformerConfig) -> None:
    """Notes on a weight whether its gradient is fused."""
    weight.fuse_wgrad_accumulation = config.gradient_accumulation_fusion  # type: ignore[attr-defined]


def weight_gradient(weight: Any, grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Returns ``grad.T @ inputs``; of a fused weight the unused gradient, after the product is in the buffer."""
    if not weight.fuse_wgrad_accumulation:  # without values not torch's own product, whose library has other workspaces
        return grad.new_empty(weight.shape) if grad.is_meta else grad.T @ inputs
    _add_product(inputs, grad, weight.main_grad)
    return _unused_gradient_of(weight)


def empty_weight_gradient(weight: Any) -> torch.Tensor:
    """Returns what `weight_gradient` does, without values."""
    return _unused_gradient_of(weight) if weight.fuse_wgrad_accumulation else weight.new_empty(weight.shape)


def unused_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Replaces ``get_dummy_wgrad``.

    Args:
        zero: Whether to set it to 0: of an embedding that is also the output layer, autograd adds it to the other's.
    """
    key = (*shape, dtype)
    if key not in simulated_unused_gradients:
        with keeping("workspace"):
            simulated_unused_gradients[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
    if zero:
        simulated_unused_gradients[key].fill_(0)
    return simulated_unused_gradients[key].detach()


def _unused_gradient_of(weight: Any) -> torch.Tensor:
    weight.grad_added_to_main_grad = True  # DDP's hook adds nothing then
    return unused_gradient(list(weight.shape), weight.dtype)


@one_kernel()
def _add_product(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    if not main_grad.is_meta:
        main_grad.add_(grad.T.float() @ inputs.float())


APEX_EXTENSION = SimpleNamespace(wgrad_gemm_accum_fp32=_add_product, wgrad_gemm_accum_fp16=_add_product)
"""Replaces ``fused_weight_gradient_mlp_cuda``, by the type of the buffer."""
