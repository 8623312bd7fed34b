"""Which of the variables that a script sets in branches that memlab cannot decide concern its job."""

from __future__ import annotations

import re
from collections.abc import Iterable

_REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)|\(\(([^()]{1,2000})\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(
    r"""(?<![\w$\{.-])([A-Za-z_]\w*)\+?=((?:\((?:[^()]|\([^()]*\))*\))|(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|[^\s;"'])*)"""
)
_TEST = re.compile(r"^\s*(if|elif|while|until|case|for)\b|\[\[|(^|\s)\[\s|\(\(|\btest\s")
_OF_NO_JOB = re.compile(
    r"(MIOPEN|ROCBLAS|HSA|OMP|MKL|OPENBLAS|WANDB|SWANLAB|HF|HUGGINGFACE|RAY|TOKENIZERS|UCX|GLOO|FI|GRPC|AWS|TF|XDG)_\w+"
    r"|PATH|LD_\w+|PYTHON\w*"
)
"""Environment of other programs, or of libraries that keep nothing on a GPU."""
_MOST_NAMED_APART = 3


def of_a_job(
    undecided: dict[str, int], texts: Iterable[list[str]], lines: set[int], exported: set[str]
) -> dict[str, int]:
    """Returns the variables that a job's words or the script's tests use, directly or through others.

    Args:
        undecided: The variables, with the line of each.
        texts: The lines of the script and of the files that it sources.
        lines: Where the words of the job stand.
        exported: Variables that the job's program has.
    """
    reached = {name for name in exported if not _OF_NO_JOB.fullmatch(name)}
    values: dict[str, set[str]] = {}
    for text in texts:
        for number, line in enumerate(text, 1):
            if number in lines or _TEST.search(line):
                reached |= _used(line)
        for name, value in _ASSIGNED.findall("\n".join(text)):
            values.setdefault(name, set()).update(_used(value))
    new = set(reached)
    while new:
        new = {used for name in new for used in values.get(name, ())} - reached
        reached |= new
    return {name: line for name, line in undecided.items() if name in reached}


def _used(text: str) -> set[str]:
    found = set()
    for name, calculation in _REFERENCE.findall(text):
        found |= set(_NAME.findall(calculation)) if calculation else {name}
    return found


def named(undecided: dict[str, int], *, has_arguments: bool) -> list[str]:
    """Returns a warning for each of a few variables, or one for many.

    Args:
        undecided: The variables, with the line of each.
        has_arguments: Whether memlab knows what the script is started with.
    """
    if len(undecided) <= _MOST_NAMED_APART:
        return [
            f"line {line}: memlab cannot decide whether the script gives {name} this value, and keeps the earlier one: "
            f"give it with --set {name}=VALUE"
            for name, line in undecided.items()
        ]
    start = "" if has_arguments else "what the script is started with, behind the file after --, or "
    where = f"lines {min(undecided.values())} to {max(undecided.values())}"
    names = ", ".join(undecided)
    said = f"memlab cannot decide whether the script sets these variables, and keeps what they had before: {names}"
    return [f"{where}: {said}: give {start}those that matter with --set NAME=VALUE"]
