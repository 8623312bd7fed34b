"""What a followed Python function computes with: plain values, configurations, and what is known only when it runs."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlab.jobs.entries import Line


class NotFollowedError(ValueError):
    """What a function does cannot be known without running it; the text says where."""


class _Same:
    """What a copy of a configuration shares with the original."""

    __slots__ = ()

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return self


class Unknown(_Same):
    """A value that is known only when the program runs."""


UNKNOWN = Unknown()


@dataclass(eq=False, slots=True)
class Section:
    """An object of a class whose attributes are plain values, such as a dataclass of a configuration."""

    of: str
    """The name of its class, with its module; empty where that is unknown."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the program sets."""
    lines: dict[str, Line] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """What its class has by itself."""
    made: dict[str, Any] = field(default_factory=dict)
    """Copies of the lists and dictionaries among the defaults, as they were before the program changed them."""

    def all_set(self) -> dict[str, Any]:
        """Returns what the program sets, also inside of what the class has by itself."""
        inside = {
            name: value
            for name, value in self.defaults.items()
            if isinstance(value, Section) or (name in self.made and value != self.made[name])
        }
        return inside | self.values

    def get(self, name: str, default: Any = UNKNOWN) -> Any:
        """Returns an attribute, or the default where neither the program nor the class has it."""
        return self.values.get(name, self.defaults.get(name, default))

    def set(self, name: str, value: Any, line: Line) -> None:
        """Sets an attribute."""
        self.values[name], self.lines[name] = value, line


@dataclass(frozen=True, slots=True, eq=False)
class External(_Same):
    """Something of another package, such as ``torch.float32``, that is known by its name alone."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Function(_Same):
    """A function of the package, with the variables of the function that defines it."""

    module: str
    node: ast.FunctionDef | ast.Lambda
    outer: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Class(_Same):
    """A class of the package."""

    module: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True, eq=False)
class Module(_Same):
    """A module of the package."""

    name: str


Plain = (str, int, float, bool, type(None), list, tuple, dict, set)
_MOST_ELEMENTS = 10_000
_METHODS: dict[type, tuple[str, ...]] = {
    str: (
        *("lower", "upper", "strip", "startswith", "endswith", "replace", "split", "rsplit", "join", "partition"),
        *("removeprefix", "removesuffix"),
    ),
    list: ("append", "extend", "insert", "remove", "pop", "index", "count", "copy"),
    tuple: ("index", "count"),
    dict: ("get", "items", "keys", "values", "update", "setdefault", "pop", "copy"),
    set: ("add", "copy"),
}


def is_known(value: Any) -> bool:
    """Whether a value and all its parts are known."""
    if isinstance(value, (list, tuple, set)):
        return all(map(is_known, value))
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    return not isinstance(value, Unknown)


def method_of(value: Any, name: str) -> Callable[..., Any]:
    """Returns a method of a plain value.

    Raises:
        NotFollowedError: If it is none of those that only compute with plain values.
    """
    for kind, names in _METHODS.items():
        if isinstance(value, kind) and name in names:
            found: Callable[..., Any] = getattr(value, name)
            return found
    raise NotFollowedError(f"the method {name} of {type(value).__name__}")


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **named: function(*values, **named) if is_known([*values, *named.values()]) else UNKNOWN


def _range(*ends: int) -> list[int]:
    numbers = range(*ends)
    if len(numbers) > _MOST_ELEMENTS:
        raise NotFollowedError(f"a range of {len(numbers)} numbers")
    return list(numbers)


def _has(owner: Any, name: str) -> Any:
    if isinstance(owner, Section):
        return name in owner.values or name in owner.defaults or UNKNOWN
    return UNKNOWN if isinstance(owner, (External, Unknown)) else hasattr(owner, name)


BUILTINS: dict[str, Callable[..., Any]] = {
    **{
        one.__name__: _of_numbers(one)
        for one in (len, int, float, min, max, sum, abs, sorted, round, divmod, any, all, str)
    },
    **{one.__name__: one for one in (list, tuple, set, dict)},
    "bool": lambda value: truth(value),  # noqa: PLW0108  defined below
    "range": _of_numbers(_range),
    "enumerate": lambda values, start=0: list(enumerate(values, start)),
    "zip": lambda *values, **_: list(zip(*values, strict=False)),
    "reversed": lambda values: list(reversed(values)),
    "hasattr": _has,
    "print": lambda *_, **__: None,
}


def truth(value: Any) -> Any:
    """Returns whether a value counts as true, or `UNKNOWN`."""
    if isinstance(value, (Unknown, External)):
        return UNKNOWN
    return bool(value) if isinstance(value, Plain) else True
