"""The worker's side of a lab: everything that touches the live model, on one thread.

It knows nothing of threads, records kept or who asked: it takes a step under settings and says what happened.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any, Literal

import torch

import memlab
from memlab.backends import Backend
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.protocol import Meter
from memlab.model import holders, toggles
from memlab.model.build import LiveModel, build
from memlab.model.group_use import GroupUse
from memlab.model.offload_audit import SavedInRegions, audit_offload
from memlab.model.offload_watch import OffloadWatch
from memlab.model.pinned import registered_bytes
from memlab.model.quiet import quiet_megatron
from memlab.model.recovery import recover
from memlab.model.remedies import CheckpointRemedy, Tap
from memlab.model.residency import Residency, groups_on_host
from memlab.model.residency_faults import FAULTS, mend
from memlab.model.residency_walk import audit_residency, require_resident
from memlab.model.training_step import forward_only_step, train_step
from memlab.movement import GROUPS, Movement
from memlab.offload_account import OffloadAccount
from memlab.out_of_memory import OutOfMemory
from memlab.progress import StepStopped
from memlab.record import Status, StepRecord
from memlab.residency_audit import Asked, ResidencyAudit
from memlab.scenario import Scenario
from memlab.settings import MemorySettings

Action = Literal["load", "offload", "hand over"]


class Stepper:
    """One live model, its meter, and the steps it takes."""

    def __init__(self, scenario: Scenario, backend: Backend) -> None:
        self.scenario = scenario
        self.num_steps = 0
        self.labels = Labels()
        self.meter: Meter = backend.meter(self.labels)
        self._backend = backend
        self._offload_watch = OffloadWatch()
        self._remedy = CheckpointRemedy()
        self._asked = Asked()
        self._bookkeeping_seconds = 0.0
        self._move_host_bytes = (0, 0)
        """On the host around the last move (the more of before and after), and at its peak."""
        self.live: LiveModel
        self.residency: Residency

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Everything below runs inside this context."""
        with ExitStack() as stack:
            stack.enter_context(quiet_megatron())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._backend.active())
            stack.enter_context(labelled_by(self.labels))
            stack.enter_context(self.meter.watching())
            yield

    def build(self) -> None:
        """Builds the model."""
        self.live = build(self.scenario, self._backend.layer_provider, self._backend.distributed_backend)
        self.labels.attach(self.live.named_modules())
        self.residency = Residency(self.live)
        with self.labels.category("workspace"):
            self._backend.fill_workspaces(self.scenario.architecture.is_moe)

    def apply(self, settings: MemorySettings) -> None:
        """Sets recompute and activation offload for the next step."""
        toggles.apply(self.live, settings)
        self._offload_watch.misled = False

    def tap(self, layer: int, *, guarded: bool) -> Tap:
        """Taps a layer's output; unguarded, ``release_storage`` empties what is tapped too, until `untap`."""
        self._remedy.spares_shared = guarded
        return Tap(self.live, layer)

    def untap(self, tap: Tap) -> None:
        """Ends a tap."""
        tap.take_off()
        self._remedy.spares_shared = True

    def settle(self) -> None:
        """Gives back what the last settings left in reference cycles and in the allocator's cache."""
        gc.collect()
        torch.cuda.empty_cache()

    def set_workload(self, scenario: Scenario) -> None:
        """Takes another sequence length, micro-batch size or number of micro-batches from the next step on."""
        self.scenario = self.live.scenario = scenario

    def drop(self) -> dict[str, int]:
        """Drops every name of the model, as a notebook does with ``del``, and finds out who still holds it.

        Returns:
            Device bytes by holder: what came free when it let go, one holder after the other. Nothing is left then.
        """
        del self.live, self.residency
        self.labels.release()
        gc.collect()
        left: dict[str, int] = {}
        for holder, let_go in holders.process_wide_holders():
            before = self.meter.live_bytes()
            let_go()
            gc.collect()
            left[holder] = before - self.meter.live_bytes()
        holders.forget()
        self.meter.close()
        return {holder: num_bytes for holder, num_bytes in left.items() if num_bytes}

    def release(self) -> None:
        """Gives the model back."""
        holders.release(self.live)
        del self.live, self.residency
        self.labels.release()
        self.meter.close()

    def step(
        self,
        settings: MemorySettings,
        on_move: Callable[[], None] | None = None,
        *,
        forward_only: bool = False,
        suspend_offload: bool = True,
    ) -> StepRecord:
        """Takes one metered step.

        Args:
            settings: Those that were applied; what waits on the host between steps is read from them here.
            on_move: Called at each phase and module; raises `StepStopped` to end the step.
            forward_only: Without gradients, backward and optimizer.
            suspend_offload: In a forward-only step, keep Megatron's activation offload out of it.

        Returns:
            The record: of a whole step, or of one that ran out of memory or was stopped. The model is usable after
            either.
        """
        labels, meter = self.labels, self.meter
        torch.cuda.synchronize()
        meter.start(self._categories())
        self._bookkeeping_seconds = 0.0
        started = time.perf_counter()
        measured: dict[str, Any] = {}
        labels.on_move = on_move
        try:
            with self._offload_watch.watching(on_host=self.meter.hold_on_host):
                measured |= self._phases(settings, forward_only=forward_only, suspend_offload=suspend_offload)
        except (torch.OutOfMemoryError, StepStopped) as error:
            measured |= self._ended_early(error) | self._offload_seen(settings)
            self._recover(settings, error)
        except BaseException as error:
            self._recover(settings, error)
            raise
        finally:
            labels.on_move = None
        torch.cuda.synchronize()
        measured["step_seconds"] = time.perf_counter() - started - self._bookkeeping_seconds
        self.num_steps += 1
        return self._record(settings, measured | {"forward_only": forward_only})

    def _recover(self, settings: MemorySettings, error: BaseException) -> None:
        self.labels.on_move = None
        recover(self.live, settings, error)
        self._offload_watch.misled = False

    def _phases(self, settings: MemorySettings, *, forward_only: bool, suspend_offload: bool) -> dict[str, Any]:
        away = groups_on_host(settings)
        needed = [group for group in GROUPS if group == "parameters" or not (forward_only and group in away)]
        with self.labels.phase_of("load"):
            _, load_seconds = self._seconds_if_moved(lambda: self._load(needed))
        with self._off_the_clock():
            require_resident(self.live, needed)
        with self.labels.phase_of("forward"), self._remedy.during_step(self._remedy_of(settings)):
            if forward_only:
                self._offload_watch.misled |= not suspend_offload
                loss = forward_only_step(self.live, self.labels, suspend_offload=suspend_offload)
            else:
                loss = train_step(self.live, self.labels)
        with self._off_the_clock():  # what is about to leave is named while it is here
            self.meter.categorise(self._categories())
        with self.labels.phase_of("offload"):
            freed, offload_seconds = self._seconds_if_moved(lambda: self._between_steps(settings))
        return {
            "loss": loss if self._backend.computes else None,
            "load_seconds": load_seconds,
            "offload_seconds": offload_seconds,
            "offloaded_bytes_by_group": freed,
            **self._offload_seen(settings),
        }

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Takes the block's duration off the step's: it looks at the model, and computes nothing of the step."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._bookkeeping_seconds += time.perf_counter() - started

    def _offload_seen(self, settings: MemorySettings) -> dict[str, Any]:
        return {
            "offloaded_bytes_by_module": dict(self._offload_watch.moved_bytes),
            "without_effect": {
                **self._offload_watch.without_effect(self.scenario, settings),
                **self._remedy.without_effect(),
            },
        }

    def _remedy_of(self, settings: MemorySettings) -> str | None:
        needed = settings.checkpoints_moe_layers(self.scenario.architecture)
        return settings.checkpoint_input_remedy if needed else None

    def _load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        self._asked.move("load", groups)
        return self.residency.load(groups)

    def _between_steps(self, settings: MemorySettings) -> dict[str, int]:
        away = groups_on_host(settings)
        self._asked.end_step(away)
        self.residency.forget([group for group in GROUPS if group not in away])
        return self.residency.offload(away)

    def saved_in_regions(self, settings: MemorySettings) -> SavedInRegions:
        """Takes a step and counts what each offload module saves for backward; `settings` offload none."""
        saved = SavedInRegions()
        with saved.watching():
            self.step(settings)
        return saved

    def audit_offload(self, saved: SavedInRegions, plain: StepRecord, offloaded: StepRecord) -> OffloadAccount:
        """Repeats `offloaded`, the last step, and accounts for what it was expected to free, by `offload_audit`."""

        def repeat(num_events: int, look: Callable[[], None]) -> StepRecord:
            with self.meter.at_event(num_events, look):
                return self.step(offloaded.settings)

        return audit_offload(self.live, self.labels.modules, saved, plain, offloaded, repeat)

    def move(self, action: Action, groups: tuple[str, ...]) -> Movement:
        """Moves groups between two steps, or hands the parameters over.

        Raises:
            ValueError: If the parameters are to be handed over while they are on the host.
        """
        moves = {
            "load": lambda: self.residency.load(groups),
            "offload": lambda: self.residency.offload(groups),
            "hand over": self.residency.hand_over,
        }
        moved_bytes, seconds = self._seconds_if_moved(moves[action])
        self._asked.move(action, groups)
        self.meter.categorise(self._categories())
        return Movement(
            action=action,
            moved_bytes=moved_bytes,
            seconds=seconds,
            device_bytes=self.meter.live_bytes("device"),
            host_bytes=self.meter.live_bytes("host"),
            peak_host_bytes=self.meter.peak_host_bytes,
        )

    def audit_residency(self) -> ResidencyAudit:
        """Holds where every byte of the three groups is against what was asked for."""
        return audit_residency(self.live, self.meter, self._asked, self.residency.tensors(), self._move_host_bytes)

    def set_residency_fault(self, name: str | None) -> None:
        """Brings everything up and puts it right; from then on groups move with a fault of `FAULTS`, or without.

        Raises:
            ValueError: If another fault is on, or the model does not have what the fault is about.
        """
        if name is not None and type(self.residency) is not Residency:
            raise ValueError(
                f"{name} cannot join a fault that is on already, must be the only one: leave its block first"
            )
        self.residency.load()
        mend(self.live)
        self._asked, self._move_host_bytes = Asked(), (0, 0)
        self.residency = Residency(self.live)
        if name is not None:
            self.residency = FAULTS[name](self.live)

    def groups_used(self) -> dict[str, tuple[str, ...]]:
        """Takes a step and hands the parameters over; returns by phase which groups an operation touched."""
        self._load()
        require_resident(self.live)
        with ExitStack() as stack:
            if self._backend.compiles:
                # Under a dispatch mode torch.compile gives a function up for good, and later steps round otherwise.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            step = GroupUse(self.labels, self.residency.tensors())
            stack.enter_context(step.watching())
            stack.enter_context(self.labels.phase_of("idle"))
            train_step(self.live, self.labels)
        sync = GroupUse(self.labels, self.residency.tensors())
        with sync.watching():
            self.move("hand over", ("parameters",))
        used = step.by_phase()
        # Until Megatron's timers enter the forward phase, a step zeroes its gradients.
        return {"zeroing": used.pop("idle"), **used, "hand over": sync.by_phase()["idle"]}

    @staticmethod
    def _ended_early(error: Exception) -> dict[str, Any]:
        status: Status = "interrupted"
        message = f"stopped in {error}: run the step again"
        if isinstance(error, torch.OutOfMemoryError):
            status = "out_of_memory"
            message = f"{error}: recompute or offload more, or shorten the sequence"
        return {"status": status, "message": message}

    def _categories(self) -> dict[str, Any]:
        return {"workspace": list(holders.workspace(self.live)), **self.residency.tensors()}

    def _record(self, settings: MemorySettings, measured: dict[str, Any]) -> StepRecord:
        self.meter.categorise(self._categories())
        timeline = self.meter.finish()
        residual_bytes = self.meter.uncategorised_bytes()
        if measured.get("status") == "out_of_memory" and self.meter.out_of_memory is not None:
            measured["out_of_memory"] = OutOfMemory.at(self.meter.out_of_memory, timeline)
        return StepRecord.from_timeline(
            timeline,
            scenario=self.scenario,
            settings=settings,
            backend=self._backend.name,
            versions=versions(),
            step_index=self.num_steps - 1,
            residual_bytes=residual_bytes,
            host_reserved_bytes=self._host_reserved_bytes(),
            tokens_per_second=self._tokens_per_second(measured),
            **measured,
        )

    def _tokens_per_second(self, measured: dict[str, Any]) -> float:
        if "loss" not in measured or not self._backend.computes:
            return 0.0
        return self.scenario.tokens_per_step / float(measured["step_seconds"])

    def _host_reserved_bytes(self) -> int | None:
        by_torch = self.meter.host_reserved_bytes()
        return None if by_torch is None else by_torch + registered_bytes()

    def unmetered_step_seconds(self, settings: MemorySettings) -> float:
        """Takes a step and does not meter what it computes; returns its duration.

        Loading and offloading are metered as always: storages that they resize would be lost to the account.
        """
        _, load_seconds = self._seconds_if_moved(self._load)
        with self.labels.detached(), self.meter.looking_away():
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_step(self.live, self.labels)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        _, offload_seconds = self._seconds_if_moved(lambda: self._between_steps(settings))
        return load_seconds + seconds + offload_seconds

    def _seconds_if_moved(self, move: Callable[[], dict[str, int]]) -> tuple[dict[str, int], float]:
        before = self.meter.live_bytes("host")
        self.meter.restart_peak()
        started = time.perf_counter()
        moved = move()
        seconds = time.perf_counter() - started if moved else 0.0
        self._move_host_bytes = (max(before, self.meter.live_bytes("host")), self.meter.peak_host_bytes)
        return moved, seconds


def versions() -> dict[str, str]:
    """Returns the versions that a measurement depends on."""
    found = {"memlab": memlab.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
