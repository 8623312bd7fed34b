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
    to_record = "give what lab.step(...) returned"
    """What to do where the exercise asks for a record."""
    to_anything = ""
    """What to do where the exercise asks for numbers or for an audit; empty if that depends on which."""

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
        """Prints the line of one goal, unless one before it was missed."""
        # After the first missed goal the others stay silent: one line to act on.
        if self._all_reached:
            self._all_reached = reached
            line = f"reached: {what}" if reached else f"not yet: {what}"
            ends = "" if hint.endswith("?") else "."
            print(line if reached or not hint else f"{line}. Hint: {hint}{ends}")  # noqa: T201  # an exercise's answer
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Self]:
            """Misses a goal that only another kind of answer has: the exercise asks for that kind."""
            if name.startswith("_"):
                raise AttributeError(name)
            kind, hint = _ASKED_BY.get(name, ("the record of a step", self.to_record))
            what = f"the check got {self.subject}, must get {kind}"
            action = self.to_anything if self.to_anything and name in _ASKED_BY and kind != _FUNCTION[0] else hint
            return lambda *_, **__: self.goal(False, what, action)


class NoAnswer(Goals):
    """The goals for what no exercise asks for, such as a text: the first one says what the exercise asks for."""

    def __init__(self, subject: str, *, to_record: str = Goals.to_record, to_anything: str = "") -> None:
        """Begins the goals.

        Args:
            subject: What the check got instead.
            to_record: What to do where the exercise asks for a record.
            to_anything: What to do where it asks for numbers or for an audit; empty if that depends on which.
        """
        super().__init__()
        self.subject, self.to_record, self.to_anything = subject, to_record, to_anything

    def __bool__(self) -> bool:
        return False


_FORMULA = (
    "one number per case",
    "replace only the 0 in the marked line, so that the answer is a list of numbers, not of texts or functions",
)
_FUNCTION = (
    "a function",
    "leave the lines with def as they are, write your code below them, and run their cell before the check",
)
_AUDIT = "an audit", "change only the marked line: the check itself takes the audit"
_ASKED_BY = {
    "is_exactly": _FORMULA,
    "is_about": _FORMULA,
    "moves_gradients_of": _FUNCTION,
    "syncs_weights_of": _FUNCTION,
    "classifies": _FUNCTION,
    "only_on_device": _AUDIT,
    "complains_like": _AUDIT,
}
"""What an exercise asks for, and what to do, by its goal; all other goals ask for the record of a step."""


def listed(names: Sequence[str]) -> str:
    """Writes names as a list in a sentence."""
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last
