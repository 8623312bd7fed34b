"""Reads a launch script of a shell without running it: assignments are followed, commands become lists of words.

Followed are assignments, arrays, ``${NAME:-default}``, ``$((1 + 2))``, ``source`` of a file beside the script, and
tests of known values in ``if``, ``case`` and ``&&``. Everything else, above all ``$(command)``, is an unknown value: it
is reported and never executed. A variable that the script reads and does not set is taken as not set, as on a machine
where nobody exported it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell_words import NAME, Piece, Word, commands, split_expansions

_ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]]*\])?(\+?)=")
_DECLARING = {"export", "declare", "local", "readonly", "typeset", "env"}
_LONGEST_VALUE = 2**16
_MOST_CHARACTERS = 2**22
_MOST_WORDS = 20_000
_DEEPEST_SOURCE = 5
_MOST_SOURCES = 20
_DEEPEST_BLOCK = 50
_INT64 = 2**63
_ENDING = ("fi", "done", "esac")
_INNER = ("then", "do", "elif", "else")
_IGNORED = ("{", "}", "function", "time", "exec", "nohup", "(", ")")
# The usual way in which a script finds its own folder.
_OWN_FOLDER = re.compile(
    r"""\$\(\s*cd\s.*dirname\b.*(BASH_SOURCE|\$0|\$\{0\}).*\bpwd\b[^)]*\)|\$\(\s*dirname\s[^)]*\)"""
)


@dataclass(slots=True)
class Command:
    """A simple command of the script, expanded."""

    line: int
    words: list[tuple[str, int]]
    """Each word with its line."""


class _Element(str):  # noqa: SLOT000  # a str with variable-size slots cannot have __slots__
    """A text of an array, with the line on which the script gives it."""

    line: int

    def __new__(cls, text: str, line: int) -> Self:
        element = super().__new__(cls, text)
        element.line = getattr(text, "line", line)
        return element


@dataclass(slots=True)
class Script:
    """What a script would run and set, as far as that can be seen without running it."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_script(text: str, path: Path, given: dict[str, str] | None = None) -> Script:
    """Follows a script.

    Args:
        text: The script.
        path: Its file, beside which sourced files are looked for.
        given: Variables of the environment, by name. A script that assigns them anew overrides them.

    Raises:
        ValueError: If a quote or bracket is not closed, or the script expands to more than any real one does.
    """
    reader = _Reader(dict(given or {}), path.name)
    reader.follow(text, path)
    return reader.script


