"""The chart alone on a page, without JupyterLab: plotly draws, and the mouse chooses points."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import tinycss2
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PageTimeoutError

from memlab.config.settings import MemorySettings
from memlab.views.figures.frame import SHARE_AFTER_END, Drawing
from memlab.views.figures.palette import CATEGORY_LOOKS
from memlab.views.panel.chart_data import chart_drawing
from memlab.views.panel.chart_widget import _PLOTLY_JS, _packed
from memlab.views.panel.run import Run
from memlab.views.panel.static_files import page_code, widget_code
from tests.unit.builders import TimelineBuilder, record_of

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
# What anywidget gives to `render`, with the kernel's side as a list of what it was sent.
_OPEN = """async ([code, picture]) => {
    picture.arrays = picture.arrays.map(text => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer));
    window.sent = [];
    window.memlabPlotly = window.Plotly;
    const model = { get: () => picture, set() {}, on() {}, off() {}, send: message => window.sent.push(message) };
    const url = URL.createObjectURL(new Blob([code], { type: 'text/javascript' }));
    const { default: widget } = await import(url);
    const el = document.querySelector('#chart');
    window.closeChart?.();
    el.replaceChildren();
    const drawn = new Promise(resolve => el.addEventListener('memlab-drawn', resolve));
    window.closeChart = widget.render({ model, el });
    await drawn;
}"""
# Around the chart what the panel has around it.
_IN_THE_PANEL = """([css, width, height]) => {
    const chart = document.querySelector('#chart');
    const looks = document.createElement('style');
    looks.textContent = css;
    const around = ['memlab-panel', 'memlab-timeline', 'memlab-drawing'].map(name => {
        const part = document.createElement('div');
        part.className = name;
        return part;
    });
    around[0].append(around[1]);
    around[1].append(around[2]);
    around[2].append(chart);
    document.body.replaceChildren(looks, around[0]);
    around[1].style = 'padding: 3.2rem 0 1.8rem';  // the switches and the heading, and the selected moment
    around[2].style = `width: ${width}px; height: ${height}px`;
    chart.className = 'memlab-chart';
    chart.style = '';
}"""
_ALONE = """() => {
    const chart = document.querySelector('#chart');
    chart.className = '';
    chart.style = 'width: 1100px';
    document.body.replaceChildren(chart);
}"""
# A corner is cut off if it is outside a part that hides what sticks out.
_HIDDEN_CORNERS = """() => [...document.querySelectorAll('.hoverlayer .hovertext')].flatMap(label => {
    const { left, right, top, bottom } = label.getBoundingClientRect();
    const parts = [];
    for (let part = label.parentElement; part; part = part.parentElement) parts.push(part);
    return parts.filter(part => getComputedStyle(part).overflowY !== 'visible' && part !== document.documentElement)
        .map(part => [part.getAttribute('class'), part.getBoundingClientRect()])
        .filter(([, box]) => left < box.left - 1 || right > box.right + 1 || top < box.top - 1 || bottom > box.bottom + 1)
        .map(([name, box]) => `${name}: ${left - box.left} ${box.right - right} ${top - box.top} ${box.bottom - bottom}`);
})"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """Opens a page with plotly, which takes a second to load."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_content("<div id=chart style='width: 1100px'></div>")
    page.add_script_tag(path=_PLOTLY_JS)
    yield page
    page.close()


def open_chart(page: Page, drawing: Drawing) -> None:
    picture = _packed(drawing)
    picture["arrays"] = [base64.b64encode(array).decode() for array in picture["arrays"]]
    page.evaluate(_OPEN, [widget_code("chart.js"), picture])


def place(page: Page, across: float, down: float = 0.5, plot: int = 0) -> tuple[float, float]:
    """Returns where on the page a place of a plot area is, given as shares of its width and height."""
    box = page.locator(".nsewdrag").nth(plot).bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def sent(page: Page) -> list[Any]:
    return [message["point"] for message in page.evaluate("() => window.sent.splice(0)")]


