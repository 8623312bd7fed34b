"""Reads a launch script of a shell without running it: assignments are followed, commands become lists of words.

Followed are assignments, arrays, ``${NAME:-default}``, ``$((1 + 2))``, ``source`` of a file beside the script,
functions, ``for`` over known words, ``exit``, and tests of known values in ``if``, ``case``, ``&&`` and ``||``.
Everything else, above all ``$(command)``, is an unknown value: it is reported and never executed. What runs only if a
condition holds that memlab cannot decide is read apart: its commands are marked, its assignments are taken back, and a
warning names them. A variable that the script reads and does not set is taken as not set, as on a machine where nobody
exported it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.jobs import shell_syntax as syntax
from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell_conditions import Operand, both, decide, matches, negated
from memlab.jobs.shell_variables import ASSIGNMENT, MOST_WORDS, Element, Value, Variables, after, is_assignment
from memlab.jobs.shell_words import NAME_ONLY, Word, split_expansions

_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SUCCEEDING = {
    ":", "true", "cd", "pushd", "popd", "pwd", "echo", "mkdir", "touch", "sleep", "wait", "date", "shopt", "ulimit",
    "umask", "trap", "alias", "module",
}  # fmt: skip
"""Commands that prepare a job and start none; a job's script is taken to get past them."""
_STARTING = {"env", "nohup", "exec", "command", "builtin"}
"""Commands that start the command after them."""
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


def read_script(text: str, path: Path, given: dict[str, str] | None = None) -> Script:
    """Follows a script.

    Args:
        text: The script.
        path: Its file, beside which sourced files are looked for.
        given: Variables by name, which the script cannot change. `Command.variables` has those that it reads or sets.

    Raises:
        ValueError: If a quote or bracket is not closed, or the script expands to more than any real one does.
    """
    reader = _Reader(dict(given or {}), path)
    reader.follow(text)
    return Script(reader.commands, list(reader.warnings))


