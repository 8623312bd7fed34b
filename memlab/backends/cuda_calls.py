"""Calls that name a CUDA device, served from CPU memory; a storage remembers whether it would live on the host.

Both pools are the same RAM here, so that offloading is seen only by what was asked for: without a device, or for
``"cpu"`` or pinned memory, torch would allocate on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab.meter.labels import on_host


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be in host memory if this were a GPU."""
    return getattr(tensor.untyped_storage(), "memlab_on_host", False)


class CudaOnCpu(TorchFunctionMode):
    """Serves calls that name a CUDA device from CPU memory, and tells host memory from device memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            return _make(func, args, kwargs)
        handler = _TENSOR_METHODS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    """Whether a value of an argument ``device`` names a GPU."""
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _make(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    # Without a device torch allocates on the host. Megatron writes the host as "cpu", and reaches the device by name or
    # through a tensor's `.device`, which is a torch.device and, here, the CPU's as well.
    device = kwargs.get("device")
    pinned = kwargs.get("pin_memory", False)
    if str(device) == "meta":
        return func(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "device")}
    if pinned or (isinstance(device, str) and device == "cpu") or (device is None and func not in LIKE):
        return made_on_host(func, *args, **kwargs)
    return func(*args, **kwargs)


def made_on_host(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a function makes, in host memory."""
    with on_host():
        result = func(*args, **kwargs)
    result.untyped_storage().memlab_on_host = True
    return result


def split_place(args: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Takes the device out of the arguments of ``Tensor.to``.

    Returns:
        The device as it was written, None without one; the other arguments.
    """
    given = [value for value in (*args, kwargs.get("device")) if isinstance(value, (str, int, torch.device))]
    places = [value for value in given if not isinstance(value, bool)]
    rest = tuple(value for value in args if not isinstance(value, (str, torch.device)) and value not in places)
    named = {name: value for name, value in kwargs.items() if name != "device"}
    return places[0] if places else None, rest, named


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    place, args, kwargs = split_place(args, kwargs)
    if str(place) == "meta":
        return torch.Tensor.to(tensor, place, *args, **kwargs)
    if isinstance(place, str) and place == "cpu":
        tensor = _to_host(tensor)
    elif place is not None:
        tensor = _to_device(tensor)
    return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor


def _to_host(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor if is_on_host(tensor) else made_on_host(torch.clone, tensor)


def _to_device(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # A clone of a host tensor would be booked where its input is; a new tensor that takes the values is not.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if is_on_host(tensor) else tensor


def run_backward(mode: TorchFunctionMode, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """Stands for ``torch.autograd.backward``, with a function mode in place while it runs."""
    # torch leaves the function mode while a function runs that was offered to it. Going to autograd's engine from here,
    # as Megatron's custom_backward does, keeps the stand-ins in place during backward.
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors or [None] * len(tensors))
    grads = tuple(
        torch.ones_like(tensor) if grad is None else grad for tensor, grad in zip(tensors, grads, strict=True)
    )
    with mode:
        torch.autograd.Variable._execution_engine.run_backward(
            tensors,
            grads,
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return torch.Tensor.type(tensor, *args, **kwargs)
    name = torch.Tensor.type(tensor)
    return name if is_on_host(tensor) else name.replace("torch.", "torch.cuda.")


LIKE = {torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like}

FACTORIES = LIKE | {
    torch.arange,
    torch.empty,
    torch.empty_strided,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.tensor,
    torch.zeros,
}

_TENSOR_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _to_device,
    torch.Tensor.cpu: _to_host,
    torch.Tensor.pin_memory: lambda tensor, *_: made_on_host(torch.clone, tensor),
    torch.Tensor.is_pinned: lambda tensor, *_: is_on_host(tensor),
    torch.Tensor.type: _type,
    torch.autograd.backward: lambda *args, **kwargs: run_backward(CudaOnCpu(), *args, **kwargs),
}


class _Stream:
    """Work is done when a call returns, so waiting for it and ordering it are nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_STREAM = _Stream()


def random_state(*_: Any, **__: Any) -> torch.Tensor:
    """Returns the one generator's state; an operation brings it, made behind the meter's back, into sight."""
    with on_host():
        return torch.ops.aten.alias(torch.default_generator.get_state())


def _nothing(*_: Any, **__: Any) -> None:
    pass


CUDA_API: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *_: _STREAM,
    "default_stream": lambda *_: _STREAM,
    "stream": lambda *_: contextlib.nullcontext(),
    "synchronize": _nothing,
    "current_device": lambda: torch.device("cpu"),
    "set_device": _nothing,
    "empty_cache": _nothing,
    "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    "manual_seed": torch.default_generator.manual_seed,
    "get_rng_state": random_state,
    "set_rng_state": lambda state, *_: torch.default_generator.set_state(state),
}
