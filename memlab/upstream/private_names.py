"""What memlab replaces, calls or reads of other packages beyond their public interfaces.

``private_names.txt`` has one row per place upstream. `memlab.upstream.patching` replaces nothing that has no row there,
and a test checks that every name exists in the installed versions. That test has passed with torch 2.11, 2.13, 2.14 and
2.15 and megatron-core 0.16.1, 0.18.2 and 0.19.2; Transformer Engine's names are in 2.12.0 and 2.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Internal:
    """Names of one module or class."""

    owner: str
    """``package.module`` or ``package.module:Class``; the module is the upstream file, if `source` is empty."""
    names: tuple[str, ...]
    use: Literal["replaced", "used"]
    """``replaced`` for a block by `patched`, or called, read or written (``used``)."""
    why: str
    where: str = ""
    """The file of memlab that does it."""
    source: str = ""
    """The upstream file, for a name that C++ defines."""
    absent_without_te: bool = False
    """Whether the owner imports the name from Transformer Engine, or what is installed beside it, so that it may be
    missing without TE."""
    since: tuple[int, int] = (0, 0)
    """The first version of megatron-core that has the names, such as (0, 19)."""
    until: tuple[int, int] = (99, 0)
    """The first version of megatron-core that has them no more."""
    is_builtin: bool = False
    """Whether the names are Python's own, which only the owner's source code shows."""
    on_instances: bool = False
    """Whether the names are attributes of instances, which only the owner's source code shows."""
    needs_cuda: bool = False
    """Whether only a torch with CUDA has the names."""

    @property
    def package(self) -> str:
        """``torch``, ``megatron``, ``transformer_engine`` or ``transformers``."""
        return self.owner.partition(".")[0]


_ROW = re.compile(r"(replaced|used) (\S+) ([^[\]]+?)(?: \[(.+)\])?")


def _rows() -> Iterator[Internal]:
    where = ""
    lines = iter(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if (row := _ROW.fullmatch(line)) is not None:
            use, owner, names, options = row.groups(default="")
            more = dict(_option(word) for word in options.split())
            yield Internal(
                owner=owner,
                names=tuple(names.split()),
                use="replaced" if use == "replaced" else "used",
                why=next(lines).strip(),
                where=where,
                **more,
            )
        elif line.endswith(".py:"):
            where = line[:-1]
        elif line and not line.startswith("#"):
            raise ValueError(f"private_names.txt has the line {line!r}: start it with replaced, used or a file's name")


def _option(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name in ("since", "until"):
        major, minor = map(int, value.split("."))
        return name, (major, minor)
    return name, value or True


INTERNALS = tuple(_rows())


@cache
def replaceable() -> dict[str, tuple[Internal, str]]:
    """Returns the row and the attribute of each name that is replaced, by its dotted name."""
    return {
        f"{row.owner.replace(':', '.')}.{name}": (row, name)
        for row in INTERNALS
        for name in row.names
        if row.use == "replaced"
    }
