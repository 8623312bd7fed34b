"""The checks that several plain values share, each with one message."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

MOST_LAYERS = 10_000
"""The deepest model that memlab accepts, ten times the deepest ones that were trained."""
MOST_TOKENS_OF_A_SEQUENCE = 2**24
"""The longest sequence, 16,777,216 tokens: its attention scores in one head take 2**48 numbers."""

_LONGEST_SHOWN = 100
_LONGEST_NUMBER = 10**_LONGEST_SHOWN


def shortened(value: object) -> str:
    """Returns what a message shows of a value that a user gave: its ``repr``, cut where it gets long.

    A path is shown without quotes. Line breaks never appear.
    """
    if isinstance(value, int) and abs(value) >= _LONGEST_NUMBER:  # Python refuses to print the longest of them
        return f"a number of more than {_LONGEST_SHOWN} digits"
    if isinstance(value, (list, tuple, dict)) and len(value) > _LONGEST_SHOWN:
        return f"a {type(value).__name__} of {len(value)} entries"
    try:
        text = repr(value) if isinstance(value, (str, int, float, list, tuple, dict, type(None))) else str(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that cannot be shown"
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: 2 * _LONGEST_SHOWN])
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 20]}...{text[-17:]}"


def is_whole_number(value: object, at_least: int = 1, at_most: int | None = None) -> bool:
    """Whether a value is an ``int`` of that range. ``True`` and ``False`` are not numbers here."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return at_least <= value and (at_most is None or value <= at_most)


def plain_whole_number(value: Any) -> Any:
    """Returns a whole number of numpy or torch as Python's, and everything else as it is."""
    try:
        return value if isinstance(value, int) else index(value)
    except TypeError:
        return value


class RuleError(ValueError):
    """A value breaks a rule.

    Args:
        message: The value, the rule and the next action, in one line for people.
        fields: Whose values decide.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields


def refuse_beside(given: str, own: str, others: Iterable[tuple[str, object, object]], advice: str) -> None:
    """Refuses the first of some options that memlab does not predict beside a given one.

    Args:
        given: The given option and its value, and the word before the other one.
        own: The name of the given option.
        others: Name of each, the value that the message shows, and whether it is refused. None shows no value.
        advice: What to do; ``{}`` stands for the name of the other option.
    """
    for name, value, is_refused in others:
        if is_refused:
            other = name if value is None else f"{name} {value!r}"
            message = f"{given} {other}, which memlab does not predict together: {advice.format(name)}"
            raise RuleError(message, own, name)


def check_whole_number(
    name: str, value: object, at_least: int = 1, at_most: int | None = None, *, action: str = "give another value"
) -> None:
    """Refuses what is not a whole number, or too small, or too large.

    Args:
        name: What the value is called, as in the message.
        at_least: The smallest value allowed.
        at_most: The largest value allowed; None sets no limit.
        action: What the user should do, as in the message.

    Raises:
        RuleError: With value, rule and next action.
    """
    if not is_whole_number(value, at_least):
        raise RuleError(f"{name} is {shortened(value)}, must be a whole number of at least {at_least}: {action}", name)
    if not is_whole_number(value, at_least, at_most):
        raise RuleError(
            f"{name} is {shortened(value)}, must be at most {at_most:,} (more than any real job has): {action}", name
        )


def is_number(value: object) -> bool:
    """Whether a value is an ``int`` or a ``float``. ``True`` and ``False`` are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_number(name: str, value: object, above: float | None, at_most: float, *, action: str) -> None:
    """Refuses what is not a finite number of a range.

    Args:
        name: What the value is called, as in the message.
        above: What it has to be larger than; None allows 0 and more.
        at_most: The largest value allowed.
        action: What the user should do, as in the message.

    Raises:
        RuleError: With value, rule and next action.
    """
    # Every comparison with NaN is false. Comparisons take whole numbers of any size; conversions do not.
    if not is_number(value) or not (0 if above is None else above) <= value <= at_most or value == above:  # type: ignore[operator]
        rule = "of at least 0" if above is None else f"above {above:g}"
        raise RuleError(
            f"{name} is {shortened(value)}, must be a number {rule} and at most {at_most:g}: {action}", name
        )
