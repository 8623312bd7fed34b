"""The results of operations on fake tensors, cached by the arguments' shapes: layers and micro-batches repeat them.

torch computes shape, strides and dtype of an elementwise result in Python (``torch/_refs``), which takes half a
millisecond. They depend only on the arguments' shapes, strides and dtypes, so from the second time on the result is
made at once. Each call still makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch

_TensorSpec = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


_MOST_ENTRIES = 20_000
"""Less than 20 MB. A lab of a small model makes 300 entries."""


class MetaResultCache:
    """Answers an operation on fake tensors from the last one on tensors of the same shapes, strides and dtypes.

    Results of factories whose arguments name no dtype have torch's default one, which may change between two calls.
    """

    _shared: ClassVar[MetaResultCache | None] = None

    def __init__(self) -> None:
        self._specs: dict[Any, tuple[_TensorSpec, ...] | None] = {}
        """The results' specs by operation and arguments; None if a result is not a new, dense tensor."""

    @classmethod
    def of_process(cls) -> MetaResultCache:
        """Returns the one that all labs of this process share, or a new one if it has grown large."""
        if cls._shared is None or len(cls._shared._specs) > _MOST_ENTRIES:
            cls._shared = cls()
        return cls._shared

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the results of an operation; inside a dispatch mode, so that no other one sees how they are made."""
        number = id(func)
        known = _KINDS.get(number)
        kind, _ = known or _KINDS.setdefault(number, (_kind(func), func))
        if kind == "other library's":
            return func(*args, **kwargs)
        # Within autograd's engine, a function mode would see each look at a tensor.
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs) if kind is None else self._of_kind(kind, number, func, args, kwargs)

    def _of_kind(self, kind: _Kind, number: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        called = number, torch.get_default_dtype()
        try:
            key = (*called, *_key_of(args), *kwargs, *_key_of(kwargs.values())) if kwargs else (*called, *_key_of(args))
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
        if kind == "one":
            ((shape, stride, dtype),) = specs
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return tuple(torch.empty_strided(size, steps, dtype=kept, device="meta") for size, steps, kept in specs)


_FILL = {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_"}
"""Operations that write a whole tensor, and have no tag for that."""


class _NotCacheableError(Exception):
    """The result depends on values, not only on shapes."""


_Kind = Literal["one", "several", "in place", "other library's"] | None
_KINDS: dict[int, tuple[_Kind, Any]] = {}
"""By the identity of the operation, because torch computes its hash in Python; with it, so that it stays this one."""


def _kind(func: Any) -> _Kind:
    """Returns what an operation returns, as its schema declares it; None if its results cannot be cached.

    What is no operation of torch's own may be Python, which calls torch as the model does.
    """
    schema = func._schema
    if func.namespace != "aten":
        return "other library's"
    if any(str(result.type) != "Tensor" for result in schema.returns):
        return None
    aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
    if not aliased and not any(result.alias_info for result in schema.returns) and schema.returns:
        return "one" if len(schema.returns) == 1 else "several"
    is_elementwise = torch.Tag.pointwise in func.tags or schema.name in _FILL
    if aliased == [schema.arguments[0]] and aliased[0].alias_info.is_write and is_elementwise:
        return "in place"
    return None


def _key_of(values: Iterable[Any]) -> list[Any]:
    """Returns what of arguments decides about a result: a fake tensor's spec, the type and the value of any other.

    Raises:
        _NotCacheableError: For a tensor with values, and for a generator.
    """
    key: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                raise _NotCacheableError
            key += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (tuple, list)):
            key += (tuple, tuple(_key_of(value)))
        elif type(value) is torch.Generator:
            raise _NotCacheableError
        else:
            key += (type(value), value)  # 1, 1.0 and True are equal keys, but give results of different dtypes
    return key


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
