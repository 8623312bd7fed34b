"""What activation offload was expected to free, and where every byte of it is, as plain data.

Each byte is in one place at the moment where the step without offload is fullest, and the places add up:
expected = never moved + copied twice + held + back + not due + away, and away = added + elsewhere + saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAccount:
    """One offload module. The last five are of the moment where the step without offload is fullest."""

    name: str
    saved_bytes: int
    """What the module saves for backward in a step without offload, parameters apart."""
    too_small_bytes: int
    """Of that, in tensors under ``min_offloaded_tensor_size``."""
    last_group_bytes: int
    """Of that, in the last group of each micro-batch, which Megatron keeps on the device."""
    transferred_bytes: int
    """What went to the host in a step with offload."""
    away_bytes: int
    """Moved, and not on the device."""
    still_resident_bytes: int
    """Moved, and on the device all the same: somebody else refers to the storage."""
    back_bytes: int
    """Moved, and already back for backward."""
    copied_twice_bytes: int
    """A second copy of a storage that is counted elsewhere: two modules save the same tensor."""
    not_due_bytes: int
    """Of groups whose forward is yet to come, or whose backward is over."""

    @property
    def expected_bytes(self) -> int:
        """What Megatron's rules let move."""
        return self.saved_bytes - self.too_small_bytes - self.last_group_bytes

    @property
    def never_transferred_bytes(self) -> int:
        """Expected, and not moved."""
        return self.expected_bytes - self.transferred_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StillResident:
    """A tensor that was copied to the host and is on the device all the same."""

    name: str
    """The offload module that copied it."""
    shape: tuple[int, ...]
    num_bytes: int
    holders: tuple[str, ...]
    """Who refers to its storage: autograd nodes, local variables, module attributes. Empty if nobody was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadAudit:
    """Expected against saved, to the byte."""

    plain: StepRecord = field(repr=False)
    """The step without offload."""
    offloaded: StepRecord = field(repr=False)
    modules: tuple[ModuleAccount, ...]
    still_resident: tuple[StillResident, ...]
    """Where the step without offload is fullest."""
    plain_peak: str
    """The moment where the step without offload is fullest, in words."""
    offloaded_peak: str
    """The moment where the step with offload is."""
    freed_bytes: int
    """How much less is on the device with offload, at `plain_peak`."""

    @property
    def expected_bytes(self) -> int:
        """What Megatron's rules let move."""
        return sum(module.expected_bytes for module in self.modules)

    @property
    def transferred_bytes(self) -> int:
        """What went to the host."""
        return sum(module.transferred_bytes for module in self.modules)

    @property
    def saved_bytes(self) -> int:
        """How much lower the activation peak is."""
        return self.plain.activation_peak_bytes - self.offloaded.activation_peak_bytes

    @property
    def saved_of_expected(self) -> float:
        """R: 1 came free, 0 was paid for nothing; 0 also where nothing was expected."""
        return self.saved_bytes / self.expected_bytes if self.expected_bytes else 0.0

    def terms(self) -> dict[str, int]:
        """Returns where the expected bytes are, in words; the values add up to `expected_bytes`."""
        modules = self.modules
        return {
            "never moved": sum(module.never_transferred_bytes for module in modules),
            "copied a second time": sum(module.copied_twice_bytes for module in modules),
            "still on the device": sum(module.still_resident_bytes for module in modules),
            "back on the device": sum(module.back_bytes for module in modules),
            "not due at that moment": sum(module.not_due_bytes for module in modules),
            "added by offload itself": sum(module.away_bytes for module in modules) - self.freed_bytes,
            "lost to a peak elsewhere": self.freed_bytes - self.saved_bytes,
            "saved": self.saved_bytes,
        }


def peak_of(record: StepRecord) -> int:
    """Returns the index of the event at which a step's forward and backward are fullest."""
    assert record.timeline is not None
    return record.timeline.peak_index(phases=("forward", "backward"))


def device_event_number(timeline: Timeline, index: int) -> int:
    """Returns how many events on the device have passed since the step's start when event `index` has."""
    return int((timeline.pool[timeline.num_opening_events : index + 1] == POOLS.index("device")).sum())


def device_event_index(timeline: Timeline, number: int) -> int:
    """Returns the index of the device event of that number, counted from 1 since the step's start."""
    on_device = timeline.pool == POOLS.index("device")
    on_device[: timeline.num_opening_events] = False
    return int(on_device.nonzero()[0][number - 1])


def roughness_bytes(timeline: Timeline) -> int:
    """Returns by how much a block of the same request may differ: a real allocator leaves a small rest unsplit."""
    return 1024**2 if timeline.total_bytes("reserved").any() else 0


def same_moment(timeline: Timeline, index: int, other: Timeline) -> int:
    """Finds a birth of one step in another step of the same model.

    Args:
        timeline: Of a step.
        index: A birth on the device.
        other: Of a step that does the same work; it may bring activations back from the host besides.

    Returns:
        The index of the birth of that size, in that phase and module, which is the same one in their order.
    """
    rank = int(_alike(timeline, index, timeline)[:index].sum())
    matches = _alike(timeline, index, other).nonzero()[0]
    place = timeline.place(index)
    assert rank < len(matches), f"{place} makes {timeline.delta_bytes[index]} bytes in one step and not in the other"
    return int(matches[rank])


def _alike(timeline: Timeline, index: int, other: Timeline) -> npt.NDArray[np.bool_]:
    """Marks the events of a step that are births like one of another; what comes back from the host is none."""
    name = timeline.modules[timeline.module[index]]
    if name not in other.modules:
        return np.zeros(len(other), dtype=bool)
    reloaded = (other.phase == PHASES.index("backward")) & (other.category == CATEGORIES.index("activations"))
    alike: npt.NDArray[np.bool_] = (
        (other.pool == POOLS.index("device"))
        & (other.phase == timeline.phase[index])
        & (other.module == other.modules.index(name))
        & (abs(other.delta_bytes - timeline.delta_bytes[index]) <= roughness_bytes(timeline))
        & ~reloaded
    )
    alike[: other.num_opening_events] = False
    return alike
