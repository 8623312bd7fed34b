"""Whether a step that a lab has taken fits a GPU, judged with further steps of the lab."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from memlab.config.backend_kind import KINDS
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import check_number, is_whole_number
from memlab.fitting.does_it_fit import Fit, judge_fit
from memlab.fitting.measured_margin import further_steps_of
from memlab.lab.one_process import OneProcess
from memlab.lab.request import PassRequest, StepRequest
from memlab.lab.session import Session
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import MIB, parse_bytes

if TYPE_CHECKING:
    from memlab.allocator.request_log import RequestLog

_STEPS_BEFORE_IN_A_NEW_PROCESS = 1
"""The warm-up step."""
_MOST_SAVED_BY_OTHER_STEPS, _LEAST_ROOM_BYTES = 10, 64 * MIB
"""A step reserved up to 9 % less in a process that had taken other steps than in a new process (`labs/LOG.md`,
2026-11-24, night). If a tenth more, plus some segments, is still within the limit, no step is taken to find out."""


_OF_FURTHER_STEPS = (
    "this Lab cannot start over, so further steps of it were judged: memlab predict judges those of a new process, and "
    "can answer otherwise near the limit"
)


class _StepsOfLab:
    """Takes steps on a model that may have taken others; for the record of a pass without backward, such passes."""

    def __init__(self, session: Session, of_pass: Scenario | None) -> None:
        self._session, self._of_pass = session, of_pass
        self._stop_at = math.inf
        self._not_begun: StepRecord | None = None

    def stop_after(self, seconds: float, record: StepRecord) -> None:
        """Begins no step that would begin later, and returns a record for it that says so, made of the given one."""
        self._stop_at, self._not_begun = time.monotonic() + seconds, replace(record, status="interrupted")

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step, or a pass without backward.

        Raises:
            ValueError: If it is stopped.
        """
        if self._not_begun is not None and time.monotonic() > self._stop_at:
            return self._not_begun
        self._session.device_memory_bytes = limit_bytes
        request: StepRequest | PassRequest = StepRequest(settings=settings)
        if self._of_pass is not None:
            request = PassRequest(settings=settings, scenario=self._of_pass, warm_up=True)
        record = self._session.take(request)
        if record.status == "interrupted":
            raise ValueError(f"the step under '{settings}' was stopped, so fit has no answer: call fit again")
        return record

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        """Implements `memlab.fitting.does_it_fit.Steps.completes`: takes the step again where that may decide.

        In a new process, the first step allocates the optimizer state between its activations. So the blocks that it
        leaves free for the next step are smaller than those in a process that has taken steps under other settings.
        """
        reserved_bytes = record.peak_reserved_bytes or 0
        if record.step_index > _STEPS_BEFORE_IN_A_NEW_PROCESS:
            reserved_bytes += reserved_bytes // _MOST_SAVED_BY_OTHER_STEPS + _LEAST_ROOM_BYTES
        return reserved_bytes <= limit_bytes or self(record.settings, limit_bytes).status == "ok"


class _StepsFromTheStart(_StepsOfLab):
    """Takes each step as the one of a new process, as ``memlab predict`` does: a simulated model starts over before it.

    A model that cannot start over takes further steps.
    """

    def __init__(self, session: OneProcess, of_pass: Scenario | None) -> None:
        super().__init__(session, of_pass)
        self._own = session
        self._last: StepRecord | None = None
        self._requests: RequestLog | None = None
        self.starts_over = True
        """Whether it could each time so far."""

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step, or a pass without backward; without a limit, its requests to the allocator are logged."""
        if self._not_begun is not None and time.monotonic() > self._stop_at:
            return self._not_begun
        self._last = self._requests = None
        self.starts_over = self.starts_over and self._own.start_over()
        if limit_bytes is not None or not self.starts_over:
            return super().__call__(settings, limit_bytes)
        self._own.device_memory_bytes = None
        with self._own.logging_requests() as self._requests:
            self._last = super().__call__(settings)
        return self._last

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        """Implements `memlab.fitting.does_it_fit.Steps.completes`: an allocator with the limit gets the requests."""
        further_steps = further_steps_of(record.scenario)
        is_within = (record.peak_reserved_bytes or 0) <= limit_bytes
        if record.step_index <= _STEPS_BEFORE_IN_A_NEW_PROCESS and is_within and not further_steps:
            return True
        if record is not self._last and self.starts_over:
            self(record.settings)
            self._last = record
        if self._requests is None:
            return super().completes(record, limit_bytes)
        return self._requests.completes_within(limit_bytes, further_steps)


def judge_with_steps(session: Session, record: StepRecord, gpu_memory: str | int, own: Scenario, seconds: float) -> Fit:
    """Compares a step or a pass with a GPU's memory, with further ones of the same model.

    Args:
        gpu_memory: Of the whole GPU, in bytes or as text such as ``"80GiB"``.
        own: The scenario of the further steps or passes, which has to be the record's.
        seconds: For what else would fit, after the verdict: what has not begun then is not tried.

    Raises:
        ValueError: If the size or the record breaks a rule, or if a step is stopped.
    """
    num_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if not is_whole_number(num_bytes):
        raise ValueError(f"gpu_memory is {gpu_memory!r}, must be at least 1 byte: give a size such as '80GiB'")
    if record.status != "ok":
        raise ValueError(f"{record} did not finish, so memlab cannot compare it with a GPU: take a step that fits")
    _check_same_scenario(own, record)
    check_number("seconds", seconds, None, math.inf, action="give seconds, or math.inf for no limit")
    limit_before, settings_before = session.device_memory_bytes, session.settings
    of_pass = own if record.forward_only else None
    steps = _StepsOfLab(session, of_pass)
    if isinstance(session, OneProcess) and KINDS[record.backend].is_prediction:
        steps = _StepsFromTheStart(session, of_pass)
    try:
        fit = judge_fit(record, steps, num_bytes, on_verdict=lambda: steps.stop_after(seconds, record))
        is_new = not isinstance(steps, _StepsFromTheStart) or steps.starts_over
        return fit if is_new else replace(fit, basis=f"{fit.basis}; {_OF_FURTHER_STEPS}")
    finally:
        session.device_memory_bytes = limit_before
        if session.settings != settings_before:
            session.apply(settings_before)


def _check_same_scenario(own: Scenario, record: StepRecord) -> None:
    """Refuses a record that further steps of the lab cannot judge; a job's record is that of its worst rank.

    Raises:
        ValueError: If the record is of another scenario.
    """
    other = record.scenario
    if isinstance(record, JobRecord):
        other = other.on_rank(own.layout.rank)
    if names := own.differences(other):
        raise ValueError(
            f"the record's step had another {', another '.join(names)} than this lab has now, must have the same, "
            "because memlab compares it with further steps of the lab: take a step now, and give its record"
        )
