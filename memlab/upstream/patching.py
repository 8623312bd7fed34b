"""Replaces names of `memlab.upstream.private_names` for a block, and puts the originals back."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from memlab.upstream.private_names import Internal, replaceable

_ABSENT = object()
_swapped: list[tuple[Any, str, Any, Any]] = []
"""What is replaced now, the latest last: owner, name, the original and its replacement."""


@contextmanager
def patched(replacements: Mapping[str, Any], *, on: object = None) -> Iterator[None]:
    """Replaces upstream names for the block.

    They are replaced on every thread: torch and Megatron have them once per process. A name that the installed
    megatron-core does not have yet, or no more, by its row's versions, is left out.

    Args:
        replacements: Values by dotted name, such as ``torch.cuda.synchronize``. Every name has a row in `INTERNALS`.
        on: The instance whose attributes are replaced; None for those of the row's module or class.

    Raises:
        AttributeError: If upstream no longer has a name where its row says. Nothing is replaced then.
    """
    places = [(_place(dotted), value) for dotted, value in replacements.items()]
    with swapped((on or owner, name, value) for (owner, name), value in places if owner is not None):
        yield


@contextmanager
def swapped(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes for the block; each is an owner, a name and a value."""
    own: list[tuple[Any, str, Any, Any]] = []
    try:
        for owner, name, value in replacements:
            # What the owner itself has: a class may inherit the name, and must not keep a copy of it.
            own.append((owner, name, vars(owner).get(name, _ABSENT), value))
            _swapped.append(own[-1])
            setattr(owner, name, value)
        yield
    finally:
        for one in reversed(own):
            _put_back(one)
        ended = {id(one) for one in own}
        _swapped[:] = [each for each in _swapped if id(each) not in ended]


@contextmanager
def originals() -> Iterator[None]:
    """Puts all originals back for the block: what is imported in it must not keep a replacement."""
    replaced = list(_swapped)
    _swapped.clear()  # an import within may be put off in turn, and ask for this again
    for one in reversed(replaced):
        _put_back(one)
    try:
        yield
    finally:
        _swapped[:0] = replaced
        for owner, name, _, value in replaced:
            setattr(owner, name, value)


def _put_back(one: tuple[Any, str, Any, Any]) -> None:
    owner, name, original, _ = one
    if original is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


@cache
def _place(dotted: str) -> tuple[Any, str]:
    """Returns the owner and the attribute of a name; None as owner for another version's name."""
    row, name = replaceable()[dotted]
    if not in_this_version(row):
        return None, name
    owner = pkgutil.resolve_name(row.owner)
    if not hasattr(owner, name) and not row.absent_without_te and not row.is_builtin:
        raise AttributeError(
            f"{dotted} does not exist in the installed version, and memlab replaces it ({row.where}): {row.why} "
            "Install the versions that memlab pins: pip install -e '.[cpu]'"
        )
    return owner, name


def in_this_version(row: Internal) -> bool:
    """Whether the installed megatron-core is one of those that have the row's names."""
    if row.package != "megatron":
        return True
    from megatron.core.package_info import MAJOR, MINOR

    return row.since <= (MAJOR, MINOR) < row.until
