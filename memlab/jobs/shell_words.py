"""Splits a shell script into words and operators, and a text into what stays and what the shell expands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby

from memlab.jobs.entries import UNKNOWN

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
NAME_ONLY = re.compile(NAME)
_OPERATORS = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|]")
_LONGEST_ARITHMETIC = 400
_BEFORE_A_COMMAND = {"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"}
_ORDINARY = re.compile(r"[^\\#()'\"$` \t\r<>\n;&|]+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word: a text, and how the shell would treat it."""

    text: str
    kind: str
    """``plain``, ``literal`` (single quotes, a backslash), ``double`` (double quotes), ``arithmetic`` (``((...))``)."""


@dataclass(slots=True)
class Word:
    """A word before its expansion; of an array's assignment, the words between the parentheses."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    elements: list[Word] | None = None

    @property
    def raw(self) -> str:
        """The text as written, without quotes."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def keyword(self) -> str:
        """The text of a word in which nothing is quoted, which alone can be a reserved word; else nothing."""
        return self.raw if len(self.pieces) == 1 and self.pieces[0].kind == "plain" else ""

    def join_plain_pieces(self) -> None:
        """Makes one piece of plain ones that follow each other: an expansion may consist of several."""
        pieces: list[Piece] = []
        for kind, group in groupby(self.pieces, lambda piece: piece.kind):
            equal = list(group)
            pieces += [Piece("".join(each.text for each in equal), kind)] if kind == "plain" else equal
        self.pieces = pieces


@dataclass(frozen=True, slots=True)
class Operator:
    """What stands between commands, such as ``&&``, ``|`` and ``(``; the end of a line is a ``;``."""

    line: int
    text: str


def split_expansions(text: str) -> list[tuple[str, bool]]:
    """Splits a text into what stays and what the shell expands."""
    parts: list[tuple[str, bool]] = []
    start = position = 0
    while position < len(text):
        if text[position] not in "$`":
            position += 1
            continue
        end = _end_of_expansion(text, position)
        if end == position:
            position += 1
            continue
        if start < position:
            parts.append((text[start:position], False))
        parts.append((text[position:end], True))
        start = position = end
    if start < len(text):
        parts.append((text[start:], False))
    return parts


_PLAIN_NAME = re.compile(rf"\$({NAME}|[0-9@*#?$!])")


