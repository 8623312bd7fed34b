"""Properties of objects that never change: each object computes its own once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class Remembers:
    """A frozen class with `remembered` properties. Copies and pickles begin without values."""

    __slots__ = ("_remembered",)

    _remembered: dict[str, Any]


def remembered(compute: Callable[[Any], _Value]) -> _Value:
    """Makes a method of a `Remembers` a property that is computed once; callers must not change its value."""
    name = compute.__name__

    @wraps(compute)
    def read(own: Any) -> _Value:
        try:
            known = own._remembered
        except AttributeError:
            object.__setattr__(own, "_remembered", known := {})
        if name not in known:
            known[name] = compute(own)
        value: _Value = known[name]
        return value

    return property(read)  # type: ignore[return-value]  # so that a type checker sees the value
