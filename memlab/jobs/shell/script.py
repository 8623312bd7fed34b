"""Reads a launch script of a shell without running it: assignments are followed, commands become lists of words.

Followed are assignments, arrays, ``${NAME:-default}``, ``$((1 + 2))``, the script's own folder, ``source`` of a file
beside the script, functions, ``for`` over known words, ``exit``, and tests of known values in ``if``, ``case``, ``&&``
and ``||``. Everything else, above all ``$(command)`` and what the script itself is started with, is an unknown value:
it is reported and never executed. What runs only if a condition holds that memlab cannot decide is read apart: its
commands are marked, its assignments are taken back, and a warning names them. A variable that the script reads and
nobody sets is empty in a test, as on a machine where nobody exported it, and unknown in a command, because the job may
need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS
from memlab.jobs.shell import syntax
from memlab.jobs.shell.conditions import Operand, both, decide, either, matches, negated
from memlab.jobs.shell.variables import (
    ASSIGNMENT,
    OwnArguments,
    Value,
    Variables,
    after,
    element_of,
    is_assignment,
)
from memlab.jobs.shell.words import NAME_ONLY, Piece, Word

_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SUCCEEDING = {
    ":", "true", "cd", "pushd", "popd", "pwd", "echo", "mkdir", "touch", "sleep", "wait", "date", "shopt", "ulimit",
    "umask", "trap", "alias", "module",
}  # fmt: skip
"""Commands that prepare a job and start none, which memlab assumes to succeed."""
_STARTING = {"env", "nohup", "exec", "command", "builtin"}
"""Commands that start the command after them."""
_FOLLOWING = {"eval", "source", "."}
"""Builtins that run other commands, which have what is set before the builtin."""
_INSTEAD = "give a log of the job or its resolved configuration"
_MOST_COMMANDS = 100_000
_MOST_SNAPSHOTS = 2**20
_DEEPEST_SOURCE = 5
_MOST_SOURCES = 20
_DEEPEST_RUN = 100


@dataclass(slots=True)
class Command:
    """A simple command of the script, expanded."""

    line: int
    words: list[tuple[str, int]]
    """Each word with its line."""
    variables: dict[str, str] = field(default_factory=dict)
    """What the script has set when it runs the command, and what stands before the command."""
    is_certain: bool = True
    """Whether the script runs it in any case, as far as memlab can tell."""


@dataclass(slots=True)
class Script:
    """What a script would run, as far as that can be seen without running it."""

    commands: list[Command] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_script(
    text: str,
    path: Path,
    given: dict[str, str] | None = None,
    *,
    is_job: Callable[[list[str]], bool] = bool,
) -> Script:
    """Follows a script.

    Args:
        text: The script.
        path: Its file, beside which sourced files are looked for.
        given: Variables by name, which the script cannot change. `Command.variables` has those that it reads or sets.
        is_job: Whether words are the command that is looked for; an ``exit`` before it does not end the reading.

    Raises:
        ValueError: If a quote, an expansion or an array is not closed, or the script does more than any real one does.
    """
    reader = _Reader(dict(given or {}), path, is_job)
    reader.follow(text)
    return Script(reader.commands, list(reader.warnings))


class _LeaveError(Exception):
    """Ends the script (``exit``), a function or sourced file (``return``), or a loop (``break``, ``continue``)."""

    def __init__(self, kind: str, status: bool | None = True, loops: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.status, self.loops = kind, status, loops


class _Reader(Variables):
    """Follows the tree of a script. The status of a command is True, False, or None if memlab cannot tell."""

    def __init__(self, given: dict[str, str], path: Path, is_job: Callable[[list[str]], bool]) -> None:
        super().__init__(given, path)
        self.is_job, self.has_job = is_job, False
        self.commands: list[Command] = []
        self.functions: dict[str, syntax.Node] = {}
        self.calls: list[tuple[str, dict[str, Value | None]]] = []
        """Functions that are running, each with the values that its local variables hide."""
        self.is_certain = True
        self.depth = self.loops = self.shells = self.sources = self.source_depth = self.steps = self.snapshots = 0
        self.undecided: dict[str, int] = {}

    def follow(self, text: str) -> None:
        with suppress(_LeaveError):
            self._run(syntax.parse(text, self.path.name))
        if not self.commands:
            for function in list(self.functions.values()):  # which something else than the script may call
                self._maybe(function)
        for name, line in self.undecided.items():
            self.warn(
                f"memlab cannot decide whether the script gives {name} this value, and keeps the earlier one: give it "
                f"with --set {name}=VALUE",
                line,
            )

    # Blocks

    def _run(self, node: syntax.Node) -> bool | None:
        self.depth += 1
        if self.depth > _DEEPEST_RUN:
            raise ValueError(f"{self.path.name} nests commands more than {_DEEPEST_RUN} deep: {_INSTEAD}")
        try:
            return _BLOCKS[type(node)](self, node)
        finally:
            self.depth -= 1

    def _sequence(self, node: syntax.Sequence) -> bool | None:
        status: bool | None = True
        for part in node.parts:
            status = self._run(part)
        return status

    def _not(self, node: syntax.Not) -> bool | None:
        return negated(self._run(node.part))

    def _shells(self, node: syntax.Apart) -> bool | None:
        status: bool | None = True
        self.shells += len(node.parts) == 1
        for part in node.parts:
            status, _ = self._apart(part)
        self.shells -= len(node.parts) == 1
        return status if node.waits else True

    def _while(self, node: syntax.While) -> bool | None:
        if self._run(node.condition) is False:
            return True
        self._loop_round(node.body, self._maybe)
        return None

    def _define(self, node: syntax.Function) -> bool | None:
        if self.is_certain or node.name not in self.functions:
            self.functions[node.name] = node.body
        return True

    def _apart(self, node: syntax.Node) -> tuple[bool | None, dict[str, int]]:
        """Follows a part whose assignments do not last, and returns its status and what it changed, with lines."""
        journal: dict[str, tuple[Value | None, int]] = {}
        self.journals.append(journal)
        arguments = self.arguments
        try:
            status = self._run(node)
        except _LeaveError as leave:
            status = leave.status
        self.journals.pop()
        self.arguments = arguments
        changed = {name: line for name, (old, line) in journal.items() if self.values.get(name) != old}
        for name, (old, _) in journal.items():
            self.restore(name, old)
        return status, changed

    def _maybe(self, node: syntax.Node) -> bool | None:
        """Follows a part of which memlab cannot tell whether it runs."""
        was_certain, self.is_certain = self.is_certain, False
        status, changed = self._apart(node)
        self.is_certain = was_certain
        for name, line in changed.items():
            self.undecided.setdefault(name, line)
        return status

    def _chain(self, node: syntax.Chain) -> bool | None:
        status = self._run(node.first)
        for joiner, part in node.rest:
            wanted = joiner == "&&"
            if status is None:
                other = self._maybe(part)
                status = both(None, other) if wanted else either(None, other)
            elif status is wanted:
                status = self._run(part)
        return status

    def _if(self, node: syntax.If) -> bool | None:
        """Runs the branch whose condition holds; from the first undecided condition on, any branch may run."""
        run = self._run
        for condition, body in node.branches:
            result = run(condition)
            if result is None:
                run = self._maybe
            if result is not False:
                status = run(body)
            if result:
                return status if run == self._run else None
        status = True if node.otherwise is None else run(node.otherwise)
        return status if run == self._run else None

    def _case(self, node: syntax.Case) -> bool | None:
        with self.testing():
            subject = self.one(node.subject)
        run, status = self._run, True if node.branches else None
        goes_on: bool | None = False
        for patterns, body, end in node.branches:
            result = goes_on
            for pattern in patterns:
                with self.testing():
                    result = either(result, matches(subject, self.pattern(pattern)))
            if result is None:
                run = self._maybe
            if result is not False:
                status = run(body)
            if result and end == ";;":
                break
            goes_on = result if end == ";&" else False  # into the next body, whatever its patterns are
        return status if run == self._run else None

    def _for(self, node: syntax.For) -> bool | None:
        self.line = node.line
        words = node.words
        values = self.arguments if words is None else [text for word in words for text in self.words(word)]
        if values is None or any(UNKNOWN in text for text in values):
            self.set(node.name, UNKNOWN)
            self._loop_round(node.body, self._maybe)
            return None
        for value in values:
            self.set(node.name, value)
            if not self._loop_round(node.body, self._run):
                break
        return True

    def _loop_round(self, body: syntax.Node, run: Callable[[syntax.Node], bool | None]) -> bool:
        """Runs the body of a loop once, and returns whether another round follows."""
        self._count()
        self.loops += 1
        try:
            run(body)
        except _LeaveError as leave:
            if leave.kind not in ("break", "continue"):
                raise
            if leave.loops > 1:
                raise _LeaveError(leave.kind, leave.status, leave.loops - 1) from None
            return leave.kind == "continue"
        finally:
            self.loops -= 1
        return True

    # Commands

    def _count(self) -> None:
        self.steps += 1
        if self.steps > _MOST_COMMANDS:
            raise ValueError(f"{self.path.name} runs more than {_MOST_COMMANDS:,} commands: {_INSTEAD}")

    def _simple(self, node: syntax.Simple) -> bool | None:
        self._count()
        words, self.line = node.words, node.line or self.line
        if words and words[0].pieces and words[0].pieces[0].kind == "arithmetic":
            return self.calculated(words[0].raw)
        first = 0
        while first < len(words) and (words[first].elements is not None or is_assignment(words[first])):
            first += 1
        before, words = words[:first], words[first:]
        if not words:
            for word in before:
                self.assign(word)
            return None if any(re.search(r"\$\((?!\()|`", word.raw) for word in before) else True
        if words[0].keyword in ("[", "[[", "test"):
            with self.testing():
                return self._tested(words)
        if words[0].keyword in _DECLARING:
            return self._declare(words)
        environment = {}
        for word in before:
            match = ASSIGNMENT.match(word.raw)
            if match and word.elements is None and not match[2]:
                environment[match[1]] = self.chosen(match[1], self.one(after(word, match.end())))
        expanded = [
            (text, element_of(text, word.line).line)
            for word in words
            if word.elements is None
            for text in self.words(word)
        ]
        return self._start(expanded, environment)

    def _start(self, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        """Runs the command after ``env``, ``exec`` and the like."""
        starter, start, environment = "", 0, dict(environment)
        starters = set[str]()
        while start < len(words):
            text = words[start][0]
            if text in _STARTING and text not in self.functions:
                starter = text
                starters.add(text)
            elif starter == "env" and (match := ASSIGNMENT.match(text)):
                environment[match[1]] = self.chosen(match[1], text[match.end() :])
            elif not starter or not text.startswith("-"):
                break
            elif starter == "command" and text in ("-v", "-V"):
                return None  # asks whether there is such a command
            start += 2 if starter and text in ("-u", "--unset", "-C", "--chdir", "-a") else 1
        words = words[start:]
        status = self._execute(words, environment) if words else True
        if words and "exec" in starters:
            raise _LeaveError("exit", status)
        return status

    def _execute(self, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        name = words[0][0]
        arguments: list[str] = [element_of(text, at) for text, at in words[1:]]
        if name in self.functions:
            is_own = len(arguments) == 1 and isinstance(arguments[0], OwnArguments)
            return self._call(name, None if is_own else arguments, environment)
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            with self._temporarily(environment if name in _FOLLOWING else {}):
                return builtin(self, arguments)
        if name in _SUCCEEDING:
            return True
        environment = environment | _set_by_wrappers(words)
        for place, ((shell, _), (option, _)) in enumerate(pairwise(words[:-1])):
            if shell.rpartition("/")[2] in ("bash", "sh") and re.fullmatch("-[a-z]*c", option):
                return self._shell([text for text, _ in words[place + 2 :]], environment)
        command = Command(self.line, words, is_certain=self.is_certain)
        is_job = self.is_job([text for text, _ in words])
        self.has_job = self.has_job or is_job
        if is_job or any(text[:1] == "-" or "=" in text for text in arguments):
            given = {name: text for name, text in self.given.items() if name in self.used}
            own = {n: text for n, text in self.values.items() if isinstance(text, str) and n not in self.given}
            command.variables = own | given | environment
            self.snapshots += len(command.variables)
            if self.snapshots > _MOST_SNAPSHOTS:
                raise ValueError(f"{self.path.name} has more commands and variables than any real script: {_INSTEAD}")
        self.commands.append(command)
        return None

    def _shell(self, words: list[str], environment: dict[str, str]) -> bool | None:
        """Follows the text of ``bash -c``, after which come the arguments of its shell, from ``$0`` on."""
        outer, self.arguments = self.arguments, words[2:]
        with self._temporarily(environment):
            status = self._shells(syntax.Apart([self._parsed(words[0], "a shell")]))
        self.arguments = outer
        return status

    @contextmanager
    def _temporarily(self, environment: dict[str, str]) -> Iterator[None]:
        """Sets what stands before a command for as long as the command runs."""
        hidden = {name: self.values.get(name) for name in environment}
        for name, text in environment.items():
            self.set(name, text)
        try:
            yield
        finally:
            for name, old in hidden.items():
                self.record(name)
                self.restore(name, old)

    def _call(self, name: str, arguments: list[str] | None, environment: dict[str, str]) -> bool | None:
        if any(name == other for other, _ in self.calls):
            self.warn(f"the function {name} calls itself, which memlab does not follow")
            return None
        with self._temporarily(environment):
            outer, self.arguments = self.arguments, arguments
            self.calls.append((name, {}))
            try:
                return self._run(self.functions[name])
            except _LeaveError as leave:
                if leave.kind != "return":
                    raise
                return leave.status
            finally:
                self.arguments = outer
                for variable, old in self.calls.pop()[1].items():
                    self.record(variable)
                    self.restore(variable, old)

    def _declare(self, words: list[Word]) -> bool | None:
        options = "".join(word.raw[1:] for word in words[1:] if word.raw.startswith("-"))
        is_local = bool(self.calls) and words[0].keyword not in ("export", "readonly") and "g" not in options
        for word in [self._with_value(word) for word in words[1:]]:
            match = ASSIGNMENT.match(word.raw) or NAME_ONLY.fullmatch(word.raw)
            if match is None:
                self._declare_texts([] if word.raw.startswith("-") else self.words(word))
                continue
            name = match[1] if match.re is ASSIGNMENT else match[0]
            if is_local:
                self._hide(name)
            if "A" in options or "n" in options:
                self.set(name, UNKNOWN)
            elif match.re is ASSIGNMENT and "i" in options and word.elements is None:
                self.set(name, self.arithmetic(self.one(after(word, match.end()))))
            elif match.re is ASSIGNMENT:
                self.assign(word)
            elif is_local:
                self.set(name, "")
        return True

    def _with_value(self, word: Word) -> Word:
        """Returns an assignment with its value, which a declaration expands before it assigns any."""
        match = ASSIGNMENT.match(word.raw)
        if match is None or match[2] or word.elements is not None:
            return word
        return Word(word.line, [Piece(match[0], "plain"), Piece(self.one(after(word, match.end())), "literal")])

    def _declare_texts(self, texts: list[str]) -> None:
        """Follows ``export "$NAME=value"``, whose names only an expansion shows."""
        for text in texts:
            name, equals, value = text.partition("=")
            if UNKNOWN in name:
                self.warn(
                    "which variables the script sets here is known only when the job runs, and memlab keeps their "
                    "earlier values: give those that matter with --set NAME=VALUE"
                )
            elif equals and NAME_ONLY.fullmatch(name):
                self.set(name, value)

    def _hide(self, name: str) -> None:
        """Makes a variable local to the running function."""
        self.calls[-1][1].setdefault(name, self.values.get(name))

    # Builtins

    def _exit(self, arguments: list[str], kind: str = "exit") -> bool | None:
        """Ends the script, unless it has not come to its job: nobody runs a script for that."""
        code = arguments[0] if arguments else "0"
        status = _status_of(code)
        if not self.is_certain or self.has_job or self.shells:
            raise _LeaveError(kind, status)
        self.warn(
            f"with the variables that memlab knows, the script would stop here ({kind} {code.replace(UNKNOWN, '?')}); "
            "memlab reads the rest of the script nevertheless: set the variables that the script tests here with "
            "--set NAME=VALUE"
        )
        return status

    def _return(self, arguments: list[str]) -> bool | None:
        if not self.calls and not self.source_depth:
            return self._exit(arguments, "return")
        raise _LeaveError("return", _status_of(arguments[0]) if arguments else True)

    def _break(self, arguments: list[str], kind: str = "break") -> bool | None:
        if self.loops:
            raise _LeaveError(kind, loops=min(self.loops, _count_of(arguments)))
        return True

    def _continue(self, arguments: list[str]) -> bool | None:
        return self._break(arguments, "continue")

    def _false(self, arguments: list[str]) -> bool | None:
        return False

    def _unset(self, arguments: list[str]) -> bool | None:
        for name in arguments:
            if NAME_ONLY.fullmatch(name):
                self.set(name, None)
            elif "[" in name:
                self.set(name.partition("[")[0], UNKNOWN)
        return True

    def _read(self, arguments: list[str]) -> bool | None:
        """Marks what a command such as ``read`` sets as unknown."""
        for name in arguments:
            if NAME_ONLY.fullmatch(name):
                self.set(name, UNKNOWN)
        return None

    def _printf(self, arguments: list[str]) -> bool | None:
        if arguments[:1] == ["-v"]:
            self._read(arguments[1:2])
        return True

    def _shift(self, arguments: list[str]) -> bool | None:
        if self.arguments is None:
            return True
        count = _count_of(arguments)
        if UNKNOWN_WORDS in self.arguments[:count]:
            self.arguments = [UNKNOWN_WORDS]
        elif count > len(self.arguments):
            return False
        else:
            self.arguments = self.arguments[count:]
        return True

    def _set_options(self, arguments: list[str]) -> bool | None:
        """Takes the new arguments after the options."""
        while arguments and arguments[0][:1] in ("-", "+") and arguments[0] != "--":
            arguments = arguments[2 if arguments[0][-1] == "o" else 1 :]
        if arguments:
            self.arguments = arguments[arguments[0] == "--" :]
        return True

    def _let(self, arguments: list[str]) -> bool | None:
        status: bool | None = True
        for text in arguments:
            status = self.calculated(text)
        return status

    def _eval(self, arguments: list[str]) -> bool | None:
        return self._run(self._parsed(" ".join(arguments), "eval"))

    def _parsed(self, text: str, command: str) -> syntax.Node:
        """Returns the tree of a text that a command runs."""
        if UNKNOWN in text:
            self.warn(
                f"the whole text that {command} runs here is known only when the job runs, and memlab follows the part "
                "that it knows"
            )
        return syntax.parse(text, self.path.name, self.line)

    def _source(self, arguments: list[str]) -> bool | None:
        if not arguments:
            return None
        name = arguments[0]
        path = Path(name) if Path(name).is_absolute() else self.path.parent / name
        self.sources += 1
        if self.sources > _MOST_SOURCES:
            raise ValueError(
                f"{self.path.name}, line {self.line}: more than {_MOST_SOURCES} files are sourced: {_INSTEAD}"
            )
        if self.source_depth >= _DEEPEST_SOURCE:
            self.warn(
                f"files source each other more than {_DEEPEST_SOURCE} deep, so what {path.name} sets is unknown: give "
                "it with --set NAME=VALUE"
            )
            return True
        if UNKNOWN in name:
            self.warn(
                "which file the script sources here is known only when the job runs, so what it sets is unknown: give "
                "it with --set NAME=VALUE"
            )
            return True
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 2**20 else None
        except (OSError, ValueError):
            text = None
        if text is None or UNKNOWN in text:
            self.warn(
                f"the sourced file {path.name} does not exist, or is not a text of less than 1 MiB, so what it sets is "
                "unknown: put it there, or give what it sets with --set NAME=VALUE"
            )
            return True
        own, self.path = self.path, path
        outer = self.arguments
        self.arguments = arguments[1:] or self.arguments
        self.source_depth += 1
        try:
            return self._run(syntax.parse(text, path.name))
        except _LeaveError as leave:
            if leave.kind != "return":
                raise
            return leave.status
        finally:
            self.path, self.arguments = own, outer
            self.source_depth -= 1

    # Tests

    def _tested(self, words: list[Word]) -> bool | None:
        is_double = words[0].keyword == "[["
        inner = words[1:] if words[0].keyword == "test" else words[1:-1]
        operands = []
        for word in inner:
            if is_double:
                text = self.one(word)
                operands.append(Operand(text, self.pattern(word), is_quoted=word.keyword != text))
            else:
                operands += [Operand(text) for text in self.words(word)]
        return decide(operands, is_double=is_double, number=self.number, is_set=self.is_set)


_BLOCKS: dict[type, Callable[[_Reader, Any], bool | None]] = {
    syntax.Simple: _Reader._simple,
    syntax.Sequence: _Reader._sequence,
    syntax.Chain: _Reader._chain,
    syntax.Not: _Reader._not,
    syntax.Apart: _Reader._shells,
    syntax.If: _Reader._if,
    syntax.Case: _Reader._case,
    syntax.For: _Reader._for,
    syntax.While: _Reader._while,
    syntax.Function: _Reader._define,
}
_BUILTINS: dict[str, Callable[[_Reader, list[str]], bool | None]] = {
    "exit": _Reader._exit,
    "return": _Reader._return,
    "break": _Reader._break,
    "continue": _Reader._continue,
    "false": _Reader._false,
    "unset": _Reader._unset,
    "read": _Reader._read,
    "mapfile": _Reader._read,
    "readarray": _Reader._read,
    "getopts": _Reader._read,
    "printf": _Reader._printf,
    "shift": _Reader._shift,
    "set": _Reader._set_options,
    "let": _Reader._let,
    "eval": _Reader._eval,
    "source": _Reader._source,
    ".": _Reader._source,
}


def _set_by_wrappers(words: list[tuple[str, int]]) -> dict[str, str]:
    """Returns what ``sudo A=1``, ``mpirun -x A=1``, ``docker run -e A=1`` and ``srun --export=A=1`` set."""
    found = {}
    for word, _ in words:
        if word.endswith(".py") or word == "-m":
            break
        listed = word.startswith("--export=")
        for text in word.partition("=")[2].split(",") if listed else [word.removeprefix("--env=")]:
            if match := re.match("([A-Z_][A-Z0-9_]*)=", text):
                found[match[1]] = text[match.end() :]
    return found


def _status_of(code: str) -> bool | None:
    return int(code) == 0 if re.fullmatch(r"\d{1,9}", code) else None


def _count_of(arguments: list[str]) -> int:
    return int(arguments[0]) if arguments and re.fullmatch(r"\d{1,5}", arguments[0]) else 1
