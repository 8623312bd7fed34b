"""Reads flags (``--name value``) and overrides (``key=value``) out of commands, and blocks of arguments out of logs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memlab.jobs.entries import UNKNOWN, Entries, parse_scalar, parse_value

_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_][A-Za-z0-9_]*(?:[.][A-Za-z0-9_-]+)+|[a-z_]+)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~([A-Za-z_][A-Za-z0-9_]*(?:[.][A-Za-z0-9_-]+)+)(=.*)?", re.DOTALL)
# A match begins where the dashes do: a search from every dash of a long line would take hours.
_BLOCK_START = re.compile(r"(?<!-)-{6,} arguments -{6,}[ \t\r]*$", re.MULTILINE)
_BLOCK_END = re.compile(r"(?<!-)-{6,} end of arguments -{6,}[ \t\r]*$")
_BLOCK_LINE = re.compile(r"\s([A-Za-z_][A-Za-z0-9_]*) \.{2,}\s?(.*)$")


def read_flags(words: Iterable[tuple[str, int]], entries: Entries) -> None:
    """Adds the flags of a command, their names with underscores; a flag without a value is True.

    Args:
        words: Words of a command, each with its line.
        entries: Where the flags are added; the last one of a name counts, as for argparse.
    """
    name, line, values = "", 0, list[str]()

    def end() -> None:
        if name:
            parsed = [parse_scalar(value) for value in values]
            entries.add(name, True if not parsed else parsed[0] if len(parsed) == 1 else parsed, line)

    for word, at in words:
        match = _FLAG.fullmatch(word)
        if word.endswith(".py") or word in ("-m", "--"):  # the program that a launcher starts
            end()
            name = ""
        elif match:
            end()
            name, line, values = match[1].replace("-", "_"), at, [] if match[2] is None else [match[2]]
        elif name:
            values.append(word)
    end()


def read_overrides(words: Iterable[tuple[str, int]], entries: Entries) -> None:
    """Adds Hydra's overrides of a command: ``key=value``, ``+key=value``, ``++key=value``; warns of ``~key``."""
    for word, line in words:
        match = _OVERRIDE.fullmatch(word)
        if match:
            value = match[2] if UNKNOWN in match[2] else parse_value(match[2])
            entries.add(match[1], value, line)
        elif deletion := _DELETION.fullmatch(word):
            entries.by_key.pop(deletion[1], None)
            entries.warnings.append(f"line {line}: ~{deletion[1]} deletes a key, which memlab does not follow")


def has_argument_block(text: str) -> bool:
    """Whether a log contains the block of arguments that Megatron-LM prints."""
    return _BLOCK_START.search(text) is not None


def read_argument_block(text: str, name: str) -> Entries:
    """Reads the last block of arguments that Megatron-LM printed into a log, one ``name ........ value`` a line.

    Raises:
        ValueError: If the block does not end.
    """
    lines = text.split("\n")
    starts = [index for index, line in enumerate(lines) if _BLOCK_START.search(line)]
    start = starts[-1]
    entries = Entries()
    for index in range(start + 1, len(lines)):
        if _BLOCK_END.search(lines[index]):
            return entries
        match = _BLOCK_LINE.search(" " + lines[index])
        if match:
            entries.add(match[1], parse_value(match[2]), index + 1)
    raise ValueError(f"{name}, line {start + 1}: the block of arguments has no end: give the whole log")
