"""What happened in a watched block of any PyTorch program, as plain data: it holds no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.config.from_json import build
from memlab.config.validation import shortened
from memlab.record.record_folder import write_record
from memlab.record.snapshot_writer import write_snapshot
from memlab.record.step_record import Status
from memlab.record.timeline import Timeline
from memlab.vocabulary import RESIDUAL_CATEGORIES

_GIVEN = ("name", "backend", "versions", "hardware", "step_seconds", "status", "message")
_MEASURED = (
    *("static_bytes", "peak_allocated_bytes", "peak_phase", "activation_peak_bytes", "peak_by_category"),
    *("peak_by_module", "peak_by_phase", "residual_bytes", "recomputed_bytes", "host_bytes"),
)
"""What the timeline contains, under the names that a `StepRecord` has for it."""


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
    hardware: dict[str, str] = field(default_factory=dict)
    """The GPU's or the processor's model."""
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
    def residual_by_module(self) -> dict[str, int]:
        """`residual_bytes` by the module that allocated them, the largest first."""
        timeline = self.ended_timeline
        return timeline.breakdown(len(timeline) - 1, by="module", categories=RESIDUAL_CATEGORIES)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that backward recomputed."""
        return self.ended_timeline.allocated_bytes_of("recomputed")

    @property
    def recomputed_by_module(self) -> dict[str, int]:
        """`recomputed_bytes` by the module that recomputed them."""
        return self.ended_timeline.allocated_bytes_by_module("recomputed")

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The most bytes allocated in each phase in which something happened, in the order of `vocabulary.PHASES`."""
        timeline = self.ended_timeline
        return {phase: timeline.peak_bytes(phases=(phase,)) for phase in timeline.phases()}

    @property
    def host_bytes(self) -> int:
        """The most bytes of training state on the host, where the model is on a GPU."""
        return self.ended_timeline.peak_bytes("host")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the timeline as JSON-ready values, with the numbers that the timeline contains.

        Raises:
            ValueError: If the block has not ended.
        """
        given = {name: getattr(self, name) for name in _GIVEN}
        return {"watched_model": self.model, **given, **{name: getattr(self, name) for name in _MEASURED}}

    def save(self, folder: Path | str) -> Path:
        """Writes ``record.json`` and ``timeline.npz`` into a folder, which is made if it is missing.

        Raises:
            ValueError: If the block has not ended, the folder has a record already, or it cannot be written to.
            OSError: If the disk is full. Nothing of the record is left then.
        """
        return write_record(folder, self.to_dict(), self.ended_timeline)

    @classmethod
    def from_dict(cls, values: dict[str, Any], timeline: Timeline | None) -> WatchRecord:
        """Builds a record from what `to_dict` returned, and its timeline.

        Raises:
            ValueError: If a field is missing, unknown or not of its type, or a number is not that of the timeline.
        """
        if timeline is None:
            raise ValueError("it has no timeline.npz, which has the numbers of a watched block")
        given = {name: value for name, value in values.items() if name not in {"watched_model", *_MEASURED}}
        record = build(cls, given, "the record", timeline=timeline, model=str(values.get("watched_model")))
        for name in _MEASURED:
            if values.get(name) != getattr(record, name):
                raise ValueError(f"{name} is {shortened(values.get(name))}, must be that of the timeline")
        return record

    def save_snapshot(self, path: Path | str) -> Path:
        """Writes a memory snapshot that https://pytorch.org/memory_viz opens and `Timeline.from_snapshot` reads.

        Every storage is labelled with its module, category and phase. Addresses are made up.

        Args:
            path: Path of the pickle; its folder has to exist.

        Raises:
            ValueError: If the block has not ended.
        """
        return write_snapshot(self.ended_timeline, path)
