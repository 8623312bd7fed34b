"""Which of the variables that a script sets in branches that memlab cannot decide concern its job."""

from __future__ import annotations

import re
from collections.abc import Iterable

_REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_QUOTED = r"""\"(?:\\.|[^\"\\])*\"|'[^']*'"""
_ASSIGNED = re.compile(
    r"(?:^|;|&&|\|\||[){]|\b(?:then|do|else)\b)[ \t]*"
    r"(?:(?:export|local|readonly|declare|typeset)[ \t]+(?:-\w+[ \t]+)*)?"
    rf"([A-Za-z_]\w*)\+?=((?:\((?:[^()]|\([^()]*\))*\))|(?:{_QUOTED}|\$\((?:[^()]|\([^()]*\))*\)|[^\s;\"'])*)",
    re.MULTILINE,
)
_ENDS = re.compile(r"[ \t]*(?:$|[;&|)}#])", re.MULTILINE)
_EXPORTED = re.compile(r"\bexport(?:[ \t]+[A-Za-z_]\w*)+[ \t]*$", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*#.*", re.MULTILINE)
_PRINTS = re.compile(r"^[ \t]*(?:echo|printf(?![ \t]+-v))\b[^;&|<>\"'`]*(?:>&2[ \t]*)?$")
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+[\w:-]+|[\w:-]+[ \t]*\(\))")
_OF_NO_JOB = re.compile(
    r"(MIOPEN|ROCBLAS|HSA|OMP|MKL|OPENBLAS|WANDB|SWANLAB|HF|HUGGINGFACE|RAY|TOKENIZERS|UCX|GLOO|FI|GRPC|AWS|TF|XDG)_\w+"
    r"|PATH|LD_\w+|PYTHON\w*"
)
"""Environment of other programs, or of libraries that keep nothing on a GPU."""
_MOST_NAMED_APART = 3


def of_a_job(
    undecided: dict[str, int], texts: Iterable[list[str]], lines: set[int], exported: set[str]
) -> dict[str, int]:
    """Returns the variables that anything but the script's own output mentions, directly or through others.

    A name counts without its ``$`` too, as in ``let`` and ``declare -n``: better a warning too many than one too few.

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
            reached |= set(_REFERENCE.findall(line)) if number in lines else set()
        joined = _COMMENT.sub("", "\n".join(text)).replace("\\\n", " ")
        for name, value in _ASSIGNED.findall(joined):
            values.setdefault(name, set()).update(_NAME.findall(value))
        reached |= set(_NAME.findall(_without_output(_EXPORTED.sub("", _ASSIGNED.sub(_left_of, joined)))))
    new = set(reached)
    while new:
        new = {used for name in new for used in values.get(name, ())} - reached
        reached |= new
    return {name: line for name, line in undecided.items() if name in reached}


def _left_of(assignment: re.Match[str]) -> str:
    """Leaves an assignment that stands before a program, which then has it in its environment."""
    return "\n" if _ENDS.match(assignment.string, assignment.end()) else assignment[0]


def _without_output(text: str) -> str:
    """Drops the lines that only print; what a function prints may be a value."""
    kept, is_in_function = [], False
    for line in text.splitlines():
        is_in_function = (is_in_function or _FUNCTION.match(line) is not None) and not line.startswith("}")
        if is_in_function or not _PRINTS.match(re.sub(_QUOTED, "", line)):
            kept.append(line)
    return "\n".join(kept)


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
