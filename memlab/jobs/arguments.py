"""Reads flags (``--name value``) and overrides (``key=value``) out of commands, and blocks of arguments out of logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from memlab.jobs.entries import (
    UNKNOWN,
    UNKNOWN_WORDS,
    Entries,
    is_interpolation,
    lines_of,
    parents_of,
    parse_scalar,
    parse_value,
)
from memlab.jobs.yaml_tree import flat, read_yaml

_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(
    r"[+]{0,2}([A-Za-z_][A-Za-z0-9_]*(?:[.][A-Za-z0-9_-]+)+|[a-z_]+|[a-z_/]+@[A-Za-z_][\w.]*)=(?!=)(.*)", re.DOTALL
)
"""The last kind chooses a file of Hydra for a group and a place in the tree, as in ``actor@policy.actor=small``. A word
such as ``transformers==5.4.0`` is a package that a launcher installs."""
_TIGHT_COLON = re.compile(r"([{,]\s*[\w.]+):(?=\S)")
"""Hydra takes ``{a:1}`` as a mapping, YAML only ``{a: 1}``."""
_CAST = re.compile(r"(?:int|float|bool)\(\s*(['\"]?)([\w.+-]*)\1\s*\)")
"""Hydra's casts of a value, as in ``int(2)`` and ``bool('true')``."""
_FALSE_OF_YAML = ("no", "off")
"""What is false for YAML and a text, which counts as true, for Hydra."""
_DELETION = re.compile(r"~([A-Za-z_][A-Za-z0-9_]*(?:[.][A-Za-z0-9_-]+)*)(=.*)?", re.DOTALL)
# A match begins where the dashes do: a search from every dash of a long line would take hours.
_BLOCK_START = re.compile(r"(?<!-)-{6,} arguments -{6,}[ \t\r]*$", re.MULTILINE)
_BLOCK_END = re.compile(r"(?<!-)-{6,} end of arguments -{6,}[ \t\r]*$")
_BLOCK_LINE = re.compile(r"\s([A-Za-z_][A-Za-z0-9_]*) \.{2,}\s?(.*)$")


def read_flags(
    words: Iterable[tuple[str, int]], entries: Entries, is_switch: Callable[[str], bool | None] = lambda _: None
) -> None:
    """Adds the flags of a command, their names with underscores; a flag without a value is True.

    Args:
        words: Words of a command, each with its line.
        entries: Where the flags are added; the last one of a name counts, as for argparse.
        is_switch: Whether a flag has no value; None if that is not known.
    """
    flag, name, line, values = "", "", 0, list[str]()
    unread: list[tuple[str, int]] = []
    is_open = True

    def end() -> None:
        if name:
            parsed = [parse_scalar(value) for value in values]
            entries.add(name, True if not parsed else parsed[0] if len(parsed) == 1 else parsed, line)

    for word, at in words:
        if word.endswith(".py") or word in ("-m", "--"):  # the program that a launcher starts
            end()
            flag = name = ""
        elif match := _FLAG.fullmatch(word):
            end()
            flag, name, line, values = (
                f"--{match[1]}",
                match[1].replace("-", "_"),
                at,
                [] if match[2] is None else [match[2]],
            )
            is_open = match[2] is None  # argparse gives --flag=value no other value
        elif word == UNKNOWN_WORDS:  # the value of this flag, or more arguments
            if values or is_switch(name) is not False:
                unread.append((flag, at))
            if not values and not is_switch(name):
                values = [word]
            end()
            flag = name = ""
        elif name and is_open:
            values.append(word)
    end()
    _warn_of_unread(entries, unread)


def _warn_of_unread(entries: Entries, unread: list[tuple[str, int]]) -> None:
    """Warns of words that are known only when the job runs, each with the flag before it and the line."""
    if not unread:
        return
    names = ", ".join(dict.fromkeys(flag for flag, _ in unread if flag))
    entries.warnings.append(
        f"{lines_of(line for _, line in unread)}: {f'after {names} ' if names else ''}the script has words that are "
        "known only when the job runs, and memlab reads no arguments there: give those that matter with --set KEY=VALUE"
    )


def read_overrides(words: Iterable[tuple[str, int]], entries: Entries) -> None:
    """Adds Hydra's overrides of a command: ``key=value``, ``+key=value``, ``++key=value``; warns of ``~key``."""
    unread: list[tuple[str, int]] = []
    for word, line in words:
        match = _OVERRIDE.fullmatch(word)
        if match:
            add_override(entries, match[1], match[2], line)
        elif word.endswith(".py") or word == "-m":  # words before it are of a launcher
            unread = []
        elif not word.strip(UNKNOWN):
            unread.append(("", line))
        elif deletion := _DELETION.fullmatch(word):
            entries.remove(deletion[1])
            entries.warnings.append(
                f"line {line}: ~{deletion[1]} deletes a key, and memlab takes the framework's default for it: give "
                f"another value with --set {deletion[1]}=VALUE"
            )
    _warn_of_unread(entries, unread)


def add_override(entries: Entries, key: str, text: str, line: int | None) -> None:
    """Adds what an override says: in the place of a mapping, or of a mapping such as ``{rank: 32}`` each of its keys.

    Raises:
        ValueError: If the mapping is none.
    """
    if cast := _CAST.fullmatch(text.strip()):
        text = cast[2]
    for parent in parents_of(key)[1:]:  # the first may be the choice of a group, such as engine=megatron
        if parent in entries.by_key and not is_interpolation(entries.by_key[parent].value):
            del entries.by_key[parent]
    is_escaped = "\\" in text  # which Hydra's grammar has, and YAML does not: a text as a whole
    if UNKNOWN in text or is_escaped or not re.fullmatch(r"\{.*\}", text.strip(), re.DOTALL):
        entries.remove(key)
        if text == "None":
            where = "--set" if line is None else f"line {line}"
            entries.warnings.append(
                f"{where}: {key}=None is the text None for Hydra, and no null: memlab takes null; write {key}=null"
            )
        if line is not None and text.strip("'\"").lower() in _FALSE_OF_YAML:
            entries.warnings.append(
                f"line {line}: {key}={text} is a text for Hydra, which counts as true, and false for YAML: if it is a "
                f"switch, memlab takes false or refuses it; write {key}=false or {key}=true"
            )
        entries.add(key, text if UNKNOWN in text else parse_value(text), line)
        return
    text = _TIGHT_COLON.sub(r"\1: ", text)
    given = flat(read_yaml(text, f"the value of {key}"), key).by_key
    if not all(given) and any(name.startswith(f"{key}.") for name in entries.by_key):
        return  # an empty mapping adds nothing to another one
    entries.by_key.pop(key, None)
    for name, entry in given.items():
        entries.add(f"{key}.{name}" if name else key, entry.value, line)


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
