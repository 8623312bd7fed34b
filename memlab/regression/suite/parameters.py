"""The parameters of a lab, read from its cell tagged ``parameters``, and the values that a run gives to them.

papermill finds parameters with a regular expression that misses some, only warns about names that the notebook does
not have, and checks no type. So a lab's parameters are read here from the syntax tree, and a run starts only if every
value has the parameter's type.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import nbformat

from memlab.config.validation import shortened
from memlab.regression.suite.notebooks import PARAMETERS_TAG, has_tag

ParameterValue: TypeAlias = int | float | bool | str | list[str]

INTERACTIVE = "interactive"
"""The parameter that is True for a user in JupyterLab, and False in every headless run."""


_MAX_SHOWN_LETTERS = 150


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One line of a parameters cell."""

    name: str
    type_name: str
    """One of ``int``, ``float``, ``bool``, ``str`` and ``list[str]``."""
    default: ParameterValue
    help_text: str
    """The comment at the end of its line; may be empty."""

    def read(self, value: object) -> ParameterValue:
        """Returns a value as this parameter's type. Text is read the way the command line gives it.

        Raises:
            ValueError: If the value is not of the type.
        """
        kind = _KINDS[self.type_name]
        result = kind.from_text(value) if isinstance(value, str) else kind.from_value(value)
        if result is None:
            raise ValueError(f"parameter {self.name} is {shortened(value)}, must be {kind.rule}: give another value")
        return result


@dataclass(frozen=True, slots=True)
class _Kind:
    rule: str
    from_text: Callable[[str], ParameterValue | None]
    from_value: Callable[[object], ParameterValue | None]


def _int_from_text(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) else None  # a JSON number of 64 bits


def _int_from_value(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float_from_text(text: str) -> float | None:
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
    return _float_from_value(float(text)) if is_number else None


def _float_from_value(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _bool_from_text(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


def _bool_from_value(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _names_from_text(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _names_from_value(value: object) -> list[str] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        return None
    return list(value)


# YAML 1.1 reads `on` and `no` as truth values and 1e-4 as text; here the type of the parameter decides.
_KINDS = {
    "int": _Kind("a whole number", _int_from_text, _int_from_value),
    "float": _Kind("a finite number", _float_from_text, _float_from_value),
    "bool": _Kind("true or false", _bool_from_text, _bool_from_value),
    "str": _Kind("text (in YAML: quoted)", str, lambda _: None),
    "list[str]": _Kind("a list of names (as text: name,name)", _names_from_text, _names_from_value),
}


def read_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """Reads the parameters of a lab, in their order.

    Raises:
        ValueError: If there is not exactly one cell tagged ``parameters``, or if that cell contains anything but lines
            of the form ``name: type = literal``.
    """
    cells = [cell for cell in notebook.cells if has_tag(cell, PARAMETERS_TAG)]
    if len(cells) != 1:
        raise ValueError(f"{len(cells)} cells are tagged '{PARAMETERS_TAG}', must be exactly one: tag one code cell")
    try:
        statements = ast.parse(cells[0].source).body
    except SyntaxError as error:
        rule = "write one `name: type = literal` per line"
        raise ValueError(f"parameters cell, line {error.lineno}: {error.msg}: {rule}") from error
    except (RecursionError, MemoryError, ValueError) as error:  # deep nesting, or a null character
        raise ValueError(f"parameters cell: Python cannot read it ({type(error).__name__}): write literals") from error
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(cells[0].source).readline)
        if token.type == tokenize.COMMENT
    }
    parameters: dict[str, Parameter] = {}
    for statement in statements:
        parameter = _parameter(statement, comments.get(statement.end_lineno or statement.lineno, ""))
        if parameter.name in parameters:
            raise ValueError(f"parameter {parameter.name} is twice in the parameters cell: keep one line")
        parameters[parameter.name] = parameter
    return parameters


def _parameter(statement: ast.stmt, help_text: str) -> Parameter:
    line = (
        f"parameters cell, line {statement.lineno}, `{' '.join(ast.unparse(statement).split())[:_MAX_SHOWN_LETTERS]}`"
    )
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
            type_name = ast.unparse(annotation)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            type_name = ""
        case _:
            raise ValueError(f"{line}, is not a `name: type = literal`: derive values in the next cell")
    try:
        default = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{line}, has no literal value: derive values in the next cell") from error
    if not type_name:
        type_name = "list[str]" if isinstance(default, list) else type(default).__name__
    kind = _KINDS.get(type_name)
    if kind is None:
        raise ValueError(f"{line}, is of type {type_name}, must be one of {', '.join(_KINDS)}: use one of them")
    # A str is the one type whose values are all text; the others do not take their default in quotes.
    if not isinstance(default, str) if type_name == "str" else kind.from_value(default) is None:
        raise ValueError(f"{line}, has the default {shortened(default)}, must be {kind.rule}: change it")
    return Parameter(name=name, type_name=type_name, default=default, help_text=help_text)


def resolve(parameters: Mapping[str, Parameter], given: Mapping[str, object]) -> dict[str, ParameterValue]:
    """Checks the values that a caller gives to a headless run.

    Args:
        given: Values by name: of the parameter's type, or as text.

    Returns:
        The values to inject, with `interactive` as False if the lab has that parameter.

    Raises:
        ValueError: If the lab does not have a parameter of that name, or if a value is not of its type.
    """
    if INTERACTIVE in given:
        raise ValueError(f"parameter {INTERACTIVE} is False in every headless run: leave it out")
    choices = [name for name in parameters if name != INTERACTIVE]
    unknown = [name for name in given if name not in choices]
    if unknown:
        known = f"choose from {', '.join(choices)}" if choices else "the notebook has none"
        raise ValueError(f"unknown parameter {', '.join(unknown)[:_MAX_SHOWN_LETTERS]}: {known}")
    values = {name: parameters[name].read(value) for name, value in given.items()}
    return values | ({INTERACTIVE: False} if INTERACTIVE in parameters else {})
