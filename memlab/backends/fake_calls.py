"""Calls that name a CUDA device, served by fake tensors: shape, dtype, strides and a storage's size, and no memory.

They are torch's meta tensors, on which ``FakeTensorMode`` rests too; that mode itself costs 0.1 ms an operation, and
Megatron's offload manager asserts that none of its tensors come in (``fine_grained_activation_offload.py``).
What is made on the host by value (a batch, a list of sizes) is real and small; large host memory is fake as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab.backends.cuda_calls import FACTORIES, LIKE, is_cuda, is_on_host, made_on_host, run_backward, split_place
from memlab.backends.kernel_temporaries import embedding

FAKE = torch.device("meta")


class FakeCuda(TorchFunctionMode):
    """Serves calls that name a CUDA device with fake tensors, and tells host memory from device memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            return _make(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": FAKE}
        return func(*args, **kwargs)


def _make(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    # Without a device torch allocates on the host, and Megatron writes the host as "cpu".
    device = kwargs.get("device")
    on_host = kwargs.get("pin_memory") or str(device) == "cpu" or (device is None and func not in LIKE)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "device")}
    if not on_host:
        made = func(*args, **kwargs) if device is None else func(*args, **kwargs, device=FAKE)
        # torch.tensor makes a fake tensor behind the meter's back; an operation brings it into sight.
        return torch.ops.aten.alias(made) if func is torch.tensor else made
    return made_on_host(func, *args, **kwargs, **({"device": FAKE} if func in _WITHOUT_VALUES else {}))


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    place, args, kwargs = split_place(args, kwargs)
    if str(place) == "cpu":
        tensor = _to_host(tensor)
    elif place is not None:
        tensor = _to_device(tensor)
    return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor


def _to_host(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor if is_on_host(tensor) else made_on_host(torch.clone, tensor)


def _to_device(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=FAKE) if is_on_host(tensor) else tensor


def _item(tensor: torch.Tensor) -> Any:
    # Megatron reads the loss, the gradients' norm and whether one of them is infinite.
    return torch.zeros((), dtype=tensor.dtype).item() if tensor.is_meta else tensor.item()


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return torch.Tensor.type(tensor, *args, **kwargs)
    return torch.Tensor.type(tensor).replace("torch.meta.", "torch." if is_on_host(tensor) else "torch.cuda.")


_WITHOUT_VALUES = {torch.empty, torch.empty_like, torch.empty_strided}

_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _to_device,
    torch.Tensor.cpu: _to_host,
    torch.Tensor.pin_memory: lambda tensor, *_: made_on_host(torch.clone, tensor),
    torch.Tensor.is_pinned: lambda tensor, *_: is_on_host(tensor),
    torch.Tensor.item: _item,
    torch.Tensor.type: _type,
    torch.nn.functional.embedding: embedding,
    torch.autograd.backward: lambda *args, **kwargs: run_backward(FakeCuda(), *args, **kwargs),
}
