"""What autograd does on a GPU and not on observed tensors, and what kernels allocate that it calls.

Only within `eager_backward`, for models of torch's own modules: those of Megatron have Transformer Engine's kernels,
and were compared with GPUs without this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from memlab.backends.cuda_on_cpu import is_on_host
from memlab.backends.kernel_temporaries import bytes_of_joined_chunks, bytes_of_norms, bytes_of_sum
from memlab.meter.observers import WATCHED, Answer, ObserveResults, unobserved

_ADD, _SUM = torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList
_NORMS = torch.ops.aten._foreach_norm.Scalar
_PUT = torch.ops.aten.index_put.default


class _Active(threading.local):
    """In how many blocks of `eager_backward` this thread is."""

    depth: int = 0


_active = _Active()


@contextmanager
def eager_backward() -> Iterator[None]:
    """Has the operations of this thread answered as by `as_autograd`, for the block."""
    _references_of_engine()  # not within a backward
    WATCHED.add(id(_joined_chunks()))
    outer = _active.depth
    _active.depth = outer + 1
    try:
        yield
    finally:
        _active.depth = outer


def is_inactive() -> bool:
    """Whether this thread is in no block of `eager_backward`."""
    return not _active.depth


def as_autograd(answer: Answer) -> Answer:
    """Returns answers in which autograd allocates nothing where it does not on a GPU.

    There it adds a gradient to the first one in place if nobody else refers to it (``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp, torch 2.11 and 2.13), and the gradients of chosen rows to zeros
    (``index_backward`` in torch/csrc/autograd/FunctionsManual.cpp), but never under a dispatch mode, such as a meter's.
    """

    def answered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Fake tensors have no values to add.
        if func is _ADD and not kwargs and _active.depth and _adds_in_place(*args):
            return args[0]
        if func is _PUT and _active.depth and _is_of_index(torch._C._current_autograd_node()):
            return args[0]
        return answer(func, args, kwargs)

    return answered


def _is_of_index(node: Any) -> bool:
    return node is not None and node.name() == "IndexBackward0"


def bytes_beside(func: Any, args: Any, result: Any) -> int:
    """Returns what a kernel of torch allocates beside its result, and frees.

    Args:
        func: The operation: a sum over the first dimensions, the norms of many tensors, or FSDP2's copy of gradients
            to the input of their reduction.
        result: What it has made or written to.
    """
    if not _active.depth:
        return 0
    if func is _NORMS:
        return 0 if is_on_host(args[0][0]) else bytes_of_norms([each.numel() for each in args[0]])
    if func is not _SUM:
        return _bytes_of_joining(args[0], args[2], result)
    tensor, dims = args[0], args[1] or ()
    outputs = result.numel()
    is_of_rows = sorted(each % tensor.dim() for each in dims) == list(range(len(dims))) and 0 < len(dims) < tensor.dim()
    return bytes_of_sum(outputs, tensor.numel() // outputs) if is_of_rows and outputs % 4 == 0 else 0


@cache
def _joined_chunks() -> Any:
    import torch.distributed.fsdp

    return torch.ops.fsdp.chunk_cat.default


def _bytes_of_joining(tensors: list[torch.Tensor], num_chunks: int, result: torch.Tensor) -> int:
    dtypes = (tensors[0].dtype, result.dtype)
    if dtypes[0] is not dtypes[1] and dtypes != (torch.bfloat16, torch.float32):
        return 0  # another kernel
    sizes = [-(-each.shape[0] // num_chunks) * each.shape[1:].numel() * result.element_size() for each in tensors]
    return bytes_of_joined_chunks(sizes)


class _References(NamedTuple):
    """How many references there are to a tensor, in Python and C++, and to its storage."""

    in_python: int
    in_cpp: int
    to_storage: int

    @classmethod
    def of_first(cls, first: torch.Tensor, second: torch.Tensor) -> _References:
        """Returns those of the first argument of an operation, given as the operation's answer has got it."""
        of_storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
        in_cpp = first._use_count()  # type: ignore[attr-defined,unused-ignore]  # torch 2.15 declares it
        return cls(sys.getrefcount(first), in_cpp, of_storage)


def _adds_in_place(*args: Any) -> bool:
    """Whether autograd's engine itself adds two gradients, and nobody else has the first."""
    return (
        torch._C._current_autograd_node() is not None
        and sys._getframe(3).f_code.co_name in _CALLS_OF_ENGINE
        and all(isinstance(each, torch.Tensor) for each in args)
        and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype)
        and _References.of_first(*args) == _references_of_engine()
        and torch.ops.aten.is_non_overlapping_and_dense.default(args[0])
    )


_CALLS_OF_ENGINE = ("_backward", "_engine_run_backward")
"""Functions that call the engine. What a function of Python does in backward has a frame of its own between."""


@cache
def _references_of_engine() -> _References:
    """Returns the references to a gradient that only the engine has, as a dispatch mode's answer sees it."""
    seen: list[_References] = []

    def answered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _ADD:
            look(*args)
        return func(*args, **kwargs)

    def look(*args: Any) -> None:
        seen.append(_References.of_first(*args))

    with unobserved(), torch._C.DisableTorchFunction():
        leaf = torch.ones(2, device="meta", requires_grad=True)
        both = leaf * 1
        total = both.exp() + both.sin()
        gradient = torch.ones(2, device="meta")
        with ObserveResults(lambda *_: None, answered):
            torch.autograd.Variable._execution_engine.run_backward((total,), (gradient,), False, False, (), True, True)
    return seen[0]
