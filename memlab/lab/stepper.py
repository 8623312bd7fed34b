"""Takes and measures the steps of a lab's model.

It knows nothing of threads or of earlier records; a `Worker` calls it on one thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlab.engines.residency.residency import groups_on_host
from memlab.lab.lab_model import LabModel
from memlab.lab.progress import StepStopped
from memlab.lab.residency_audit import require_resident
from memlab.lab.step_records import StepRecords
from memlab.meter import collectives
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.record.transfer import GROUPS
from memlab.replay.passes import NotReplayableError
from memlab.replay.plan import Circumstances, Plan


class Stepper:
    """Takes the steps of a model."""

    def __init__(self, model: LabModel) -> None:
        self.model, self._records = model, StepRecords(model)
        self._bookkeeping_seconds = 0.0
        self.sent_bytes = Counter[str]()
        """What the rank sent in the last step or pass, also one that ended early, by kind of collective."""

    def step(
        self,
        on_move: Callable[[], None] | None = None,
        *,
        forward_only: bool = False,
        suspend_offload: bool = True,
    ) -> StepRecord:
        """Takes one metered step under the current settings.

        Args:
            on_move: Called at each phase and module; raises `StepStopped` to end the step.
            forward_only: Without gradients, backward and optimizer.
            suspend_offload: In a forward-only step, keep Megatron's activation offload out of it.

        Returns:
            The record of a step that finished, ran out of memory or was stopped. The model is usable after each.

        Raises:
            NotReplayableError: If it cannot go on as recorded. The model is usable, with each group where it was.
        """
        measured, timeline = self._take(on_move, forward_only=forward_only, suspend_offload=suspend_offload)
        assert timeline is not None, "it was asked for"
        return self._records.make(measured, timeline)

    def warm_up(self, on_move: Callable[[], None] | None = None) -> StepRecord | None:
        """Takes one step as `step` does, and returns its record only if it ended early."""
        measured, timeline = self._take(on_move, forward_only=False, suspend_offload=True, is_warm_up=True)
        return self._records.make(measured, timeline) if "status" in measured and timeline is not None else None

    def _take(
        self, on_move: Callable[[], None] | None, *, forward_only: bool, suspend_offload: bool, is_warm_up: bool = False
    ) -> tuple[dict[str, Any], Timeline | None]:
        """Takes one step, and returns what it has measured, and its timeline.

        A warm-up step that ends as it should has none, unless the next step may repeat it.
        """
        model, labels, meter, transfers = self.model, self.model.labels, self.model.meter, self.model.transfers
        circumstances = Circumstances(
            scenario=model.scenario,
            settings=model.settings,
            forward_only=forward_only,
            is_tapped=model.is_tapped,
            has_fault=transfers.has_fault,
        )
        plan = model.replay.plan(circumstances)
        if (repeated := self._repeated(plan, on_move)) is not None:
            return repeated
        model.is_as_built = False
        on_host, sent_before = transfers.residency.on_host, collectives.sent_bytes.copy()
        torch.cuda.synchronize()
        meter.start(model.categories())
        self._bookkeeping_seconds = 0.0
        started = time.perf_counter()
        measured: dict[str, Any] = {}
        labels.on_move = on_move
        try:
            with model.engine.during_step(meter.track_host_tensor):
                measured |= self._phases(plan, forward_only=forward_only, suspend_offload=suspend_offload)
        except (torch.OutOfMemoryError, StepStopped) as error:
            measured |= self._records.ended_early(error, forward_only=forward_only)
            self._recover(error)
        except BaseException as error:
            self._recover(error)
            if isinstance(error, NotReplayableError):
                transfers.put_on_host(on_host)
            raise
        finally:
            labels.on_move = None
        torch.cuda.synchronize()
        measured["step_seconds"] = time.perf_counter() - started - self._bookkeeping_seconds
        model.num_steps += 1
        self.sent_bytes = collectives.sent_since(sent_before)
        model.meter.categorise(model.categories())
        model.replay.categorise_retained()
        timeline = None
        if is_warm_up and not plan.whole_step and "status" not in measured:
            model.meter.drop()
        else:
            timeline = model.meter.finish()
        if "status" not in measured:
            model.replay.step_taken(plan, measured, forward_only=forward_only)
        return measured | {"forward_only": forward_only}, timeline

    def _repeated(self, plan: Plan, on_move: Callable[[], None] | None) -> tuple[dict[str, Any], Timeline] | None:
        """Returns as `_take` a step that only repeats the last one; None if it has to be taken."""
        model, started = self.model, time.perf_counter()
        repeated = model.replay.repeat_step(plan)
        if repeated is None:
            return None
        timeline, measured = repeated
        model.labels.on_move = on_move
        try:
            model.labels.enter_phase("idle")
        finally:
            model.labels.on_move = None
        model.num_steps += 1
        return measured | {"step_seconds": time.perf_counter() - started, "forward_only": False}, timeline

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Runs the block, a training step without a record; the model is usable again if it raises."""
        self.model.is_as_built = False
        try:
            with self.model.replay.parts(Plan()):
                yield
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        model = self.model
        model.labels.on_move = None
        model.engine.recover(error)
        model.replay.forget(model.scenario, model.settings)
        model.replay.abandon()

    def _phases(self, plan: Plan, *, forward_only: bool, suspend_offload: bool) -> dict[str, Any]:
        model, labels, transfers = self.model, self.model.labels, self.model.transfers
        settings, away = model.settings, groups_on_host(model.settings)
        needed = [group for group in GROUPS if group == "parameters" or not (forward_only and group in away)]
        freed: dict[str, int] = {}
        offload_seconds = 0.0
        if settings.offload_optimizer_except_update:
            needed = [group for group in needed if group != "optimizer state"]
            with labels.phase_of("offload"):  # where a step before this setting, or `Lab.load`, left it
                freed, offload_seconds = transfers.offload(["optimizer state"])
        with labels.phase_of("load"):
            load_seconds = transfers.load(needed)
        with self._off_the_clock():
            require_resident(model.engine, needed)

        def load_for_update() -> None:
            nonlocal load_seconds
            if settings.offload_optimizer_except_update:
                labels.enter_phase("load")
                load_seconds += transfers.load(["optimizer state"])

        if forward_only:  # it frees the graphs that layers retain, and what replaces them has no role
            model.replay.forget_passes(model.scenario, settings)
        with labels.phase_of("forward"), model.replay.parts(plan) as parts:
            if forward_only:
                loss = model.engine.forward_only_step(labels, parts.microbatches, suspend_offload=suspend_offload)
            else:
                loss = model.engine.train_step(labels, load_for_update, parts.microbatches, parts.update)
        adds_to_groups = bool(freed) or forward_only or parts.leaves_new
        with self._off_the_clock():  # the groups get their category before they leave the device
            model.meter.categorise(model.categories() if adds_to_groups else transfers.workspaces())
        with labels.phase_of("offload"):
            freed_at_end, end_seconds = transfers.end_step(settings)
        return {
            "loss": None if model.backend.kind.is_prediction else loss,
            "load_seconds": load_seconds,
            "offload_seconds": offload_seconds + end_seconds,
            "offloaded_bytes_by_group": freed | freed_at_end,
            **self._records.offload_seen(forward_only=forward_only),
        }

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Subtracts the block's duration from the step's: the block inspects the model and is no part of the step."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._bookkeeping_seconds += time.perf_counter() - started
