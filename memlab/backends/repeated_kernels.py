"""What a fused kernel does on fake tensors, repeated without its operations: layers and micro-batches call it again.

A kernel of Megatron or Transformer Engine is a dozen operations here, of which nothing but sizes is needed. They depend
on the arguments' shapes, strides and dtypes alone. So from the second call on, the meter gets the same allocations and
frees, and the results are made at once. Half of the storages that a layer makes are on chip, in such kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memlab.backends.cuda_on_cpu import is_on_host
from memlab.meter.allocations import Event, StorageAllocation
from memlab.meter.labels import Labels, one_kernel
from memlab.meter.storages import Storages
from memlab.vocabulary import POOLS

_ON_CHIP = POOLS.index("on_chip")
_MOST_CALLS = 5_000
"""A lab of a large model knows a hundred."""
_VALUES = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format))
"""Types of arguments that decide by their value."""


@dataclass(frozen=True, slots=True)
class _New:
    """A tensor that a call has made."""

    place: int
    """Of its storage among those that the call has made."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Done:
    """What a call did."""

    events: tuple[tuple[int, int], ...]
    """For each allocation the storage's place among those that the call has made, and its bytes; for a free 0 bytes."""
    num_storages: int
    results: Any
    """A `_New`, the number of the argument that was returned, None, or a tuple or list of these."""
    new: dict[int, _New]
    """By place."""


class _NotRepeatableError(Exception):
    """More than the arguments' shapes decides, or a call did more than to make tensors."""


class RepeatedKernels:
    """Calls the fused kernels of a simulated meter; `is_alone` says whether only its arguments decide what one does."""

    _shared: ClassVar[dict[Any, _Done | None]] = {}
    """Of all labs of this process, by function and arguments; None for a call that cannot be repeated."""

    def __init__(self, labels: Labels, storages: Storages, is_alone: Callable[[], bool] = lambda: True) -> None:
        self._labels, self._storages, self._is_alone = labels, storages, is_alone

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function as one kernel, or repeats what it did when it was called with equal arguments."""
        labels = self._labels
        # With a second mode, somebody else looks at the operations; without one, nobody does.
        is_usual = torch._C._len_torch_dispatch_stack() == 1 and not (labels.host_depth or labels.user_buffer_depth)
        if not is_usual or not self._is_alone():
            return _called(function, args, kwargs)
        given: list[torch.Tensor] = []
        with torch._C.DisableTorchFunction():
            try:
                key = (function, torch.get_default_dtype(), *_key_of(args, given), *kwargs)
                key = (*key, *_key_of(kwargs.values(), given))
            except _NotRepeatableError:
                key = ()
            done = self._shared.get(key)
        if done is not None:
            return self._repeated(done, given)
        if not key or key in self._shared:
            return _called(function, args, kwargs)
        return self._recorded(key, given, function, args, kwargs)

    def _recorded(
        self, key: Any, given: list[torch.Tensor], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        storages, labels = self._storages, self._labels
        position, num_births, num_timed = len(storages.log.events), storages.num_births, len(labels.timed_kernels)
        with one_kernel():
            results, done = function(*args, **kwargs), None
            if len(labels.timed_kernels) == num_timed:
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), suppress(_NotRepeatableError):
                    done = self._read(storages.log.events[position:], num_births, results, given)
        if len(self._shared) >= _MOST_CALLS:
            self._shared.clear()
        self._shared[key] = done
        return results

    def _read(self, events: list[Any], num_births: int, results: Any, given: list[torch.Tensor]) -> _Done:
        """Returns what a call did; raises `_NotRepeatableError` if it is more than a repetition does."""
        num_storages = self._storages.num_births - num_births
        rows, live = [], set[int]()
        for event in events:
            allocation = event.allocation if type(event) is Event and event.pool == _ON_CHIP else None
            if not isinstance(allocation, StorageAllocation):
                raise _NotRepeatableError
            place = allocation.birth - num_births
            if not 0 <= place < num_storages or abs(event.delta_bytes) != allocation.requested_bytes:
                raise _NotRepeatableError
            rows.append((place, max(0, event.delta_bytes)))
            live.symmetric_difference_update((place,))
        new: dict[int, _New] = {}
        template = self._template(results, given, num_births, new)
        if new.keys() != live:
            raise _NotRepeatableError  # something else has kept a storage
        return _Done(tuple(rows), num_storages, template, new)

    def _template(self, result: Any, given: list[torch.Tensor], num_births: int, new: dict[int, _New]) -> Any:
        if type(result) in (tuple, list):
            return type(result)([self._template(each, given, num_births, new) for each in result])
        if result is None:
            return None
        numbers = [number for number, tensor in enumerate(given) if tensor is result]
        if len(numbers) > 1:
            raise _NotRepeatableError  # which of two arguments another call returns is not known
        if numbers:
            return numbers[0]
        one = self._new(result, num_births)
        if one.place in new:
            raise _NotRepeatableError
        new[one.place] = one
        return one

    def _new(self, tensor: Any, num_births: int) -> _New:
        if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.requires_grad or is_on_host(tensor):
            raise _NotRepeatableError
        allocation = self._storages.allocation_of(tensor)
        place = -1 if allocation is None else allocation.birth - num_births
        one = _New(place, tensor.shape, tensor.stride(), tensor.dtype)
        if _made(one).untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            raise _NotRepeatableError  # not dense
        return one

    def _repeated(self, done: _Done, given: list[torch.Tensor]) -> Any:
        storages, labels = self._storages, self._labels
        made, allocations = dict[int, torch.Tensor](), dict[int, StorageAllocation]()
        first = storages.num_births
        labels.fused_depth += 1
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                for place, num_bytes in done.events:
                    if not num_bytes:
                        storages.end_temporary(allocations[place])
                    elif place in done.new:
                        storages.num_births = first + place
                        tensor = made[place] = _made(done.new[place])
                        storages.count(tensor.untyped_storage())
                    else:
                        allocations[place] = storages.begin_temporary(num_bytes, first + place)
            storages.num_births = first + done.num_storages
        finally:
            labels.fused_depth -= 1
            if labels.fused_depth == 0 and labels.on_kernel_end is not None:
                labels.on_kernel_end()

        return _rebuilt(done.results, given, made)


def _rebuilt(template: Any, given: list[torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    if type(template) is _New:
        return made[template.place]
    if type(template) is int:
        return given[template]
    return None if template is None else type(template)([_rebuilt(each, given, made) for each in template])


def _called(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with one_kernel():
        return function(*args, **kwargs)


def _made(one: _New) -> torch.Tensor:
    return torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")


def _key_of(values: Iterable[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """Returns what of arguments decides about a call.

    Raises:
        _NotRepeatableError: For a tensor with values, in host memory, or of which autograd makes a graph, and for what
            is no value.
    """
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            needs_grad = value.requires_grad
            if not value.is_meta or (needs_grad and torch.is_grad_enabled()) or is_on_host(value):
                raise _NotRepeatableError
            key += (value.shape, value.stride(), value.dtype, needs_grad)
            tensors.append(value)
        elif kind in (tuple, list):
            key += (kind, tuple(_key_of(value, tensors)))
        elif kind in _VALUES:
            key += (kind, value)
        else:
            raise _NotRepeatableError
    return key
