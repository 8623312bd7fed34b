"""The variables of a shell script that is followed, and what the shell makes of words with them.

A value that is known only when the job runs is `UNKNOWN`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.shell.arithmetic import ASSIGNED, calculated
from memlab.jobs.shell.brackets import NAME
from memlab.jobs.shell.conditions import matches
from memlab.jobs.shell.paths import printed_path
from memlab.jobs.shell.words import NAME_ONLY, Piece, Word, operand

_INDEX = r"\[(?:[^\[\]]|\[[^\]]*\])*+\]"
ASSIGNMENT = re.compile(rf"({NAME})({_INDEX})?(\+?)=")
_PARAMETER = re.compile(rf"(#?)(!?)({NAME}|\d+|[@*#?$!-])({_INDEX})?(:?[-=+?]|##?|%%?|//?|,,?|\^\^?|:)?(.*)", re.DOTALL)
_BRACES = re.compile(r"\{(?:([^{},\s]*(?:,[^{},\s]*)+)|(-?\d{1,6})\.\.(-?\d{1,6}))\}")
_MOST_CHARACTERS = 2**21
_CHARACTERS_OF_A_WORD = 20
"""What a word takes beside its characters, in memory and time."""
_DEEPEST_EXPANSION = 10
_SET_BY_THE_SHELL = {
    "BASH", "BASHPID", "BASH_REMATCH", "BASH_VERSION", "EUID", "FUNCNAME", "HOME", "HOSTNAME", "IFS", "LINENO",
    "LOGNAME", "OLDPWD", "OSTYPE", "PATH", "PIPESTATUS", "PPID", "PWD", "RANDOM", "SECONDS", "SHELL", "UID", "USER",
}  # fmt: skip

Value = str | list[str]


class Element(str):  # noqa: SLOT000  # a str with variable-size slots cannot have __slots__
    """A text of an array, with the line on which the script gives it."""

    line: int

    def __new__(cls, text: str, line: int) -> Self:
        """Makes one with its line."""
        element = super().__new__(cls, text)
        element.line = line
        return element


class OwnArguments(Element):
    """Words that the script itself is started with: `UNKNOWN_WORDS` that came from ``$@``; line 0 is not known yet."""


class Variables:
    """The variables of a script at one moment of it."""

    def __init__(self, given: dict[str, str], path: Path) -> None:
        self.given, self.path, self.script = given, path, path
        self.values: dict[str, Value] = dict(given)
        self.used: set[str] = set()
        """Given variables that the script reads or sets."""
        self.arguments: list[str] | None = None
        """Of the running function; None for those of the script itself, which only its caller knows."""
        self.journals: list[dict[str, tuple[Value | None, int]]] = []
        """For each part that is read apart: the earlier values of what it sets, and the lines that set it."""
        self.warnings: dict[str, None] = {}
        self.line = 1
        self.in_test = False
        """Whether a variable that nobody sets is empty, as in a test, and not unknown, as in a command."""
        self.depth_of_expansion = self.characters = 0

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
            self.warn("the script sets IFS, but memlab still splits words at blanks")
        self.record(name)
        self.restore(name, value)

    def get(self, name: str) -> Value | None:
        """Returns a variable's value.

        Returns:
            None if nobody sets it; unknown if the shell sets it.
        """
        if name in self.given:
            self.used.add(name)
        if name in ("0", "BASH_SOURCE"):
            return str((self.script if name == "0" else self.path).absolute())
        if name in _SET_BY_THE_SHELL:
            return self.values.get(name, UNKNOWN)
        if name.isdigit() and self.arguments is not None:
            return _element(self.arguments, int(name) - 1)
        return self.values.get(name)

    def assign(self, word: Word) -> None:
        """Follows ``NAME=value``, ``NAME+=value``, ``NAME=(...)`` and ``NAME[index]=value``."""
        match = ASSIGNMENT.match(word.raw)
        assert match is not None
        name, adds = match[1], bool(match[3])
        old = self.get(name)
        if word.elements is not None:
            if any(re.match(rf"{_INDEX}=", element.raw) for element in word.elements):
                self.set(name, UNKNOWN)  # elements with keys
                return
            before = old if adds and old else []
            values = [before] if isinstance(before, str) else list(before)
            self.charge([], len(values))
            for element in word.elements:
                values += [element_of(text, element.line) for text in self.words(element)]
            self.set(name, values)
        elif match[2]:
            self._assign_element(word, match, old)
        else:
            value = self.one(after(word, match.end()))
            first = (old[0] if old else "") if isinstance(old, list) else old or ""
            if adds:
                self.charge([], len(first))
                value = first + value
            self.set(name, [value, *old[1:]] if isinstance(old, list) else value)

    def _assign_element(self, word: Word, match: re.Match[str], old: Value | None) -> None:
        name, values = match[1], list(old) if isinstance(old, list) else [] if old is None else [old]
        self.charge([], len(values))
        index = self.arithmetic(match[2][1:-1])
        if not index.isdecimal() or int(index) > len(values) or any(UNKNOWN in text for text in values):
            self.warn(
                f"memlab cannot follow how the script sets an element of {name}, so {name} is unknown from here on: "
                f"give it with --set {name}=VALUE"
            )
            self.set(name, UNKNOWN)
            return
        before = values[int(index)] if match[3] and int(index) < len(values) else ""
        values[int(index) : int(index) + 1] = [Element(before + self.one(after(word, match.end())), word.line)]
        self.set(name, values)

    def number(self, text: str) -> int | None:
        """Calculates a side of ``-eq`` in double brackets."""
        value = self.arithmetic(text or "0")
        return int(value) if value != UNKNOWN else None

    def is_set(self, name: str) -> bool:
        """Whether a variable has a value."""
        return self.get(name) is not None

    def pattern(self, word: Word) -> str:
        """Expands a word to a pattern, in which everything that was quoted stands for itself."""
        return "".join(
            text if kind in ("plain", "split") else glob.escape(text)
            for texts, kind in self._parts(word)
            for text in [" ".join(texts)]
        )

    def one(self, word: Word) -> str:
        """Expands a word to a single text."""
        return "".join([" ".join(texts) for texts, _ in self._parts(word)])

    def words(self, word: Word) -> list[str]:
        """Expands a word as the shell does: to none, one or several."""
        if word.keyword and (braces := _BRACES.search(word.keyword)):
            return self._alternatives(word, braces)
        done: list[list[str]] = [[]]
        is_quoted = is_pattern = False
        for texts, kind in self._parts(word):
            is_quoted = is_quoted or kind == "literal" or (kind == "array" and bool(texts))
            is_pattern = is_pattern or (kind == "plain" and bool(re.search(r"[*?]|\(", texts[0])))
            for index, text in enumerate(texts):
                if index:
                    done.append([])
                if kind == "split":
                    _append_split(done, text)
                else:
                    done[-1].append(text)
        found = [parts[0] if len(parts) == 1 else "".join(parts) for parts in done if parts]
        if is_quoted:
            return found
        if is_pattern and not self.in_test and not any("=" in text or text.startswith("-") for text in found):
            return [UNKNOWN_WORDS]  # names of files
        return [text if text.strip(UNKNOWN) else _unknown_words(text) for text in found if text]

    def _alternatives(self, word: Word, braces: re.Match[str]) -> list[str]:
        """Expands a word with ``{a,b}`` or ``{1..4}``."""
        if braces[1] is not None:
            choices: Iterable[str] = braces[1].split(",")
        else:
            ends = [int(end) for end in braces.groups()[1:]]
            step = 1 if ends[0] <= ends[1] else -1
            width = max(map(len, braces.groups()[1:])) if re.search(r"\b0\d", braces[0]) else 0
            choices = (f"{number:0{width}}" for number in range(ends[0], ends[1] + step, step))
        found = []
        for choice in choices:
            text = word.keyword[: braces.start()] + choice + word.keyword[braces.end() :]
            self.charge([text])
            found += self.words(Word(word.line, [Piece(text, "plain")]))
        return found

    def charge(self, texts: list[str], copied: int = 0) -> None:
        """Counts what the script makes, in characters.

        Args:
            texts: New ones.
            copied: Characters, or words of an array, that were there before.

        Raises:
            ValueError: If that is more than any real script makes.
        """
        self.characters += sum(map(len, texts)) + _CHARACTERS_OF_A_WORD * len(texts) + copied
        if self.characters > _MOST_CHARACTERS:
            raise ValueError(
                f"{self.path.name}, line {self.line}: the script expands to more than {_MOST_CHARACTERS:,} characters: "
                "give a log of the job or its resolved configuration"
            )

    def _parts(self, word: Word) -> Iterator[tuple[list[str], str]]:
        """Yields what the pieces of a word become: texts that are separate words, and a kind.

        That is the kind of a `Piece`, or ``array`` for the elements of one in double quotes.
        """
        for piece in word.pieces:
            self.charge([piece.text])
            if piece.kind in ("plain", "literal"):
                yield [piece.text], piece.kind
                continue
            is_quoted = piece.kind == "quoted"
            self.depth_of_expansion += 1
            value: Value | Word = UNKNOWN
            if self.depth_of_expansion <= _DEEPEST_EXPANSION:
                value = self._expansion(piece.text, is_quoted=is_quoted)
            if isinstance(value, Word):
                for texts, kind in self._parts(value):
                    yield texts, "split" if kind == "plain" else kind
            elif isinstance(value, str):
                self.charge([value])
                yield [value], "literal" if is_quoted else "split"
            else:
                self.charge(value)
                yield value, "array" if is_quoted else "split"
            self.depth_of_expansion -= 1

    def _operand(self, text: str, *, is_quoted: bool) -> Word:
        return operand(text, self.path.name, self.line, is_quoted=is_quoted)

    def _expansion(self, text: str, *, is_quoted: bool) -> Value | Word:
        """Expands ``$NAME``, ``${...}``, ``$((...))`` or ``$(...)``; a word is to be expanded in its place."""
        if text.startswith("$((") and text.endswith("))"):
            return self.arithmetic(text[3:-2])
        if text.startswith("$["):
            return self.arithmetic(text[2:-1])
        if text.startswith(("$(", "`")):
            return printed_path(text.removeprefix("$")[1:-1], self.path.name, self.line, self.one)
        match = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None or (match[6] and not match[5]):
            return UNKNOWN
        return self._parameter(match, is_quoted=is_quoted)

    def _parameter(self, match: re.Match[str], *, is_quoted: bool) -> Value | Word:
        counts, is_indirect, name, index, operator, rest = match.groups()
        is_whole = name in ("@", "*") or index in ("[@]", "[*]")
        value = self._value(name, (index or "")[1:-1], is_whole=is_whole)
        if is_indirect:
            is_name = isinstance(value, str) and NAME_ONLY.fullmatch(value) and not index
            value = self._value(str(value), "", is_whole=False) if is_name else UNKNOWN
        if counts:
            value = "" if value is None and self.in_test else value
            is_unknown = value is None or (UNKNOWN_WORDS if isinstance(value, list) else UNKNOWN) in value
            return UNKNOWN if operator or is_unknown else str(len(value or ""))
        if operator and operator.strip(":") in ("-", "=", "+", "?"):
            return self._or_default(name, value, operator, rest, is_quoted=is_quoted)
        if value is None:
            return "" if self.in_test and not name.isdigit() else UNKNOWN
        if operator:
            value = self._changed(value, operator, rest, counts_from_1=name in ("@", "*"))
        is_joined = is_quoted and (name == "*" or index == "[*]")
        return " ".join(value) if is_joined and isinstance(value, list) else value

    def _value(self, name: str, index: str, *, is_whole: bool) -> Value | None:
        """Returns a variable, one of its elements, or all of them as a list; None if nobody sets it."""
        if name in ("@", "*"):
            return [OwnArguments(UNKNOWN_WORDS, 0)] if self.arguments is None else list(self.arguments)
        if name == "#":
            known = self.arguments is not None and UNKNOWN_WORDS not in self.arguments
            return str(len(self.arguments or [])) if known else UNKNOWN
        if name in ("?", "$", "!", "-"):
            return UNKNOWN
        value = self.get(name)
        if not index:
            return _element(value, 0) if isinstance(value, list) else value
        if value == UNKNOWN:
            return [UNKNOWN_WORDS] if is_whole else UNKNOWN
        if name in self.given and is_whole:
            return self.given[name].split()
        values = [] if value is None else [value] if isinstance(value, str) else value
        if is_whole:
            return list(values)
        number = self.arithmetic(index)
        if not re.fullmatch(r"-?\d{1,6}", number) or int(number) < -len(values):
            return UNKNOWN
        return _element(values, int(number))

    def _or_default(self, name: str, value: Value | None, operator: str, rest: str, *, is_quoted: bool) -> Value | Word:
        is_set = bool(value) if operator[0] == ":" or isinstance(value, list) else value is not None
        if operator[-1] == "?" or (is_set and operator[-1] != "+"):
            return value if value is not None and is_set else UNKNOWN
        if is_set != (operator[-1] == "+"):
            return "" if isinstance(value, str) or value is None else []
        if operator == ":+" and isinstance(value, str) and not value.strip(UNKNOWN):
            return UNKNOWN
        default = self._operand(rest, is_quoted=is_quoted)
        if operator[-1] == "=" and NAME_ONLY.fullmatch(name):
            value = self.one(default)
            self.set(name, value)
            return value
        return default

    def _changed(self, value: Value, operator: str, rest: str, *, counts_from_1: bool) -> Value:
        """Returns a part of a value, or the value in other letters."""
        if UNKNOWN_WORDS in value or (isinstance(value, str) and UNKNOWN in value):
            return UNKNOWN_WORDS if isinstance(value, list) else UNKNOWN
        if operator == ":":
            numbers = [self.arithmetic(text) for text in rest.split(":")]
            if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
                return UNKNOWN
            start = int(numbers[0]) - counts_from_1
            end = start + int(numbers[1]) if len(numbers) > 1 else None
            return value[start:end] if start >= 0 else UNKNOWN
        if isinstance(value, list):
            return [str(self._changed(part, operator, rest, counts_from_1=False)) for part in value]
        if operator[0] in ",^":
            change = str.lower if operator[0] == "," else str.upper
            return UNKNOWN if rest else change(value) if len(operator) > 1 else change(value[:1]) + value[1:]
        if operator[0] == "/":
            old, _, new = rest.partition("/")
            old, new = (self.one(self._operand(text, is_quoted=True)) for text in (old, new))
            self.charge([], (value.count(old) if old else 0) * len(new))
            is_plain = old and not re.search(r"[*?\[#%\\]", old)
            return value.replace(old, new, -1 if len(operator) > 1 else 1) if is_plain else UNKNOWN
        return self._cut(value, operator, self.pattern(self._operand(rest, is_quoted=False)))

    def _cut(self, value: str, operator: str, pattern: str) -> str:
        """Cuts the shortest or longest match of a pattern off: at the start for ``#``, at the end for ``%``."""
        self.charge([], min(len(value), 1000) * (len(pattern) + len(value)) // 10)
        if len(value) > 1000:
            return UNKNOWN
        at_start = operator[0] == "#"
        places = range(len(value) + 1)
        for place in places if at_start == (len(operator) == 1) else reversed(places):
            cut, kept = (value[:place], value[place:]) if at_start else (value[place:], value[:place])
            result = matches(cut, pattern)
            if result is None:
                return UNKNOWN
            if result:
                return kept
        return value

    def calculated(self, text: str) -> bool | None:
        """Calculates ``((...))``, which is true if the result is not 0."""
        with self.testing():
            value = self.arithmetic(text)
        return None if value == UNKNOWN else value != "0"

    def arithmetic(self, text: str) -> str:
        """Calculates an expression, which may also set variables: to unknown, if memlab cannot follow it."""
        expression = self.one(self._operand(text, is_quoted=True))
        value = None if UNKNOWN in expression else calculated(expression, self._named, self.set)
        if value is None:
            for match in ASSIGNED.finditer(expression):
                self.set(match[1] or match[2], UNKNOWN)
        return UNKNOWN if value is None else str(value)

    def _named(self, name: str) -> str:
        """Returns a variable as a calculation reads it."""
        value = self.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, str) and value else "0" if self.in_test else UNKNOWN


