"""What a `Lab` needs of its live model, which is in this process or spread over the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.progress import Progress
from memlab.lab.request import PassRequest, StepRequest
from memlab.lab.worker import Worker
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord
from memlab.record.transfer import Action, Transfer

OnProgress = Callable[[Progress], None]


class NamedBackend(Protocol):
    """Where a model runs."""

    @property
    def name(self) -> str:
        """One of `memlab.backends.BACKENDS`."""

    @property
    def reason(self) -> str:
        """Why it was chosen, in words."""


class Session(Protocol):
    """A live model under its current settings, the thread that uses it, and the records of its steps.

    While a step runs and after `close`, what uses the model raises ValueError.
    """

    worker: Worker
    records: list[StepRecord]
    state_changes: list[StateChange]
    device_memory_bytes: int | None
    """The memory of a pretended device; None sets no limit."""
    pinned_host_memory: bool
    """Whether host copies that are allocated from now on are page-locked."""

    @property
    def scenario(self) -> Scenario:
        """What a step runs."""

    @property
    def settings(self) -> MemorySettings:
        """The current settings."""

    @property
    def num_steps(self) -> int:
        """Steps taken since the model was built, including warm-up steps."""

    @property
    def backend(self) -> NamedBackend:
        """Where the model runs."""

    def build(self) -> None:
        """Builds the model."""

    def require_free(self) -> None:
        """Checks that nothing else meters this process where the model would run.

        Raises:
            ValueError: If a block of `memlab.watch` does.
        """

    def check(self, request: StepRequest | PassRequest) -> None:
        """Refuses what the model or the backend cannot take, before anything has run.

        Raises:
            ValueError: If a rule is broken.
        """

    def apply(self, settings: MemorySettings) -> None:
        """Changes the settings of the live model, in place."""

    def set_workload(self, scenario: Scenario) -> None:
        """Changes what the next step trains on."""

    def set_state(self, state: TrainingState, settings: MemorySettings | None) -> StateChange:
        """Changes the training state, and rebuilds what needs other tensors."""

    def submit(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> Future[StepRecord]:
        """Starts a step or a pass, and returns at once."""

    def take(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> StepRecord:
        """Takes a step or a pass, and waits for it; Ctrl-C ends it where it can end."""

    def stop(self) -> bool:
        """Requests that the running step ends, and returns whether there is one."""

    def transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        """Transfers groups between device and host between two steps."""

    def close(self) -> None:
        """Frees the model, and ends the thread."""
