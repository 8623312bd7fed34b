"""Plain values out of JSON that anything may have written: each field is checked against its dataclass's annotation.

A file that is damaged, of another version or not JSON at all ends in a ``ValueError`` of one line, never in another
exception: later code can rely on the types. `memlab.regression.checked_json` is a second reader, because the files of
the nightly run hold values of any form, and only finite numbers (while a record may have a loss of NaN).
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from memlab.config.validation import shortened

T = TypeVar("T")

_INT64 = range(-(2**63), 2**63)
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}


def read_json(path: Path, action: str) -> Any:
    """Reads a file of JSON.

    Args:
        path: Of the file.
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
        content: What should be JSON.
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


def build(kind: type[T], values: object, name: str, **known: Any) -> T:
    """Builds a dataclass from a JSON object.

    Args:
        kind: The dataclass. Its fields may be numbers, texts, ``Literal``, tuples, dicts by name, other dataclasses,
            and any of them or None.
        values: What should be an object with a value for each field that has no default.
        name: What the object is called, as in messages.
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
    read = {key: _read(hints[key], value, key) for key, value in values.items() if key not in known}
    return kind(**read, **known)


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(kind: Any, value: object, name: str) -> Any:
    """Returns a value of a type, or refuses it; a whole number serves as a ``float``, as in JSON."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (other,) = (part for part in parts if part is not NoneType)
        return None if value is None else _read(other, value, name)
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
            raise ValueError(f"{name} is {shortened(value)}, must be one of {', '.join(parts)}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} is {shortened(value)}, must be a list")
        return tuple(_read(parts[0], part, name) for part in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {shortened(value)}, must be an object")
        return {_read(str, key, name): _read(parts[1], part, f"{name} of {key}") for key, part in value.items()}
    if is_dataclass(kind):
        return build(kind, value, name)  # type: ignore[arg-type]  # never an instance
    _check_plain(kind, value, name)
    return value


def _check_plain(kind: type, value: object, name: str) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    fits = is_number if kind in (int, float) else isinstance(value, kind)
    if not (fits or (kind is float and isinstance(value, float))):
        raise ValueError(f"{name} is {shortened(value)}, must be {_NAMES[kind]}")
    if is_number and value not in _INT64:
        raise ValueError(f"{name} is {shortened(value)}, must be below 2**63")
    if isinstance(value, str) and not value.isprintable():
        _check_encodable(value, name)


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {shortened(text)}, must be Unicode text") from error