def element_of(text: str, line: int) -> Element:
    """Returns a text with the line that it has already, else with this one."""
    if not isinstance(text, Element):
        return Element(text, line)
    return text if text.line else type(text)(text, line)


def is_assignment(word: Word) -> bool:
    """Whether a word sets a variable, where it stands before a command."""
    first = word.pieces[0] if word.pieces else None
    if first is None or first.kind != "plain" or not re.match(rf"{NAME}(\[|\+?=)", first.text):
        return False
    return ASSIGNMENT.match(word.raw) is not None


def after(word: Word, start: int) -> Word:
    """Returns what is left of a word after its first characters."""
    left = []
    for piece in word.pieces:
        if start < len(piece.text) or (not start and not piece.text):
            left.append(Piece(piece.text[start:], piece.kind) if start else piece)
        start = max(0, start - len(piece.text))
    return Word(word.line, left)


def _unknown_words(text: str) -> str:
    """Returns the mark for any number of words, with the line of an element."""
    return type(text)(UNKNOWN_WORDS, text.line) if isinstance(text, Element) else UNKNOWN_WORDS


def _element(values: list[str], index: int) -> str:
    """Returns an element of a list, or nothing after its end; unknown words before it make it unknown."""
    if UNKNOWN_WORDS in (values if index < 0 else values[: index + 1]):
        return UNKNOWN
    return values[index] if index < len(values) else ""


def _append_split(done: list[list[str]], text: str) -> None:
    """Appends an unquoted expansion, which the shell splits at blanks."""
    pieces = text.split()
    if text[:1].isspace() and done[-1]:
        done.append([])
    for index, piece in enumerate(pieces):
        if index:
            done.append([])
        done[-1].append(type(text)(piece, text.line) if isinstance(text, Element) else piece)
    if text[-1:].isspace() and pieces:
        done.append([])
