"""Splits a shell script into words and operators, and a word into what stays and what the shell expands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell.brackets import (
    HEREDOC,
    NAME,
    WITH_ESCAPES,
    Heredoc,
    after_heredocs,
    end_of_expansion,
    end_of_line,
    heredoc_of,
    is_literal,
)

NAME_ONLY = re.compile(NAME)
_OPERATORS = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|]")
_LONGEST_ARITHMETIC = 1000
_BEFORE_A_COMMAND = {"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"}
_ORDINARY = re.compile(r"[^\\#()'\"$` \t\r<>\n;&|]+")
_ORDINARY_IN_DOUBLE_QUOTES = re.compile(r'[^\\"$`]+')
_DESCRIPTOR = re.compile(rf"\d+|\{{{NAME}\}}")
_REDIRECTION = re.compile(r"<<<|<>|[<>]{1,2}(?:&\d?-?|\|)?")
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "?": "?",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word: a text, and how the shell would treat it."""

    text: str
    kind: str
    """``plain``; ``literal``, which is quoted; ``split`` and ``quoted``, an expansion outside and inside of double
    quotes; ``arithmetic``, which is ``((...))``; ``process``, the commands of ``<(...)``."""


@dataclass(slots=True)
class Redirection:
    """Where a command reads from or writes to, such as ``< hosts`` and ``2>&1``."""

    line: int
    operator: str
    """``<<`` for a here-document, whose text is the target."""
    descriptor: str = ""
    """As written; nothing stands for the usual one."""
    target: Word | None = None
    keyword: str = ""
    """Nothing: it is no reserved word."""


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
        """The text of a word in which nothing is quoted or expanded, as a reserved word has it; else nothing."""
        return self.pieces[0].text if len(self.pieces) == 1 and self.pieces[0].kind == "plain" else ""


@dataclass(frozen=True, slots=True)
class Operator:
    """What stands between commands, such as ``&&``, ``|`` and ``(``; the end of a line is a ``;``."""

    line: int
    text: str


Token = Word | Operator | Redirection


def tokens(text: str, name: str, line: int = 1) -> list[Token]:
    """Splits a script into words, operators and redirections; comments are dropped.

    Raises:
        ValueError: If a quote, an expansion or an array's bracket is not closed.
    """
    return _Scanner(text, name, line).run()


def operand(text: str, name: str, line: int, *, is_quoted: bool) -> Word:
    """Returns a text inside of an expansion as one word, such as what follows ``:-`` in braces.

    Args:
        text: In which blanks and operators stand for themselves.
        is_quoted: Whether the expansion stands in double quotes.

    Raises:
        ValueError: If a quote or an expansion is not closed.
    """
    return _Scanner(text, name, line).whole(is_quoted=is_quoted)


def without_escapes(text: str) -> str:
    """Returns what ``$'...'`` stands for; unknown if memlab does not read one of its escapes."""

    def plain(match: re.Match[str]) -> str:
        if match[1] or match[2]:
            code = int(match[1], 8) if match[1] else int(match[2], 16)
            return chr(code) if 0 < code < 128 else UNKNOWN
        return UNKNOWN if match[3] in "cuUx" else _ESCAPES.get(match[3], match[0])

    found = _ESCAPE.sub(plain, text)
    return UNKNOWN if UNKNOWN in found else found


