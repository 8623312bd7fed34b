"""Opens JupyterLab on the labs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from memlab.commands.shared.output import check_new_folder, out_path
from memlab.lab_files import IN_A_CLONE, labs_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "--copy-to",
        type=out_path,
        metavar="FOLDER",
        help="first copy the labs into this new folder, with their pages and measured results, and open the copy",
    )
    parser.add_argument(
        "options",
        nargs="*",
        metavar="-- OPTION",
        help="options for jupyter lab, such as -- --no-browser",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Finds the folder of the labs, and checks the folder that they are to be copied to.

    The labs in the current folder come first, then those of the clone. Those that a wheel carries belong to the
    environment, so a reader works in a copy.

    Raises:
        ValueError: If there are no labs, or they cannot be copied there.
    """
    here = Path.cwd() / "labs"
    source = here if here.is_dir() else labs_folder()
    copy: Path | None = arguments.copy_to
    if copy is None and source not in (here, IN_A_CLONE):
        question = f"there is no labs folder in {Path.cwd()}: copy memlab's labs to {here}, and open the copy? [Y/n] "
        if not sys.stdin.isatty() or input(question).strip().lower() not in {"", "y", "yes"}:
            raise ValueError(
                f"there is no labs folder in {Path.cwd()}, must be one, because the labs that were installed with "
                "memlab stay as they are: memlab lab --copy-to labs copies them there, and opens the copy"
            )
        copy = here
    if copy is not None:
        check_new_folder("--copy-to", copy, source)

    def run() -> int:
        if copy is not None:
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
            print(f"the labs are in {copy}: begin with 00_quickstart.ipynb", flush=True)
        command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={copy or source}", *arguments.options]
        environment = os.environ | {"JUPYTER_CONFIG_PATH": _config_path()}
        if os.geteuid() == 0 and "--allow-root" not in arguments.options:  # as in most containers of a GPU machine
            print(
                "JupyterLab starts as root only if it is told to: memlab lab -- --allow-root, or allow_root in the "
                "configuration of Jupyter",
                file=sys.stderr,
                flush=True,
            )
        # JupyterLab takes this process over, Ctrl-C included.
        os.execve(command[0], command, environment)  # noqa: S606

    return run


def _config_path() -> str:
    """Adds memlab's defaults to the folders in which JupyterLab looks for some; what a user has set in JupyterLab wins.

    They wrap long lines of code: beside the file browser, a screen of 1280 pixels shows about 100 characters.
    """
    given = os.environ.get("JUPYTER_CONFIG_PATH")
    return os.pathsep.join([*([given] if given else []), str(Path(__file__).parent / "jupyter")])
