"""What happened in a watched block of any PyTorch program, as plain data: it holds no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from memlab.record.step_record import Status
from memlab.record.timeline import Timeline
from memlab.snapshot.writer import write_snapshot
from memlab.vocabulary import RESIDUAL_CATEGORIES


@dataclass(kw_only=True, slots=True, repr=False, eq=False)
class WatchRecord:
    """The measurements of one block that `memlab.watch` metered; complete when the block has ended.

    Every number comes from the timeline. Before the block ends there is no timeline, and reading a number raises
    `ValueError`. Bytes are bytes on the model's device, which may be the CPU.
    """

    name: str
    """What the block is called in tables and figures."""
    model: str
    """The model's class and its number of parameters."""
    backend: str
    """``cpu`` or ``cuda``."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of memlab, Python and torch."""
    step_seconds: float = 0.0
    """Time of the block, with what the meter costs."""
    status: Status = "ok"
    message: str = ""
    """If the status is not ``ok``: the error that ended the block."""
    timeline: Timeline | None = None

    @property
    def ended_timeline(self) -> Timeline:
        """The timeline.

        Raises:
            ValueError: If the block has not ended.
        """
        if self.timeline is None:
            raise ValueError(f"the watched block '{self.name}' has not ended: read its record after the block")
        return self.timeline

    @property
    def static_bytes(self) -> int:
        """Bytes allocated when the block began."""
        return self.ended_timeline.opening_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes allocated at any moment of the block."""
        return self.ended_timeline.peak_bytes()

    @property
    def peak_phase(self) -> str:
        """The phase in which `peak_allocated_bytes` was reached: one of `memlab.vocabulary.PHASES`."""
        return self.ended_timeline.peak_phase()

    @property
    def peak_by_category(self) -> dict[str, int]:
        """`peak_allocated_bytes` by category, the largest first."""
        return self.ended_timeline.breakdown(self.ended_timeline.peak_index())

    @property
    def peak_by_module(self) -> dict[str, int]:
        """The same bytes by the module that allocated them, the largest first."""
        return self.ended_timeline.breakdown(self.ended_timeline.peak_index(), by="module")

    @property
    def activation_peak_bytes(self) -> int:
        """The peak of forward and backward, minus `static_bytes`."""
        return self.ended_timeline.peak_bytes(phases=("forward", "backward")) - self.static_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes that the block allocated, that are still allocated at its end, and that training does not keep."""
        timeline = self.ended_timeline
        return sum(timeline.breakdown(len(timeline) - 1, categories=RESIDUAL_CATEGORIES).values())

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that backward recomputed."""
        return self.ended_timeline.allocated_bytes_of("recomputed")

    @property
    def host_bytes(self) -> int:
        """The most bytes of training state on the host, where the model is on a GPU."""
        return self.ended_timeline.peak_bytes("host")

    def save_snapshot(self, path: Path | str) -> Path:
        """Writes a memory snapshot that https://pytorch.org/memory_viz opens and `Timeline.from_snapshot` reads.

        Every storage is labelled with its module, category and phase. Addresses are made up.

        Args:
            path: Path of the pickle; its folder has to exist.

        Raises:
            ValueError: If the block has not ended.
        """
        return write_snapshot(self.ended_timeline, path)
