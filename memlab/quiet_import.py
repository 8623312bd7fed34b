"""Imports torch and Megatron without collections of garbage: their import causes several, 1 s of processor time."""

from __future__ import annotations

import gc
import sys
import time
from importlib import import_module
from types import ModuleType

MEMLAB_IMPORTED_NS = time.time_ns()
"""When this process began to import memlab, on the clock of files: it may not have loaded what was written later."""


def imported(name: str) -> ModuleType:
    """Imports a module; collections of garbage pass over torch and Megatron if it is the first that needs them."""
    if "torch" in sys.modules:
        return import_module(name)
    # A lab collects garbage after each change of settings. A collection that visits all objects of torch and Megatron
    # takes 0.2 s and more, and their import causes several. No model of the user's is among them yet.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        module = import_module(name)
        if "torch" in sys.modules:
            gc.freeze()  # also what is garbage already: no tensor is, and to find it takes 0.35 s
    finally:
        if was_enabled:
            gc.enable()
    return module
