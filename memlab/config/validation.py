"""The checks that several plain values share, each with one message."""

from __future__ import annotations


def is_whole_number(value: object, at_least: int = 1) -> bool:
    """Whether a value is an ``int`` of at least `at_least`. ``True`` and ``False`` are not numbers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def check_whole_number(name: str, value: object, at_least: int = 1, *, action: str = "give another value") -> None:
    """Refuses what is not a whole number, or too small.

    Args:
        name: What the value is called, as in the message.
        value: The value.
        at_least: The smallest value allowed.
        action: What the user should do, as in the message.

    Raises:
        ValueError: With value, rule and next action.
    """
    if not is_whole_number(value, at_least):
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {at_least}: {action}")
