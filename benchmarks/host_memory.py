"""Takes all host memory that a limit leaves to a process, so that it cannot even say so."""

from __future__ import annotations

import resource
from contextlib import suppress

import psutil

_TAKEN: list[bytearray] = []


def take_host_memory() -> None:
    """Limits the memory of this process, and takes and keeps it in smaller and smaller pieces."""
    limit_bytes = psutil.Process().memory_info().vms + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    for size in (2**24, 2**16, 2**10):
        with suppress(MemoryError):
            while True:
                _TAKEN.append(bytearray(size))
    _TAKEN.append(bytearray(2**24))
