"""Where parameters, gradients and optimizer state are between two steps: transfers, audits, and faults on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from memlab.lab.session import Session
from memlab.lab.stepper import Stepper
from memlab.model.residency.audit import require_resident
from memlab.model.residency.group_usage import GroupUse
from memlab.model.residency.injected_faults import FAULTS
from memlab.model.training_step import train_step
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import Action, Transfer, check_groups


class ResidencyControl:
    """The part of a `Lab` that transfers groups between device and host, and checks where they are."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stepper = session.stepper

    @property
    def pinned_host_memory(self) -> bool:
        """Implements `Lab.pinned_host_memory`."""
        self._session.worker.require_open()
        return self._stepper.pinned_host_memory

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        def set_pinned() -> None:
            self._stepper.pinned_host_memory = pinned

        self._session.run_exclusive(set_pinned)

    def transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        """Implements `Lab.offload`, `Lab.load` and `Lab.hand_over`."""
        check_groups(groups)
        return self._session.run_exclusive(lambda: self._stepper.transfers.transfer(action, groups), disturbs=True)

    def audit(self) -> ResidencyAudit:
        """Implements `Lab.audit_residency`."""
        return self._session.run_exclusive(lambda: self._stepper.transfers.audit())  # noqa: PLW0108  # a closed lab has no transfers

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Implements `Lab.residency_fault`."""
        if name not in FAULTS:
            raise ValueError(f"residency fault is {name!r}, must be one of {', '.join(FAULTS)}: choose one of them")
        self._session.run_exclusive(lambda: self._stepper.transfers.set_fault(name), disturbs=True)
        try:
            yield
        finally:
            self._session.run_after_step(lambda: self._stepper.transfers.set_fault(None), disturbs=True)

    def groups_used(self) -> dict[str, tuple[str, ...]]:
        """Implements `Lab.groups_used`."""
        return self._session.run_exclusive(lambda: _groups_used(self._stepper), disturbs=True)


def _groups_used(stepper: Stepper) -> dict[str, tuple[str, ...]]:
    labels, transfers = stepper.labels, stepper.transfers
    transfers.load()
    require_resident(stepper.live)
    with ExitStack() as stack:
        if stepper.backend.compiles:
            # Under a dispatch mode torch.compile gives a function up for good, and later steps round differently.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        step = GroupUse(labels, transfers.residency.tensors())
        stack.enter_context(step.watching())
        stack.enter_context(labels.phase_of("idle"))
        stack.enter_context(stepper.checkpoint_input_remedy())
        with stepper.unrecorded():
            train_step(stepper.live, labels)
    sync = GroupUse(labels, transfers.residency.tensors())
    with sync.watching():
        transfers.transfer("hand over", ("parameters",))
    used = step.by_phase()
    # Until Megatron's timers enter the forward phase, a step zeroes its gradients.
    return {"zeroing": used.pop("idle"), **used, "hand over": sync.by_phase()["idle"]}
