"""Opens JupyterLab on the labs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "options",
        nargs="*",
        metavar="-- OPTION",
        help="options for jupyter lab, such as -- --no-browser",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Finds the folder of the labs.

    Raises:
        ValueError: If it is neither in the current folder nor next to the package.
    """
    folder = next((path / "labs" for path in (Path.cwd(), Path(__file__).parents[2]) if (path / "labs").is_dir()), None)
    if folder is None:
        raise ValueError(f"there is no labs folder in {Path.cwd()}: go to the clone of the repository first")
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}", *arguments.options]
    return lambda: os.execv(command[0], command)  # noqa: S606 - JupyterLab takes this process over, Ctrl-C included
