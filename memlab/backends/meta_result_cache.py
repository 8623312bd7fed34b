"""The results of operations on fake tensors, cached by the arguments' shapes: layers and micro-batches repeat them.

torch computes shape, strides and dtype of an elementwise result in Python (``torch/_refs``), which takes half a
millisecond. They depend only on the arguments' shapes, strides and dtypes, so from the second time on the result is
made at once. Each call still makes a new tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

_TensorSpec = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


class MetaResultCache:
    """Answers an operation on fake tensors from the last one on tensors of the same shapes, strides and dtypes."""

    def __init__(self) -> None:
        self._specs: dict[Any, tuple[_TensorSpec, ...] | None] = {}
        """The results' specs by operation and arguments; None if a result is not a new, dense tensor."""

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the results of an operation; inside a dispatch mode, so that no other one sees how they are made."""
        kind = _kind(func)
        if kind is None:
            return func(*args, **kwargs)
        try:
            key = (func, _key_of(args), _key_of(tuple(kwargs.items())))
            specs = self._specs.get(key)
        except _NotCacheableError:
            return func(*args, **kwargs)
        if specs is None:
            results = func(*args, **kwargs)
            if key not in self._specs:
                self._specs[key] = () if kind == "in place" else _specs_of_new(results, args)
            return results
        if kind == "in place":
            return args[0]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in specs]
        return made[0] if kind == "one" else tuple(made)


_FILL = {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_"}
"""Operations that write a whole tensor, and have no tag for that."""


class _NotCacheableError(Exception):
    """The result depends on values, not only on shapes."""


@cache
def _kind(func: Any) -> Literal["one", "several", "in place"] | None:
    """Returns what an operation returns, as its schema declares it; None if its results cannot be cached."""
    schema = func._schema
    if func.namespace != "aten" or any(str(result.type) != "Tensor" for result in schema.returns):
        return None
    aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
    if not aliased and not any(result.alias_info for result in schema.returns) and schema.returns:
        return "one" if len(schema.returns) == 1 else "several"
    is_elementwise = torch.Tag.pointwise in func.tags or schema.name in _FILL
    if aliased == [schema.arguments[0]] and aliased[0].alias_info.is_write and is_elementwise:
        return "in place"
    return None


def _key_of(value: Any) -> Any:
    """Returns what of an argument decides about a result: a fake tensor's spec, any other value with its type.

    Raises:
        _NotCacheableError: For a tensor with values, and for a generator.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise _NotCacheableError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_key_of(part) for part in value])
    if type(value) is torch.Generator:
        raise _NotCacheableError
    return type(value), value  # 1, 1.0 and True are equal keys, but give results of different dtypes


def _specs_of_new(results: Any, args: Any) -> tuple[_TensorSpec, ...] | None:
    """Returns the specs of an operation's results; None if one of them is not dense, or not new."""
    specs = []
    inputs = {part.untyped_storage()._cdata for part in args if isinstance(part, torch.Tensor)}
    for result in results if isinstance(results, tuple) else (results,):
        if not isinstance(result, torch.Tensor) or not result.is_meta or result.untyped_storage()._cdata in inputs:
            return None
        spec = result.shape, result.stride(), result.dtype
        dense = torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")
        if dense.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            return None
        specs.append(spec)
    return tuple(specs)
