"""Decides conditions of a shell, ``[ ... ]`` and ``[[ ... ]]``, as true, false, or known only on the job's machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memlab.jobs.entries import UNKNOWN

_OF_NUMBERS = {"-eq", "-ne", "-gt", "-ge", "-lt", "-le"}
_BINARY = _OF_NUMBERS | {"=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef"}
_NEEDS_A_RUN = re.compile(r"-[a-hkprstuwxGLNOS]")
"""Questions about files, which the job's machine alone can answer."""
_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*")
_ORDERED_ALIKE = re.compile("[a-z]*|[0-9]*")
"""Texts that every language of the machine sorts in the same order."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A word of a condition, expanded."""

    text: str
    pattern: str = ""
    """As the right side of ``==`` in ``[[ ]]``, with a backslash before everything that was quoted."""
    is_quoted: bool = False
    """Whether the word cannot be an operator."""


class _MalformedError(Exception):
    """The condition is none that memlab reads: false for ``[``, as the shell's refusal is, and unknown for ``[[``."""


def negated(status: bool | None) -> bool | None:
    """Returns the opposite; None stays None."""
    return None if status is None else not status


def both(first: bool | None, second: bool | None) -> bool | None:
    """Returns whether both are true, None if that is not known."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def either(first: bool | None, second: bool | None) -> bool | None:
    """Returns whether one of them is true, None if that is not known."""
    return negated(both(negated(first), negated(second)))


@dataclass(frozen=True, slots=True)
class Answers:
    """What a condition asks of the script's variables and options."""

    number: Callable[[str], int | None]
    """Calculates a side of ``-eq`` in double brackets."""
    is_set: Callable[[str], bool | None]
    """Whether a variable has a value, for ``-v``."""
    matches: Callable[[str, str], bool | None]
    """Whether a text matches a pattern between double brackets."""
    finds: Callable[[str, str], bool | None]
    """Whether a regular expression is found in a text, for ``=~``."""


def decide(operands: list[Operand], *, is_double: bool, answers: Answers, lacks_words: bool = False) -> bool | None:
    """Decides the words between ``[`` and ``]``, or between ``[[`` and ``]]``.

    Args:
        answers: What the condition asks of the script.
        lacks_words: Whether a word is missing that a variable of what starts the script stands for. Without it, the
            shell refuses the condition, as in ``[ $NODE_RANK == 0 ]``, so the script counts on it.

    Returns:
        None if only the job's machine can tell.
    """
    condition = _Condition(operands, is_double, answers)
    try:
        return condition.whole()
    except _MalformedError:
        return None if is_double or lacks_words or any(UNKNOWN in each.text for each in operands) else False


class _Condition:
    def __init__(self, operands: list[Operand], is_double: bool, answers: Answers) -> None:
        self.operands, self.is_double, self.answers = operands, is_double, answers
        self.position = 0
        self.depth = 0

    def whole(self) -> bool | None:
        if not self.operands:
            return False
        result = self._any()
        if self.position < len(self.operands):
            raise _MalformedError
        return result

    def _operator(self, after: int = 0) -> str:
        """Returns the word at a place after the next one, if it can be an operator."""
        index = self.position + after
        if index >= len(self.operands) or self.operands[index].is_quoted:
            return ""
        return self.operands[index].text

    def _take(self, text: str) -> bool:
        taken = self._operator() == text
        self.position += taken
        return taken

    def _any(self) -> bool | None:
        self.depth += 1
        if self.depth > 20:
            raise _MalformedError
        result = self._all()
        while self._take("||" if self.is_double else "-o"):
            result = either(result, self._all())
        self.depth -= 1
        return result

    def _all(self) -> bool | None:
        result = self._one()
        while self._take("&&" if self.is_double else "-a"):
            result = both(result, self._one())
        return result

    def _one(self) -> bool | None:
        is_negated = False
        while self._operator() == "!" and self._operator(1) not in _BINARY and len(self.operands) > self.position + 1:
            self.position += 1
            is_negated = not is_negated
        result = self._plain()
        return negated(result) if is_negated else result

    def _plain(self) -> bool | None:
        if self._operator(1) in _BINARY and self.position + 2 < len(self.operands):
            left, operator, right = self.operands[self.position : self.position + 3]
            self.position += 3
            return self._compared(left, operator.text, right)
        if self._operator() == "(" and self.position + 1 < len(self.operands):
            self.position += 1
            result = self._any()
            if not self._take(")"):
                raise _MalformedError
            return result
        if re.fullmatch(r"-[a-zA-Z]", self._operator()) and self.position + 1 < len(self.operands):
            operator, operand = self.operands[self.position : self.position + 2]
            self.position += 2
            return self._of_one(operator.text, operand.text)
        if self.position >= len(self.operands):
            raise _MalformedError
        self.position += 1
        text = self.operands[self.position - 1].text
        return None if UNKNOWN in text else text != ""

    def _of_one(self, operator: str, text: str) -> bool | None:
        if operator == "-v":
            return None if UNKNOWN in text or "[" in text else self.answers.is_set(text)
        if operator in ("-z", "-n"):
            if UNKNOWN in text:
                # What stands beside an unknown part is enough to know that there is something.
                return None if not text.strip(UNKNOWN) else operator == "-n"
            return (text == "") == (operator == "-z")
        if not _NEEDS_A_RUN.fullmatch(operator):
            raise _MalformedError
        return None if text else False

    def _compared(self, left: Operand, operator: str, right: Operand) -> bool | None:
        if operator in _OF_NUMBERS:
            return self._numbers(left.text, operator, right.text)
        if operator in ("=", "==", "!="):
            if self.is_double:
                result = self.answers.matches(left.text, right.pattern)
            else:
                result = None if UNKNOWN in left.text + right.text else left.text == right.text
            return negated(result) if operator == "!=" else result
        if operator == "=~":
            return self.answers.finds(left.text, right.pattern)
        if operator in ("<", ">") and (_ORDERED_ALIKE.fullmatch(left.text) and _ORDERED_ALIKE.fullmatch(right.text)):
            return left.text < right.text if operator == "<" else left.text > right.text
        return None

    def _numbers(self, left: str, operator: str, right: str) -> bool | None:
        if UNKNOWN in left + right:
            return None
        if self.is_double:
            one, other = self.answers.number(left), self.answers.number(right)
            if one is None or other is None:
                return None
        elif _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right):
            one, other = int(left), int(right)
        else:
            raise _MalformedError
        results = {"-eq": one == other, "-ne": one != other, "-gt": one > other, "-ge": one >= other}
        return (results | {"-lt": one < other, "-le": one <= other})[operator]
