"""The report of a run: ``index.html``, one file that opens without a network.

It answers in this order: is all well, what failed and why, and how does everything else stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from urllib.parse import quote

from memlab.record import StepRecord
from memlab.regression.compare import compare, has_same_rounding, tolerance
from memlab.regression.drawings import step_outline, trend
from memlab.regression.junit import junit_xml
from memlab.regression.measured import LAB, Measured, MetricValue
from memlab.regression.report_style import STYLE
from memlab.regression.summary import CaseResult, Status, Summary
from memlab.regression.summary_text import changes, value_text
from memlab.timeline import Timeline
from memlab.units import format_bytes

History = Sequence[tuple[Path, Summary]]

_SHOWN_ROWS = 12
_FEW_ROWS = 4
"""So few are not worth a fold."""
_MESSAGE_INSIDE: tuple[Status, ...] = ("passed", "changed")
"""Their lines say something shorter, or nothing: the message waits until the case is opened."""


def write_reports(folder: Path, summary: Summary, history: History) -> None:
    """Writes ``index.html``, ``junit.xml`` and ``summary.json`` into the folder of a run.

    Args:
        folder: Holds the cases' folders.
        summary: How the run went.
        history: The kept runs before it, the oldest first.
    """
    summary.write(folder)
    (folder / "junit.xml").write_text(junit_xml(summary), encoding="utf-8")
    (folder / "index.html").write_text(_Page(folder, summary, history).html(), encoding="utf-8")


class _Page:
    def __init__(self, folder: Path, summary: Summary, history: History) -> None:
        self._folder = folder
        self._summary = summary
        self._history = history

    def html(self) -> str:
        summary = self._summary
        tone = "red" if summary.red else "green"
        body = [f'<header class="{tone}"><h1>{escape(summary.headline)}</h1>', self._facts(), "</header>"]
        if summary.red:
            body.append("<h2>What failed, and why</h2>")
            if self._common_changes:
                num_cases = sum(_changes(result) == self._common_changes for result in summary.red)
                body.append(f'<p class="soft">changed in {num_cases} of them: {_arrows(self._common_changes)}</p>')
            # Of several, each says its reason in its own line, so that all are seen before one is opened.
            body += [self._case(result, is_open=len(summary.red) == 1) for result in summary.red]
        body.append(f"<h2>{'All cases' if summary.red else 'Cases'}</h2>")
        body += [self._link(result) if not result.is_green else self._case(result) for result in summary.results]
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(summary.headline)}: {escape(summary.name)}</title><style>{STYLE}</style></head>\n"
            f"<body>{''.join(body)}{self._footer()}</body></html>\n"
        )

    @cached_property
    def _common_changes(self) -> str:
        """What changed alike in most cases: said once, above them. Empty where no two are alike."""
        found = Counter(filter(None, map(_changes, self._summary.red))).most_common(1)
        return found[0][0] if found and found[0][1] > 1 else ""

    def _facts(self) -> str:
        summary = self._summary
        nights = [*(kept for _, kept in self._history), summary]
        marks = "".join(
            f'<i class="{"red" if night.red else "green"}" title="{escape(f"{night.name}: {night.headline}")}"></i>'
            for night in nights
        )
        started = summary.started.replace("T", " ").partition("+")[0]
        return (
            f'<p class="soft">suite <b>{escape(summary.suite)}</b> on {escape(summary.backend)} · commit '
            f"{escape(summary.commit)} · {escape(started)} UTC · {summary.seconds:.0f} s<br>"
            f'kept runs, this one last: <span class="nights">{marks}</span></p>'
        )

    def _footer(self) -> str:
        measured = next((result.measured for result in self._summary.results if result.measured), None)
        versions = "" if measured is None else " · ".join(f"{name} {text}" for name, text in measured.versions.items())
        machine = "" if measured is None else f"<br>{escape(measured.machine)}"
        return (
            f'<footer>{escape(versions)}{machine}<br>the same as data: <a href="summary.json">summary.json</a>, '
            '<a href="junit.xml">junit.xml</a></footer>'
        )

    def _link(self, result: CaseResult) -> str:
        return (
            f'<details class="case red"><summary><b><span class="mark">✕</span><a href="#{_anchor(result)}">'
            f"{escape(result.name)}</a></b>{_aside(result)}</summary></details>"
        )

    def _case(self, result: CaseResult, *, is_open: bool = False) -> str:
        tone, mark = ("green", "✓") if result.is_green else ("red", "✕")
        lines = list(_why(result))
        if _changes(result) != self._common_changes:
            lines.append(f"changed: {_arrows(_changes(result))}")
        why = "".join(f'<span class="why">{line}</span>' for line in lines)
        return (
            f'<details class="case {tone}" id="{_anchor(result)}"{" open" if is_open else ""}><summary>'
            f'<b><span class="mark">{mark}</span>{escape(result.name)}</b>{_aside(result)}{why}</summary>'
            f"<div>{''.join(self._body(result))}</div></details>"
        )

    def _body(self, result: CaseResult) -> Iterator[str]:
        facts = [escape(result.message)] if result.message and result.status in _MESSAGE_INSIDE else []
        if (self._folder / result.folder / "page.html").is_file():
            facts.append(f'<a href="{quote(result.folder)}/page.html">its notebook</a>')
        elif result.status == "failed":
            facts.append(f'<a href="{quote(result.folder)}/log.txt">its log</a> (it ended before there was a page)')
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
            before = None
            if result.baseline is not None and record in result.baseline.records:
                was = int(result.baseline.records[record].metrics["peak_allocated_bytes"])
                caption += f", baseline {format_bytes(was)}" if was != peak else ", as the baseline"
                try:
                    before = _timeline(reference, record) if reference is not None else None
                except ValueError:
                    caption += "; the baseline's steps were kept by another version of memlab and are not drawn"
            drawing = step_outline(now, before, f"{record}: device bytes over the events of the step")
            figures.append(f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>")
        if not figures:
            return ""
        legend = "device bytes, event by event: blue now" + (", grey the baseline's" if reference else "")
        return f'<h3>Steps <span class="soft">{legend}</span></h3><div class="steps">{"".join(figures)}</div>'

    def _reference(self, result: CaseResult) -> Path | None:
        """The newest kept run of the case that agrees with the baseline: its timelines are the baseline's."""
        if result.baseline is None:
            return None
        for folder, summary in reversed(self._history):
            for kept in summary.results:
                if kept.name != result.name or kept.measured is None:
                    continue
                if not compare(result.baseline, kept.measured, summary.backend):
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
                gated = tolerance(metric, self._summary.backend, same_rounding=same_rounding) is not None
                label = f"{metric} over {len(values)} runs"
                cells.append(
                    f"<tr><td>{_breakable(metric)}{'' if gated else ' (not gated)'}</td>"
                    f'<td class="number">{value_text(baseline) if gated else ""}</td>'
                    f'<td class="number{" off" if (record, metric) in off else ""}">{escape(value_text(value))}</td>'
                    f'<td class="trend">{trend(values, _number(baseline), label)}</td></tr>'
                )
            rows.append(
                f'<tr><th>{escape(record)}</th><th class="number">baseline</th><th class="number">now</th>'
                f"<th>trend</th></tr>{''.join(cells)}"
            )
        return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _anchor(result: CaseResult) -> str:
    return quote(f"case-{result.name}")


