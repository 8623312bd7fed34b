"""Whether a step that a lab has taken fits a GPU, judged with further steps of the lab."""

from __future__ import annotations

from memlab.allocator.request_log import RequestLog
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.fitting.does_it_fit import Fit, judge_fit
from memlab.lab.one_process import OneProcess
from memlab.lab.request import PassRequest, StepRequest
from memlab.lab.session import Session
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import MIB, parse_bytes

_STEPS_BEFORE_IN_A_NEW_PROCESS = 1
"""The warm-up step."""
_MOST_SAVED_BY_OTHER_STEPS, _LEAST_ROOM_BYTES = 10, 64 * MIB
"""A step reserved up to 9 % less in a process that had taken other steps than in a new process (`labs/LOG.md`,
2026-11-24, night). If a tenth more, plus some segments, is still within the limit, no step is taken to find out."""


class _StepsOfLab:
    """Takes steps on a model that may have taken others; for the record of a pass without backward, such passes."""

    def __init__(self, session: Session, of_pass: Scenario | None) -> None:
        self._session, self._of_pass = session, of_pass
        self._requests: dict[MemorySettings, RequestLog] = {}

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step, or a pass without backward.

        Raises:
            ValueError: If it is stopped.
        """
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
        leaves free for the next step are smaller than those in a process that has taken steps under other settings. A
        step of a new process is judged by the requests of such a step, whatever the lab has done since.
        """
        reserved_bytes = record.peak_reserved_bytes or 0
        is_of_a_new_process = record.step_index <= _STEPS_BEFORE_IN_A_NEW_PROCESS
        if not is_of_a_new_process:
            reserved_bytes += reserved_bytes // _MOST_SAVED_BY_OTHER_STEPS + _LEAST_ROOM_BYTES
        if reserved_bytes <= limit_bytes:
            return True
        requests = self._requests_of_a_new_process(record.settings) if is_of_a_new_process else None
        if requests is not None:
            return requests.completes_within(limit_bytes)
        return self(record.settings, limit_bytes).status == "ok"

    def _requests_of_a_new_process(self, settings: MemorySettings) -> RequestLog | None:
        """Returns what the first step asks of the allocator; None where the lab cannot start over."""
        if settings in self._requests:
            return self._requests[settings]
        session = self._session
        if self._of_pass is not None or not isinstance(session, OneProcess) or not session.start_over():
            return None
        with session.logging_requests() as requests:
            self(settings)
        if requests is not None:
            self._requests[settings] = requests
        return requests


def judge_with_steps(session: Session, record: StepRecord, gpu_memory: str | int, own: Scenario) -> Fit:
    """Compares a step or a pass with a GPU's memory, with further ones of the same model.

    Args:
        session: The model.
        record: Of the step or the pass.
        gpu_memory: Of the whole GPU, in bytes or as text such as ``"80GiB"``.
        own: The scenario of the further steps or passes, which has to be the record's.

    Raises:
        ValueError: If the size or the record breaks a rule, or if a step is stopped.
    """
    num_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if not is_whole_number(num_bytes):
        raise ValueError(f"gpu_memory is {gpu_memory!r}, must be at least 1 byte: give a size such as '80GiB'")
    if record.status != "ok":
        raise ValueError(f"{record} did not finish, so memlab cannot compare it with a GPU: take a step that fits")
    _check_same_scenario(own, record)
    limit_before, settings_before = session.device_memory_bytes, session.settings
    try:
        return judge_fit(record, _StepsOfLab(session, own if record.forward_only else None), num_bytes)
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
