"""A process that the fork server of this machine makes (`memlab.ranks.fork_server`), as the engine sees it."""

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ADDRESS_VARIABLE = "MEMLAB_FORK_SERVER"
"""Names the fork server's socket to the engines of a local cluster."""
ACCEPT_SECONDS = 3.0
"""The fork server accepts a request at once, even while it imports."""
NUMBER = struct.Struct("!q")
"""A number as both send it: the length of the request, then the process's number, and at its end its exit code."""
NOT_FORKED = 0
"""In place of the number of a process that could not be forked; its output says why."""


class ForkedProcess:
    """A process with the methods of `subprocess.Popen` that an engine calls.

    Args:
        address: Of the fork server.
        served: ``module:class`` of the object that the process makes.
        variables: All its environment variables.
        files: Numbers of two open files: its connection, and its output.

    Raises:
        OSError: If no fork server answers, or memlab's files have changed since it started.
    """

    def __init__(self, address: str, served: str, variables: dict[str, str], files: Sequence[int]) -> None:
        self.pid: int | None = None
        """None until it is forked: the fork server imports what it needs first."""
        self._code: int | None = None
        self._reading = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._ask(address, json.dumps([served, str(Path.cwd()), variables]).encode(), files)
        except BaseException:
            self._server.close()
            raise

    def _ask(self, address: str, request: bytes, files: Sequence[int]) -> None:
        self._server.settimeout(ACCEPT_SECONDS)
        self._server.connect(address)
        socket.send_fds(self._server, [NUMBER.pack(len(request))], files)
        self._server.sendall(request)
        if not self._server.recv(1):
            raise ConnectionRefusedError(f"the fork server at {address} has not accepted the request")
        self._server.setblocking(True)

    def poll(self) -> int | None:
        """Returns the exit code, below 0 if a signal ended the process; None while it runs."""
        with suppress(BlockingIOError):
            self._read(socket.MSG_DONTWAIT)
        return self._code

    def wait(self) -> int:
        """Waits for the exit code."""
        self._read(0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """Ends the process, which ends with the connection to the fork server."""
        with suppress(OSError):  # the fork server has ended, and the process with it
            self._server.shutdown(socket.SHUT_WR)
        self.poll()
        with self._reading:
            if self._code is None and self.pid is None:
                self._end(-signal.SIGKILL)  # nobody waits for an import before a process that then ends at once

    def _read(self, flags: int) -> None:
        with self._reading:
            try:
                if self.pid is None and self._code is None:
                    number = self._number(flags)
                    if number == NOT_FORKED:
                        self._end(1)
                    else:
                        self.pid = number
                if self._code is None:
                    self._end(self._number(flags))
            except EOFError:  # the fork server has ended, so Linux has killed the process
                self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        self._server.close()

    def _number(self, flags: int) -> int:
        packed = self._server.recv(NUMBER.size, flags)
        if not packed:
            raise EOFError
        return int(NUMBER.unpack(packed)[0])
