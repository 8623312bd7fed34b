"""What ``tr``, ``sed`` and ``grep`` make of a text, as far as memlab reads their options (GNU's)."""

from __future__ import annotations

import re
from math import comb
from string import ascii_lowercase, ascii_uppercase, digits

from memlab.jobs.entries import UNKNOWN

_CLASSES = {
    "upper": ascii_uppercase, "lower": ascii_lowercase, "digit": digits, "space": " \t\n\v\f\r", "blank": " \t",
    "alpha": ascii_uppercase + ascii_lowercase, "alnum": digits + ascii_uppercase + ascii_lowercase,
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_OF_A_SET = re.compile(r"\[:(\w+):\]|\\(.)|([^\\])-([^\\])|(.)", re.DOTALL)
_SUBSTITUTION = re.compile(r"s([/|#,:@!])((?:\\.|(?!\1)[^\\\n])*)\1((?:\\.|(?!\1)[^\\\n])*)\1(g?)", re.DOTALL)
_OF_AN_EXPRESSION = re.compile(r"(\[\^?\]?(?:\[:\w+:\]|[^\]])*\])|\\(.)|(.)", re.DOTALL)
_OF_A_REPLACEMENT = re.compile(r"\\(\d)|\\(.)|(&)|([^\\&])", re.DOTALL)
_NOT_READ = re.compile(r"\[=.=\]|\[.\*\d*\]", re.DOTALL)
"""Kinds of sets of ``tr`` that memlab does not read: characters of equal order, and one character repeated."""
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_MOST_TRIALS = 3 * 10**6
"""Of where an expression and its repetitions may begin and end in lines: more than in any real script."""
_SPACES_ONLY = re.compile(r" +(?:\\?[+*])?")


def _characters(text: str) -> str | None:
    """Returns the characters of a set of ``tr``, in its order; nothing if memlab does not read it."""
    found = ""
    if _NOT_READ.search(text):
        return None
    for name, escaped, first, last, plain in _OF_A_SET.findall(text):
        if (name and name not in _CLASSES) or (escaped and escaped not in _ESCAPES) or first > last:
            return None
        of_range = "".join(map(chr, range(ord(first), ord(last) + 1))) if first else ""
        found += _CLASSES.get(name) or _ESCAPES.get(escaped) or of_range or plain
    return found


def translated(arguments: list[str], text: str) -> str:
    """Returns what ``tr`` prints: characters of one set as those of another, ``-d`` without them, ``-s`` once."""
    options = "".join(one[1:] for one in arguments if re.fullmatch("-[dcCs]+", one)).replace("C", "c")
    sets = [_characters(one) for one in arguments if not re.fullmatch("-[dcCs]+", one)]
    if not sets or None in sets or UNKNOWN in "".join(arguments) or arguments[0].startswith("--"):
        return UNKNOWN
    first, second = sets[0] or "", (sets[1] if len(sets) > 1 else "") or ""
    if options in ("d", "cd", "dc") and len(sets) == 1:
        return "".join(one for one in text if one == UNKNOWN or (one in first) is ("c" in options))
    if options == "s" and len(sets) == 1:
        return re.sub(f"([{re.escape(first)}])\\1+", r"\1", text) if first else text
    if options or len(sets) != 2 or not second:
        return UNKNOWN
    return text.translate(str.maketrans(first, (second + second[-1] * len(first))[: len(first)]))


def substituted(arguments: list[str], text: str) -> str:
    """Returns what ``sed`` prints for commands such as ``s/A/B/g``, with ``;`` between them, in each line."""
    is_extended = arguments[:1] in (["-E"], ["-r"])
    scripts = [one for one in arguments[is_extended:] if one != "-e"]
    if len(scripts) != 1 or UNKNOWN in scripts[0]:
        return UNKNOWN
    script, lines, place = scripts[0].strip(), text.split("\n"), 0
    while place < len(script):
        found = _SUBSTITUTION.match(script, place)
        pattern = found and _expression(found[2].replace(f"\\{found[1]}", found[1]), is_extended=is_extended)
        if found is None or pattern is None or script[found.end() :][:1] not in ("", ";"):
            return UNKNOWN
        new = _replacement(found[3].replace(f"\\{found[1]}", found[1]), pattern.groups)
        if new is None:
            return UNKNOWN
        count = 0 if found[4] and not pattern.match("") else 1  # what matches nothing is at one end of the line
        is_certain = _SPACES_ONLY.fullmatch(found[2]) is not None  # a part that is not known hides no end of a line
        for number, line in enumerate(lines):
            is_known = is_certain or (_is_quick(pattern, [line]) and UNKNOWN not in line)
            if not line and number == len(lines) - 1:
                continue  # what follows the last end of a line is no line
            lines[number] = pattern.sub(new, line, count=count) if is_known else UNKNOWN
        place = found.end() + 1
    return "\n".join(lines)


def options_of_grep(arguments: list[str]) -> tuple[set[str], list[str]]:
    """Returns the letters of the options of ``grep`` before its pattern, and the pattern with the files after it."""
    options: set[str] = set()
    for place, one in enumerate(arguments):
        if not re.fullmatch("-[A-Za-z]+", one):
            return options, arguments[place + (one == "--") :]
        options |= set(one[1:])
    return options, []


def lines_with(pattern: str, options: set[str], text: str) -> list[str] | None:
    """Returns the lines in which ``grep`` finds a pattern; nothing for what memlab does not read."""
    if UNKNOWN in pattern or options - set("qsEFi") or "\n" in pattern or "\\{" in pattern:
        return None
    if not options & {"E", "F"}:  # a character of its own but at the end
        pattern = re.sub(r"(?<!\\)\$(?=.)(?!\\\))", r"\\$", pattern)
    compiled = re.compile(re.escape(pattern)) if "F" in options else _expression(pattern, is_extended="E" in options)
    lines = text.split("\n")[: -1 if text.endswith("\n") else None]
    if compiled is None or not ("F" in options or _is_quick(compiled, lines)):
        return None
    if "i" in options:
        compiled = re.compile(compiled.pattern, re.IGNORECASE)
    found = [line for line in lines if UNKNOWN not in line and compiled.search(line)]
    return found if found or UNKNOWN not in text else None


def _is_quick(pattern: re.Pattern[str], lines: list[str]) -> bool:
    """Whether Python looks for an expression in lines within seconds, whatever they hold."""
    num_repetitions, num_choices = (len(re.findall(signs, pattern.pattern)) for signs in (r"[*+{]", r"[?|]"))
    ends = 1 + num_repetitions
    return sum(comb(len(line) + ends, ends) for line in lines) << num_choices <= _MOST_TRIALS


def _expression(text: str, *, is_extended: bool) -> re.Pattern[str] | None:
    """Returns an expression of ``sed`` or ``grep`` as Python's; nothing for one that Python would match otherwise."""
    special, made, before, is_after_repetition = "+?(){}|", "", "", False
    for bracket, escaped, plain in _OF_AN_EXPRESSION.findall(text):
        one = escaped or plain
        is_inside = before == "$" or (plain == "^" and made not in ("", "("))
        before = plain
        is_operator = one in special and bool(plain) is is_extended
        is_repetition = plain == "*" or (is_operator and one in "+?{")
        if (
            (is_operator and one == "|")
            or (is_repetition and is_after_repetition)  # in Python a lazy or a possessive one
            or (escaped and (escaped.isalnum() or escaped in "<>`'") and escaped not in "sSwWb")
            or (is_inside and not is_extended)  # a character there, and an end of the line in Python
            or "[:" in bracket
        ):
            return None
        is_after_repetition = plain == "*" or (is_operator and one in "+?}")
        if bracket:
            made += bracket.replace("\\", "\\\\").replace("[]", "[\\]").replace("[^]", "[^\\]")
        elif is_operator or (plain and one not in special):
            made += one
        else:
            made += f"\\{one}"
    if _REPEATED_GROUP.search(made):  # Python may need hours for one, where sed needs none
        return None
    try:
        pattern = re.compile(made)
    except re.error:
        return None
    return None if pattern.match("") and not re.search(r"\A\^|\$\Z", made) else pattern


def _replacement(text: str, num_groups: int) -> str | None:
    """Returns what ``sed`` puts in place as Python's template; nothing for changes of case, which Python's has not."""
    made = ""
    for number, escaped, whole, plain in _OF_A_REPLACEMENT.findall(text):
        if int(number or 0) > num_groups or (escaped.isalnum() and escaped not in "nt"):
            return None
        if number or whole:
            made += f"\\g<{number or 0}>"
        else:
            made += {"n": "\n", "t": "\t", "\\": "\\\\"}.get(escaped, escaped) or plain
    return made
