"""Splits a shell script into simple commands of words, and a text into what stays and what the shell expands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ENDS = "\n;&|"
_ORDINARY = re.compile(r"[^\\#()'\"$` \t\r<>\n;&|]+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word: a text, and how the shell would treat it."""

    text: str
    kind: str
    """``plain``, ``literal`` (single quotes, a backslash), ``double`` (double quotes)."""


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

    def join_plain_pieces(self) -> None:
        """Makes one piece of plain ones that follow each other: an expansion may consist of several."""
        pieces: list[Piece] = []
        for kind, group in groupby(self.pieces, lambda piece: piece.kind):
            equal = list(group)
            pieces += [Piece("".join(each.text for each in equal), kind)] if kind == "plain" else equal
        self.pieces = pieces


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
    following = text[start + 1 : start + 2]
    if following in ("(", "{") and following:
        closing = {"(": ")", "{": "}"}[following]
        depth = 0
        for index in range(start + 1, len(text)):
            if text[index] == following:
                depth += 1
            elif text[index] == closing:
                depth -= 1
                if not depth:
                    return index + 1
        return len(text)
    match = _PLAIN_NAME.match(text, start)
    return match.end() if match else start


def commands(text: str, name: str) -> list[tuple[list[Word], int, str]]:
    """Splits a script into simple commands: their words, their line, and what joins them to the one before."""
    return _Scanner(text, name).run()


class _Scanner:
    """Walks over the characters of a script once."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.position, self.line = 0, 1
        self.done: list[tuple[list[Word], int, str]] = []
        self.words: list[Word] = []
        self.word: Word | None = None
        self.array: list[Word] | None = None
        self.array_word: Word | None = None
        self.joined = ""
        self.heredocs: list[str] = []
        self.drop_next = False
        self.case_depth = 0
        self.expects_pattern = False

    def run(self) -> list[tuple[list[Word], int, str]]:
        """Returns the commands.

        Raises:
            ValueError: If a quote or an array's bracket is not closed.
        """
        special = {"\\": self._backslash, "#": self._hash, "(": self._open, ")": self._close}
        special |= dict.fromkeys("'\"", self._quoted) | dict.fromkeys("$`", self._expansion)
        special |= dict.fromkeys(" \t\r", self._blank) | dict.fromkeys("<>", self._redirection)
        special |= dict.fromkeys(_ENDS, self._end)
        while self.position < len(self.text):
            special.get(self.text[self.position], self._plain)()
        if self.array is not None:
            assert self.array_word is not None
            raise ValueError(f"{self.name}, line {self.array_word.line}: the array's '(' is not closed: add ')'")
        self._end_command("")
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
            self._end_word()
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
        heredoc = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\1").match(self.text, self.position)
        if heredoc and self.text[self.position : self.position + 3] != "<<<":
            self.heredocs.append(heredoc[2])
            self.position = heredoc.end()
            return
        if self.word is not None and self.word.raw.isdigit():
            self.word = None
        self._end_word()
        match = re.compile(r"[<>&]+\d?-?").match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        self.drop_next = not match[0][-1].isdigit()

    def _open(self) -> None:
        word = self.word
        if word is not None and self.array is None and re.fullmatch(rf"{NAME}\+?=", word.raw):
            word.join_plain_pieces()
            self.array, self.array_word, self.word = [], word, None
        elif self.array is None:
            self._end_word()
        self.position += 1

    def _close(self) -> None:
        if self.array is not None:
            self._end_word()
            assert self.array_word is not None
            self.array_word.elements, self.array = self.array, None
            self.words.append(self.array_word)
        elif self.expects_pattern:
            self._end_word()
            pattern = "|".join(word.raw for word in self.words)
            self.words = []
            self.done.append(([Word(self.line, [Piece("\1" + pattern, "plain")])], self.line, ""))
            self.expects_pattern = False
        else:
            self._end_word()
        self.position += 1

    def _end(self) -> None:
        character = self.text[self.position]
        if self.expects_pattern and character == "|":
            self._end_word()
            self.position += 1
            return
        if self.array is not None:
            if character == "\n":
                self._end_word()
                self.line += 1
            else:
                self._add(character, "plain")
            self.position += 1
            return
        pair = self.text[self.position : self.position + 2]
        if pair == "&>":
            self._end_word()
            self.position += 2
            self.drop_next = True
            return
        self._end_command(pair if pair in ("&&", "||") else ";")
        if pair == ";;":
            self.expects_pattern = self.case_depth > 0
        self.position += 2 if pair in ("&&", "||", ";;") else 1
        if character == "\n":
            self.line += 1
            self._skip_heredocs()

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
            self.words.append(word)
            if word.raw == "in" and self.words[0].raw == "case":
                self.case_depth += 1
                self._end_command(";")
                self.expects_pattern = True
            elif word.raw == "esac" and len(self.words) == 1:
                self.case_depth -= 1
                self.expects_pattern = False

    def _end_command(self, joiner: str) -> None:
        self._end_word()
        if self.words:
            self.done.append((self.words, self.words[0].line, self.joined))
            self.words = []
        elif joiner == ";" and self.joined in ("&&", "||"):
            return  # a line that ends in && goes on in the next one
        self.joined = joiner
