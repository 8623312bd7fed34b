"""The versions that a measurement depends on."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from memlab._version import __version__


def versions() -> dict[str, str]:
    """Returns each by the name of its package; one that is missing is ``not installed``."""
    found = {"memlab": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
