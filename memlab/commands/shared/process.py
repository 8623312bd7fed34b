"""What a command does to its own process: its stdout, the signals that end it, and how it leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType


@contextmanager
def stdout_reserved_for_result() -> Iterator[None]:
    """Sends what the block prints, from Python or from C code, to stderr, and drops warnings of torch and Megatron."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
            yield
    finally:
        sys.stdout.flush()  # code that kept the old stream may have written to it
        ctypes.CDLL(None).fflush(None)  # C keeps a buffer of its own, and would write it after the result
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def terminate_on_signal() -> Iterator[list[int]]:
    """Lets Ctrl-C and a request to terminate end the block; a second signal cannot interrupt its cleanup.

    Yields:
        A list that receives the number of the signal that came.
    """
    received: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        received.append(number)
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    # In the background of a shell script SIGINT is ignored, and stays so.
    handled = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT]
    previous = {number: signal.getsignal(number) for number in handled if signal.getsignal(number) != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def terminated_as_by_ctrl_c() -> Iterator[None]:
    """Lets a request to terminate, such as that of ``timeout`` or of a batch system, end the block as Ctrl-C does.

    Both come to the main thread: in another one, nothing ends the block.
    """

    def end(number: int, frame: FrameType | None) -> None:
        of_ctrl_c = signal.getsignal(signal.SIGINT)  # ignored in the background of a shell script
        (of_ctrl_c if callable(of_ctrl_c) else signal.default_int_handler)(number, frame)

    is_heard = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, end) if is_heard else None
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGTERM, previous)


def exit_now(code: int) -> None:
    """Ends the process without the cleanup of an ordinary exit, which would wait for the other ranks of a job."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
