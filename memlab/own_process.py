"""Whether this process runs the command line and nobody else's code.

Only there may a module that no step of memlab needs be kept out of what memlab imports. In a notebook or a program, the
same torch and Megatron are the user's too, and must be as without memlab.
"""

from threading import Event

_declared = Event()


def declare() -> None:
    """Says that the process was started as the command line."""
    _declared.set()


def is_own() -> bool:
    """Whether `declare` was called."""
    return _declared.is_set()