def _end_of_expansion(text: str, start: int) -> int:
    """Returns where an expansion that starts here ends; the start itself if there is none."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return end + 1 if end > 0 else start
    if text[start + 1 : start + 2] in ("(", "{") and start + 1 < len(text):
        return _end_of_brackets(text, start + 1)
    match = _PLAIN_NAME.match(text, start)
    return match.end() if match else start


def _end_of_brackets(text: str, start: int) -> int:
    """Returns where the brackets that open here are closed; the end of the text if they are not."""
    opening, depth = text[start], 0
    closing = {"(": ")", "{": "}"}[opening]
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if not depth:
                return index + 1
    return len(text)


def tokens(text: str, name: str, line: int = 1) -> list[Word | Operator]:
    """Splits a script into words and operators; redirections, comments and here-documents are dropped.

    Raises:
        ValueError: If a quote or an array's bracket is not closed.
    """
    return _Scanner(text, name, line).run()


class _Scanner:
    """Walks over the characters of a script once."""

    def __init__(self, text: str, name: str, line: int) -> None:
        self.text, self.name = text, name
        self.position, self.line = 0, line
        self.done: list[Word | Operator] = []
        self.word: Word | None = None
        self.array: list[Word] | None = None
        self.array_word: Word | None = None
        self.heredocs: list[str] = []
        self.drop_next = False
        self.in_test = False
        """Whether the scanner is between ``[[`` and ``]]``, where brackets and ``&&`` belong to the test."""

    def run(self) -> list[Word | Operator]:
        special = {"\\": self._backslash, "#": self._hash, "(": self._open, ")": self._close}
        special |= dict.fromkeys("'\"", self._quoted) | dict.fromkeys("$`", self._expansion)
        special |= dict.fromkeys(" \t\r", self._blank) | dict.fromkeys("<>", self._redirection)
        special |= dict.fromkeys("\n;&|", self._operator)
        while self.position < len(self.text):
            special.get(self.text[self.position], self._plain)()
        if self.array is not None:
            assert self.array_word is not None
            raise ValueError(f"{self.name}, line {self.array_word.line}: the array's '(' is not closed: add ')'")
        self._end_word()
        return self.done

    def _plain(self) -> None:
        match = _ORDINARY.match(self.text, self.position)
        text = match[0] if match else self.text[self.position]
        self._add(text, "plain")
        self.position += len(text)

    def _blank(self) -> None:
        self._end_word()
        self.position += 1

    def _hash(self) -> None:
        if self.word is not None:
            self._plain()
            return
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end

    def _add(self, text: str, kind: str) -> None:
        if self.word is None:
            self.word = Word(self.line)
        self.word.pieces.append(Piece(text, kind))

    def _backslash(self) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        carriage = self.text[self.position + 1 : self.position + 3] == "\r\n"
        if following == "\n" or carriage:
            self.line += 1
            self.position += 3 if carriage else 2
            return
        self._add(following, "literal")
        self.position += 2

    def _quoted(self) -> None:
        quote = self.text[self.position]
        line, start = self.line, self.position + 1
        end = start
        while end < len(self.text) and self.text[end] != quote:
            if quote == '"' and self.text[end] == "\\":
                end += 1
            elif quote == '"' and self.text[end] == "$":
                end = max(end, _end_of_expansion(self.text, end) - 1)
            end += 1
        if end >= len(self.text):
            raise ValueError(f"{self.name}, line {line}: the quote {quote} is not closed: add {quote}")
        content = self.text[start:end]
        self.line += content.count("\n")
        if quote == "'":
            self._add(content, "literal")
        else:
            content = re.sub(r'\\(["\\`]|\n)', lambda found: "" if found[1] == "\n" else found[1], content)
            for index, part in enumerate(content.split("\\$")):
                if index:
                    self._add("$", "literal")
                self._add(part, "double")
        assert self.word is not None
        self.word.line = max(self.word.line, line)
        self.position = end + 1

    def _expansion(self) -> None:
        end = _end_of_expansion(self.text, self.position)
        end = max(end, self.position + 1)
        content = self.text[self.position : end]
        self._add(content, "plain")
        self.line += content.count("\n")
        self.position = end

    def _redirection(self) -> None:
        if self._is_in_test():
            self._of_test(self.text[self.position])
            return
        if self.text[self.position + 1 : self.position + 2] == "(":  # <(command), a file with the command's output
            end = _end_of_brackets(self.text, self.position + 1)
            self._end_word()
            self._add(UNKNOWN, "literal")
            self.line += self.text.count("\n", self.position, end)
            self.position = end
            return
        heredoc = re.compile(r"<<-?\s*\\?(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\1").match(self.text, self.position)
        if heredoc and self.text[self.position : self.position + 3] != "<<<":
            self.heredocs.append(heredoc[2])
            self.position = heredoc.end()
            return
        if self.word is not None and self.word.raw.isdigit():
            self.word = None
        self._end_word()
        match = re.compile(r"<<<|<>|[<>]{1,2}(?:&\d?-?|\|)?").match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        self.drop_next = not match[0][-1].isdigit() and match[0][-1] != "-"

    def _open(self) -> None:
        if self._is_in_test():
            self._of_test("(")
            return
        word = self.word
        if self.array is not None:
            self.position += 1
            return
        if word is not None and re.fullmatch(rf"{NAME}\+?=", word.raw):
            word.join_plain_pieces()
            self.array, self.array_word, self.word = [], word, None
            self.position += 1
            return
        self._end_word()
        text = self.text[self.position : self.position + _LONGEST_ARITHMETIC]
        if text.startswith("((") and self._starts_command("for"):
            text = text[: _end_of_brackets(text, 0)]
            if text.endswith("))"):
                self._add(text[2:-2], "arithmetic")
                self._end_word()
                self.line += text.count("\n")
                self.position += len(text)
                return
        self._end_with("(")

    def _close(self) -> None:
        if self._is_in_test():
            self._of_test(")")
        elif self.array is not None:
            self._end_word()
            assert self.array_word is not None
            self.array_word.elements, self.array = self.array, None
            self.done.append(self.array_word)
            self.position += 1
        else:
            self._end_with(")")

    def _is_in_test(self) -> bool:
        if self.word is not None and self.word.raw == "]]":
            self._end_word()
        return self.in_test

    def _of_test(self, text: str) -> None:
        """Takes an operator between ``[[`` and ``]]`` as a word, or as a part of a pattern such as ``@(a|b)``."""
        before = self.done[-1].raw if isinstance(self.done[-1], Word) else ""
        opened = self.word is not None and self.word.raw.count("(") > self.word.raw.count(")")
        if before == "=~" or (self.word is not None and text == "(") or opened:
            self._add(text, "plain")
        else:
            self._end_word()
            self._add(text, "plain")
            self._end_word()
        self.position += len(text)

    def _operator(self) -> None:
        character = self.text[self.position]
        in_test = self._is_in_test()
        if character == "\n" and (self.array is not None or in_test):
            self._end_word()
            self.line += 1
            self.position += 1
            return
        if character == "\n":
            self._end_with(";")
            self.line += 1
            self._skip_heredocs()
            return
        if self.text.startswith("&>", self.position):
            self._end_word()
            self.position += 3 if self.text.startswith("&>>", self.position) else 2
            self.drop_next = True
            return
        match = _OPERATORS.match(self.text, self.position)
        assert match is not None
        if in_test and character != ";":
            self._of_test(match[0])
        elif self.array is not None:
            self._add(character, "plain")
            self.position += 1
        else:
            self._end_with(match[0])

    def _end_with(self, operator: str) -> None:
        self._end_word()
        self.drop_next = self.in_test = False
        self.done.append(Operator(self.line, operator))
        self.position += len(operator)

    def _skip_heredocs(self) -> None:
        for name in self.heredocs:
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                content = self.text[self.position : end].strip()
                self.position = end + 1
                self.line += 1
                if content == name:
                    break
        self.heredocs = []

    def _starts_command(self, *keywords: str) -> bool:
        """Whether the next word is the first of a command, or follows one of the keywords."""
        last = self.done[-1] if self.done else None
        return not isinstance(last, Word) or last.keyword in _BEFORE_A_COMMAND or last.keyword in keywords

    def _end_word(self) -> None:
        if self.word is None:
            return
        word, self.word = self.word, None
        word.join_plain_pieces()
        if self.drop_next:
            self.drop_next = False
        elif self.array is not None:
            self.array.append(word)
        else:
            if word.keyword == "[[" and self._starts_command():
                self.in_test = True
            elif word.keyword == "]]":
                self.in_test = False
            self.done.append(word)
