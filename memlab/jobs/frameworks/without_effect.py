"""Keys that do not change the memory of a training step: every one was read, in the version that its list names.

A list is a text in ``keys_without_effect/``. Its first line names the version and the files that the keys are from.
After it, each line has a key, or several keys of one section, as bash writes them: ``optim.{lr,betas.{first,second}}``
is ``optim.lr``, ``optim.betas.first`` and ``optim.betas.second``. A line that starts with ``#`` is a heading, and says
why the keys below it have no effect where this is not plain. A key of which the framework itself does not read the
parts, such as the arguments of an inference engine, is an open mapping: ``key.*``, or ``prefix_*`` of a flag, under a
heading that says who reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

_MARKS_OF_AN_OBJECT = ("_target_", "_call_", "_partial_", "_args_")
"""Beside the fields of an object, Hydra and Megatron-Bridge write by which class it is made, and how."""
_SIGNS = re.compile("[{},]")
_LISTS = Path(__file__).with_name("keys_without_effect")


def keys_without_effect(name: str, prefix: str = "") -> frozenset[str]:
    """Returns the keys of a list.

    Args:
        name: Of the list's file, without its suffix.
        prefix: Under which the framework passes the keys on, such as ``model``.
    """
    return frozenset(f"{prefix}.{key}" if prefix else key for _, key in headed_keys(name))


@cache
def headed_keys(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the keys of a list, each after the heading that it stands under; see `keys_without_effect`."""
    found, heading = list[tuple[str, str]](), ""
    for line in (_LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.removeprefix("# ")
        elif line:
            found += [(heading, key) for key in _keys_of(line)]
    return tuple(found)


def _keys_of(text: str) -> Iterator[str]:
    start, depth = text.find("{"), 0
    if start < 0:
        yield text
        return
    edges = [start]
    for sign in _SIGNS.finditer(text, start):
        depth += (sign[0] == "{") - (sign[0] == "}")
        if depth == 0 or (depth == 1 and sign[0] == ","):
            edges.append(sign.start())
        if depth == 0:
            break
    for first, last in pairwise(edges):
        for inside in _keys_of(text[first + 1 : last]):
            yield from (text[:start] + inside + rest for rest in _keys_of(text[edges[-1] + 1 :]))


def has_no_effect(key: str, keys: frozenset[str]) -> bool:
    """Whether a key is in a list, or in an open mapping of it."""
    starts = [key[: index + 1] for index, letter in enumerate(key) if letter in "._"]
    if key.rpartition(".")[2] in _MARKS_OF_AN_OBJECT:
        return True
    return key in keys or any(f"{start}*" in keys for start in starts)
