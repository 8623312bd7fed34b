"""A change of the training state, or of the simulated allocator's options, on an open lab, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.option import Rebuilt
from memlab.config.training_state import TrainingState, option_words
from memlab.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateChange:
    """What a change of the training state rebuilt, and how long it took."""

    before: TrainingState
    after: TrainingState
    rebuilt: Rebuilt
    seconds: float
    device_bytes: int
    """Bytes allocated on the device afterwards, before the first step: Adam's moments are not there yet."""
    allocator: AllocatorSettings | None = None
    """The options of torch's allocator afterwards; None if they are those of before."""

    @property
    def changed(self) -> dict[str, object]:
        """The fields that changed, with their new values."""
        before, after = self.before.options(), self.after.options()
        return {name: value for name, value in after.items() if value != before[name]}

    def __str__(self) -> str:
        words = [option_words(name, value) for name, value in self.changed.items()]
        values = ", ".join([*words, str(self.allocator)] if self.allocator is not None else words)
        if self.rebuilt == "nothing":
            return f"{values or 'no change'}: nothing rebuilt"
        return (
            f"{values}: {self.rebuilt} rebuilt in {self.seconds:.2f} s; then {format_bytes(self.device_bytes)} on the "
            "device"
        )
