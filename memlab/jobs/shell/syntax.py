"""Parses the words and operators of a shell script into the tree of its commands.

The parser is lenient: what the shell would refuse, such as a ``fi`` without an ``if``, is noted and passed over:
most launch scripts that a person gives to memlab have run before. It is memlab's own because tree-sitter-bash 0.25.1
reads ``[ -n "$A" -o -z "$B" ]`` as ``-n ("$A" -o ...)`` without an error, loses the script after
``[[ $M = *"A B"* ]]`` (its issue 321), and takes memory without bound for an unfinished pipe (killed on 60,000 times
``a |``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memlab.jobs.shell.words import NAME_ONLY, Operator, Piece, Redirection, Token, Word, tokens

_DEEPEST_BLOCK = 50
_NEED_A_FILE = {"<", ">", ">>", ">|", "<>", "&>", "&>>"}
_CLOSING = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}


@dataclass(slots=True)
class Simple:
    """A command of words, also an assignment, ``[[ ... ]]`` and ``((...))``."""

    line: int
    words: list[Word]
    redirections: list[Redirection] = field(default_factory=list)


@dataclass(slots=True)
class Redirected:
    """A block of commands with redirections behind it, such as a loop that reads a file."""

    part: Node
    redirections: list[Redirection]


@dataclass(slots=True)
class Sequence:
    """Commands after each other."""

    parts: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Chain:
    """Commands that ``&&`` and ``||`` join."""

    first: Node
    rest: list[tuple[str, Node]]


@dataclass(slots=True)
class Not:
    """A command after ``!``."""

    part: Node


@dataclass(slots=True)
class Apart:
    """Commands that each run in a shell of their own: ``( )``, the parts of a pipe, what ends in ``&``."""

    parts: list[Node]
    waits: bool = True


@dataclass(slots=True)
class If:
    """``if``, with a condition and a body for each branch."""

    branches: list[tuple[Node, Node]]
    otherwise: Node | None = None


@dataclass(slots=True)
class Case:
    """``case``, with the patterns, the body and the end (``;;`` or another) of each branch."""

    subject: Word
    branches: list[tuple[list[Word], Node, str]]


@dataclass(slots=True)
class For:
    """``for NAME in WORDS``; without words those that the script or function was called with."""

    line: int
    name: str
    words: list[Word] | None
    body: Node
    asks: bool = False
    """Whether it is ``select``, which asks a person for one of the words."""


@dataclass(slots=True)
class While:
    """``while`` and ``until``; also ``for ((start; condition; step))``."""

    condition: Node
    body: Node
    start: Node | None = None
    step: Node | None = None


@dataclass(slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: Node


Node = Simple | Redirected | Sequence | Chain | Not | Apart | If | Case | For | While | Function


def parse(text: str, name: str, line: int = 1, note: Callable[[int, str], None] = lambda line, what: None) -> Node:
    """Returns the tree of a script.

    Args:
        note: Is told what the shell refuses, with the line.

    Raises:
        ValueError: If a quote, an expansion or an array is not closed, or more blocks are open than in real scripts.
    """
    return _Parser(tokens(text, name, line), name, note).sequence()


class _Parser:
    def __init__(self, parts: list[Token], name: str, note: Callable[[int, str], None]) -> None:
        self.parts, self.name, self.note = parts, name, note
        self.position = 0
        self.depth = 0

    def _next(self) -> Token | None:
        return self.parts[self.position] if self.position < len(self.parts) else None

    def _operator(self) -> str:
        """Returns the operator that comes next; nothing at a word and at the end."""
        part = self._next()
        return part.text if isinstance(part, Operator) else ""

    def _operator_or_keyword(self) -> str:
        part = self._next()
        return part.text if isinstance(part, Operator) else part.keyword if part else ""

    def _word(self) -> Word | None:
        """Takes the next part if it is a word."""
        part = self._next()
        if not isinstance(part, Word):
            return None
        self.position += 1
        return part

    def _take(self, *texts: str) -> str:
        """Takes the next operator or keyword if it is one of these."""
        text = self._operator_or_keyword()
        if text not in texts:
            return ""
        self.position += 1
        return text

    def _skip_ends(self) -> None:
        while self._take(";"):
            pass

    def _go_deeper(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST_BLOCK:
            line = self.parts[min(self.position, len(self.parts) - 1)].line
            raise ValueError(
                f"{self.name}, line {line:d}: more than {_DEEPEST_BLOCK} blocks are open: give a log of the job or its "
                "resolved configuration"
            )

    def sequence(self, *closing: str) -> Node:
        """Takes commands up to one of these operators or keywords, which stays."""
        self._go_deeper()
        found = Sequence()
        while self.position < len(self.parts):
            text = self._operator_or_keyword()
            if text in closing:
                break
            if text in _CLOSING or (self._operator() and text != "("):
                if text != ";":  # which also ends a line
                    self.note(self.parts[self.position].line, f"{text!r} has nothing before it that it belongs to")
                self.position += 1
                continue
            part = self._chain()
            if self._take("&"):
                part = Apart([part], waits=False)
            found.parts.append(part)
        self.depth -= 1
        return found.parts[0] if len(found.parts) == 1 else found

    def _chain(self) -> Node:
        first, rest = self._pipeline(), []
        while joiner := self._take("&&", "||"):
            self._skip_ends()
            rest.append((joiner, self._behind(joiner, self._pipeline())))
        return Chain(first, rest) if rest else first

    def _pipeline(self) -> Node:
        is_negated = False
        while keyword := self._take("!", "time"):
            is_negated ^= keyword == "!"
        parts = [self._command()]
        while joiner := self._take("|", "|&"):
            self._skip_ends()
            parts.append(self._behind(joiner, self._command()))
        part = Apart(parts) if len(parts) > 1 else parts[0]
        return Not(part) if is_negated else part

    def _behind(self, joiner: str, part: Node) -> Node:
        if isinstance(part, Simple) and not part.words and not part.redirections:
            self.note(self.parts[self.position - 1].line, f"{joiner!r} has no command behind it")
        return part

    def _command(self) -> Node:
        part = self._block()
        redirections = []
        while isinstance(redirection := self._next(), Redirection):
            redirections.append(self._redirection(redirection))
        return Redirected(part, redirections) if redirections else part

    def _redirection(self, part: Redirection) -> Redirection:
        self.position += 1
        if part.target is None and part.operator in _NEED_A_FILE:
            self.note(part.line, f"{part.operator!r} has no file behind it, as in a placeholder <VALUE>")
        return part

    def _block(self) -> Node:
        opening = self._take("(", "{", "if", "case", "for", "select", "while", "until", "function")
        if not opening:
            return self._simple()
        match opening:
            case "(":
                part: Node = Apart([self._closed(")")])
            case "{":
                part = self._closed("}")
            case "if":
                part = self._if()
            case "case":
                part = self._case()
            case "for" | "select":
                part = self._for(asks=opening == "select")
            case "function":
                name = self._word()
                return self._function(name.raw if name else "")
            case _:
                condition = self._closed("do")
                part = While(Not(condition) if opening == "until" else condition, self._closed("done"))
        return part

    def _closed(self, closing: str) -> Node:
        opened = self.parts[self.position - 1].line
        part = self.sequence(closing)
        if not self._take(closing):
            self._not_closed(opened, closing)
        return part

    def _not_closed(self, opened: int, closing: str) -> None:
        self.note(opened, f"the block that begins here has no {closing!r}")

    def _if(self) -> Node:
        found, opened = If([]), self.parts[self.position - 1].line
        while True:
            condition = self._closed("then")
            found.branches.append((condition, self.sequence("elif", "else", "fi")))
            keyword = self._take("elif", "else", "fi")
            if keyword == "else":
                found.otherwise = self._closed("fi")
            if not keyword:
                self._not_closed(opened, "fi")
            if keyword != "elif":
                return found

    def _case(self) -> Node:
        line = self.parts[self.position - 1].line
        found = Case(self._word() or Word(line), [])
        self._skip_ends()
        self._take("in")
        while True:
            start = self.position
            self._skip_ends()
            if self._take("esac"):
                return found
            if self.position >= len(self.parts):
                self._not_closed(line, "esac")
                return found
            self._take("(")
            patterns = []
            while word := self._word():
                patterns.append(word)
                self._take("|")
            self._take(")")
            body = self.sequence(";;", ";&", ";;&", "esac")
            found.branches.append((patterns, body, self._take(";;", ";&", ";;&") or ";;"))
            if self.position == start:
                self.position += 1  # not the shell's syntax

    def _for(self, *, asks: bool) -> Node:
        name = self._word()
        words: list[Word] | None = None
        self._skip_ends()
        if self._take("in"):
            words = []
            while (word := self._word()) is not None:
                words.append(word)
        self._skip_ends()
        body = self._closed("}") if self._take("{") else self._closed("done") if self._take("do") else Sequence()
        if name is not None and NAME_ONLY.fullmatch(name.raw):
            return For(name.line, name.raw, words, body, asks)
        parts = name.raw.split(";") if name is not None else []
        if name is None or len(parts) != 3:  # not the shell's syntax
            return While(Simple(name.line if name else 0, []), body)
        start, condition, step = (Simple(name.line, [Word(name.line, [Piece(part, "arithmetic")])]) for part in parts)
        return While(condition if parts[1].strip() else Simple(name.line, []), body, start, step)

    def _function(self, name: str) -> Node:
        if self._take("("):
            self._take(")")
        self._skip_ends()
        self._go_deeper()
        body = self._command()
        self.depth -= 1
        return Function(name, body)

    def _simple(self) -> Node:
        words: list[Word] = []
        redirections: list[Redirection] = []
        while True:
            part = self._next()
            if isinstance(part, Word):
                words.append(part)
                self.position += 1
            elif isinstance(part, Redirection):
                redirections.append(self._redirection(part))
            elif self._operator() == "(" and len(words) == 1:
                return self._function(words[0].raw)
            elif self._operator() == "(" and words:
                self.note(words[-1].line, f"'(' stands behind {words[-1].raw!r}")
                self.position += 1
            else:
                return Simple(words[0].line if words else 0, words, redirections)
