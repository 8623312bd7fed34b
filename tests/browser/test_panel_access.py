"""The panel for those who have a keyboard, a narrow page, a dark theme, or want its files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.browser.conftest import SCREEN
from tests.browser.notebook_page import ANSWER_SECONDS
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
FILE_BROWSER = 252
"""Pixels that JupyterLab's file browser takes; this page does not show it."""
# What scrolls inside itself may be wider than the page.
STICKS_OUT = """panel => {
    const edge = panel.getBoundingClientRect().right + 1;
    return [...panel.querySelectorAll('*')]
        .filter(part => part.getBoundingClientRect().right > edge && !part.closest('pre, .memlab-runs, .memlab-chart'))
        .map(part => part.outerHTML.slice(0, 200));
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_axe_finds_nothing_to_complain_of(panel: PanelPage, theme: str) -> None:
    panel.run()
    panel.tick("offload-modules-attn-proj")
    for hook in ("export-toggle", "text-toggle", "state-toggle"):
        panel.press(hook)
    page = panel.notebook.page
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    expect(page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    found = Axe().run(page, context=".memlab-panel").response["violations"]
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


def test_the_keyboard_reaches_run_and_walks_the_table(panel: PanelPage) -> None:
    panel.part("recompute-granularity", "select").focus()
    keyboard = panel.notebook.page.keyboard
    for _ in range(60):
        keyboard.press("Tab")
        if panel.root.evaluate("panel => document.activeElement.classList.contains('memlab-run')"):
            break
    for count in (1, 2):
        keyboard.press("Enter")
        expect(panel.rows).to_have_count(count)
        expect(panel.part("status")).to_contain_text(f"run {count}")
    panel.rows.last.focus()
    keyboard.press("ArrowUp")
    expect(panel.rows.first).to_have_attribute("aria-selected", "true")
    expect(panel.rows.first).to_be_focused()


def test_a_preset_a_setting_two_runs_a_pin_and_a_moment_by_the_keyboard_alone_with_visible_focus(
    panel: PanelPage,
) -> None:
    keyboard, ask = panel.notebook.page.keyboard, panel.notebook.ask
    panel.root.locator("h3").click()
    walk_to(panel, "preset")
    keyboard.press("ArrowDown")
    keyboard.press("ArrowDown")
    expect(panel.part("recompute-granularity", "select")).to_have_value("full")
    walk_to(panel, "run")
    keyboard.press("Enter")
    expect(panel.rows).to_have_count(1)
    walk_to(panel, "pin")
    keyboard.press("Space")
    expect(panel.root.locator("tr.memlab-pinned")).to_have_count(1)
    walk_to(panel, "preset", "Shift+Tab")
    keyboard.press("Home")
    keyboard.press("ArrowDown")
    expect(panel.part("recompute-granularity", "select")).to_have_value("none")
    walk_to(panel, "offload-modules-qkv-linear")
    keyboard.press("Space")
    walk_to(panel, "run")
    keyboard.press("Enter")
    expect(panel.rows).to_have_count(2)
    assert ask("[str(record.settings)[:4] for record in lab.records]") == ["full", "offl"]
    expect(panel.rows.last.locator("td").nth(3)).to_contain_text(re.compile(r"[\u2212+]?\d"))
    panel.notebook.wait_until_ready()
    panel.wait_for_peak(ask("lab.records[-1].peak_allocated_bytes"))
    assert panel.highest("pinned") == ask("lab.records[0].peak_allocated_bytes"), "one over the other"
    walk_to(panel, "moment-slider")
    moment = panel.part("moment", "input")
    peak = int(moment.input_value())
    for key, shown in (("ArrowLeft", peak - 1), ("ArrowLeft", peak - 2), ("ArrowRight", peak - 1)):
        keyboard.press(key)
        expect(moment).to_have_value(str(shown))
        expect(panel.part("breakdown")).to_contain_text(f"event {shown:,}")


def walk_to(panel: PanelPage, hook: str, key: str = "Tab") -> None:
    """Presses a key until a part of the panel has the focus, and checks that a person sees where it is."""
    looks = """([panel, hook]) => {
        const { activeElement } = document;
        if (!activeElement.closest(`.memlab-${hook}`) || !panel.contains(activeElement)) return null;
        const { outlineStyle, outlineWidth } = getComputedStyle(activeElement);
        return [activeElement.matches(':focus-visible'), outlineStyle, outlineWidth];
    }"""
    root = panel.root.element_handle()
    for _ in range(80):
        panel.notebook.page.keyboard.press(key)
        found = panel.notebook.page.evaluate(looks, [root, hook])
        if found is not None:
            assert found == [True, "solid", "2px"], hook
            expect(panel.root.locator(":focus")).to_be_in_viewport(ratio=1)
            return
    raise AssertionError(f"the keyboard does not reach {hook}")


def test_a_change_run_and_what_it_did_are_on_one_screen_with_the_cell_above(panel: PanelPage) -> None:
    panel.run()
    panel.press("pin")
    panel.choose("recompute-granularity", "full")
    panel.run()
    # The page's upper edge and the README's three lines, in one cell with an empty line, are above the panel.
    panel.root.evaluate("""panel => {
        panel.closest('.jp-Cell').style.paddingTop = '4.3rem';
        panel.closest('.jp-Cell').scrollIntoView();
    }""")
    expect(panel.rows).to_have_count(2)
    for row in panel.rows.all():
        expect(row).to_be_in_viewport(ratio=0.9)
    expect(panel.root.locator(".memlab-runs thead")).to_be_in_viewport(ratio=1)
    for hook in ("recompute-granularity", "offload-parameters", "micro-batch-size", "run", "drawing", "moment", "runs"):
        expect(panel.part(hook)).to_be_in_viewport(ratio=1)
    for caption, num_rows in (("by category", 5), ("by module that allocated it", 2)):
        table = panel.part("breakdown").locator("table", has_text=caption)
        expect(table.locator("caption")).to_be_in_viewport(ratio=1)
        for row in table.locator("tr").all()[:num_rows]:
            expect(row).to_be_in_viewport(ratio=1)


def test_nothing_moves_under_the_mouse_and_the_newest_row_and_the_base_are_in_sight(panel: PanelPage) -> None:
    places = """panel => {
        const { x, y } = panel.getBoundingClientRect();
        const hooks = ['run', 'offload-modules-attn-proj', 'pool', 'to-peak', 'pin', 'reuse', 'delete', 'export-toggle'];
        return hooks.map(hook => panel.querySelector(`.memlab-${hook}`).getBoundingClientRect()).map(
            place => [Math.round(place.x - x), Math.round(place.y - y)]);
    }"""
    before = panel.root.evaluate(places)
    panel.root.evaluate("panel => panel.scrollIntoView()")
    for granularity in ("none", "full", "selective", "none", "full", "selective"):
        panel.choose("recompute-granularity", granularity)
        panel.run()
        expect(panel.rows.last).to_be_in_viewport(ratio=1)
        # The cells of the base's row are sticky, the row is not. A border of the table's head may cover their edge.
        expect(panel.rows.first.locator("td").first).to_be_in_viewport(ratio=0.9)
        assert panel.root.evaluate(places) == before
    panel.press("pin")
    expect(panel.root.locator("tr.memlab-pinned")).to_have_count(1)
    assert panel.root.evaluate(places) == before
    cut = """panel => {
        const rows = [...panel.querySelectorAll('.memlab-runs tbody tr')];
        const edge = rows[0].cells[0].getBoundingClientRect().bottom;
        const isCut = ({ top, bottom }) => top < edge - 2 && bottom > edge + 2;
        return rows.slice(1).filter(row => isCut(row.getBoundingClientRect())).map(row => row.innerText);
    }"""
    assert panel.root.evaluate(cut) == []
    panel.tick("offload-modules-attn-proj")
    expect(panel.error_boxes).to_have_count(1)
    assert panel.root.evaluate(places) == before
    panel.rows.nth(2).click()
    # The chart has the height of its place: Plotly takes it once the page has drawn the place anew.
    fits = """panel => {
        const [around, inside] = ['.memlab-drawing', '.memlab-drawing .main-svg'].map(
            part => panel.querySelector(part).getBoundingClientRect().height);
        return inside <= around + 1;
    }"""
    panel.notebook.page.wait_for_function(fits, arg=panel.root.element_handle(), timeout=ANSWER_SECONDS * 1000)


def test_beside_the_file_browser_the_chart_the_parts_of_the_peak_and_the_table_are_readable(panel: PanelPage) -> None:
    page = panel.notebook.page
    page.set_viewport_size({"width": SCREEN["width"] - FILE_BROWSER, "height": SCREEN["height"]})
    panel.run()
    panel.press("pin")
    panel.choose("recompute-granularity", "full")
    panel.run()
    panel.root.evaluate("panel => panel.scrollIntoView()")
    plot = panel.root.locator(".memlab-timeline .nsewdrag").first.bounding_box()
    assert plot is not None
    assert plot["width"] > 270 and plot["height"] > 130
    for words in ("by category", "by module that allocated it"):
        expect(panel.part("breakdown").get_by_text(words)).to_be_in_viewport(ratio=1)
    for row in panel.rows.all():
        expect(row).to_be_in_viewport(ratio=0.9)
    panel.press("search-toggle")
    expect(panel.part("search-bar")).to_be_visible()
    controls = panel.part("search-bar", "> :is(button, .memlab-search-limit)").all()
    tops = [place["y"] for each in controls if (place := each.bounding_box())]
    assert len(tops) == 3 and max(tops) - min(tops) < 5, "the search's controls are one row"
    page.set_viewport_size(SCREEN)


@pytest.mark.parametrize("width", [SCREEN["width"], 720])
def test_nothing_sticks_out_of_the_page(panel: PanelPage, width: int) -> None:
    page = panel.notebook.page
    page.set_viewport_size({"width": width, "height": SCREEN["height"]})
    panel.tick("offload-modules-attn-proj")
    expect(panel.error_boxes).to_have_count(1)
    assert panel.root.evaluate(STICKS_OUT) == []
    page.set_viewport_size(SCREEN)


def test_exports_are_files_next_to_the_notebook(panel: PanelPage, tmp_path: Path) -> None:
    panel.run()
    panel.press("export-toggle")
    panel.write("export-folder", tmp_path.name)  # a name that no other test or round has
    folder = panel.notebook.server.work / tmp_path.name
    for hook, told, pattern in (
        ("csv", r"\.csv", "*.csv"),
        ("html", r"\.html", "*.html"),
        ("run", r"run-1(?!\.)", "*/record.json"),
    ):
        panel.press(f"export-{hook}")
        expect(panel.part("status")).to_contain_text(re.compile(told))
        assert len(list(folder.glob(pattern))) == 1, hook


def test_pictures_are_saved_or_what_they_need_is_said(panel: PanelPage, tmp_path: Path) -> None:
    panel.run()
    panel.press("export-toggle")
    panel.write("export-folder", tmp_path.name)
    for kind, beginning in (("png", b"\x89PNG"), ("svg", b"<svg")):
        panel.press(f"export-{kind}")
        if find_spec("kaleido") is None:
            expect(panel.part("status")).to_contain_text(f"{kind.upper()} needs kaleido")
        else:
            expect(panel.part("status")).to_contain_text(f".{kind}")
            (picture,) = (panel.notebook.server.work / tmp_path.name).glob(f"*.{kind}")
            assert picture.read_bytes().startswith(beginning)