def _aside(result: CaseResult) -> str:
    return f'<span class="soft">{escape(result.status)} · {result.seconds:.0f} s</span>'


def _why(result: CaseResult) -> Iterator[str]:
    """The reason in a line or two: the difference that matters most, and the one that is the largest."""
    if result.status != "changed":
        if result.message and result.status not in _MESSAGE_INSIDE:
            yield escape(result.message)
        return
    # What the peak is made of moves with the peak, and says no more.
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


def _changes(result: CaseResult) -> str:
    return "; ".join(changes(result)) if result.status == "changed" else ""


def _arrows(text: str) -> str:
    return escape(text).replace("-&gt;", "→")


def _differences(result: CaseResult) -> Iterator[str]:
    """The differences by record, with the module where most of each was born."""
    rows: list[str] = []
    for record in dict.fromkeys(difference.record for difference in result.differences):
        rows.append(
            f'<tr><th>{escape(record)} <span class="soft">{escape(result.settings_of(record))}</span></th>'
            "<th class=number>baseline</th><th class=number>now</th><th class=number>difference</th></tr>"
        )
        told = {""}
        for d in result.differences:
            if d.record != record:
                continue
            born = "" if d.module in told else f'<div class="soft">largest part {_breakable(d.module)}</div>'
            told.add(d.module)
            rows.append(
                f"<tr><td>{_breakable(d.metric)}{born}</td><td class=number>{escape(value_text(d.baseline))}</td>"
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
    """A long name that may go on in the next line after a dot, slash or underscore."""
    return re.sub(r"[./_]", r"\g<0><wbr>", escape(name))


def _timeline(case_folder: Path, record: str) -> Timeline | None:
    folder = case_folder / "records" / record
    return StepRecord.load(folder).timeline if folder.is_dir() else None


def _number(value: MetricValue | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
