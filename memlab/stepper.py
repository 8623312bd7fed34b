"""The worker's side of a lab: everything that touches the live model, on one thread.

It knows nothing of threads, records kept or who asked: it takes a step under settings and says what happened.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator
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
from memlab.model.engine_caches import fill_cublas_workspaces
from memlab.model.offload_watch import OffloadWatch
from memlab.model.quiet import quiet_megatron
from memlab.model.recovery import recover
from memlab.model.remedies import CheckpointRemedy
from memlab.model.residency import Residency, groups_on_host
from memlab.model.training_step import train_step
from memlab.movement import GROUPS, Movement
from memlab.out_of_memory import OutOfMemory
from memlab.progress import StepStopped
from memlab.record import Status, StepRecord
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
        self.labels.attach(self.live.chunk.module)
        self.residency = Residency(self.live)
        if self._backend.name == "cuda":
            with self.labels.category("workspace"):
                fill_cublas_workspaces()

    def apply(self, settings: MemorySettings) -> None:
        """Sets recompute and activation offload for the next step."""
        toggles.apply(self.live, settings)

    def set_workload(self, scenario: Scenario) -> None:
        """Takes another sequence length, micro-batch size or number of micro-batches from the next step on."""
        self.scenario = self.live.scenario = scenario

    def drop(self) -> dict[str, int]:
        """Drops every name of the model, as a notebook does with ``del``, and finds out who still holds it.

        Returns:
            Device bytes by holder: what came free when it let go, one holder after the other. Nothing is left then.
        """
        del self.live, self.residency
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
        self.meter.close()

    def step(self, settings: MemorySettings, on_move: Callable[[], None] | None = None) -> StepRecord:
        """Takes one metered step.

        Args:
            settings: Those that were applied; what waits on the host between steps is read from them here.
            on_move: Called at each phase and module; raises `StepStopped` to end the step.

        Returns:
            The record: of a whole step, or of one that ran out of memory or was stopped. The model is usable after
            either.
        """
        labels, meter = self.labels, self.meter
        torch.cuda.synchronize()
        meter.start(self._categories())
        started = time.perf_counter()
        measured: dict[str, Any] = {}
        labels.on_move = on_move
        try:
            with self._offload_watch.watching():
                measured |= self._phases(settings)
        except (torch.OutOfMemoryError, StepStopped) as error:
            measured |= self._ended_early(error) | self._offload_seen(settings)
            labels.on_move = None
            recover(self.live, settings, error)
        except BaseException as error:
            labels.on_move = None
            recover(self.live, settings, error)
            raise
        finally:
            labels.on_move = None
        torch.cuda.synchronize()
        measured["step_seconds"] = time.perf_counter() - started
        self.num_steps += 1
        return self._record(settings, measured)

    def _phases(self, settings: MemorySettings) -> dict[str, Any]:
        with self.labels.phase_of("load"):
            _, load_seconds = _seconds_if_moved(self.residency.load)
        with self.labels.phase_of("forward"), self._remedy.during_step(self._remedy_of(settings)):
            loss = train_step(self.live, self.labels)
        self.meter.categorise(self._categories())
        with self.labels.phase_of("offload"):
            freed, offload_seconds = _seconds_if_moved(lambda: self._between_steps(settings))
        return {
            "loss": loss,
            "load_seconds": load_seconds,
            "offload_seconds": offload_seconds,
            "offloaded_bytes_by_group": freed,
            **self._offload_seen(settings),
        }

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

    def _between_steps(self, settings: MemorySettings) -> dict[str, int]:
        away = groups_on_host(settings)
        self.residency.forget([group for group in GROUPS if group not in away])
        return self.residency.offload(away)

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
        moved_bytes, seconds = _seconds_if_moved(moves[action])
        return Movement(
            action=action,
            moved_bytes=moved_bytes,
            seconds=seconds,
            device_bytes=self.meter.live_bytes("device"),
            host_bytes=self.meter.live_bytes("host"),
        )

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
        peak = timeline.peak_index()
        if measured.get("status") == "out_of_memory" and self.meter.out_of_memory is not None:
            measured["out_of_memory"] = OutOfMemory.at(self.meter.out_of_memory, timeline)
        return StepRecord(
            scenario=self.scenario,
            settings=settings,
            backend=self._backend.name,
            versions=versions(),
            step_index=self.num_steps - 1,
            static_bytes=timeline.opening_bytes,
            peak_allocated_bytes=timeline.bytes_at(peak),
            activation_peak_bytes=timeline.peak_bytes(phases=("forward", "backward")) - timeline.opening_bytes,
            peak_by_category=timeline.breakdown(peak),
            peak_by_module=timeline.breakdown(peak, by="module"),
            residual_bytes=residual_bytes,
            host_bytes=timeline.peak_bytes("host"),
            recomputed_bytes=timeline.born_bytes("recomputed"),
            tokens_per_second=self.scenario.tokens_per_step / measured["step_seconds"] if "loss" in measured else 0.0,
            timeline=timeline,
            **measured,
        )

    def unmetered_step_seconds(self, settings: MemorySettings) -> float:
        """Takes a step and does not meter what it computes; returns its duration.

        Loading and offloading are metered as always: storages that they resize would be lost to the account.
        """
        _, load_seconds = _seconds_if_moved(self.residency.load)
        with self.meter.looking_away():
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_step(self.live, self.labels)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        _, offload_seconds = _seconds_if_moved(lambda: self._between_steps(settings))
        return load_seconds + seconds + offload_seconds


def _seconds_if_moved(move: Callable[[], dict[str, int]]) -> tuple[dict[str, int], float]:
    started = time.perf_counter()
    moved = move()
    return moved, time.perf_counter() - started if moved else 0.0


def versions() -> dict[str, str]:
    """Returns the versions that a measurement depends on."""
    found = {"memlab": memlab.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