def run_with_a_long_pause() -> Run:
    """Events 0 to 99 in the first 10 ms, none for 20 ms, events 100 to 199 in the last 10 ms."""
    step = TimelineBuilder(phase="forward")
    for number in range(200):
        step.event(2**20 if number < 100 else -(2**20), "activations", after=20.0 if number == 100 else 0.1)
    record = record_of(step.build(), MemorySettings())
    return Run(number=1, scenario=record.scenario, settings=record.settings, backend="cpu", record=record)


def test_a_click_anywhere_chooses_what_was_allocated_then(page: Page) -> None:
    run = run_with_a_long_pause()
    open_chart(page, chart_drawing(run, None))
    axis_end = run.record.timeline.nanoseconds[-1] / 1e6 * (1 + SHARE_AFTER_END)

    for milliseconds, chosen in ((2.0, 19), (8.0, 79), (12.0, 99), (20.0, 99), (29.0, 99), (35.0, 150)):
        # The mouse presses where it arrives, before plotly can label a point.
        page.mouse.click(*place(page, milliseconds / axis_end))
        (point,) = sent(page)
        assert abs(point - chosen) <= 1, "an event is three pixels wide"


def test_a_click_on_a_zoomed_chart_is_read_on_its_own_axis(page: Page) -> None:
    open_chart(page, chart_drawing(run_with_a_long_pause(), None))
    page.evaluate("() => memlabPlotly.relayout(document.querySelector('.js-plotly-plot'), {'xaxis.range': [0, 10]})")

    page.mouse.click(*place(page, 0.5))

    (point,) = sent(page)
    assert abs(point - 49) <= 1


def test_a_drag_zooms_and_chooses_nothing(page: Page) -> None:
    open_chart(page, chart_drawing(run_with_a_long_pause(), None))
    page.mouse.move(*place(page, 0.2))
    page.mouse.down()
    page.mouse.move(*place(page, 0.6), steps=5)
    page.mouse.up()

    assert sent(page) == []
    assert page.evaluate("() => document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[0]") > 1


def test_a_picture_that_is_drawn_between_press_and_release_does_not_lose_the_click(page: Page) -> None:
    open_chart(page, chart_drawing(run_with_a_long_pause(), None))
    page.mouse.move(*place(page, 0.5))
    page.mouse.down()
    page.evaluate(
        "() => { const plot = document.querySelector('.js-plotly-plot');"
        " return memlabPlotly.newPlot(plot, plot.data, plot.layout); }"
    )
    page.mouse.up()

    assert sent(page) == [99]


def test_of_markers_the_nearest_within_reach_is_chosen_in_the_plot_that_was_clicked(page: Page) -> None:
    points = {"x": [1, 5], "y": [1, 5], "mode": "markers"}
    upper = points | {"uid": "choice-y", "customdata": [7, 8]}
    lower = points | {"uid": "choice-y2", "customdata": [3, 4], "yaxis": "y2"}
    axes = {"xaxis": {"range": [0, 10], "anchor": "y2"}, "yaxis": {"range": [0, 10], "domain": [0.6, 1]}}
    open_chart(page, Drawing(axes | {"yaxis2": {"range": [0, 10], "domain": [0, 0.4]}}, [upper, lower]))

    for plot, across, chosen in ((0, 0.1, [7]), (1, 0.1, [3]), (1, 0.5, [4]), (0, 0.3, [])):
        page.mouse.click(*place(page, across, 1 - across, plot))
        assert sent(page) == chosen


def test_of_overlapping_markers_a_click_chooses_the_one_whose_label_is_shown(page: Page) -> None:
    """plotly labels a large mark whose edge is nearer than a small mark's middle."""
    axes = {"xaxis": {"range": [0, 10]}, "yaxis": {"range": [0, 10]}, "hovermode": "closest"}
    marks = [
        {"uid": f"choice-y-{number}", "customdata": [number], "x": [x], "y": [5], "mode": "markers"}
        | {"marker": {"size": size}, "text": [f"mark {number}"], "hovertemplate": "%{text}<extra></extra>"}
        for number, x, size in ((7, 5.0, 24), (8, 5.15, 6))
    ]
    open_chart(page, Drawing(axes, marks))
    chosen = set()
    for across in (0.495, 0.5, 0.5096, 0.516):
        page.mouse.move(*place(page, across - 0.2))
        page.mouse.move(*place(page, across), steps=3)
        expect(page.locator(".hoverlayer .hovertext")).to_have_count(1)
        shown = page.locator(".hoverlayer .hovertext .nums").text_content()
        page.mouse.click(*place(page, across))
        (point,) = sent(page)
        assert shown == f"mark {point}"
        chosen.add(point)
    assert chosen == {7, 8}


