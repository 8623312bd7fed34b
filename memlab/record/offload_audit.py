"""What activation offload was expected to free, and where every byte of it is, as plain data.

At the peak of the step without offload each byte is in one place, and the places add up:

    expected = never transferred + copied twice + still resident + back + not due + away
    away     = added by offload + lost to a peak elsewhere + saved

For example, of 100 MiB expected, 10 were never transferred, 20 are still resident and 70 are away; offload itself adds
5, and the peak is now elsewhere, 15 higher: 100 = 10 + 20 + 70, and 70 = 5 + 15 + 50 saved.
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
    """One offload module. The last five fields are about the moment of the peak of the step without offload."""

    name: str
    saved_bytes: int
    """What the module saves for backward in a step without offload, except parameters."""
    too_small_bytes: int
    """Of that, in tensors under ``min_offloaded_tensor_size``."""
    last_group_bytes: int
    """Of that, in the last group of each micro-batch, which Megatron keeps on the device."""
    transferred_bytes: int
    """What was transferred to the host in a step with offload."""
    away_bytes: int
    """Transferred, and not on the device."""
    still_resident_bytes: int
    """Transferred, and still on the device, because something else refers to the storage."""
    back_bytes: int
    """Transferred, and already back for backward."""
    copied_twice_bytes: int
    """A second copy of a storage that is counted elsewhere: two modules save the same tensor."""
    not_due_bytes: int
    """Bytes of groups whose forward has not begun, or whose backward has ended."""

    @property
    def expected_bytes(self) -> int:
        """What Megatron's rules allow to be transferred."""
        return self.saved_bytes - self.too_small_bytes - self.last_group_bytes

    @property
    def never_transferred_bytes(self) -> int:
        """Expected, and not transferred."""
        return self.expected_bytes - self.transferred_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StillResident:
    """A tensor that was copied to the host and is still on the device."""

    name: str
    """The offload module that copied it."""
    shape: tuple[int, ...]
    num_bytes: int
    holders: tuple[str, ...]
    """What refers to its storage: autograd nodes, local variables, module attributes. Empty if nothing was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadAudit:
    """What offload was expected to save compared with what it saved, to the byte."""

    plain: StepRecord = field(repr=False)
    """The step without offload."""
    offloaded: StepRecord = field(repr=False)
    modules: tuple[ModuleAccount, ...]
    still_resident: tuple[StillResident, ...]
    """Those at the peak of the step without offload."""
    plain_peak: str
    """The place of the peak of the step without offload, in words."""
    offloaded_peak: str
    """The place of the peak of the step with offload, in words."""
    freed_bytes: int
    """How many bytes fewer are on the device with offload, at `plain_peak`."""

    @property
    def expected_bytes(self) -> int:
        """What Megatron's rules allow to be transferred."""
        return sum(module.expected_bytes for module in self.modules)

    @property
    def transferred_bytes(self) -> int:
        """What was transferred to the host."""
        return sum(module.transferred_bytes for module in self.modules)

    @property
    def saved_bytes(self) -> int:
        """How much lower the activation peak is."""
        return self.plain.activation_peak_bytes - self.offloaded.activation_peak_bytes

    @property
    def saved_of_expected(self) -> float:
        """R: 1 if every expected byte was saved, 0 if none was, or if none was expected."""
        return self.saved_bytes / self.expected_bytes if self.expected_bytes else 0.0

    def terms(self) -> dict[str, int]:
        """Returns where the expected bytes are, in words; the values add up to `expected_bytes`.

        Lab 03 makes metrics of the names, so that a new name changes its baselines.
        """
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
    """Returns the index of the event at which memory peaks in a step's forward and backward."""
    assert record.timeline is not None
    return record.timeline.peak_index(phases=("forward", "backward"))


def device_event_number(timeline: Timeline, index: int) -> int:
    """Returns how many device events happened from the step's start up to and including event `index`."""
    return int((timeline.pool[timeline.num_opening_events : index + 1] == POOLS.index("device")).sum())


def device_event_index(timeline: Timeline, number: int) -> int:
    """Returns the index of a device event by its number, counted from 1 at the step's start."""
    on_device = timeline.pool == POOLS.index("device")
    on_device[: timeline.num_opening_events] = False
    return int(on_device.nonzero()[0][number - 1])


def roughness_bytes(timeline: Timeline) -> int:
    """Returns by how much blocks of one request may differ: a real allocator leaves small remainders unsplit."""
    return 1024**2 if timeline.total_bytes("reserved").any() else 0


def same_moment(timeline: Timeline, index: int, other: Timeline) -> int:
    """Finds an allocation of one step in another step of the same model.

    Args:
        index: An allocation on the device.
        other: The timeline of a step with the same operations; it may also bring activations back from the host.

    Returns:
        The index of the allocation of the same size, phase and module, with the same position among those.
    """
    rank = int(_matching(timeline, index, timeline)[:index].sum())
    matches = _matching(timeline, index, other).nonzero()[0]
    place = timeline.place(index)
    assert rank < len(matches), (
        f"{place} allocates {timeline.delta_bytes[index]} bytes in one step and not in the other"
    )
    return int(matches[rank])


def _matching(timeline: Timeline, index: int, other: Timeline) -> npt.NDArray[np.bool_]:
    """Marks a step's allocations that match one of another step. What comes back from the host does not match."""
    name = timeline.modules[timeline.module[index]]
    if name not in other.modules:
        return np.zeros(len(other), dtype=bool)
    reloaded = (other.phase == PHASES.index("backward")) & (other.category == CATEGORIES.index("activations"))
    matching: npt.NDArray[np.bool_] = (
        (other.pool == POOLS.index("device"))
        & (other.phase == timeline.phase[index])
        & (other.module == other.modules.index(name))
        & (abs(other.delta_bytes - timeline.delta_bytes[index]) <= roughness_bytes(timeline))
        & ~reloaded
    )
    matching[: other.num_opening_events] = False
    return matching
