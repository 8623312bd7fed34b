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
