"""Reads a launch script of a shell without running it: assignments are followed, commands become lists of words.

Followed are variables, arrays and expansions, functions, loops and tests over known values, ``source`` of a file beside
the script, and ``$(...)`` of builtins and of paths, as bash 5.2 has them. Everything else, above all what other
programs print and what the script itself is started with, is an unknown value: it is reported and never executed. What
runs only if a condition holds that memlab cannot decide is read apart: its commands are marked, its assignments are
taken back, and a warning names them. A variable that the script reads and nobody sets is empty in a test, as on a
machine where nobody exported it, and unknown in a command, because the job may need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from memlab.jobs.entries import UNKNOWN, UNKNOWN_WORDS, Line
from memlab.jobs.shell import patterns, syntax
from memlab.jobs.shell.builtins import Builtins, Input
from memlab.jobs.shell.calculators import computed, expressed, of_awk
from memlab.jobs.shell.conditions import Answers, Operand, both, decide, either, negated
from memlab.jobs.shell.filters import lines_with, options_of_grep, substituted, translated
from memlab.jobs.shell.paths import file_above, path_here, printed_path
from memlab.jobs.shell.undecided import named, of_a_job
from memlab.jobs.shell.variables import (
    ASSIGNMENT,
    OwnArguments,
    Variable,
    after,
    array_of,
    element_of,
    is_assignment,
)
from memlab.jobs.shell.words import Redirection, Word

_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SUCCEEDING = {
    ":", "true", "cd", "pushd", "popd", "pwd", "mkdir", "touch", "sleep", "wait", "date", "ulimit", "umask", "alias",
    "module",
}  # fmt: skip
"""Commands that prepare a job and start none, which memlab assumes to succeed."""
_READING = {"[", "test", "grep", "cat", "echo", "printf", "source", ".", "ls", "head", "tail", "wc", "cd", "pushd"}
"""Commands that change no file whose name they get."""
_LOADING = {"module", "conda", "mamba", "micromamba", "spack"}
"""Commands that may set any variable, such as CUDA_HOME."""
_PRINTING = {"pushd", "popd", "pwd", "date", "ulimit", "umask", "alias", "module"}
"""Those of them that may print something."""
_STARTING = {"env", "nohup", "exec", "command", "builtin"}
"""Commands that start the command after them."""
_ONLY_A_VARIABLE = re.compile(r'"?\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?"?')
_ARGUMENT = re.compile(r"--?[A-Za-z].*|[+~]{0,2}[A-Za-z_]\w*([.][\w-]+)+=.*", re.DOTALL)
"""A word that is no command's name: a flag, or an override such as ``trainer.nnodes=1``."""
_INSTEAD = "give a log of the job or its resolved configuration"
_MOST_COMMANDS = 100_000
_MOST_SNAPSHOTS = 2**20
_DEEPEST_SOURCE = 5
_MOST_SOURCES = 20
_DEEPEST_RUN = 100
_DEPTH_OF_A_LINE = 2
"""How deep a command of no block stands."""
_MOST_ROUNDS = 1000
"""Of ``while``: a script that waits has no end that memlab could see."""


@dataclass(slots=True)
class Command:
    """A simple command of the script, expanded."""

    line: int
    words: list[tuple[str, int]]
    """Each word with its line."""
    variables: dict[str, str] = field(default_factory=dict)
    """What the script has exported when it runs the command, and what stands before the command."""
    not_exported: tuple[str, ...] = ()
    """Names of what else the script has set."""
    is_certain: bool = True
    """Whether the script runs it in any case, as far as memlab can tell."""


@dataclass(slots=True)
class Script:
    """What a script would run, as far as that can be seen without running it."""

    commands: list[Command] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """What is wrong with the script itself, such as a missing sourced file: to be corrected before anything else."""
    lacks_arguments: str = ""
    """Which of the values that the script is started with are not given; nothing if it uses none."""
    folders: list[str] = field(default_factory=list)
    """Where it goes with ``cd``, as far as that is known."""
    undecided: frozenset[str] = frozenset()
    """Variables of its jobs that it may set or not."""


def read_script(
    text: str,
    path: Path,
    given: dict[str, str] | None = None,
    *,
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    is_job: Callable[[list[str]], bool] = bool,
) -> Script:
    """Follows a script.

    Args:
        path: Its file, beside which sourced files are looked for.
        given: Variables by name, which the script cannot change. `Command.variables` has those that it reads or sets.
        arguments: What the script is started with, ``$1`` and so on; None if that is not known.
        environment: Variables that another script has exported, which the script may change.
        is_job: Whether words are the command that is looked for; an ``exit`` before it does not end the reading.

    Raises:
        ValueError: If a quote, an expansion or an array is not closed, or the script does more than any real one does.
    """
    reader = _Reader(dict(given or {}), path, arguments, is_job)
    for name, value in (environment or {}).items():
        reader.put(name, Variable(value))
        reader.exported.add(name)
    reader.follow(text)
    faults = reader.faults
    return Script(
        reader.commands,
        list(faults.warnings),
        faults.causes_before(reader.num_jobs),
        faults.lacks_arguments(path.name),
        reader.folders,
        frozenset(reader.undecided),
    )


class _LeaveError(Exception):
    """Ends the script (``exit``), a function or sourced file (``return``), or a loop (``break``, ``continue``)."""

    def __init__(self, kind: str, status: bool | None = True, loops: int = 1, code: str = "0") -> None:
        super().__init__(kind)
        self.kind, self.status, self.loops, self.code = kind, status, loops, code


@dataclass(slots=True)
class _Function:
    """What a name calls: several bodies if memlab cannot decide which of them the script defines."""

    bodies: list[syntax.Node]
    is_certain: bool = True


Run = Callable[[], bool | None]