class _Reader:
    def __init__(self, given: dict[str, str], name: str) -> None:
        self.script = Script(variables=dict(given))
        self.name = name
        self.characters = 0
        self.depth = 0
        self.sources = 0
        self.skipped: dict[str, int] = {}

    def follow(self, text: str, path: Path) -> None:
        self.path = path
        blocks: list[_Block] = []
        status: bool | None = True
        for word_list, line, joined in commands(text, path.name):
            words = list(word_list)
            words = self._keywords(words, blocks, line)
            if not words or joined == "pattern":
                continue
            followed = all(block.is_followed for block in blocks)
            runs = (
                followed and not (joined == "&&" and status is False) and not (joined == "||" and status is not False)
            )
            undecided = any(block.is_undecided for block in blocks)
            test = _is_test(words)
            if blocks and blocks[-1].waits_for_condition:
                if test:
                    result = self._test(words)
                    negated = words[0].raw == "!"
                    blocks[-1].add_condition((not result) if negated and result is not None else result, joined)
                else:
                    blocks[-1].add_condition(None, joined)
                continue
            if test:
                status = self._test(words) if runs else status
                continue
            if runs:
                self._command(words, line)
                status = words[0].raw != "false"
            elif undecided:
                self._note_skipped(words, line)
        for name, line in self.skipped.items():
            self.script.warnings.append(
                f"line {line}: {name} is set in a branch whose condition memlab cannot decide, and is not followed"
            )
        self.skipped = {}

    def _keywords(self, words: list[Word], blocks: list[_Block], line: int) -> list[Word]:
        """Opens and closes blocks, and returns what is left of a command."""
        while words:
            raw = words[0].raw if words[0].elements is None else ""
            if len(blocks) > _DEEPEST_BLOCK:
                raise ValueError(f"line {line}: more than {_DEEPEST_BLOCK} blocks are open, beyond any real script")
            if raw in ("for", "while", "until", "select", "case"):
                blocks.append(self._opened(raw, words))
                return []
            if raw == "if":
                blocks.append(_Block("if", waits_for_condition=True))
            elif raw in _ENDING:
                del blocks[-1:]
            elif raw in _INNER or raw.startswith("\1"):
                self._inner(raw, blocks, line)
            elif raw not in _IGNORED:
                break
            words = words[1:]
        return words

    def _inner(self, raw: str, blocks: list[_Block], line: int) -> None:
        if not blocks:
            return
        if raw in _INNER:
            blocks[-1].inner(raw)
        else:  # the pattern of a case
            patterns = raw[1:].split("|")
            blocks[-1].next_pattern([self._one(Word(line, [Piece(part, "plain")])) for part in patterns])

    def _opened(self, raw: str, words: list[Word]) -> _Block:
        if raw != "case":
            return _Block("loop", branch=None)
        return _Block("case", subject=self._one(words[1]) if len(words) > 1 else UNKNOWN)

    def _note_skipped(self, words: list[Word], line: int) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word.raw)
            if match is None:
                if word.raw in _DECLARING:
                    continue
                return
            self.skipped.setdefault(match[1], line)

    def _command(self, words: list[Word], line: int) -> None:
        while words and (words[0].elements is not None or _is_assignment(words[0]) or words[0].raw in _DECLARING):
            word, words = words[0], words[1:]
            if word.raw in _DECLARING and word.elements is None:
                words = [other for other in words if not other.raw.startswith("-")]
                continue
            self._assign(word)
        if not words:
            return
        if words[0].raw in ("source", ".") and len(words) > 1:
            self._source(self._one(words[1]), line)
            return
        expanded: list[tuple[str, int]] = []
        for word in words:
            if word.elements is not None:
                self._assign(word)
                continue
            expanded += [(text, getattr(text, "line", word.line)) for text in self._words(word)]
        if expanded and expanded[0][0] == "eval":
            expanded = [(part, at) for text, at in expanded[1:] for part in text.split()]
        if len(expanded) > _MOST_WORDS:
            raise ValueError(f"line {line} has more than {_MOST_WORDS:,} words")
        if expanded:
            self.script.commands.append(Command(line, expanded))

    def _assign(self, word: Word) -> None:
        raw = word.raw
        match = _ASSIGNMENT.match(raw)
        assert match is not None
        name, adds = match[1], bool(match[3])
        old = self.script.variables.get(name)
        if word.elements is not None:
            values: list[str] = [
                _Element(text, element.line) for element in word.elements for text in self._words(element)
            ]
            if adds:
                before = old if isinstance(old, list) else [old] if old else []
                values = before + values
            if len(values) > _MOST_WORDS:
                raise ValueError(f"line {word.line}: {name} has more than {_MOST_WORDS:,} words")
            self.script.variables[name] = values
            return
        if match[2]:
            return  # one element of an array
        value = self._one(_after(word, match.end()))
        if adds and isinstance(old, list):
            self.script.variables[name] = [*old, value]
        else:
            self._check(value, word.line)
            self.script.variables[name] = (old if isinstance(old, str) and adds else "") + value

    def _source(self, name: str, line: int) -> None:
        path = Path(name) if Path(name).is_absolute() else self.path.parent / name
        self.sources += 1
        if self.sources > _MOST_SOURCES:
            raise ValueError(f"line {line}: more than {_MOST_SOURCES} files are sourced, beyond any real script")
        if UNKNOWN in name or self.depth >= _DEEPEST_SOURCE:
            self.script.warnings.append(f"line {line}: the sourced file is not known before a run, and is not read")
            return
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 2**20 else None
        except (OSError, ValueError):
            text = None
        if text is None or UNKNOWN in text:
            self.script.warnings.append(f"line {line}: the sourced file {path.name} is not there, and is not read")
            return
        own, self.depth = self.path, self.depth + 1
        self.follow(text, path)
        self.path, self.depth = own, self.depth - 1

    def _one(self, word: Word) -> str:
        """Expands a word to a single text."""
        return "".join(" ".join(parts) for parts, _ in self._parts(word))

    def _words(self, word: Word) -> list[str]:
        """Expands a word as the shell does: to none, one or several."""
        done: list[str] = [""]
        is_quoted = False
        for parts, kind in self._parts(word):
            # An unquoted array has no empty elements left here.
            is_quoted = is_quoted or kind in ("literal", "double") or (kind == "array" and bool(parts))
            if kind == "array" and parts:
                done[-1:] = [done[-1] + parts[0] if done[-1] else parts[0], *parts[1:]]
            elif kind == "split":
                _append_split(done, parts[0])
            elif parts:
                done[-1] += parts[0]
        if not is_quoted:
            done = [text for text in done if text]
        self.characters += sum(len(text) for text in done)
        if self.characters > _MOST_CHARACTERS:
            raise ValueError(f"line {word.line}: the script expands to more than {_MOST_CHARACTERS:,} characters")
        return done

    def _parts(self, word: Word) -> list[tuple[list[str], str]]:
        parts: list[tuple[list[str], str]] = []
        for piece in word.pieces:
            if piece.kind == "literal" or not piece.text:  # quotes around nothing are a word too
                parts.append(([piece.text], "literal"))
                continue
            for text, is_expansion in split_expansions(piece.text):
                if not is_expansion:
                    parts.append(([text], "double" if piece.kind == "double" else "plain"))
                    continue
                value = self._expansion(text)
                if isinstance(value, list):
                    is_whole = piece.kind == "double" and "[*]" in text
                    values = value if piece.kind == "double" else _split(value, word.line)
                    parts.append(([" ".join(value)], "double") if is_whole else (values, "array"))
                else:
                    self._check(value, word.line)
                    parts.append(([value], "double" if piece.kind == "double" else "split"))
        return parts

    def _check(self, value: str, line: int) -> None:
        if len(value) > _LONGEST_VALUE:
            raise ValueError(f"line {line}: a value has more than {_LONGEST_VALUE:,} characters")

    def _expansion(self, text: str, depth: int = 0) -> str | list[str]:
        """Expands ``$NAME``, ``${...}`` or ``$((...))``; anything else is unknown."""
        if depth > 10:
            return UNKNOWN
        if text.startswith("$((") and text.endswith("))"):
            return self._arithmetic(text[3:-2])
        if text.startswith(("$(", "`")):
            return str(self.path.parent.absolute()) if _OWN_FOLDER.fullmatch(text) else UNKNOWN
        body = text[2:-1] if text.startswith("${") else text[1:]
        if body in ("@", "*"):
            return []
        array = re.fullmatch(rf"({NAME})\[([@*]|\d{{1,6}})\]", body)
        if array:
            return self._of_array(array[1], array[2])
        match = re.fullmatch(rf"({NAME}|\d)(?:(:?[-=+?])(.*))?", body, re.DOTALL)
        return UNKNOWN if match is None else self._of_variable(match[1], match[2] or "", match[3] or "", depth)

    def _of_array(self, name: str, index: str) -> str | list[str]:
        values = self.script.variables.get(name)
        values = [] if values is None else [values] if isinstance(values, str) else values
        if index in "@*":
            return list(values)
        return values[int(index)] if int(index) < len(values) else ""

    def _of_variable(self, name: str, operator: str, operand: str, depth: int) -> str:
        value = self.script.variables.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        if not operator:
            return UNKNOWN if value is None else value
        is_set = bool(value) if operator[0] == ":" else value is not None
        if operator[-1] == "+":
            return self._nested(operand, depth) if is_set else ""
        if is_set or operator[-1] == "?":
            return UNKNOWN if value is None or not is_set else value
        default = self._nested(operand, depth)
        if operator[-1] == "=":
            self.script.variables[name] = default
        return default

    def _nested(self, text: str, depth: int) -> str:
        done = ""
        for part, is_expansion in split_expansions(_without_quotes(text)):
            value = self._expansion(part, depth + 1) if is_expansion else part
            done += " ".join(value) if isinstance(value, list) else value
        return done

    def _arithmetic(self, text: str) -> str:
        expression = re.sub(rf"\$\{{({NAME})\}}|\${NAME}", lambda name: name[0].strip("${}"), text).strip()
        if len(expression) > 300:
            return UNKNOWN
        try:
            value = self._calculate(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN
        return str(value)

    def _calculate(self, node: ast.expr) -> int:
        """Returns a whole number as the shell calculates it: with + - * / % only, division rounds towards zero."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            value = self.script.variables.get(node.id)
            if not isinstance(value, str) or not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
                raise ValueError(node.id)
            return int(value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            number = self._calculate(node.operand)
            return -number if isinstance(node.op, ast.USub) else number
        if not isinstance(node, ast.BinOp):
            raise ValueError(type(node).__name__)
        result = _combined(node.op, self._calculate(node.left), self._calculate(node.right))
        if abs(result) >= _INT64:
            raise ValueError("more than 64 bits")
        return result

    def _test(self, words: list[Word]) -> bool | None:
        """Decides ``[ "$X" = y ]``; None if that needs a run."""
        texts = [self._tested(word) for word in words]
        is_negated = texts[:1] == ["!"]
        texts = [text for text in texts if text not in ("[", "[[", "]", "]]", "test", "!")]
        result = _decided(texts)
        return (not result) if is_negated and result is not None else result

    def _tested(self, word: Word) -> str:
        """Expands a word of a test, in which a variable that nobody sets is empty."""
        raw = word.raw
        match = re.fullmatch(rf"\$\{{?({NAME})\}}?", raw)
        if match and match[1] not in self.script.variables:
            return ""
        return self._one(word)


@dataclass(slots=True)
class _Block:
    """An open ``if``, ``case`` or loop; `branch` says whether the current branch is followed, None if undecidable."""

    kind: str
    waits_for_condition: bool = False
    subject: str = ""
    branch: bool | None = True
    is_taken: bool | None = False
    """Whether an earlier branch was followed; None if that cannot be decided."""

    def inner(self, keyword: str) -> None:
        """Goes on with the part of the block that a keyword begins."""
        if keyword in ("then", "do"):
            self.waits_for_condition = False
        elif self.kind != "case":
            self.next_branch(is_last=keyword == "else")

    def add_condition(self, result: bool | None, joined: str) -> None:
        if joined in ("&&", "||") and self.branch is not None:
            both = (self.branch and result) if joined == "&&" else (self.branch or result)
            result = None if result is None else both
        free = not self.is_taken if self.is_taken is not None else None
        self.branch = None if result is None or (free is None and result) else bool(result and free)

    def next_branch(self, *, is_last: bool) -> None:
        if self.branch is None:
            self.is_taken = None if self.is_taken is not True else True
        elif self.branch:
            self.is_taken = True
        if is_last:
            self.branch = None if self.is_taken is None else not self.is_taken
        else:
            self.waits_for_condition, self.branch = True, True

    def next_pattern(self, patterns: list[str]) -> None:
        if self.is_taken:
            self.branch = False
            return
        if UNKNOWN in self.subject:
            self.branch = None
            return
        self.branch = any(pattern in (self.subject, "*") for pattern in patterns)
        self.is_taken = self.branch

    @property
    def is_followed(self) -> bool:
        return self.branch is True

    @property
    def is_undecided(self) -> bool:
        return self.branch is None


def _is_assignment(word: Word) -> bool:
    first = word.pieces[0] if word.pieces else None
    return first is not None and first.kind == "plain" and _ASSIGNMENT.match(first.text) is not None


def _is_test(words: list[Word]) -> bool:
    first = [word.raw for word in words[:2]]
    return first[:1] in (["["], ["[["], ["test"]) or (first[:1] == ["!"] and first[1:] in (["["], ["[["]))


def _decided(texts: list[str]) -> bool | None:
    if any(UNKNOWN in text for text in texts):
        return None
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        return (left == right) == (operator != "!=")
    if re.fullmatch(r"[+-]?\d{1,18}", left) and re.fullmatch(r"[+-]?\d{1,18}", right):
        one, other = int(left), int(right)
        results = {"-eq": one == other, "-ne": one != other, "-gt": one > other, "-ge": one >= other}
        return (results | {"-lt": one < other, "-le": one <= other}).get(operator)
    return None


def _combined(operator: ast.operator, left: int, right: int) -> int:
    """Calculates as the shell does: division rounds towards zero, and a remainder has the dividend's sign."""
    if isinstance(operator, (ast.Div, ast.FloorDiv)):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    if isinstance(operator, ast.Mod):
        remainder = abs(left) % abs(right)
        return remainder if left >= 0 else -remainder
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, (ast.Add, ast.Sub)):
        return left + right if isinstance(operator, ast.Add) else left - right
    raise ValueError(type(operator).__name__)


def _split(elements: list[str], line: int) -> list[str]:
    """Splits the elements of an unquoted array at blanks, as the shell does; each part keeps its element's line."""
    return [_Element(part, getattr(element, "line", line)) for element in elements for part in str(element).split()]


def _append_split(done: list[str], text: str) -> None:
    """Appends an unquoted expansion, which the shell splits at blanks."""
    pieces = text.split()
    if text[:1].isspace() and done[-1]:
        done.append("")
    for index, piece in enumerate(pieces):
        if index:
            done.append("")
        done[-1] += piece
    if text[-1:].isspace() and pieces:
        done.append("")


def _after(word: Word, start: int) -> Word:
    """Returns what is left of a word after its first characters, which are all in the first piece."""
    first, *others = word.pieces
    return Word(word.line, [Piece(first.text[start:], first.kind), *others])


def _without_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
