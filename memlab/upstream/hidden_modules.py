"""Keeps modules out of an import that asks for them, where nothing will use them.

Megatron imports Triton, and what its own FSDP and its checkpoints need, wherever they are installed: with DTensor comes
sympy. Without a GPU nothing runs Triton's kernels, and memlab shards with torch's FSDP2, whose tensors Megatron's code
does not see. Their import takes a quarter of the processor time of a short command. Megatron remembers for good what it
did not find, so this is for processes that run no code but memlab's (`memlab.own_process`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def hidden(absent: Collection[str], later: Collection[str] = ()) -> Iterator[None]:
    """Keeps modules out of what is imported in the block. One that is imported already is not hidden.

    Args:
        absent: Modules whose import raises `ImportError`, as if they were not installed.
        later: Modules of which a stand-in is given, which imports them when it is asked for one of their names; a
            package comes before what it contains.
    """
    hides = [name for name in (*absent, *later) if name not in sys.modules]
    for name in hides:
        sys.modules[name] = None if name in absent else _Later(name)  # type: ignore[assignment]  # None: not there
        package, _, last = name.rpartition(".")
        if isinstance(sys.modules.get(package), _Later):
            setattr(sys.modules[package], last, sys.modules[name])
    try:
        yield
    finally:
        for name in hides:
            if sys.modules.get(name) is None or isinstance(sys.modules[name], _Later):
                sys.modules.pop(name, None)


class _Later(ModuleType):
    """A module before its import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for a module's path
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:  # it is asked in the block already
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)
