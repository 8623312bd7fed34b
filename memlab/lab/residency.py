"""What a lab does between two steps: its groups move, are audited, and move with an error that was once made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from memlab.config.settings import MemorySettings
from memlab.lab.probe_steps import groups_used
from memlab.lab.stepper import Stepper
from memlab.lab.worker import Worker
from memlab.model.residency.faults import FAULTS
from memlab.model.residency.transfers import Moves
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import Action, Movement, check_groups

_Result = TypeVar("_Result")


class BetweenSteps:
    """The part of a `Lab` that looks after parameters, gradients and optimizer state."""

    _stepper: Stepper
    _worker: Worker
    settings: MemorySettings
    """Those that stand."""
    _settled: bool
    """Whether a step has been taken under the settings that stand: the next one is then steady."""

    @property
    def closed(self) -> bool:
        """Whether the model has been given back."""
        return self._worker.closed

    @property
    def pinned_host_memory(self) -> bool:
        """Whether parameters, gradients and optimizer state wait in page-locked host memory, which copies faster.

        It holds for buffers that are allocated from now on: set it before they first go down.
        """
        return self._moves.residency.pinned

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        self._moves.residency.pinned = pinned

    @property
    def _moves(self) -> Moves:
        if self.closed:
            raise ValueError("this lab is closed, and its groups with it: open another with Lab(...)")
        return self._stepper.moves

    def offload(self, *groups: str) -> Movement:
        """Takes groups off the device between two steps; the next step brings them back.

        Args:
            *groups: Some of ``parameters``, ``gradients``, ``optimizer state``. Gradients are dropped, others copied.

        Raises:
            ValueError: If a name is unknown, or the lab is busy or closed.
        """
        return self._move("offload", groups)

    def load(self, *groups: str) -> Movement:
        """Brings groups back to the device between two steps.

        Args:
            *groups: Some of ``parameters``, ``gradients``, ``optimizer state``.

        Raises:
            ValueError: If a name is unknown, or the lab is busy or closed.
        """
        return self._move("load", groups)

    def hand_over(self) -> Movement:
        """Copies the parameters to the host for a rollout engine, as a weight sync does.

        Raises:
            ValueError: If the parameters are not on the device, or the lab is busy or closed.
        """
        return self._move("hand over", ("parameters",))

    def audit_residency(self) -> ResidencyAudit:
        """Finds where parameters, gradients and optimizer state are, and holds it against what was asked for."""
        return self._alone(lambda: self._stepper.moves.audit())  # noqa: PLW0108  # a closed lab has no moves

    def groups_used(self) -> dict[str, tuple[str, ...]]:
        """Takes a step and a weight sync that are not recorded, and sees which groups each phase touches.

        Returns:
            ``zeroing``, ``forward``, ``backward``, ``optimizer`` and ``hand over``, each with some of `GROUPS`.
        """
        return self._alone(lambda: groups_used(self._stepper, self.settings), unsettles=True)

    @contextmanager
    def residency_fault(self, name: str) -> Iterator[None]:
        """Within the block, groups move with an error that was once made; before and after it all are on the device.

        Args:
            name: One of `memlab.model.residency.faults.FAULTS`, where each stands with its source.

        Raises:
            ValueError: If there is no such fault, another one is on, the model does not have what it is about, or the
                lab is busy or closed.
        """
        if name not in FAULTS:
            raise ValueError(f"residency fault is {name!r}, must be one of {', '.join(FAULTS)}: choose one of them")
        self._alone(lambda: self._stepper.moves.set_fault(name), unsettles=True)
        try:
            yield
        finally:
            if not self.closed:
                self._worker.submit(lambda: self._stepper.moves.set_fault(None)).result()  # after a step, if one runs
                self._settled = False

    def _move(self, action: Action, groups: tuple[str, ...]) -> Movement:
        check_groups(groups)
        return self._alone(lambda: self._stepper.moves.move(action, groups), unsettles=True)

    def _alone(self, job: Callable[[], _Result], *, unsettles: bool = False) -> _Result:
        """Does a job on the worker; one that unsettles has the next step preceded by a warm-up."""

        def run() -> _Result:
            self._settled = self._settled and not unsettles
            return job()

        return self._worker.alone(run)
