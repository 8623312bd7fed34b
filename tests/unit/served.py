"""An object without a model, for the processes of ranks: it answers, fails or does not end on request."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from memlab.ranks import engine
from memlab.ranks.forked_process import ADDRESS_VARIABLE


class Served:
    """Does what it is told."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report
        self._noted = ""

    def answer(self, value: Any) -> tuple[int, Any]:
        self._report(value)
        return os.getpid(), value

    def fail(self, words: str) -> None:
        if words:
            raise ValueError(words)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def compute(self, forever: bool) -> None:
        while forever:
            pass

    def hold_the_lock(self) -> None:
        """Keeps Python's lock for hours: no other thread of the process runs."""
        re.fullmatch("(a+)+", "a" * 60 + "b")

    def take_memory(self, num_bytes: int) -> None:
        if num_bytes:
            limit = psutil.Process().memory_info().vms + num_bytes  # a forked process has a part of this already
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self._taken = [bytearray(2**20)]
            while True:
                self._taken.append(bytearray(2**20))

    def leave(self, code: int | None) -> None:
        if code is not None:
            sys.stdout.write("the last words\n")
            sys.stdout.flush()
            os._exit(code)

    def chat(self, num_bytes: int) -> None:
        sys.stdout.write("the first words\n" + "x" * num_bytes + "\nthe last words\n")
        sys.stdout.flush()

    def note(self, words: str) -> None:
        self._noted = words

    def noted(self) -> str:
        return self._noted


def without_memory() -> None:
    """What a function of `memlab.ranks.engine` does where the host's memory is full."""
    raise MemoryError


def number_of_process() -> int | None:
    """Returns the number of the engine's process; None until it is forked."""
    return None if engine._own is None else engine._own.pid


def use_fork_server(address: str | None) -> str | None:
    """Lets the engine have its processes forked, or start them itself; returns what it has done until now."""
    former = os.environ.pop(ADDRESS_VARIABLE, None)
    if address is not None:
        os.environ[ADDRESS_VARIABLE] = address
    return former
