"""The report of a run: ``index.html``, one file that opens without a network.

It answers in this order: is all well, what failed and why, and how does everything else stand.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from html import escape
from pathlib import Path

from memlab.regression.report.case import CaseSections, History, anchor, arrows, aside, what_changed
from memlab.regression.report.junit import junit_xml
from memlab.regression.report.style import STYLE
from memlab.regression.summary import CaseResult, Summary


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
        self._summary = summary
        self._history = history
        self._sections = CaseSections(folder, summary.backend, history)

    def html(self) -> str:
        summary = self._summary
        tone = "red" if summary.red else "green"
        body = [f'<header class="{tone}"><h1>{escape(summary.headline)}</h1>', self._facts(), "</header>"]
        failed = [result for result in summary.red if result not in summary.not_run]
        if failed:
            body.append("<h2>What failed, and why</h2>")
            if self._common_changes:
                num_cases = sum(what_changed(result) == self._common_changes for result in failed)
                body.append(f'<p class="soft">changed in {num_cases} of them: {arrows(self._common_changes)}</p>')
            # Of several, each says its reason in its own line, so that all are seen before one is opened.
            body += [self._case(result, is_open=len(failed) == 1) for result in failed]
        body.append(f"<h2>{'All cases' if failed else 'Cases'}</h2>")
        body += [self._link(result) if result in failed else self._case(result) for result in summary.results]
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(summary.headline)}: {escape(summary.name)}</title><style>{STYLE}</style></head>\n"
            f"<body>{''.join(body)}{self._footer()}</body></html>\n"
        )

    @cached_property
    def _common_changes(self) -> str:
        """What changed alike in most cases: said once, above them. Empty where no two are alike."""
        found = Counter(filter(None, map(what_changed, self._summary.red))).most_common(1)
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
            f'<details class="case red"><summary><b><span class="mark">✕</span><a href="#{anchor(result)}">'
            f"{escape(result.name)}</a></b>{aside(result)}</summary></details>"
        )

    def _case(self, result: CaseResult, *, is_open: bool = False) -> str:
        return self._sections.section(result, self._common_changes, is_open=is_open)
