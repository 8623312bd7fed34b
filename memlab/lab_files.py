"""Finds the labs: those of the clone that this package is part of, or the copy that memlab's wheel has installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

IN_A_CLONE = Path(__file__).parents[1] / "labs"
"""The labs of the clone that this package is part of; a wheel has no such folder."""
_CARRIED = "share/memlab/labs/README.md"
"""Where pip puts the labs of a wheel, below the folder of the environment (`data-files` in pyproject.toml)."""


def labs_folder() -> Path:
    """Returns the folder with the notebooks, and with the measured ``results/`` that they read.

    Raises:
        ValueError: If memlab is neither in a clone nor installed from a wheel.
    """
    if IN_A_CLONE.is_dir():
        return IN_A_CLONE
    try:
        installed = files("memlab") or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.as_posix().endswith(_CARRIED):
            return Path(str(file.locate())).resolve().parent
    raise ValueError(
        f"the labs are neither in {IN_A_CLONE} nor installed with memlab, must be in one of them: install memlab from "
        "its wheel, or work in a clone of its repository"
    )
