"""What torch does with storages, reported to a meter: results of operations, resizes in place, and frees."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memlab.upstream.patching import patched


class ResizeObserver(Protocol):
    """Receives the reports of `observe_resizes`."""

    def before_resize(self, storage: Any, num_bytes: int) -> None:
        """Called before a resize; an error that it raises prevents the resize."""

    def after_resize(self, storage: Any) -> None:
        """Called after a resize."""


class EagerMode(TorchDispatchMode):
    """A dispatch mode for code of which torch compiles nothing, as on the CPU and on fake tensors.

    torch wraps each `__torch_dispatch__`, so that its compiler leaves the method alone. That takes several microseconds
    for every operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


Answer = Callable[[Any, Any, dict[str, Any]], Any]
"""Returns the results of an operation, given with its arguments and keyword arguments."""


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the results that torch computes."""
    return func(*args, **kwargs)


class ObserveResults(EagerMode):
    """Reports every operation on this thread.

    Args:
        report: Called with an operation's results and arguments when it has returned.
        answer: Returns the results. A dispatch mode of its own would take as long again for each operation.
        afterwards: Called with each operation of `WATCHED`, its arguments and what it has made or
            written to, after they have been reported.
    """

    def __init__(
        self,
        report: Callable[[Any, Any], None],
        answer: Answer = computed,
        afterwards: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._report, self._answer, self._afterwards = report, answer, afterwards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper, such as a DTensor, has no memory. What it does with its parts is seen if torch asks it next.
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        results = self._answer(func, args, kwargs or {})
        with torch._C.DisableTorchFunction():  # within autograd's engine, a function mode would see each look
            self._report(results, args)
        if self._afterwards is not None and id(func) in WATCHED:
            self._afterwards(func, args, kwargs["out"] if results is None else results)
        return results


PRODUCTS = frozenset(
    id(operation)
    for name in ("mm", "addmm", "bmm", "baddbmm")
    for operation in (getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, name).out)
)
"""By the identity of the operation, because torch computes its hash in Python."""
WATCHED = {*PRODUCTS, id(torch.ops.aten.sum.dim_IntList), id(torch.ops.aten._foreach_norm.Scalar)}
"""Operations that do more on a GPU than making a result; a library's that is not imported yet are added later."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Runs the block without reports of its operations."""
    with _disable_current_modes():
        yield


_resize_observers: list[ResizeObserver] = []
_resizes_reported = ExitStack()
_changing_observers = threading.Lock()


@contextmanager
def observe_resizes(observer: ResizeObserver) -> Iterator[None]:
    """Reports every `UntypedStorage.resize_`: Megatron frees and refills storages in place with it.

    Several observers, each on a thread of its own, may come and go in any order.
    """
    with _changing_observers:
        if not _resize_observers:
            _resizes_reported.enter_context(patched({"torch.UntypedStorage.resize_": _reported()}))
        _resize_observers.append(observer)
    try:
        yield
    finally:
        with _changing_observers:
            _resize_observers.remove(observer)
            if not _resize_observers:
                _resizes_reported.close()


def _reported() -> Callable[[Any, int], Any]:
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, num_bytes: int) -> Any:
        observers = tuple(_resize_observers)
        for observer in observers:
            observer.before_resize(storage, num_bytes)
        result = original(storage, num_bytes)
        for observer in observers:
            observer.after_resize(storage)
        return result

    return resize_


class _Reference(weakref.ref[Any]):
    """Knows what to call: a closure for each storage would be several objects more for the garbage collector."""

    __slots__ = ("argument", "frees", "on_free")
    frees: Frees
    on_free: Callable[[Any], None]
    argument: Any


def _report(reference: _Reference) -> None:
    try:
        reference.on_free(reference.argument)
    except BaseException as error:  # noqa: BLE001  # `check` raises it
        reference.frees.keep(error)


class Frees:
    """Reports when a storage is freed, and keeps the errors of the reports.

    Python prints an error that a weak reference's callback raises, and goes on ("Exception ignored in"). The meter's
    bytes would then be wrong without an error, in this record and in all later ones.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def watch(self, storage: Any, on_free: Callable[[Any], None], argument: Any) -> weakref.ref[Any]:
        """Calls `on_free` with an argument when the storage is freed, as long as the returned reference exists."""
        reference = _Reference(storage, _report)
        reference.frees, reference.on_free, reference.argument = self, on_free, argument
        return reference

    def keep(self, error: BaseException) -> None:
        """Keeps the first error for `check`."""
        # Without its traceback, whose frames would keep tensors of the step allocated.
        self._error = self._error or error.with_traceback(None)

    def check(self) -> None:
        """Raises `RuntimeError` if a report has failed: from then on the meter counts bytes that are free."""
        if self._error is not None:
            raise RuntimeError(
                f"the meter missed a free ({type(self._error).__name__}: {self._error}), so its bytes are wrong from "
                "here on: close this lab and open another"
            ) from self._error


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among an operation's arguments, those in lists included."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_in(argument)


def tensors_with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors whose storages a tensor consists of: itself, or the parts of a sparse one or of a wrapper.

    A wrapper, such as a ``DTensor``, has a storage of its own without memory, as large as what it stands for. A
    ``DTensor``'s memory is its local shard (``torch/distributed/tensor/_api.py``, torch 2.11 and 2.13).
    """
    if hasattr(type(tensor), "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        for part in parts:
            if isinstance(part, torch.Tensor):  # a `DTensor` names its mesh too
                yield from tensors_with_memory(part)
    elif tensor.layout is torch.strided:
        if not _is_opaque_wrapper(tensor):
            yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _is_opaque_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a program's own class has a storage without memory, and does not say what its parts are."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # of a fake tensor, whose address torch 2.11 gives with a warning
        return True
    try:
        return not storage.data_ptr()
    except RuntimeError:  # torch's answer for such a storage
        return True
