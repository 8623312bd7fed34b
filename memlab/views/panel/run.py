"""A run of the panel: its settings and its result, and the rows that a table of runs shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlab.config.backend_kind import KINDS
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import transferred_bytes
from memlab.fitting.recompute_cost import recomputed_share, share_text
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import MINUS, in_unit

COLUMNS = {
    "number": "run",
    "settings": "settings",
    "workload": "workload",
    "peak": "peak",
    "worst_rank": "worst rank (spread)",
    "difference": "difference",
    "recomputed": "recomputed (share of a step)",
    "copied": "host copies each way",
    "step_time": "step time (ms)",
    "loss": "loss",
    "status": "status",
}
"""Of the table, in their order: a row's key to the column's heading.

Recomputed FLOPs, as a share of those of forward and backward, and bytes that go to the host and come back are costs
that are the same on every machine, as in a search (`memlab.fitting.pareto_front`). The time of a step on a CPU does not
measure them. Bytes of a column have one unit, which its heading names."""
_OF_BYTES = ("peak", "difference", "copied")
OF_JOBS = "worst_rank"
"""The column that only runs on several ranks fill."""

TRIED = 0
"""The number of a step that a simulated lab took before Run was pressed."""
GRADIENTS = "gradients"
"""The group that offload drops instead of transferring."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One row of the table. Two runs are never equal, even if their records are."""

    number: int
    """From 1, in the order of the runs; the number of a deleted run is not used again."""
    scenario: Scenario
    settings: MemorySettings
    backend: str
    record: StepRecord | None = None
    """None if the step ended in an unexpected error."""
    error: str = ""
    """Type and text of that error."""
    lab_is_in_order: bool = False
    """Whether the error left the lab in order: it came from a rebuild for the run's training state, before the step
    began, or from a rank, and then the next step starts all ranks anew."""
    rank: int | None = None
    """Of a run on several ranks: the rank that this is about, as `of_rank` returns it; None is about all."""

    @property
    def job(self) -> JobRecord | None:
        """The record, if it is one of several ranks."""
        return self.record if isinstance(self.record, JobRecord) else None

    def has_rank(self, rank: int | None) -> bool:
        """Whether this is a run on several ranks with a record of this one."""
        ranks = () if self.job is None else self.job.ranks
        return any(record.scenario.layout.rank == rank for record in ranks)

    def lacks(self, rank: int | None) -> bool:
        """Whether this is a run on several ranks without a record of this one, which had failed then."""
        return self.job is not None and rank is not None and not self.has_rank(rank)

    def of_rank(self, rank: int | None) -> Run:
        """Returns the run as that of one of its ranks; itself if it has no record of that rank."""
        if self.job is None or rank is None or not self.has_rank(rank):
            return self
        record = self.job.rank(rank)
        return replace(self, record=record, scenario=record.scenario, rank=rank)

    @property
    def conditions(self) -> str:
        """The settings, and the training state and the allocator's options if they are not the default."""
        others = (each for each in (self.scenario.state, self.scenario.allocator) if each.changed())
        return "; ".join([str(self.settings), *map(str, others)])

    @property
    def workload(self) -> str:
        """Sequences in a micro-batch, and their tokens."""
        return f"{self.scenario.micro_batch_size} x {self.scenario.seq_length}"

    @property
    def status(self) -> str:
        """``ok``, ``out of memory``, ``stopped`` or ``error``."""
        if self.record is None:
            return "error"
        return "stopped" if self.record.status == "interrupted" else self.record.status.replace("_", " ")

    @property
    def is_ok(self) -> bool:
        """Whether the step ran to its end."""
        return self.record is not None and self.record.status == "ok"

    @property
    def message(self) -> str:
        """Why a run that is not ok ended, and what to do."""
        if self.record is None and self.lab_is_in_order:
            return self.error
        if self.record is None:
            return f"{self.error}: the model may be in the middle of a step: run the step again, or open a new lab"
        if self.status == "stopped":
            return f"{self.record.message}; until then its peak is a lower bound, marked with >"
        return self.record.message

    @property
    def transferred_bytes(self) -> dict[str, int]:
        """Bytes that offload transferred to the host, by module and by group; for gradients, those that it dropped."""
        if self.record is None or not self.is_ok:
            return {}
        return self.record.offloaded_bytes_by_module | self.record.offloaded_bytes_by_group

    @property
    def without_effect(self) -> dict[str, str]:
        """Why a setting changed nothing in this run, by ``field`` or ``field:module``."""
        return self.record.without_effect if self.record is not None and self.is_ok else {}

    @property
    def outcome(self) -> str:
        """How the run ended, in one line: what was transferred, and which settings had no effect and why."""
        if not self.is_ok:
            return self.message
        transferred = [
            f"{name} {format_bytes(size)}" for name, size in self.transferred_bytes.items() if name != GRADIENTS
        ]
        parts = ["ok"]
        if transferred:
            parts.append(f"transferred to the host: {', '.join(transferred)}")
        return "; ".join([*parts, *without_effect_words(self.without_effect)])

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        name = "what if" if self.number == TRIED else f"run {self.number}"
        return f"{name}{rank} ({self.conditions})"


