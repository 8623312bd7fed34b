"""Begins the check of an exercise, whatever the answer is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, ValuesView
from decimal import Decimal
from numbers import Real
from typing import Any, overload

from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.exercises.audits import ResidencyCheck
from memlab.exercises.code import CodeCheck
from memlab.exercises.formulas import FormulaCheck
from memlab.exercises.goals import Goals, NoAnswer, listed
from memlab.exercises.records import Attempt, Check, RefusedCheck
from memlab.record.job_record import JobRecord
from memlab.record.offload_audit import OffloadAudit
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.step_record import StepRecord


@overload
def check(measured: StepRecord | dict[str, StepRecord] | OffloadAudit) -> Check: ...
@overload
def check(measured: Attempt) -> Check | RefusedCheck: ...
@overload
def check(measured: ResidencyAudit) -> ResidencyCheck: ...
@overload
def check(measured: Callable[..., object] | tuple[Callable[..., object], ...]) -> CodeCheck: ...
@overload
def check(measured: float | Sequence[float] | Iterator[float]) -> FormulaCheck: ...
def check(measured: Any) -> Goals:
    """Begins the check of an exercise: ``check(record).peak_below(...).same_loss_as(plain)``.

    Args:
        measured: What `Lab.step`, `predict_ranks` (the ranks of one job), `Lab.audit_offload` (its step with offload)
            or `Lab.audit_residency` returned, an `Attempt` with a record, the numbers that a formula gave (one, or one
            per case, also as an array or a tensor), or a function of the reader's, or two.

    Returns:
        A check whose goals print a line each, up to the first that is missed. It is true if all were reached. If it was
        given anything else, it is false, and its first goal says what the exercise asks for.
    """
    if isinstance(measured, Attempt):
        if measured.refusal:
            return RefusedCheck(measured.refusal)
        measured = measured.record
    measured = _unwrapped(measured)
    if isinstance(measured, str) and measured == CHECKED:
        again = "run the answer's cell again before its check"
        return NoAnswer("an answer that was checked already", to_anything=again, to_record=again)
    if isinstance(measured, StepRecord):
        return Check(measured)
    if isinstance(measured, ResidencyAudit):
        return ResidencyCheck(measured)
    functions = measured if isinstance(measured, tuple) else (measured,)
    if functions and all(map(callable, functions)):
        return CodeCheck(functions)
    numbers = _plain(measured)
    if numbers and all(isinstance(number, (Real, Decimal)) and not isinstance(number, bool) for number in numbers):
        return FormulaCheck([number if isinstance(number, int) else float(number) for number in numbers], measured)
    kind = type(measured).__name__
    if isinstance(measured, Iterable) and not isinstance(measured, (str, bytes)):
        values = measured if isinstance(measured, Collection) else numbers  # an iterator is empty now
        kind = f"{kind} with {listed(sorted({type(each).__name__ for each in values})) or 'nothing'}"
    subject = f"an answer of the type {kind}"
    if measured is None:
        action = "begin the marked line as it began, for example with 'mine =', and run its cell before the check"
        of_steps = f"{action}; lab.apply(...) gives None, lab.step(...) a record"
        return NoAnswer(subject, to_anything=action, to_record=of_steps)
    return NoAnswer(subject, to_record=_TO_RECORD.get(type(measured), NoAnswer.to_record))


CHECKED = "checked already"
"""What a check of the course's notebooks makes of an answer, so that the next check needs a new one."""

_TO_RECORD = {
    MemorySettings: "write lab.step(...) around the settings",
    TrainingState: "write lab.step(state=...) around the training state",
}
"""What to do with an answer of a type in an exercise that asks for a record."""


def _unwrapped(measured: Any) -> Any:
    """Returns an audit's step with offload, ranks as a job, `CHECKED` for functions checked before, or what it got."""
    if isinstance(measured, OffloadAudit):
        return measured.offloaded
    if isinstance(measured, dict) and measured and all(isinstance(each, StepRecord) for each in measured.values()):
        return JobRecord.of([*measured.values()])
    is_checked = isinstance(measured, tuple) and CHECKED in [each for each in measured if isinstance(each, str)]
    return CHECKED if is_checked else measured


def _plain(measured: Any) -> list[Any]:
    """Returns numbers as Python has them: numpy's and torch's arrays and scalars have a method for that."""
    flat = measured.reshape(-1) if hasattr(measured, "reshape") else measured  # a column has one number per row
    values = flat.tolist() if hasattr(flat, "tolist") else flat
    is_row = isinstance(values, (Sequence, Iterator, ValuesView)) and not isinstance(values, (str, bytes))
    values = list(values) if is_row else [values]
    return [value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value for value in values]


def failure(call: Callable[[], object]) -> str:
    """Returns the text of the assertion or of the dead weak reference with which a call fails; empty if it succeeds."""
    try:
        call()
    except (AssertionError, ReferenceError) as error:
        return re.sub(r" object at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
    return ""
