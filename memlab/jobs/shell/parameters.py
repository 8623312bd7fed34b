"""Takes ``${NAME...}`` apart: which variable, which of its elements, and what is done with the value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memlab.jobs.shell.brackets import NAME, end_of_expansion

INDEX = r"\[(?:[^\[\]]|\[[^\]]*\])*+\]"
_PARAMETER = re.compile(
    rf"(#?)(!?)({NAME}|\d+|[@*#?$!-])({INDEX})?(:?[-=+?]|##?|%%?|//?|,,?|\^\^?|@(?=[A-Za-z]$)|:)?(.*)", re.DOTALL
)
_NAMES = re.compile(rf"!({NAME})[@*]")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An expansion of a variable, before its value is known."""

    name: str
    index: str | None = None
    """What stands in brackets behind the name; None without brackets."""
    operator: str = ""
    """Such as ``:-`` and ``%%``."""
    operand: str = ""
    """What follows the operator."""
    counts: bool = False
    """``${#NAME}``, the number of characters or elements."""
    is_indirect: bool = False
    """``${!NAME}``, the variable whose name is the value; with all elements, their indexes."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all elements, or all arguments."""
        return self.name in ("@", "*") or self.index in ("@", "*")

    @property
    def is_star(self) -> bool:
        """Whether elements become one text in double quotes."""
        return self.name == "*" or self.index == "*"


def parameter_of(text: str) -> Parameter | None:
    """Returns what ``$NAME`` and ``${...}`` ask for; None if memlab does not read that."""
    inner = text[2:-1] if text.startswith("${") else text[1:]
    match = _PARAMETER.fullmatch(inner)
    if match is None or (match[6] and not match[5]) or _NAMES.fullmatch(inner):
        return None
    index = None if match[4] is None else match[4][1:-1]
    found = Parameter(match[3], index, match[5] or "", match[6], bool(match[1]), bool(match[2]))
    return None if found.counts and (found.operator or found.is_indirect) else found


def split_at(text: str, sign: str) -> tuple[str, str | None]:
    """Splits an operand at the first sign outside of quotes, brackets and expansions; None without the sign."""
    position, depth = 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == sign and not depth:
            return text[:position], text[position + 1 :]
        if character in "$`":
            position = max(end_of_expansion(text, position), position + 1)
            continue
        if character in "'\"":
            end = text.find(character, position + 1)
            position = end + 1 if end >= 0 else position + 1
            continue
        if sign == ":":
            depth += {"(": 1, ")": -1, "?": 1}.get(character, 0)
            depth -= character == ":" and depth > 0  # the other half of a choice
        position += 1
    return text, None
