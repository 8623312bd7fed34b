"""The ranks of a job as a table: one row per rank, grouped as they are numbered, the worst one marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memlab.config.scenario import Scenario
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.views.text.columns import Block, Table, as_text
from memlab.views.text.compare import byte_column, finished, peak_phase, record_names
from memlab.views.text.record import state_lines, version_lines, without_state

_RANK_WIDTH = 8


def job_words(scenario: Scenario) -> str:
    """Returns the words of a job's scenario, without those of its training state and without a rank."""
    return without_state(scenario.on_rank(0))


def ranks_table(records: Sequence[StepRecord]) -> str:
    """Writes `ranks_blocks` as text, in lines of at most `LINE_WIDTH` characters."""
    return as_text(ranks_blocks(records))


def ranks_blocks(records: Sequence[StepRecord]) -> list[Block]:
    """Describes ranks of one job, all or one of every kind, by a row each; a predicted step has no time."""
    job = JobRecord.of(records)
    head = [f"{job_words(job.scenario)}, on {job.backend}", *state_lines(job.scenario), f"settings: {job.settings}"]
    blocks: list[Block] = [
        [*head, *version_lines(job.ranks[0])],
        _table(job.ranks, job.worst_rank),
    ]
    notes = [] if finished(job) else [f"{job.status.replace('_', ' ')}: {job.message}"]
    missing = missing_ranks(job)
    notes += [missing] if missing else []
    return [*blocks, *([notes] if notes else [])]


def rank_by_rank_blocks(jobs: Sequence[JobRecord]) -> list[Block]:
    """Compares the peak of each rank in several steps of one job; nothing if the steps are of different layouts.

    Args:
        jobs: At least two steps, in the order of the rows of `memlab.views.text.compare.compare_blocks`.
    """
    layouts = [replace(job.scenario.layout, rank=0) for job in jobs]
    if any(layout != layouts[0] for layout in layouts):
        return []
    by_rank = [{record.scenario.layout.rank: record for record in job.ranks} for job in jobs]
    common = [rank for rank in by_rank[0] if all(rank in ranks for ranks in by_rank)]
    if not common:
        return []
    peaks = [[ranks[rank].peak_allocated_bytes for rank in common] for ranks in by_rank]
    stages = [f"{by_rank[0][rank].scenario.layout.pipeline_stage}" for rank in common]
    columns = [["", "rank", "", *(f"{rank}" for rank in common)], ["", "stage", "", *stages]]
    columns += [byte_column("peak in", f"step {at}", column) for at, column in enumerate(peaks, start=1)]
    for at, column in enumerate(peaks[1:], start=2):
        saved = [first - peak for first, peak in zip(peaks[0], column, strict=True)]
        columns.append(byte_column("saved by", f"step {at}", saved))
    names = [f"step {at} is {name}" for at, name in enumerate(record_names(jobs), start=1)]
    table = Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=_RANK_WIDTH)
    return [[f"rank by rank, allocated peaks: {'; '.join(names)}"], table]


def missing_ranks(job: JobRecord) -> str:
    """Says which ranks of a step that ended early have no record; empty if all have one."""
    if finished(job):
        return ""
    there = {record.scenario.layout.rank for record in job.ranks}
    absent = [str(rank) for rank in range(job.scenario.layout.world_size) if rank not in there]
    if not absent:
        return ""
    return f"rank {absent[0]} has no record" if len(absent) == 1 else f"ranks {', '.join(absent)} have no record"


def _table(ranks: Sequence[StepRecord], worst_rank: int) -> Table:
    layouts = [record.scenario.layout for record in ranks]
    peaks = [record.peak_allocated_bytes for record in ranks]
    worst_peak = peaks[[layout.rank for layout in layouts].index(worst_rank)]
    columns = [
        ["", "rank", "", *(f"{layout.rank}" for layout in layouts)],
        ["", "stage", "", *(f"{layout.pipeline_stage}" for layout in layouts)],
        byte_column("peak", "allocated", peaks),
        ["", "peak phase", "", *(peak_phase(record) for record in ranks)],
        byte_column("at the", "start", [record.static_bytes for record in ranks]),
        byte_column("above the", "start", [record.activation_peak_bytes for record in ranks]),
        byte_column("less than", "the worst", [worst_peak - peak for peak in peaks]),
    ]
    reserved = [record.peak_reserved_bytes for record in ranks]
    if any(value is not None for value in reserved):
        known = [value is not None for value in reserved]
        columns.insert(4, byte_column("", "reserved", [value or 0 for value in reserved], known))
    if any(record.tokens_per_second for record in ranks):
        times = [f"{record.step_seconds * 1e3:.0f}" if record.tokens_per_second else "-" for record in ranks]
        columns.append(["step", "time", "ms", *times])
    columns.append(["", "", "", *("<- worst" if layout.rank == worst_rank else "" for layout in layouts)])
    if all(not layout.pipeline_stage for layout in layouts):
        del columns[1]
    return Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=_RANK_WIDTH)
