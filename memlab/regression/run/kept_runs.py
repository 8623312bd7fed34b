"""The folder of the kept runs. A run is written aside and renamed, so a folder that has a run's name is whole.

Two nightlies may share the folder: each writes into a staging folder of its own, and takes the folder's lock to read
the history, rename its run and remove the oldest. Locks are the kernel's (flock), so none outlives its process.
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

from memlab.regression.run.process import end_processes
from memlab.regression.suite.suite import SUMMARY_FILE
from memlab.regression.summary import Summary, read_summary

_STAGING = ".{name}.nightly-{unique}"
_ALIVE = ".alive"

History = list[tuple[Path, Summary]]
"""The kept runs of one suite, the oldest first."""

NO_COMMIT = "nocommit"
"""Stands in a run's name for the commit where there is none."""


def commit_in_words(commit: str) -> str:
    """Returns a commit as a sentence names it: ``commit abc1234``, or ``no commit``."""
    return "no commit" if commit == NO_COMMIT else f"commit {commit}"


def run_name(started: datetime, commit: str, backend: str) -> str:
    """Names a run ``<utc-date>_<commit>_<backend>``; the date has a time, so that names sort by age."""
    return f"{started:%Y-%m-%d-%H%M%S}_{commit}_{backend}"


def current_commit(folder: Path) -> str:
    """Returns the commit that a folder of a repository is at, with ``-changed`` if tracked files differ from it.

    Without a repository, or without git, it is `NO_COMMIT`.
    """
    git = shutil.which("git")
    if git is None:
        return NO_COMMIT
    commands = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    commit, changes = (
        subprocess.run([git, "-C", str(folder), *command], capture_output=True, text=True, check=False)  # noqa: S603 - git
        for command in commands
    )
    if commit.returncode:
        return NO_COMMIT
    return commit.stdout.strip() + ("-changed" if changes.stdout.strip() else "")


@contextmanager
def staged(runs_folder: Path, name: str, on_progress: Callable[[str], object]) -> Iterator[Path]:
    """Gives a folder to write a run into; unless the block publishes the run, the folder is removed at its end.

    Before that, it ends and removes what a killed nightly left behind.
    """
    runs_folder.mkdir(parents=True, exist_ok=True)
    staging = runs_folder / _STAGING.format(name=name, unique=uuid.uuid4().hex[:8])
    try:
        with ExitStack() as held:
            with locked(runs_folder, on_progress):  # so that no other nightly takes the new folder for an abandoned one
                _remove_abandoned(runs_folder, on_progress)
                staging.mkdir()
                alive = held.enter_context((staging / _ALIVE).open("w"))
                fcntl.flock(alive, fcntl.LOCK_EX)
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # a published run is no longer here


@contextmanager
def locked(runs_folder: Path, on_progress: Callable[[str], object]) -> Iterator[None]:
    """Holds the lock of the folder of runs, and reports if it has to wait for it."""
    with (runs_folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(f"waiting for another nightly that works in {runs_folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept_runs(runs_folder: Path) -> list[Path]:
    """Returns the folders of the nightly's whole runs, sorted by name."""
    return sorted(path.parent for path in runs_folder.glob(f"[!.]*/{SUMMARY_FILE}"))


def read_history(runs_folder: Path, suite: str, backend: str, on_unreadable: Callable[[str], object]) -> History:
    """Reads the kept runs of a suite, the oldest first; it reports a run that cannot be read and leaves it out."""
    history = []
    for folder in kept_runs(runs_folder):
        try:
            summary = read_summary(folder)
        except ValueError as error:
            on_unreadable(f"left out: {error}")
            continue
        if (summary.suite, summary.backend) == (suite, backend):
            history.append((folder, summary))
    # By number first: a name is a time, and the clock may have been set back. Runs of before there were numbers have 0.
    return sorted(history, key=lambda kept: (kept[1].number, kept[0].name))


def free_name(runs_folder: Path, name: str) -> str:
    """Returns the name, with a number added if a run of the same second has it. Call it under the lock."""
    number = 1
    free = name
    while (runs_folder / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def publish(staging: Path, target: Path) -> None:
    """Gives a run its name; `staging` is what `staged` gave. Call it under the lock."""
    (staging / _ALIVE).unlink(missing_ok=True)
    staging.rename(target)


def remove_oldest(history: History, keep: int, on_failure: Callable[[str], object]) -> None:
    """Removes the oldest runs of a suite; calls `on_failure` with a line for one that stays. Call it under the lock."""
    for run, _ in history[: max(0, len(history) - keep)]:
        try:
            if run.is_symlink():
                run.unlink()  # what it links to belongs to another folder
                continue
            # Renamed first: a removal that is cut short leaves nothing that looks like a run.
            doomed = run.rename(run.with_name(_STAGING.format(name=run.name, unique=f"removed-{uuid.uuid4().hex[:8]}")))
            shutil.rmtree(doomed)
        except OSError as error:
            on_failure(f"the old run {run} could not be removed ({error.strerror}): remove it by hand")


def _remove_abandoned(runs_folder: Path, on_progress: Callable[[str], object]) -> None:
    for path in runs_folder.glob(_STAGING.format(name="*", unique="*")):
        if not _is_abandoned(path):
            continue
        try:
            end_processes(path)  # kernels of a killed nightly would take memory and time from this one
        except RuntimeError as error:
            on_progress(str(error))
            continue
        shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(staging: Path) -> bool:
    """Whether the nightly that wrote here was killed: a living one holds a lock."""
    try:
        with (staging / _ALIVE).open() as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # a living one's, or another user's
        return False
    except FileNotFoundError:  # a removal that was cut short
        return True
    return True
