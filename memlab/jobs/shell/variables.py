"""The variables of a shell script that is followed, and what the shell makes of words with them.

A value that is known only when the job runs is `UNKNOWN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.shell import patterns
from memlab.jobs.shell.arithmetic import ASSIGNED, calculated
from memlab.jobs.shell.braces import without_braces
from memlab.jobs.shell.brackets import NAME
from memlab.jobs.shell.faults import Faults
from memlab.jobs.shell.parameters import INDEX, Parameter, parameter_of, split_at
from memlab.jobs.shell.words import NAME_ONLY, Piece, Word, operand

ASSIGNMENT = re.compile(rf"({NAME})({INDEX})?(\+?)=")
_KEY = re.compile(rf"({INDEX})(\+?)=")
_MOST_CHARACTERS = 2**21
_CHARACTERS_OF_A_WORD = 20
"""What a word takes beside its characters, in memory and time."""
_DEEPEST_EXPANSION = 10
_LARGEST_INDEX = 2**20
_CHANGING = {
    "BASHPID", "BASH_ARGC", "BASH_ARGV", "BASH_COMMAND", "BASH_LINENO", "BASH_SUBSHELL", "DIRSTACK", "EPOCHREALTIME",
    "EPOCHSECONDS", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "PIPESTATUS", "RANDOM", "SECONDS", "SRANDOM", "_",
}  # fmt: skip
"""Variables that the shell sets anew, whatever the script sets them to."""
_SET_BY_THE_SHELL = {
    "BASH", "BASHOPTS", "BASH_VERSINFO", "BASH_VERSION", "COLUMNS", "EUID", "HOME", "HOSTNAME", "HOSTTYPE", "LANG",
    "LC_ALL", "LINES", "LOGNAME", "MACHTYPE", "OLDPWD", "OPTERR", "OSTYPE", "PATH", "PPID", "PS4", "PWD", "SHELL",
    "SHELLOPTS", "SHLVL", "TERM", "TMPDIR", "UID", "USER",
}  # fmt: skip
_SET_BY_SLURM = "SLURM_"
_SPACE = " \t\n"
_PATTERN = re.compile(r"[*?]|\(")
"""What makes a word that is not quoted a pattern for files."""
_NO_FILE = re.compile(
    r"-.*|.*=.*|[\[(][\[\]()\d*+,]*[\])\d]|(?=[^M]*M[^M]*M)[-*EM|/]{4,}",
    re.DOTALL,
)
"""A pattern that stands for itself, since no file has such a name: a flag, an assignment, a list of numbers such as the
``[0]*3+[1]*45`` of ``--moe-layer-freq``, or the kinds of a hybrid model's layers, such as ``M-M*-M``; launch scripts
write the last two without quotes."""


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


@dataclass(frozen=True, slots=True)
class Array:
    """The elements of an array; it is copied, not changed."""

    elements: dict[int | str, str] = field(default_factory=dict)
    is_map: bool = False
    """Whether the keys are texts (``declare -A``)."""

    def texts(self) -> list[str]:
        """Returns the elements in order; those of a map, whose order bash does not define, are unknown."""
        if self.is_map and len(self.elements) > 1:
            return [UNKNOWN_WORDS]
        return [self.elements[key] for key in self._keys()]

    def keys(self) -> list[str]:
        """Returns the indexes, as ``${!NAME[@]}`` has them."""
        if (self.is_map and len(self.elements) > 1) or UNKNOWN_WORDS in self.elements.values():
            return [UNKNOWN_WORDS]
        return [str(key) for key in self._keys()]

    def _keys(self) -> list[int | str]:
        return list(self.elements) if self.is_map else sorted(self.elements, key=int)

    @property
    def end(self) -> int:
        """The index after the last one."""
        return max(map(int, self.elements), default=-1) + 1

    def at(self, key: int | str) -> str | None:
        """Returns an element, None if there is none; unknown if words of unknown number stand before it."""
        if not self.is_map:
            key = int(key)
            start = -1 if key < 0 else key
            key = self.end + key if key < 0 else key
            if any(text == UNKNOWN_WORDS and (start < 0 or int(at) <= key) for at, text in self.elements.items()):
                return UNKNOWN
        return self.elements.get(key)


def array_of(texts: Iterable[str]) -> Array:
    """Returns an array with these elements, from index 0 on."""
    return Array(dict(enumerate(texts)))


Value = str | Array


@dataclass(frozen=True, slots=True)
class Variable:
    """What a script has made of a name."""

    value: Value | None = None
    """None if the script unset it, so that it has no value in any case."""
    attributes: str = ""
    """Letters of ``declare``: ``i`` calculates, ``l`` and ``u`` change letters, ``n`` names another variable."""


class _Fields:
    """The words that one word becomes, while its pieces are expanded."""

    def __init__(self, separators: str) -> None:
        self.separators = separators
        self.words: list[list[str]] = [[]]
        self.is_quoted = [False]
        """For each word, whether it stays although it is empty."""
        self.is_pattern = [False]
        """For each word, whether the shell looks for files that match it."""

    def start(self) -> None:
        self.words.append([])
        self.is_quoted.append(False)
        self.is_pattern.append(False)

    def add(self, text: str, *, is_quoted: bool) -> None:
        if text or is_quoted:
            self.words[-1].append(text)
        self.is_quoted[-1] |= is_quoted
        self.is_pattern[-1] |= not is_quoted and _PATTERN.search(text) is not None

    def split(self, text: str) -> None:
        """Adds an unquoted expansion, which the shell splits at the characters of IFS."""
        if not text.strip(UNKNOWN) or not self.separators:
            self.add(text, is_quoted=False)
            return
        position = 0
        for match in re.finditer(self._between(), text):
            self._add_part(text, position, match.start())
            if match.start() or match[0].strip(self._blanks()) or self.words[-1]:
                self.is_quoted[-1] |= bool(match[0].strip(self._blanks()))
                self.start()
            position = match.end()
        self._add_part(text, position, len(text))

    def _add_part(self, text: str, start: int, end: int) -> None:
        if start < end:
            part = text[start:end]
            self.is_pattern[-1] |= "*" in part or "?" in part
            self.words[-1].append(type(text)(part, text.line) if isinstance(text, Element) else part)

    def _blanks(self) -> str:
        return "".join(sign for sign in self.separators if sign in _SPACE)

    def _between(self) -> str:
        blanks, others = self._blanks(), "".join(sign for sign in self.separators if sign not in _SPACE)
        blank = f"[{re.escape(blanks)}]" if blanks else "(?!)"
        return f"{blank}*[{re.escape(others)}]{blank}*|{blank}+" if others else f"{blank}+"

    def done(self, *, finds_files: bool) -> list[str]:
        """Returns the words; those that stand for files of the job's machine are unknown."""
        found = []
        for parts, is_quoted, is_pattern in zip(self.words, self.is_quoted, self.is_pattern, strict=True):
            text = parts[0] if len(parts) == 1 else "".join(parts)
            if is_pattern and finds_files and not _NO_FILE.fullmatch(text):
                found.append(_unknown_words(text))
            elif text or is_quoted:
                found.append(text if is_quoted or text.strip(UNKNOWN) else _unknown_words(text))
        return found


