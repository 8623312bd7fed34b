"""A Lab: one live model whose memory settings change between steps, and the records of the steps that it took."""

from __future__ import annotations

import atexit
import gc
import platform
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

import memlab
from memlab.architectures import Architecture
from memlab.backends import find_backend
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.storages import StorageMeter
from memlab.model import holders, toggles
from memlab.model.build import LiveModel, build
from memlab.model.offload_watch import OffloadWatch
from memlab.model.quiet import quiet_megatron
from memlab.model.residency import Residency
from memlab.model.training_step import train_step
from memlab.record import StepRecord
from memlab.scenario import Dtype, Scenario
from memlab.settings import MemorySettings

_Result = TypeVar("_Result")


class Lab:
    """One live Megatron model on one rank.

    All work on the model runs on one thread of the lab's own, so that cells, widgets and headless runs do the same.
    Megatron keeps its process groups once a process, so opening a lab closes the one that was open before.

    Args:
        architecture: A known name (`memlab.ARCHITECTURES`), or the path of a Hugging Face ``config.json``.
        num_layers: How many layers to build; None builds all.
        seq_length: Tokens in a sequence; None takes the architecture's default.
        micro_batch_size: Sequences in one forward pass.
        num_microbatches: Forward and backward passes before one optimizer step.
        seed: Of weights and data.
        dtype: Of parameters and activations, ``bf16`` or ``fp32``.
        backend: ``auto`` or a name of `memlab.backends.BACKENDS`.

    Raises:
        ValueError: If a value breaks its rule.
    """

    _open: weakref.ref[Lab] | None = None

    def __init__(
        self,
        architecture: str | Path | Architecture,
        *,
        num_layers: int | None = None,
        seq_length: int | None = None,
        micro_batch_size: int = 1,
        num_microbatches: int = 1,
        seed: int = 1234,
        dtype: Dtype = "bf16",
        backend: str = "auto",
    ) -> None:
        self.scenario = Scenario(
            architecture=architecture,  # type: ignore[arg-type]  # the Scenario finds names and paths itself
            num_layers=num_layers or 0,
            seq_length=seq_length or 0,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            seed=seed,
            dtype=dtype,
        )
        self.backend = find_backend(backend)
        self.settings = MemorySettings()
        self.records: list[StepRecord] = []
        self.num_steps = 0
        _close_open_lab()
        self._labels = Labels()
        self._meter = StorageMeter(self._labels)
        self._offload_watch = OffloadWatch()
        self._settled = False
        """Whether a step has been taken under the settings that stand: the next one is then steady."""
        self._worker: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="memlab")
        Lab._open = weakref.ref(self)
        try:
            self._live = self._on_worker(self._build)
        except BaseException:
            holders.forget()
            self._worker.shutdown()
            self._worker = None
            raise
        self._residency = Residency(self._live)

    def apply(self, settings: MemorySettings) -> None:
        """Changes the memory settings of the live model, in place.

        What is offloaded between steps moves at the end of the next step, and comes back at the start of the one after.

        Raises:
            ValueError: If a rule is broken; the model is then as it was.
        """
        if settings == self.settings and self.num_steps:
            return
        self._on_worker(lambda: toggles.apply(self._live, settings))
        self.settings = settings
        self._settled = False

    def step(self, settings: MemorySettings | None = None, *, warm_up: bool = True) -> StepRecord:
        """Takes a training step and measures it.

        Args:
            settings: Applied first; None keeps those that stand.
            warm_up: After a change, take one step that is not recorded first: it makes Adam's moments and fills
                Megatron's offload manager, so that the recorded step is like all that follow.

        Returns:
            The record, also appended to `records`.

        Raises:
            ValueError: If the settings break a rule, or the lab is closed.
        """
        if settings is not None:
            self.apply(settings)
        if warm_up and not self._settled:
            self._on_worker(self._settle)
        record = self._on_worker(self._step)
        self.records.append(record)
        return record

    def unmetered_step_seconds(self) -> float:
        """Takes a step without metering it, and returns its duration: what the meter costs is told by comparison."""

        def run() -> float:
            started = time.perf_counter()
            self._residency.load()
            train_step(self._live, self._labels)
            self._residency.offload(self.settings)
            torch.cuda.synchronize()
            return time.perf_counter() - started

        return self._on_worker(run, metered=False)

    def close(self) -> None:
        """Gives back everything: model, optimizer, process group, thread. Records stay readable. Twice is harmless."""
        if self._worker is None:
            return
        self._on_worker(self._release)
        self._worker.shutdown()
        self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._worker is None else f"{self.num_steps} steps"
        return f"Lab({self.scenario}, {self.backend.name}, {self.settings}, {state})"

    def _on_worker(self, job: Callable[[], _Result], *, metered: bool = True) -> _Result:
        if self._worker is None:
            raise ValueError(f"this lab ({self.scenario}) is closed: open another with Lab(...)")

        def run() -> _Result:
            with ExitStack() as stack:
                stack.enter_context(quiet_megatron())
                stack.enter_context(torch.enable_grad())
                stack.enter_context(self.backend.active())
                stack.enter_context(labelled_by(self._labels))
                stack.enter_context(self._meter.watching() if metered else nullcontext())
                return job()

        return self._worker.submit(run).result()

    def _build(self) -> LiveModel:
        live = build(self.scenario, self.backend.layer_provider, self.backend.distributed_backend)
        self._labels.attach(live.chunk)
        return live

    def _release(self) -> None:
        holders.release(self._live)
        del self._live, self._residency

    def _categories(self) -> dict[str, Any]:
        return {"workspace": list(holders.workspace(self._live)), **self._residency.tensors()}

    def _settle(self) -> None:
        self._step()
        gc.collect()  # what the last settings left in reference cycles is not this setting's memory

    def _step(self) -> StepRecord:
        labels, meter, settings = self._labels, self._meter, self.settings
        self._settled = False
        meter.start(self._categories())
        started = time.perf_counter()
        with self._offload_watch.watching():
            with labels.phase_of("load"):
                load_seconds = _seconds_if_moved(self._residency.load)[1]
            with labels.phase_of("forward"):
                loss = train_step(self._live, labels)
            meter.categorise(self._categories())
            with labels.phase_of("offload"):
                freed, offload_seconds = _seconds_if_moved(lambda: self._residency.offload(settings))
        torch.cuda.synchronize()
        step_seconds = time.perf_counter() - started
        meter.categorise(self._categories())
        residual_bytes = meter.uncategorised_bytes()
        timeline = meter.finish()
        peak = timeline.peak_index()
        self.num_steps += 1
        self._settled = True
        return StepRecord(
            scenario=self.scenario,
            settings=settings,
            backend=self.backend.name,
            versions=versions(),
            step_index=self.num_steps - 1,
            static_bytes=timeline.opening_bytes,
            peak_allocated_bytes=timeline.bytes_at(peak),
            activation_peak_bytes=timeline.peak_bytes(phases=("forward", "backward")) - timeline.opening_bytes,
            peak_by_category=timeline.breakdown(peak),
            peak_by_module=dict(list(timeline.breakdown(peak, by="module").items())[:20]),
            residual_bytes=residual_bytes,
            host_bytes=timeline.peak_bytes("host"),
            offloaded_bytes_by_module=dict(self._offload_watch.moved_bytes),
            offloaded_bytes_by_group=freed,
            recomputed_bytes=timeline.born_bytes("recomputed"),
            without_effect=self._offload_watch.without_effect(self.scenario, settings),
            load_seconds=load_seconds,
            offload_seconds=offload_seconds,
            step_seconds=step_seconds,
            tokens_per_second=self.scenario.tokens_per_step / step_seconds,
            loss=loss,
            timeline=timeline,
        )


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


def _close_open_lab() -> None:
    lab = Lab._open() if Lab._open is not None else None
    if lab is not None and lab._worker is not None:
        warnings.warn(
            f"closing the open lab ({lab.scenario}): Megatron keeps its process groups once a process", stacklevel=3
        )
        lab.close()


atexit.register(holders.forget)
