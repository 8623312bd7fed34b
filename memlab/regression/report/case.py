"""One case in the report of a run: why it failed, what changed, its steps as figures, and the trends of its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from memlab.record.saved_records import load_record
from memlab.record.timeline import Timeline
from memlab.regression.case_measurements import LAB, Measured, MetricValue
from memlab.regression.compare import compare_with_baseline, has_same_rounding, tolerance
from memlab.regression.one_line import one_line
from memlab.regression.report.drawings import step_outline, trend
from memlab.regression.report.summary_text import changes, value_text
from memlab.regression.run.kept_runs import History
from memlab.regression.summary import CaseResult, Status
from memlab.units import format_bytes

_SHOWN_ROWS = 12
_FEW_ROWS = 4
"""So few more rows are shown instead of folded."""
_MESSAGE_INSIDE: tuple[Status, ...] = ("passed", "changed")
"""The line of such a case is shorter or empty: its message is inside."""


def section(result: CaseResult, body: str, common_changes: str, *, is_open: bool = False) -> str:
    """Returns the HTML of a case.

    Args:
        common_changes: Changes that the page names elsewhere, and so not in this section.
        is_open: Whether the section is open at first.
    """
    tone, mark = ("green", "✓") if result.is_green else ("red", "✕")
    lines = list(_why(result))
    if what_changed(result) not in ("", common_changes):
        lines.append(f"changed: {arrows(what_changed(result))}")
    why = "".join(f'<span class="why">{line}</span>' for line in lines)
    return (
        f'<details class="case {tone}" id="{anchor(result)}"{" open" if is_open else ""}><summary>'
        f'<b><span class="mark">{mark}</span>{escape(result.name)}</b>{aside(result)}{why}</summary>'
        f"<div>{body}</div></details>"
    )


class CaseBodies:
    """What is inside of the sections of a run's cases."""

    def __init__(self, folder: Path, backend: str, history: History) -> None:
        self._folder = folder
        self._backend = backend
        self._history = history

    def body(self, result: CaseResult) -> str:
        """Returns the HTML inside of a case's section."""
        return "".join(self._parts(result))

    def _parts(self, result: CaseResult) -> Iterator[str]:
        facts = [escape(result.message)] if result.message and result.status in _MESSAGE_INSIDE else []
        if (self._folder / result.folder / "page.html").is_file():
            facts.append(f'<a href="{quote(result.folder)}/page.html">its notebook</a>')
        if result.status == "failed":
            facts.append(f'<a href="{quote(result.folder)}/log.txt">its log</a>')
        yield f'<p class="soft">{" · ".join(facts)}</p>'
        if result.differences:
            yield from _differences(result)
        if result.measured is None:
            return
        differing = list(dict.fromkeys(d.record for d in result.differences if d.record in result.measured.records))
        if differing:
            yield self._steps(result, result.measured, differing[:4])
        rest = [name for name in result.measured.records if name not in differing[:4] and name != LAB]
        yield "<details class=more><summary>all metrics, their trend over the kept runs, and all steps</summary>"
        yield self._metrics(result, result.measured)
        yield self._steps(result, result.measured, rest)
        yield "</details>"

    def _steps(self, result: CaseResult, measured: Measured, records: Iterable[str]) -> str:
        reference = self._reference(result)
        figures = []
        for record in records:
            now = _timeline(self._folder / result.folder, record)
            if now is None:
                continue
            peak = int(measured.records[record].metrics["peak_allocated_bytes"])
            caption = f"<b>{escape(record)}</b> peak {format_bytes(peak)}"
            label = f"{record}: device bytes over the events of the step"
            drawing = step_outline(now, None, label)
            if result.baseline is not None and record in result.baseline.records:
                was = int(result.baseline.records[record].metrics["peak_allocated_bytes"])
                caption += f", baseline {format_bytes(was)}" if was != peak else ", as the baseline"
                try:
                    before = _timeline(reference, record) if reference is not None else None
                    drawing = step_outline(now, before, label)
                except Exception as error:  # noqa: BLE001 - a damaged file of an earlier run is no fault of this case
                    caption += f"; the step of run {escape(reference.parent.name if reference else '')} is not drawn: "
                    caption += escape(one_line(error))
            figures.append(f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>")
        if not figures:
            return ""
        legend = "device bytes, event by event: blue now" + (", grey the baseline's" if reference else "")
        return f'<h3>Steps <span class="soft">{legend}</span></h3><div class="steps">{"".join(figures)}</div>'

    def _reference(self, result: CaseResult) -> Path | None:
        """The case in the newest kept run that agrees with the baseline, whose timelines are those of the baseline."""
        if result.baseline is None:
            return None
        for folder, summary in reversed(self._history):
            for kept in summary.results:
                if kept.name != result.name or kept.measured is None:
                    continue
                if not compare_with_baseline(result.baseline, kept.measured, summary.backend):
                    return folder / kept.folder
        return None

    def _metrics(self, result: CaseResult, measured: Measured) -> str:
        kept = [r.measured for _, s in self._history for r in s.results if r.name == result.name and r.measured]
        same_rounding = result.baseline is None or has_same_rounding(result.baseline, measured)
        rows = []
        off = {(d.record, d.metric) for d in result.differences}
        for record, figures in measured.records.items():
            was = result.baseline.records.get(record) if result.baseline is not None else None
            cells = []
            for metric, value in figures.metrics.items():
                baseline = was.metrics.get(metric) if was is not None else None
                values = [_number(m.records[record].metrics.get(metric)) if record in m.records else None for m in kept]
                values.append(_number(value))
                if not any((*values, _number(baseline))) and metric != "status":
                    continue  # zero in every run
                gated = tolerance(metric, self._backend, same_rounding=same_rounding) is not None
                label = f"{metric} over {len(values)} runs"
                is_off = (record, metric) in off
                cells.append(
                    f"<tr><td>{_breakable(metric)}{'' if gated else ' (not compared)'}</td>"
                    f'<td class="number">{value_text(baseline) if gated else ""}</td>'
                    f'<td class="number{" off" if is_off else ""}">{escape(value_text(value))}</td>'
                    f'<td class="trend">{trend(values, _number(baseline), label, is_off=is_off)}</td></tr>'
                )
            rows.append(
                f'<tr><th>{escape(record)}</th><th class="number">baseline</th><th class="number">now</th>'
                f"<th>trend</th></tr>{''.join(cells)}"
            )
        return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def anchor(result: CaseResult) -> str:
    """Returns the name that links within the page use."""
    return quote(f"case-{result.name}")


def aside(result: CaseResult) -> str:
    """Returns status, duration and engine, for the right of the case's name."""
    facts = [result.status, f"{result.seconds:.0f} s", *filter(None, [result.engine])]
    return f'<span class="soft">{escape(" · ".join(facts))}</span>'


def what_changed(result: CaseResult) -> str:
    """Returns the parameters, settings and versions that differ from the baseline's; empty if no figure changed."""
    return "; ".join(changes(result)) if result.status == "changed" else ""


def arrows(text: str) -> str:
    """Returns the HTML of what `what_changed` returned."""
    return escape(text).replace("-&gt;", "→")


def _why(result: CaseResult) -> Iterator[str]:
    """The reason in a line or two: the most important change, and the largest one."""
    if result.status != "changed":
        if result.message and result.status not in _MESSAGE_INSIDE:
            yield escape(result.message)
        return
    # The categories of the peak change with the peak, and add nothing to it.
    own = [d for d in result.differences if not d.metric.startswith("peak_by_category")] or [*result.differences]
    shown = list(dict.fromkeys((result.differences[0], max(own, key=lambda difference: difference.share))))
    num_others = len(result.differences) - len(shown)
    for number, difference in enumerate(shown, start=1):
        settings = result.settings_of(difference.record) if number == 1 or difference.record != shown[0].record else ""
        under = f" ({escape(settings)})" if settings else ""
        parts = [f"<b>{_breakable(difference.metric)}</b> of {escape(difference.record)}{under}"]
        parts[0] += f" {escape(difference.difference)}"
        parts += [f"largest part {_breakable(difference.module)}"] if difference.module else []
        if number == len(shown) and num_others:
            parts.append("and one more" if num_others == 1 else f"and {num_others} more")
        yield ", ".join(parts)


def _differences(result: CaseResult) -> Iterator[str]:
    """The changes by record, each with the module that allocated most of it."""
    rows: list[str] = []
    for record in dict.fromkeys(difference.record for difference in result.differences):
        rows.append(
            f'<tr><th>{escape(record)} <span class="soft">{escape(result.settings_of(record))}</span></th>'
            "<th class=number>baseline</th><th class=number>now</th><th class=number>difference</th></tr>"
        )
        named = {""}
        for d in result.differences:
            if d.record != record:
                continue
            part = "" if d.module in named else f'<div class="soft">largest part {_breakable(d.module)}</div>'
            named.add(d.module)
            rows.append(
                f"<tr><td>{_breakable(d.metric)}{part}</td><td class=number>{escape(value_text(d.baseline))}</td>"
                f'<td class="number off">{escape(value_text(d.now))}</td>'
                f"<td class=number>{escape(d.difference)}</td></tr>"
            )
    num_shown = _SHOWN_ROWS if len(rows) > _SHOWN_ROWS + _FEW_ROWS else len(rows)
    shown, rest = rows[:num_shown], rows[num_shown:]
    yield f'<div class="scroll"><table>{"".join(shown)}</table></div>'
    if rest:
        yield f"<details class=more><summary>{len(rest)} more lines</summary>"
        yield f'<div class="scroll"><table>{"".join(rest)}</table></div></details>'


def _breakable(name: str) -> str:
    """A long name in which a line may break after a dot, slash or underscore."""
    return re.sub(r"[./_]", r"\g<0><wbr>", escape(name))


def _timeline(case_folder: Path, record: str) -> Timeline | None:
    folder = case_folder / "records" / record
    return load_record(folder).timeline if folder.is_dir() else None


def _number(value: MetricValue | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
