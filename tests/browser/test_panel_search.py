"""The search in the panel: it runs beside the live lab, and a click on the front moves the controls."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.notebook_page import RUN_SECONDS
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
STATE = "__import__('memlab').panel(lab).search.state"
# The middle of a point on the page, by its place in the search.
_PLACE = """(plot, number) => {
    const marks = plot.querySelectorAll('.scatterlayer .trace');
    for (const mark of marks) {
        const { trace } = mark.__data__?.[0] ?? {};
        const at = trace?.uid?.startsWith('choice') ? trace.customdata.indexOf(number) : -1;
        if (at < 0) continue;
        const box = mark.querySelectorAll('.points path')[at].getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    }
}"""


def click_point(panel: PanelPage, plot: Locator, number: int, done: str) -> None:
    """Clicks a point until the panel says so: plotly's click is on what it hovers, and the page moves while it draws."""
    mouse = panel.notebook.page.mouse
    for _ in range(10):
        plot.scroll_into_view_if_needed()
        x, y = plot.evaluate(_PLACE, number)
        mouse.move(0, 0)
        mouse.move(x, y, steps=8)
        mouse.click(x, y)
        for _ in range(20):
            if done in panel.part("search-status").inner_text():
                return
            panel.notebook.page.wait_for_timeout(100)
    expect(panel.part("search-status")).to_contain_text(done)


def test_a_click_on_the_front_sets_the_controls_and_run_takes_them(panel: PanelPage) -> None:
    panel.press("search-toggle")
    panel.write("search-room", "1GiB")
    panel.choose("offload-optimizer", "host")
    panel.press("search-start")
    status = panel.part("search-status")
    expect(status).to_contain_text(re.compile(r"\d+ predicted"), timeout=RUN_SECONDS * 1000)
    peak = panel.run()
    assert peak > 0, "the live lab steps while the search goes on"
    expect(status).to_contain_text("On the front", timeout=2 * RUN_SECONDS * 1000)
    plot = panel.root.locator(".memlab-search-chart .js-plotly-plot")
    expect(plot).to_be_visible()
    found = f"{STATE}.found"
    front = panel.notebook.ask(f"[{found}.points.index(p) for p in {found}.front if not p.settings.offload_modules]")
    number = front[-1]
    name = panel.notebook.ask(f"str({found}.points[{number}].settings)")
    assert name.startswith("full uniform")
    click_point(panel, plot, number, f"The controls show '{name}'")
    expect(panel.part("recompute-granularity", "select")).to_have_value("full")
    expect(panel.part("offload-optimizer", "select")).to_have_value("host")
    panel.run()
    assert panel.notebook.ask(f"lab.records[-1].settings == {found}.points[{number}].settings")
    panel.part("search-choice", "select").select_option(index=1)
    expect(panel.part("recompute-granularity", "select")).not_to_have_value("full")


def test_a_room_that_is_none_is_a_line_and_the_panel_lives(panel: PanelPage) -> None:
    panel.press("search-toggle")
    panel.write("search-room", "much")
    panel.press("search-start")
    expect(panel.part("search-status")).to_contain_text("'much' is no size of memory")
    panel.run()
