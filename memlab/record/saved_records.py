"""Reads a saved record, whether it is a lab's step or a watched block."""

from __future__ import annotations

from pathlib import Path

from memlab.record.record_folder import read_record, without_format
from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord


def load_record(folder: Path | str) -> StepRecord | WatchRecord:
    """Reads what `StepRecord.save` or `WatchRecord.save` wrote.

    Raises:
        ValueError: If the folder holds no record, a newer memlab wrote it, or it is damaged.
    """
    values, timeline = read_record(folder)
    kind = WatchRecord if isinstance(values, dict) and "watched_model" in values else StepRecord
    try:
        return kind.from_dict(without_format(values), timeline)
    except ValueError as error:
        raise ValueError(
            f"{Path(folder) / 'record.json'} is not a whole record ({error}): take the step again"
        ) from error
