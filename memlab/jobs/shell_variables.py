"""The variables of a shell script that is followed, and what the shell makes of words with them.

A value that only a run of the script would show is `UNKNOWN`.
"""

from __future__ import annotations

import ast
import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell_words import NAME, Piece, Word, split_expansions

ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]]*\])?(\+?)=")
MOST_WORDS = 20_000
_LONGEST_VALUE = 2**16
_MOST_CHARACTERS = 2**22
_INT64 = 2**63
_ARITHMETIC_ASSIGNMENT = re.compile(rf"({NAME})\s*([-+*/%]?)=(?!=)(.*)", re.DOTALL)
_STEP = re.compile(rf"({NAME})\s*(\+\+|--)|(\+\+|--)\s*({NAME})")
_SET_BY_THE_SHELL = {
    "BASH", "BASHPID", "BASH_REMATCH", "BASH_SOURCE", "BASH_VERSION", "EUID", "FUNCNAME", "HOME", "HOSTNAME", "IFS",
    "LINENO", "LOGNAME", "OLDPWD", "OSTYPE", "PATH", "PIPESTATUS", "PPID", "PWD", "RANDOM", "SECONDS", "SHELL",
    "UID", "USER",
}  # fmt: skip
# The usual way in which a script finds its own folder.
_OWN_FOLDER = re.compile(
    r"""\$\(\s*cd\s.*dirname\b.*(BASH_SOURCE|\$0|\$\{0\}).*\bpwd\b[^)]*\)|\$\(\s*dirname\s[^)]*\)"""
)

Value = str | list[str]


class Element(str):  # noqa: SLOT000  # a str with variable-size slots cannot have __slots__
    """A text of an array, with the line on which the script gives it."""

    line: int

    def __new__(cls, text: str, line: int) -> Self:
        """Makes one with the line that the text has already, else with this one."""
        element = super().__new__(cls, text)
        element.line = getattr(text, "line", line)
        return element


