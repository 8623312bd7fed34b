"""Steps that are taken to look at the model from another side, and that leave no record."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from memlab.config.settings import MemorySettings
from memlab.lab.stepper import Stepper
from memlab.model.offload.audit import SavedInRegions, audit_offload
from memlab.model.residency.group_use import GroupUse
from memlab.model.residency.walk import require_resident
from memlab.model.training_step import train_step
from memlab.record.offload_audit import OffloadAccount
from memlab.record.step_record import StepRecord


def saved_in_regions(stepper: Stepper, settings: MemorySettings) -> SavedInRegions:
    """Takes a step and counts what each offload module saves for backward; `settings` offload none."""
    saved = SavedInRegions()
    with saved.watching():
        stepper.step(settings)
    return saved


def account_for_offload(
    stepper: Stepper, saved: SavedInRegions, plain: StepRecord, offloaded: StepRecord
) -> OffloadAccount:
    """Repeats `offloaded`, the last step, and accounts for what it was expected to free, by `offload_audit`."""

    def repeat(num_events: int, look: Callable[[], None]) -> StepRecord:
        with stepper.meter.at_event(num_events, look):
            return stepper.step(offloaded.settings)

    return audit_offload(stepper.live, stepper.labels.modules, saved, plain, offloaded, repeat)


def groups_used(stepper: Stepper, settings: MemorySettings) -> dict[str, tuple[str, ...]]:
    """Takes a step and hands the parameters over; returns by phase which groups an operation touched.

    Raises:
        torch.OutOfMemoryError: If the step runs out of memory; the model is usable afterwards.
    """
    labels, moves = stepper.labels, stepper.moves
    moves.load()
    require_resident(stepper.live)
    with ExitStack() as stack:
        if stepper.backend.compiles:
            # Under a dispatch mode torch.compile gives a function up for good, and later steps round otherwise.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        step = GroupUse(labels, moves.residency.tensors())
        stack.enter_context(step.watching())
        stack.enter_context(labels.phase_of("idle"))
        stack.enter_context(stepper.remedied(settings))
        try:
            train_step(stepper.live, labels)
        except BaseException as error:
            stepper.recover(settings, error)
            raise
    sync = GroupUse(labels, moves.residency.tensors())
    with sync.watching():
        moves.move("hand over", ("parameters",))
    used = step.by_phase()
    # Until Megatron's timers enter the forward phase, a step zeroes its gradients.
    return {"zeroing": used.pop("idle"), **used, "hand over": sync.by_phase()["idle"]}


def unmetered_step_seconds(stepper: Stepper, settings: MemorySettings) -> float:
    """Takes a step and does not meter what it computes; returns its duration.

    Loading and offloading are metered as always: storages that they resize would be lost to the account.
    """
    load_seconds = stepper.moves.load()
    with stepper.labels.detached(), stepper.meter.paused(), stepper.remedied(settings):
        torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            train_step(stepper.live, stepper.labels)
        except BaseException as error:
            stepper.recover(settings, error)
            raise
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    _, offload_seconds = stepper.moves.end_step(settings)
    return load_seconds + seconds + offload_seconds
