"""Keys that do not change the memory of a training step: every one was read, in the version that its list names.

A list is a text in ``keys_without_effect/``. Its first line names the version and the files that the keys are from.
After it, each line has one key; a line that starts with ``#`` is a heading, and says why the keys below it have no
effect where this is not plain. A key of which the framework itself does not read the parts, such as the arguments of
an inference engine, is an open mapping: ``key.*``, or ``prefix_*`` of a flag, under a heading that says who reads them.
"""

from __future__ import annotations

from pathlib import Path

_MARKS_OF_AN_OBJECT = ("_target_", "_call_", "_partial_", "_args_")
"""Beside the fields of an object, Hydra and Megatron-Bridge write by which class it is made, and how."""
_LISTS = Path(__file__).with_name("keys_without_effect")


def keys_without_effect(name: str, prefix: str = "") -> frozenset[str]:
    """Returns the keys of a list.

    Args:
        name: Of the list's file, without its suffix.
        prefix: Under which the framework passes the keys on, such as ``model``.
    """
    lines = (_LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    keys = (line for line in lines if line and not line.startswith("#"))
    return frozenset(f"{prefix}.{key}" if prefix else key for key in keys)


def has_no_effect(key: str, keys: frozenset[str]) -> bool:
    """Whether a key is in a list, or in an open mapping of it."""
    starts = [key[: index + 1] for index, letter in enumerate(key) if letter in "._"]
    if key.rpartition(".")[2] in _MARKS_OF_AN_OBJECT:
        return True
    return key in keys or any(f"{start}*" in keys for start in starts)
