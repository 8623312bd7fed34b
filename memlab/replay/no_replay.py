"""What a stepper tells of a model and its steps, so that parts of a step are replayed, or all of it.

A stepper has one such object per model, and does not know what it replays: `StepReplay`, or this one, which replays
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.protocol import ALL_MICROBATCHES, Microbatches
from memlab.engines.retained_leaves import Retained
from memlab.record.timeline import Timeline
from memlab.replay.plan import Circumstances, Plan


@dataclass(frozen=True, slots=True)
class StepParts:
    """What takes a step's micro-batches and its update."""

    microbatches: Microbatches = ALL_MICROBATCHES
    update: Callable[[], None] | None = None
    """None has the engine update the parameters."""
    leaves_new: bool = True
    """Whether the update may leave something allocated that has no category yet."""


class NoReplay:
    """Every step is taken as a whole: that of real tensors, and any step with ``Lab(..., replay=False)``."""

    is_on = False
    num_replayed = 0
    """Forward passes through layers that were replayed in the last step that did not repeat another one whole."""
    has_new = True
    """Whether something may be allocated that has not been asked for its category."""
    is_unchanged = False
    """Whether nothing but memory may differ between the last step and the next one."""

    def plan(self, step: Circumstances) -> Plan:
        """Plans the next step."""
        return Plan()

    def repeat_step(self, plan: Plan) -> tuple[Timeline, dict[str, Any]] | None:
        """Repeats the last step as a whole, and returns its new timeline and what was measured of it; None if not."""

    @contextmanager
    def parts(self, plan: Plan) -> Iterator[StepParts]:
        """Replays what the plan allows in the block, which takes a step that repeats none."""
        yield StepParts()

    def step_taken(self, plan: Plan, measured: dict[str, Any], *, forward_only: bool) -> None:
        """Says that the step of a plan has reached its end, and what was measured of it."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs everything in the block, as something looks at real tensors or graphs."""
        yield

    def stop(self, *, starts_over: bool) -> None:
        """Replays less until the model starts over: what is known of it is wrong somewhere.

        Args:
            starts_over: Whether it has just started over. Then only presumptions may have been wrong.
        """

    def forget_passes(
        self, scenario: Scenario, settings: MemorySettings, following: MemorySettings | None = None
    ) -> None:
        """Forgets what passes do: they may do something else from now on.

        Args:
            scenario: What the steps so far have run.
            following: The settings of the next steps, if only these change.
        """

    def forget(self, scenario: Scenario, settings: MemorySettings) -> None:
        """Forgets what passes and updates do; see `forget_passes`."""

    def abandon(self) -> None:
        """Frees what replayed passes have allocated, after an error."""

    def free_state(self) -> None:
        """Counts the optimizer's state as freed, before the model is made as it was when it was built."""

    def start_over(self) -> None:
        """Says that the model is as it was when it was built."""

    def categorise_retained(self) -> None:
        """Gives what replayed passes left allocated its category."""

    def kept_in_graphs(self) -> tuple[dict[int, list[Retained]], set[int]]:
        """Returns by layer what its token dispatcher would keep in a graph, where a replayed pass has made none.

        Beside it the identities of the storages that stand-ins keep so, which the graphs of other layers may keep too.
        """
        return {}, set()

    def release(self) -> None:
        """Frees what replayed passes retain, and drops the model."""
