"""What an engine serves in the tests of `memlab.ranks.balanced`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Calls:
    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report

    def square(self, number: int) -> int:
        self._report(f"squaring {number}")
        return number * number

    def fail(self) -> None:
        raise KeyError("a key")

    def wait_the_first_time(self, file: Path) -> int:
        """Writes its process and waits for its end, unless another process did that before."""
        if not file.exists():
            file.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
            file.with_suffix(".new").rename(file)
            time.sleep(600)
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """In the place of what predicts: its process is killed in a call, unless that is about a GPU."""

    def __init__(self, report: Callable[[Any], None]) -> None: ...

    def give_way(self) -> None: ...

    def record(self, scenario: object, settings: object, backend: str) -> str:
        if backend != "cuda":
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def predict(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StillBorn(Mortal):
    """As above, but its process ends before the first call."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        raise RuntimeError("no space is left")


class Slow(Mortal):
    """As above, but a prediction takes longer than any test."""

    def predict(self, *_: object) -> None:
        time.sleep(600)
