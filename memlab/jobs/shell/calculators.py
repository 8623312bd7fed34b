"""What ``expr`` (GNU coreutils 9), ``bc`` (GNU 1.07) and ``awk`` (mawk 1.3.4) print for sums and comparisons."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import ROUND_DOWN, Decimal, localcontext

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell.arithmetic import calculated

_COMPARISONS: dict[str, Callable[[Decimal, Decimal], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "=": operator.eq,
}  # fmt: skip
_OPERATION = re.compile(
    r"\s*(?:scale\s*=\s*(\d{1,2})\s*;)?\s*(-?\d*\.?\d+)\s*(<=|>=|==|!=|[+*/<>]|-(?!-))\s*(-?\d*\.?\d+)\s*;?\s*"
)
_MOST_DIGITS = 100
"""Of both operands: more than in any real script."""
_LINE_OF_BC = 68
"""Characters after which ``bc`` goes on in a further line."""
_AWK = re.compile(
    r"\s*BEGIN\s*\{\s*(?:(print\b|exit\b)(?![ \t]*\n)|printf\s*\(?\s*\"(%[di]|%\.[0-9]f)(\\n)?\"\s*,)"
    r"([^;{}\"']*)(?:;\s*)?\}\s*"
)
_ONE_GROUP = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
"""An expression in parentheses, of which `!` negates all."""
_OF_AWK = re.compile(r"\d+\.?\d*|\.\d+|int(?=\s*\()|[A-Za-z_]\w*|[<>=!]=|[-+*/%()<>!]|\s+")
_SUMS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Mod: math.fmod, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_MOST_OF_AWK = 2**31
"""From which on the kinds of ``awk`` print whole numbers differently."""
_OF_EXPR = re.compile(r"-?\d{1,18}|[-+*/%()]|[<>]=?|!=|=")


def expressed(arguments: list[str]) -> str:
    """Returns what ``expr`` prints for whole numbers, with ``+ - * / %``, parentheses and one comparison."""
    if not arguments or not all(_OF_EXPR.fullmatch(one) for one in arguments):
        return UNKNOWN
    text = " ".join("==" if one == "=" else re.sub(r"^(-?)0+(?=\d)", r"\1", one) for one in arguments)
    result = calculated(text, lambda name, index: None, lambda name, index, value: None)
    return UNKNOWN if result is None else f"{result}\n"


def computed(arguments: list[str], text: str) -> str:
    """Returns what ``bc`` prints for one operation or comparison of two numbers, with ``scale=N`` before it."""
    found = _OPERATION.fullmatch(text)
    if found is None or arguments not in ([], ["-l"]) or len(found[2] + found[4]) > _MOST_DIGITS:
        return UNKNOWN
    scale = int(found[1]) if found[1] else 20 if arguments else 0
    first, second = Decimal(found[2]), Decimal(found[4])
    if found[3] in _COMPARISONS:
        return f"{int(_COMPARISONS[found[3]](first, second))}\n"
    if found[3] == "/" and not second:
        return UNKNOWN
    places = [-min(0, int(one.as_tuple().exponent)) for one in (first, second)]
    with localcontext() as context:
        context.prec, context.rounding = 400, ROUND_DOWN
        if found[3] == "/":
            digits, result = scale, first / second
        elif found[3] == "*":
            digits, result = min(sum(places), max(scale, *places)), first * second
        else:
            digits, result = max(places), first + second if found[3] == "+" else first - second
        shown = str(result.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_DOWN))
    if len(shown) > _LINE_OF_BC:
        return UNKNOWN
    return re.sub(r"^(-?)0\.", r"\1.", shown) + "\n" if Decimal(shown) else "0\n"


def of_awk(arguments: list[str]) -> tuple[str, int | None]:
    """Returns what ``awk`` prints for ``BEGIN {print SUM}``, with ``printf`` and numbers of ``-v``, and its exit code.

    Other programs print what memlab does not know, and have a code that it does not know.
    """
    names: dict[str, str] = {}
    rest = list(arguments)
    while rest[:1] == ["-v"] and (given := re.fullmatch(r"([A-Za-z_]\w*)=(\d+\.?\d*)", "".join(rest[1:2]))):
        names[given[1]] = given[2]
        rest = rest[2:]
    found = _AWK.fullmatch(rest[0]) if len(rest) == 1 else None
    if found is None:
        return UNKNOWN, None
    kind, text = found[1], found[4].strip()
    if not kind and text.count(")") > text.count("("):
        text = text[:-1].strip()
    is_negated = kind == "exit" and text.startswith("!")
    result = _sum_of_awk(text[is_negated:].strip(), names)
    if result is None or (is_negated and not _ONE_GROUP.fullmatch(text[1:].strip())):
        return UNKNOWN, None
    if kind == "print" and (name := text.strip("() \t")) in names:
        return f"{names[name]}\n", 0  # as it was given
    if kind == "exit":
        code = int(not result) if is_negated else int(result)
        return "", code % 256
    is_whole = result == int(result)
    if kind:
        return (f"{int(result)}" if is_whole else f"{result:.6g}") + "\n", 0
    shown = f"{int(result)}" if found[2] in ("%d", "%i") else found[2] % result
    return shown + ("\n" if found[3] else ""), 0


def _sum_of_awk(text: str, names: dict[str, str]) -> float | None:
    """Returns the value of an expression of numbers; None where it has anything else, or ``>`` may name a file."""
    parts = _OF_AWK.findall(text)
    if "".join(parts) != text or (">" in text and not re.fullmatch(r"\([^()]*\)", text)) or "!" in parts:
        return None
    if "--" in text or any(part[0].isalpha() or part[0] == "_" for part in parts if part not in {"int", *names}):
        return None  # a name of awk's, or of Python's alone, such as True and the x10 of 0x10
    try:
        tree = ast.parse("".join(f" {names[part]} " if part in names else part for part in parts).strip(), mode="eval")
        result = _of_tree(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None
    return result if abs(result) < _MOST_OF_AWK and math.copysign(1, result) == (-1 if result < 0 else 1) else None


def _of_tree(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_of_tree(operand)
        case ast.Call(func=ast.Name(id="int"), args=[only]):
            value = _of_tree(only)
            return math.copysign(int(value), value)  # which may be -0
        case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
            if type(sign) in _SUMS:
                return float(_SUMS[type(sign)](_of_tree(left), _of_tree(right)))
    raise ValueError
