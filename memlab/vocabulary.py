"""The words that label memory events: pools (where), categories (what) and phases (when)."""

from __future__ import annotations

POOLS = ("device", "host", "on_chip", "pending_free", "reserved")
"""``device`` is what torch calls allocated. ``on_chip`` is what a fused GPU kernel keeps in registers and shared
memory, and what the CPU has to materialise to compute the same result; it is never part of the device's bytes.
``pending_free`` is freed, but another stream still uses it (torch's active bytes are ``device`` plus these); only a
real GPU has it. ``reserved`` is what the allocator has taken from the device, used or not; a real GPU has it, and a
simulation of one."""
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "recomputed",
    "temporary",
    "workspace",
    "unlabelled",
)
"""``unlabelled`` bytes are known, their purpose is not: what a snapshot of another program contains, and what existed
before a watched block and belongs to neither its model nor its optimizers."""
RESIDUAL_CATEGORIES = ("activations", "recomputed", "temporary")
"""No step needs these from the step before. Their bytes that are still allocated at a step's end are its residual."""
PHASES = ("load", "forward", "backward", "optimizer", "offload", "idle", "save")


def place_in_words(phase: str, module: str) -> str:
    """Says where something happened, such as ``forward of decoder.layers.2.mlp``; outside all modules the phase."""
    return f"{phase} of {module}" if module else phase
