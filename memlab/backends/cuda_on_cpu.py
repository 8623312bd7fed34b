"""Calls that name a CUDA device, served without one; a storage remembers whether it would be in host memory.

Here device and host are the same RAM. A tensor counts as host memory if the call that made it would allocate on the
host: a call without a device, or for ``"cpu"`` or pinned memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from memlab.engines.megatron.layers.dropout import dropout
from memlab.meter.labels import current_stream, is_followed, on_host, on_stream, stream_order
from memlab.meter.stream_order import STREAM_NUMBERS, Moment


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be in host memory if this were a GPU."""
    return getattr(tensor.untyped_storage(), "memlab_on_host", False)


def made_on_host(func: Callable[..., Any], *args: Any, pinned: bool = False, **kwargs: Any) -> Any:
    """Calls a function, and counts what it makes as host memory, pinned or pageable."""
    with on_host(pinned=pinned):
        result = func(*args, **kwargs)
        if func in _UNSEEN:
            result = torch.ops.aten.alias(result)
    result.untyped_storage().memlab_on_host = True
    return result


class CudaOnCpu(TorchFunctionMode):
    """Serves calls that name a CUDA device from CPU memory, and distinguishes host memory from device memory."""

    device: ClassVar[torch.device] = torch.device("cpu")
    """Where the tensors really are that Megatron puts on its CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[Any, Callable[..., Any] | None] = {
            **_NO_HANDLERS,
            **{func: partial(_view, func) for func in _VIEWS},
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._to_device,
            torch.Tensor.cpu: self._to_host,
            torch.Tensor.pin_memory: lambda tensor, *_: made_on_host(torch.clone, tensor, pinned=True),
            torch.Tensor.is_pinned: lambda tensor, *_: is_on_host(tensor),
            # An attribute: torch offers the reading of it to a function mode under this name.
            torch.Tensor.is_cuda.__get__: lambda tensor: not is_on_host(tensor),  # type: ignore[attr-defined]
            torch.Tensor.type: self._type,
            torch.autograd.backward: self._backward,
            torch.nn.functional.dropout: dropout,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.handlers:
            handler = self.handlers[func]
            return handler(*args, **(kwargs or {})) if handler else self._make(func, args, kwargs or {})
        if not kwargs:  # most calls: a step of four tiny layers makes 12,000
            return func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": self.device}
        return func(*args, **kwargs)

    def names_host(self, device: Any) -> bool:
        """Whether an argument ``device`` names the host."""
        # Megatron writes the host as "cpu". It names the device by a tensor's `.device`, too, which is here the CPU's.
        return isinstance(device, str) and device == "cpu"

    def make_on_host(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, pinned: bool) -> Any:
        """Calls a factory for host memory."""
        return made_on_host(func, *args, pinned=pinned, **kwargs)

    def make_on_device(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a factory for device memory."""
        return func(*args, **kwargs)

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a host tensor on the device."""
        # A clone of a host tensor would be counted where its input is; a new tensor that takes the values is not.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)

    def _make(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        device, pinned = kwargs.get("device"), kwargs.get("pin_memory", False)
        inherits_device = func in LIKE or (func in _CONVERSIONS and isinstance(args[0], torch.Tensor))
        if func is torch.as_tensor and inherits_device:
            return self._to(*args, **kwargs)
        if str(device) == "meta" != self.device.type:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "device")}
        if pinned or self.names_host(device) or (device is None and not inherits_device):
            return self.make_on_host(func, args, kwargs, pinned=pinned)
        return self.make_on_device(func, args, kwargs if device is None else kwargs | {"device": self.device})

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place, args, kwargs = _split_device(args, kwargs)
        if str(place) == "meta" != self.device.type:
            return torch.Tensor.to(tensor, place, *args, **kwargs)
        if self.names_host(place):
            tensor = self._to_host(tensor)
        elif place is not None:
            tensor = self._to_device(tensor)
        if not args and not kwargs:
            return tensor
        if is_on_host(tensor):  # a router makes its weights on the host, and converts them there
            return made_on_host(torch.Tensor.to, tensor, *args, **kwargs)
        return torch.Tensor.to(tensor, *args, **kwargs)

    def _to_host(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor if is_on_host(tensor) else made_on_host(torch.clone, tensor)

    def _to_device(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.copy_to_device(tensor) if is_on_host(tensor) else tensor

    def _type(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return torch.Tensor.type(tensor, *args, **kwargs)
        own = {"cpu": "torch.", "meta": "torch.meta."}[self.device.type]
        return torch.Tensor.type(tensor).replace(own, "torch." if is_on_host(tensor) else "torch.cuda.")

    def _backward(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        # torch leaves the function mode while a function runs that was offered to it. A call of autograd's engine, as
        # in Megatron's custom_backward, keeps the mode during backward.
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors or [None] * len(tensors)
        grads = tuple(
            torch.ones_like(tensor) if grad is None else grad for tensor, grad in zip(tensors, given, strict=True)
        )
        with type(self)():
            torch.autograd.Variable._execution_engine.run_backward(
                tensors,
                grads,
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )


_VIEWS = (
    *(torch.Tensor.detach, torch.Tensor.expand_as, torch.Tensor.view, torch.Tensor.__getitem__),
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
)
"""Functions that return a view, which allocates nothing; an index may also copy. Building an optimizer, and an update
of it, call them a dozen times per parameter."""


def _view(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Makes a view without showing it to the meter, if the meter would find nothing new in it.

    The dispatch of a view to a mode written in Python takes ten times as long as the view.
    """
    may_copy = func is torch.Tensor.__getitem__ and type(args[0]) is not slice
    # With a second mode, somebody else looks at operations (`Lab.groups_used`, collectives on copies).
    if may_copy or torch._C._len_torch_dispatch_stack() != 1 or not is_followed(tensor):
        return func(tensor, *args, **kwargs)
    with torch._C._DisableTorchDispatch():
        return func(tensor, *args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _split_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Splits the arguments of ``Tensor.to`` into the device as it was given, None without one, and the others."""
    given = [value for value in (*args, kwargs.get("device")) if isinstance(value, (str, int, torch.device))]
    places = [value for value in given if not isinstance(value, bool)]
    others = tuple(value for value in args if not isinstance(value, (str, torch.device)) and value not in places)
    named = {name: value for name, value in kwargs.items() if name != "device"}
    return places[0] if places else None, others, named


LIKE = {
    *(torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randint_like, torch.randn_like),
    torch.zeros_like,
}
"""Factories that take the device of their first argument."""

_CONVERSIONS = {torch.as_tensor, torch.normal, torch.tensor}
"""Factories that take the device of their first argument if it is a tensor."""

_UNSEEN = {torch.as_tensor, torch.from_numpy}
"""Factories whose result no dispatch mode sees: an operation on it shows it to the meter."""

FACTORIES = (
    LIKE
    | _CONVERSIONS
    | {
        *(
            torch.arange,
            torch.empty,
            torch.empty_permuted,
            torch.empty_strided,
            torch.eye,
            torch.full,
        ),
        *(
            torch.linspace,
            torch.logspace,
            torch.ones,
            torch.rand,
            torch.randint,
            torch.randn,
            torch.randperm,
            torch.range,
        ),
        *(torch.scalar_tensor, torch.tril_indices, torch.triu_indices, torch.zeros, torch.bartlett_window),
        *(torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window),
    }
)
"""Functions that make a tensor on a device of their own choice: on the host, unless an argument names the device."""

_NO_HANDLERS = dict.fromkeys(FACTORIES)
"""`CudaOnCpu` handles all factories alike. They are in the same dictionary as the handlers, so that each call
needs one look-up."""


class _Stream:
    """A call returns when its work is done, so there is nothing to wait for; what a GPU would wait for is noted.

    Its number decides from which of the allocator's pools a request is served while it is the current stream.
    """

    device_index, device_type = 0, 1  # CUDA's number in c10/core/DeviceType.h

    def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
        self.number = STREAM_NUMBERS.take() if number is None else number

    @property
    def stream_id(self) -> int:
        """What FSDP2 of torch 2.15 gives its own operator, which does nothing for CUDA."""
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, stream: Any) -> None:
        order = stream_order()
        order.wait(self.number, order.event(stream.number))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        order = stream_order()
        order.synchronize(order.event(self.number))


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._moment: Moment = {}

    def record(self, stream: Any = None) -> None:
        self._moment = stream_order().event(current_stream() if stream is None else stream.number)

    def wait(self, stream: Any = None) -> None:
        stream_order().wait(current_stream() if stream is None else stream.number, self._moment)

    def synchronize(self) -> None:
        stream_order().synchronize(self._moment)

    def query(self) -> bool:
        return True


class _Graph:
    """A class, as torch's: libraries that are imported meanwhile annotate with it."""


_DEFAULT_STREAM = _Stream(number=0)


def _as_current(stream: _Stream | None) -> contextlib.AbstractContextManager[None]:
    """Replaces ``torch.cuda.stream``, which does nothing for None."""
    return contextlib.nullcontext() if stream is None else on_stream(stream.number)


_from_numpy = torch.from_numpy


def from_numpy(array: Any) -> torch.Tensor:
    """Replaces ``torch.from_numpy``, which no function mode sees."""
    return made_on_host(_from_numpy, array)


def random_state(*_: Any, **__: Any) -> torch.Tensor:
    """Returns the one generator's state. No dispatch mode sees it made: an operation on it shows it to the meter."""
    with on_host():
        return torch.ops.aten.alias(torch.default_generator.get_state())


class _Capture(contextlib.nullcontext[None]):
    """Runs what a CUDA graph captures at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _nothing(*_: Any, **__: Any) -> None:
    pass


CUDA_API: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *_: _Stream(number=current_stream()),
    "default_stream": lambda *_: _DEFAULT_STREAM,
    "stream": _as_current,
    "synchronize": lambda *_: stream_order().synchronize(),
    "current_device": lambda: torch.device("cpu"),
    "set_device": _nothing,
    "empty_cache": _nothing,
    "CUDAGraph": _Graph,
    "graph": _Capture,
    "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    "manual_seed": torch.default_generator.manual_seed,
    "get_rng_state": random_state,
    "set_rng_state": lambda state, *_: torch.default_generator.set_state(state),
}
