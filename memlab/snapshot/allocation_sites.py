"""Who allocated a block, as a short name: the innermost line of the user's own Python, or the text that it had set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_NAMES = 4096
"""The most names that are kept: those with the most bytes."""
_LONGEST_NAME = 200
_LONG_STACK = 64
OTHERS = "(other places)"
_TORCH_FILES = ("-packages/torch/", "/pytorch/torch/")


def places_of(
    sources: Iterable[Mapping[str, Any] | None], num_bytes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Names who allocated each block.

    Args:
        sources: The entry or block of the snapshot that names it, for each; None where nothing does.
        num_bytes: Bytes of each block; the names with the fewest bytes are folded into one.

    Returns:
        Index of each block's name, and the names. The first is empty: unknown.
    """
    codes: dict[str, int] = {"": 0}
    name_of = _Namer()
    code = np.fromiter((codes.setdefault(name_of(source), len(codes)) for source in sources), dtype=np.int64)
    names = list(codes)
    if len(names) <= NUM_NAMES:
        return code, tuple(names)
    sums = np.bincount(code, weights=num_bytes, minlength=len(names))
    kept = [0, *(np.argsort(-sums[1:], kind="stable")[: NUM_NAMES - 2] + 1).tolist()]
    fold = np.full(len(names), len(kept))
    fold[kept] = np.arange(len(kept))
    return fold[code], (*(names[old] for old in kept), OTHERS)


class _Namer:
    """Remembers frames and long stacks: torch writes each once, and entries share them."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """By identity of the frame or stack; the snapshot outlives this object."""

    def __call__(self, source: Mapping[str, Any] | None) -> str:
        if source is None:
            return ""
        metadata = source.get("user_metadata")
        if metadata:
            return _text(_as_torch_writes(metadata) if isinstance(metadata, dict) else metadata)
        stack = source.get("frames") or ()
        if len(stack) < _LONG_STACK:
            return self._name_of(stack)
        # A million entries may share a stack of a million frames.
        if id(stack) not in self._names:
            self._names[id(stack)] = self._name_of(stack)
        return self._names[id(stack)]

    def _name_of(self, stack: Iterable[Mapping[str, Any]]) -> str:
        names = self._names
        for frame in stack:
            name = names.get(id(frame))
            if name is None:
                name = names[id(frame)] = _frame_name(frame)
            if name:
                return name
        return ""


def _frame_name(frame: Mapping[str, Any]) -> str:
    """Returns ``file:line function`` of a frame of Python outside torch; else the empty string."""
    path = frame["filename"]
    is_python = path.endswith(".py") or path.startswith("<")
    if not is_python or any(part in path for part in _TORCH_FILES):
        return ""
    return f"{_text(path.rsplit('/', 1)[-1])}:{int(frame['line'])} {_text(frame['name'])}"


def _as_torch_writes(metadata: Mapping[Any, Any]) -> str:
    """Returns metadata as JSON: torch 2.15 takes a dict and records this text, others may have read it back.

    What is nested may take for ever to be written, so it is left out.
    """
    plain = {
        key: value if value is None or isinstance(value, (str, int, float)) else "..."
        for key, value in metadata.items()
    }
    return json.dumps(plain, separators=(",", ":"))


def _text(value: object) -> str:
    """Returns a text, cut where it is absurdly long. Anything else may take for ever to be written as one."""
    if not isinstance(value, str):
        raise TypeError("a name must be a text")
    value.encode()  # half of a surrogate pair cannot be saved or printed
    return value if len(value) <= _LONGEST_NAME else value[: _LONGEST_NAME - 3] + "..."
