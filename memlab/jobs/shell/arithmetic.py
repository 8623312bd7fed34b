"""Calculates what stands in ``$((...))`` and ``((...))`` of a shell script as bash 5.2 does: whole numbers of 64 bits.

The operators, their order and the constants are those of "Shell Arithmetic" in bash's manual.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memlab.jobs.shell.brackets import NAME

_LONGEST = 1000
_DEEPEST = 50
ASSIGNED = re.compile(
    rf"(?<!\w)({NAME}+)(?:\[[^\]]*\])?\s*+(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*({NAME})"
)
"""A variable that an expression sets."""
_TOKEN = re.compile(
    rf"\s*(?:({NAME})(\[[^\]]*\])?|(\d+#\w+|\w+)|(<<=|>>=|\*\*|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|\S))"
)
_ASSIGNING = {"=", "*=", "/=", "%=", "+=", "-=", "<<=", ">>=", "&=", "^=", "|="}
_BINARY = [
    {"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<=", ">=", "<", ">"}, {"<<", ">>"}, {"+", "-"},
    {"*", "/", "%"},
]  # fmt: skip
"""From the loosest to the tightest, all from left to right."""


class _NotFollowedError(Exception):
    """The expression is none, or needs a value that memlab does not know."""


def calculated(text: str, get: Callable[[str, str], str | None], put: Callable[[str, str, str], None]) -> int | None:
    """Calculates an expression, which may set variables.

    Args:
        text: Expanded.
        get: Returns a variable, or with an index in brackets one of its elements; None if memlab does not know it.
        put: Sets a variable, or the element that the index names.

    Returns:
        The result; None if memlab cannot follow the expression, after which what it sets is unknown.
    """
    try:
        return _Calculation(text, get, put, 0).whole()
    except _NotFollowedError:
        return None


class _Calculation:
    def __init__(
        self, text: str, get: Callable[[str, str], str | None], put: Callable[[str, str, str], None], depth: int
    ) -> None:
        if len(text) > _LONGEST or depth > _DEEPEST:
            raise _NotFollowedError
        self.parts = [match.groups() for match in _TOKEN.finditer(text.rstrip())]
        self.get, self.put, self.depth = get, put, depth
        self.position = 0
        self.runs = True
        """False in a part that a condition leaves out: it sets nothing, and needs no values."""

    def whole(self) -> int:
        if not self.parts:
            return 0
        result = self._list()
        if self.position < len(self.parts):
            raise _NotFollowedError
        return result

    def _operator(self, after: int = 0) -> str:
        place = self.position + after
        return (self.parts[place][3] or "") if place < len(self.parts) else ""

    def _take(self, *texts: str) -> str:
        operator = self._operator()
        if operator not in texts:
            return ""
        self.position += 1
        return operator

    def _list(self) -> int:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _NotFollowedError
        result = self._assignment()
        while self._take(","):
            result = self._assignment()
        self.depth -= 1
        return result

    def _assignment(self) -> int:
        name = self.parts[self.position][:2] if self.position < len(self.parts) else (None, None)
        sign = self._operator(1)
        if name[0] is None or sign not in _ASSIGNING:
            return self._choice()
        self.position += 2
        right = self._assignment()
        before = 0 if sign == "=" else self._variable(name[0], name[1])
        return self._set(name[0], name[1], right if sign == "=" else self._combined(sign[:-1], before, right))

    def _choice(self) -> int:
        condition = self._binary(0)
        if not self._take("?"):
            return condition
        first = self._when(bool(condition), self._list)
        if not self._take(":"):
            raise _NotFollowedError
        other = self._when(not condition, self._assignment)
        return first if condition else other

    def _when(self, runs: bool, part: Callable[[], int]) -> int:
        outer, self.runs = self.runs, self.runs and runs
        result = part()
        self.runs = outer
        return result

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while sign := self._take(*_BINARY[level]):
            if sign in ("&&", "||"):
                right = self._when(bool(left) == (sign == "&&"), lambda: self._binary(level + 1))
                left = int(bool(left) and bool(right)) if sign == "&&" else int(bool(left) or bool(right))
            else:
                left = self._combined(sign, left, self._binary(level + 1))
        return left

    def _power(self) -> int:
        base = self._signed()
        return self._combined("**", base, self._power()) if self._take("**") else base

    def _signed(self) -> int:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _NotFollowedError
        sign = self._take("+", "-", "!", "~", "++", "--")
        if not sign:
            result = self._atom()
        elif sign in ("++", "--"):
            name, index = self._next()[:2]
            if name is None:
                raise _NotFollowedError
            result = self._set(name, index, self._variable(name, index) + (1 if sign == "++" else -1))
        else:
            value = self._signed()
            result = _wrapped({"+": value, "-": -value, "!": int(not value), "~": ~value}[sign])
        self.depth -= 1
        return result

    def _next(self) -> tuple[str | None, ...]:
        if self.position >= len(self.parts):
            raise _NotFollowedError
        self.position += 1
        return self.parts[self.position - 1]

    def _atom(self) -> int:
        name, index, constant, sign = self._next()
        if name is not None:
            value = self._variable(name, index)
            if step := self._take("++", "--"):
                self._set(name, index, value + (1 if step == "++" else -1))
            return value
        if constant is not None:
            return _wrapped(_constant(constant))
        if sign != "(":
            raise _NotFollowedError
        value = self._list()
        if not self._take(")"):
            raise _NotFollowedError
        return value

    def _variable(self, name: str, index: str | None) -> int:
        if not self.runs:
            return 0
        text = self.get(name, index or "")
        if text is None:
            raise _NotFollowedError
        return _Calculation(text, self.get, self.put, self.depth + 1).whole()

    def _set(self, name: str, index: str | None, value: int) -> int:
        value = _wrapped(value)
        if self.runs:
            self.put(name, index or "", str(value))
        return value

    def _combined(self, sign: str, left: int, right: int) -> int:
        """Calculates as C does: division rounds towards zero, and a remainder has the dividend's sign."""
        if not self.runs:
            return 0
        if (sign in "/%" and not right) or (sign in ("<<", ">>") and not 0 <= right < 64):
            raise _NotFollowedError
        match sign:
            case "+" | "-" | "*":
                return _wrapped({"+": left + right, "-": left - right, "*": left * right}[sign])
            case "/" | "%":
                quotient = abs(left) // abs(right)
                quotient = quotient if (left < 0) == (right < 0) else -quotient
                return _wrapped(quotient if sign == "/" else left - quotient * right)
            case "**":
                if right < 0:
                    raise _NotFollowedError
                return _wrapped(pow(left, right, 2**64))
            case "<<" | ">>":
                return _wrapped(left << right if sign == "<<" else left >> right)
            case "&" | "|" | "^":
                return {"&": left & right, "|": left | right, "^": left ^ right}[sign]
        return int(
            {"==": left == right, "!=": left != right, "<": left < right, "<=": left <= right, ">": left > right}.get(
                sign, left >= right
            )
        )


def _constant(text: str) -> int:
    """Returns ``10``, ``0x1f``, ``017`` (octal) or ``2#101``."""
    base, mark, digits = text.partition("#")
    try:
        if mark and 2 <= int(base) <= 36:
            return int(digits, int(base))
        if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
            return int(text, 16)
        if re.fullmatch(r"\d+", text):
            return int(text, 8 if text[0] == "0" else 10)
    except ValueError as error:
        raise _NotFollowedError from error
    raise _NotFollowedError


def _wrapped(value: int) -> int:
    """Returns what 64 bits with a sign keep of a number."""
    return (value + 2**63) % 2**64 - 2**63