@pytest.mark.parametrize(("width", "height"), [(470, 248), (363, 230)], ids=["laptop", "beside the file browser"])
def test_a_hover_text_is_not_cut_off_wherever_the_mouse_is(page: Page, width: int, height: int) -> None:
    page.evaluate(_IN_THE_PANEL, [page_code("panel.css"), width, height])
    pinned = run_of_all_categories(number=1)
    open_chart(page, chart_drawing(run_of_all_categories(number=2), pinned, is_bare=True))
    for across, down in ((0.01, 0.5), (0.99, 0.5), (0.5, 0.02), (0.5, 0.98), (0.5, 0.5)):
        point_at(page, across, down)
        # The shown run's bytes, and the pinned run's.
        texts = page.locator(".hoverlayer .hovertext").all_text_contents()
        assert len(texts) == 2 and any("pinned: " in each for each in texts), texts
        assert page.evaluate(_HIDDEN_CORNERS) == [], (across, down)
    page.evaluate(_ALONE)


def point_at(page: Page, across: float, down: float) -> None:
    """Moves the mouse from outside to a place in the plot, again if plotly was still busy and labelled nothing."""
    label = page.locator(".hoverlayer .hovertext")
    for _ in range(10):
        page.mouse.move(*place(page, 1.5))
        expect(label).to_have_count(0)
        page.mouse.move(*place(page, across, down), steps=3)
        with suppress(PageTimeoutError):
            label.first.wait_for(timeout=2000)
            return


def run_of_all_categories(number: int) -> Run:
    """A run whose hover text is as long as any: each category grows after the start, and two modules grow at a time."""
    step = TimelineBuilder(phase="idle")
    for category in CATEGORY_LOOKS:
        step.opening(category, 700 * 2**20)
    step.phase = "backward"
    for event in range(20):
        for layer, category in enumerate(CATEGORY_LOOKS):
            module = f"decoder.layers.{layer}.mlp.experts.linear_fc1"
            step.event(2**26 if event < 10 else -(2**26), category, module, after=0.5)
    record = record_of(step.build(), MemorySettings())
    return Run(number=number, scenario=record.scenario, settings=record.settings, backend="cpu", record=record)


def test_a_widget_that_jupyterlab_reports_as_missing_says_what_helps(page: Page) -> None:
    page.evaluate(
        "() => { const output = document.body.appendChild(document.createElement('div'));"
        " output.className = 'jp-OutputArea-output'; output.textContent = 'Error displaying widget: model not found'; }"
    )
    page.evaluate(
        "async code => { const url = URL.createObjectURL(new Blob([code], { type: 'text/javascript' }));"
        " (await import(url)).default.initialize({}); }",
        widget_code("chart.js"),
    )

    expect(page.locator(".jp-OutputArea-output")).to_contain_text("load the page again, or run this cell again")


def test_chromium_knows_every_property_and_value_of_the_css(page: Page) -> None:
    rules = tinycss2.parse_stylesheet(page_code("panel.css"), skip_comments=True, skip_whitespace=True)
    blocks = [tinycss2.parse_blocks_contents(rule.content) for rule in rules]
    nested = [
        tinycss2.parse_blocks_contents(part.content)
        for block in blocks
        for part in block
        if part.type == "qualified-rule"
    ]
    declared = [part for block in blocks + nested for part in block if part.type == "declaration"]
    pairs = [(part.lower_name, tinycss2.serialize(part.value).strip()) for part in declared]

    assert len(pairs) > 100
    assert page.evaluate("pairs => pairs.filter(([name, value]) => !CSS.supports(name, value))", pairs) == []
