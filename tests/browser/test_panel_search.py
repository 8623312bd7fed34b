"""The search in the panel: it runs beside the live lab, and a click on the front moves the controls."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import RUN_SECONDS, NotebookPage
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
STATE = "__import__('memlab').panel(lab).search.state"
# The middle of a point of the upper plot, from that plot's corner, by its place in the search.
_PLACE = """(plot, number) => {
    const area = plot.querySelector('.nsewdrag').getBoundingClientRect();
    for (const mark of plot.querySelectorAll('.scatterlayer .trace')) {
        const { trace } = mark.__data__?.[0] ?? {};
        const at = trace?.uid?.startsWith('choice-y-') ? trace.customdata.indexOf(number) : -1;
        if (at < 0) continue;
        const box = mark.querySelectorAll('.points path')[at].getBoundingClientRect();
        return { x: box.x + box.width / 2 - area.x, y: box.y + box.height / 2 - area.y };
    }
}"""


def test_a_click_on_the_front_sets_the_controls_and_run_takes_them(panel: PanelPage) -> None:
    panel.write("seq-length", 1024)  # of short sequences, full recomputation is not on the front
    panel.press("search-toggle")
    panel.write("search-limit", "128MiB")  # peaks count in steps of 1/64 of it: fewer predictions than of 40 MiB
    panel.choose("offload-optimizer", "host")
    panel.press("search-start")
    status = panel.part("search-status")
    expect(status).to_contain_text(re.compile(r"\d+ predicted"), timeout=RUN_SECONDS * 1000)
    peak = panel.run()
    assert peak > 0, "the live lab steps while the search goes on"
    panel.press("search-toggle")  # Run had shown the chart
    expect(status).to_contain_text("are on the front", timeout=2 * RUN_SECONDS * 1000)
    plot = panel.root.locator(".memlab-search-chart .js-plotly-plot")
    expect(plot).to_be_visible()
    found = f"{STATE}.found"
    front = panel.notebook.ask(f"[{found}.points.index(p) for p in {found}.front if not p.settings.offload_modules]")
    number = front[-1]
    name = panel.notebook.ask(f"str({found}.points[{number}].settings)")
    assert name.startswith("full ")
    plot.locator(".nsewdrag").first.click(position=plot.evaluate(_PLACE, number))
    expect(panel.part("status")).to_contain_text(f"The controls show '{name}'")
    expect(status).to_contain_text("are on the front")
    expect(panel.part("recompute-granularity", "select")).to_have_value("full")
    expect(panel.part("offload-optimizer", "select")).to_have_value("host")
    panel.run()
    assert panel.notebook.ask(f"lab.records[-1].settings == {found}.points[{number}].settings")
    panel.press("search-toggle")
    rows = panel.part("search-text", "tbody tr")
    assert [panel.notebook.ask(f"str({found}.front[{number}].settings)") for number in (0, -1)] == [
        row.get_by_role("button").inner_text() for row in (rows.first, rows.last)
    ]
    rows.first.get_by_role("button").press("Enter")
    expect(panel.part("recompute-granularity", "select")).not_to_have_value("full")


def test_each_setting_alone_is_in_one_table_that_needs_no_scrolling(panel: PanelPage) -> None:
    panel.press("search-alone")
    expect(panel.part("search-status")).to_contain_text("each change to it alone", timeout=RUN_SECONDS * 1000)
    points = f"{STATE}.found.points"
    lowest = panel.notebook.ask(f"str(min({points}, key=lambda point: point.peak_allocated_bytes).settings)")
    rows = panel.part("search-answer", "tbody tr")
    expect(rows).to_have_count(panel.notebook.ask(f"len({points})"))
    expect(rows.first).to_contain_text(lowest)
    panel.root.evaluate("panel => panel.scrollIntoView()")
    expect(rows.first).to_be_in_viewport(ratio=1)
    expect(rows.last).to_be_in_viewport(ratio=1)
    rows.first.locator("td").last.click()
    expect(panel.part("status")).to_contain_text(f"The controls show '{lowest}'")


@pytest.mark.slow
def test_a_first_time_user_opens_a_model_and_asks_what_saves_most_on_one_screen(notebook_page: NotebookPage) -> None:
    notebook_page.open_shared("from memlab import panel", "row = panel(predict=False)\nrow")
    notebook_page.run_all()
    row = notebook_page.page.locator(".memlab-opening-row")
    for part in row.locator("select, input, button").all():
        expect(part).to_be_in_viewport(ratio=1)
    row.get_by_role("button", name="Open").click()
    panel = PanelPage(notebook_page)
    try:
        expect(panel.root).to_be_visible()
        row.evaluate("row => row.scrollIntoView()")
        for part in (*row.locator("select, input, button").all(), panel.part("run"), panel.root):
            expect(part).to_be_in_viewport(ratio=1)
        panel.press("search-alone")
        expect(panel.part("search-answer")).to_contain_text("saves most: ", timeout=RUN_SECONDS * 1000)
        expect(panel.part("search-answer", "tbody tr").first).to_be_in_viewport(ratio=1)
    finally:
        notebook_page.ask("row.lab.close()")


def test_the_peak_of_the_selection_is_predicted_before_run_and_is_what_run_measures(panel: PanelPage) -> None:
    panel.part("predicts", "input").check()
    panel.choose("recompute-granularity", "full")
    verdict = panel.part("verdict")
    expect(verdict).to_contain_text("predicted peak", timeout=RUN_SECONDS * 1000)
    assert panel.notebook.ask("len(lab.records)") == 0
    found = re.fullmatch(r"Controls: predicted peak (.+); recomputed: \d+\.\d% of a step", verdict.inner_text())
    assert found is not None
    panel.run()
    expect(verdict).to_have_text(f"Controls: peak {found[1]}; predicted {found[1]}")


def test_a_room_that_is_none_is_a_line_and_the_panel_lives(panel: PanelPage) -> None:
    panel.press("search-toggle")
    panel.write("search-limit", "much")
    panel.press("search-start")
    expect(panel.part("search-status")).to_contain_text("'much' is not a size of memory")
    panel.run()
