"""A run of the panel: what was asked for and what came of it, and the rows that a table of runs shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes

COLUMNS = {
    "number": "run",
    "settings": "settings",
    "workload": "workload",
    "peak": "peak",
    "saved": "saved",
    "step_time": "step time",
    "tokens_per_second": "tokens/s",
    "loss": "loss",
    "status": "status",
}
"""Of the table, in their order: a row's key to the column's heading."""

_MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One row of the table. Two runs are never the same, however alike their records are."""

    number: int
    """From 1, in the order of the runs; a number is not used twice."""
    scenario: Scenario
    settings: MemorySettings
    backend: str
    record: StepRecord | None = None
    """None, if the step ended in an error that nobody foresaw."""
    error: str = ""
    """Type and text of that error."""

    @property
    def status(self) -> str:
        """``ok``, ``out of memory``, ``interrupted`` or ``error``."""
        return "error" if self.record is None else self.record.status.replace("_", " ")

    @property
    def is_ok(self) -> bool:
        """Whether the step ran to its end."""
        return self.record is not None and self.record.status == "ok"

    @property
    def message(self) -> str:
        """Why a run that is not ok ended, and what to do."""
        if self.record is None:
            return f"{self.error}: the model may be half way through a step: run again, or open the lab anew"
        return self.record.message

    def __str__(self) -> str:
        return f"run {self.number} ({self.settings})"


def rows(runs: Sequence[Run], pinned: Run | None) -> list[dict[str, str]]:
    """Writes every run as a row of text, with what changed against the pinned one.

    Args:
        runs: In the order of the table.
        pinned: What the others are held against; None leaves the differences out.
    """
    return [
        _row(run, pinned.record if pinned is not None and pinned.is_ok and run is not pinned else None) for run in runs
    ]


def _row(run: Run, base: StepRecord | None) -> dict[str, str]:
    record, workload = run.record, f"{run.scenario.micro_batch_size} x {run.scenario.seq_length}"
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"number": str(run.number), "settings": str(run.settings), "workload": workload, "status": run.status}
    if record is None or record.status != "ok":
        return cells | {
            "message": run.message,
            "peak": f"> {format_bytes(record.peak_allocated_bytes)}" if record else "",
        }
    cells |= {
        "message": "",
        "peak": format_bytes(record.peak_allocated_bytes),
        "loss": "" if record.loss is None else f"{record.loss:.6f}",
    }
    is_timed = record.tokens_per_second > 0  # a prediction has no rate, and its seconds tell nothing of a GPU
    if is_timed:
        cells["step_time"] = f"{record.step_seconds * 1e3:,.1f} ms"
        cells["tokens_per_second"] = f"{record.tokens_per_second:,.0f}"
    if base is None:
        return cells
    cells["saved"] = format_bytes(base.peak_allocated_bytes - record.peak_allocated_bytes).replace("-", _MINUS)
    if is_timed:
        cells["step_time"] += _percent(record.step_seconds, base.step_seconds)
        cells["tokens_per_second"] += _percent(record.tokens_per_second, base.tokens_per_second)
    if record.loss is not None and base.loss is not None:
        difference = record.loss - base.loss
        cells["loss"] += f" ({difference:+.6f})".replace("-", _MINUS) if difference else " (same)"
    return cells


def _percent(value: float, base: float) -> str:
    return f" ({value / base - 1:+.0%})".replace("-", _MINUS) if base else ""
