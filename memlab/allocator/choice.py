"""Which implementation of the allocator serves: the compiled one, if its code is kept or worth the time to make it."""

from __future__ import annotations

from functools import cache

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.protocol import Allocator
from memlab.config.allocator_settings import AllocatorSettings

_MANY = 300_000
"""To compile takes longer than to serve so many operations in Python, but only the first process has to."""


def new_allocator(settings: AllocatorSettings) -> Allocator:
    """Returns an allocator without memory: the compiled one, if an earlier process has compiled it."""
    python = CachingAllocator(settings)
    return python if why_not_compiled(compiles=False) else _compiled(python)


def for_operations(number: int, allocator: Allocator) -> Allocator:
    """Returns what serves so many operations soonest: the allocator, or a compiled one in its state."""
    if number < _MANY or not isinstance(allocator, CachingAllocator) or why_not_compiled():
        return allocator
    return _compiled(allocator)


@cache
def why_not_compiled(*, compiles: bool = True) -> str:
    """Returns why Python serves; empty if the compiled allocator does.

    Args:
        compiles: Whether numba compiles it where no earlier process has.
    """
    try:
        from memlab.allocator.machine_code import serve

        serve(compiles=compiles)
    except Exception as error:  # noqa: BLE001  # numba, LLVM and disks fail in many ways; Python serves as well
        return f"the allocator has no machine code ({type(error).__name__}: {error})".partition("\n")[0]
    return ""


def _compiled(former: CachingAllocator) -> Allocator:
    from memlab.allocator.compiled import CompiledAllocator
    from memlab.allocator.machine_code import serve

    return CompiledAllocator.of(former, serve(compiles=True))
