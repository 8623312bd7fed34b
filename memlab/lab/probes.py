"""Questions about a live model: what offload freed, what is retained, what was sent, what the meter costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from memlab.allocator.request_log import RequestLog
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.engines.activation_tap import Tap
from memlab.engines.retained_leaves import Retained
from memlab.lab.lab_part import LabPart
from memlab.lab.one_process import OneProcess
from memlab.lab.request import StepRequest, check_kind
from memlab.lab.stepper import Stepper
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord


class Probes(LabPart):
    """The part of a `Lab` that answers questions, most of them with steps of its own."""

    def audit_offload(self, settings: MemorySettings) -> OffloadAudit:
        """Compares what activation offload was expected to free with what it saves, to the byte.

        Takes steps with and without offload, some of them twice or more; `records` gets the two that are measured. The
        settings are again what they were.

        Args:
            settings: Settings that have `offload_modules`.

        Raises:
            ValueError: If nothing is offloaded, under full recompute (what is offloaded then is saved in backward), if
                the settings break another rule, or if one of the steps does not finish.
        """
        session = self._one_process("audit_offload")
        check_kind("settings", settings, MemorySettings)
        session.check(StepRequest(settings=settings))
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
        stepper, settings_before = session.stepper, session.settings
        default = MemorySettings().min_offloaded_tensor_size
        try:
            plain = _finished_step(session, replace(settings, offload_modules=None, min_offloaded_tensor_size=default))
            saved = session.run_exclusive(lambda: _saved_in_regions(stepper))
            offloaded = _finished_step(session, settings)
            return session.run_exclusive(lambda: _audit_offload(stepper, saved, plain, offloaded))
        finally:
            if session.settings != settings_before:
                session.apply(settings_before)

    def retained(self) -> list[Retained]:
        """Finds what module attributes keep allocated between steps through their autograd graphs, by which path.

        Replayed layers have no such graphs: they have what an equal layer keeps.
        """
        session = self._one_process("retained")
        return session.run_exclusive(session.model.retained)

    @contextmanager
    def tap(self, layer: int, *, guarded: bool = True, every: bool = False) -> Iterator[Tap]:
        """Within the block, keeps one layer's output alive after each forward, as a probe or an auxiliary head does.

        Steps in the block are not steady: each begins with the output that the one before it has left. After them, the
        first step outside of the block is preceded by a warm-up step.

        Args:
            layer: Counted from 0.
            every: Keeps the outputs of all forwards and not only the last checkpointed one, as a program does that
                appends them to a list: a leak, until the block ends.
            guarded: False lets ``release_storage`` empty the tapped storage too, as upstream's patch does (verl #7328),
                and also the storages of other taps in the block; `Tap.look` then shows what a probe would have read,
                without a read.

        Raises:
            ValueError: If there is no such layer.
        """
        session = self._one_process("tap")
        model = session.model
        last = model.scenario.num_layers_of_stage - 1
        if not is_whole_number(layer, at_least=0, at_most=last):
            raise ValueError(f"layer is {layer!r}, must be from 0 to {last}: tap another layer")
        tap = session.run_exclusive(lambda: model.tap(layer, guarded=guarded, every=every))
        try:
            yield tap
        finally:
            session.run_after_step(lambda: model.untap(tap))

    def unmetered_step_seconds(self) -> float:
        """Takes a step without metering it and returns its duration, to compare with a metered one.

        The next step under the same settings is preceded by a warm-up step, in which the meter catches up.

        Raises:
            ValueError: If no metered step has been taken under the current settings.
        """
        session = self._one_process("unmetered_step_seconds")
        if not session.is_steady:
            raise ValueError(
                "an unmetered step is compared with a metered one: take a step under the current settings first"
            )
        return session.run_exclusive(lambda: _unmetered_step_seconds(session.stepper), disturbs=True)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """What the rank sent in the last step or pass, by kind of collective."""
        counted = self._one_process("sent_bytes").stepper.sent_bytes
        return {kind: num_bytes for kind, num_bytes in sorted(counted.items()) if num_bytes}

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        """Within the block, logs the requests to a simulated allocator; on other backends, the log is None."""
        return self._one_process("logging_requests").logging_requests()


def _finished_step(session: OneProcess, settings: MemorySettings) -> StepRecord:
    record = session.take(StepRequest(settings=settings))
    if record.status != "ok":
        raise ValueError(
            f"audit_offload compares two steps that finish, and one did not: under '{settings}', {record.message}"
        )
    return record


def _saved_in_regions(stepper: Stepper) -> Any:
    """Takes a step without offload and counts what each offload module saves for backward.

    Of a simulated step that only repeats the last one, no tensor would be seen.
    """
    with stepper.model.replay.suspended(), stepper.model.engine.saved_for_backward() as saved:
        stepper.step()
    return saved


def _audit_offload(stepper: Stepper, saved: Any, plain: StepRecord, offloaded: StepRecord) -> OffloadAudit:
    """Repeats `offloaded`, the last step, to look at the model in the middle of it."""

    def repeat(num_events: int, look: Callable[[], None]) -> StepRecord:
        with stepper.model.meter.at_event(num_events, look):
            return stepper.step()

    return stepper.model.engine.audit_offload(stepper.model.labels, saved, plain, offloaded, repeat)


def _unmetered_step_seconds(stepper: Stepper) -> float:
    """Loads and offloads metered as always: the meter would lose track of storages that are resized meanwhile."""
    load_seconds = stepper.model.transfers.load()
    with stepper.model.labels.detached(), stepper.model.meter.paused(), stepper.model.engine.during_step():
        torch.cuda.synchronize()
        started = time.perf_counter()
        with stepper.unrecorded():
            stepper.model.engine.train_step(stepper.model.labels)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    _, offload_seconds = stepper.model.transfers.end_step(stepper.model.settings)
    return load_seconds + seconds + offload_seconds
