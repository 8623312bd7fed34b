"""Watched blocks of any PyTorch program as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.record.watch_record import WatchRecord
from memlab.views.text.columns import SETTING_WIDTH, Block, Table, as_text
from memlab.views.text.compare import byte_column, finished, message_lines
from memlab.views.text.record import activation_peak_entry, entries_table, peak_entries, timeline_table
from memlab.vocabulary import place_in_words


def watch_table(record: WatchRecord, pool: str = "device") -> str:
    """Writes one block: its peak and what made it up, where the peak was, and what stayed."""
    timeline = record.ended_timeline
    if pool != "device":
        return f"{_title(record)}\n{timeline_table(timeline, pool)}"
    entries: list[tuple[str, int | None]] = [
        *peak_entries(record.peak_allocated_bytes, record.peak_by_category, record.peak_by_module),
        ("device, at the block's start", record.static_bytes),
        activation_peak_entry(record.activation_peak_bytes),
        *((f"device, peak in {phase}", num_bytes) for phase, num_bytes in record.peak_by_phase.items()),
        ("device, residual at the block's end", record.residual_bytes),
        ("device, recomputed by backward", record.recomputed_bytes),
        *([("host, the block's peak", record.host_bytes)] if record.host_bytes else []),
    ]
    head = [_title(record), f"the peak is in {_place_of_peak(record)}"]
    head += message_lines([record], ["it did not finish"])
    if "unlabelled" in record.peak_by_category:
        head.append("unlabelled: existed before the block, and belongs to neither the model nor an optimizer")
    seconds = f"{record.step_seconds * 1e3:.1f} ms with the meter, {len(timeline):,} events"
    return as_text([head, entries_table(entries, record.peak_allocated_bytes), [seconds]])


def _title(record: WatchRecord) -> str:
    """Names a block and its model, whose class alone may be the block's name."""
    is_class = record.model.startswith(f"{record.name}, ")
    return f"{'' if is_class else f'{record.name}: '}{record.model}, on {record.backend}"


def _place_of_peak(record: WatchRecord) -> str:
    timeline = record.ended_timeline
    if not len(timeline):
        return "no phase: nothing was allocated"
    peak = timeline.peak_index()
    if peak < timeline.num_opening_events:
        return "no phase: it is what was allocated at the start"
    return place_in_words(record.peak_phase, timeline.modules[timeline.module[peak]])


def watched_blocks(records: Sequence[WatchRecord]) -> list[Block]:
    """Describes watched blocks by one row each; what a block saves is counted from the first row."""
    names = watch_names(records)
    first = records[0]
    saved = [first.peak_allocated_bytes - record.peak_allocated_bytes for record in records]
    columns = [
        ["", "block", "", *names],
        byte_column("", "peak", [record.peak_allocated_bytes for record in records]),
        byte_column("", "saved", saved, known=[finished(first) and finished(record) for record in records]),
        byte_column("block's", "start", [record.static_bytes for record in records]),
        byte_column("activation", "peak", [record.activation_peak_bytes for record in records]),
        byte_column("", "residual", [record.residual_bytes for record in records]),
        byte_column("", "recomputed", [record.recomputed_bytes for record in records]),
        ["", "time", "ms", *(f"{record.step_seconds * 1e3:.1f}" for record in records)],
    ]
    table = Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=SETTING_WIDTH)
    places = [f"{name} peaks in {_place_of_peak(record)}" for name, record in zip(names, records, strict=True)]
    meaning = "device memory, allocated; saved = first row minus this row"
    return [[f"{watched_models(records)}; {meaning}"], table, [*places, *message_lines(records, names)]]


def watch_names(records: Sequence[WatchRecord]) -> list[str]:
    """Names watched blocks; those of the same name also have their number."""
    names = [record.name for record in records]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]


def watched_models(records: Sequence[WatchRecord]) -> str:
    """Returns the model of all blocks, and says so where they have different ones."""
    models = {f"{record.model}, on {record.backend}" for record in records}
    return models.pop() if len(models) == 1 else "different models"
