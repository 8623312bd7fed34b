"""What a reader says about a file that it cannot read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(read: Callable[[], Any]) -> str:
    """Returns the line in which reading is refused; empty where something is read."""
    try:
        read()
    except ValueError as error:
        message = str(error)
    else:
        return ""
    assert "\n" not in message, message
    assert len(message) < 1000, message
    return message
