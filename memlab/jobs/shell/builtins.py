"""The builtins of a shell that only read and set variables, arguments and options, or print."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.shell.braces import without_braces
from memlab.jobs.shell.printing import echoed, formatted
from memlab.jobs.shell.variables import ASSIGNMENT, Array, Value, Variable, Variables, after, array_of
from memlab.jobs.shell.words import NAME_ONLY, Piece, Word

_OPTIONS_OF_SET = {"a": "allexport", "e": "errexit", "u": "nounset", "f": "noglob"}
_OPTIONS_OF_READ = "adinNptu"
"""Options of ``read`` that have a value."""


@dataclass(slots=True)
class Input:
    """A text that commands read line after line; unknown from where `UNKNOWN` stands in it."""

    text: str
    position: int = 0

    def line(self, end: str = "\n") -> tuple[str, bool]:
        """Takes the next line, and says whether it was complete."""
        place = self.text.find(end, self.position) if end else -1
        found = self.text[self.position : place if place >= 0 else None]
        if UNKNOWN in found:
            return UNKNOWN, False
        self.position = place + 1 if place >= 0 else len(self.text)
        return found, place >= 0

    def rest(self) -> str:
        """Takes all that is left."""
        found, self.position = self.text[self.position :], len(self.text)
        return found


class Builtins(Variables):
    """Variables, and the builtins that concern nothing else."""

    input: Input | None = None
    """What commands read; None for the input of the script itself, which memlab does not know."""
    output: list[str] | None = None
    """Where commands print to; None where nothing reads it."""
    option_place = 1
    """Where in a word such as ``-ab`` the next option of ``getopts`` stands."""
    hidden: list[dict[str, Variable | None]]
    """For each function that is running, what its local variables hide."""

    def print_out(self, text: str) -> None:
        """Prints a text to where the commands that are followed print."""
        if self.output is not None:
            self.charge([text])
            self.output.append(text)

    def echo(self, arguments: list[str]) -> bool | None:
        """Follows ``echo``."""
        self.print_out(echoed(arguments))
        return True

    def printf(self, arguments: list[str]) -> bool | None:
        """Follows ``printf``, with ``-v NAME`` into a variable."""
        if arguments[:1] == ["-v"] and len(arguments) > 2:
            self._fill(arguments[1], formatted(arguments[2:]))
            return True
        self.print_out(formatted(arguments[arguments[:1] == ["--"] :]))
        return True

    def cat(self, arguments: list[str]) -> bool | None:
        """Follows ``cat`` and ``tee`` without files, which print what they read."""
        self.print_out(self.input.rest() if self.input is not None and not arguments else UNKNOWN)
        return True if self.input is not None and not arguments else None

    def filter_text(self, change: Callable[[list[str], str], str], arguments: list[str]) -> bool | None:
        """Follows a program that prints what it reads with changes, such as ``tr``."""
        self.print_out(UNKNOWN if self.input is None else change(arguments, self.input.rest()))
        return None if self.input is None else True

    def _fill(self, name: str, value: Value) -> None:
        if NAME_ONLY.fullmatch(name):
            self.set(name, value)
        elif "[" in name:
            self._lose_element(name.partition("[")[0])

    def read(self, arguments: list[str]) -> bool | None:
        """Follows ``read``: the fields of the next line, the last name with all that is left."""
        options, names = _options_of_read(arguments)
        end = options.get("d", "\n")[:1]
        line, is_whole = self.input.line(end) if self.input is not None else (UNKNOWN, False)
        is_unread = UNKNOWN in line or set(options) & set("nNu") or ("r" not in options and "\\" in line)
        separators = self.separators()
        if is_unread or UNKNOWN in separators:
            for name in [*names, *([options["a"]] if "a" in options else []), *(["REPLY"] if not names else [])]:
                self._fill(name, UNKNOWN)
                if name == options.get("a"):
                    self.put(self.named(name), Variable(UNKNOWN))
            return None
        if "a" in options:
            self._fill(options["a"], array_of(self.fields_of(line)))
        elif not names:
            self.set("REPLY", line)
        else:
            for name, text in zip(names, _read_fields(line, separators, len(names)), strict=True):
                self._fill(name, text)
        return is_whole

    def mapfile(self, arguments: list[str]) -> bool | None:
        """Follows ``mapfile -t NAME``: a line in each element."""
        names = [text for text in arguments if not text.startswith("-")] or ["MAPFILE"]
        text = self.input.rest() if self.input is not None else UNKNOWN
        if set(arguments) - {"-t", *names} or len(names) > 1 or UNKNOWN in text:
            for name in filter(NAME_ONLY.fullmatch, names):
                self.put(self.named(name), Variable(UNKNOWN))
            return None
        lines = text.split("\n")
        ends = "" if "-t" in arguments else "\n"
        found = [line + ends for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
        self.set(names[0], array_of(found))
        return True

    def getopts(self, arguments: list[str]) -> bool | None:
        """Follows ``getopts OPTIONS NAME``: the next option of the arguments."""
        given = arguments[2:] or self.arguments
        place = self.get("OPTIND")
        if len(arguments) < 2 or given is None or UNKNOWN in "".join([*given, *arguments[:2], str(place)]):
            for name in [*arguments[1:2], "OPTARG", "OPTIND"]:
                self._fill(name, UNKNOWN)
            return None
        known, name = arguments[:2]
        index = int(place) - 1 if isinstance(place, str) and place.isdecimal() else 0
        word = given[index] if 0 <= index < len(given) else ""
        if self.option_place == 1 and (word[:1] != "-" or word in ("-", "--")):
            self.set(name, "?")
            self.set("OPTIND", str(index + 1 + (word == "--")))
            return False
        letter, rest = word[self.option_place], word[self.option_place + 1 :]
        self.option_place += 1
        is_quiet, value = known.startswith(":"), None
        if letter == ":" or letter not in known:
            found, value = "?", letter if is_quiet else None
        elif known[known.index(letter) + 1 :][:1] == ":":
            index += 0 if rest else 1
            value, found = (rest, letter) if rest else (given[index] if index < len(given) else None, letter)
            if value is None:
                found, value = (":", letter) if is_quiet else ("?", None)
            rest = ""
        else:
            found = letter
        if not rest:
            index, self.option_place = index + 1, 1
        self.set("OPTIND", str(min(index, len(given)) + 1))
        self.set("OPTARG", value)
        self.set(name, found)
        return True

    def shift(self, arguments: list[str]) -> bool | None:
        """Follows ``shift``."""
        text = arguments[0] if arguments else "1"
        if self.arguments is None or not re.fullmatch(r"\d{1,5}", text):
            self.num_shifted += int(text) if re.fullmatch(r"\d{1,5}", text) else 0
            self.arguments = None if self.arguments is None else [UNKNOWN_WORDS]
            return True
        count = int(text)
        if UNKNOWN_WORDS in self.arguments[:count]:
            self.arguments = [UNKNOWN_WORDS]
        elif count > len(self.arguments):
            return None if UNKNOWN_WORDS in self.arguments else False
        else:
            self.arguments = self.arguments[count:]
        return True

    def set_options(self, arguments: list[str]) -> bool | None:
        """Follows ``set``: the options, then the new arguments."""
        while arguments and re.fullmatch("[-+][A-Za-z]+", arguments[0]):
            switches = self.options.add if arguments[0][0] == "-" else self.options.discard
            letters, arguments = arguments[0][1:], arguments[1:]
            for letter in letters:
                if letter == "o" and arguments:
                    switches(arguments[0])
                    arguments = arguments[1:]
                else:
                    switches(_OPTIONS_OF_SET.get(letter, letter))
        if arguments:
            self.arguments = arguments[arguments[0] in ("--", "-") :]
        return True

    def shopt(self, arguments: list[str]) -> bool | None:
        """Follows ``shopt -s`` and ``-u``."""
        for name in arguments[1:]:
            if arguments[0] == "-s":
                self.options.add(name)
            elif arguments[0] == "-u":
                self.options.discard(name)
        return True if arguments[:1] in (["-s"], ["-u"]) else None

    def unset_all(self, arguments: list[str]) -> bool | None:
        """Follows ``unset`` of variables; with ``-n`` of what ``declare -n`` made."""
        for text in arguments:
            if arguments[0] == "-n" and NAME_ONLY.fullmatch(text):
                self.put(text, Variable())
            elif not text.startswith("-"):
                self.unset(text)
        return True

    def let(self, arguments: list[str]) -> bool | None:
        """Follows ``let``: each argument is a calculation."""
        status: bool | None = True
        for text in arguments:
            status = self.calculated(text, expands=False)
        return status

    # Declarations

    def declare(self, words: list[Word]) -> bool | None:
        """Follows ``declare``, ``local``, ``export`` and the like, with their attributes."""
        texts = [word.raw for word in words[1:] if word.raw[:1] in "-+" and word.elements is None]
        letters = {letter for text in texts if text[0] == "-" for letter in text[1:]}
        removed = {letter for text in texts if text[0] == "+" for letter in text[1:]}
        if letters & {"f", "F", "p"}:
            return None if "p" in letters else True
        if words[0].keyword == "local" and not self.hidden:
            return False
        if words[0].keyword == "export":
            removed |= {"x"} if "n" in letters else set()
            letters = (letters | {"x"}) - removed - {"n"}
        is_local = bool(self.hidden) and words[0].keyword not in ("export", "readonly") and "g" not in letters
        letters |= {"r"} if words[0].keyword == "readonly" else set()
        attributes = "".join(letter for letter in "Ailnru" if letter in letters)
        plain = [
            each for word in words[1:] for each in ([word] if word.elements else without_braces(word, self.charge))
        ]
        for word in [self._with_value(word) for word in plain]:
            match = ASSIGNMENT.match(word.raw) or NAME_ONLY.fullmatch(word.raw)
            if match is not None:
                has_value = match.re is ASSIGNMENT
                self._export(match[1] if has_value else match[0], letters, removed)
                self._declare_one(word, match[1] if has_value else match[0], attributes, removed, is_local, has_value)
            elif word.raw[:1] not in "-+":
                self._declare_texts(self.words(word), letters, removed)
        return True

    def _export(self, name: str, letters: set[str], removed: set[str]) -> None:
        if "x" in letters:
            self.exported.add(self.named(name))
        elif "x" in removed:
            self.exported.discard(self.named(name))

    def _declare_one(
        self, word: Word, name: str, attributes: str, removed: set[str], is_local: bool, has_value: bool
    ) -> None:
        if is_local and name not in self.hidden[-1]:
            self.hidden[-1][name] = self.variables.get(name)
            self.put(name, Variable())
        target = name if "n" in attributes else self.named(name)
        old = self.variables.get(target)
        before = "" if old is None else old.attributes
        kept = "".join(letter for letter in before if letter not in removed and letter not in attributes)
        later = "r" if "r" in attributes and "r" not in before else ""
        now = kept + attributes.replace("r", "" if later else "r")
        now = now.replace("l" if "u" in attributes else "u" if "l" in attributes else "-", "")
        value = None if old is None else old.value
        if "A" in attributes and not isinstance(value, Array):
            value = Array({}, is_map=True)
        if old is not None or attributes:
            self.put(target, Variable(value, now))
        if has_value and "n" in attributes:
            self.put(name, Variable(self.one(after(word, len(name) + 1)), now))
        elif has_value:
            self.assign(word)
        if later and (variable := self.variables.get(target)) is not None:
            self.put(target, replace(variable, attributes=variable.attributes + later))

    def _with_value(self, word: Word) -> Word:
        """Returns an assignment with its value, which a declaration expands before it assigns any."""
        match = ASSIGNMENT.match(word.raw)
        if match is None or match[2] or word.elements is not None:
            return word
        return Word(word.line, [Piece(match[0], "plain"), Piece(self.one(after(word, match.end())), "literal")])

    def _declare_texts(self, texts: list[str], letters: set[str], removed: set[str]) -> None:
        """Follows ``export "$NAME=value"``, whose names only an expansion shows."""
        for text in texts:
            name, equals, value = text.partition("=")
            if UNKNOWN in name:
                self.faults.may_set_any = True
                self.warn(
                    "which variables the script sets here is known only when the job runs, and memlab keeps their "
                    "earlier values: give those that matter with --set NAME=VALUE"
                )
            elif NAME_ONLY.fullmatch(name):
                self._export(name, letters, removed)
                if equals:
                    self.set(name, value)


def _options_of_read(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the options of ``read`` by letter, those without a value with nothing, and the names."""
    options, place = dict[str, str](), 0
    while place < len(arguments) and re.fullmatch("-[A-Za-z].*", arguments[place], re.DOTALL):
        text = arguments[place][1:]
        place += 1
        while text:
            letter, text = text[0], text[1:]
            options[letter] = ""
            if letter in _OPTIONS_OF_READ:
                if not text:
                    text = arguments[place] if place < len(arguments) else ""
                    place += 1
                options[letter], text = text, ""
    return options, arguments[place + (arguments[place : place + 1] == ["--"]) :]


def _read_fields(line: str, separators: str, count: int) -> list[str]:
    """Splits a line for ``read``: the last field has all that is left, without blanks at its ends."""
    blanks = "".join(sign for sign in separators if sign in " \t\n")
    others = "".join(sign for sign in separators if sign not in " \t\n")
    blank = f"[{re.escape(blanks)}]" if blanks else "(?!)"
    between = re.compile(f"{blank}*[{re.escape(others)}]{blank}*|{blank}+" if others else f"{blank}+")
    line, fields = line.strip(blanks) if blanks else line, []
    for _ in range(count - 1):
        match = between.search(line)
        fields.append(line if match is None else line[: match.start()])
        line = "" if match is None else line[match.end() :]
    match = between.search(line)
    if match is not None and match.end() == len(line):
        line = line[: match.start()]  # one separator behind the last field
    return [*fields, line]
