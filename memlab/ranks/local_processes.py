"""Processes of this machine that serve independent calls (`memlab.ranks.balanced`), without ipyparallel.

They are forked from one small server (``multiprocessing``'s ``forkserver``), which imports what they need once. So the
first call begins as soon as in a process that does all the work itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any

from memlab.ranks.process_log import ProcessLog
from memlab.ranks.rank_process import serve

_preparing = threading.Lock()


class LocalProcess:
    """One process, which `start` starts and `end` ends."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._log = ProcessLog()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self, served: str, variables: dict[str, str]) -> None:
        """Starts the process, which makes the object ``module:class``."""
        context = multiprocessing.get_context("forkserver")
        self._connection, other_end = context.Pipe()
        arguments = other_end, served, variables, self._log
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        with _without_main_module():
            self._process.start()
        other_end.close()

    def send(self, request: bytes) -> None:
        """Passes a pickled request on to the process."""
        assert self._connection is not None
        with suppress(OSError):  # a process that has ended: `receive` says so
            self._connection.send_bytes(request)

    def receive(self, seconds: float) -> tuple[list[bytes], str]:
        """Returns pickled messages, and how the process ended, empty while it runs; waits for either."""
        assert self._connection is not None
        assert self._process is not None
        self._log.shorten()
        received: list[bytes] = []
        wait([self._connection, self._process.sentinel], seconds)
        with suppress(EOFError, OSError):
            while self._connection.poll():
                received.append(self._connection.recv_bytes())
        code = self._process.exitcode
        return received, "" if received or code is None else self._log.last_words(code)

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def __str__(self) -> str:
        number = self._process.pid if self._process is not None else "not started"
        return f"engine {self.number} (process {number} on this machine)"


class LocalProcesses:
    """Processes of this machine, for `memlab.ranks.balanced.Balanced`; their server imports modules before a fork."""

    def __init__(self, number: int, imports: Sequence[str] = ()) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(imports))
        self.engines = [LocalProcess(each) for each in range(number)]

    def __len__(self) -> int:
        return len(self.engines)

    def end_processes(self, engines: Sequence[LocalProcess]) -> None:
        """Ends these processes, whatever they do."""
        for one in engines:
            one.end()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """In the block, a process that this thread starts does not run this process's script again, which may open a lab.

    `multiprocessing` says what a process imports in ``spawn.get_preparation_data`` (Python 3.11 to 3.13), and has no
    option to leave the main module out.
    """
    own_thread = threading.current_thread()

    def prepare_without_main(name: str) -> dict[str, Any]:
        data = prepare(name)
        if threading.current_thread() is not own_thread:
            return data
        return {key: value for key, value in data.items() if not key.startswith("init_main_")}

    with _preparing:
        prepare, spawn.get_preparation_data = spawn.get_preparation_data, prepare_without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


def _run(connection: Connection, served: str, variables: dict[str, str], log: int) -> None:
    """Serves in a forked process. Ctrl-C reaches it too, but the process that started it decides what then happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(variables)
    serve(connection, served)
