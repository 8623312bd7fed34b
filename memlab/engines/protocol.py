"""What a lab asks of an engine: a training framework's own code, which builds, steps, changes and frees a rank's model.

`memlab.engines.megatron.engine` is the first one: Megatron's model under its DDP, with the distributed optimizer. A
lab, its transfers between device and host and its audits know no framework. They know this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

from memlab.config.backend_kind import BackendKind
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.residency.residency import Groups, Residency
from memlab.meter.labels import Labels
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord

Held = Literal["nothing", "model", "optimizer"]
"""What something else than the trainer refers to: the model, or the optimizer, as a learning rate scheduler does."""


def check_held(held: str) -> None:
    """Checks what is held.

    Raises:
        ValueError: If it is none of `Held`.
    """
    if held not in get_args(Held):
        raise ValueError(f"held is {held!r}, must be one of {', '.join(get_args(Held))}: choose one of them")


class Place(Protocol):
    """Where a model is built: a `memlab.backends.Backend`."""

    @property
    def join(self) -> Callable[[Layout], None]:
        """Joins torch.distributed's process group: with the other ranks, or alone as one rank of the layout."""

    @property
    def kind(self) -> BackendKind:
        """What follows from the place."""

    @property
    def sharding(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns the context in which FSDP2 shards the tensors that are there."""

    def provider_for(self, scenario: Scenario) -> type:
        """Returns the class that gives Megatron the layers that run there."""


class Microbatches:
    """The micro-batches of a step: this one has the engine's schedule step all of them."""

    def before_forward(self) -> None:
        """Called before each forward pass."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Lets the schedule count the micro-batches in the block, which runs it once."""
        yield


ALL_MICROBATCHES = Microbatches()


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that a model keeps from step to step, and what refers to it."""

    group: str
    """One of `memlab.record.transfer.GROUPS`."""
    holder: str
    """In words, such as ``buffers.param_data``."""
    tensor: torch.Tensor
    is_needed: bool = True
    """False for a tensor that exists only if something was copied twice."""

    @property
    def is_always_on_host(self) -> bool:
        """Whether an optimizer keeps it on the host by itself."""
        return not self.tensor.is_cuda

    @property
    def needed_bytes(self) -> int:
        """Bytes of its shape, which an emptied tensor keeps."""
        return self.tensor.numel() * self.tensor.element_size() if self.is_needed else 0


class Engine(Protocol):
    """One rank's model of one scenario. It is made without a model; `build` makes one."""

    scenario: Scenario
    """What a step runs. Whoever sets another workload, or another state before `build`, sets it here."""
    spares_shared: bool
    """Whether the remedy ``release_storage`` leaves tensors alone that a tap keeps too."""

    # Building and freeing

    def active(self) -> AbstractContextManager[None]:
        """Returns the context that everything else of the engine runs in: the process's settings of the framework."""

    def check(self, scenario: Scenario, settings: MemorySettings) -> None:
        """Lets the framework check a scenario by its own rules; nothing is built.

        Raises:
            ValueError: If it refuses.
        """

    def build(self) -> None:
        """Builds the model of `scenario` with its optimizer, after `free` in the process groups that there are.

        Its weights are those of the scenario's seed. Of a model that cannot be built nothing is left.
        """

    def release_optimizer(self) -> None:
        """Frees the optimizer, so that `build_optimizer` can build another one for the same model."""

    def build_optimizer(self) -> None:
        """Gives a model without an optimizer the one of `scenario`."""

    def remember(self) -> Callable[[], None] | None:
        """Returns what makes the objects of a new model as they are now, after any steps; None if nothing can."""

    def free(self) -> None:
        """Frees the model, or what is left where its build has failed; the process groups stay."""

    def release(self) -> None:
        """Frees the model as `free` does, and leaves the process groups."""

    def drop(self) -> None:
        """Drops the last name of the model, as a notebook does with ``del``."""

    def holders(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields what may still refer to a dropped model: a description, and a function that ends it."""

    def release_recipe(self, held: Held, *, clears: bool) -> Iterator[str]:
        """Drops the model as NeMo Automodel #2634 does; yields each line of upstream's function after it has run."""

    # Changing between two steps

    def apply(self, settings: MemorySettings) -> None:
        """Sets what the next forward recomputes and offloads.

        Raises:
            ValueError: If the settings break a rule on this model, which is then unchanged.
        """

    def set_state(self, scenario: Scenario) -> None:
        """Takes another scenario over, and sets what each forward reads of its training state.

        The rows of `TrainingState` say which options that suffices for.
        """

    # Stepping

    def train_step(
        self,
        labels: Labels,
        load_for_update: Callable[[], None] = lambda: None,
        microbatches: Microbatches = ALL_MICROBATCHES,
        update: Callable[[], None] | None = None,
    ) -> float | None:
        """Runs forward and backward of every micro-batch and the optimizer.

        Args:
            labels: Set to each phase as it begins.
            load_for_update: Called after backward, to load what only the optimizer needs.
            update: Takes the place of the optimizer's step.

        Returns:
            The mean loss over the micro-batches and the copies of the model; None on a rank that computes none.
        """

    def forward_only_step(
        self, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES, *, suspend_offload: bool
    ) -> float | None:
        """Runs the forward of every micro-batch without gradients, as RL frameworks do for log-probabilities.

        Args:
            labels: Set to each phase as it begins.
            suspend_offload: Whether the framework's activation offload is suspended.

        Returns:
            As `train_step`.
        """

    def during_step(
        self, on_host: Callable[[torch.Tensor], object] = lambda tensor: None
    ) -> AbstractContextManager[None]:
        """Returns the context of a step: it counts what is offloaded, and applies the remedy of the settings.

        Args:
            on_host: Called with each activation's copy on the host.
        """

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        """What the last step has offloaded of activations, by the settings' name of the module."""

    def without_effect(self) -> dict[str, str]:
        """Returns which of the settings did nothing in the last step, with the reason."""

    def recover(self, error: BaseException) -> None:
        """Undoes what a step leaves behind when it does not reach its end, and applies the settings again."""

    # What is there

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The transformer layers of the rank."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the modules by name; a layer is ``decoder.layers.N``, counted on the rank from 0."""

    def working_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields `named_modules` without those that return their input, and what else labels name as a module."""

    def groups(self) -> Groups:
        """Returns what is transferred between device and host."""

    def holdings(self) -> Iterator[HeldTensor]:
        """Yields parameters, gradients and optimizer state, found by another way than `groups` finds them."""

    def written_by_a_step(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields group, name and tensor of what a step would write to without a check; cheap enough for every step."""

    def workspace(self) -> Iterator[torch.Tensor]:
        """Yields what the framework keeps by name between steps beside the groups.

        A tensor that is allocated after a step and neither here nor in the groups is retained by mistake.
        """

    def uncollected_copies(self) -> Iterator[torch.Tensor]:
        """Yields what waits on the device for Python's garbage collector."""

    # What only some engines have

    def saved_for_backward(self) -> AbstractContextManager[Any]:
        """Counts in the block, which takes a step, what each offload module saves for backward."""

    def audit_offload(
        self,
        labels: Labels,
        saved: Any,
        plain: StepRecord,
        offloaded: StepRecord,
        repeat: Callable[[int, Callable[[], None]], StepRecord],
    ) -> OffloadAudit:
        """Compares what offload was expected to free with where each tensor is at the peak.

        Args:
            labels: Name the modules.
            saved: What `saved_for_backward` has counted in a step without offload.
            repeat: Takes a step like `offloaded`, and calls a function at the device event of a number.
        """

    @property
    def residency_faults(self) -> Mapping[str, Callable[[], Residency]]:
        """Errors that real projects have made in transfers, by name: what transfers with the error.

        Raises, when called, ValueError if the model lacks what the fault needs.
        """

    def own_gradient_moves(self, release: Callable[[Any], object], load: Callable[[Any], object]) -> Residency:
        """Returns transfers in which gradients are released and loaded by a reader's functions.

        Args:
            release: Gets the model, with its lists of buffers.
            load: The same.
        """

    def repair(self) -> None:
        """Gives gradients that a fault or a reader's code has lost their memory back, zeroed."""
