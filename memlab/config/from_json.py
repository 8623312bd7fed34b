"""Plain values out of JSON that anything may have written: each field is checked against its dataclass's annotation.

A file that is damaged, of another version or not JSON at all ends in a ``ValueError`` of one line, never in another
exception: later code can rely on the types. Python's own reader takes ``NaN``, integers of any length, nesting up to
the recursion limit and half of a surrogate pair; each of them passes a comparison wrongly, or stops a later writer.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from memlab.config.validation import shortened

T = TypeVar("T")

_INT64 = range(-(2**63), 2**63)
_MOST_NESTED = 16
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}


def read_json(path: Path, action: str) -> Any:
    """Reads a file of JSON.

    Args:
        action: What the user should do if that fails, as in the message.

    Raises:
        ValueError: If there is no such file, it cannot be read, or it does not hold JSON.
    """
    try:
        if not path.is_file():  # a pipe or a device would be waited for
            raise ValueError(f"{shortened(path)} is not a file: {action}")
        content = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ValueError(f"{shortened(path)} cannot be read ({reason}): {action}") from error
    return parse_json(content, shortened(path), action)


def parse_json(content: bytes | str, name: str, action: str) -> Any:
    """Parses JSON of any origin.

    Args:
        name: What it is called, as in the message.
        action: What the user should do if that fails, as in the message.

    Raises:
        ValueError: If it is not JSON.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply to be read: {action}") from error
    except ValueError as error:  # not JSON, not UTF-8, or a whole number of more digits than Python reads
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} is not valid JSON ({reason}): {action}") from error


def build(kind: type[T], values: object, name: str, *, finite: bool = False, **known: Any) -> T:
    """Builds a dataclass from a JSON object.

    Args:
        kind: The dataclass. Its fields may be numbers, texts, ``Literal``, tuples, lists, dicts by name, other
            dataclasses, unions of them, and ``Any``, in which only numbers and texts are checked.
        values: What should be an object with a value for each field that has no default.
        name: What the object is called, as in messages.
        finite: Whether NaN and infinity are refused. (A record may have a loss of NaN.)
        **known: Fields that the caller has read already.

    Raises:
        ValueError: If a field is missing, unknown or of another type, or if the dataclass refuses the values.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{name} is {shortened(values)}, must be an object")
    hints = _type_hints(kind)  # type: ignore[arg-type]  # a class is hashable
    unknown = sorted(str(key) for key in values if key not in hints)
    if unknown:
        raise ValueError(f"{name} has unknown fields {shortened(unknown)}")
    missing = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]  # a dataclass
        if field.name not in values | known and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    read = {key: _read(hints[key], value, key, finite) for key, value in values.items() if key not in known}
    return kind(**read, **known)


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(kind: Any, value: object, name: str, finite: bool) -> Any:
    """Returns a value of a type, or refuses it; a whole number serves as a ``float``, as in JSON."""
    if get_origin(kind) in (Union, UnionType):
        kind = next((part for part in get_args(kind) if _is_of(part, value)), get_args(kind)[0])
    if kind in (Any, NoneType):
        _check_free(value, name, finite)
        return value
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
            raise ValueError(f"{name} is {shortened(value)}, must be one of {', '.join(parts)}")
        return value
    if origin in (list, tuple, dict):
        return _read_entries(kind, value, name, finite)
    if is_dataclass(kind):
        return build(kind, value, name, finite=finite)  # type: ignore[arg-type]  # never an instance
    if not _is_of(kind, value):
        raise ValueError(f"{name} is {shortened(value)}, must be {_NAMES[kind]}")
    _check_plain(value, name, finite)
    return value


def _read_entries(kind: Any, value: object, name: str, finite: bool) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {shortened(value)}, must be an object")
        _check_free(list(value), name, finite)
        return {key: _read(parts[1], part, f"{name} of {key}", finite) for key, part in value.items()}
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {shortened(value)}, must be a list")
    return origin(_read(parts[0], part, name, finite) for part in value)


def _is_of(kind: Any, value: object) -> bool:
    """Whether a value is of a type, apart from what is in it."""
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    origin = get_origin(kind) or kind
    return isinstance(value, str if origin is Literal else list if origin is tuple else origin)


def _check_free(value: object, name: str, finite: bool, depth: int = 0) -> None:
    """Checks the numbers and texts in a value of any form."""
    if depth > _MOST_NESTED:
        raise ValueError(f"{name} is nested more than {_MOST_NESTED} deep")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    for part in value if isinstance(value, (list, tuple)) else ():
        _check_free(part, name, finite, depth + 1)
    _check_plain(value, name, finite)


def _check_plain(value: object, name: str, finite: bool) -> None:
    if isinstance(value, int) and value not in _INT64:
        raise ValueError(f"{name} is {shortened(value)}, must be below 2**63")
    if finite and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, must be finite")
    if isinstance(value, str) and not value.isprintable():
        _check_encodable(value, name)


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {shortened(text)}, must be Unicode text") from error
