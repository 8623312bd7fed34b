"""Where each group's bytes should be between two steps, where they are, and what is wrong with that, in words.

Plain data: `memlab.lab.residency_audit` fills it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from memlab.units import format_bytes


@dataclass(slots=True)
class RequestedPlacement:
    """Where each group was requested to be. An audit compares with this, not with the transferring code's own notes."""

    away: set[str] = field(default_factory=set)
    """Groups that should be off the device."""
    copied: set[str] = field(default_factory=set)
    """Groups that should have one copy on the host. Gradients never do: they are dropped and come back as zeros."""

    def move(self, action: str, groups: Collection[str]) -> None:
        """Notes a transfer (``load``, ``offload``, ``hand over``). A load keeps the copy on the host."""
        if action == "load":
            self.away.difference_update(groups)
            return
        self.copied.update(group for group in groups if group != "gradients")
        if action == "offload":
            self.away.update(groups)

    def end_step(self, groups: Collection[str]) -> None:
        """Notes that a step ended with these groups on the host, and that the host copies of all others were freed."""
        self.away, self.copied = set(), set()
        self.move("offload", groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The bytes of a group that one holder keeps on the device."""

    group: str
    holder: str
    """Megatron's name for it, such as ``expert_parallel_buffers.grad_data``."""
    expected_bytes: int
    """What its tensors need by their shapes; 0 if the group should be on the host, and for a second copy."""
    device_bytes: int

    @property
    def complaint(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        there, expected = format_bytes(self.device_bytes), format_bytes(self.expected_bytes)
        if self.device_bytes > self.expected_bytes:
            return f"{self.group}: {there} on the device where {expected} should be, held by {self.holder}"
        if self.device_bytes < self.expected_bytes:
            return (
                f"{self.group}: {there} on the device where {expected} should be again: the storage of {self.holder} "
                "was not brought back to its size"
            )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopy:
    """The bytes of a group on the host."""

    group: str
    expected_bytes: int
    host_bytes: int

    @property
    def complaint(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.host_bytes == self.expected_bytes:
            return ""
        there, expected = format_bytes(self.host_bytes), format_bytes(self.expected_bytes)
        return f"{self.group}: {there} on the host where one copy of {expected} should be"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyAudit:
    """Every holder of parameters, gradients and optimizer state, compared with what was requested."""

    holdings: tuple[Holding, ...]
    host_copies: tuple[HostCopy, ...]
    unnamed_device_bytes: int
    """Allocated on the device, in no group and in no workspace of Megatron's."""
    move_host_bytes: int
    """On the host before or after the last transfer, whichever is more."""
    move_peak_host_bytes: int
    """The most bytes on the host during the last transfer."""
    number: int = field(default_factory=partial(next, count()), compare=False, repr=False)
    """Of this audit in its process. A copy keeps the number, so that a check can tell it from an audit."""

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong, one line per complaint; empty if every byte is where it should be."""
        found = [holding.complaint for holding in self.holdings]
        found += [copy.complaint for copy in self.host_copies]
        if self.unnamed_device_bytes:
            found.append(f"{format_bytes(self.unnamed_device_bytes)} on the device, neither in a group nor workspace")
        if self.move_peak_host_bytes > self.move_host_bytes:
            found.append(
                f"the last transfer took {format_bytes(self.move_peak_host_bytes)} on the host at its peak, and "
                f"{format_bytes(self.move_host_bytes)} are enough: it made a copy before it freed the old one"
            )
        return tuple(complaint for complaint in found if complaint)

    def device_bytes(self, group: str) -> int:
        """Returns the bytes of a group on the device, of all holders."""
        return sum(holding.device_bytes for holding in self.holdings if holding.group == group)

    def __str__(self) -> str:
        return "\n".join(self.complaints) or "every byte is where it should be"
