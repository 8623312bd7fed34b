"""Translates patterns of a shell, such as ``*30B*`` and ``@(a|b)``, and of ``=~``, to Python's regular expressions.

In a pattern, a backslash stands before each character that was quoted, or that stands for itself.
"""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\*?\[\]()|!+@^$.{}-]")
_LONGEST = 500
_LONGEST_TEXT = 300
"""For a pattern whose parts can match in many ways."""
_CLASSES = {
    "digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s",
    "blank": r" \t", "xdigit": "0-9A-Fa-f", "word": r"\w", "punct": r"!-/:-@\[-`{-~",
}  # fmt: skip
_NOT_POSIX = re.compile(r"\(\?|[*+?}][?+*{]|\\[A-Za-z0-9<>]|\)[*+{]|\[[^\]]*\\")
"""What Python reads in another way than a POSIX expression, or what could take long."""


def escaped(text: str) -> str:
    """Returns a pattern that matches a text alone."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def pattern_of(text: str, *, is_extended: bool, ignores_case: bool = False) -> re.Pattern[str] | None:
    """Returns the expression for a shell's pattern; None if memlab does not know how bash reads it.

    Args:
        is_extended: Whether ``@(a|b)`` and the like are patterns, as between ``[[`` and ``]]``.
        ignores_case: As after ``shopt -s nocasematch``.
    """
    if len(text) > _LONGEST and "\\" not in text:
        return None
    parts, position = [], 0
    while position < len(text):
        part, position = _next(text, position, is_extended=is_extended)
        if part is None:
            return None
        parts.append(part)
    flags = re.DOTALL | (re.IGNORECASE if ignores_case else 0)
    try:
        return re.compile(_without_backtracking(parts), flags)
    except (re.error, RecursionError, OverflowError):
        return None


def _without_backtracking(parts: list[str]) -> str:
    """Joins parts so that what a star took is not tried anew: between stars, the first match is as good as any."""
    fixed: list[list[str]] = [[]]
    for part in parts:
        if part == ".*":
            fixed.append([])
        else:
            fixed[-1].append(part)
    texts = ["".join(each) for each in fixed]
    if len(texts) == 1 or any(part.startswith("(?:") for part in parts):
        return ".*".join(texts)
    middle = "".join(f"(?>.*?{text})" for text in texts[1:-1] if text)
    return f"{texts[0]}{middle}.*{texts[-1]}"


def _next(text: str, position: int, *, is_extended: bool) -> tuple[str | None, int]:
    character = text[position]
    if character == "\\":
        return re.escape(text[position + 1 : position + 2] or "\\"), position + 2
    if character in "?*+@!" and text[position + 1 : position + 2] == "(":
        return _group(text, position) if is_extended else (None, position)
    if character == "*":
        return ".*", position + 1
    if character == "?":
        return ".", position + 1
    if character == "[":
        match = re.compile(r"\[([!^]?)(\]?(?:\\.|\[:\w+:\]|[^\]\\])*)\]", re.DOTALL).match(text, position)
        if match is None:
            return r"\[", position + 1
        return _set(match[1], match[2]), match.end()
    return re.escape(character), position + 1


def _set(negation: str, members: str) -> str | None:
    found = ""
    for part in re.findall(r"\\.|\[:\w+:\]|.", members, re.DOTALL):
        if part.startswith("[:"):
            if part[2:-2] not in _CLASSES:
                return None
            found += _CLASSES[part[2:-2]]
        else:
            found += part if part == "-" else re.escape(part[-1])
    return f"[{'^' if negation else ''}{found}]"


def _group(text: str, position: int) -> tuple[str | None, int]:
    sign, position, choices = text[position], position + 2, [""]
    while position < len(text):
        if text[position] == ")":
            quantifier = {"@": "", "?": "?", "*": "*", "+": "+"}.get(sign)
            return (None if quantifier is None else f"(?:{'|'.join(choices)}){quantifier}"), position + 1
        if text[position] == "|":
            choices.append("")
            position += 1
            continue
        part, position = _next(text, position, is_extended=True)
        if part is None or (part == ".*" and sign in "*+"):
            return None, position
        choices[-1] += part
    return None, position


def matches(text: str, pattern: re.Pattern[str]) -> bool | None:
    """Says whether a whole text matches; None if that could take long."""
    if "(?:" in pattern.pattern and len(text) > _LONGEST_TEXT:
        return None
    return pattern.fullmatch(text) is not None


def found_by_regular_expression(text: str, expression: str, *, ignores_case: bool) -> list[str] | None:
    """Returns what ``[[ text =~ expression ]]`` leaves in ``BASH_REMATCH``; None if memlab cannot tell.

    Args:
        text: Expanded.
        expression: POSIX extended, in which a backslash stands before what was quoted.
        ignores_case: As after ``shopt -s nocasematch``.
    """
    for name, members in _CLASSES.items():
        expression = expression.replace(f"[:{name}:]", members if name != "punct" else "[:punct:]")
    if len(text) > _LONGEST_TEXT or len(expression) > _LONGEST or _NOT_POSIX.search(expression.replace(r"\s", " ")):
        return None
    if "|" in expression and "(" in expression:
        return None  # POSIX takes the longest choice, Python the first
    try:
        match = re.search(expression, text, re.DOTALL | (re.IGNORECASE if ignores_case else 0))
    except (re.error, RecursionError, OverflowError):
        return None
    return [] if match is None else [match[0], *(group or "" for group in match.groups())]
