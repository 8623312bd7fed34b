"""Finds where an expansion of a shell ends: ``$(...)`` and ``${...}`` hold quotes, comments and further expansions."""

from __future__ import annotations

import re

Heredoc = tuple[str, bool]
"""The last line of a here-document, and whether tabs before each line are dropped."""
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([\w.+-]+))")
WITH_ESCAPES = re.compile(r"\$'((?:[^'\\]|\\.)*+)'", re.DOTALL)
_WITHOUT_BRACKETS = re.compile(rf"\$(?:{NAME}|[0-9@*#?$!-]|\[[^\]\n]{{0,300}}\])")
_SIGNS = re.compile(
    r"\\.|\$?\(\(|\$[({'\"]|[\"'`(){}\n]|(?<![^\s;&|(])#|<<<|<<|\bcase\s[^\n;]{1,200}?\sin\b|\besac\b", re.DOTALL
)
_ENDS = {")": {")"}, "c": {"esac"}, "+": {")"}, "}": {"}"}, "q": {"}"}, '"': {'"', '$"'}, "`": {"`"}}
"""What ends each kind of brackets and quotes: ``c`` is a ``case``, ``+`` is arithmetic, ``q`` are braces in quotes.

In double quotes, the dollar of ``"x$"`` stands for itself, so the quote after it ends them.
"""
_EXPANSIONS = {"$((": "++", "$(": ")", "`": "`"}
_COMMANDS = _EXPANSIONS | {"((": "++", "(": ")", "${": "}", '"': '"', '$"': '"', "case": "c"}
_STARTS = {
    ")": _COMMANDS,
    "c": _COMMANDS,
    "+": _EXPANSIONS | {"((": "++", "(": "+", "${": "}", '"': '"'},
    "}": _EXPANSIONS | {"${": "}", '"': '"', '$"': '"'},
    "q": _EXPANSIONS | {"${": "q", '"': '"', '$"': '"'},
    '"': _EXPANSIONS | {"${": "q"},
    "`": {},
}
"""What each sign opens, by the brackets in which it stands."""


def end_of_expansion(text: str, start: int) -> int:
    """Returns where the expansion or the brackets that start here end.

    Returns:
        The start itself if there is no expansion; -1 if it is not closed.
    """
    if text[start] == "$" and text[start + 1 : start + 2] not in ("(", "{"):
        match = _WITHOUT_BRACKETS.match(text, start)
        return match.end() if match else start
    inside: list[str] = []
    heredocs: list[Heredoc] = []
    position = start
    while found := _SIGNS.search(text, position):
        sign, position = "case" if found[0].startswith("case") else found[0], found.end()
        within = inside[-1] if inside else ")"
        if inside and sign in _ENDS[within]:
            inside.pop()
        elif sign in _STARTS[within]:
            inside += _STARTS[within][sign]
        elif sign in ("'", "$'") and within in ")c}":
            position = _end_of_quote(text, found.start())
        elif within in ")c":
            position = _end_of_skipped(text, found, heredocs)
        if not inside or not position:
            return position or -1
    return -1


def _end_of_quote(text: str, start: int) -> int:
    """Returns where a text in single quotes ends; 0 if it does not."""
    escaped = WITH_ESCAPES.match(text, start)
    return escaped.end() if escaped else text.find("'", text.find("'", start) + 1) + 1


def _end_of_skipped(text: str, found: re.Match[str], heredocs: list[Heredoc]) -> int:
    """Returns where the script goes on after a comment, and after a line that here-documents follow."""
    if found[0] == "#":
        return end_of_line(text, found.end())
    heredoc = HEREDOC.match(text, found.start())
    if heredoc:
        heredocs.append(heredoc_of(heredoc))
        return heredoc.end()
    if found[0] == "\n":
        return after_heredocs(text, found.end(), heredocs)[0]
    return found.end()


def end_of_line(text: str, position: int) -> int:
    """Returns where the line ends, before the line feed."""
    end = text.find("\n", position)
    return end if end >= 0 else len(text)


def heredoc_of(match: re.Match[str]) -> Heredoc:
    """Returns how a here-document ends."""
    return next(name for name in match.groups()[1:] if name is not None), bool(match[1])


def is_literal(match: re.Match[str]) -> bool:
    """Whether nothing in a here-document is expanded, because its last line is quoted where it is named."""
    return match[4] is None or "\\" in match[0]


def after_heredocs(text: str, position: int, heredocs: list[Heredoc]) -> tuple[int, list[str]]:
    """Returns where the script goes on after the here-documents that begin here, and their texts; forgets them."""
    bodies = []
    for name, drops_tabs in heredocs:
        lines = []
        while position < len(text):
            end = end_of_line(text, position)
            content = text[position:end].rstrip("\r")
            content = content.lstrip("\t") if drops_tabs else content
            position = end + 1
            if content == name:
                break
            lines.append(f"{content}\n")
        bodies.append("".join(lines))
    heredocs.clear()
    return min(position, len(text)), bodies
