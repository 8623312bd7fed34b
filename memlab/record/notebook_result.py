"""The last cell of every lab: `finish` passes what was measured to the process that ran the notebook.

In a headless run `finish` writes the figures into the run's folder as plain files. Interactively it only shows them.
Either way the cell's output has them under a MIME type of their own, by which the runner knows that the last cell ran.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab._version import __version__
from memlab.units import format_bytes

if TYPE_CHECKING:
    from memlab.record.step_record import StepRecord
    from memlab.record.watch_record import WatchRecord

RUN_FOLDER_VARIABLE = "MEMLAB_RUN_FOLDER"
"""Environment variable that names the folder of a headless run."""
METRICS_MIMETYPE = "application/vnd.memlab.metrics+json"

RECORD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
"""Names of records, which are also names of folders."""
_MAX_INTEGER = 2**63


class Metrics:
    """What a lab measured; shown as one line per record."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        """JSON-ready: ``records`` by name, ``extra`` and ``versions``."""

    def __repr__(self) -> str:
        lines = [
            f"{name}: peak {format_bytes(record['peak_allocated_bytes'])} allocated"
            + (f", {record['status']}" if record["status"] != "ok" else "")
            for name, record in self.values["records"].items()
        ]
        lines += [f"{name}: {value}" for name, value in self.values["extra"].items()]
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {METRICS_MIMETYPE: self.values, "text/plain": repr(self)}


def finish(records: Mapping[str, StepRecord | WatchRecord], **extra: float) -> Metrics:
    """Ends a lab: keeps the numbers of its records. Call it once, as the last line of the cell tagged ``record``.

    Args:
        records: What was measured, by a short name that is also used as the name of a folder: steps of labs, or what
            `memlab.watch` yielded. A `JobRecord` is kept as the records of all its ranks: ``a-name`` becomes
            ``a-name-rank-0``, ``a-name-rank-1`` and so on.
        **extra: Further metrics: finite numbers below 2**63.

    Returns:
        The metrics, for the notebook to show.

    Raises:
        ValueError: If there is no record, a name cannot name a folder, a number is not finite, a watched block has not
            ended, or `finish` was already called in this run.
    """
    if not records:
        raise ValueError("finish got no records, must be at least one: pass {'a-name': lab.step()}")
    records = _rank_by_rank(records)
    for name in records:
        if not RECORD_NAME.fullmatch(name):
            raise ValueError(
                f"record name {name!r} cannot name a folder, must be at most 100 letters, digits and _ . + -: "
                "give a plain name"
            )
    for name, value in extra.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"metric {name} is {value!r}, must be a number: pass a plain int or float")
    versions = {"memlab": __version__}
    for record in records.values():
        versions |= record.versions
    scalars = {name: _scalars(record) for name, record in records.items()}
    for owner, values in (scalars | {"the lab": extra}).items():
        _check_finite(owner, values)
    metrics = Metrics({"records": scalars, "extra": extra, "versions": versions})
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder is not None:
        _write(Path(folder), records, metrics.values)
    return metrics


def _rank_by_rank(records: Mapping[str, StepRecord | WatchRecord]) -> dict[str, StepRecord | WatchRecord]:
    """Returns the records with those of all ranks in the place of a job's.

    Raises:
        ValueError: If another record has the name of a rank.
    """
    from memlab.record.job_record import JobRecord  # not above: the runner needs only names, and no numpy

    found: dict[str, StepRecord | WatchRecord] = {}
    for name, record in records.items():
        ranks = record.ranks if isinstance(record, JobRecord) else ()
        of_ranks = {f"{name}-rank-{rank.scenario.layout.rank}": rank for rank in ranks}
        each: Mapping[str, StepRecord | WatchRecord] = of_ranks or {name: record}
        twice = sorted(found.keys() & each.keys())
        if twice:
            raise ValueError(f"record name {twice[0]!r} is also that of a rank of a job: give one of the two another")
        found |= each
    return found


def _scalars(record: StepRecord | WatchRecord) -> dict[str, int | float | str | None]:
    values = record.to_dict().items()
    return {name: value for name, value in values if value is None or isinstance(value, (int, float, str))}


def _check_finite(owner: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"metric {name} of {owner} is {value}, must be finite: look at the step that gave it")
        if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
            raise ValueError(f"metric {name} of {owner} has {value.bit_length()} bits, must be below 2**63: scale it")


def _write(folder: Path, records: Mapping[str, StepRecord | WatchRecord], values: dict[str, Any]) -> None:
    target = folder / "metrics.json"
    if target.exists():
        raise ValueError(f"{target} already exists, and finish must be called once: call it in the last cell only")
    # Written aside, then renamed: a process that reads metrics.json reads all of it, and finds every record.
    aside = folder / "records.partial"
    for name, record in records.items():
        record.save(aside / name)
    aside.rename(folder / "records")
    partial = folder / "metrics.json.partial"
    partial.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    partial.rename(target)
