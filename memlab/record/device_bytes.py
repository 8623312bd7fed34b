"""The bytes of a device at one moment, by the three counts of torch's caching allocator."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """What is allocated, active and reserved. A CPU has no caching allocator, so it has the first count only."""

    allocated_bytes: int
    active_bytes: int | None = None
    """Allocated, or freed while another stream still used it."""
    reserved_bytes: int | None = None
    """What torch holds of the device, with the free blocks that it caches."""

    def __str__(self) -> str:
        counts = {"allocated": self.allocated_bytes, "active": self.active_bytes, "reserved": self.reserved_bytes}
        return ", ".join(f"{name} {format_bytes(count)}" for name, count in counts.items() if count is not None)
