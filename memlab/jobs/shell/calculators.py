"""What ``expr`` (GNU coreutils 9) and ``bc`` (GNU 1.07) print for the sums and comparisons of launch scripts."""

from __future__ import annotations

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
    if found is None or arguments not in ([], ["-l"]):
        return UNKNOWN
    scale = int(found[1]) if found[1] else 20 if arguments else 0
    first, second = Decimal(found[2]), Decimal(found[4])
    if found[3] in _COMPARISONS:
        return f"{int(_COMPARISONS[found[3]](first, second))}\n"
    if found[3] == "/" and not second:
        return UNKNOWN
    places = [-min(0, int(one.as_tuple().exponent)) for one in (first, second)]
    with localcontext() as context:
        context.prec = 100
        if found[3] == "/":
            digits, result = scale, first / second
        elif found[3] == "*":
            digits, result = min(sum(places), max(scale, *places)), first * second
        else:
            digits, result = max(places), first + second if found[3] == "+" else first - second
        shown = str(result.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_DOWN))
    return re.sub(r"^(-?)0\.", r"\1.", shown) + "\n" if Decimal(shown) else "0\n"
