"""The phases of a job of reinforcement learning: what training and inference engine hold in each, and on the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPhase:
    """One phase on one rank. None stands for what is not known without the size of the GPU."""

    name: str
    training_bytes: int
    """What torch's allocator holds for training: reserved at the peak of a pass, allocated between passes."""
    engine_bytes: int | None
    """What the inference engine takes; 0 where it has other GPUs or sleeps."""
    left_for_engine_bytes: int | None
    """What the GPU has left for an inference engine, apart from what is outside torch."""
    allocated_bytes: int | None = None
    """Of a pass, at the peak of the process that computes it, as the next two; None between passes."""
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    most_reserved_bytes: int | None = None
    """What torch may hold at most, of a pass of a framework that does not empty torch's cache between passes: with what
    is left of those before, which torch returns before a request fails. None for other passes."""

    @property
    def left_bytes(self) -> int | None:
        """What nothing takes; negative if the phase does not fit."""
        if self.left_for_engine_bytes is None or self.engine_bytes is None:
            return None
        return self.left_for_engine_bytes - self.engine_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the phase fits the GPU; None where that depends on what is not known."""
        if self.left_bytes is not None:
            return self.left_bytes >= 0
        does_not = self.left_for_engine_bytes is not None and self.left_for_engine_bytes < 0
        return False if does_not else None  # nor with any engine beside it


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPhases:
    """All phases of a job on one rank."""

    rank: int
    is_colocated: bool
    gpu_memory_bytes: int | None
    outside_torch_bytes: int
    """An estimate."""
    gathered_bytes: int | None
    """Of weights that one bucket of the weight sync gathers; None where the framework decides by the GPU's
    memory, and that or its share is not known."""
    phases: tuple[JobPhase, ...]
    host_bytes_of_rank: int
    """Pinned memory that is reserved, with pageable memory."""
    ranks_per_node: int
    reference_bytes: int = 0
    """Of a reference model, which every phase counts in which it is on the device."""
    late_free_bytes: int = 0
    """As `StepRecord.late_free_bytes`, of the passes that have most of it."""
    kept_buffer_bytes: int = 0
    """Of the weight sync's buffers that every phase counts."""
    teacher_left_bytes: int | None = None
    """What the process of a teacher keeps while its weights are on the host, which every phase counts; None without a
    teacher. What it has outside torch is in `outside_torch_bytes`."""

    @property
    def host_bytes_of_node(self) -> int:
        """What the ranks of one node hold in host memory, if each holds what this rank does."""
        return self.host_bytes_of_rank * self.ranks_per_node

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits the GPU.

        None if no phase is known not to fit, but for one or more it is not known.
        """
        fit = [phase.fits for phase in self.phases]
        return False if False in fit else None if None in fit else True

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        phases = [asdict(phase) | {"left_bytes": phase.left_bytes} for phase in self.phases]
        return asdict(self) | {"phases": phases, "host_bytes_of_node": self.host_bytes_of_node, "fits": self.fits}
