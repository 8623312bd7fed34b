"""A Lab: one live model whose memory settings change between steps, and the records of the steps that it took."""

from __future__ import annotations

import atexit
import gc
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from memlab.backends import find_backend
from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import Dtype, Scenario
from memlab.config.settings import MemorySettings
from memlab.config.settings_on_model import check_on_model
from memlab.fitting.oom_verdict import judge
from memlab.lab.probes import Instruments
from memlab.lab.progress import Follower, Progress
from memlab.lab.stepper import Stepper
from memlab.lab.worker import Worker
from memlab.model.process_group import require_ranks
from memlab.model.retention import holders
from memlab.record.step_record import StepRecord

__all__ = ["Lab", "Progress"]

_Result = TypeVar("_Result")


class Lab(Instruments):
    """One live Megatron model on one rank.

    All work on the model runs on one thread of the lab's own, so that cells, widgets and headless runs do the same.
    Megatron keeps its process groups once a process, so opening a lab closes the one that was open before; until then,
    or until `close`, a lab stays open, also when its last name is gone.

    Args:
        architecture: A known name (`memlab.ARCHITECTURES`), or the path of a Hugging Face ``config.json``.
        num_layers: How many layers to build; None builds all.
        seq_length: Tokens in a sequence; None takes the architecture's default.
        micro_batch_size: Sequences in one forward pass.
        num_microbatches: Forward and backward passes before one optimizer step.
        seed: Of weights and data.
        dtype: Of parameters and activations, ``bf16`` or ``fp32``.
        layout: How the job is spread over ranks, each of which opens the same lab under ``torchrun``; None is one rank.
        routing: Which experts tokens go to on the simulated backend, as a `memlab.config.routing.Routing` or its words.
        expert_buffers: Gives experts DDP buffers of their own, as where they are spread over ranks.
        backend: ``auto`` or a name of `memlab.backends.BACKENDS`.

    Raises:
        ValueError: If a value breaks its rule.
    """

    _open: Lab | None = None

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
        layout: Layout | None = None,
        routing: Routing | str = "balanced",
        expert_buffers: bool = False,
        backend: str = "auto",
    ) -> None:
        scenario = Scenario(
            architecture=architecture,  # type: ignore[arg-type]  # the Scenario finds names and paths itself
            num_layers=num_layers,  # type: ignore[arg-type]  # None becomes the architecture's
            seq_length=seq_length,  # type: ignore[arg-type]
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            seed=seed,
            dtype=dtype,
            layout=layout or Layout(),
            routing=routing,  # type: ignore[arg-type]
            expert_buffers=expert_buffers,
        )
        self.backend = find_backend(backend)
        if self.backend.computes and scenario.routing != Routing():
            raise ValueError(
                f"routing is {scenario.routing}, and on the {self.backend.name} backend the router decides: "
                "leave it out, or choose backend 'simulated'"
            )
        require_ranks(self.backend.distributed_backend, scenario.layout)
        self.backend.require_room(scenario)
        self.settings = MemorySettings()
        self.records: list[StepRecord] = []
        _close_open_lab()
        self._stepper = Stepper(scenario, self.backend)
        self._settled = False
        self._stop = threading.Event()
        self._worker = Worker(self._stepper.at_work, lambda: f"{self.scenario}, {self.settings}")
        Lab._open = self
        try:
            self._on_worker(self._stepper.build).result()
        except BaseException:
            self._worker.end()  # a build that Ctrl-C left alone comes to its end first
            holders.forget()
            raise

    @property
    def scenario(self) -> Scenario:
        """What a step runs; `set_workload` changes it."""
        return self._stepper.scenario

    @property
    def busy(self) -> bool:
        """Whether a step that `submit` or `step` started is running."""
        return self._worker.busy

    def apply(self, settings: MemorySettings) -> None:
        """Changes the memory settings of the live model, in place; Megatron's offload manager starts over.

        What is offloaded between steps moves at the end of the next step, and comes back at the start of the one after.

        Raises:
            ValueError: If a rule is broken, or a step is running; the model is then as it was.
        """
        self._check(settings)
        self._alone(lambda: self._apply(settings, anew=True))

    def set_workload(
        self,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        """Changes what the next step trains on; the model stays as it is.

        Args:
            seq_length: Tokens in a sequence; None leaves it.
            micro_batch_size: Sequences in a pass; None leaves it.
            num_microbatches: Passes before an optimizer step; None leaves it.

        Raises:
            ValueError: If a value is not a positive number, or a step is running.
        """
        given: dict[str, Any] = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "num_microbatches": num_microbatches,
        }
        scenario = replace(self.scenario, **{name: value for name, value in given.items() if value is not None})
        self._alone(lambda: self._set_workload(scenario), unsettles=scenario != self.scenario)

    def step(
        self,
        settings: MemorySettings | None = None,
        *,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> StepRecord:
        """Takes a training step and measures it: `submit`, and waits. Ctrl-C ends the step between two layers.

        Returns:
            The record, also appended to `records`.

        Raises:
            ValueError: If the settings break a rule, or the lab is busy or closed.
        """
        running = self.submit(settings, warm_up=warm_up, on_progress=on_progress)
        try:
            return running.result()
        except KeyboardInterrupt:
            self.stop()
            running.result()
            raise

    def forward_only(self, settings: MemorySettings | None = None, *, suspend_offload: bool = True) -> StepRecord:
        """Takes a pass without gradients, backward and optimizer, as reinforcement learning does for log-probabilities.

        Optimizer state is what earlier steps have made: on a lab that has taken none, Adam's moments are not there yet.

        Args:
            settings: Applied first; None keeps those that stand.
            suspend_offload: Keep Megatron's activation offload out of the pass, as NeMo-RL #2279 does. Without it the
                pass takes the place of the offload manager's warm-up, or uses up the groups of the next training step:
                `apply` makes the manager start over.

        Returns:
            The record, also appended to `records`; the same loss as a training step's.

        Raises:
            ValueError: If the settings break a rule, or the lab is busy or closed.
        """
        wanted = self.settings if settings is None else settings
        self._check(wanted)
        return self._alone(lambda: self._forward_only(wanted, suspend_offload))

    def submit(
        self,
        settings: MemorySettings | None = None,
        *,
        warm_up: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Future[StepRecord]:
        """Starts a training step and returns at once.

        Args:
            settings: Applied first; None keeps those that stand.
            warm_up: After a change, take one step that is not recorded first: it makes Adam's moments and fills
                Megatron's offload manager, so that the recorded step is like all that follow.
            on_progress: Called on the worker's thread at each phase and layer.

        Returns:
            The record to come. A step that runs out of memory or is stopped ends in a record too.

        Raises:
            ValueError: If the settings break a rule, or the lab is busy or closed; nothing has then run.
        """
        wanted = self.settings if settings is None else settings
        self._check(wanted)
        return self._worker.start(lambda: self._run(wanted, warm_up, on_progress), before=self._stop.clear)

    def stop(self) -> bool:
        """Asks the running step to end between two phases or layers; its record says ``interrupted``.

        Returns:
            Whether a step was running.
        """
        self._stop.set()
        return self.busy

    def close(self) -> None:
        """Gives back everything: model, optimizer, process group, thread. Records stay readable. Twice is harmless."""
        self._worker.refuse_on_own_thread()
        self.stop()
        try:
            self._worker.finish(self._stepper.release)
        finally:
            self._leave()

    def drop(self) -> dict[str, int]:
        """Closes the lab the careless way: drops its names alone, and says who kept how much of the model alive.

        Returns:
            Device bytes by holder; an empty dict if dropping the names was enough. Afterwards all of it is free.

        Raises:
            ValueError: If the lab is busy or closed.
        """
        left = self._alone(self._stepper.drop)
        self._worker.end()
        self._leave()
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._stepper.num_steps} steps"
        return f"Lab({self.scenario}, {self.backend.name}, {self.settings}, {state})"

    def _leave(self) -> None:
        Lab._open = None if Lab._open is self else Lab._open

    def _check(self, settings: MemorySettings) -> None:
        if not isinstance(settings, MemorySettings):
            raise ValueError(f"settings are {settings!r}, must be MemorySettings(...): name its fields")
        check_on_model(settings, self.scenario.architecture, *self.scenario.layers_of_chunks)

    def _on_worker(self, job: Callable[[], _Result]) -> Future[_Result]:
        return self._worker.submit(job)

    def _set_workload(self, scenario: Scenario) -> None:
        passes_differ = scenario.num_microbatches != self.scenario.num_microbatches
        self._stepper.set_workload(scenario)
        if passes_differ:
            self._stepper.apply(self.settings)  # Megatron's offload manager has learned its groups pass by pass

    def _forward_only(self, settings: MemorySettings, suspend_offload: bool) -> StepRecord:
        self._apply(settings)
        record = self._stepper.step(settings, forward_only=True, suspend_offload=suspend_offload)
        self._settled = self._settled and record.status == "ok"
        self.records.append(record)
        return record

    def _apply(self, settings: MemorySettings, *, anew: bool = False) -> None:
        if anew or settings != self.settings or not self._stepper.num_steps:
            self._stepper.apply(settings)
            self.settings = settings
            self._settled = False

    def _run(
        self, settings: MemorySettings, warm_up: bool, on_progress: Callable[[Progress], None] | None
    ) -> StepRecord:
        self._apply(settings)
        warms_up = warm_up and not self._settled
        stepper = self._stepper
        follower = Follower(stepper.labels, self.scenario, 2 if warms_up else 1, self._stop, on_progress)
        self._settled = False
        if warms_up:
            follower.prefix = "warm-up "
            stepper.settle()
            record = stepper.step(settings, follower)
            gc.collect()  # what the last settings left in reference cycles is not this setting's memory
            follower.prefix = ""
        if not warms_up or record.status == "ok":
            record = stepper.step(settings, follower)
        self._settled = record.status == "ok"
        record = judge(record, self.records)
        self.records.append(record)
        return record


def _close_open_lab() -> None:
    lab = Lab._open
    if lab is not None and not lab.closed:
        warnings.warn(
            f"closing the open lab ({lab.scenario}): Megatron keeps its process groups once a process", stacklevel=3
        )
        lab.close()


atexit.register(holders.forget)
