"""Questions about a live model: what offload freed, what fits a GPU, what is retained, what the meter costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Protocol

import torch

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.fitting.does_it_fit import Fit, judge_fit
from memlab.lab.session import Session
from memlab.lab.stepper import Stepper
from memlab.model.activation_offload.audit import SavedInRegions, audit_offload
from memlab.model.retention.activation_tap import Tap
from memlab.model.retention.retained_leaves import Retained
from memlab.model.training_step import train_step
from memlab.record.job_record import JobRecord
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord
from memlab.units import MIB, parse_bytes


class Probes:
    """The part of a `Lab` that answers questions, most of them with steps of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stepper = session.stepper

    def audit_offload(self, settings: MemorySettings) -> OffloadAudit:
        """Implements `Lab.audit_offload`."""
        self._session.check(settings)
        if not settings.offload_modules or settings.recompute_granularity == "full":
            raise ValueError(
                f"audit_offload got settings {settings}, must have offload_modules and no full recompute: the audit "
                "covers activations that wait from forward to backward"
            )
        if settings.activation_offload_fraction < 1 or settings.delta_offload_bytes_across_pp_ranks:
            raise ValueError(
                f"audit_offload got activation_offload_fraction {settings.activation_offload_fraction} and "
                f"delta_offload_bytes_across_pp_ranks {settings.delta_offload_bytes_across_pp_ranks}, must have 1 and "
                "0: the audit expects that all groups are offloaded except for the last; leave both out"
            )
        default, settings_before = MemorySettings().min_offloaded_tensor_size, self._session.settings
        try:
            plain = self._finished_step(replace(settings, offload_modules=None, min_offloaded_tensor_size=default))
            saved = self._session.run_exclusive(lambda: _saved_in_regions(self._stepper))
            offloaded = self._finished_step(settings)
            return self._session.run_exclusive(lambda: _audit_offload(self._stepper, saved, plain, offloaded))
        finally:
            if self._session.settings != settings_before:
                self._session.apply(settings_before)

    def _finished_step(self, settings: MemorySettings) -> StepRecord:
        record = self._session.step(settings)
        if record.status != "ok":
            raise ValueError(
                f"audit_offload compares two steps that finish, and one did not: under '{settings}', {record.message}"
            )
        return record

    def retained(self) -> list[Retained]:
        """Implements `Lab.retained`."""
        return self._session.run_exclusive(self._stepper.retained)

    @contextmanager
    def tap(self, layer: int, *, guarded: bool, every: bool) -> Iterator[Tap]:
        """Implements `Lab.tap`."""
        last = self._stepper.scenario.num_layers_of_stage - 1
        if not is_whole_number(layer, at_least=0, at_most=last):
            raise ValueError(f"layer is {layer!r}, must be from 0 to {last}: tap another layer")
        tap = self._session.run_exclusive(lambda: self._stepper.tap(layer, guarded=guarded, every=every))
        try:
            yield tap
        finally:
            self._session.run_after_step(lambda: self._stepper.untap(tap))

    def unmetered_step_seconds(self) -> float:
        """Implements `Lab.unmetered_step_seconds`."""
        if not self._session.is_steady:
            raise ValueError(
                "an unmetered step is compared with a metered one: take a step under the current settings first"
            )
        return self._session.run_exclusive(lambda: _unmetered_step_seconds(self._stepper), disturbs=True)


def check_device_memory(num_bytes: int | None) -> None:
    """Checks a value for `Lab.device_memory_bytes`.

    Raises:
        ValueError: If it is neither a positive whole number nor None.
    """
    if num_bytes is not None and not is_whole_number(num_bytes):
        raise ValueError(
            f"device_memory_bytes is {num_bytes!r}, must be a whole number of at least 1, or None: give the "
            "device's size in bytes, or None for an unlimited one"
        )


_STEPS_BEFORE_IN_A_NEW_PROCESS = 1
"""The warm-up step."""
_MOST_SAVED_BY_OTHER_STEPS, _LEAST_ROOM_BYTES = 10, 64 * MIB
"""A step reserved up to 9 % less in a process that had taken other steps than in a new process (`labs/LOG.md`,
2026-11-24, night). If a tenth more, plus some segments, is still within the limit, no step is taken to find out."""
_WORKLOAD_OF_A_PASS = ("seq_length", "micro_batch_size", "num_microbatches")


