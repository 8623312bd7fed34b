"""What the parts of the class `Lab` share: its session, and the refusal of what only one process can answer."""

from __future__ import annotations

from memlab.lab.one_process import OneProcess
from memlab.lab.session import Session

OF_ONE_PROCESS = ("audit_offload", "audit_residency", "groups_used", "retained", "unmetered_step_seconds")
"""Methods whose answer is about the model of one process: `Lab.each` calls them on every rank."""


class LabPart:
    """Some methods of a `Lab`, which is made of such parts."""

    _session: Session

    def _one_process(self, method: str) -> OneProcess:
        """Returns the session of a model in this process, which the method looks into.

        Raises:
            ValueError: If the lab has its ranks in other processes.
        """
        if isinstance(self._session, OneProcess):
            return self._session
        instead = "it on a lab without ranks"
        if method in OF_ONE_PROCESS:
            instead = f"lab.each({method!r}, ...), which answers for every rank"
        num_ranks = self._session.scenario.layout.world_size
        raise ValueError(
            f"{method} looks into one process, and this lab has {num_ranks} ranks, each in its own: call {instead}"
        )
