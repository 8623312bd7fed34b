"""Baselines: what each case must measure, one small text file a case, changed only by an explicit command.

A file holds the gated metrics, sorted, one a line, and what they were measured under, so that a difference can be
shown with the setting that changed. Times are left out: they differ from run to run, and the file would too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memlab.regression.compare import tolerance
from memlab.regression.measured import Measured, RecordMeasured

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
    """What a case measured once, and when that was."""

    backend: str
    case: str
    date: str
    """UTC, ``YYYY-MM-DD``."""
    commit: str
    measured: Measured


def baseline_path(folder: Path, case: str) -> Path:
    """Returns where a case's baseline stands."""
    return folder / f"{case}.json"


def read_baseline(path: Path) -> Baseline | None:
    """Reads a baseline; None if there is no such file.

    Raises:
        ValueError: If the file is no baseline; the message names it and says what to do.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(_refusal(path, str(error))) from error
    try:
        values = json.loads(text)
        measured = Measured.from_dict(values["measured"])
        baseline = Baseline(**values | {"measured": measured})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(_refusal(path, str(error))) from error
    if baseline.case != path.stem:
        raise ValueError(_refusal(path, f"it is of case {baseline.case}"))
    return baseline


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes a baseline in the place of the one that was there; whoever reads sees one of them, whole."""
    gated = {name: _gated(record, baseline.backend) for name, record in baseline.measured.records.items()}
    measured = replace(baseline.measured, records=gated).to_dict()
    values = {name: getattr(baseline, name) for name in baseline.__slots__} | {"measured": measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(_text(values) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _gated(record: RecordMeasured, backend: str) -> RecordMeasured:
    names = [name for name in record.metrics if tolerance(name, backend, same_rounding=True) is not None]
    return replace(record, metrics={name: record.metrics[name] for name in names})


def _text(values: Mapping[str, Any], indent: str = "") -> str:
    """Writes JSON with its keys sorted, a metric a line, and whole the line of what only explains."""
    inner = indent + " "
    lines = []
    for name, value in sorted(values.items()):
        if isinstance(value, dict) and value and name not in _ON_ONE_LINE:
            text = _text(value, inner)
        else:
            text = json.dumps(value, sort_keys=True, allow_nan=False)
        lines.append(f"{inner}{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _refusal(path: Path, reason: str) -> str:
    reason = reason.partition("\n")[0]
    return (
        f"baseline {path} cannot be read ({reason}): bring it back with `git checkout -- {path.name}` in its folder, "
        "or write it anew with `memlab baseline update`"
    )