class _Reader(Builtins):
    """Follows the tree of a script. The status of a command is True, False, or None if memlab cannot tell."""

    def __init__(
        self, given: dict[str, str], path: Path, arguments: list[str] | None, is_job: Callable[[list[str]], bool]
    ) -> None:
        super().__init__(given, path, arguments)
        self.is_job, self.num_jobs = is_job, 0
        self.commands: list[Command] = []
        self.stops: list[tuple[int, str]] | None = None
        """In a part of a pipe: variables without which it ends, by line."""
        self.functions: dict[str, _Function] = {}
        self.calls: list[str] = []
        """Functions that are running."""
        self.hidden = []
        self.written: set[str] = set()
        """Names of files that the script may have written: it writes to them, or starts a program with them."""
        self.has_moved = False
        """Whether it runs in a folder that it has gone to."""
        self.num_searched = 0
        self.tested_files: set[str] = set()
        """Files of which the script asks whether they are there."""
        self.depth = self.loops = self.shells = self.sources = self.source_depth = self.steps = self.snapshots = 0
        self.texts = 0
        """How many of these shells run a text that starts the job: nobody runs such a one for its ``exit``, either."""
        self.num_shielded = 0
        """How many blocks are running whose failure does not end the script after ``set -e``."""
        self.undecided: dict[str, int] = {}
        self.doubts: list[_LeaveError] = []
        """Ends of a function or a loop that memlab could not decide: what follows there may not run."""
        self.parsed: dict[str, syntax.Node] = {}
        self.program = ""
        self.folders: list[str] = []
        """The first word of the running command, as the script has it."""
        self.printed_code: str | None = None
        """The exit code of the last ``$(...)`` of the running command."""
        self.at_exit = ""
        self.lines: list[str] = []
        """Of the file that is followed."""
        self.texts_read: list[list[str]] = []

    def follow(self, text: str) -> None:
        self.lines = text.splitlines()
        self.texts_read.append(self.lines)
        with suppress(_LeaveError):
            self._run(syntax.parse(text, self.path.name, note=self.faults.refused))
        if self.at_exit:
            self._apart(lambda: self._eval([self.at_exit]))
        if not self.commands:
            for function in list(self.functions.values()):  # which something else than the script may call
                for body in function.bodies:
                    self._maybe(lambda body=body: self._run(body))  # type: ignore[misc]
        jobs = [command for command in self.commands if self.is_job([word for word, _ in command.words])]
        places = {line for command in jobs for _, line in command.words}
        if jobs:
            self.undecided = of_a_job(self.undecided, self.texts_read, places, self.exported)
        for warning in named(self.undecided, has_arguments=self.arguments is not None):
            self.faults.warnings[warning] = None

    # Blocks

    def _run(self, node: syntax.Node) -> bool | None:
        self.depth += 1
        if self.depth > _DEEPEST_RUN:
            raise ValueError(f"{self.path.name} nests commands more than {_DEEPEST_RUN} deep: {_INSTEAD}")
        try:
            return _BLOCKS[type(node)](self, node)
        finally:
            self.depth -= 1

    def _shielded(self, node: syntax.Node) -> bool | None:
        """Runs a part whose failure does not end the script after ``set -e``, such as a condition."""
        self.num_shielded += 1
        try:
            return self._run(node)
        finally:
            self.num_shielded -= 1

    def _sequence(self, node: syntax.Sequence) -> bool | None:
        status: bool | None = True
        for place, part in enumerate(node.parts):
            status = self._run(part)
            left = syntax.Sequence(node.parts[place + 1 :])
            if self.doubts and left.parts:
                doubts, self.doubts = self.doubts, []
                status = self._maybe(lambda left=left: self._sequence(left))  # type: ignore[misc]
                self.doubts = doubts + self.doubts
                break
        return status

    def _not(self, node: syntax.Not) -> bool | None:
        status = negated(self._shielded(node.part))
        self.code = _CODES[status]
        return status

    def _redirected(self, node: syntax.Redirected) -> bool | None:
        with self._with_redirections(node.redirections):
            return self._run(node.part)

    @contextmanager
    def _with_redirections(self, redirections: list[Redirection]) -> Iterator[None]:
        """Lets commands read and print where the redirections say."""
        outer_input, outer_output = self.input, self.output
        for one in redirections:
            if one.operator in ("<", "<<", "<<<"):
                text = self._text_of(one)
                self.input = Input(text) if one.descriptor in ("", "0") else self.input
                continue
            if one.target is not None:
                self.written.add(Path(self.one(one.target)).name)  # and the target may set a variable
            if one.operator[0] == "<":
                self.input = None
            elif re.fullmatch(r"\D*[3-9]-?", one.operator) or one.descriptor not in ("", "0", "1", "2"):
                self.print_out(UNKNOWN)
            elif one.descriptor != "2" and one.operator != ">&1":
                self.output = None if self.output is None else []
        try:
            yield
        finally:
            self.input, self.output = outer_input, outer_output

    def _text_of(self, redirection: Redirection) -> str:
        """Returns what a command reads; the content of a file is unknown."""
        target = redirection.target
        if target is None:
            return UNKNOWN
        if redirection.operator == "<<":
            return self.one(target)
        if redirection.operator == "<<<":
            return self.one(target) + "\n"
        if [piece.kind for piece in target.pieces] == ["process"]:
            return self._output_of(target.pieces[0].text[2:-1])
        self.one(target)  # without which the script may stop
        return UNKNOWN

    def _shells(self, node: syntax.Apart) -> bool | None:
        if len(node.parts) == 1:
            self.shells += 1
            status, _, _ = self._apart(lambda: self._run(node.parts[0]), is_shell=True)
            self.shells -= 1
            if not node.waits:
                self.code, status = "0", True
            return status
        outer_input, outer_output = self.input, self.output
        statuses = []
        for place, part in enumerate(node.parts):
            is_last = place == len(node.parts) - 1
            self.output = outer_output if is_last else []
            if is_last and "lastpipe" in self.options:
                statuses.append(self._run(part))
            else:
                ends_script = (is_last or "pipefail" in self.options) and "errexit" in self.options
                ends_script = ends_script and not self.num_shielded
                with self._stops_of_a_pipe(ends_script=ends_script):
                    statuses.append(self._apart(lambda part=part: self._run(part), is_shell=True)[0])  # type: ignore[misc]
            self.input = None if self.output is None else Input("".join(self.output))
        self.input, self.output = outer_input, outer_output
        status = statuses[-1]
        if "pipefail" in self.options:
            for each in statuses:
                status = both(status, each)
            self.code = _CODES[status]
        return status

    def printed(self, text: str) -> str:
        path = printed_path(text, self.path.name, self.line, self.one)
        if path != UNKNOWN:
            self.printed_code = "0"
            return path
        return self._output_of(text).rstrip("\n")

    def _output_of(self, text: str) -> str:
        """Returns what commands print in a shell of their own."""
        if text not in self.parsed:
            self.charge([text])
            self.parsed[text] = syntax.parse(text, self.path.name, self.line)
        outer = self.output, self.input, self.options, self.code, self.line
        self.output, self.options = [], self.options - {"errexit"}
        self.shells += 1
        try:
            self._apart(lambda: self._run(self.parsed[text]), is_shell=True)
            printed = "".join(self.output)
        finally:
            self.shells -= 1
            self.printed_code = self.code
            self.output, self.input, self.options, self.code, self.line = outer
        return UNKNOWN if UNKNOWN in printed and not printed.strip(UNKNOWN + "\n") else printed

    def _while(self, node: syntax.While) -> bool | None:
        if node.start is not None:
            self._shielded(node.start)
        is_first = True

        def begins() -> bool | None:
            nonlocal is_first
            if not is_first and node.step is not None:
                self._shielded(node.step)
            is_first = False
            return self._shielded(node.condition)

        return self._loop(node.body, begins, _MOST_ROUNDS)

    def _loop(self, body: syntax.Node, begins: Run, most_rounds: int = _MOST_COMMANDS) -> bool | None:
        """Runs the rounds of a loop.

        Args:
            begins: Prepares a round, and says whether there is one; None if memlab cannot tell.
            most_rounds: After these, memlab no longer tells how often the loop runs.
        """
        status: bool | None = True
        code = "0"
        for _ in range(most_rounds):
            more = begins()
            if more is False:
                self.code = code
                return status
            if more is None:
                break
            again, status = self._round(body)
            code = self.code
            if again is False:
                return True
            if again is None:
                self._maybe(lambda: begins() is not False and self._round(body)[1])
                return None
        self._maybe(lambda: self._round(body)[1])
        return None

    def _round(self, body: syntax.Node) -> tuple[bool | None, bool | None]:
        """Runs the body of a loop once, and returns whether another round may follow, and the status."""
        self._count()
        self.loops += 1
        doubts, self.doubts = self.doubts, []
        again: bool | None = True
        status: bool | None = True
        try:
            status = self._run(body)
        except _LeaveError as leave:
            if leave.kind not in ("break", "continue"):
                raise
            if leave.loops > 1:
                raise _LeaveError(leave.kind, leave.status, leave.loops - 1) from None
            again = leave.kind == "continue"
        finally:
            self.loops -= 1
            for doubt in self.doubts:
                if doubt.kind == "return" or doubt.loops > 1:
                    doubts.append(_LeaveError(doubt.kind, loops=max(1, doubt.loops - 1)))
                if again and (doubt.kind != "continue" or doubt.loops > 1):
                    again = None
            self.doubts = doubts
        return again, status

    def _define(self, node: syntax.Function) -> bool | None:
        self.functions[node.name] = _Function([node.body])
        return True

    def _apart(self, run: Run, *, is_shell: bool = False) -> tuple[bool | None, dict[str, int], _LeaveError | None]:
        """Follows a part whose changes do not last: returns its status, what it set, with lines, and how it was left.

        Args:
            is_shell: Whether the part runs in a shell of its own, so that it leaves nothing else.
        """
        journal: dict[str, tuple[Variable | None, int]] = {}
        self.journals.append(journal)
        arguments, functions, options = self.arguments, dict(self.functions), set(self.options)
        shifted, doubts, exported = self.num_shifted, list(self.doubts), set(self.exported)
        left = None
        try:
            status = run()
        except _LeaveError as leave:
            status, left, self.code = leave.status, leave, leave.code
        self.journals.pop()
        self.arguments, self.functions, self.options, self.num_shifted = arguments, functions, options, shifted
        if is_shell:
            self.doubts, self.exported = doubts, exported
        changed = {name: line for name, (old, line) in journal.items() if self.variables.get(name) != old}
        for name, (old, _) in journal.items():
            self.restore(name, old)
        return status, changed, left

    def _maybe(self, run: Run) -> bool | None:
        """Follows a part of which memlab cannot tell whether it runs."""
        was_certain, self.is_certain = self.is_certain, False
        outer_output = self.output
        self.output = None if self.output is None else []
        arguments, functions = self.arguments, dict(self.functions)
        after_it: tuple[list[str] | None, dict[str, _Function]] = arguments, functions

        def watched() -> bool | None:
            nonlocal after_it
            try:
                return run()
            finally:
                after_it = self.arguments, self.functions

        status, changed, left = self._apart(watched)
        self.is_certain = was_certain
        if outer_output is not None and self.output:
            outer_output.append(UNKNOWN)
        self.output = outer_output
        if left is not None and left.kind == "exit":  # in which case nothing follows
            return None
        for name, line in changed.items():
            self.undecided.setdefault(name, line)
        if after_it[0] != arguments:
            self.warn(
                "memlab cannot decide whether the script changes its arguments ($1 and so on) here, and keeps the "
                "earlier ones: give the values that come from them with --set NAME=VALUE"
            )
        for name, function in after_it[1].items():
            earlier = functions.get(name)
            if earlier is None or earlier.bodies != function.bodies:
                bodies = ([] if earlier is None else earlier.bodies) + function.bodies
                self.functions[name] = _Function(bodies, is_certain=False)
        if left is not None:
            self.doubts.append(left)
        self.code = UNKNOWN
        return status

    def _chain(self, node: syntax.Chain) -> bool | None:
        last = node.rest[-1][1]
        status = self._shielded(node.first)
        for joiner, part in node.rest:
            run = self._run if part is last else self._shielded
            wanted = joiner == "&&"
            if status is None:
                other = self._maybe(lambda run=run, part=part: run(part))  # type: ignore[misc]
                status = both(None, other) if wanted else either(None, other)
            elif status is wanted:
                status = run(part)
        return status

    def _branch(self, node: syntax.Node, *, is_certain: bool) -> bool | None:
        return self._run(node) if is_certain else self._maybe(lambda: self._run(node))

    def _if(self, node: syntax.If) -> bool | None:
        """Runs the branch whose condition holds; from the first undecided condition on, any branch may run."""
        is_certain = True
        for condition, body in node.branches:
            result = self._shielded(condition) if is_certain else self._maybe(lambda c=condition: self._shielded(c))  # type: ignore[misc]
            if result is None:
                is_certain = False
            if result is not False:
                status = self._branch(body, is_certain=is_certain)
            if result:
                return status if is_certain else None
        self.code, status = "0", True
        if node.otherwise is not None:
            status = self._branch(node.otherwise, is_certain=is_certain)
        return status if is_certain else None

    def _case(self, node: syntax.Case) -> bool | None:
        with self.testing():
            subject = self.one(node.subject)
        is_certain, status = True, True if node.branches else None
        self.code = "0"
        goes_on: bool | None = False
        for texts, body, end in node.branches:
            result = goes_on
            for text in texts:
                with self.testing():
                    pattern = self.pattern(text)
                result = either(result, self.matches(subject, pattern, is_extended="extglob" in self.options))
            if result is None:
                is_certain = False
            if result is not False:
                status = self._branch(body, is_certain=is_certain)
            if result and end == ";;":
                break
            goes_on = result if end == ";&" else False  # into the next body, whatever its patterns are
        return status if is_certain else None

    def _for(self, node: syntax.For) -> bool | None:
        self.line = node.line
        words = node.words
        values = self.arguments if words is None else [text for word in words for text in self.words(word)]
        if values is None or node.asks or any(UNKNOWN in text for text in values):
            self.set(node.name, UNKNOWN)
            if node.asks:
                self.set("REPLY", UNKNOWN)
            self._maybe(lambda: self._round(node.body)[1])
            return None
        left = iter(values)

        def begins() -> bool:
            value = next(left, None)
            if value is not None:
                self.set(node.name, value)
            return value is not None

        return self._loop(node.body, begins)

    # Commands

    def _count(self) -> None:
        self.steps += 1
        if self.steps > _MOST_COMMANDS:
            raise ValueError(f"{self.path.name} runs more than {_MOST_COMMANDS:,} commands: {_INSTEAD}")

    def _simple(self, node: syntax.Simple) -> bool | None:
        self._count()
        self.line = node.line or self.line
        with self._with_redirections(node.redirections):
            status = self._command(node.words)
        if status is False and "errexit" in self.options and not self.num_shielded:
            self._exit([self.code], is_written=False)
        return status

    def _command(self, words: list[Word]) -> bool | None:
        if words and words[0].pieces and words[0].pieces[0].kind == "arithmetic":
            return self._coded(self.calculated(words[0].raw))
        first = 0
        while first < len(words) and (words[first].elements is not None or is_assignment(words[first])):
            first += 1
        before, words = words[:first], words[first:]
        self.printed_code = None
        if not words:
            for word in before:
                self.assign(word)
            self.code = self.printed_code or "0"
            return _status_of(self.code)
        if words[0].keyword in ("[", "[[", "test"):
            with self.testing():
                return self._coded(self._tested(words))
        if words[0].keyword in _DECLARING:
            return self._coded(self.declare(words))
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
        self.program = words[0].raw
        return self._start(expanded, environment)

    def _coded(self, status: bool | None, code: str | None = None) -> bool | None:
        """Notes the exit code that belongs to a status, and returns the status."""
        self.code = _CODES[status] if code is None else code
        return status

    def _start(self, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        """Runs the command after ``env``, ``exec`` and the like."""
        starter, start, environment = "", 0, dict(environment)
        starters, hidden = set[str](), set[str]()
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
            if starter == "env" and text in ("-u", "--unset", "-i", "-"):
                hidden |= self.exported if text[1:] in ("i", "") else {name for name, _ in words[start + 1 : start + 2]}
            start += 2 if starter and text in ("-u", "--unset", "-C", "--chdir", "-a") else 1
        words = words[start:]
        if not words:
            return self._coded(_status_of(self.printed_code or "0"), self.printed_code or "0")
        with self._withholding(hidden):
            status = self._execute(words, environment, may_call=not starters)
        if "exec" in starters:
            raise _LeaveError("exit", status, code=self.code)
        return status

    @contextmanager
    def _withholding(self, names: set[str]) -> Iterator[None]:
        """Keeps variables from the program that a command starts, as ``env -u`` does."""
        exported = self.exported
        if names:
            self.exported = exported - names
        try:
            yield
        finally:
            if names:
                self.exported = exported

    def _execute(self, words: list[tuple[str, int]], environment: dict[str, str], *, may_call: bool) -> bool | None:
        name = words[0][0]
        arguments: list[str] = [element_of(text, at) for text, at in words[1:]]
        if name in self.functions and may_call:
            is_own = len(arguments) == 1 and isinstance(arguments[0], OwnArguments)
            return self._called(name, None if is_own else arguments, environment)
        if name not in _READING:
            self.written |= {Path(text).name for text in arguments}
        following = _FOLLOWING.get(name)
        if following is not None:
            with self._temporarily(environment):
                return following(self, arguments)
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            with self._temporarily({"IFS": environment["IFS"]} if "IFS" in environment else {}):
                return self._coded(builtin(self, arguments))
        if name.startswith("python") and arguments == ["-c", "import torch_npu"]:
            self.warn(
                "the script asks whether the machine has Ascend's NPUs (torch_npu), and memlab, which predicts jobs on "
                "NVIDIA's GPUs, goes on as on a machine without them"
            )
            return self._coded(False, "1")
        if name == "--" or _ARGUMENT.fullmatch(name):
            if not self._lacks_program(words[0][1]):
                self.faults.orphaned([text for text, _ in words], self.line, self.lines)
            if name != "--" or not self.is_job(arguments):
                return self._coded(False, "127")
            words = words[1:]  # the job that the command before should have started
        self.faults.may_set_any |= name in _LOADING
        if name in _SUCCEEDING:
            self.has_moved |= name in ("cd", "pushd")
            self.folders += [text for text in arguments if name == "cd" and UNKNOWN not in text]
            self.print_out(UNKNOWN if name in _PRINTING else "")
            return self._coded(True)
        return self._launched(words, environment | _set_by_wrappers(words))

    def _launched(self, words: list[tuple[str, int]], environment: dict[str, str]) -> bool | None:
        """Keeps a command of another program, or follows the text that it gives to a shell."""
        self.print_out(UNKNOWN)
        self.code = UNKNOWN
        text_of_shell = _text_of_shell([text for text, _ in words], self.input)
        if text_of_shell:
            return self._shell(text_of_shell, environment)
        if words[0][0].rpartition("/")[2] == "sbatch":
            of_file = environment.get("COMMAND", self.get("COMMAND"))  # what NeMo-RL's ray.sub runs
            if isinstance(of_file, str) and self.is_job(of_file.split()):
                return self._shell([of_file], environment)
        name, *arguments = (text for text, _ in words)
        command = Command(self.line, words, is_certain=self.is_certain)
        is_job = self.is_job([name, *arguments])
        self.num_jobs += is_job
        if not is_job and name in (UNKNOWN, UNKNOWN_WORDS) and arguments and _ARGUMENT.fullmatch(arguments[0]):
            self._lacks_program(words[0][1])
        if is_job or any(text[:1] == "-" or "=" in text or text.endswith(".sh") for text in (name, *arguments)):
            own = {n: one.value for n, one in self.variables.items() if n not in self.given and n not in _INNER}
            texts = {name: text for name, text in own.items() if isinstance(text, str)}
            command.not_exported = tuple(name for name in texts if name not in self.exported)
            given = {name: text for name, text in self.given.items() if name in self.used}
            exported = {name: text for name, text in texts.items() if name in self.exported}
            command.variables = exported | given | environment
            self.snapshots += len(command.variables) + len(command.not_exported)
            if self.snapshots > _MOST_SNAPSHOTS:
                raise ValueError(f"{self.path.name} has more commands and variables than any real script: {_INSTEAD}")
        self.commands.append(command)
        return None

    def _lacks_program(self, line: int) -> bool:
        """Names the variable that should hold the command, where arguments alone are left because nothing sets it."""
        variable = _ONLY_A_VARIABLE.fullmatch(self.program)
        if variable is None or variable[1] in self.variables:
            return False
        self.faults.lacks_program(line, variable[1])
        return True

    @contextmanager
    def _stops_of_a_pipe(self, *, ends_script: bool) -> Iterator[None]:
        """Notes only those stops that keep a job from its start or end the script: the part has a shell of its own."""
        outer, before, self.stops = self.stops, self.num_jobs, []
        try:
            yield
        finally:
            stops, self.stops = self.stops, outer
            for line, name in stops if self.num_jobs > before or ends_script else ():
                self._stops_at(line, name)

    def stops_without(self, name: str) -> None:
        if self.is_certain and not self.shells and name not in self.undecided:
            self._stops_at(self.line, name)

    def _stops_at(self, line: int, name: str) -> None:
        if self.stops is None:
            self.faults.stops_without(line, name, self.num_jobs)
        else:
            self.stops.append((line, name))

    def _shell(self, words: list[str], environment: dict[str, str]) -> bool | None:
        """Follows the text of ``bash -c``, after which come the arguments of its shell, from ``$0`` on."""
        outer, self.arguments = self.arguments, words[2:]
        is_script = self.shells == self.texts and any(self.is_job(line.split()) for line in words[0].splitlines())
        self.texts += is_script
        with self._temporarily(environment):
            status = self._shells(syntax.Apart([self._parsed(words[0], "a shell")]))
        self.texts -= is_script
        self.arguments = outer
        return status

    @contextmanager
    def _temporarily(self, environment: dict[str, str]) -> Iterator[None]:
        """Sets what stands before a command for as long as the command runs."""
        hidden = {name: self.variables.get(name) for name in environment}
        added = hidden.keys() - self.exported
        for name, text in environment.items():
            self.put(name, Variable(text))
            self.exported.add(name)
        try:
            yield
        finally:
            self.exported -= added
            for name, old in hidden.items():
                self.record(name)
                self.restore(name, old)

    def _called(self, name: str, arguments: list[str] | None, environment: dict[str, str]) -> bool | None:
        """Calls a function; each that it may be, if memlab cannot decide which one is defined."""
        function = self.functions[name]
        if name in self.calls:
            self.warn(f"the function {name} calls itself, which memlab does not follow")
            return self._coded(None)
        if function.is_certain:
            return self._call(name, function.bodies[0], arguments, environment)
        for body in function.bodies:
            self._maybe(lambda body=body: self._call(name, body, arguments, environment))  # type: ignore[misc]
        return None

    def _call(
        self, name: str, body: syntax.Node, arguments: list[str] | None, environment: dict[str, str]
    ) -> bool | None:
        with self._temporarily(environment):
            outer, self.arguments = self.arguments, arguments
            shifted, self.num_shifted = self.num_shifted, self.num_shifted if arguments is None else 0
            loops, self.loops = self.loops, 0
            doubts, self.doubts = self.doubts, []
            self.calls.append(name)
            self.hidden.append({})
            exported = set(self.exported)
            try:
                status = self._run(body)
            except _LeaveError as leave:
                if leave.kind != "return":
                    raise
                self.code, status = leave.code, leave.status
            finally:
                self.arguments, self.num_shifted, self.loops = outer, shifted, loops
                returns = any(doubt.kind == "return" for doubt in self.doubts)
                self.doubts = doubts
                self.calls.pop()
                self.exported -= self.hidden[-1].keys() - exported
                for variable, old in self.hidden.pop().items():
                    self.record(variable)
                    self.restore(variable, old)
            return self._coded(None) if returns else status

    # Builtins

    def _exit(self, arguments: list[str], kind: str = "exit", *, is_written: bool = True) -> bool | None:
        """Ends the script, unless it has not come to its job: nobody runs a script for that."""
        code = arguments[0] if arguments else self.code
        status = _status_of(code)
        if not self.is_certain or self.num_jobs or self.shells > self.texts:
            raise _LeaveError(kind, status, code=_exit_code(code))
        shown = f"{kind} {code.replace(UNKNOWN, '?')}"
        is_inside = self.calls or self.source_depth or self.texts
        # A ``return`` ends only a script that another one sources.
        if self.depth == _DEPTH_OF_A_LINE and is_written and kind == "exit" and not is_inside:
            self.faults.ends_here(self.line, shown)
            return True
        self.warn(
            f"with the variables that memlab knows, the script would stop here ({shown}); "
            "memlab reads the rest of the script nevertheless: set the variables that the script tests here with "
            "--set NAME=VALUE"
        )
        return status

    def _return(self, arguments: list[str]) -> bool | None:
        if not self.calls and not self.source_depth:
            return self._exit(arguments, "return")
        code = arguments[0] if arguments else self.code
        raise _LeaveError("return", _status_of(code), code=_exit_code(code))

    def _break(self, arguments: list[str], kind: str = "break") -> bool | None:
        if self.loops:
            raise _LeaveError(kind, loops=min(self.loops, _count_of(arguments)))
        return True

    def _continue(self, arguments: list[str]) -> bool | None:
        return self._break(arguments, "continue")

    def _expr(self, arguments: list[str]) -> bool | None:
        """Follows ``expr``, whose exit status is 1 where it prints 0."""
        printed = expressed(arguments)
        self.print_out(printed)
        return None if printed == UNKNOWN else printed != "0\n"

    def _grep(self, arguments: list[str]) -> bool | None:
        """Follows ``grep`` in a file of the checkout or in what a command before it prints."""
        options, words = options_of_grep(arguments)
        text = None
        if len(words) == _WITH_A_FILE and UNKNOWN not in words[1]:
            text = self._text_to_search(words[1])
        elif len(words) == 1 and self.input is not None:
            text = self.input.rest()
        self.num_searched += len(text or "") + _COST_OF_A_SEARCH
        if self.num_searched > _MOST_SEARCHED:
            text = None
        found = None if text is None or not words else lines_with(words[0], options, text)
        if "q" not in options:
            is_open = found is None or options - set("EFs") or UNKNOWN in str(text)
            self.print_out(UNKNOWN if is_open else "".join(f"{one}\n" for one in found or ()))
        return None if found is None else bool(found)

    def _text_to_search(self, name: str) -> str | None:
        """Returns the text of a checkout's file; nothing of the machine's own files and of those that may be new."""
        path = self.path.parent / name
        if not Path(name).is_absolute():
            if self.has_moved:
                return None
            path = file_above(name, path, self.script)
            if ".." in Path(name).parts and not path.resolve().is_relative_to(self.script.resolve().parent.parent):
                return None
        elif path.parts[1:2] and path.parts[1] in _OF_THE_MACHINE:
            return None
        else:
            path = path_here(path, self.script)
        return None if path.name in self.written else self._text_in(path)

    def _text_in(self, path: Path) -> str | None:
        """Returns a text of less than 1 MiB; nothing where it is none, or not on this machine."""
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < 2**20 else None
        except (OSError, ValueError):
            return None
        return None if text is None or UNKNOWN in text else text

    def _awk(self, arguments: list[str]) -> bool | None:
        printed, code = of_awk(arguments)
        self.print_out(printed)
        return self._coded(None) if code is None else self._coded(code == 0, f"{code}")

    def _unset(self, arguments: list[str]) -> bool | None:
        for name in arguments[1:] if arguments[:1] == ["-f"] else []:
            self.functions.pop(name, None)
        return self.unset_all(arguments) if arguments[:1] != ["-f"] else True

    def _trap(self, arguments: list[str]) -> bool | None:
        if len(arguments) > 1 and {"EXIT", "0"} & set(arguments[1:]) and not self.shells and self.is_certain:
            self.at_exit = "" if arguments[0] == "-" else arguments[0]
        elif len(arguments) > 1:
            self.print_out(UNKNOWN)  # at some time, if something reads what this shell prints
        return True

    def _eval(self, arguments: list[str]) -> bool | None:
        return self._run(self._parsed(" ".join(arguments), "eval"))

    def _parsed(self, text: str, command: str) -> syntax.Node:
        """Returns the tree of a text that a command runs."""
        if UNKNOWN in text:
            self.faults.may_set_any |= command == "eval"
            self.warn(
                f"the whole text that {command} runs here is known only when the job runs, and memlab follows the part "
                "that it knows"
            )
        return syntax.parse(text, self.path.name, self.line)

    def _source(self, arguments: list[str]) -> bool | None:
        if not arguments:
            return None
        name = arguments[0]
        path = self.path.parent / name  # the name alone if it is absolute
        self.sources += 1
        if self.sources > _MOST_SOURCES:
            raise ValueError(
                f"{self.path.name}, line {self.line:d}: more than {_MOST_SOURCES} files are sourced: {_INSTEAD}"
            )
        if self.source_depth >= _DEEPEST_SOURCE:
            self.warn(
                f"files source each other more than {_DEEPEST_SOURCE} deep, so what {path.name} sets is unknown: give "
                "it with --set NAME=VALUE"
            )
            return True
        if UNKNOWN in name:
            self.faults.lacks_file(
                self.line,
                path.name,
                "which file the script sources here is known only when the job runs, so what it sets is unknown: give "
                "it with --set NAME=VALUE",
            )
            return True
        is_absolute = Path(name).is_absolute()
        here = path_here(path, self.script) if is_absolute else file_above(name, path, self.script)
        if here != path:
            where = "which is not on this machine" if is_absolute else "which is not beside it"
            self.warn(f"the script sources {path if is_absolute else name}, {where}, and memlab reads {here}")
            path = here
        text = self._text_in(path)
        if text is None:
            return self._lacks_file(name, path)
        own, self.path = self.path, path
        lines, self.lines = self.lines, text.splitlines()
        self.texts_read.append(self.lines)
        outer = self.arguments
        self.arguments = arguments[1:] or self.arguments
        self.source_depth += 1
        doubts, self.doubts = self.doubts, []
        try:
            return self._run(syntax.parse(text, path.name, Line(1, path.name)))
        except _LeaveError as leave:
            if leave.kind != "return":
                raise
            self.code = leave.code
            return leave.status
        finally:
            self.path, self.lines = own, lines
            self.arguments = outer if arguments[1:] else self.arguments
            self.doubts = doubts + [doubt for doubt in self.doubts if doubt.kind != "return"]
            self.source_depth -= 1

    def _lacks_file(self, name: str, path: Path) -> bool | None:
        """Says that a sourced file is missing; one of which the script asks whether it is there may be."""
        if name in self.tested_files and not self.is_certain:
            self.faults.may_set_any = True
            self.warn(f"the script sources {path.name} where it is there, and memlab goes on without it")
        else:
            self.faults.lacks_file(
                self.line,
                path.name,
                f"the sourced file {path.name} does not exist, or is not a text of less than 1 MiB, so what it sets is "
                "unknown: put it there, or give what it sets with --set NAME=VALUE",
            )
        return self._coded(True)

    # Tests

    def _tested(self, words: list[Word]) -> bool | None:
        is_double = words[0].keyword == "[["
        inner = words[1:] if words[0].keyword == "test" else words[1:-1]
        operands, lacks_words = list[Operand](), False
        answers = Answers(self.number, self.is_set, self.matches, self._finds)
        was_certain = self.is_certain
        for word in inner:
            if is_double:
                if word.keyword in (
                    "&&",
                    "||",
                ):  # bash expands the rest only if this decides nothing
                    decided = decide(operands, is_double=True, answers=answers)
                    self.is_certain &= decided is (word.keyword == "&&")
                text = self.one(word)
                operands.append(Operand(text, self.pattern(word), is_quoted=word.keyword != text))
            else:
                texts = self.words(word)
                lacks_words |= not texts and self._is_from_outside(word)
                operands += [Operand(text) for text in texts]
        self.is_certain = was_certain
        texts = [one.text for one in operands]
        self.tested_files |= {text for test, text in pairwise(texts) if test in ("-f", "-e", "-r", "-s")}
        return decide(operands, is_double=is_double, lacks_words=lacks_words, answers=answers)

    def _is_from_outside(self, word: Word) -> bool:
        """Whether a word is a variable alone that the script gives no value, so that what starts it has to."""
        name = _ONLY_A_VARIABLE.fullmatch(word.raw)
        return name is not None and name[1] not in self.variables

    def matches(self, text: str, pattern: str, *, is_extended: bool = True) -> bool | None:
        """Says whether a text matches a pattern of the shell; None if memlab cannot tell."""
        if UNKNOWN in text or UNKNOWN in pattern:
            return True if pattern == "*" else None
        self.charge([], (len(text) + len(pattern)) // 10)
        ignores_case = "nocasematch" in self.options
        compiled = patterns.pattern_of(pattern, is_extended=is_extended, ignores_case=ignores_case)
        return None if compiled is None else patterns.matches(text, compiled)

    def _finds(self, text: str, expression: str) -> bool | None:
        found = None
        if UNKNOWN not in text + expression:
            found = patterns.found_by_regular_expression(text, expression, ignores_case="nocasematch" in self.options)
        if found is None:
            self.put("BASH_REMATCH", Variable(UNKNOWN))
            return None
        self.put("BASH_REMATCH", Variable(array_of(found)))
        return bool(found)


_BLOCKS: dict[type, Callable[[_Reader, Any], bool | None]] = {
    syntax.Simple: _Reader._simple,
    syntax.Redirected: _Reader._redirected,
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
_FOLLOWING: dict[str, Callable[[_Reader, list[str]], bool | None]] = {
    "eval": _Reader._eval,
    "source": _Reader._source,
    ".": _Reader._source,
    **dict.fromkeys(("awk", "gawk", "mawk"), _Reader._awk),
}
"""Builtins that run other commands, which have what is set before them, and programs with an exit code of their own."""
_BUILTINS: dict[str, Callable[[_Reader, list[str]], bool | None]] = {
    "exit": _Reader._exit,
    "return": _Reader._return,
    "break": _Reader._break,
    "continue": _Reader._continue,
    "false": lambda reader, arguments: False,
    "unset": _Reader._unset,
    "trap": _Reader._trap,
    "echo": Builtins.echo,
    "printf": Builtins.printf,
    "cat": Builtins.cat,
    "tr": lambda reader, arguments: reader.filter_text(translated, arguments),
    "sed": lambda reader, arguments: reader.filter_text(substituted, arguments),
    "bc": lambda reader, arguments: reader.filter_text(computed, arguments),
    "expr": _Reader._expr,
    "grep": _Reader._grep,
    "read": Builtins.read,
    "mapfile": Builtins.mapfile,
    "readarray": Builtins.mapfile,
    "getopts": Builtins.getopts,
    "shift": Builtins.shift,
    "set": Builtins.set_options,
    "shopt": Builtins.shopt,
    "let": Builtins.let,
}
_WITH_A_FILE = 2
_OF_THE_MACHINE = ("dev", "etc", "proc", "run", "sys", "usr", "var")
_MOST_SEARCHED = 2**25
"""Characters: more than any real script searches."""
_COST_OF_A_SEARCH = 2**17
"""As if it read so many characters more: an expression takes its time in few of them too."""
_INNER = {"IFS", "OPTIND"}
"""Variables that the shell itself sets, and that no program reads."""
_CODES = {True: "0", False: "1", None: UNKNOWN}


_PASSING_INPUT_ON = {
    *("docker", "podman", "srun", "ssh", "singularity", "apptainer", "enroot", "kubectl", "oc", "sudo", "timeout"),
    *("env", "nohup", "nice", "time"),
}
"""Programs that start another one with their own input, where ``grep bash`` or ``which bash`` reads no script."""


def _text_of_shell(words: list[str], stdin: Input | None) -> list[str]:
    """Returns the text that a command gives to a shell, and the shell's arguments; nothing where it gives none.

    That is ``bash -x -c TEXT``, or what ``bash``, ``bash -s`` and ``sbatch`` without a file read: ``sbatch <<EOF``.
    """
    for place, word in enumerate(words):
        if word.rpartition("/")[2] not in ("bash", "sh") or "=" in word:
            continue
        options = list(takewhile(lambda text: text[:1] in ("-", "+") or text == "pipefail", words[place + 1 :]))
        for number, option in enumerate(options, place + 1):
            if re.fullmatch("-[a-z]*c", option) and number + 1 < len(words):
                return words[number + 1 :]
        is_started = place == 0 or words[0].rpartition("/")[2] in _PASSING_INPUT_ON
        is_read = place + 1 + len(options) == len(words) or "-s" in options
        if stdin is not None and is_started and is_read:
            return [stdin.rest()]
    is_submitted = words[0].rpartition("/")[2] == "sbatch" and not _of_sbatch(words[1:])
    return [stdin.rest()] if stdin is not None and is_submitted else []


_WITHOUT_VALUE = re.compile(
    r"-[HIOQVWhksv]+|--(hold|help|usage|version|verbose|quiet|wait|overcommit|no-kill|contiguous|(no-)?requeue|parsable"
    r"|test-only|reboot|spread-job|use-min-nodes|oversubscribe|exclusive|ignore-pbs|immediate|get-user-env|nice|propagate"
    r"|kill-on-invalid-dep|stepmgr)"
)
"""Options of ``sbatch`` whose next word is not their value (Slurm 25.05's manual page)."""


def _of_sbatch(words: list[str]) -> list[str]:
    """Returns the script that ``sbatch`` submits, with its arguments; nothing where it reads its input."""
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-":
        option = words[place]
        if option == "--":
            return words[place + 1 :]
        has_own_value = "=" in option or (option[1] != "-" and len(option) > 2)
        place += 1 if has_own_value or _WITHOUT_VALUE.fullmatch(option) else 2
    return words[place:]


def _set_by_wrappers(words: list[tuple[str, int]]) -> dict[str, str]:
    """Returns what a launcher's arguments set in the environment of the program.

    These are ``sudo A=1``, ``mpirun -x A=1``, ``docker run -e A=1``, ``srun --export=A=1`` and the ``env_vars`` of
    ``ray job submit --runtime-env-json`` (Ray 2.x, ``dashboard/modules/job/cli.py``). Other values of that JSON text
    may be known only when the job runs, so it is searched and not parsed.
    """
    found: dict[str, str] = {}
    before = ""
    for word, _ in words:
        if word.endswith(".py") or word == "-m":
            break
        listed = word.startswith("--export=")
        for text in word.partition("=")[2].split(",") if listed else [word.removeprefix("--env=")]:
            if match := re.match("([A-Z_][A-Z0-9_]*)=", text):
                found[match[1]] = text[match.end() :]
        if before == "--runtime-env-json" or word.startswith("--runtime-env-json="):
            found |= dict(_JSON_VARIABLE.findall(word))
        before = word
    return found


_JSON_VARIABLE = re.compile(r'"([A-Z_][A-Z0-9_]{0,100})"\s{0,20}:\s{0,20}"([^"\\]{0,500})"')


def _status_of(code: str) -> bool | None:
    return int(code) % 256 == 0 if re.fullmatch(r"\d{1,9}", code) else None


def _exit_code(text: str) -> str:
    return str(int(text) % 256) if re.fullmatch(r"\d{1,9}", text) else UNKNOWN


def _count_of(arguments: list[str]) -> int:
    return int(arguments[0]) if arguments and re.fullmatch(r"\d{1,5}", arguments[0]) else 1
