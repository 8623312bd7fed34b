"""What a process printed: a file that keeps the last lines, and says how the process ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

_MOST_BYTES = 2**20
_KEPT_BYTES = 4000


class ProcessLog:
    """A temporary file to which a process appends its output.

    It has no name, so nothing stays on the disk, also if this process is killed. `multiprocessing` passes it to a
    process that it starts as the number of an open file.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this
        weakref.finalize(self, self.file.close)
        # For this process and the one that gets the file: that one goes on at the new end after `shorten`.
        fcntl.fcntl(self.file.fileno(), fcntl.F_SETFL, os.O_APPEND)

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_of, (DupFd(self.file.fileno()),)

    def shorten(self) -> None:
        """Drops all but the last lines of a file that has become long: a job may run for days."""
        number = self.file.fileno()
        if os.fstat(number).st_size > _MOST_BYTES:
            last = self._tail()
            os.ftruncate(number, 0)
            os.write(number, last)

    def last_words(self, code: int) -> str:
        """Returns how the process ended, by a signal if its code is negative, and the last lines that it printed."""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == -9:
            how += " (by hand, or by the system because host memory ran out)"
        lines = [line for line in self._tail().decode(errors="replace").splitlines() if line.strip()]
        return f"{how}; it printed last: {' / '.join(lines[-5:])}" if lines else how

    def _tail(self) -> bytes:
        number = self.file.fileno()
        return os.pread(number, _KEPT_BYTES, max(0, os.fstat(number).st_size - _KEPT_BYTES))


def _number_of(file: Any) -> int:
    """Returns the number of a file that `multiprocessing` has passed to this process."""
    number: int = file.detach()
    return number
