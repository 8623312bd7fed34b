"""A run as plain text: the command prints it at its end, and CI servers show it for a red case."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.regression.case_measurements import MetricValue
from memlab.regression.summary import CaseResult, Summary

_SHOWN_DIFFERENCES = 12
_ONLY_CODE = "nothing but the code since the baseline's commit (parameters, settings and versions are the same)"


def summary_table(summary: Summary) -> str:
    """Writes one row per case, then each red case with what changed and why."""
    on_engines = any(result.engine for result in summary.results)
    rows = [["case", "status", "time", "engine"]]
    rows += [[result.name, result.status, f"{result.seconds:.0f} s", result.engine] for result in summary.results]
    rows = rows if on_engines else [row[:-1] for row in rows]
    lines = _aligned(rows)
    if summary.hardware:
        lines += ["", "hardware: " + ", ".join(f"{name} {value}" for name, value in summary.hardware.items())]
    for result in summary.red:
        lines += ["", f"{result.name}: {result.status}", f"  {result.message}"]
        lines += [f"  {line}" for line in changes_table(result)]
    return "\n".join(lines)


def changes_table(result: CaseResult, most: int | None = _SHOWN_DIFFERENCES) -> list[str]:
    """Writes a row per changed metric, up to `most`, the settings of each record in them, and what else changed."""
    if not result.differences:
        return []
    shown = result.differences[:most]
    rows = [["record", "metric", "baseline", "now", "difference", "largest part"]]
    rows += [[d.record, d.metric, value_text(d.baseline), value_text(d.now), d.difference, d.module] for d in shown]
    lines = _aligned(rows)
    if len(result.differences) > len(shown):
        lines.append(f"and {len(result.differences) - len(shown)} more: see the report")
    named = {d.record: result.settings_of(d.record) for d in shown}
    lines += [f"settings of {record}: {settings}" for record, settings in named.items() if settings]
    return lines + [f"changed: {text}" for text in changes(result)]


def changes(result: CaseResult) -> list[str]:
    """Returns the parameters, settings and versions that differ from the baseline's, or says that only the code can."""
    found = dict.fromkeys(part for d in result.differences for part in d.changed.split("; ") if part)
    return list(found) or [_ONLY_CODE]


def value_text(value: MetricValue | None) -> str:
    """Writes a metric's value; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.9g}" if isinstance(value, float) else value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
