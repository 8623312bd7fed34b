"""Work that the processes of one test run share: the first that needs it does it, the others read the result."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_Result = TypeVar("_Result")


def once_a_run(folders: pytest.TempPathFactory, name: str, work: Callable[[Path], _Result]) -> _Result:
    """Returns what the work gives, which is done once, however many processes of pytest-xdist ask for it.

    With ``--dist worksteal`` a process may leave a module and come back to it, and then makes its fixtures again.

    Args:
        folders: Of the test run.
        name: Of this work; another name is other work.
        work: Gets an empty folder, and returns what can be pickled.
    """
    own = folders.getbasetemp()
    of_run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    found = of_run / f"{name}.pickle"
    with (of_run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_bytes(pickle.dumps(work(folders.mktemp(name))))
    result: _Result = pickle.loads(found.read_bytes())  # noqa: S301  # our own
    return result
