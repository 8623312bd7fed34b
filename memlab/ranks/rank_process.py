"""The process of one rank: it makes one object, calls its methods on request, and says every second that it lives.

An engine starts it, with a file descriptor and ``module:class`` as its arguments (`memlab.ranks.engine`). A
process of its own can be ended whatever it does, which frees its memory and its GPU, and the engine stays usable.

Requests and messages are pickled tuples. A request is ``(number, method, args)``; number 0 is called at once, on a
thread of its own, and has no answer. Messages are ``("alive", Whereabouts)``, ``("progress", value)``, ``("answer",
number, value)`` and ``("error", number, error, text)``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

ALIVE_SECONDS = 1.0
"""How often a process says that it lives."""

_PR_SET_PDEATHSIG = 1
_WAITING_FILES = (
    "torch/distributed/",
    "backends/gloo_collectives",
    "pipeline_parallel/p2p_communication",
    "tensor_parallel/mappings",
)
"""Code in which a rank waits for other ranks."""
_COMPILING_FILES = ("torch/_inductor/", "torch/_dynamo/")
_STACK_DEPTH = 12


def main() -> None:
    """Serves requests until the engine's end of the connection is closed."""
    serve(Connection(int(sys.argv[1])), sys.argv[2])


def serve(connection: Connection, path: str) -> None:
    """Makes an object, and calls its methods on request until the other end of the connection is closed.

    Args:
        connection: Carries requests and messages.
        path: ``module:class`` of the object.
    """
    _end_with_parent()
    outbox = _Outbox(connection)
    requests: queue.Queue[tuple[int, str, tuple[Any, ...]]] = queue.Queue()
    threading.Thread(target=_say_alive, args=(outbox,), daemon=True).start()
    module, _, name = path.partition(":")
    gc.disable()  # the import of torch and Megatron causes several collections of garbage, and leaves little
    served = getattr(import_module(module), name)(lambda value: outbox.send(("progress", value)))
    gc.enable()
    threading.Thread(target=_receive, args=(connection, requests, served), daemon=True).start()
    while True:
        number, method, args = requests.get()
        try:
            message: tuple[Any, ...] = ("answer", number, getattr(served, method)(*args))
            outbox.send(message)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is told
            outbox.send(("error", number, _portable(error), traceback.format_exc()))


class _Outbox:
    """Sends messages from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self._connection.send_bytes(packed)
            except OSError:  # the engine is gone
                os._exit(1)


def _receive(connection: Connection, requests: queue.Queue[Any], served: Any) -> None:
    while True:
        try:
            number, method, args = pickle.loads(connection.recv_bytes())  # noqa: S301  # from the engine
        except (EOFError, OSError):
            os._exit(1)  # the engine is gone
        if number == 0:
            threading.Thread(target=getattr(served, method), args=args, daemon=True).start()
        else:
            requests.put((number, method, args))


def _say_alive(outbox: _Outbox) -> None:
    own = threading.get_ident()
    while True:
        cpu, queued = time.process_time(), queued_seconds(threading.get_native_id())
        time.sleep(ALIVE_SECONDS)
        queued = max(0.0, queued_seconds(threading.get_native_id()) - queued)  # less if a thread has ended
        outbox.send(("alive", whereabouts(own, time.process_time() - cpu, queued)))


def queued_seconds(own: int, threads: Path = Path("/proc/self/task")) -> float:
    """Returns for how long threads of this process were ready to run and had no processor, in seconds of all of them.

    Args:
        own: The thread that asks, by the system's number, which is left out.
        threads: Linux's folder of the process's threads; where it says nothing of queues, the answer is 0.
    """
    nanoseconds = 0
    for one in threads.glob("*/schedstat"):
        if one.parent.name != str(own):
            with suppress(OSError, IndexError, ValueError):  # a thread that has ended
                nanoseconds += int(one.read_text().split()[1])
    return nanoseconds / 1e9


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a process does, as it says every second."""

    at: str
    """The innermost Python function, with its file and line."""
    calls: int
    """Differs if the process is in other calls than before, though perhaps on the same lines."""
    waits: bool
    """Whether it waits for other ranks."""
    cpu_seconds: float
    """What it computed since it last said so. A process that lets torch compile counts as one that computes."""
    queued_seconds: float = 0.0
    """For how long its threads waited for a processor, which others had."""


def whereabouts(own: int, cpu_seconds: float, queued_seconds: float = 0.0) -> Whereabouts:
    """Finds out what this process does.

    Args:
        own: The thread that asks, which is left out.
        cpu_seconds: What the process computed since the last answer.
        queued_seconds: For how long it waited for a processor meanwhile.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {names.get(ident, ""): frame for ident, frame in sys._current_frames().items() if ident != own}
    frame = next((frames[name] for name in frames if name.startswith("memlab")), frames.get("MainThread"))
    stack: list[FrameType] = []
    while frame is not None and len(stack) < _STACK_DEPTH:
        stack.append(frame)
        frame = frame.f_back
    files = [one.f_code.co_filename for one in stack]
    if any(part in file for file in files for part in _COMPILING_FILES):
        cpu_seconds = max(cpu_seconds, ALIVE_SECONDS)  # torch compiles in processes of its own
    return Whereabouts(
        at=f"{stack[0].f_code.co_name} ({files[0]}:{stack[0].f_lineno})" if stack else "nowhere",
        calls=hash(tuple(id(one) for one in stack)),
        waits=any(part in file for file in files for part in _WAITING_FILES),
        cpu_seconds=cpu_seconds,
        queued_seconds=queued_seconds,
    )


def _portable(error: BaseException) -> BaseException:
    """Returns the error if it survives pickling, otherwise one with its words."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # made here
    except Exception:  # noqa: BLE001  # an error class may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Asks Linux to kill this process when the engine dies, even while Python's threads cannot run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
