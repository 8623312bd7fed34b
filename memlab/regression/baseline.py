"""Baselines: what each case must measure, one small text file per case, changed only by an explicit command.

A file holds the gated metrics, sorted, one per line, and the scenario, settings and versions that they were measured
under, so that a report can name the setting that changed. Times are left out: they differ from run to run, and the
file would too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memlab.atomic_files import written_aside
from memlab.config.from_json import build, read_json
from memlab.regression.case_measurements import Measured, RecordMeasured
from memlab.regression.compare import tolerance
from memlab.regression.one_line import one_line

_ON_ONE_LINE = (
    "parameters",
    "peak_by_module",
    "recomputed_by_module",
    "residual_by_module",
    "scenario",
    "settings",
    "versions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a case measured once, and when."""

    backend: str
    case: str
    date: str
    """UTC, ``YYYY-MM-DD``."""
    commit: str
    measured: Measured

    def check_case(self, case: str) -> None:
        """Checks that the baseline is that of a case.

        Raises:
            ValueError: If it is that of another.
        """
        if self.case != case:
            raise ValueError(f"it is of case {self.case}")


def baseline_path(folder: Path, case: str) -> Path:
    """Returns the path of a case's baseline."""
    return folder / f"{case}.json"


def read_baseline(path: Path) -> Baseline | None:
    """Reads a baseline; None if there is no such file.

    Raises:
        ValueError: If the file is not a baseline; the message names it and says what to do.
    """
    if not path.exists() and not path.is_symlink():
        return None
    bring_back = f"bring it back with `git checkout -- {path.name}` in its folder"
    action = f"{bring_back}, or write it again with `memlab baseline update`"
    values = read_json(path, action)
    try:
        baseline = build(Baseline, values, "it", finite=True)
        baseline.measured.check()
        baseline.check_case(path.stem)
    except ValueError as error:
        raise ValueError(f"baseline {path} cannot be read ({one_line(error)}): {action}") from error
    return baseline


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes a baseline in the place of the old one; a reader sees one of the two, whole."""
    gated = {name: _gated(record, baseline.backend) for name, record in baseline.measured.records.items()}
    measured = replace(baseline.measured, records=gated).to_dict()
    del measured["hardware"]  # of this machine, and never compared
    values = {name: getattr(baseline, name) for name in baseline.__slots__} | {"measured": measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(_text(values) + "\n", encoding="utf-8")


def _gated(record: RecordMeasured, backend: str) -> RecordMeasured:
    names = [name for name in record.metrics if tolerance(name, backend, same_rounding=True) is not None]
    return replace(record, metrics={name: record.metrics[name] for name in names})


def _text(values: Mapping[str, Any], indent: str = "") -> str:
    """Writes JSON with sorted keys: one metric per line, and each mapping that only explains on one line."""
    inner = indent + " "
    lines = []
    for name, value in sorted(values.items()):
        if isinstance(value, dict) and value and name not in _ON_ONE_LINE:
            text = _text(value, inner)
        else:
            text = json.dumps(value, sort_keys=True, allow_nan=False)
        lines.append(f"{inner}{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
