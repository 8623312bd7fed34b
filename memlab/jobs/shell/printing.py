"""What the builtins ``echo`` and ``printf`` of bash print, as far as memlab reads their options and formats."""

from __future__ import annotations

import re

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell.words import without_escapes

_PARTS = re.compile(
    r"%(%)|%([-+ 0#]*)(\d{0,4}|\*)(\.\d{1,4})?([a-zA-Z(])|(\\(?:[0-7]{1,3}|x[0-9a-fA-F]{1,2}|.))|([^%\\]+)|(.)",
    re.DOTALL,
)
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_MOST_ROUNDS = 1000


def echoed(arguments: list[str]) -> str:
    """Returns what ``echo`` prints."""
    ends, reads_escapes, first = "\n", False, 0
    while first < len(arguments) and re.fullmatch("-[neE]+", arguments[first]):
        ends = "" if "n" in arguments[first] else ends
        for letter in arguments[first]:
            reads_escapes = letter == "e" or (reads_escapes and letter != "E")
        first += 1
    text = " ".join(arguments[first:])
    if reads_escapes and "\\" in text:
        is_plain = not re.search(r"\\[^ntabefrv\\]", text)
        text = without_escapes(text) if is_plain else UNKNOWN
    return text + ends


def formatted(arguments: list[str]) -> str:
    """Returns what ``printf FORMAT ARGUMENTS`` prints: the format, again until it has taken all arguments."""
    if not arguments or UNKNOWN in arguments[0]:
        return UNKNOWN
    parts = [match.groups() for match in _PARTS.finditer(arguments[0])]
    left, printed = arguments[1:], ""
    for _ in range(_MOST_ROUNDS):
        before = len(left)
        for percent, flags, width, precision, kind, escape, plain, other in parts:
            if kind is None:
                printed += percent or plain or (without_escapes(escape) if escape else other)
            elif width == "*" or kind not in "sdibqc":
                return UNKNOWN
            else:
                printed += _one(kind, flags, width, precision, left.pop(0) if left else None)
        if not left or len(left) == before:
            return printed
    return UNKNOWN


def _one(kind: str, flags: str, width: str, precision: str | None, argument: str | None) -> str:
    text = argument or ""
    if UNKNOWN in text:
        return UNKNOWN
    if kind in "di":
        if (text and not _WHOLE.fullmatch(text)) or re.match(r"[+-]?0\d", text) or precision:
            return UNKNOWN
        return ("%" + flags + width + "d") % int(text or 0)
    if kind == "q" and not _PLAIN.fullmatch(text):
        return UNKNOWN if text else "''"
    if kind == "b" and "\\" in text:
        return UNKNOWN
    text = text[:1] if kind == "c" else text if precision is None else text[: int(precision[1:])]
    return text.ljust(int(width or 0)) if "-" in flags else text.rjust(int(width or 0))