class _LabOrRanks(Protocol):
    """What `judge_with_steps` needs of a lab that has one rank, or of one that has several."""

    device_memory_bytes: int | None

    @property
    def settings(self) -> MemorySettings: ...

    def step(self, settings: MemorySettings | None = None) -> StepRecord: ...

    def forward_only(
        self,
        settings: MemorySettings | None = None,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
        warm_up: bool = False,
    ) -> StepRecord: ...

    def apply(self, settings: MemorySettings) -> None: ...


class _StepsOfLab:
    """Takes steps on a lab that may have taken others; for the record of a pass without backward, such passes."""

    def __init__(self, lab: _LabOrRanks, record: StepRecord) -> None:
        self._lab, self._forward_only = lab, record.forward_only
        self._workload: dict[str, int] = {name: getattr(record.scenario, name) for name in _WORKLOAD_OF_A_PASS}

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step, or a pass without backward.

        Raises:
            ValueError: If it is stopped.
        """
        self._lab.device_memory_bytes = limit_bytes
        if self._forward_only:
            record = self._lab.forward_only(settings, warm_up=True, **self._workload)
        else:
            record = self._lab.step(settings)
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


def judge_with_steps(lab: _LabOrRanks, record: StepRecord, gpu_memory: str | int, own: Scenario) -> Fit:
    """Implements `Lab.fit`; `own` is the scenario of the lab's further steps, or of its passes like the record's."""
    num_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if not is_whole_number(num_bytes):
        raise ValueError(f"gpu_memory is {gpu_memory!r}, must be at least 1 byte: give a size such as '80GiB'")
    if record.status != "ok":
        raise ValueError(f"{record} did not finish, so memlab cannot compare it with a GPU: take a step that fits")
    _check_same_scenario(own, record)
    limit_before, settings_before = lab.device_memory_bytes, lab.settings
    try:
        return judge_fit(record, _StepsOfLab(lab, record), num_bytes)
    finally:
        lab.device_memory_bytes = limit_before
        if lab.settings != settings_before:
            lab.apply(settings_before)


def _check_same_scenario(own: Scenario, record: StepRecord) -> None:
    """Refuses a record that further steps of the lab cannot judge; a job's record is that of its worst rank.

    Raises:
        ValueError: If the record is of another scenario.
    """
    other = record.scenario
    if isinstance(record, JobRecord):
        other = replace(other, layout=replace(other.layout, rank=own.layout.rank))
    names = [field.name for field in fields(Scenario) if getattr(own, field.name) != getattr(other, field.name)]
    if names:
        raise ValueError(
            f"the record's step had another {', another '.join(names)} than this lab has now, must have the same, "
            "because memlab compares it with further steps of the lab: take a step now, and give its record"
        )


def _saved_in_regions(stepper: Stepper) -> SavedInRegions:
    """Takes a step without offload and counts what each offload module saves for backward.

    Of a simulated step that only repeats the last one, no tensor would be seen.
    """
    saved = SavedInRegions()
    with stepper.replay.suspended(), saved.watching():
        stepper.step()
    return saved


def _audit_offload(stepper: Stepper, saved: SavedInRegions, plain: StepRecord, offloaded: StepRecord) -> OffloadAudit:
    """Repeats `offloaded`, the last step, to look at the model in the middle of it."""

    def repeat(num_events: int, look: Callable[[], None]) -> StepRecord:
        with stepper.meter.at_event(num_events, look):
            return stepper.step()

    return audit_offload(stepper.live, stepper.labels.modules, saved, plain, offloaded, repeat)


def _unmetered_step_seconds(stepper: Stepper) -> float:
    """Loads and offloads metered as always: the meter would lose track of storages that are resized meanwhile."""
    load_seconds = stepper.transfers.load()
    with stepper.labels.detached(), stepper.meter.paused(), stepper.checkpoint_input_remedy():
        torch.cuda.synchronize()
        started = time.perf_counter()
        with stepper.unrecorded():
            train_step(stepper.live, stepper.labels)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    _, offload_seconds = stepper.transfers.end_step(stepper.settings)
    return load_seconds + seconds + offload_seconds
