"""The record of one step of a job with several ranks: the record of every rank, and which of them is the worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from memlab.record.step_record import StepRecord
from memlab.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord(StepRecord):
    """A step of a job. Its own numbers are those of its worst rank, which runs out of memory first.

    Exceptions are `loss`, the mean over the ranks that compute one, `step_seconds`, the longest of all ranks,
    `tokens_per_second`, which counts the tokens of all copies of the model, and `is_steady`, which is true if it is
    true of all ranks. If a rank ended the step early, that rank is the worst rank.
    """

    ranks: tuple[StepRecord, ...]
    """The records of all ranks, in order. If a rank ended the step early, only the ranks that could still answer have
    a record."""

    @classmethod
    def of(cls, ranks: Sequence[StepRecord]) -> Self:
        """Combines the records of one step of the same job."""
        ranks = sorted(ranks, key=lambda record: record.scenario.layout.rank)
        early = [record for record in ranks if record.status != "ok"]
        out_of_memory = [record for record in early if record.status == "out_of_memory"]
        worst = max(out_of_memory or early or ranks, key=lambda record: record.peak_allocated_bytes)
        values = {field.name: getattr(worst, field.name) for field in fields(StepRecord)}
        losses = [record.loss for record in ranks if record.loss is not None]
        seconds = max(record.step_seconds for record in ranks)
        scenario, is_timed = worst.scenario, any(record.tokens_per_second for record in ranks) and not early
        values |= {
            "loss": sum(losses) / len(losses) if losses and not early else None,
            "step_seconds": seconds,
            "is_steady": all(record.is_steady for record in ranks),
            "tokens_per_second": scenario.tokens_per_step / seconds if is_timed else 0.0,
        }
        if worst.status != "ok":
            values["message"] = f"rank {scenario.layout.rank}: {worst.message}"
        return cls(**values, ranks=tuple(ranks))

    @property
    def worst_rank(self) -> int:
        """The rank with the highest allocated peak, or the one that ended the step."""
        return self.scenario.layout.rank

    @property
    def spread_bytes(self) -> int:
        """How much higher the worst rank's allocated peak is than the lowest one."""
        peaks = [record.peak_allocated_bytes for record in self.ranks]
        return max(peaks) - min(peaks)

    def rank(self, number: int) -> StepRecord:
        """Returns the record of one rank.

        Raises:
            ValueError: If the job has no record of this rank.
        """
        found = {record.scenario.layout.rank: record for record in self.ranks}
        if number not in found:
            raise ValueError(f"rank is {number!r}, must be one of {', '.join(map(str, found))}: give one of these")
        return found[number]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the timelines as JSON-ready values, as ``memlab measure --json`` prints them."""
        return {"worst_rank": self.worst_rank, "ranks": [record.to_dict() for record in self.ranks]}

    def save(self, folder: Path | str) -> Path:
        """Writes the records of the ranks into folders ``rank-0``, ``rank-1`` and so on.

        Raises:
            ValueError: As for a `StepRecord`.
            OSError: If the disk is full.
        """
        for record in self.ranks:
            record.save(Path(folder) / f"rank-{record.scenario.layout.rank}")
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Reads what `save` wrote.

        Raises:
            ValueError: If the folder has no ranks, or one of them is damaged.
        """
        folders = [path.parent for path in Path(folder).glob("rank-*/record.json")]
        if not folders:
            raise ValueError(
                f"{folder} has no folders such as rank-0: give one that `memlab measure --ranks N --out` wrote"
            )
        return cls.of([StepRecord.load(path) for path in folders])

    def __str__(self) -> str:
        if self.status != "ok":
            return StepRecord.__str__(self)
        return (
            f"{StepRecord.__str__(self)}, on rank {self.worst_rank}; ranks differ by {format_bytes(self.spread_bytes)}"
        )
