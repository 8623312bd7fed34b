"""The command line: parse, call, print. ``memlab --help`` lists the commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from memlab._version import __version__
from memlab.commands import baseline, compare, doctor, lab, measure, nightly, predict, results, run, search

_COMMANDS = {
    "measure": measure,
    "predict": predict,
    "compare": compare,
    "search": search,
    "run": run,
    "nightly": nightly,
    "baseline": baseline,
    "results": results,
    "doctor": doctor,
    "lab": lab,
}


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, without the usage text that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{' '.join(message.split())}: see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; it raises `ValueError` with one line for what it cannot parse."""
    parser = _Parser(prog="memlab", description="Training steps of a live Megatron model, every byte accounted for.")
    parser.add_argument("--version", action="version", version=f"memlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(prepare=command.prepare, prog=subparser.prog, page=subparser.format_help())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0, or 1 if the command's work failed, or 2 if the input was bad: then one line on stderr says what and why. As a
        shell counts signals, 130 after Ctrl-C, and 141 where nobody reads stdout any more, as behind ``| head``.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, not at the interpreter's exit, where a broken pipe could no longer be caught
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more as it exits: what is left goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 141


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        flags = set(re.findall(r"--[a-z][a-z-]*", arguments.page)) - {unknown[0]}
        near = difflib.get_close_matches(unknown[0].partition("=")[0], sorted(flags), 1)
        mean = f"did you mean {near[0]}? All flags: " if near else ""
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}: {mean}see {arguments.prog} --help")
    return arguments


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parsed(argv)
        job = arguments.prepare(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    exit_code: int = job()
    return exit_code
