"""One transfer between device and host outside a step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from memlab.units import format_bytes

GROUPS = ("parameters", "gradients", "optimizer state")
"""What can be kept on the host between steps."""

Action = Literal["load", "offload", "hand over"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What was transferred, how long it took, and what is where afterwards."""

    action: Action
    transferred_bytes: dict[str, int]
    """Bytes by group that arrived on the device, or left it; empty if nothing had to be transferred."""
    seconds: float
    """Exactly 0.0 if nothing was transferred."""
    device_bytes: int
    """Bytes allocated on the device afterwards."""
    host_bytes: int
    """Bytes on the host afterwards."""
    peak_host_bytes: int
    """The most bytes on the host at any moment of the transfer."""

    def __str__(self) -> str:
        groups = [f"{group} {format_bytes(size)}" for group, size in self.transferred_bytes.items()]
        what = ", ".join(groups) or "nothing transferred"
        return (
            f"{self.action}: {what} in {self.seconds * 1e3:.1f} ms; then {format_bytes(self.device_bytes)} on the "
            f"device, {format_bytes(self.host_bytes)} on the host"
        )


def check_groups(groups: tuple[str, ...]) -> None:
    """Checks names of groups.

    Raises:
        ValueError: If no name is given, or one is unknown.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or not groups:
        action = "name at least one"
        if any(isinstance(group, (list, tuple, set, frozenset)) for group in groups):
            action = "give the names one by one, without a list"
        elif any(not isinstance(group, str) for group in groups):
            kinds = ", ".join(sorted({type(group).__name__ for group in unknown}))
            raise ValueError(f"groups are of the type {kinds}, must be names, some of {', '.join(GROUPS)}")
        elif unknown and sum(group in unknown[0] for group in GROUPS) > 1:
            action = f"{unknown[0]!r} is one text: give each name in quotes of its own"
        elif unknown:
            near = get_close_matches(str(unknown[0]).replace("_", " "), GROUPS, n=1)
            action = f"{unknown[0]!r} is none of them{f', write {near[0]!r}' if near else ''}"
        raise ValueError(f"groups are {list(groups)}, must be some of {', '.join(GROUPS)}: {action}")
