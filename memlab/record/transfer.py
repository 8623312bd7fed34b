"""One move between device and host outside a step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memlab.units import format_bytes

GROUPS = ("parameters", "gradients", "optimizer state")
"""What can wait on the host between steps."""

Action = Literal["load", "offload", "hand over"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What moved, how long it took, and what is where afterwards."""

    action: Action
    transferred_bytes: dict[str, int]
    """Bytes by group that arrived on the device, or left it; empty if nothing had to move."""
    seconds: float
    """Exactly 0.0 where nothing moved."""
    device_bytes: int
    """Allocated on the device afterwards."""
    host_bytes: int
    """Held on the host afterwards."""
    peak_host_bytes: int
    """The most bytes held on the host at any moment of the move."""

    def __str__(self) -> str:
        groups = [f"{group} {format_bytes(size)}" for group, size in self.transferred_bytes.items()]
        what = ", ".join(groups) or "nothing transferred"
        return (
            f"{self.action}: {what} in {self.seconds * 1e3:.1f} ms; then {format_bytes(self.device_bytes)} on the "
            f"device, {format_bytes(self.host_bytes)} on the host"
        )


def check_groups(groups: tuple[str, ...]) -> None:
    """Holds names of groups against `GROUPS`.

    Raises:
        ValueError: If there is none, or one is unknown.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or not groups:
        raise ValueError(f"groups are {list(groups)}, must be some of {', '.join(GROUPS)}: name at least one")
