"""Which implementation of the allocator serves a table: the compiled one, if the table is long and numba works here."""

from __future__ import annotations

import sys
from functools import cache

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.protocol import Allocator, ServesTables

_MANY, _SOME = 300_000, 10_000
"""To load numba takes as long as to serve so many operations in Python; to take over a state as long as so many."""


def for_operations(number: int, allocator: Allocator) -> ServesTables:
    """Returns what serves so many operations soonest: the allocator, or a compiled one in its state."""
    is_loaded = "memlab.allocator.kernels" in sys.modules
    if number < (_SOME if is_loaded else _MANY) or not isinstance(allocator, CachingAllocator) or why_not_compiled():
        return allocator
    from memlab.allocator.compiled import CompiledAllocator

    return CompiledAllocator.of(allocator)


@cache
def why_not_compiled() -> str:
    """Returns why Python serves all tables; empty if numba compiles the allocator."""
    try:
        import memlab.allocator.compiled  # noqa: F401
    except Exception as error:  # noqa: BLE001  # numba fails in many ways, and Python gives the same answers
        return f"numba does not compile the allocator ({type(error).__name__}: {error})".partition("\n")[0]
    return ""
