"""Lines on stderr that say how far a long step has come, and how long the rest takes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from memlab.units import remaining

if TYPE_CHECKING:
    from memlab.lab.progress import Progress

_SECONDS_BETWEEN_LINES = 5.0


class ProgressLines:
    """Prints where the step of a name is, every five seconds: a step that is shorter prints nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = self._printed = time.monotonic()
        self._done = 0

    def __call__(self, progress: Progress) -> None:
        """Is called at each new place of a step."""
        now = time.monotonic()
        if progress.done < self._done:  # another step
            self._started = now
        self._done = progress.done
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        left = remaining(now - self._started, progress.done, progress.total - progress.done)
        place = f"{progress.phase} {progress.module}".strip()
        passes = f"{progress.done} of {progress.total} passes through layers"
        print(f"{self._name}: {place}, {passes}{left}", file=sys.stderr, flush=True)
