"""The panel for those who have a keyboard, a narrow page, a dark theme, or want its files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import SCREEN
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
NAMELESS = """panel => [...panel.querySelectorAll('input, select, textarea, button')]
    .filter(control => control.offsetParent !== null)
    .filter(control => ![control.labels?.[0]?.textContent, control.ariaLabel, control.title, control.textContent]
        .some(name => name?.replaceAll('\\u200b', '').trim()))
    .map(control => control.outerHTML)"""
# What scrolls inside itself may be wider than the page.
STICKS_OUT = """panel => {
    const edge = panel.getBoundingClientRect().right + 1;
    return [...panel.querySelectorAll('*')]
        .filter(part => part.getBoundingClientRect().right > edge && !part.closest('pre, .memlab-runs, .memlab-chart'))
        .map(part => part.outerHTML.slice(0, 200));
}"""
# The contrast of WCAG 2: text against the first ground behind it that is not transparent.
FAINT = """panel => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = numbers(colour).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = part => {
        for (; part; part = part.parentElement) {
            const colour = getComputedStyle(part).backgroundColor;
            if ((numbers(colour)[3] ?? 1) === 1) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const texts = [...panel.querySelectorAll('label, h3, h4, td, th, caption, pre, select, input, button, [role], span')];
    return texts
        .filter(part => part.offsetParent !== null && part.innerText?.trim() && !part.closest(':disabled'))
        .map(part => [light(getComputedStyle(part).color), light(ground(part)), part])
        .map(([ink, paper, part]) => [(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), part])
        .filter(([contrast]) => contrast < 4.5)
        .map(([contrast, part]) => `${contrast.toFixed(1)} ${part.outerHTML.slice(0, 200)}`);
}"""


def test_every_control_has_a_name(panel: PanelPage) -> None:
    panel.run()
    assert panel.root.evaluate(NAMELESS) == []
    expect(panel.root.get_by_role("slider")).to_have_count(1)
    for slider in panel.root.get_by_role("slider").all():
        expect(slider).to_have_accessible_name(re.compile(r"\w"))


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


def test_a_change_run_and_what_it_did_are_on_one_screen(panel: PanelPage) -> None:
    panel.run()
    panel.choose("recompute-granularity", "full")
    panel.run()
    panel.root.evaluate("panel => panel.scrollIntoView()")
    for hook in ("recompute-granularity", "offload-parameters", "micro-batch-size", "run", "drawing", "moment", "runs"):
        expect(panel.part(hook)).to_be_in_viewport(ratio=1)
    for words in ("by category", "by module that allocated it"):
        expect(panel.part("breakdown").get_by_text(words)).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("width", [SCREEN["width"], 720])
def test_nothing_sticks_out_of_the_page(panel: PanelPage, width: int) -> None:
    page = panel.notebook.page
    page.set_viewport_size({"width": width, "height": SCREEN["height"]})
    panel.tick("offload-modules-attn-proj")
    expect(panel.error_boxes).to_have_count(1)
    assert panel.root.evaluate(STICKS_OUT) == []
    page.set_viewport_size(SCREEN)


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_text_is_readable(panel: PanelPage, theme: str) -> None:
    panel.run()
    panel.tick("offload-modules-attn-proj")
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
    panel.notebook.page.evaluate(change, theme)
    expect(panel.notebook.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    assert panel.root.evaluate(FAINT) == []


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
