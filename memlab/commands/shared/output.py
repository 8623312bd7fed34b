"""Where ``--out`` may write: never over something, and never into a folder that another command is writing to."""

from __future__ import annotations

import argparse
import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from memlab.atomic_files import named_in_errors
from memlab.commands.shared.process import terminate_on_signal
from memlab.record.step_record import StepRecord

_LOCK = ".memlab-is-writing"


def out_path(text: str) -> Path:
    """Reads the value of ``--out``; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty, must name a file or folder")
    return Path(text)


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how a record is printed and where it is saved."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object; bytes are integers")
    group.add_argument(
        "--out", type=out_path, metavar="FOLDER", help="also save the step's record and timeline in this new folder"
    )
    group.add_argument(
        "--snapshot",
        action="store_true",
        help="also write a memory snapshot for pytorch.org/memory_viz to snapshot.pickle in the folder of --out",
    )


def check_new_file(path: Path | None) -> None:
    """Checks that a file can be written, and that nothing is lost by it.

    Raises:
        ValueError: If the path is a folder, a file with content, or in a folder that does not exist or is read-only.
    """
    if path is None:
        return
    if path.exists() and (not path.is_file() or path.stat().st_size):
        what = "is a folder" if path.is_dir() else "already exists"
        raise ValueError(f"--out is {path}, which {what}: choose another file or remove it")
    if not path.parent.is_dir():
        raise ValueError(f"--out is {path}, but {path.parent} is not a folder: make it, or choose another file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def check_new_folder(flag: str, path: Path, source: Path) -> None:
    """Checks that a folder does not exist or is empty, so that nothing is lost by what is copied into it.

    Args:
        flag: What gave the path, for the message.
        source: The folder that is copied.

    Raises:
        ValueError: If there is a file of this name, something in the folder, or the folder is in the copied one.
    """
    if path.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{flag} is {path}, which is in {source}, must be outside what is copied: choose another one")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "is not empty" if path.is_dir() else "is a file"
        raise ValueError(f"{flag} is {path}, which {what}, must be a new or an empty folder: choose another one")


def check_writable_folder(path: Path) -> None:
    """Checks that files can be written into a folder, or into the one in which it will be made.

    Raises:
        ValueError: If the path, or the first part of it that exists, is not a folder or is read-only.
    """
    nearest = path.absolute()
    while not _is_there(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ValueError(f"--out is {path}, but {nearest} is not a folder: choose another path")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_there(path: Path) -> bool:
    """Whether something has this name, a broken link too. A name that no file can have raises `OSError`."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def claimed_folder(folder: Path | None, *, is_of_a_rank: bool = False) -> Iterator[None]:
    """Makes a folder for a record and keeps other commands out of it for the block; nothing is done for None.

    The lock is the kernel's (flock), so none outlives its process. A folder that the block leaves empty is removed, and
    the lock's file too, also after a request to terminate.

    Args:
        is_of_a_rank: Whether torchrun has started this process as one rank of several. A request to terminate then ends
            it at once: a rank that waits in a collective would not see it.

    Raises:
        ValueError: If the folder cannot be made or written to, has content, or another command writes to it.
    """
    if folder is None:
        yield
        return
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock, nullcontext() if is_of_a_rank else terminate_on_signal():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"--out is {folder}, which another memlab command is writing to now: choose another folder"
            ) from error
        try:
            if any(path.name != _LOCK for path in folder.iterdir()):
                raise ValueError(f"--out is {folder}, which is not empty: choose another folder or remove it")
            yield
        finally:
            (folder / _LOCK).unlink(missing_ok=True)
            if is_new and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def save_record(record: StepRecord, folder: Path, *, snapshot: bool) -> None:
    """Saves a record with its timeline, and as a memory snapshot if requested."""
    with named_in_errors(folder):
        record.save(folder)
        if snapshot:
            record.export_snapshot(folder / "snapshot.pickle")


def _unwritable(path: Path, error: OSError) -> ValueError:
    reason = (error.strerror or type(error).__name__).lower()
    return ValueError(f"--out is {path}, which cannot be written ({reason}): choose another path")
