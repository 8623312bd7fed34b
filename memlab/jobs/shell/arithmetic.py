"""Calculates what stands in ``$((...))`` and ``((...))`` of a shell script, with whole numbers of 64 bits."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from memlab.jobs.shell.brackets import NAME

_INT64 = 2**63
_LONGEST = 300
_ASSIGNMENT = re.compile(rf"({NAME})\s*([-+*/%]?)=(?!=)(.*)", re.DOTALL)
_STEP = re.compile(rf"({NAME})\s*(\+\+|--)|(\+\+|--)\s*({NAME})")
ASSIGNED = re.compile(rf"(?<!\w)({NAME}+)\s*+(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*({NAME})")
"""A variable that an expression sets."""
_NOT_READ = re.compile(r"""['"\\#]|\b(?!0[xX])\d+[A-Za-z_]""")
"""What Python reads in another way than the shell, or warns of."""
_WHOLE = re.compile(r"\s*[+-]?(0|[1-9]\d{0,17})\s*")
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def calculated(text: str, get: Callable[[str], str], put: Callable[[str, str], None]) -> int | None:
    """Calculates an expression, or several after commas, each of which may set a variable.

    Args:
        text: Expanded.
        get: Returns a variable.
        put: Sets a variable.

    Returns:
        The last result; None if memlab cannot follow the expression, after which what it sets is unknown.
    """
    result: int | None = None
    for part in [text] if "(" in text else text.split(","):
        result = None if len(part) > _LONGEST or _NOT_READ.search(part) else _one(part.strip(), get, put)
        if result is None:
            return None
    return result


def _one(text: str, get: Callable[[str], str], put: Callable[[str, str], None]) -> int | None:
    before = None
    if assigns := _ASSIGNMENT.fullmatch(text):
        name, sign, right = assigns.groups()
        value = _value_of(f"{name}{sign}({right})" if sign else right, get)
    elif step := _STEP.fullmatch(text):
        name = step[1] or step[4]
        value = _value_of(f"{name}{(step[2] or step[3])[0]}1", get)
        before = _value_of(step[1], get) if step[1] else None
    else:
        return _value_of(text, get)
    if value is not None:
        put(name, str(value))
    return value if before is None else before


def _value_of(text: str, get: Callable[[str], str]) -> int | None:
    if ASSIGNED.search(text):
        return None
    text = text.replace("&&", " and ").replace("||", " or ").strip()
    try:
        return _calculate(ast.parse(text, mode="eval").body, get)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _calculate(node: ast.expr, get: Callable[[str], str]) -> int:
    """Returns a whole number as the shell calculates it; an operator that memlab does not know is a ValueError."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value < _INT64:
            return value
        case ast.Name(id=name):
            text = get(name)
            if not _WHOLE.fullmatch(text):
                raise ValueError(name)
            return int(text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=part) if not _is_power(part):
            return -_calculate(part, get) if isinstance(sign, ast.USub) else _calculate(part, get)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return int(any(_calculate(part, get) for part in parts))
        case ast.BoolOp(values=parts):
            return int(all(_calculate(part, get) for part in parts))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
            return int(_COMPARISONS[type(comparison)](_calculate(left, get), _calculate(right, get)))
        case ast.BinOp(left=left, op=sign, right=right):
            result = _combined(sign, _calculate(left, get), _calculate(right, get))
            if abs(result) < _INT64:
                return result
    raise ValueError(type(node).__name__)


def _is_power(node: ast.expr) -> bool:
    """Whether a sign before this belongs to the base in the shell, and to the power in Python."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _combined(sign: ast.operator, left: int, right: int) -> int:
    """Calculates as the shell does: division rounds towards zero, and a remainder has the dividend's sign."""
    match sign:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            quotient = abs(left) // abs(right)
            return quotient if (left < 0) == (right < 0) else -quotient
        case ast.Mod():
            remainder = abs(left) % abs(right)
            return remainder if left >= 0 else -remainder
        case ast.Pow() | ast.LShift() if 0 <= right < 63 and abs(left) < 2**32:
            return left**right if isinstance(sign, ast.Pow) else left << right
    raise ValueError(type(sign).__name__)
