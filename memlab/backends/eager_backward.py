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

from memlab.backends.kernel_temporaries import bytes_of_sum
from memlab.meter.observers import Answer, EagerMode, unobserved

_ADD, _SUM = torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList
_active = threading.local()


@contextmanager
def eager_backward() -> Iterator[None]:
    """Has the operations of this thread answered as by `as_autograd`, for the block."""
    _references_of_engine()  # not within a backward
    outer = getattr(_active, "depth", 0)
    _active.depth = outer + 1
    try:
        yield
    finally:
        _active.depth = outer


def as_autograd(answer: Answer) -> Answer:
    """Returns answers in which autograd's sums of two gradients allocate nothing where they do not on a GPU.

    There autograd adds a gradient to the first one in place if nobody else refers to it (``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp, torch 2.11 and 2.13), but never under a dispatch mode, such as a meter's.
    """

    def answered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _ADD and not kwargs and getattr(_active, "depth", 0) and _adds_in_place(*args):
            return args[0]  # fake tensors have no values to add
        return answer(func, args, kwargs)

    return answered


def bytes_beside(func: Any, args: Any, result: torch.Tensor) -> int:
    """Returns what a kernel of torch allocates beside its result, and frees: a sum over the first dimensions does."""
    if func is not _SUM or not getattr(_active, "depth", 0):
        return 0
    tensor, dims = args[0], args[1] or ()
    outputs = result.numel()
    is_of_rows = sorted(each % tensor.dim() for each in dims) == list(range(len(dims))) and 0 < len(dims) < tensor.dim()
    return bytes_of_sum(outputs, tensor.numel() // outputs) if is_of_rows and outputs % 4 == 0 else 0


class _References(NamedTuple):
    """How many references a tensor and its storage have."""

    tensor: int
    storage: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _References:
        return cls(tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _adds_in_place(first: Any, second: Any) -> bool:
    """Whether autograd's engine itself adds two gradients, the first of which is its own."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    return (
        torch._C._current_autograd_node() is not None
        and sys._getframe(3).f_code.co_name in _CALLS_OF_ENGINE
        and (first.shape, first.dtype) == (second.shape, second.dtype)
        and _References.of(first) == _references_of_engine()
        and torch.ops.aten.is_non_overlapping_and_dense.default(first)
    )


_CALLS_OF_ENGINE = ("_backward", "_engine_run_backward", "_references_of_engine")
"""Functions that call the engine. What a function of Python does in backward has a frame of its own between."""


@cache
def _references_of_engine() -> _References:
    """Returns the references of a gradient that only the engine has, as a dispatch mode sees it."""
    seen: list[_References] = []

    class Look(EagerMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                seen.append(_References.of(args[0]))
            return func(*args, **(kwargs or {}))

    with unobserved(), torch._C.DisableTorchFunction():
        leaf = torch.ones(2, device="meta", requires_grad=True)
        both = torch.cat((leaf.exp(), leaf.sin()))
        gradient = torch.ones(4, device="meta")
        with Look():
            torch.autograd.Variable._execution_engine.run_backward((both,), (gradient,), False, False, (), True, True)
    return seen[0]
