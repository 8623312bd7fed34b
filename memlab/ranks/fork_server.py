"""A process that forks the processes of ranks on this machine, so that all need one import of torch and Megatron.

``python -m memlab.ranks.fork_server ADDRESS`` listens at a Unix socket in the folder of a local cluster
(`memlab.ranks.ranks`), until its standard input ends. An engine opens one connection for each process
(`memlab.ranks.forked_process`). A process ends when that connection or the fork server does, whatever it is doing.

It is for Linux without a GPU: a forked process cannot use a GPU that its parent has used.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from memlab.ranks.engine import own_code
from memlab.ranks.forked_process import ACCEPT_SECONDS, NOT_FORKED, NUMBER
from memlab.ranks.rank_process import ALIVE_SECONDS, serve, whereabouts

_LOOK_SECONDS = 0.02
"""How often it looks whether an import has ended."""


def main() -> None:
    """Serves until the standard input ends."""
    _ForkServer(sys.argv[1]).run()


@dataclass(eq=False, slots=True)
class _Request:
    """A process that an engine asks for."""

    engine: socket.socket
    connection: Connection
    output: int
    served: str
    folder: str
    """Its working directory, the engine's own: another one than that of the fork server if that is older."""
    variables: dict[str, str]

    @classmethod
    def read(cls, engine: socket.socket) -> _Request:
        engine.settimeout(ACCEPT_SECONDS)
        length, files, _, _ = socket.recv_fds(engine, NUMBER.size, 2, socket.MSG_WAITALL)
        try:
            connection, output = files
            with engine.makefile("rb") as stream:  # one `recv` would return a part of a large environment
                served, folder, variables = json.loads(stream.read(NUMBER.unpack(length)[0]))
        except BaseException:
            for file in files:
                os.close(file)
            raise
        return cls(engine, Connection(connection), output, served, folder, variables)

    def close(self) -> None:
        self.connection.close()
        os.close(self.output)


class _ForkServer:
    """Imports what the processes need, and forks them from the main thread, while there is no other one."""

    def __init__(self, address: str) -> None:
        os.close(os.pidfd_open(os.getpid()))  # a container may refuse it: then engines start their processes themselves
        self._code = own_code()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen()
        self._selector = selectors.DefaultSelector()
        self._watch(self._listening, self._accept)
        self._watch(sys.stdin.fileno(), sys.exit)
        self._waiting: list[_Request] = []
        self._imported: set[str] = set()
        self._importing: threading.Thread | None = None
        self._alive = 0.0

    def run(self) -> None:
        """Serves until the standard input ends."""
        while True:
            for key, _ in self._selector.select(_LOOK_SECONDS if self._importing is not None else None):
                key.data()
            self._continue()

    def _watch(self, file: socket.socket | int, react: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, react)

    def _accept(self) -> None:
        engine, _ = self._listening.accept()
        request = None
        try:
            if own_code() != self._code:
                raise ConnectionRefusedError("what was imported is not what the engine has")
            request = _Request.read(engine)
            engine.setblocking(True)
            engine.sendall(b"\n")
        except (OSError, ValueError):  # or the engine has ended meanwhile
            if request is not None:
                request.close()
            engine.close()
            return
        self._waiting.append(request)

    def _continue(self) -> None:
        """Forks what waits, as soon as it is imported: on another thread, so that requests are accepted meanwhile."""
        if self._importing is not None:
            if self._importing.is_alive():
                self._say_alive()
                return
            self._importing = None
            gc.collect()
            gc.freeze()  # a collection in a forked process would copy each page of what it visits
        while self._waiting:
            module = self._waiting[0].served.partition(":")[0]
            if module not in self._imported:
                self._imported.add(module)
                self._importing = threading.Thread(target=_import, args=(module,), name="memlab-import", daemon=True)
                self._importing.start()
                return
            self._fork(self._waiting.pop(0))

    def _say_alive(self) -> None:
        """Says for the processes that wait what they say themselves later."""
        if time.monotonic() - self._alive > ALIVE_SECONDS:
            self._alive = time.monotonic()
            message = pickle.dumps(("alive", whereabouts(threading.get_ident(), ALIVE_SECONDS)))
            for request in self._waiting:
                with suppress(OSError):  # its engine has ended
                    request.connection.send_bytes(message)

    def _fork(self, request: _Request) -> None:
        try:
            number = os.fork()
        except OSError as error:  # too many processes, or too little memory, which is no reason to end those that run
            with suppress(OSError):  # the disk is full, or the engine has ended
                os.write(request.output, f"no process could be forked: {error}\n".encode())
                request.engine.sendall(NUMBER.pack(NOT_FORKED))
            request.close()
            request.engine.close()
            return
        if not number:
            self._become(request)
        request.close()
        process = os.pidfd_open(number)
        with suppress(OSError):  # the engine has ended
            request.engine.sendall(NUMBER.pack(number))

        def kill() -> None:
            with suppress(KeyError, ValueError, ProcessLookupError):  # it has just ended by itself
                self._selector.unregister(request.engine)
                signal.pidfd_send_signal(process, signal.SIGKILL)

        def report() -> None:
            _, status = os.waitpid(number, 0)
            self._selector.unregister(process)
            os.close(process)
            with suppress(KeyError):  # it was killed
                self._selector.unregister(request.engine)
            with suppress(OSError):  # the engine has ended
                request.engine.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
            request.engine.close()

        self._watch(request.engine, kill)
        self._watch(process, report)

    def _become(self, request: _Request) -> NoReturn:
        """Turns this process, which has just been forked, into the one that was asked for."""
        try:
            self._selector.close()
            for other in self._waiting:
                other.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(request.output, 1)
            os.dup2(request.output, 2)
            os.environ.clear()
            os.environ.update(request.variables)
            os.chdir(request.folder)
            serve(request.connection, request.served)
        except BaseException:  # noqa: BLE001  # as at the end of any process
            traceback.print_exc()
        finally:
            os._exit(1)


def _import(module: str) -> None:
    """Imports a module. If that fails, the process that needs it says so, in its own log."""
    gc.disable()  # as in `memlab.ranks.rank_process.serve`
    with suppress(Exception):
        import_module(module)
    gc.enable()


if __name__ == "__main__":
    main()
