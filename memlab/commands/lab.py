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
    environment = os.environ | {"JUPYTER_CONFIG_PATH": _config_path()}
    # JupyterLab takes this process over, Ctrl-C included.
    return lambda: os.execve(command[0], command, environment)  # noqa: S606


def _config_path() -> str:
    """Adds memlab's defaults to the folders in which JupyterLab looks for some; what a user has set in JupyterLab wins.

    They wrap long lines of code: beside the file browser, a screen of 1280 pixels shows about 100 characters.
    """
    given = os.environ.get("JUPYTER_CONFIG_PATH")
    return os.pathsep.join([*([given] if given else []), str(Path(__file__).parent / "jupyter")])
