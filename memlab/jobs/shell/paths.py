"""Follows the commands with which a script finds its own folder: ``$(cd "$(dirname "$0")/.." && pwd)`` and the like.

Nothing is executed: these commands only calculate with paths. What any other command prints is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import exists, isdir, isfile, normpath
from pathlib import Path, PurePosixPath

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.shell.words import Operator, Word, tokens

_OPTIONS = {"--", "-P", "-L", "-f", "-e", "-m"}
"""Of ``cd``, ``pwd``, ``readlink`` and ``realpath``, which do not change what is printed, symbolic links aside."""


def path_here(path: Path, script: Path) -> Path:
    """Returns the file of a checkout on this machine that a path of the job's machine names.

    Such as the ``scripts/models/a.sh`` of a folder above the script for ``/root/slime/scripts/models/a.sh``, if this
    machine has no ``/root/slime``.

    Args:
        path: Absolute.
        script: The file that names it.

    Returns:
        The same path if there is no such file.
    """
    if exists(Path(*path.parts[:3])):  # noqa: PTH110  # Path.exists raises if a folder, such as /root, cannot be entered
        return path
    names = (path.parts[start:] for start in range(2, len(path.parts) - 1))
    folders = script.absolute().parents
    files = (folder.joinpath(*name) for name in names for folder in folders)
    return next((file for file in files if is_file(file)), path)


def file_above(name: str, path: Path, script: Path) -> Path:
    """Returns the file that a relative path names in a folder above the script, from which the script is started.

    Args:
        name: With a folder: a name alone may be a file of anybody.
        path: Of that name beside the file that has it.
        script: That is started.

    Returns:
        The same path if it is there, or if there is no such file.
    """
    folders = script.absolute().parents if len(PurePosixPath(name).parts) > 1 and not is_file(path) else ()
    return next((file for up in folders if is_file(file := up / name)), path)


def is_file(path: Path) -> bool:
    """Whether there is such a file; no if a folder, such as /root, cannot be entered, where `Path.is_file` raises."""
    return isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether there is such a folder, as `is_file`."""
    return isdir(path)  # noqa: PTH112


def printed_path(text: str, name: str, line: int, expand: Callable[[Word], str]) -> str:
    """Returns what a command substitution prints if it only calculates with paths, else unknown.

    Args:
        text: Between ``$(`` and ``)``.
        expand: Makes a text of a word.

    Raises:
        ValueError: If a quote or an expansion is not closed.
    """
    parts = tokens(text, name, line)
    words = [part for part in parts if isinstance(part, Word) and part.keyword not in _OPTIONS]
    joined = [part.text for part in parts if isinstance(part, Operator) and part.text != ";"]
    command = [word.keyword for word in words]
    if len(words) == 3 and (command[0], command[2]) == ("cd", "pwd") and joined in ([], ["&&"]):
        return _whole(expand(words[1]))
    if joined or len(words) < 2 or len(words) > 2 + (command[0] == "basename"):
        return UNKNOWN
    if command[0] not in ("dirname", "basename", "realpath", "readlink"):
        return UNKNOWN  # before anything is expanded, which may set variables
    path = expand(words[1])
    if UNKNOWN in path and command[0] != "basename":
        return UNKNOWN
    match command[0]:
        case "dirname":
            return str(PurePosixPath(path).parent)
        case "basename":
            last = PurePosixPath(path).name
            return last.removesuffix(expand(words[2])) if len(words) > 2 else last
    return _whole(path)


def _whole(path: str) -> str:
    """Returns a path without ``..``; one that starts in the folder in which the job is started is unknown."""
    return normpath(path) if path.startswith("/") and UNKNOWN not in path else UNKNOWN
