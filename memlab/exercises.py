"""Checks for the labs' exercises: a record or an audit against a goal, with text that helps where it is missed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import overload

from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS
from memlab.units import format_bytes


class CheckFailed(AssertionError):  # noqa: N818  # reads as what happened
    """An exercise's goal was missed; the text says by how much and where to look."""


class Check:
    """Goals for one record. Each returns the check again, so that goals can be chained."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record

    def peak_below(self, num_bytes: int) -> Check:
        """Wants `peak_allocated_bytes` under a number of bytes."""
        return self._below("the step's peak", self._record.peak_allocated_bytes, num_bytes, self._largest())

    def activation_peak_below(self, num_bytes: int) -> Check:
        """Wants `activation_peak_bytes` under a number of bytes."""
        return self._below("the activation peak", self._record.activation_peak_bytes, num_bytes, self._largest())

    def starts_below(self, num_bytes: int) -> Check:
        """Wants `static_bytes` under a number of bytes."""
        hint = "what waits on the device between steps is parameters, gradients and optimizer state"
        return self._below("the step's start", self._record.static_bytes, num_bytes, hint)

    def residual_is_zero(self) -> Check:
        """Wants nothing left after the step."""
        hint = "a checkpointed MoE layer keeps its input and gradient: recompute something smaller, or apply a remedy"
        return self._below("what is left after the step", self._record.residual_bytes, 1, hint)

    def recomputes_less_than(self, num_bytes: int) -> Check:
        """Wants fewer bytes made a second time."""
        hint = "recompute what is large and cheap to make again"
        return self._below("what backward makes again", self._record.recomputed_bytes, num_bytes, hint)

    def moves(self, *modules: str) -> Check:
        """Wants each of some offload modules to have moved bytes."""
        for module in modules:
            if not self._record.offloaded_bytes_by_module.get(module):
                reason = self._record.without_effect.get(f"offload_modules:{module}", "it is not among offload_modules")
                raise CheckFailed(f"{module} moved nothing: {reason}")
        print(f"reached: {', '.join(modules)} moved to the host")  # noqa: T201  # an exercise's answer
        return self

    def same_loss_as(self, other: StepRecord) -> Check:
        """Wants the loss of another step, to the last bit (or what `loss_tolerance` leaves of that).

        Says so where neither step computed one.
        """
        for record in (self._record, other):
            if record.status != "ok":
                raise CheckFailed(f"a step has no loss to compare: {record}")
        if self._record.loss is None and other.loss is None:
            print(f"not checked: backend {self._record.backend!r} computed no loss")  # noqa: T201
            return self
        tolerance = loss_tolerance(self._record, other)
        if self._record.loss == other.loss:
            print("reached: the same loss, to the last bit")  # noqa: T201
        elif math.isclose(self._record.loss or 0.0, other.loss or 0.0, rel_tol=tolerance):
            print(  # noqa: T201
                f"reached: the same loss within {tolerance:g}; megatron-core 0.19 sorts a router's experts only where "
                "gradients are recorded, so a checkpoint around it rounds in another order"
            )
        else:
            raise CheckFailed(
                f"the loss is {self._record.loss!r}, not {other.loss!r}: a memory setting changes no number"
            )
        return self

    def _below(self, what: str, now: int, goal: int, hint: str) -> Check:
        if self._record.status != "ok":
            raise CheckFailed(f"the step ended early ({self._record.message}): a goal wants a whole step")
        if now >= goal:
            raise CheckFailed(f"{what} is {format_bytes(now)}, must be below {format_bytes(goal)}: {hint}")
        print(f"reached: {what} is {format_bytes(now)}, below {format_bytes(goal)}")  # noqa: T201
        return self

    def _largest(self) -> str:
        categories = {
            name: size
            for name, size in self._record.peak_by_category.items()
            if name not in ("parameters", "gradients", "optimizer state", "workspace")
        }
        name, size = max(categories.items(), key=lambda item: item[1], default=("activations", 0))
        return f"the largest part that settings change is {name}, {format_bytes(size)}"


def failure(call: Callable[[], object]) -> str:
    """Returns the text with which a call fails by Megatron's own assertions; an empty one where it succeeds."""
    try:
        call()
    except AssertionError as error:
        return re.sub(r" object at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
    return ""


class ResidencyCheck:
    """Goals for one audit of what is where between two steps."""

    def __init__(self, audit: ResidencyAudit) -> None:
        self._audit = audit

    def only_on_device(self, *groups: str) -> ResidencyCheck:
        """Wants these groups on the device, no other, and every byte where it should be."""
        there = [group for group in GROUPS if self._audit.device_bytes(group)]
        if sorted(there) != sorted(groups):
            raise CheckFailed(
                f"on the device are {', '.join(there) or 'none of the groups'}, must be {', '.join(groups)} alone: "
                "take down what the phase does not touch, and bring up what it does"
            )
        if self._audit.complaints:
            raise CheckFailed(f"on the device are the right groups, but {self._audit.complaints[0]}")
        print(f"reached: on the device are {', '.join(groups)} alone")  # noqa: T201  # an exercise's answer
        return self

    def complains_like(self, other: ResidencyAudit) -> ResidencyCheck:
        """Wants the complaints of another audit, to the byte."""
        if self._audit.complaints != other.complaints:
            raise CheckFailed(f"this audit says: {self._audit}; must be: {other}: look at which holder is named")
        print(f"reached: the same complaint, {other}")  # noqa: T201
        return self


@overload
def check(measured: StepRecord) -> Check: ...
@overload
def check(measured: ResidencyAudit) -> ResidencyCheck: ...
def check(measured: StepRecord | ResidencyAudit) -> Check | ResidencyCheck:
    """Begins the check of an exercise: ``check(record).peak_below(...).same_loss_as(plain)``.

    Args:
        measured: What `Lab.step` or `Lab.audit_residency` returned.

    Returns:
        A check whose goals print when they are reached, and raise `CheckFailed` with a hint when they are missed.
    """
    return Check(measured) if isinstance(measured, StepRecord) else ResidencyCheck(measured)
