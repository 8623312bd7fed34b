"""The command line: parse, call, print. ``memlab --help`` lists the commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from memlab import own_process
from memlab._version import __version__

_COMMANDS = {
    "measure": "Run a training step on this machine, on a GPU or a CPU, and print the memory that it needs.",
    "predict": "Predict the memory of a full-size training step without a GPU, and say whether it fits a given GPU.",
    "search": "Search for settings that make a step fit a GPU, with as little recompute and transfer as possible.",
    "job": "Read a job of another framework from its own file, and say what memlab understood of it.",
    "recipes": "Read all job files below a folder, and say how many of them memlab can predict, and what others miss.",
    "published": "Predict jobs that others measured, and write both as a Markdown page.",
    "compare": "Compare saved steps, and show where a predicted and a measured peak differ.",
    "run": "Run one lab without a browser, with parameters that you give, and save the result in a new folder.",
    "nightly": "Run a suite of labs and compare their metrics with the baselines.",
    "baseline": "Update the baselines of a suite with the values of a nightly run.",
    "results": "Write a Markdown page from measured records: the effect of each setting and the errors of predictions.",
    "doctor": "List packages, hardware and backends, and say how to install missing packages.",
    "lab": "Open the labs in JupyterLab.",
    "course": "Write a course for a teacher: notebooks without answers, solutions, slides, and lecture plans.",
}
"""Each command's summary. The command itself is the module of `memlab.commands` of that name."""
_READ_SCRIPTS = ("measure", "predict", "search", "job")
"""Commands that read a job's script: what follows ``--`` is what the script is started with."""

_LONGEST_VALUE, _LONGEST_LINE = 200, 900


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, without the usage text that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see {self.prog} --help")


def build_parser(names: Collection[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Builds the parser of the command line; it raises `ValueError` with one line for what it cannot parse.

    Args:
        names: The commands whose modules are imported and whose flags are declared; the others are only listed.
    """
    parser = _Parser(
        prog="memlab",
        description="Measure or predict the memory of training steps of Megatron or of torch's FSDP2, and account for "
        "every byte.",
        epilog="memlab COMMAND --help explains one command. Exit codes: 0 for success, also if a step fits; 1 if it "
        "does not fit, a metric changed or the command failed; 2 if the command line or an input file is wrong; 3 if a "
        "step may fit, because something that memlab knows only as a bound decides.",
    )
    parser.add_argument("--version", action="version", version=f"memlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in names:
            command = import_module(f"memlab.commands.{name}")
            command.add_arguments(subparser)
            subparser.set_defaults(prepare=command.prepare, prog=subparser.prog, page=subparser.format_help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Its words; None for those with which this process was started as the command line.

    Returns:
        0 for success; 1 if the answer is no (a step does not fit, a metric changed) or the work failed; 2 if the input
        was bad; 3 if the answer is maybe (a step may fit). After bad input, a value that the work itself refuses, and a
        failure to write where the user said, one line on stderr says what and why; Python's development mode
        (``python -X dev -m memlab``) shows where the work refused it. As a shell counts signals, 130 after Ctrl-C, and
        141 if the reader of stdout is gone, as in ``| head``.
    """
    if argv is None:
        own_process.declare()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, not at the interpreter's exit, where a broken pipe could no longer be caught
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more as it exits: send what is left nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 141


def _run(argv: Sequence[str]) -> int:
    try:
        return _checked_and_run(argv)
    except ModuleNotFoundError as error:
        if (error.name or "memlab").partition(".")[0] == "memlab":
            raise
        return _refused(f"{error.name} is not installed: memlab doctor says how to install it", exit_code=1)


def _checked_and_run(argv: Sequence[str]) -> int:
    try:
        arguments = _parsed(argv)
        job: Callable[[], int] = arguments.prepare(arguments)
    except ValueError as error:
        return _refused(error)
    except OSError as error:
        name = "a path of the command line" if error.filename is None else os.fsdecode(error.filename)
        return _refused(f"{name}: {_reason(error)}: give another path")
    except (MemoryError, OverflowError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else "has a number that is too large"
        return _refused(f"the input {what} ({error or type(error).__name__}): give a smaller one")
    try:
        return job()
    except ValueError as error:  # such as a rule that Megatron checks on the live model
        if sys.flags.dev_mode:
            raise
        return _refused(error, exit_code=1)
    except OSError as error:
        if not _is_named(error.filename, arguments):
            raise
        return _refused(f"{error.filename}: {_reason(error)}: free space or choose another path", exit_code=1)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    command = next((word for word in argv if not word.startswith("-")), "")
    place = list(argv).index("--") if "--" in argv and command in _READ_SCRIPTS else len(argv)
    arguments, unknown = build_parser([command]).parse_known_args(argv[:place])
    if place < len(argv):
        arguments.values_of_script = list(argv[place + 1 :])
    if unknown:
        page = arguments.page()
        flags = set(re.findall(r"--[a-z][a-z-]*", page)) - {unknown[0]}
        near = difflib.get_close_matches(unknown[0].partition("=")[0][:_LONGEST_VALUE], sorted(flags), 1)
        mean = f"did you mean {near[0]}? All flags: " if near else ""
        if unknown[0].startswith("--model") and " ARCH" in page:
            mean = "give the model without a flag, as the first argument: "
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}: {mean}see {arguments.prog} --help")
    return arguments


def _refused(message: object, exit_code: int = 2) -> int:
    print(one_line(str(message)), file=sys.stderr)
    return exit_code


def one_line(message: str) -> str:
    """Returns a message as one line of at most 1000 characters: line ends are escaped, and long values shortened."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message)
    # A quote that opens stands behind a blank or a bracket; one that closes does not.
    long_value = rf"(?<![^\s(\[{{=])'[^']{{{_LONGEST_VALUE},}}'|\S{{{_LONGEST_VALUE + 1},}}"
    text = re.sub(long_value, lambda value: f"{value[0][:60]}... ({len(value[0])} characters)", text)
    if len(text) <= _LONGEST_LINE:
        return text
    start, end = text[:500].rpartition(" ")[0] or text[:500], text[-_LONGEST_LINE + 500 :]
    return f"{start} ... {end.partition(' ')[2] or end}"


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _is_named(path: Any, arguments: argparse.Namespace) -> bool:
    """Whether a path that could not be used is one of the command line, or in a folder of it."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    named = [value for value in vars(arguments).values() if isinstance(value, Path)]
    failed = Path(os.fsdecode(path)).absolute()
    return any(failed.is_relative_to(place.absolute()) or failed.parent == place.absolute().parent for place in named)
