"""Errors of a step: what they keep alive of it."""

from __future__ import annotations

import traceback
from typing import Any


def release_tensors(error: BaseException) -> None:
    """Removes every reference to a tensor from an exception; its traceback becomes text, as a note (PEP 678).

    The caller may keep an exception: IPython keeps the last one as ``sys.last_value``. Its traceback keeps the
    frames of the step that raised, and with them most activations of that step. Emptying these frames
    (`traceback.clear_frames`) is not enough, because a frame also keeps its function, and a function its closure: torch
    2.13 calls a module with hooks through ``Module._call_impl.<locals>.inner``, whose closure holds the arguments.

    Args:
        error: Changed in place, with every exception that it was raised from or while handling, which it loses.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    for part in _chain(error):
        traceback.clear_frames(part.__traceback__)  # a context manager that is still open may hold the traceback too
        part.__traceback__ = part.__cause__ = part.__context__ = None
        part.args = tuple(_plain(value) for value in part.args)
        for name in vars(part).keys() - {"__notes__"}:
            vars(part)[name] = _plain(vars(part)[name])
        if isinstance(part, AttributeError):
            part.obj = None  # the object that lacks the attribute
    error.add_note(f"The step's own traceback:\n{text}")


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        part = waiting.pop()
        if part is not None and not any(part is known for known in found):
            found.append(part)
            waiting += [part.__cause__, part.__context__]
            waiting += part.exceptions if isinstance(part, BaseExceptionGroup) else ()
    return found


def _plain(value: Any) -> Any:
    """Returns a number or a text as it is, and the name of any other value's type."""
    return value if value is None or isinstance(value, (int, float, str, bytes)) else f"<{type(value).__name__}>"