class _LeaveError(Exception):
    """Ends the script (``exit``), a function or sourced file (``return``), or a loop (``break``, ``continue``)."""

    def __init__(self, kind: str, status: bool | None = True, loops: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.status, self.loops = kind, status, loops


class _Reader(Variables):
    """Follows the tree of a script. The status of a command is True, False, or None if only a run would show it."""

    def __init__(self, given: dict[str, str], path: Path) -> None:
        super().__init__(given, path)
        self.commands: list[Command] = []
        self.functions: dict[str, syntax.Node] = {}
        self.calls: list[tuple[str, dict[str, Value | None]]] = []
        """Functions that are running, each with the values that its local variables hide."""
        self.is_certain = True
        self.depth = self.sources = self.source_depth = self.steps = self.snapshots = 0
        self.undecided: dict[str, int] = {}

    def follow(self, text: str) -> None:
        with suppress(_LeaveError):
            self._run(syntax.parse(text, self.path.name))
        if not self.commands:
            for function in list(self.functions.values()):  # which something else than the script may call
                self._maybe(function)
        for name, line in self.undecided.items():
            self.warn(f"{name} is set in a branch whose condition memlab cannot decide, and is not followed", line)

    # Blocks

    def _run(self, node: syntax.Node) -> bool | None:
        self.depth += 1
        if self.depth > _DEEPEST_RUN:
            raise ValueError(f"{self.path.name} nests commands more than {_DEEPEST_RUN} deep, beyond any real script")
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
        for part in node.parts:
            status, _ = self._apart(part)
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
                status = both(None, other) if wanted else negated(both(None, negated(other)))
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
        run = self._run
        for patterns, body, end in node.branches:
            result: bool | None = False
            for pattern in patterns:
                with self.testing():
                    found = matches(subject, self.pattern(pattern))
                result = negated(both(negated(result), negated(found)))
            if result is None:
                run = self._maybe
            if result is not False:
                status = run(body)
            if result and end == ";;":
                return status if run == self._run else None
            if result:  # the shell goes on with the next branch or its pattern
                run = self._maybe
        return True if run == self._run else None

    def _for(self, node: syntax.For) -> bool | None:
        self.line = node.line
        values = self.arguments if node.words is None else []
        for word in node.words or []:
            texts = [UNKNOWN] if _is_generated(word) else self.words(word)
            values = None if values is None or any(UNKNOWN in text for text in texts) else [*values, *texts]
        if values is None:
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
        try:
            run(body)
        except _LeaveError as leave:
            if leave.kind not in ("break", "continue"):
                raise
            if leave.loops > 1:
                raise _LeaveError(leave.kind, leave.status, leave.loops - 1) from None
            return leave.kind == "continue"
        return True

    # Commands

    def _count(self) -> None:
        self.steps += 1
        if self.steps > _MOST_COMMANDS:
            raise ValueError(f"{self.path.name} runs more than {_MOST_COMMANDS:,} commands, beyond any real script")

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
            (text, getattr(text, "line", word.line))
            for word in words
            if word.elements is None
            for text in self.words(word)
        ]
        if len(expanded) > MOST_WORDS:
            raise ValueError(f"line {self.line} has more than {MOST_WORDS:,} words")
        return self._execute(expanded, environment)

    def _execute(self, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        if not words:
            return True
        name = words[0][0]
        arguments: list[str] = [Element(text, at) for text, at in words[1:]]
        if name in self.functions:
            return self._call(name, arguments, environment)
        if name in _STARTING:
            return self._start(name, words[1:], environment)
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            return builtin(self, arguments)
        if name in _SUCCEEDING:
            return True
        command = Command(self.line, words, is_certain=self.is_certain)
        if any(text[:1] == "-" or "=" in text for text in arguments):
            given = {name: text for name, text in self.given.items() if name in self.used}
            own = {n: text for n, text in self.values.items() if isinstance(text, str) and n not in self.given}
            command.variables = own | given | environment
            self.snapshots += len(command.variables)
            if self.snapshots > _MOST_SNAPSHOTS:
                raise ValueError(f"{self.path.name} has more commands and variables than any real script")
        self.commands.append(command)
        return None

    def _start(self, name: str, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        environment = dict(environment)
        while words:
            match = ASSIGNMENT.match(words[0][0]) if name == "env" else None
            if match:
                environment[match[1]] = self.chosen(match[1], words[0][0][match.end() :])
            elif not words[0][0].startswith("-"):
                break
            elif name == "command":
                return None  # asks whether there is such a command
            elif words[0][0] in ("-u", "--unset", "-C", "--chdir", "-a"):
                words = words[1:]
            words = words[1:]
        status = self._execute(words, environment)
        if name == "exec" and words:
            raise _LeaveError("exit", status)
        return status

    def _call(self, name: str, arguments: list[str], environment: dict[str, str]) -> bool | None:
        if any(name == other for other, _ in self.calls):
            self.warn(f"the function {name} calls itself, which memlab does not follow")
            return None
        outer, self.arguments = self.arguments, arguments
        self.calls.append((name, {}))
        for variable, text in environment.items():
            self._hide(variable)
            self.set(variable, text)
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
        for word in words[1:]:
            match = ASSIGNMENT.match(word.raw) or NAME_ONLY.fullmatch(word.raw)
            if match is None:
                continue
            name = match[1] if match.re is ASSIGNMENT else match[0]
            if is_local:
                self._hide(name)
            if "A" in options or "n" in options:
                self.set(name, UNKNOWN)
            elif match.re is ASSIGNMENT:
                self.assign(word)
            elif is_local:
                self.set(name, "")
        return True

    def _hide(self, name: str) -> None:
        """Makes a variable local to the running function."""
        self.calls[-1][1].setdefault(name, self.values.get(name))

    # Builtins

    def _exit(self, arguments: list[str]) -> bool | None:
        code = arguments[0] if arguments else "0"
        if not self.is_certain or not re.fullmatch(r"0*[1-9]\d*", code):
            raise _LeaveError("exit", _status_of(code))
        self.warn(
            f"the script comes to exit {code} with the variables that memlab knows, which reads on: give others with "
            "--set NAME=value"
        )
        return False

    def _return(self, arguments: list[str]) -> bool | None:
        raise _LeaveError("return", _status_of(arguments[0]) if arguments else True)

    def _break(self, arguments: list[str]) -> bool | None:
        raise _LeaveError("break", loops=_count_of(arguments))

    def _continue(self, arguments: list[str]) -> bool | None:
        raise _LeaveError("continue", loops=_count_of(arguments))

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
        if self.arguments is not None:
            self.arguments = self.arguments[_count_of(arguments) :]
        return True

    def _set_options(self, arguments: list[str]) -> bool | None:
        if "--" in arguments:
            self.arguments = arguments[arguments.index("--") + 1 :]
        return True

    def _let(self, arguments: list[str]) -> bool | None:
        status: bool | None = True
        for text in arguments:
            status = self.calculated(text)
        return status

    def _eval(self, arguments: list[str]) -> bool | None:
        return self._run(syntax.parse(" ".join(arguments), self.path.name, self.line))

    def _source(self, arguments: list[str]) -> bool | None:
        if not arguments:
            return None
        name = arguments[0]
        path = Path(name) if Path(name).is_absolute() else self.path.parent / name
        self.sources += 1
        if self.sources > _MOST_SOURCES:
            raise ValueError(f"line {self.line}: more than {_MOST_SOURCES} files are sourced, beyond any real script")
        if UNKNOWN in name or self.source_depth >= _DEEPEST_SOURCE:
            self.warn("the sourced file is not known before a run, and is not read")
            return True
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 2**20 else None
        except (OSError, ValueError):
            text = None
        if text is None or UNKNOWN in text:
            self.warn(f"the sourced file {path.name} is not there, and is not read")
            return True
        own, self.path = self.path, path
        self.source_depth += 1
        try:
            return self._run(syntax.parse(text, path.name))
        except _LeaveError as leave:
            if leave.kind != "return":
                raise
            return leave.status
        finally:
            self.path = own
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


def _is_generated(word: Word) -> bool:
    """Whether the shell makes file names or several words of a word, as of ``*.json`` and ``{1..4}``."""
    plain = [piece.text for piece in word.pieces if piece.kind == "plain"]
    return any(
        not is_expansion and re.search(r"[*?\[{]", part)
        for text in plain
        for part, is_expansion in split_expansions(text)
    )


def _status_of(code: str) -> bool | None:
    return int(code) == 0 if re.fullmatch(r"\d{1,9}", code) else None


def _count_of(arguments: list[str]) -> int:
    return int(arguments[0]) if arguments and re.fullmatch(r"\d{1,5}", arguments[0]) else 1
