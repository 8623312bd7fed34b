"""Goals for one audit of what is where between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from memlab.exercises.goals import Goals
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import GROUPS


class ResidencyCheck(Goals):
    """Goals for one audit of what is where between two steps."""

    subject = "an audit"

    def __init__(self, audit: ResidencyAudit) -> None:
        super().__init__()
        self._audit = audit

    def only_on_device(
        self,
        *groups: str,
        now: Callable[[], ResidencyAudit] | None = None,
        hint: str = "offload what the phase does not use, and load what it uses",
    ) -> Self:
        """Requires these groups on the device, no other group, and every byte where it should be.

        Args:
            now: Takes another audit, which has to find the same: a reader may have kept one of an earlier moment.
            hint: What to do if the device holds other groups.
        """
        resident = [group for group in GROUPS if self._audit.device_bytes(group)]
        if sorted(resident) != sorted(groups):
            what = f"the device holds {', '.join(resident) or 'none of the groups'}, must hold only {', '.join(groups)}"
            return self.goal(False, what, hint)
        if self._audit.complaints:
            what = f"the device holds the right groups, but the audit finds: {self._audit.complaints[0]}"
            return self.goal(False, what)
        if now is not None and (current := now()).holdings != self._audit.holdings:
            held = ", ".join(group for group in GROUPS if current.device_bytes(group)) or "none of the groups"
            what = f"this audit is of another moment: now the device holds {held}"
            return self.goal(False, what, "change only the marked line: the line below it takes the audit")
        return self.goal(True, f"the device holds only {', '.join(groups)}")

    def complains_like(self, other: ResidencyAudit) -> Self:
        """Requires a new audit with the complaints of another one, to the byte."""
        if self._audit.number == other.number:
            what = "this is the job's audit itself or a copy of it, must be an audit of your own"
            return self.goal(False, what, "reproduce the error: change only the marked line")
        if self._audit.complaints == other.complaints:
            return self.goal(True, f"the same complaint, {other}")
        hint = "compare this with what the audits in the sections about the five errors say"
        if not self._audit.complaints:
            hint = "nothing is wrong after the same calls: choose an error that shows in them"
        return self.goal(False, f"the audit says '{self._audit}', which is not what the job's audit says", hint)