class Variables:
    """The variables of a script at one moment of it."""

    def __init__(self, given: dict[str, str], path: Path, arguments: list[str] | None) -> None:
        self.given, self.path, self.script = given, path, path
        self.variables: dict[str, Variable] = {name: Variable(text) for name, text in given.items()}
        self.variables |= {"IFS": Variable(_SPACE), "OPTIND": Variable("1")}
        self.exported: set[str] = set()
        """What the script has exported; bash hands no other of its variables to a program."""
        self.used: set[str] = set()
        """Given variables that the script reads or sets."""
        self.arguments = arguments
        """Of the running function; None for those of the script itself, if they are not given."""
        self.faults = Faults()
        self.journals: list[dict[str, tuple[Variable | None, int]]] = []
        """For each part that is read apart: the earlier values of what it sets, and the lines that set it."""
        self.num_shifted = 0
        """By how much the script has shifted arguments that memlab does not know."""
        self.line = 1
        self.options: set[str] = set()
        """What ``shopt -s`` and ``set -o`` switch on."""
        self.code = "0"
        """The exit code of the last command, ``$?``."""
        self.is_certain = True
        """Whether the running command is one that the script runs in any case."""
        self.counts_arguments = False
        """Whether the script asks how many arguments it is started with, which memlab does not know."""
        self.in_test = False
        """Whether a variable that nobody sets is empty, as in a test, and not unknown, as in a command."""
        self.depth_of_expansion = self.characters = 0

    def warn(self, text: str, line: int | None = None) -> None:
        """Adds a warning, once, about a line; None takes the line of the running command."""
        self.faults.warn(self.line if line is None else line, text)

    def stops_without(self, name: str) -> None:
        """Notes that ``${NAME:?}``, or ``$NAME`` after ``set -u``, ends the script here: nobody sets the variable."""
        raise NotImplementedError

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Makes what nobody sets empty, as in a test."""
        outer, self.in_test = self.in_test, True
        yield
        self.in_test = outer

    def printed(self, text: str) -> str:
        """Returns what the commands of ``$(...)`` print, unknown where memlab cannot tell."""
        raise NotImplementedError

    # Values

    def chosen(self, name: str, value: str) -> str:
        """Returns what was given for a variable that the script sets, else the script's value."""
        if name not in self.given:
            return value
        self.used.add(name)
        return self.given[name]

    def named(self, name: str) -> str:
        """Returns the variable that a name stands for, which ``declare -n`` may have made another one."""
        for _ in range(_DEEPEST_EXPANSION):
            variable = self.variables.get(name)
            if variable is None or "n" not in variable.attributes or not isinstance(variable.value, str):
                return name
            if not NAME_ONLY.fullmatch(variable.value) or variable.value == name:
                break
            name = variable.value
        self.warn(f"memlab cannot follow which variable {name} stands for (declare -n), so {name} is unknown")
        return ""

    def record(self, name: str) -> None:
        """Keeps a variable for the end of the part that is read apart."""
        if self.journals:
            self.journals[-1].setdefault(name, (self.variables.get(name), self.line))

    def restore(self, name: str, old: Variable | None) -> None:
        """Gives a variable back what it was; None if the script had not made anything of it."""
        if old is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = old

    def put(self, name: str, variable: Variable) -> None:
        """Replaces a variable, unless its value was given."""
        if name in self.given:
            self.used.add(name)
            return
        if name and name not in _CHANGING:
            self.record(name)
            self.variables[name] = variable
            if "allexport" in self.options:
                self.exported.add(name)

    def set(self, name: str, value: Value | None) -> None:
        """Gives a variable another value, as its attributes say; None unsets it."""
        name = self.named(name)
        old = self.variables.get(name)
        if value is None or old is None:
            self.put(name, Variable(value))
            return
        if "r" in old.attributes:
            self.warn(f"the script sets {name}, which it made readonly, and memlab keeps the earlier value")
            return
        if isinstance(value, str):
            value = self._as_declared(value, old.attributes)
            if isinstance(old.value, Array) and UNKNOWN_WORDS in old.value.elements.values():
                value = array_of([UNKNOWN_WORDS])
            elif isinstance(old.value, Array):
                value = Array({**old.value.elements, ("0" if old.value.is_map else 0): value}, old.value.is_map)
        else:
            elements = {key: self._as_declared(text, old.attributes) for key, text in value.elements.items()}
            value = replace(value, elements=elements)
        self.put(name, Variable(value, old.attributes))

    def _as_declared(self, text: str, attributes: str) -> str:
        if "i" in attributes:
            text = self.arithmetic(text, expands=False)
        change = str.lower if "l" in attributes else str.upper if "u" in attributes else None
        return text if change is None else change(text)

    def get(self, name: str) -> Value | None:
        """Returns a variable's value.

        Returns:
            None if nobody sets it; unknown if the shell sets it.
        """
        if name in self.given:
            self.used.add(name)
        if name in ("0", "BASH_SOURCE"):
            return str((self.script if name == "0" else self.path).absolute())
        if name in _CHANGING:
            return UNKNOWN
        if name.isdigit():
            return self._argument(int(name))
        name = self.named(name)
        if name and name not in self.variables:
            return UNKNOWN if name in _SET_BY_THE_SHELL else None
        return self.variables[name].value if name else UNKNOWN

    def _argument(self, number: int) -> str | None:
        if self.arguments is None:
            return None
        return array_of(self.arguments).at(number - 1)

    def is_absent(self, name: str) -> bool:
        """Whether a variable has no value in any case: the script unset it, or its argument was not given."""
        if name.isdigit():
            return self.arguments is not None
        return name in self.variables

    def separators(self) -> str:
        """Returns the characters of IFS; unknown as a whole if the script sets it to what memlab does not know."""
        variable = self.variables.get("IFS")
        value = _SPACE if variable is None or variable.value is None else variable.value
        return value if isinstance(value, str) else UNKNOWN

    # Assignments

    def assign(self, word: Word) -> None:
        """Follows ``NAME=value``, ``NAME+=value``, ``NAME=(...)`` and ``NAME[index]=value``."""
        match = ASSIGNMENT.match(word.raw)
        assert match is not None
        name, adds = match[1], bool(match[3])
        old = self.get(name)
        if word.elements is not None:
            self._assign_elements(name, word.elements, old, adds=adds)
        elif match[2]:
            start = len(name) + 1
            index = before(after(word, start), len(match[2]) - 2)
            self._assign_element(name, index, self.one(after(word, match.end())), word.line, adds=adds)
        else:
            value = self.one(after(word, match.end()))
            if adds and "i" in self._attributes(name):
                value = f"({self._first(old)})+({value})"
            elif adds:
                self.charge([], len(self._first(old)))
                value = self._first(old) + value
            self.set(name, value)

    def _attributes(self, name: str) -> str:
        variable = self.variables.get(self.named(name))
        return "" if variable is None else variable.attributes

    def _first(self, value: Value | None) -> str:
        return (value.at("0" if value.is_map else 0) or "") if isinstance(value, Array) else value or ""

    def _assign_elements(self, name: str, words: list[Word], old: Value | None, *, adds: bool) -> None:
        is_map = (isinstance(old, Array) and old.is_map) or "A" in self._attributes(name)
        found = Array({}, is_map)
        if adds and old is not None:
            found = replace(old) if isinstance(old, Array) else array_of([old])
        elements, place = dict(found.elements), 0 if is_map else found.end
        self.charge([], len(elements))
        for word in words:
            match = _KEY.match(word.raw) if word.pieces and word.pieces[0].text.startswith("[") else None
            if match is None and (is_map or re.match(r"\[[^\]]*$", word.raw)):
                self._lose_element(name)
                return
            if match is None:
                for text in self.words(word):
                    elements[place] = element_of(text, word.line)
                    place += 1
                continue
            key = self._key(before(after(word, 1), len(match[1]) - 2), found)
            if key is None:
                self._lose_element(name)
                return
            text = self.one(after(word, match.end()))
            elements[key] = Element((elements.get(key, "") if match[2] else "") + text, word.line)
            place = 0 if isinstance(key, str) else key + 1
        self.set(name, Array(elements, is_map))

    def _key(self, word: Word, of: Array) -> int | str | None:
        """Returns the key that the text in brackets names; None if memlab does not know it."""
        if of.is_map:
            text = self.one(word)
            return None if UNKNOWN in text or not text else text  # bash refuses an empty key
        number = self.arithmetic(word.raw)
        if not re.fullmatch(r"-?\d{1,7}", number):
            return None
        key = int(number) if int(number) >= 0 else of.end + int(number)
        return key if 0 <= key < _LARGEST_INDEX else None

    def _assign_element(self, name: str, index: Word, text: str, line: int, *, adds: bool) -> None:
        old = self.get(name)
        array = old if isinstance(old, Array) else array_of([old] if old else [])
        self.charge([], len(array.elements))
        key = None if old == UNKNOWN or UNKNOWN_WORDS in array.elements.values() else self._key(index, array)
        if key is None:
            self._lose_element(name)
            return
        text = (array.elements.get(key, "") if adds else "") + text
        self.set(name, Array({**array.elements, key: Element(text, line)}, array.is_map))

    def _lose_element(self, name: str) -> None:
        self.warn(
            f"memlab cannot follow how the script sets an element of {name}, so {name} is unknown from here on: "
            f"give it with --set {name}=VALUE"
        )
        self.put(self.named(name), Variable(array_of([UNKNOWN_WORDS])))

    def unset(self, text: str) -> None:
        """Follows ``unset NAME`` and ``unset NAME[index]``."""
        if NAME_ONLY.fullmatch(text):
            self.put(self.named(text), Variable())
            self.exported.discard(self.named(text))
            return
        name, _, index = text.partition("[")
        old = self.get(name)
        if not NAME_ONLY.fullmatch(name) or old is None:
            return
        array = old if isinstance(old, Array) else Array()
        is_known = isinstance(old, Array) and UNKNOWN_WORDS not in array.elements.values()
        key = self._key(Word(self.line, [Piece(index[:-1], "literal")]), array) if is_known else None
        if key is None:
            self._lose_element(name)
            return
        self.set(name, replace(array, elements={at: each for at, each in array.elements.items() if at != key}))

    def is_set(self, name: str) -> bool | None:
        """Whether a variable or an element has a value; None if memlab cannot tell."""
        name, _, index = name.partition("[")
        value = self._value(name, index[:-1] or None)
        if isinstance(value, Array):
            return None if UNKNOWN_WORDS in value.elements.values() else bool(value.elements)
        return None if index and value is not None and UNKNOWN in value else value is not None

    # Words

    def number(self, text: str) -> int | None:
        """Calculates a side of ``-eq`` in double brackets."""
        value = self.arithmetic(text, expands=False)
        return int(value) if value != UNKNOWN else None

    def pattern(self, word: Word) -> str:
        """Expands a word to a pattern, in which a backslash stands before everything that was quoted."""
        return "".join(
            text if kind in ("plain", "split") else patterns.escaped(text)
            for texts, kind in self._parts(word)
            for text in [" ".join(texts)]
        )

    def one(self, word: Word) -> str:
        """Expands a word to a single text."""
        parts = [self._joined(texts) for texts, _ in self._parts(word)]
        return parts[0] if len(parts) == 1 else "".join(parts)

    def _joined(self, texts: list[str]) -> str:
        if not isinstance(texts, _Star):
            return texts[0] if len(texts) == 1 else " ".join(texts)
        separators = self.separators()
        return UNKNOWN if UNKNOWN in separators and len(texts) > 1 else separators[:1].join(texts)

    def words(self, word: Word) -> list[str]:
        """Expands a word as the shell does: to none, one or several."""
        return [text for each in without_braces(word, self.charge) for text in self._words(each)]

    def fields_of(self, text: str) -> list[str]:
        """Splits a text at the characters of IFS."""
        fields = _Fields(self.separators())
        fields.split(text)
        return fields.done(finds_files=False)

    def _words(self, word: Word) -> list[str]:
        separators = self.separators()
        fields = _Fields(separators)
        for texts, kind in self._parts(word):
            for index, text in enumerate(texts):
                if index:
                    fields.start()
                if kind == "split":
                    fields.split(UNKNOWN if UNKNOWN in separators and text else text)
                else:
                    fields.add(text, is_quoted=kind in ("literal", "array"))
        return fields.done(finds_files=not self.in_test and "noglob" not in self.options)

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
                f"{self.path.name}, line {self.line:d}: the script expands to more than {_MOST_CHARACTERS:,} "
                "characters: give a log of the job or its resolved configuration"
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
            value: str | list[str] | Word = UNKNOWN
            if self.depth_of_expansion <= _DEEPEST_EXPANSION and piece.kind != "process":
                value = self._expansion(piece.text, is_quoted=is_quoted)
            if isinstance(value, Word):
                for texts, kind in self._parts(value):
                    yield texts, "split" if kind == "plain" else kind
            elif isinstance(value, str):
                self.charge([value])
                yield [value], "literal" if is_quoted or piece.kind == "process" else "split"
            else:
                self.charge(value)
                if isinstance(value, _Star) and is_quoted:
                    yield [self._joined(value)], "literal"
                else:
                    yield value, "array" if is_quoted else "split"
            self.depth_of_expansion -= 1

    def _operand(self, text: str, *, is_quoted: bool) -> Word:
        return operand(text, self.path.name, self.line, is_quoted=is_quoted)

    def _expansion(self, text: str, *, is_quoted: bool) -> str | list[str] | Word:
        """Expands ``$NAME``, ``${...}``, ``$((...))`` or ``$(...)``; a word is to be expanded in its place."""
        if text.startswith("$((") and text.endswith("))"):
            return self.arithmetic(text[3:-2])
        if text.startswith("$["):
            return self.arithmetic(text[2:-1])
        if text.startswith("$("):
            return self.printed(text[2:-1])
        if text.startswith("`"):
            return self.printed(re.sub(r"\\([$`\\])", r"\1", text[1:-1]))
        parameter = parameter_of(text)
        if parameter is None:
            return [UNKNOWN_WORDS] if text.endswith("@}") else UNKNOWN
        return self._parameter(parameter, is_quoted=is_quoted)

    def _parameter(self, asked: Parameter, *, is_quoted: bool) -> str | list[str] | Word:
        if asked.is_indirect:
            target = self._target(asked)
            if not isinstance(target, Parameter):
                return target
            asked = target
        value = self._value(asked.name, asked.index)
        if asked.counts:
            return self._length(asked, value)
        if asked.operator.strip(":") in ("-", "=", "+", "?") and asked.operator not in ("", ":"):
            return self._or_default(asked, value, is_quoted=is_quoted)
        if value is None:
            if asked.name.isdigit() and self.arguments is None and not self.in_test:
                self._note_argument(asked.name)
            else:
                self._note_unset(asked.name)
            is_known = asked.index is not None or self.is_absent(self.named(asked.name) or asked.name)
            return "" if is_known or (self.in_test and not asked.name.isdigit()) else UNKNOWN
        if asked.operator == ":":
            value = self._slice(asked, value)
        elif asked.operator:
            change = self._change(asked, is_quoted=is_quoted)
            texts = value.texts() if isinstance(value, Array) else value
            value = change(texts) if isinstance(texts, str) else array_of(map(change, texts))
        return value if isinstance(value, str) else self._fields(asked, value.texts())

    def _fields(self, asked: Parameter, texts: list[str]) -> list[str]:
        return _Star(texts) if asked.is_star else texts

    def _target(self, asked: Parameter) -> Parameter | str | list[str]:
        """Returns what ``${!NAME}`` asks for instead, or the text itself: a name, or the indexes of an array."""
        name = asked.name
        if asked.is_whole and asked.index is not None:
            value = self.get(name)
            keys = value.keys() if isinstance(value, Array) else [UNKNOWN_WORDS] if value == UNKNOWN else ["0"]
            return self._fields(asked, [] if value is None else keys)
        variable = self.variables.get(name)
        if variable is not None and "n" in variable.attributes:
            return str(variable.value)
        value = self._value(name, asked.index)
        if isinstance(value, str) and (match := re.fullmatch(rf"({NAME}|\d+|[@*])(?:\[([^\[\]]+)\])?", value)):
            return replace(asked, name=match[1], index=match[2], is_indirect=False)
        return UNKNOWN

    def _length(self, asked: Parameter, value: Value | None) -> str:
        if value is None:
            self._note_unset(asked.name)
        if value is None and (self.in_test or asked.index is not None or self.is_absent(asked.name)):
            return "0"
        if isinstance(value, Array):
            is_unknown = UNKNOWN_WORDS in value.elements.values()
            return UNKNOWN if is_unknown else str(len(value.elements))
        return UNKNOWN if value is None or UNKNOWN in value else str(len(value))

    def _value(self, name: str, index: str | None) -> Value | None:
        """Returns a variable, one of its elements, or all of them; None if nobody sets it."""
        if name in ("@", "*"):
            return array_of([OwnArguments(UNKNOWN_WORDS, 0)] if self.arguments is None else self.arguments)
        if name == "#":
            known = self.arguments is not None and UNKNOWN_WORDS not in self.arguments
            self.counts_arguments |= self.arguments is None
            return str(len(self.arguments or [])) if known else UNKNOWN
        if name in ("?", "$", "!", "-"):
            return self.code if name == "?" else UNKNOWN
        value = self.get(name)
        if index is None:
            return self._first_of(value) if isinstance(value, Array) else value
        if value == UNKNOWN:
            return array_of([UNKNOWN_WORDS]) if index in ("@", "*") else UNKNOWN
        if name in self.given and index in ("@", "*"):
            return array_of(self.given[name].split())
        array = value if isinstance(value, Array) else Array() if value is None else array_of([value])
        if index not in ("@", "*"):
            return self._element(array, index)
        may_be_set = value is None and self.faults.lacks_files and not self.is_absent(name)
        return array_of([UNKNOWN_WORDS]) if may_be_set else array

    def _element(self, array: Array, index: str) -> str | None:
        if array.is_map:
            key = self.one(self._operand(index, is_quoted=False))
            return UNKNOWN if UNKNOWN in key else array.at(key)
        number = self.arithmetic(index)
        if not re.fullmatch(r"-?\d{1,7}", number) or int(number) < -array.end:
            return UNKNOWN if number == UNKNOWN or array.elements else None
        return array.at(int(number))

    def _first_of(self, array: Array) -> str | None:
        return array.at("0" if array.is_map else 0)

    def _or_default(self, asked: Parameter, value: Value | None, *, is_quoted: bool) -> str | list[str] | Word:
        operator = asked.operator
        texts = value.texts() if isinstance(value, Array) else value
        if isinstance(texts, list):
            is_set: bool | None = bool(texts) if operator[0] != ":" else len(texts) > 1 or bool(texts and texts[0])
            is_open = UNKNOWN_WORDS in texts and set(texts) <= {UNKNOWN_WORDS, ""}
        else:
            is_set = bool(texts) if operator[0] == ":" else texts is not None
            is_open = operator[0] == ":" and texts is not None and bool(texts) and not texts.strip(UNKNOWN)
        if is_open and isinstance(texts, str) and operator[-1] != "+":
            return texts
        if is_open and operator[-1] == "+":
            return UNKNOWN if isinstance(texts, str) or is_quoted else UNKNOWN_WORDS
        if operator[-1] == "?" and not is_set:
            self._note_stop(asked.name)
        if operator[-1] == "?" or (is_set and operator[-1] != "+"):
            result = texts if texts is not None and is_set else UNKNOWN
            return self._fields(asked, result) if isinstance(result, list) else result
        if is_set != (operator[-1] == "+"):
            return [] if isinstance(texts, list) else ""
        default = self._operand(asked.operand, is_quoted=is_quoted)
        if operator[-1] != "=":
            return default
        if not NAME_ONLY.fullmatch(asked.name) or asked.index is not None:
            return UNKNOWN
        text = self.one(default)
        self.set(asked.name, text)
        return text

    def _note_stop(self, name: str) -> None:
        """Notes that the script ends here unless a variable or one of its own arguments is given."""
        if name.isdigit() and self.arguments is None:
            self._note_argument(name)
        elif NAME_ONLY.fullmatch(name):
            self.stops_without(name)

    def _note_argument(self, name: str) -> None:
        """Notes that the script needs an argument; one that it reads only if there are any is not needed."""
        if self.is_certain or not self.counts_arguments:
            self.faults.arguments_read.setdefault(f"${int(name) + self.num_shifted}", self.line)

    def _note_unset(self, name: str) -> None:
        """Notes that after ``set -u`` the script ends at a variable that nobody sets."""
        if "nounset" in self.options and not self.faults.may_set_any and not name.startswith(_SET_BY_SLURM):
            self._note_stop(name)

    def _slice(self, asked: Parameter, value: Value) -> Value:
        first, second = split_at(asked.operand, ":")
        start, length = self.arithmetic(first), None if second is None else self.arithmetic(second)
        if UNKNOWN in start or (length is not None and UNKNOWN in length):
            return UNKNOWN if isinstance(value, str) else array_of([UNKNOWN_WORDS])
        offset, size = int(start), None if length is None else int(length)
        if isinstance(value, str):
            if UNKNOWN in value:
                return UNKNOWN
            offset = offset if offset >= 0 else len(value) + offset
            end = len(value) if size is None else offset + size if size >= 0 else len(value) + size
            return "" if offset < 0 else value[offset:end] if end >= offset else UNKNOWN
        if UNKNOWN_WORDS in value.elements.values() or value.is_map or (size is not None and size < 0):
            return array_of([UNKNOWN_WORDS])
        if asked.index is None:  # of the arguments, of which $0 is the first
            value = Array({0: str(self.get("0")), **{int(key) + 1: text for key, text in value.elements.items()}})
        offset = offset if offset >= 0 else value.end + offset
        texts = [value.elements[key] for key in sorted(value.elements, key=int) if int(key) >= offset]
        return array_of([] if offset < 0 else texts[:size])

    def _change(self, asked: Parameter, *, is_quoted: bool) -> Callable[[str], str]:
        """Returns what an operator makes of a text."""
        operator, rest = asked.operator, asked.operand

        def changed(text: str) -> str:
            if UNKNOWN in text:
                return UNKNOWN_WORDS if text == UNKNOWN_WORDS else UNKNOWN
            return change(text)

        if operator[0] in ",^":
            change = self._with_other_letters(operator, rest)
        elif operator[0] == "/":
            change = self._replacing(operator, rest, is_quoted=is_quoted)
        elif operator == "@":
            change = {"Q": _quoted, "U": str.upper, "L": str.lower, "u": _capital}.get(rest, lambda _: UNKNOWN)
        else:
            pattern = self._compiled(self._operand(rest, is_quoted=False))
            change = lambda text: self._cut(text, operator, pattern)  # noqa: E731
        return changed

    def _compiled(self, word: Word) -> re.Pattern[str] | None:
        text = self.pattern(word)
        return None if UNKNOWN in text else patterns.pattern_of(text, is_extended="extglob" in self.options)

    def _with_other_letters(self, operator: str, rest: str) -> Callable[[str], str]:
        pattern = self._compiled(self._operand(rest or "?", is_quoted=False))
        letters = str.lower if operator[0] == "," else str.upper

        def change(text: str) -> str:
            if pattern is None:
                return UNKNOWN
            last = len(text) if len(operator) > 1 else 1
            return "".join(letters(sign) if pattern.fullmatch(sign) else sign for sign in text[:last]) + text[last:]

        return change

    def _replacing(self, operator: str, rest: str, *, is_quoted: bool) -> Callable[[str], str]:
        at = rest[:1] if operator == "/" and rest[:1] in ("#", "%") else ""
        old, new = split_at(rest[len(at) :], "/")
        word = self._operand(new or "", is_quoted=is_quoted)
        # Bash 5.2 puts what was matched in the place of an ampersand, earlier versions do not.
        unclear = "&" in (new or "") or (is_quoted and re.search(r"[\"'\\]", new or "") is not None)
        text_of_new = UNKNOWN if unclear else self.one(word)
        pattern = self._compiled(self._operand(old, is_quoted=False))

        def change(text: str) -> str:
            if not old and not at:
                return text
            if pattern is None or "(?:" in pattern.pattern or UNKNOWN in text_of_new or len(text) > 2000:
                return UNKNOWN
            self.charge([], len(text) * (1 + len(text_of_new)) // 10)
            if at == "#":
                ends = (end for end in range(len(text), -1, -1) if pattern.fullmatch(text, 0, end))
                end = next(ends, None)
                return text if end is None else text_of_new + text[end:]
            if at == "%":
                start = next((start for start in range(len(text) + 1) if pattern.fullmatch(text, start)), None)
                return text if start is None else text[:start] + text_of_new
            if not text:
                return text_of_new if pattern.fullmatch("") else text
            found = [match for match in pattern.finditer(text) if match[0]]
            for match in reversed(found if len(operator) > 1 else found[:1]):
                text = text[: match.start()] + text_of_new + text[match.end() :]
            self.charge([text])
            return text

        return change

    def _cut(self, value: str, operator: str, pattern: re.Pattern[str] | None) -> str:
        """Cuts the shortest or longest match of a pattern off: at the start for ``#``, at the end for ``%``."""
        if pattern is None or len(value) > 1000:
            return UNKNOWN
        self.charge([], len(value) * (len(pattern.pattern) + len(value)) // 10)
        at_start = operator[0] == "#"
        places = range(len(value) + 1)
        for place in places if at_start == (len(operator) == 1) else reversed(places):
            cut, kept = (value[:place], value[place:]) if at_start else (value[place:], value[:place])
            result = patterns.matches(cut, pattern)
            if result is None:
                return UNKNOWN
            if result:
                return kept
        return value

    # Calculations

    def calculated(self, text: str, *, expands: bool = True) -> bool | None:
        """Calculates ``((...))`` or, without another expansion, ``let``: true if the result is not 0."""
        with self.testing():
            value = self.arithmetic(text, expands=expands)
        return None if value == UNKNOWN else value != "0"

    def arithmetic(self, text: str, *, expands: bool = True) -> str:
        """Calculates an expression, which may also set variables: to unknown, if memlab cannot follow it.

        Args:
            expands: Whether ``$NAME`` and the like stand in it, as in ``$((...))``.
        """
        expression = self.one(self._operand(text, is_quoted=True)) if expands else text
        value = None if UNKNOWN in expression else calculated(expression, self._operand_of, self._set_by_calculation)
        if value is None:
            for match in ASSIGNED.finditer(expression):
                self.put(self.named(match[1] or match[2]), Variable(UNKNOWN))
        return UNKNOWN if value is None else str(value)

    def _operand_of(self, name: str, index: str) -> str | None:
        """Returns a variable as a calculation reads it."""
        value = self._value(name, index[1:-1] or None)
        if value is None:
            self._note_unset(name)
        if isinstance(value, Array) or (value is None and not self.in_test and not self.is_absent(name)):
            return None
        return None if value is not None and UNKNOWN in value else value or ""

    def _set_by_calculation(self, name: str, index: str, text: str) -> None:
        if index:
            self._assign_element(name, Word(self.line, [Piece(index[1:-1], "literal")]), text, self.line, adds=False)
        else:
            self.set(name, text)


class _Star(list[str]):
    """The elements of ``*``, which IFS joins in double quotes and in assignments."""


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


def before(word: Word, end: int) -> Word:
    """Returns the first characters of a word."""
    found = []
    for piece in word.pieces:
        if end > 0:
            found.append(Piece(piece.text[:end], piece.kind))
        end -= len(piece.text)
    return Word(word.line, found)


def _unknown_words(text: str) -> str:
    """Returns the mark for any number of words, with the line of an element."""
    return type(text)(UNKNOWN_WORDS, text.line) if isinstance(text, Element) else UNKNOWN_WORDS


def _quoted(text: str) -> str:
    """Returns a text as ``${NAME@Q}`` quotes it."""
    if not text.isprintable():
        return UNKNOWN
    return "'" + text.replace("'", "'\\''") + "'"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
