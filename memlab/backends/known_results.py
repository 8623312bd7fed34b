"""What an operation makes of fake tensors, remembered by their forms: layers and micro-batches repeat themselves.

torch works out shape, strides and dtype of an elementwise result in Python (``torch/_refs``), in half a millisecond.
They depend on nothing but the arguments' own, so from the second time on the tensor is made at once. Each call
still makes a tensor of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class KnownResults(TorchDispatchMode):
    """Answers for operations on fake tensors that it has seen on others of the same form."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[_Form, ...] | None] = {}
        """By operation and arguments; None where the results are no tensors of their own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is None:
            return func(*args, **kwargs)
        try:
            key = (func, _form(args), _form(tuple(kwargs.items())))
            forms = self._known.get(key)
        except _UnlikeError:
            return func(*args, **kwargs)
        if forms is None:
            results = func(*args, **kwargs)
            if key not in self._known:
                self._known[key] = () if kind == "in place" else _forms_of_new(results, args)
            return results
        if kind == "in place":
            return args[0]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in forms]
        return made[0] if kind == "one" else tuple(made)


class _UnlikeError(Exception):
    """An argument is of a kind that tells nothing, or everything, of the result."""


@cache
def _kind(func: Any) -> Literal["one", "several", "in place"] | None:
    """Returns what an operation answers with, as its schema says; None where nothing can be remembered of it."""
    schema = func._schema
    if func.namespace != "aten" or any(str(result.type) != "Tensor" for result in schema.returns):
        return None
    aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
    if not aliased and not any(result.alias_info for result in schema.returns) and schema.returns:
        return "one" if len(schema.returns) == 1 else "several"
    is_elementwise = torch.Tag.pointwise in func.tags or schema.name in ("aten::copy_", "aten::zero_", "aten::fill_")
    if aliased == [schema.arguments[0]] and aliased[0].alias_info.is_write and is_elementwise:
        return "in place"
    return None


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise _UnlikeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_form(part) for part in value])
    if type(value) is torch.Generator:
        raise _UnlikeError
    return type(value), value  # 1, 1.0 and True are one key, and not one dtype


def _forms_of_new(results: Any, args: Any) -> tuple[_Form, ...] | None:
    """Returns the forms of an operation's results; None if one of them is not dense, or not new."""
    forms = []
    inputs = {part.untyped_storage()._cdata for part in args if isinstance(part, torch.Tensor)}
    for result in results if isinstance(results, tuple) else (results,):
        if not isinstance(result, torch.Tensor) or not result.is_meta or result.untyped_storage()._cdata in inputs:
            return None
        form = result.shape, result.stride(), result.dtype
        alike = torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
        if alike.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            return None
        forms.append(form)
    return tuple(forms)