def without_effect_words(reasons: dict[str, str]) -> list[str]:
    """Writes what changed nothing, with each reason once; nothing if there is none."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name.partition(":")[2] or name)
    idle = [f"{', '.join(settings)} ({reason})" for reason, settings in names.items()]
    return [f"without effect: {'; '.join(idle)}"] if idle else []


def cost_words(record: StepRecord) -> list[str]:
    """Writes what a step costs on any machine, in the words of the table's headings."""
    share, copied = recomputed_share(record.settings, record.scenario), transferred_bytes(record)
    recomputed = [f"recomputed: {share_text(share)} of a step"] if share else []
    return [*recomputed, f"host copies each way: {format_bytes(copied)}"] if copied else recomputed


def rows(runs: Sequence[Run], pinned: Run | None) -> list[dict[str, str]]:
    """Writes each run as a row of text, with its differences from the pinned run.

    Bytes are numbers without a unit: `columns` names it in their heading.

    Args:
        runs: In the order of the table.
        pinned: The run that the others are compared with; None leaves the differences out.
    """
    unit_bytes, _ = _unit(runs)
    base = pinned.record if pinned is not None and pinned.is_ok else None
    return [_row(run, base if run is not pinned else None, unit_bytes) for run in runs]


def columns(runs: Sequence[Run], base: Run | None = None) -> dict[str, str]:
    """Returns those of `COLUMNS` that tell the runs apart: not a workload, status or loss that all of them have.

    Args:
        base: The run that they are compared with, if there is one.
    """
    left_out = set() if any(run.job for run in runs) else {OF_JOBS}
    if len({run.workload for run in runs}) <= 1:
        left_out.add("workload")
    if all(run.is_ok for run in runs):
        left_out.add("status")
    if len({run.record.loss for run in runs if run.record is not None and run.is_ok}) <= 1:
        left_out.add("loss")
    _, unit = _unit(runs)
    titles = COLUMNS if base is None else COLUMNS | {"difference": f"peak vs run {base.number}"}
    titles = titles | {name: f"{titles[name]} ({unit})" for name in _OF_BYTES}
    if any(not KINDS[run.backend].has_allocator for run in runs):
        titles = titles | {"step_time": "step on CPU (ms)"}
    return {name: title for name, title in titles.items() if name not in left_out}


def _unit(runs: Sequence[Run]) -> tuple[int, str]:
    """The unit of all bytes of a table."""
    return binary_unit(max((run.record.peak_allocated_bytes for run in runs if run.record is not None), default=1))


def _row(run: Run, base: StepRecord | None, unit_bytes: int) -> dict[str, str]:
    record = run.record
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"number": str(run.number), "settings": run.conditions, "workload": run.workload, "status": run.status}
    if run.job is not None:
        spread = f" ({format_bytes(run.job.spread_bytes)})" if run.is_ok else ""
        cells[OF_JOBS] = f"{run.job.worst_rank}{spread}"
    if record is None or record.status != "ok":
        return cells | {
            "message": run.message,
            "peak": f"> {in_unit(record.peak_allocated_bytes, unit_bytes)}" if record else "",
        }
    share, copied = recomputed_share(record.settings, record.scenario), transferred_bytes(record)
    cells |= {
        "message": "",
        "peak": in_unit(record.peak_allocated_bytes, unit_bytes),
        "recomputed": share_text(share) if share else "",
        "copied": in_unit(copied, unit_bytes) if copied else "",
        "loss": "" if record.loss is None else f"{record.loss:.6f}",
    }
    is_timed = record.tokens_per_second > 0  # a prediction has no rate, and its seconds say nothing about a GPU
    if is_timed:
        # What a process does for the first time takes longer, and more so on a CPU.
        is_first = run.number == 1 and not KINDS[run.backend].has_allocator
        cells["step_time"] = f"{record.step_seconds * 1e3:,.1f}{' (first)' if is_first else ''}"
    if base is None:
        return cells
    size = record.peak_allocated_bytes - base.peak_allocated_bytes
    cells["difference"] = f"{'+' if size > 0 else ''}{in_unit(size, unit_bytes)}".replace("-", MINUS)
    if is_timed and KINDS[run.backend].has_allocator:
        cells["step_time"] += _percent(record.step_seconds, base.step_seconds)
    if record.loss is not None and base.loss is not None:
        difference = record.loss - base.loss
        cells["loss"] = f"{cells['loss']} ({difference:+.6f})".replace("-", MINUS) if difference else "same"
    return cells


def _percent(value: float, base: float) -> str:
    return f" ({value / base - 1:+.0%})".replace("-", MINUS) if base else ""
