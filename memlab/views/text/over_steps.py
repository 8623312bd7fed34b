"""A table of the bytes over the steps of several runs: starts, peaks, and what stays allocated after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord
from memlab.units import binary_unit
from memlab.views.text.columns import Block, Table, in_unit


def over_steps_blocks(runs: Mapping[str, Sequence[StepRecord | WatchRecord]]) -> list[Block]:
    """Describes each run, by its name, by three rows, with a column per step."""
    blocks: list[Block] = []
    for name, records in runs.items():
        unit_bytes, unit = binary_unit(max(record.peak_allocated_bytes for record in records))
        rows = {
            "start": [record.static_bytes for record in records],
            "peak": [record.peak_allocated_bytes for record in records],
            "residual": [record.residual_bytes for record in records],
        }
        head = [f"{name}: step", *(str(number) for number in range(len(records)))]
        cells = [[f"{what} ({unit})", *(in_unit(size, unit_bytes) for size in sizes)] for what, sizes in rows.items()]
        blocks.append(Table([head, *cells]))
    return blocks
