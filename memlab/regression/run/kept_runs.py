"""The folder of the kept runs. A run is written aside and renamed, so what has a name is whole.

Two nightlies may share the folder: each writes into a staging folder of its own, and takes the folder's lock to read
the history, rename its run and remove the oldest. Locks are the kernel's (flock): none outlives its process.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from memlab.regression.summary import SUMMARY_FILE, Summary, read_summary

_STAGING = ".{name}.nightly-{unique}"
_ALIVE = ".alive"


def run_name(started: datetime, commit: str, backend: str) -> str:
    """Names a run ``<utc-date>_<commit>_<backend>``; the date has a time, so that names sort by age."""
    return f"{started:%Y-%m-%d-%H%M%S}_{commit}_{backend}"


def current_commit(folder: Path) -> str:
    """Returns the commit that a folder of a repository is at, with ``-changed`` if tracked files differ from it.

    Where there is no repository, or no git, it is ``nocommit``.
    """
    git = shutil.which("git")
    if git is None:
        return "nocommit"
    commands = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    commit, changes = (
        subprocess.run([git, "-C", str(folder), *command], capture_output=True, text=True, check=False)  # noqa: S603 - git
        for command in commands
    )
    if commit.returncode:
        return "nocommit"
    return commit.stdout.strip() + ("-changed" if changes.stdout.strip() else "")


@contextmanager
def staged(runs_folder: Path, name: str, on_wait: Callable[[str], object]) -> Iterator[Path]:
    """Gives a folder to write a run into; what is not published by the end of the block is removed."""
    runs_folder.mkdir(parents=True, exist_ok=True)
    staging = runs_folder / _STAGING.format(name=name, unique=uuid.uuid4().hex[:8])
    try:
        with ExitStack() as held:
            with locked(runs_folder, on_wait):  # so that nobody sees it before it is known to be alive
                staging.mkdir()
                alive = held.enter_context((staging / _ALIVE).open("w"))
                fcntl.flock(alive, fcntl.LOCK_EX)
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # of a published run there is nothing here


@contextmanager
def locked(runs_folder: Path, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Holds the lock of the folder of runs; whoever has to wait for it is told so."""
    with (runs_folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(f"waiting for another nightly that is at work in {runs_folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept_runs(runs_folder: Path) -> list[Path]:
    """Returns the folders of the nightly's whole runs, the oldest first."""
    return sorted(path.parent for path in runs_folder.glob(f"[!.]*/{SUMMARY_FILE}"))


def read_history(
    runs_folder: Path, suite: str, backend: str, on_unreadable: Callable[[str], object]
) -> list[tuple[Path, Summary]]:
    """Reads the kept runs of a suite, the oldest first; one that cannot be read is named and left out."""
    history = []
    for folder in kept_runs(runs_folder):
        try:
            summary = read_summary(folder)
        except ValueError as error:
            on_unreadable(f"left out of the trend: {error}")
            continue
        if (summary.suite, summary.backend) == (suite, backend):
            history.append((folder, summary))
    return history


def free_name(runs_folder: Path, name: str) -> str:
    """Returns the name, or with a number behind it if a run of the same second has it. Call it under the lock."""
    number = 1
    free = name
    while (runs_folder / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def publish(staging: Path, target: Path, keep: int) -> None:
    """Gives a run its name, and removes all but the newest runs. Call it under the lock.

    Args:
        staging: What `staged` gave.
        target: The run's folder.
        keep: How many runs of any suite stay, this one counted.
    """
    (staging / _ALIVE).unlink()
    staging.rename(target)
    runs_folder = target.parent
    others = [path for path in kept_runs(runs_folder) if path != target]
    for path in others[: max(0, len(others) + 1 - keep)]:
        _remove(path)
    for path in runs_folder.glob(_STAGING.format(name="*", unique="*")):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _remove(run: Path) -> None:
    # Renamed first: a removal that is cut short leaves nothing that looks like a run.
    doomed = run.rename(run.with_name(_STAGING.format(name=run.name, unique="removed")))
    shutil.rmtree(doomed)


def _is_abandoned(staging: Path) -> bool:
    """Whether the nightly that wrote here was killed: a living one holds a lock."""
    try:
        with (staging / _ALIVE).open() as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # a removal that was cut short
        return True
    return True
