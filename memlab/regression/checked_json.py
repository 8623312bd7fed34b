"""JSON files that may be damaged: read into dataclasses, every value checked against the type of its field.

Python's JSON reader takes ``NaN``, ``Infinity``, integers of any length, nesting up to the recursion limit and half
of a surrogate pair. Each of them passes a comparison wrongly or stops a later writer, so all are refused here.
`memlab.config.from_json` is a second reader: a record may have a loss of NaN, and none of its values has a free form.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

_MAX_INTEGER = 2**63
_MAX_DEPTH = 16

_Value = TypeVar("_Value")


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: If the file is missing, not readable, not UTF-8 or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested without an end") from error
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error


def build(kind: type[_Value], value: object, where: str = "") -> _Value:
    """Builds a dataclass, or a value of a type that its fields may have, from JSON values.

    Args:
        kind: A dataclass, ``str``, ``int``, ``float``, ``bool``, ``dict[str, T]``, ``list[T]``, ``tuple[T, ...]``, a
            ``Literal``, a union of them, or ``Any``. A whole number passes for a ``float``, and stays whole.
        value: What the JSON has.
        where: The path of the value in the document, for the message.

    Raises:
        ValueError: If the value, or one inside it, is not of its type, or is a number or text that no file may hold.
    """
    built: _Value = _built(kind, value, where)
    return built


def one_line(error: BaseException, max_letters: int = 200) -> str:
    """Returns the message of an error as one line of bounded length that any file may hold."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= max_letters else f"{text[:max_letters]}..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _built(kind: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in {Union, UnionType}:
        kind = next((part for part in parts if _is_of(get_origin(part) or part, value)), kind)
        return _built(kind, value, where) if kind in parts else _refuse(kind, value, where)
    if kind is Any or (origin is None and _is_of(kind, value)):
        return _plain(value, where, depth=0)
    if origin is Literal and value in parts:
        return value
    if origin is dict and isinstance(value, dict):
        return {_plain(name, where, 0): _built(parts[1], part, f"{where}.{name}") for name, part in value.items()}
    if origin in {list, tuple} and isinstance(value, list):
        return origin(_built(parts[0], part, f"{where}.{number}") for number, part in enumerate(value))
    return _refuse(kind, value, where)


def _refuse(kind: Any, value: object, where: str) -> NoReturn:
    rule = kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind
    raise ValueError(f"{_name(where)} is {reprlib.repr(value)}, must be {rule}")


def _is_of(kind: Any, value: object) -> bool:
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind is NoneType:
        return value is None
    if kind is float:
        return type(value) in {int, float}
    return type(value) is kind  # exact: a truth value is not a number


def _dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{_name(where)} is {reprlib.repr(value)}, must be a mapping")
    hints, required = _fields(kind)
    for name in required:
        if name not in value:
            raise ValueError(f"{_name(f'{where}.{name}')} is missing")
    for name in value:
        if name not in hints:
            raise ValueError(f"{_name(f'{where}.{name}')} is unknown")
    return kind(**{name: _built(hints[name], part, f"{where}.{name}") for name, part in value.items()})


@cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return get_type_hints(kind), tuple(required)


def _plain(value: Any, where: str, depth: int) -> Any:
    """Checks the numbers and texts in a value of any form."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{_name(where)} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{_name(where)} is {value}, must be finite")
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError(f"{_name(where)} is {reprlib.repr(value)}, must be below 2**63")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{_name(where)} is {reprlib.repr(value)}, which is not a text in UTF-8") from error
    for name, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _plain(name, where, depth + 1)
        _plain(part, f"{where}.{name}", depth + 1)
    return value


def _name(where: str) -> str:
    return reprlib.repr(where.removeprefix("."))[1:-1] or "it"
