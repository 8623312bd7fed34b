"""A table of what each of several steps frees between two steps and at its peak, compared with the first of them."""

from __future__ import annotations

from collections.abc import Mapping

from memlab.record.step_record import StepRecord
from memlab.views.text.columns import Block, Table
from memlab.views.text.compare import byte_column, finished, message_lines, peak_phase, without_effect_lines

_NAME_WIDTH = 40


def savings_blocks(records: Mapping[str, StepRecord]) -> list[Block]:
    """Describes steps by one row per step: what is on the device when it starts, at its peak, and on the host.

    Args:
        records: At least one, by the name of its row; what a step frees is counted from the first.
    """
    every = [*records.values()]
    known = [finished(every[0]) and finished(record) for record in every]
    starts = [record.static_bytes for record in every]
    at_peaks = [record.peak_allocated_bytes for record in every]
    largest = max(at_peaks)
    columns = [
        ["", "", "", *records],
        byte_column("step's", "start", starts, largest=largest),
        byte_column("freed at", "start", [starts[0] - start for start in starts], known, largest=largest),
        byte_column("", "peak", at_peaks, largest=largest),
        byte_column("freed at", "peak", [at_peaks[0] - peak for peak in at_peaks], known, largest=largest),
    ]
    phases = [peak_phase(record) for record in every]
    if set(phases) != {"-"}:  # a record that was saved without its timeline does not know its phase
        columns.append(["peak is", "in", "", *phases])
    if any(record.host_bytes for record in every):
        columns.append(byte_column("host", "peak", [record.host_bytes for record in every], largest=largest))
    notes = [*message_lines(every, records), *without_effect_lines(every, records)]
    return [
        [f"device memory, allocated; freed = {next(iter(records))} minus this row, negative where a step needs more"],
        Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=_NAME_WIDTH),
        *([notes] if notes else []),
    ]
