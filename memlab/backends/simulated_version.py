"""The versions that a lab without a GPU imitates: those of its scenario, while one of its jobs runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from packaging.version import Version

from memlab.config.versions import Versions

_imitated = [Versions()]
"""The last one holds. One lab is open in a process, so that all threads may see it."""


@contextmanager
def imitating(versions: Versions) -> Iterator[None]:
    """Lets the block run as with these versions."""
    _imitated.append(versions)
    try:
        yield
    finally:
        _imitated.pop()


def imitated() -> Versions:
    """Returns the versions of the block that is running."""
    return _imitated[-1]


def known(versions: Versions) -> Versions:
    """Returns versions that a prediction can be made for.

    Raises:
        ValueError: If memlab does not know one of them.
    """
    versions.require_known()
    return versions


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Replaces Megatron's function of this name, which needs an installed Transformer Engine."""
    engine = Version(imitated().transformer_engine)
    return Version(version) <= engine if check_equality else Version(version) < engine
