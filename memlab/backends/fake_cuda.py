"""Calls that name a CUDA device, served by fake tensors: shape, dtype, strides and a storage's size, and no memory.

They are torch's meta tensors, on which ``FakeTensorMode`` is built too. That mode itself costs 0.1 ms per operation,
and Megatron's offload manager asserts that it gets none of its tensors (``fine_grained_activation_offload.py``). What
is made on the host from values (a batch, a list of sizes) is real and small; large host memory is fake as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memlab.backends.cuda_on_cpu import CudaOnCpu, made_on_host
from memlab.backends.kernel_temporaries import copy_, embedding, logsumexp, topk
from memlab.meter.labels import current_stream, stream_order

FAKE = torch.device("meta")


class FakeCuda(CudaOnCpu):
    """Serves calls that name a CUDA device with fake tensors, and distinguishes host memory from device memory."""

    device = FAKE

    def __init__(self) -> None:
        super().__init__()
        self.handlers |= {
            torch.Tensor.item: _item,
            torch.Tensor.__bool__: _bool,
            torch.Tensor.copy_: copy_,
            torch.nn.functional.embedding: embedding,
            torch.logsumexp: logsumexp,
            torch.topk: topk,
        }

    def names_host(self, device: Any) -> bool:
        """Whether an argument ``device`` names the host."""
        return str(device) == "cpu"

    def make_on_host(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, pinned: bool) -> Any:
        """Calls a factory for host memory, fake unless it has values."""
        kwargs = kwargs | {"device": FAKE} if func in _WITHOUT_VALUES else kwargs
        return made_on_host(func, *args, pinned=pinned, **kwargs)

    def make_on_device(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a factory for device memory."""
        made = func(*args, **kwargs)
        # No dispatch mode sees a fake torch.tensor made: an operation on it shows it to the meter.
        return torch.ops.aten.alias(made) if func in (torch.tensor, torch.as_tensor) else made

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor like a host tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=FAKE)


def _item(tensor: torch.Tensor) -> Any:
    # Megatron reads the loss, the gradients' norm and whether one of them is infinite.
    order = stream_order()
    order.synchronize(order.event(current_stream()))
    return torch.zeros((), dtype=tensor.dtype).item() if tensor.is_meta else tensor.item()


def _bool(tensor: torch.Tensor) -> bool:
    value = _item(tensor)
    if not tensor.is_meta:
        return bool(value)
    asking = sys._getframe(2).f_code  # behind the function mode
    if asking.co_name not in _HAS_TOKENS:
        raise RuntimeError(f"{asking.co_filename}: {asking.co_name} asks whether a tensor without values is true")
    return True


_HAS_TOKENS = ("finalize_model_grads",)
"""Functions of Megatron that ask whether the batch has tokens: it has."""
_WITHOUT_VALUES = {torch.empty, torch.empty_like, torch.empty_permuted, torch.empty_strided}
