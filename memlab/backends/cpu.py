"""The CPU stands in for CUDA: Megatron's own code runs unchanged, small and for real, on a machine without a GPU.

Three things are replaced while a `stand_in` block runs, and put back after it: the parts of ``torch.cuda`` that
Megatron touches, tensor calls that name a CUDA device, and the few places in megatron-core that need Transformer
Engine (written against 0.16.1 and 0.19.2). A storage remembers whether it would live in host memory, so that
offloading is seen although both pools are the same RAM.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from memlab.backends import Backend
from memlab.meter.labels import on_host, one_kernel
from memlab.model import torch_moe
from memlab.model.torch_layers import TorchProvider


def backend(reason: str) -> Backend:
    """Returns the CPU backend: the live model at small sizes, with real values."""
    return Backend(name="cpu", reason=reason, layer_provider=TorchProvider, distributed_backend="fake", active=stand_in)


@contextmanager
def stand_in() -> Iterator[None]:
    """Lets Megatron run on this thread as if the CPU were a CUDA device, for the block."""
    with ExitStack() as stack:
        # One operation of a small model is shorter than waking a second thread, and where another process wants the
        # core, OpenMP's threads wait for each other: a step of 50 ms became one of 1.9 s.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for name, value in _CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for module, name, value in _megatron_parts():
            stack.enter_context(patch.object(module, name, value, create=True))
        stack.enter_context(patch.object(torch, "get_rng_state", _random_state))
        # Its C++ signature refuses any other stream than CUDA's before a function mode is asked.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(_CudaOnCpu())
        yield


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be in host memory if this were a GPU."""
    return getattr(tensor.untyped_storage(), "memlab_on_host", False)


class _CudaOnCpu(TorchFunctionMode):
    """Serves calls that name a CUDA device from CPU memory, and tells host memory from device memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return _make(func, args, kwargs)
        handler = _TENSOR_METHODS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _make(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    # Without a device torch allocates on the host. Megatron writes the host as "cpu", and reaches the device by name or
    # through a tensor's `.device`, which is a torch.device and, here, the CPU's as well.
    device = kwargs.get("device")
    pinned = kwargs.get("pin_memory", False)
    if str(device) == "meta":
        return func(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "device")}
    if pinned or (isinstance(device, str) and device == "cpu") or (device is None and func not in _LIKE):
        return _made_on_host(func, *args, **kwargs)
    return func(*args, **kwargs)


def _made_on_host(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_host():
        result = func(*args, **kwargs)
    result.untyped_storage().memlab_on_host = True
    return result


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = [value for value in (*args, kwargs.get("device")) if isinstance(value, (str, int, torch.device))]
    places = [value for value in given if not isinstance(value, bool)]
    args = tuple(value for value in args if not isinstance(value, (str, torch.device)) and value not in places)
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if places and str(places[0]) == "meta":
        return torch.Tensor.to(tensor, places[0], *args, **kwargs)
    if places and isinstance(places[0], str) and places[0] == "cpu":
        tensor = _to_host(tensor)
    elif places:
        tensor = _to_device(tensor)
    return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor


def _to_host(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor if is_on_host(tensor) else _made_on_host(torch.clone, tensor)


def _to_device(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # A clone of a host tensor would be booked where its input is; a new tensor that takes the values is not.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if is_on_host(tensor) else tensor


def _backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    # torch leaves the function mode while a function runs that was offered to it. Going to autograd's engine from here,
    # as Megatron's custom_backward does, keeps the stand-ins in place during backward.
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors or [None] * len(tensors))
    grads = tuple(
        torch.ones_like(tensor) if grad is None else grad for tensor, grad in zip(tensors, grads, strict=True)
    )
    with _CudaOnCpu():
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


_LIKE = {torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like}

_FACTORIES = _LIKE | {
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
    torch.Tensor.pin_memory: lambda tensor, *_: _made_on_host(torch.clone, tensor),
    torch.Tensor.is_pinned: lambda tensor, *_: is_on_host(tensor),
    torch.Tensor.type: _type,
    torch.autograd.backward: _backward,
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


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    # Generators make their state behind the meter's back; an operation on it brings it into sight, as host memory.
    with on_host():
        return torch.ops.aten.alias(torch.default_generator.get_state())


def _nothing(*_: Any, **__: Any) -> None:
    pass


_CUDA: dict[str, Any] = {
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
    "get_rng_state": _random_state,
    "set_rng_state": lambda state, *_: torch.default_generator.set_state(state),
}


def _megatron_parts() -> Iterator[tuple[Any, str, Any]]:
    """Yields (module, name, stand-in) for what megatron-core takes from CUDA, Transformer Engine or torch.compile."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    yield random, "_get_cuda_rng_state", _random_state
    yield random, "_set_cuda_rng_state", lambda state, *_, **__: torch.default_generator.set_state(state)
    # random.py's CheckpointWithoutOutput asks TE whether FP8 is on, also where it is not.
    yield random, "FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    yield random, "activation_recompute_forward", lambda **_: contextlib.nullcontext()
    yield random, "fp8_autocast", lambda **_: contextlib.nullcontext()
    if hasattr(random, "_get_share_storage"):  # 0.19 compiles an extension for it
        yield random, "_get_share_storage", lambda: _move_block
    # fine_grained_activation_offload.py turns TE's own offloading on around a group, and refuses to run without it.
    yield transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)
    if hasattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload"):  # 0.19 looks at the tensor's device
        yield ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(_is_offloadable)
    # moe_utils.py names te_general_gemm without TE although its import failed; None selects torch.mm.
    yield moe_utils, "te_general_gemm", None
    yield moe_utils, "HAVE_TE", True
    yield moe_utils, "fused_permute", torch_moe.permute
    yield moe_utils, "fused_permute_with_probs", torch_moe.permute_with_probs
    yield moe_utils, "fused_unpermute", torch_moe.unpermute
    yield moe_utils, "fused_sort_chunks_by_index", torch_moe.sort_chunks_by_index
    yield moe_utils, "fused_sort_chunks_by_index_with_probs", torch_moe.sort_chunks_by_index_with_probs
    yield from _compiled_functions()


def _move_block(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Gives a recomputed tensor's memory to the output that was discarded.

    On a GPU both storages then point to one block. Of the recomputed tensor backward needs only the graph, so here its
    block may leave it: one block either way.
    """
    num_bytes = recomputed.untyped_storage().nbytes()
    with one_kernel():
        block = recomputed.data.clone()
        recomputed.untyped_storage().resize_(0)
        output.untyped_storage().resize_(num_bytes)
        output.data.copy_(block)  # through .data, so that autograd sees no change
        del block


def _is_offloadable(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and not is_on_host(tensor)


def _compiled_functions() -> Iterator[tuple[Any, str, Any]]:
    # What Megatron compiles into one kernel (megatron/core/jit.py) runs eagerly here, as one kernel for the meter.
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    own_classes = [cls for cls in classes if cls.__module__.startswith("megatron.core.")]
    for owner in (*modules, *own_classes):
        for name, value in list(vars(owner).items()):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None:
                yield owner, name, _as_one_kernel(original)


def _as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with one_kernel():
            return function(*args, **kwargs)

    return run
