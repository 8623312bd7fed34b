"""Which implementation of the allocator serves: the compiled one, if its code is kept or worth the time to make it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from os import environ

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.protocol import Allocator
from memlab.config.allocator_settings import AllocatorSettings
from memlab.import_path import variables_that_import_memlab

_MANY = 300_000
"""To compile takes longer than to serve so many operations in Python, but only the first process has to."""
_COMPILES = (
    "import os, signal; os.nice(19); signal.alarm(120); "
    "from memlab.allocator.choice import why_not_compiled; why_not_compiled()"
)
_compiling: list[subprocess.Popen[bytes]] = []


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
    """Returns why Python serves, empty if the compiled allocator does; `compiles` lets numba compile it first."""
    try:
        from memlab.allocator.machine_code import serve

        serve(compiles=compiles)
    except Exception as error:  # noqa: BLE001  # numba, LLVM and disks fail in many ways; Python serves as well
        return f"the allocator has no machine code ({type(error).__name__}: {error})".partition("\n")[0]
    return ""


def compile_in_background(say: Callable[[str], object]) -> None:
    """Starts a process that compiles the allocator for later commands, unless it is kept or cannot be.

    It takes 10 s once, ends by itself, and changes no result.

    Args:
        say: Called with a line if a process was started.
    """
    try:
        from memlab.allocator.machine_code import is_to_be_made

        if not is_to_be_made():
            return
        process = subprocess.Popen(  # noqa: S603  # this interpreter
            [sys.executable, "-c", _COMPILES],
            env=environ | variables_that_import_memlab(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the command
        )
    except Exception:  # noqa: BLE001  # as in `why_not_compiled`
        return
    _compiling.append(process)
    say("the simulated allocator is compiled beside this command, once, in about 10 s: later commands take less time")


def _compiled(former: CachingAllocator) -> Allocator:
    from memlab.allocator.compiled import CompiledAllocator
    from memlab.allocator.machine_code import serve

    return CompiledAllocator.of(former, serve(compiles=True))
