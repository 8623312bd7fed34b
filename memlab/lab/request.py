"""What a lab is asked to do next: a training step, or a pass without backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.scenario import WORKLOAD, Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened
from memlab.record.step_record import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    """A training step, and what it runs under.

    Raises:
        ValueError: If a value is not of its type.
    """

    settings: MemorySettings | None = None
    """Applied first; None keeps the lab's current settings."""
    state: TrainingState | None = None
    """The training state, to which the lab changes as by `Lab.set_state`, together with the settings; None keeps the
    current one."""
    allocator: AllocatorSettings | None = None
    """Options of torch's allocator. A simulated lab rebuilds its model under other ones; a process on a GPU has those
    that it was started with. None keeps the current ones."""
    warm_up: bool = True
    """After a change, take one step that is not recorded first: it allocates Adam's moments and fills Megatron's
    offload manager, so that the recorded step equals all that follow (`StepRecord.is_steady`)."""

    def __post_init__(self) -> None:
        for name, kind in (("settings", MemorySettings), ("state", TrainingState), ("allocator", AllocatorSettings)):
            if (value := getattr(self, name)) is not None:
                check_kind(name, value, kind)
        _check_flags(self, "warm_up")

    def scenario_after(self, current: Scenario) -> Scenario:
        """Returns what the step runs on a model that now has another scenario."""
        state = current.state if self.state is None else self.state
        allocator = current.allocator if self.allocator is None else self.allocator
        if (state, allocator) == (current.state, current.allocator):
            return current
        return replace(current, state=state, allocator=allocator)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRequest:
    """A pass without gradients, backward and optimizer; `Lab.forward_only` explains the fields.

    Raises:
        ValueError: If a value is not of its type.
    """

    scenario: Scenario
    """The scenario of the training step, with the workload of the pass."""
    settings: MemorySettings | None = None
    suspend_offload: bool = True
    warm_up: bool = False

    def __post_init__(self) -> None:
        check_kind("scenario", self.scenario, Scenario)
        if self.settings is not None:
            check_kind("settings", self.settings, MemorySettings)
        _check_flags(self, "suspend_offload", "warm_up")

    def check_workload_of(self, current: Scenario) -> None:
        """Checks that only the workload differs from the training step's.

        Raises:
            ValueError: If something else differs, for which the model would have to be built again.
        """
        others = [name for name in self.scenario.differences(current) if name not in (*WORKLOAD, "packed_sequences")]
        if others:
            raise ValueError(
                f"the pass has another {', another '.join(others)} than the lab, must have the same apart from its "
                "workload: change the lab's, or open another lab"
            )


def check_kind(name: str, value: object, kind: type) -> None:
    """Checks that a value is of a class.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, kind):
        verb, action = ("are" if name == "settings" else "is"), "name its fields"
        if kind is MemorySettings and isinstance(value, TrainingState):
            action = "a training state needs its name, state=TrainingState(...)"
        if kind is MemorySettings and isinstance(value, StepRecord):
            action = "this is a record of a step, write .settings behind it"
        raise ValueError(f"{name} {verb} {shortened(value)}, must be {kind.__name__}(...): {action}")


def _check_flags(request: StepRequest | PassRequest, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(request, name), bool):
            raise ValueError(f"{name} is {shortened(value)}, must be True or False: give one of them")