class _Scanner:
    """Walks over the characters of a script, or of a text inside of an expansion."""

    def __init__(self, text: str, name: str, line: int) -> None:
        self.text, self.name = text, name
        self.position, self.line = 0, line
        self.done: list[Token] = []
        self.word: Word | None = None
        self.array: list[Word] | None = None
        self.array_word: Word | None = None
        self.heredocs: list[Heredoc] = []
        self.documents: list[tuple[Redirection, bool]] = []
        """Of the here-documents whose text follows: the redirection, and whether the text stands for itself."""
        self.redirection: Redirection | None = None
        """Whose target the next word is."""
        self.in_test = False
        """Whether the scanner is between ``[[`` and ``]]``, where brackets and ``&&`` belong to the test."""
        self.opened = 0
        """Brackets of a pattern such as ``@(a|b)`` that are open, between ``[[`` and ``]]``."""
        self.of_word = {"\\": self._backslash, "'": self._single, '"': self._double}
        self.of_word |= dict.fromkeys("$`", self._expansion)

    def run(self) -> list[Token]:
        special = self.of_word | {"#": self._hash, "(": self._open, ")": self._close}
        special |= dict.fromkeys(" \t\r", self._blank) | dict.fromkeys("<>", self._redirection)
        special |= dict.fromkeys("\n;&|", self._operator)
        while self.position < len(self.text):
            special.get(self.text[self.position], self._plain)()
        if self.array is not None:
            assert self.array_word is not None
            raise self._not_closed("array's '('", "')'", self.array_word.line)
        self._end_word()
        return self.done

    def whole(self, *, is_quoted: bool, keeps_quotes: bool = False) -> Word:
        self.word = Word(self.line)
        if is_quoted:
            self._add("", "literal")  # quotes around nothing are a word too
            self._in_double_quotes(ends=False, keeps_quotes=keeps_quotes)
        while self.position < len(self.text):
            self.of_word.get(self.text[self.position], self._plain)()
        return self.word

    def _not_closed(self, what: str, closing: str, line: int) -> ValueError:
        return ValueError(f"{self.name}, line {line:d}: the {what} is not closed: add {closing}")

    def _add(self, text: str, kind: str) -> None:
        if self.word is None:
            self.word = Word(self.line)
        self.word.pieces.append(Piece(text, kind))

    def _take(self, end: int, text: str, kind: str) -> None:
        """Adds a piece for the script's text up to a place."""
        self._add(text, kind)
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def _plain(self) -> None:
        match = _ORDINARY.match(self.text, self.position)
        text = match[0] if match else self.text[self.position]
        self._take(self.position + len(text), text, "plain")

    def _blank(self) -> None:
        self._end_word()
        self.position += 1

    def _hash(self) -> None:
        if self.word is not None:
            self._plain()
            return
        self.position = end_of_line(self.text, self.position)

    def _backslash(self) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        carriage = self.text[self.position + 1 : self.position + 3] == "\r\n"
        if following == "\n" or carriage:
            self.line += 1
            self.position += 3 if carriage else 2
            return
        self._take(self.position + 2, following, "literal")

    def _single(self) -> None:
        line, end = self.line, self.text.find("'", self.position + 1)
        if end < 0:
            raise self._not_closed("quote '", "'", line)
        self._take(end + 1, self.text[self.position + 1 : end], "literal")
        assert self.word is not None
        self.word.line = max(self.word.line, line)

    def _double(self) -> None:
        line, before = self.line, len(self.word.pieces) if self.word else 0
        self.position += 1
        self._in_double_quotes()
        if self.position >= len(self.text):
            raise self._not_closed('quote "', '"', line)
        self.position += 1
        if self.word is None or len(self.word.pieces) == before:
            self._add("", "literal")  # quotes around nothing are a word too
        assert self.word is not None
        self.word.line = max(self.word.line, line)

    def _in_double_quotes(self, *, ends: bool = True, keeps_quotes: bool = False) -> None:
        """Takes what stands in double quotes, up to the closing one; in an expansion, more quotes change nothing."""
        special = "\\`$" if keeps_quotes else '"\\`$'
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == '"' and ends:
                return
            if character == '"':
                self._take(self.position + 1, '"' if keeps_quotes else "", "literal")
            elif character in "$`":
                self._expansion("quoted")
            elif character == "\\":
                following = self.text[self.position + 1 : self.position + 2]
                text = following if following and following in special else "\\" + following
                self._take(self.position + 2, "" if following == "\n" else text, "literal")
            else:
                match = _ORDINARY_IN_DOUBLE_QUOTES.match(self.text, self.position)
                assert match is not None
                self._take(match.end(), match[0], "literal")

    def _expansion(self, kind: str = "split") -> None:
        if kind == "split" and self.text.startswith('$"', self.position):
            self.position += 1
            self._double()
            return
        escaped = WITH_ESCAPES.match(self.text, self.position) if kind == "split" else None
        if escaped:
            self._take(escaped.end(), without_escapes(escaped[1]), "literal")
            return
        end = self._end_of(self.position)
        if end == self.position:
            self._take(end + 1, self.text[end], "plain" if kind == "split" else "literal")
        else:
            self._take(end, self.text[self.position : end], kind)

    def _end_of(self, start: int) -> int:
        end = end_of_expansion(self.text, start)
        if end < 0:
            opening = self.text[start : start + 2] if self.text[start] == "$" else self.text[start]
            raise self._not_closed(f"expansion {opening}", {"{": "}", "`": "`"}.get(opening[-1], ")"), self.line)
        return end

    def _redirection(self) -> None:
        if self._is_in_test():
            self._of_test(self.text[self.position])
            return
        if self.text[self.position + 1 : self.position + 2] == "(":  # <(command), a file with the command's output
            self._end_word()
            end = self._end_of(self.position + 1)
            self._take(end, self.text[self.position : end], "process")
            return
        heredoc = HEREDOC.match(self.text, self.position)
        descriptor = ""
        if self.word is not None and _DESCRIPTOR.fullmatch(self.word.keyword):
            descriptor, self.word = self.word.keyword, None
        self._end_word()
        if heredoc:
            redirection = Redirection(self.line, "<<", descriptor)
            self.done.append(redirection)
            self.documents.append((redirection, is_literal(heredoc)))
            self.heredocs.append(heredoc_of(heredoc))
            self.position = heredoc.end()
            return
        match = _REDIRECTION.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        self._redirect(match[0], descriptor, has_target=not match[0][-1].isdigit() and match[0][-1] != "-")

    def _redirect(self, operator: str, descriptor: str, *, has_target: bool) -> None:
        redirection = Redirection(self.line, operator, descriptor)
        self.done.append(redirection)
        self.redirection = redirection if has_target else None

    def _open(self) -> None:
        if self._is_in_test():
            self._of_test("(")
            return
        word = self.word
        if self.array is not None:
            self.position += 1
            return
        if word is not None and word.keyword != "!" and word.pieces[-1].kind == "plain":
            if word.pieces[-1].text.endswith(tuple("?*+@!")):  # a pattern such as @(a|b)
                end = self._end_of(self.position)
                self._take(end, self.text[self.position : end], "plain")
                return
            if re.fullmatch(rf"{NAME}\+?=", word.keyword):
                self.array, self.array_word, self.word = [], word, None
                self.position += 1
                return
        self._end_word()
        end = self._end_of_arithmetic() if self._starts_command("for") else -1
        if end > 0:
            self._take(end, self.text[self.position + 2 : end - 2], "arithmetic")
            self._end_word()
        else:
            self._end_with("(")

    def _end_of_arithmetic(self) -> int:
        """Returns where ``((...))`` ends; -1 if these are two shells in each other."""
        if not self.text.startswith("((", self.position):
            return -1
        text = self.text[self.position : self.position + _LONGEST_ARITHMETIC]
        end, depth = end_of_expansion(text, 0), 0
        for place, sign in enumerate(text[: max(end, 0)]):
            depth += {"(": 1, ")": -1}.get(sign, 0)
            if depth < 2 and 0 < place < end - 2:
                return -1
        return self.position + end if text[end - 2 : end] == "))" else -1

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
        """Says whether the scanner is between ``[[`` and ``]]``, after a word ``]]`` that ends here."""
        if self.word is not None and self.word.keyword == "]]":
            self._end_word()
        return self.in_test

    def _of_test(self, text: str) -> None:
        """Takes an operator between ``[[`` and ``]]`` as a word, or as a part of a pattern such as ``@(a|b)``."""
        last = self.done[-1]
        is_regular = isinstance(last, Word) and last.keyword == "=~"
        if is_regular or (self.word is not None and (text == "(" or self.opened)):
            self.opened += {"(": 1, ")": -1}.get(text, 0)
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
            end, bodies = after_heredocs(self.text, self.position, self.heredocs)
            for (redirection, stays), body in zip(self.documents, bodies, strict=False):
                redirection.target = self._document(body, redirection.line, stays=stays)
            self.documents.clear()
            self.line += 1 + self.text.count("\n", self.position, end)
            self.position = end
            return
        if self.text.startswith("&>", self.position):
            self._end_word()
            self.position += 3 if self.text.startswith("&>>", self.position) else 2
            self._redirect("&>", "", has_target=True)
            return
        match = _OPERATORS.match(self.text, self.position)
        assert match is not None
        if in_test and character != ";":
            self._of_test(match[0])
        elif self.array is not None:
            self._take(self.position + 1, character, "plain")
        else:
            self._end_with(match[0])

    def _document(self, body: str, line: int, *, stays: bool) -> Word:
        """Returns a here-document as one word, which is expanded as in double quotes unless it stays as it is."""
        if not stays:
            try:
                return _Scanner(body, self.name, self.line + 1).whole(is_quoted=True, keeps_quotes=True)
            except ValueError:  # an expansion that is not closed: only what reads the text is unknown
                body = UNKNOWN
        return Word(line, [Piece(body, "literal")])

    def _end_with(self, operator: str) -> None:
        self._end_word()
        self.in_test, self.redirection = False, None
        self.done.append(Operator(self.line, operator))
        self.position += len(operator)

    def _starts_command(self, *keywords: str) -> bool:
        """Whether the next word is the first of a command, or follows one of the keywords."""
        last = self.done[-1] if self.done else None
        return not isinstance(last, Word) or last.keyword in _BEFORE_A_COMMAND or last.keyword in keywords

    def _end_word(self) -> None:
        self.opened = 0
        if self.word is None:
            return
        word, self.word = self.word, None
        if self.redirection is not None:
            self.redirection.target, self.redirection = word, None
        elif self.array is not None:
            self.array.append(word)
        else:
            if word.keyword == "[[" and self._starts_command():
                self.in_test = True
            elif word.keyword == "]]":
                self.in_test = False
            self.done.append(word)
