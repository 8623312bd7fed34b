"""The report of a run: ``index.html``, one file that opens without a network.

It answers in this order: did all pass, what failed and why, and how did every other case go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path

from memlab.regression.report.case import CaseBodies, anchor, arrows, aside, section, what_changed
from memlab.regression.report.junit import junit_xml
from memlab.regression.report.summary_text import summary_table
from memlab.regression.run.kept_runs import History, commit_in_words
from memlab.regression.run.runner import failed
from memlab.regression.suite.suite import JUNIT_FILE, PAGE_FILE
from memlab.regression.summary import CaseResult, Summary

_STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def write_reports(folder: Path, summary: Summary, history: History) -> Summary:
    """Writes ``index.html``, ``junit.xml`` and ``summary.json`` into the folder of a run.

    Args:
        folder: Holds the cases' folders.
        history: The kept runs before it, the oldest first.

    Returns:
        The summary as written: a case whose part of the report raises an error has failed.
    """
    bodies = CaseBodies(folder, summary.backend, history)
    results, bodies_by_name = [], {}
    for result in summary.results:
        try:
            body = bodies.body(result)
            _try_other_forms(replace(summary, results=(result,)))
            results.append(result)
        except Exception as error:  # noqa: BLE001 - any error is the failure of this case, and the others are reported
            results.append(failed(result, folder, error))
            body = bodies.body(results[-1])
        bodies_by_name[result.name] = body
    summary = replace(summary, results=tuple(results))
    summary.write(folder)
    (folder / JUNIT_FILE).write_text(junit_xml(summary), encoding="utf-8")
    page = _Page(summary, history, bodies_by_name).html()
    # A message may hold half a surrogate pair.
    (folder / PAGE_FILE).write_text(page, encoding="utf-8", errors="replace")
    return summary


def _try_other_forms(summary: Summary) -> None:
    """Raises whatever the other forms of the report would raise for a case."""
    summary.to_json()
    junit_xml(summary)
    summary_table(summary)
    section(summary.results[0], "", "")


class _Page:
    def __init__(self, summary: Summary, history: History, bodies: Mapping[str, str]) -> None:
        self._summary = summary
        self._history = history
        self._bodies = bodies

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
            # If there are several, all are closed, and each shows its reason in its own line.
            body += [self._case(result, is_open=len(failed) == 1) for result in failed]
        body.append(f"<h2>{'All cases' if failed else 'Cases'}</h2>")
        body += [self._link(result) if result in failed else self._case(result) for result in summary.results]
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(summary.headline)}: {escape(summary.name)}</title><style>{_STYLE}</style></head>\n"
            f"<body>{''.join(body)}{self._footer()}</body></html>\n"
        )

    @cached_property
    def _common_changes(self) -> str:
        """What changed in the same way in most cases: the page says it once, above them. Empty if no two are equal."""
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
            f'<p class="soft">suite <b>{escape(summary.suite)}</b> on {escape(summary.backend)} · '
            f"{escape(commit_in_words(summary.commit))} · {escape(started)} UTC · {summary.seconds:.0f} s<br>"
            f'kept runs, this one last: <span class="nights">{marks}</span></p>'
        )

    def _footer(self) -> str:
        measured = next((result.measured for result in self._summary.results if result.measured), None)
        versions = "" if measured is None else " · ".join(f"{name} {text}" for name, text in measured.versions.items())
        machine = "" if measured is None else f"<br>{escape(measured.machine)}"
        if self._summary.hardware:
            machine += "<br>" + escape(" · ".join(f"{name}: {value}" for name, value in self._summary.hardware.items()))
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
        return section(result, self._bodies[result.name], self._common_changes, is_open=is_open)
