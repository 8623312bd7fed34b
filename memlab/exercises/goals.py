"""Goals of an exercise, checked one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self


class Goals:
    """Goals that are checked one after the other, up to the first that is missed.

    A missed goal does not raise: the notebook goes on, and the line says what is missing. ``assert check(...)...`` is
    for claims of a lab's own that have to hold.
    """

    subject = "an answer"
    """What these goals are about, in the words of a line."""

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Self]:
            """Misses a goal that only another kind of answer has: the exercise asks for that kind."""
            if name.startswith("_"):
                raise AttributeError(name)
            what = f"the check got {self.subject}, and this exercise asks for something else"
            return lambda *_, **__: self.goal(False, what, "give what the marked line gave before you changed it")


def listed(names: Sequence[str]) -> str:
    """Writes names as a list in a sentence."""
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last
