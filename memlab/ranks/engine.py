"""What runs in an engine: it starts, serves and ends the process of one rank. It imports no torch.

Every function returns soon, so that an engine always answers and can always be told to end its process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import metadata
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from memlab._version import __version__
from memlab.import_path import variables_that_import_memlab
from memlab.ranks.forked_process import ADDRESS_VARIABLE, ForkedProcess
from memlab.ranks.process_log import ProcessLog

LEASE_SECONDS = 20.0
"""An engine ends its process if the notebook that started it has not been heard of for so long. Jupyter gives a kernel
that it restarts another 5 s to end by itself: together less than half a minute."""
# Not as the main module, whose classes the notebook could not unpickle.
_RANK_PROCESS = "from memlab.ranks.rank_process import main; main()"
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "ipyparallel")


class _RankProcess:
    """A process, who owns it, and when its owner was last heard of."""

    def __init__(self, owner: str, served: str, variables: dict[str, str]) -> None:
        self.owner = owner
        self.serves = served, variables
        self._log = ProcessLog()
        self.connection, other_end = Pipe()
        try:
            everything = os.environ | variables_that_import_memlab() | variables
            self._process = self._start(other_end.fileno(), served, everything)
        finally:
            other_end.close()
        self.heard = time.monotonic()
        threading.Thread(target=self._end_if_forgotten, daemon=True).start()

    def _start(self, other_end: int, served: str, variables: dict[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        output = self._log.file.fileno()
        if address := os.environ.get(ADDRESS_VARIABLE):
            with suppress(OSError):  # without it, the process imports torch and Megatron itself
                return ForkedProcess(address, served, variables, [other_end, output])
        return subprocess.Popen(  # noqa: S603  # this interpreter
            [sys.executable, "-c", _RANK_PROCESS, str(other_end), served],
            pass_fds=[other_end],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
        )

    @property
    def pid(self) -> int | None:
        """Its number; None until it is forked."""
        self._process.poll()
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def receive(self, seconds: float) -> list[bytes]:
        received: list[bytes] = []
        with suppress(EOFError, OSError):
            while self.connection.poll(0 if received else seconds):
                received.append(self.connection.recv_bytes())
        return received

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def hear(self) -> None:
        """Notes that the owner is there. The engine's main thread calls this often, as it calls `end`."""
        self.heard = time.monotonic()
        self._log.shorten()

    def last_words(self) -> str:
        """Returns how the process ended, and the last lines that it printed."""
        return self._log.last_words(self._process.wait())

    def _end_if_forgotten(self) -> None:
        while self.is_running:
            if time.monotonic() - self.heard > LEASE_SECONDS:
                self._process.kill()
            time.sleep(1)


_own: _RankProcess | None = None


def describe() -> dict[str, Any]:
    """Returns where this engine runs, and the versions that a rank would have there."""
    versions = own_code() | {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    started = psutil.Process().create_time()
    return {"host": socket.gethostname(), "pid": os.getpid(), "versions": versions, "started": started}


def own_code() -> dict[str, str]:
    """Returns memlab's version, and a hash of its source files: hosts may have different code of one version.

    The files are read anew each time (20 ms), because the process of a rank imports them when it starts.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(b"%s\0%s\0" % (path.relative_to(package).as_posix().encode(), path.read_bytes()))
    return {"memlab": __version__, "the hash of memlab's source files": digest.hexdigest()[:12]}


def start(owner: str, served: str, variables: dict[str, str]) -> None:
    """Starts the process of a rank, or keeps that of this owner if it serves the same with the same variables.

    Args:
        owner: Who may talk to the process.
        served: ``module:class`` of the object that it makes.

    Raises:
        ValueError: If another owner's process is running here.
    """
    global _own  # noqa: PLW0603  # an engine has one process
    if _own is not None and _own.is_running:
        if _own.owner != owner:
            raise ValueError(
                f"the engine runs a rank of another notebook ({_own.owner}): close its Ranks there, or end its kernel "
                f"and wait {LEASE_SECONDS:.0f} s"
            )
        if _own.serves == (served, variables):
            _own.heard = time.monotonic()
            return
    if _own is not None:
        _own.end()  # it has ended, or is another rank on this host, on another GPU, or serves another object
    _own = _RankProcess(owner, served, variables)


def send(owner: str, request: bytes) -> None:
    """Passes a pickled request on to the process."""
    process = _of(owner)
    process.hear()  # a process that waits for a request prints nothing that a shorter log would lose
    with suppress(OSError):  # a process that has ended: `receive` says so
        process.connection.send_bytes(request)


def receive(owner: str, seconds: float) -> tuple[list[bytes], str]:
    """Waits for messages of the process.

    Args:
        seconds: How long at most, if there is no message yet.

    Returns:
        The pickled messages, and how the process ended, empty while it runs.
    """
    process = _of(owner)
    process.hear()
    messages = process.receive(seconds)
    return messages, "" if messages or process.is_running else process.last_words()


def keep(owner: str) -> None:
    """Notes that the owner is still there."""
    if _own is not None and _own.owner == owner:
        _own.hear()


def end(owner: str) -> None:
    """Ends the process of this owner, if there is one."""
    global _own  # noqa: PLW0603  # an engine has one process
    if _own is not None and _own.owner == owner:
        _own.end()
        _own = None


def _of(owner: str) -> _RankProcess:
    if _own is None or _own.owner != owner:
        raise ValueError("the engine has no process of this notebook any more: open the lab again")
    return _own
