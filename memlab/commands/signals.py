"""How a signal ends a command: once, and with all that the command started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Lets Ctrl-C and a request to terminate end the block's work; a second one cannot cut the ending short.

    Yields:
        A list that takes the number of the signal that came.
    """
    came: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        came.append(number)
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    # In the background of a shell script SIGINT is ignored, and stays so.
    wanted = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
    previous = {number: signal.getsignal(number) for number in wanted if signal.getsignal(number) != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, end)
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
