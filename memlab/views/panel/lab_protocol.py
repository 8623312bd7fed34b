"""What the panel needs of a lab: a `memlab.Lab`, or a test's substitute without a model."""

# ruff: noqa: D102 - `memlab.Lab` documents these members

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.request import StepRequest
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord

if TYPE_CHECKING:
    from memlab.lab.lab import Lab
    from memlab.lab.session import OnProgress


class NamedBackend(Protocol):
    """A backend, of which the panel shows the name."""

    @property
    def name(self) -> str: ...


class LabLike(Protocol):
    """The part of `memlab.Lab` that the panel uses; methods raise ValueError as that class does."""

    @property
    def scenario(self) -> Scenario: ...
    @property
    def scenario_as_opened(self) -> Scenario: ...
    @property
    def busy(self) -> bool: ...
    @property
    def settings(self) -> MemorySettings: ...
    @property
    def backend(self) -> NamedBackend: ...
    @property
    def records(self) -> list[StepRecord]: ...
    @property
    def state_changes(self) -> list[StateChange]: ...
    @property
    def device_memory_bytes(self) -> int | None: ...
    @property
    def closed(self) -> bool: ...

    def set_workload(self, *, seq_length: int | None = None, micro_batch_size: int | None = None) -> None: ...

    def check_state(self, state: TrainingState, settings: MemorySettings | None = None) -> None: ...

    def submit(
        self, request: StepRequest | None = None, on_progress: OnProgress | None = None
    ) -> Future[StepRecord]: ...

    def stop(self) -> bool: ...


if TYPE_CHECKING:

    def _lab_is_like_that(lab: Lab) -> LabLike:
        """Fails mypy where `Lab` stops being what the panel needs."""
        return lab
