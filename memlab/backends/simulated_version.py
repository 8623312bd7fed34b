"""The version of Transformer Engine whose layers, optimizer and bytes memlab reproduces without a GPU."""

from __future__ import annotations

from packaging.version import Version

TRANSFORMER_ENGINE = Version("2.12.0")


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Replaces Megatron's function of this name, which needs an installed Transformer Engine.

    Args:
        version: The one to compare with.
        check_equality: Whether the same version is enough.
    """
    return Version(version) <= TRANSFORMER_ENGINE if check_equality else Version(version) < TRANSFORMER_ENGINE