class Variables:
    """The variables of a script at one moment of it."""

    def __init__(self, given: dict[str, str], path: Path) -> None:
        self.given, self.path = given, path
        self.values: dict[str, Value] = dict(given)
        self.used: set[str] = set()
        """Given variables that the script reads or sets."""
        self.arguments: list[str] | None = None
        """Of the running function; None outside, where only the caller of the script knows them."""
        self.journals: list[dict[str, tuple[Value | None, int]]] = []
        """For each part that is read apart: the earlier values of what it sets, and the lines that set it."""
        self.warnings: dict[str, None] = {}
        self.line = 1
        self.in_test = False
        """Whether a variable that nobody sets is empty, as in a test, and not unknown, as in a command."""
        self.characters = 0

    def warn(self, text: str, line: int | None = None) -> None:
        """Adds a warning, once, about a line; None takes the line of the running command."""
        self.warnings[f"line {self.line if line is None else line}: {text}"] = None

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Makes what nobody sets empty, as in a test."""
        outer, self.in_test = self.in_test, True
        yield
        self.in_test = outer

    def chosen(self, name: str, value: str) -> str:
        """Returns what was given for a variable that the script sets, else the script's value."""
        if name not in self.given:
            return value
        self.used.add(name)
        return self.given[name]

    def record(self, name: str) -> None:
        """Keeps a variable's value for the end of the part that is read apart."""
        if self.journals:
            self.journals[-1].setdefault(name, (self.values.get(name), self.line))

    def restore(self, name: str, old: Value | None) -> None:
        """Gives a variable a value again; None unsets it."""
        if old is None:
            self.values.pop(name, None)
        else:
            self.values[name] = old

    def set(self, name: str, value: Value | None) -> None:
        """Sets a variable, unless its value was given; None unsets it."""
        if name in self.given:
            self.used.add(name)
            return
        if name == "IFS":
            self.warn("IFS is set, and memlab splits at blanks all the same")
        self.record(name)
        self.restore(name, value)

    def get(self, name: str) -> Value | None:
        """Returns a variable's value; None if nobody sets it."""
        if name in self.given:
            self.used.add(name)
        if name in _SET_BY_THE_SHELL:
            return self.values.get(name, UNKNOWN)
        if name.isdigit() and self.arguments is not None:
            return self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else ""
        return self.values.get(name)

    def assign(self, word: Word) -> None:
        """Follows ``NAME=value``, ``NAME+=value``, ``NAME=(...)`` and ``NAME[index]=value``."""
        match = ASSIGNMENT.match(word.raw)
        assert match is not None
        name, adds = match[1], bool(match[3])
        old = self.get(name)
        if word.elements is not None:
            if any(re.match(r"\[[^\]]*\]=", element.raw) for element in word.elements):
                self.set(name, UNKNOWN)  # elements with keys
                return
            values: list[str] = [
                Element(text, element.line) for element in word.elements for text in self.words(element)
            ]
            if adds:
                before = old if isinstance(old, list) else [old] if old else []
                values = before + values
            if len(values) > MOST_WORDS:
                raise ValueError(f"line {word.line}: {name} has more than {MOST_WORDS:,} words")
            self.set(name, values)
            return
        if match[2]:
            self._assign_element(word, match, old)
            return
        value = self.one(after(word, match.end()))
        if isinstance(old, list):
            self.set(name, [old[0] + value if adds and old else value, *old[1:]])
        else:
            self._check(value, word.line)
            self.set(name, (old if old is not None and adds else "") + value)

    def _assign_element(self, word: Word, match: re.Match[str], old: Value | None) -> None:
        name, values = match[1], list(old) if isinstance(old, list) else [] if old is None else [old]
        index = self._arithmetic(match[2][1:-1])
        if (
            not index.isdecimal()
            or int(index) > len(values)
            or UNKNOWN in values
            or match.end() > len(word.pieces[0].text)
            or (match[3] and int(index) == len(values))
        ):
            self.warn(f"an element of {name} is set that memlab cannot follow: {name} is unknown from here on")
            self.set(name, UNKNOWN)
            return
        value = self.one(after(word, match.end()))
        value = Element(values[int(index)] + value if match[3] else value, word.line)
        self.set(name, [*values[: int(index)], value, *values[int(index) + 1 :]])

    def number(self, text: str) -> int | None:
        """Calculates a side of ``-eq`` in double brackets."""
        value = self._arithmetic(text or "0")
        return int(value) if value != UNKNOWN else None

    def is_set(self, name: str) -> bool:
        """Whether a variable has a value."""
        return self.get(name) is not None

    def pattern(self, word: Word) -> str:
        """Expands a word to a pattern, in which everything that was quoted stands for itself."""
        return "".join(
            text if kind in ("plain", "split", "array") else glob.escape(text)
            for parts, kind in self._parts(word)
            for text in [" ".join(parts)]
        )

    def one(self, word: Word) -> str:
        """Expands a word to a single text."""
        return "".join(" ".join(parts) for parts, _ in self._parts(word))

    def words(self, word: Word) -> list[str]:
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

    def _expansion(self, text: str, depth: int = 0) -> Value:
        """Expands ``$NAME``, ``${...}`` or ``$((...))``; anything else is unknown."""
        if depth > 10:
            return UNKNOWN
        if text.startswith("$((") and text.endswith("))"):
            return self._arithmetic(text[3:-2], depth)
        if text.startswith(("$(", "`")):
            return str(self.path.parent.absolute()) if _OWN_FOLDER.fullmatch(text) else UNKNOWN
        body = text[2:-1] if text.startswith("${") else text[1:]
        if body in ("@", "*"):
            return list(self.arguments or [])
        if body == "#":
            return UNKNOWN if self.arguments is None else str(len(self.arguments))
        array = re.fullmatch(rf"({NAME})\[([^\]]*)\]", body)
        if array:
            return self._of_array(array[1], array[2])
        length = re.fullmatch(rf"#({NAME})(\[[@*]\])?", body)
        if length:
            value = self._of_array(length[1], "@") if length[2] else self._of_variable(length[1], "", "", depth)
            return UNKNOWN if UNKNOWN in value else str(len(value))
        match = re.fullmatch(rf"({NAME}|\d)(?:(:?[-=+?])(.*))?", body, re.DOTALL)
        return UNKNOWN if match is None else self._of_variable(match[1], match[2] or "", match[3] or "", depth)

    def _of_array(self, name: str, index: str) -> Value:
        value = self.get(name)
        if value == UNKNOWN:
            return UNKNOWN
        values = [] if value is None else [value] if isinstance(value, str) else value
        if index in ("@", "*"):
            return list(values)
        number = self._arithmetic(index).removeprefix("-0")
        if not re.fullmatch(r"-?\d{1,6}", number) or int(number) < -len(values):
            return UNKNOWN
        return values[int(number)] if int(number) < len(values) else ""

    def _of_variable(self, name: str, operator: str, operand: str, depth: int) -> str:
        value = self.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        if not operator:
            if value is None:
                return "" if self.in_test and not name.isdigit() else UNKNOWN
            return value
        is_set = bool(value) if operator[0] == ":" else value is not None
        if operator[-1] == "+":
            return self._nested(operand, depth) if is_set else ""
        if is_set or operator[-1] == "?":
            return UNKNOWN if value is None or not is_set else value
        default = self._nested(operand, depth)
        if operator[-1] == "=":
            self.set(name, default)
        return default

    def _nested(self, text: str, depth: int, *, keeps_quotes: bool = False) -> str:
        done = ""
        for part, is_expansion in split_expansions(text if keeps_quotes else _without_quotes(text)):
            value = self._expansion(part, depth + 1) if is_expansion else part
            done += " ".join(value) if isinstance(value, list) else value
        return done

    def calculated(self, text: str) -> bool | None:
        """Calculates ``((...))``, which is true if the result is not 0."""
        with self.testing():
            value = self._arithmetic(text)
        return None if value == UNKNOWN else value != "0"

    def _arithmetic(self, text: str, depth: int = 0) -> str:
        """Calculates an expression, which may also set a variable."""
        expression = self._nested(text, depth, keeps_quotes=True).strip()
        if len(expression) > 300 or UNKNOWN in expression or "#" in expression:
            value = UNKNOWN
        elif assigns := _ARITHMETIC_ASSIGNMENT.fullmatch(expression):
            name, operator, right = assigns.groups()
            value = self._value_of(f"{name}{operator}({right})" if operator else right)
            self.set(name, value)
            return value
        elif step := _STEP.fullmatch(expression):
            name = step[1] or step[4]
            before, value = self._value_of(name), self._value_of(f"{name}{(step[2] or step[3])[0]}1")
            self.set(name, value)
            return before if step[1] else value
        else:
            value = self._value_of(expression)
        if value == UNKNOWN:
            for match in re.finditer(rf"({NAME})\s*([-+*/%&|^]|<<|>>)?=(?!=)|{_STEP.pattern}", text):
                self.set(match[1] or match[3] or match[6], UNKNOWN)
        return value

    def _value_of(self, expression: str) -> str:
        expression = re.sub(r"&&|\|\|", lambda found: " and " if found[0] == "&&" else " or ", expression).strip()
        if "++" in expression or "--" in expression:
            return UNKNOWN
        try:
            value = self._calculate(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN
        return str(value)

    def _calculate(self, node: ast.expr) -> int:
        """Returns a whole number as the shell calculates it; an operator that memlab does not know is a ValueError."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            value = self.get(node.id)
            value = "0" if self.in_test and value in (None, "") else value
            if not isinstance(value, str) or not re.fullmatch(r"\s*[+-]?(0|[1-9]\d{0,17})\s*", value):
                raise ValueError(node.id)
            return int(value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            number = self._calculate(node.operand)
            return -number if isinstance(node.op, ast.USub) else number
        if isinstance(node, ast.BoolOp):
            wanted = isinstance(node.op, ast.Or)
            return int(
                any(self._calculate(part) for part in node.values) if wanted else all(map(self._calculate, node.values))
            )
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _compared(node.ops[0], self._calculate(node.left), self._calculate(node.comparators[0]))
        if not isinstance(node, ast.BinOp):
            raise ValueError(type(node).__name__)
        result = _combined(node.op, self._calculate(node.left), self._calculate(node.right))
        if abs(result) >= _INT64:
            raise ValueError("more than 64 bits")
        return result


def is_assignment(word: Word) -> bool:
    """Whether a word sets a variable, where it stands before a command."""
    first = word.pieces[0] if word.pieces else None
    if first is None or first.kind != "plain" or not re.match(rf"{NAME}(\[|\+?=)", first.text):
        return False
    return ASSIGNMENT.match(word.raw) is not None


def _compared(operator: ast.cmpop, left: int, right: int) -> int:
    results = {ast.Eq: left == right, ast.NotEq: left != right, ast.Lt: left < right}
    results |= {ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right}
    if type(operator) not in results:
        raise ValueError(type(operator).__name__)
    return int(results[type(operator)])


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
    return [Element(part, getattr(element, "line", line)) for element in elements for part in str(element).split()]


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


def after(word: Word, start: int) -> Word:
    """Returns what is left of a word after its first characters, which are all in the first piece."""
    first, *others = word.pieces
    return Word(word.line, [Piece(first.text[start:], first.kind), *others])


def _without_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
