"""Where parameters, gradients and optimizer state are between two steps: transfers, audits, and faults on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from memlab.config.model_restrictions import check_beside_addresses
from memlab.engines.residency.group_usage import GroupUse
from memlab.engines.residency.own_gradient_moves import Move
from memlab.lab.lab_part import LabPart
from memlab.lab.residency_audit import require_resident
from memlab.lab.stepper import Stepper
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import Action, Transfer, check_groups


class Residency(LabPart):
    """The part of a `Lab` that transfers groups between device and host, and checks where they are."""

    @property
    def pinned_host_memory(self) -> bool:
        """Whether host copies of parameters, gradients and optimizer state are page-locked, so that copies are faster.

        It applies to buffers that are allocated from now on: set it before the groups are first offloaded.
        """
        return self._session.pinned_host_memory

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        self._session.pinned_host_memory = pinned

    def offload(self, *groups: str) -> Transfer:
        """Transfers groups from the device to the host between two steps; the next step loads them again.

        Args:
            *groups: Some of ``parameters``, ``gradients``, ``optimizer state``. Gradients are dropped, others copied.

        Raises:
            ValueError: If a name is unknown, or the job has CUDA graphs.
        """
        return self._transfer("offload", groups)

    def load(self, *groups: str) -> Transfer:
        """Transfers groups from the host to the device between two steps.

        Args:
            *groups: Some of ``parameters``, ``gradients``, ``optimizer state``.

        Raises:
            ValueError: If a name is unknown.
        """
        return self._transfer("load", groups)

    def hand_over(self) -> Transfer:
        """Copies the parameters to the host for a rollout engine, as a weight sync does.

        Raises:
            ValueError: If the parameters are not on the device.
        """
        return self._transfer("hand over", ("parameters",))

    def _transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        check_groups(groups)
        if action == "offload":
            check_beside_addresses(f"offload is asked for {', '.join(groups)}", self._session.scenario.state)
        return self._session.transfer(action, groups)

    def audit_residency(self) -> ResidencyAudit:
        """Finds where parameters, gradients and optimizer state are, and compares it with what was requested."""
        session = self._one_process("audit_residency")
        return session.run_exclusive(lambda: session.model.transfers.audit())  # noqa: PLW0108  # a closed lab has no transfers

    @contextmanager
    def residency_fault(self, name: str) -> Iterator[None]:
        """Within the block, transfers have an error that a real project once had. After it, all is on the device again.

        Args:
            name: One of `memlab.engines.megatron.residency_faults.FAULTS`, each of which names its source.

        Raises:
            ValueError: If there is no such fault, another one is active, or the model lacks what the fault needs.
        """
        session = self._one_process("residency_fault")
        session.run_exclusive(lambda: session.model.transfers.set_fault(name), disturbs=True)
        try:
            yield
        finally:
            session.run_after_step(lambda: session.model.transfers.set_fault(None), disturbs=True)

    @contextmanager
    def own_gradient_moves(self, release: Move, load: Move) -> Iterator[None]:
        """Within the block, transfers move gradients by two functions of yours, and `audit_residency` judges them.

        Each function gets the model as Megatron's DDP has it: the lists ``buffers`` and ``expert_parallel_buffers``,
        whose buffers have a ``grad_data`` with a storage. Stand-ins take their place, so that no error of a function
        can crash the process. After the block, all is on the device again.

        Args:
            release: Frees the memory of the gradients.
            load: Gives it back, zeroed.

        Raises:
            ValueError: If a fault is active. In the block, if a function writes to memory that is not there.
        """
        session = self._one_process("own_gradient_moves")
        session.run_exclusive(lambda: session.model.transfers.set_own_gradient_moves(release, load), disturbs=True)
        try:
            yield
        finally:
            session.run_after_step(lambda: session.model.transfers.set_fault(None), disturbs=True)

    def groups_used(self) -> dict[str, tuple[str, ...]]:
        """Takes a step and a weight sync that are not recorded, and finds which groups each phase touches.

        Returns:
            ``zeroing``, ``forward``, ``backward``, ``optimizer`` and ``hand over``, each with some of `GROUPS`.

        Raises:
            torch.OutOfMemoryError: If the step runs out of memory; the model is usable afterwards.
        """
        session = self._one_process("groups_used")
        return session.run_exclusive(lambda: _groups_used(session.stepper), disturbs=True)


def _groups_used(stepper: Stepper) -> dict[str, tuple[str, ...]]:
    labels, transfers = stepper.model.labels, stepper.model.transfers
    transfers.load()
    require_resident(stepper.model.engine)
    with ExitStack() as stack:
        if stepper.model.backend.compiles:
            # Under a dispatch mode torch.compile gives a function up for good, and later steps round differently.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        step = GroupUse(labels, transfers.residency.tensors())
        stack.enter_context(step.watching())
        stack.enter_context(labels.phase_of("idle"))
        stack.enter_context(stepper.model.engine.during_step())
        with stepper.unrecorded():
            stepper.model.engine.train_step(labels)
    sync = GroupUse(labels, transfers.residency.tensors())
    with sync.watching():
        transfers.transfer("hand over", ("parameters",))
    used = step.by_phase()
    # Until Megatron's timers enter the forward phase, a step zeroes its gradients.
    return {"zeroing": used.pop("idle"), **used, "hand over": sync.by_phase()["idle"]}
