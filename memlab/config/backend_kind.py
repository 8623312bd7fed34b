"""What follows from where a model runs, also for whoever has only the name in a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.option import Rebuilt
from memlab.config.training_state import TrainingState, what_rebuilds

if TYPE_CHECKING:  # `memlab doctor` asks for backends where numpy is missing, which scenarios need
    from memlab.config.scenario import Scenario

BackendName = Literal["cpu", "cuda", "simulated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendKind:
    """Facts about a backend."""

    name: BackendName
    is_prediction: bool = False
    """Whether nothing is computed: tensors have no values, the times say nothing about a GPU, the other ranks of a job
    are not there, and the routing is chosen."""
    on_gpu: bool = False
    """Whether it runs on a real GPU: allocations of equal steps differ a little, and the whole process is metered."""
    has_allocator: bool = True
    """Whether device memory comes from torch's caching allocator, real or simulated. Without one, the device is this
    machine's CPU, and its bytes and times say nothing about a GPU."""

    def rebuilt_by(self, scenario: Scenario, state: TrainingState, allocator: AllocatorSettings) -> Rebuilt:
        """Returns what a lab builds again when its training state and its allocator's options change.

        Args:
            scenario: What the lab runs now.
            state: The new training state.
            allocator: The new options. A process has the same ones from its start, so a simulated one starts again.
        """
        if self.is_prediction and allocator != scenario.allocator:
            return "model"
        return what_rebuilds(scenario.state, state)


KINDS: dict[str, BackendKind] = {
    kind.name: kind
    for kind in (
        BackendKind(name="cpu", has_allocator=False),
        BackendKind(name="cuda", on_gpu=True),
        BackendKind(name="simulated", is_prediction=True),
    )
}
