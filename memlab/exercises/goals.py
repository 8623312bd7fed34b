"""Goals of an exercise, checked one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class Goals:
    """Goals that are checked one after the other, up to the first that is missed.

    A missed goal does not raise: the notebook goes on, and the line says what is missing. ``assert check(...)...`` is
    for claims of a lab's own that have to hold.
    """

    def __init__(self) -> None:
        self._all_reached = True

    def __bool__(self) -> bool:
        """Whether all goals were reached."""
        return self._all_reached

    def __repr__(self) -> str:
        return ""

    def _ipython_display_(self) -> None:
        """Shows nothing: each goal has printed its line already."""

    def goal(self, reached: bool, what: str, hint: str = "") -> Self:
        """Prints the line of one goal, unless one before it was missed.

        Args:
            reached: Whether it is reached.
            what: What is so, or must be so.
            hint: What to look at if it is missed.
        """
        # After the first missed goal the others stay silent: one line to act on.
        if self._all_reached:
            self._all_reached = reached
            line = f"reached: {what}" if reached else f"not yet: {what}"
            print(line if reached or not hint else f"{line}. Hint: {hint}.")  # noqa: T201  # an exercise's answer
        return self


def listed(names: Sequence[str]) -> str:
    """Writes names as a list in a sentence."""
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last
