"""The panel of a notebook, worked as a person works it: by its controls, its buttons and its table."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect

from tests.browser.notebook_page import ANSWER_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.notebook_page import NotebookPage

_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# The highest value of a trace of the chart of the shown run, with the title of its axis. All numbers of the chart are some
# hundred kilobytes, which a test that waits would fetch again and again.
_HIGHEST = """(panel, uid) => {
    const plots = [...panel.querySelectorAll('.js-plotly-plot')];
    const chart = plots.find(plot => plot._fullData?.some(trace => trace.uid === 'total'));
    if (!chart) return null;
    const values = Array.from(chart._fullData.find(trace => trace.uid === uid).y ?? []).filter(Number.isFinite);
    return values.length ? [chart._fullLayout.yaxis.title.text ?? '', Math.max(...values)] : null;
}"""


class PanelPage:
    """The one panel that is open in a notebook; parts are named by their hooks, without ``memlab-``."""

    def __init__(self, notebook: NotebookPage, around: str = "") -> None:
        self.notebook = notebook
        self.root = notebook.page.locator(f"{around} .memlab-panel".strip())
        self.rows = self.root.locator(".memlab-runs tbody tr[data-run]")
        self.error_boxes = self.root.locator(".memlab-validation-error").filter(has_text=re.compile(r"\S"))

    def part(self, hook: str, inside: str = "") -> Locator:
        """Returns a part of the panel, or an element inside it."""
        return self.root.locator(f".memlab-{hook} {inside}".strip())

    def choose(self, hook: str, choice: str) -> None:
        """Chooses from a list."""
        self.part(hook, "select").select_option(choice)

    def tick(self, hook: str) -> None:
        """Ticks a box."""
        self.part(hook, "input[type=checkbox]").check()

    def write(self, hook: str, value: object) -> None:
        """Types a value and leaves the field."""
        field = self.part(hook, "input")
        field.fill(str(value))
        field.press("Tab")

    def press(self, hook: str) -> None:
        """Presses a button."""
        self.root.locator(f"button.memlab-{hook}, .memlab-{hook} button").click()

    def run(self) -> int:
        """Presses Run, waits for the new row and its chart, and returns the row's peak in bytes."""
        before = self.rows.count()
        self.press("run")
        expect(self.rows).to_have_count(before + 1)
        self.notebook.wait_until_ready()
        peak = self.notebook.ask("lab.records[-1].peak_allocated_bytes")
        self.wait_for_peak(peak)
        return peak

    def wait_for_peak(self, peak_bytes: int) -> None:
        """Waits until the chart's highest total is this many bytes."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            if self.highest("total") == peak_bytes:
                return
            self.notebook.page.wait_for_timeout(50)  # a short wait between two looks
        raise AssertionError(f"the chart's peak is {self.highest('total')} bytes, not {peak_bytes}")

    def chart(self) -> dict[str, Any]:
        """Returns what the chart of the shown run shows; a search has a chart of its own."""
        expect(self.root.locator(".js-plotly-plot .main-svg").first).to_be_attached()  # not at once on a loaded page
        shown = [figure for figure in self.notebook.figures() if figure["in_panel"]]
        return next(figure for figure in shown if any(trace["uid"] == "total" for trace in figure["traces"]))

    def trace(self, name: str) -> dict[str, Any]:
        """Returns a trace of the chart by its uid, which stays while the name in its legend changes."""
        return next(trace for trace in self.chart()["traces"] if trace["uid"] == name)

    def highest(self, name: str) -> float | None:
        """Returns the most bytes of a trace of the chart; None where it draws nothing."""
        found = self.root.evaluate(_HIGHEST, name)
        unit = re.search(r"\((\w+)\)", found[0]) if found else None
        return found[1] * _UNITS[unit.group(1)] if unit else None
