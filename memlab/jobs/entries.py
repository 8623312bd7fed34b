"""What a job's file says: its keys in the framework's spelling, each with a value and the line that gives it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

UNKNOWN = "\0"
"""Stands for what is known only when the job runs, such as ``$(nproc)``. A text that contains it is unknown."""
UNKNOWN_WORDS = UNKNOWN * 3
"""Stands for any number of words, also none, as of a ``$(cat options)`` that is not quoted."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}|[+-]?(?=[0-9_]{1,18}$)[0-9]+(?:_[0-9]+)+")
_NUMBER = re.compile(r"[+-]?([0-9]{1,18}[.]?[0-9]{0,18}|[.][0-9]{1,18})([eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}


class NoJobError(ValueError):
    """The file is no job's, as far as memlab can tell."""


class Line(int):
    """A line of a file that is not the job's own, such as a script that it sources."""

    file: str

    def __new__(cls, number: int, file: str) -> Self:
        """Makes one of a file's name."""
        line = super().__new__(cls, number)
        line.file = file
        return line

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # a whole number has only itself
        """Returns what `__new__` makes a copy from."""
        return int(self), self.file

    def __add__(self, lines: int) -> Line:
        """Returns a later line of the same file."""
        return Line(int(self) + lines, self.file)

    def __str__(self) -> str:
        """Names the file too, so that messages do."""
        return f"{int(self)} of {self.file}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a job's file."""

    key: str
    """In the framework's spelling."""
    value: Any
    """A number, a text, a truth value, None, or a list of them."""
    line: int | None = None
    """Where the file gives it; None for an override and for a value that memlab derived."""

    @property
    def is_unknown(self) -> bool:
        """Whether the value is known only when the job runs."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return any(isinstance(value, str) and UNKNOWN in value for value in values)

    @property
    def place(self) -> str:
        """Where the value comes from, for tables and messages."""
        return "--set" if self.line is None else f"line {self.line}"


@dataclass(slots=True)
class Entries:
    """All keys of a job's file, the last value of each."""

    by_key: dict[str, Entry] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    """What is wrong with the file itself, such as a command that ends too early: to be said before anything else."""
    warnings: list[str] = field(default_factory=list)
    """What the reader of the file did not follow, in whole sentences."""
    program: Entry | None = None
    """The Python program that a script's command starts, such as ``pretrain_gpt.py``; None where none is named.
    Of a command with overrides, the module that takes its own configuration."""
    flags_of_program: frozenset[str] = frozenset()
    """Names of the flags behind a program, without those of what launches it."""
    recipe: str = ""
    """Where the values of the recipe that a job names come from; empty where it names none that memlab can read."""
    file_for_flags: str = ""
    """Name of the file whose values the program takes in place of all flags; empty where it takes the flags."""
    started_in: Path | None = None
    """The folder near a script to which it goes, and that has the job's program; None where there is none."""
    own_files: set[str] = field(default_factory=set)
    """Names of the framework's own configurations that the job lies beside, whose values are defaults."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a script sets for its programs, such as ``PYTORCH_CUDA_ALLOC_CONF``."""
    not_exported: tuple[str, ...] = ()
    """Names of a script's other variables, which its programs do not see."""
    undecided: frozenset[str] = frozenset()
    """Names of variables that a script may set or not."""
    groups: set[str] = field(default_factory=set)
    """Groups of Hydra's lists whose option the command chooses and whose keys the job has: no keys themselves."""

    def add(self, key: str, value: Any, line: int | None) -> None:
        """Adds a key, or replaces its value."""
        self.by_key[key] = Entry(key, value, line)

    def merge(self, other: Entries) -> None:
        """Adds the keys of another file over these, as OmegaConf merges them.

        A value that is no mapping, such as null, takes the place of a whole mapping, and a mapping that of a value; an
        interpolation may stand for a mapping, and stays beside its keys.
        """
        mappings = {parent for key in other.by_key for parent in parents_of(key)}
        values = {key for key, entry in other.by_key.items() if entry.value != {}}
        kept = {
            key: entry
            for key, entry in self.by_key.items()
            if (key not in mappings or is_interpolation(entry.value)) and values.isdisjoint(parents_of(key))
        }
        holders = {parent for key in kept for parent in parents_of(key)}
        added = {
            key: entry
            for key, entry in other.by_key.items()
            if entry.value != {} or (key not in holders and not (key in kept and is_interpolation(kept[key].value)))
        }
        self.by_key = kept | added

    def of_file(self, name: str) -> Entries:
        """Gives the keys the name of the file that has them; those that another file brought keep its name."""
        for key, entry in self.by_key.items():
            if entry.line is not None and not isinstance(entry.line, Line):
                self.by_key[key] = replace(entry, line=Line(entry.line, name))
        return self

    def remove(self, key: str) -> None:
        """Removes a key, and all keys of the mapping that it may be."""
        self.by_key = {
            name: entry for name, entry in self.by_key.items() if name != key and not name.startswith(f"{key}.")
        }

    def is_of_framework(self, entry: Entry) -> bool:
        """Whether a value is none of the job's, but of one of `own_files`."""
        return isinstance(entry.line, Line) and entry.line.file in self.own_files

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key that the file gives, or the default."""
        entry = self.by_key.get(key)
        return default if entry is None or entry.is_unknown else entry.value


def lines_of(numbers: Iterable[int]) -> str:
    """Names lines of a file, for messages."""
    different = sorted(set(numbers))
    return f"line{'s' * (len(different) > 1)} {', '.join(map(str, different))}"


def is_interpolation(value: Any) -> bool:
    """Whether a value may stand for a mapping, as ``${model}`` does."""
    return isinstance(value, str) and value.startswith("${")


def parents_of(key: str) -> list[str]:
    """Returns the keys of the mappings that hold a key, such as ``a`` and ``a.b`` of ``a.b.c``."""
    return [key[: dot.start()] for dot in re.finditer("[.]", key)]


def parse_scalar(text: str) -> Any:
    """Reads a value as YAML, Hydra and argparse write it; what is no number, truth value or null stays a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def parse_value(text: str) -> Any:
    """Reads a value that may also be a list such as ``[core_attn, moe_act]``, as Hydra writes it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        # In double quotes a backslash escapes a quote and a backslash, as YAML and JSON have it.
        return re.sub(r'\\(["\\])', r"\1", text[1:-1]) if text[0] == '"' else text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        parts = [part.strip().strip("'\"") for part in text[1:-1].split(",")]
        return [parse_scalar(part) for part in parts if part]
    return parse_scalar(text)
