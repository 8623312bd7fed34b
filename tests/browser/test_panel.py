"""The panel on a page of JupyterLab: what is pressed there happens to the live model, and is on the page again."""

from __future__ import annotations

import re

import pytest
from megatron.core.package_info import MINOR
from playwright.sync_api import expect

from memlab.views.figures.frame import SHARE_AFTER_END
from tests.browser.conftest import PANEL_CELL
from tests.browser.notebook_page import STARTED_LATE
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
HOST = "offload_optimizer=True"
SEVERAL_DOCUMENTS = "() => window.jupyterapp.commands.execute('application:set-mode', { mode: 'multiple-document' })"
ONE_DOCUMENT = """async () => {
    const { commands, shell } = window.jupyterapp;
    for (const widget of [...shell.widgets('main')]) {
        if (widget.sessionContext) shell.activateById(widget.id);
        else widget.close();
    }
    await commands.execute('application:set-mode', { mode: 'single-document' });
}"""
HIGHEST_TOTAL = "plot => Math.max(...plot._fullData.find(trace => trace.uid === 'total').y)"


def test_a_panel_whose_widgets_start_too_late_for_anywidget_shows_its_runs(panel: PanelPage) -> None:
    page = panel.notebook.page
    with page.expect_event("pageerror", lambda error: error.message == STARTED_LATE):
        page.evaluate(
            "() => { window.timeout = AbortSignal.timeout; AbortSignal.timeout = () => window.timeout.call(AbortSignal, 0); }"
        )
        panel.notebook.run_all()
    page.evaluate("() => { AbortSignal.timeout = window.timeout; }")

    panel.run()


def test_three_settings_run_as_they_do_by_the_api(panel: PanelPage) -> None:
    plain_peak = panel.run()
    plain = panel.trace("total")
    panel.choose("recompute-granularity", "full")
    panel.write("recompute-num-layers", 1)
    panel.choose("offload-optimizer", "host")
    peak = panel.run()
    assert peak < plain_peak
    assert panel.trace("total")["y"] != plain["y"]
    ask = panel.notebook.ask
    settings = (
        f"MemorySettings(recompute_granularity='full', recompute_method='uniform', recompute_num_layers=1, {HOST})"
    )
    assert ask(f"lab.records[-1].settings == {settings}")
    assert ask(f"lab.step({settings}).peak_allocated_bytes") == peak
    expect(panel.part("repeat")).to_contain_text("memlab measure")
    panel.press("text-toggle")
    expect(panel.part("text")).to_contain_text(f"{peak:,}")


def test_a_run_is_pinned_laid_over_shown_again_and_deleted(panel: PanelPage) -> None:
    plain_peak = panel.run()
    plain = panel.trace("total")
    panel.press("pin")
    expect(panel.root.locator("tr.memlab-pinned")).to_have_count(1)
    panel.choose("offload-optimizer", "host")
    panel.tick("offload-modules-expert-fc1")
    panel.write("min-offloaded-tensor-size", 0)
    panel.run()
    pinned = panel.trace("pinned")
    assert pinned["visible"] is True
    assert panel.highest("pinned") == plain_peak
    assert set(pinned["y"]) <= set(plain["y"]), "the pinned run in the same unit"
    expect(panel.part("note-offload-modules-expert-fc1")).to_contain_text("iB")
    cut = panel.part("offload-modules-expert-fc1", ".widget-label-basic").evaluate("e => e.scrollWidth - e.clientWidth")
    assert cut <= 0, "the name beside its bytes"
    panel.rows.filter(has_not_text="offload").first.click()
    panel.wait_for_peak(plain_peak)
    panel.rows.filter(has_text="offload").click()
    panel.press("delete")
    expect(panel.rows).to_have_count(1)
    panel.wait_for_peak(plain_peak)


def test_a_moment_shows_what_is_allocated(panel: PanelPage) -> None:
    panel.run()
    breakdown = panel.part("breakdown")
    panel.write("moment", 1)
    at_the_start = breakdown.inner_text()
    assert "optimizer state" in at_the_start
    panel.part("moment-slider").get_by_role("slider").press("End")
    expect(breakdown).not_to_have_text(at_the_start)
    traces = len(panel.chart()["traces"])
    panel.part("axis", "button").last.click()
    panel.part("pool", "button").last.click()
    assert len(panel.chart()["traces"]) == traces, "one figure is reused"


def test_long_settings_leave_every_figure_of_the_table_in_sight(panel: PanelPage) -> None:
    panel.run()
    panel.choose("recompute-granularity", "full")
    panel.choose("offload-optimizer", "host")
    panel.press("state-toggle")
    panel.tick("state-expandable-segments")
    panel.write("state-garbage-collection-threshold", 0.5)
    panel.write("state-max-split-size-mb", 64)
    panel.run()
    sizes = "box => [box.scrollWidth - box.clientWidth, box.querySelectorAll('th').length]"
    assert panel.part("runs").evaluate(sizes) == [0, 7]


@pytest.mark.parametrize("axis", ["time", "event"])
def test_a_click_on_the_chart_looks_at_that_moment(panel: PanelPage, axis: str) -> None:
    panel.run()
    panel.part("axis").get_by_role("button", name=axis).click()
    title = panel.root.locator(".js-plotly-plot .xtitle")
    expect(title).to_contain_text("memory events" if axis == "event" else "time since")
    plot = panel.root.locator(".js-plotly-plot .nsewdrag").first
    box, total = plot.bounding_box(), panel.trace("total")
    assert box is not None
    end, peak = total["x"][-1], total["x"][total["y"].index(max(total["y"]))]
    moment, chosen = panel.part("moment", "input"), {}
    # The peak is shown already, so the first click is far from it.
    for share in (0.2, 0.8) if peak > end / 2 else (0.8, 0.2):
        shown = moment.input_value()
        plot.click(position={"x": share * box["width"], "y": 0.5 * box["height"]})
        expect(moment).not_to_have_value(shown)
        chosen[share] = int(moment.input_value())
        expect(panel.part("breakdown")).to_contain_text(f"event {chosen[share]:,}")
    assert chosen[0.2] < chosen[0.8], "further right is later"
    if axis == "event":
        axis_end = end * (1 + SHARE_AFTER_END)
        assert chosen == pytest.approx({share: share * axis_end for share in chosen}, abs=end / 300)


def test_a_double_click_goes_back_to_the_picture_s_own_axes(panel: PanelPage) -> None:
    panel.run()
    plot = panel.root.locator(".js-plotly-plot").first
    ranges = "plot => JSON.stringify([plot._fullLayout.xaxis.range, plot._fullLayout.yaxis.range])"
    drawn = plot.evaluate(ranges)
    plot.evaluate("plot => memlabPlotly.relayout(plot, {'xaxis.range': [1, 2]})")
    assert plot.evaluate(ranges) != drawn
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    for _ in ("back", "and there it stays"):
        panel.notebook.page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        panel.notebook.page.wait_for_timeout(1500)
        assert plot.evaluate(ranges) == drawn


def test_adapters_are_put_on_and_taken_off(panel: PanelPage) -> None:
    plain_peak, ask = panel.run(), panel.notebook.ask
    panel.press("state-toggle")
    panel.write("state-lora-rank", 8)
    assert panel.run() < plain_peak
    assert ask("lab.records[-1].scenario.state.lora.rank") == 8
    assert ask("lab.records[-1].static_bytes < lab.records[0].static_bytes / 4")
    panel.write("state-lora-rank", 0)
    assert panel.run() == plain_peak
    assert ask("lab.records[-1].scenario.state.lora is None")


def test_the_value_of_an_option_with_a_long_name_can_be_read(panel: PanelPage) -> None:
    panel.press("state-toggle")
    for option, field in (("moe-router-load-balancing-type", "select"), ("garbage-collection-threshold", "input")):
        value = panel.part(f"state-{option}", field)
        # The section is drawn after the press; what is not drawn yet has no box.
        expect(value).to_be_visible()
        box = value.bounding_box()
        assert box is not None and box["width"] >= 80, option
        name = panel.part(f"state-{option}", ".widget-label").bounding_box()
        assert name is not None and name["height"] < 28, "one line: a break in two would be in the middle of a word"


def test_an_impossible_combination_is_refused_in_the_rules_words(panel: PanelPage) -> None:
    panel.tick("offload-modules-attn-proj")
    expect(panel.error_boxes).to_have_count(1)
    expect(panel.error_boxes).to_contain_text("offload_modules has 'attn_proj' without 'core_attn'")
    run = panel.part("run")
    if run.is_enabled():
        panel.press("run")
    panel.notebook.wait_until_ready()
    assert panel.notebook.ask("len(lab.records)") == 0
    assert panel.rows.count() == 0
    panel.tick("offload-modules-core-attn")
    expect(panel.error_boxes).to_have_count(0)
    panel.press("state-toggle")
    panel.write("state-max-split-size-mb", 5)
    expect(panel.error_boxes).to_contain_text("max_split_size_mb is 5, must be a whole number of at least 20")
    panel.write("state-max-split-size-mb", 0)
    expect(panel.error_boxes).to_have_count(0)
    panel.tick("state-expandable-segments")
    expect(panel.part("state-note")).to_contain_text("a CPU has no caching allocator")
    panel.run()
    assert panel.notebook.ask("lab.records[-1].scenario.allocator.expandable_segments")


def test_a_control_that_does_not_apply_is_disabled_and_says_why(panel: PanelPage) -> None:
    for hook, reason in {
        "recompute-method": "only recompute_granularity 'full' reads it",
        "recompute-num-layers": "only recompute_granularity 'full' reads it",
        "recompute-modules-moe": "only recompute_granularity 'selective' reads it",
        "offload-modules-attn-norm": "fused into linear_qkv",
        **({"activation-offload-fraction": "0.16 does not have this setting (0.19 has it)"} if MINOR < 19 else {}),
    }.items():
        control = panel.part(hook, ":is(select, input)")
        expect(control).to_be_disabled()
        control.scroll_into_view_if_needed()
        # What the mouse meets there; a disabled control of JupyterLab's has no tooltip of its own.
        over = """control => {
            const { x, y, width, height } = control.getBoundingClientRect();
            return document.elementFromPoint(x + width / 2, y + height / 2).title;
        }"""
        assert reason in control.evaluate(over)


def test_running_out_of_memory_is_a_row_and_the_panel_lives(panel: PanelPage) -> None:
    peak = panel.run()
    panel.notebook.ask(f"setattr(lab, 'device_memory_bytes', {peak - 1})")
    panel.press("run")
    message = panel.root.locator("tr.memlab-message")
    expect(message).to_have_count(1)
    words = " ".join(panel.notebook.ask("lab.records[-1].message").split())
    expect(message).to_contain_text(words)
    panel.root.evaluate("panel => panel.scrollIntoView()")
    expect(message).to_be_in_viewport(ratio=0.8)
    assert "Traceback" not in panel.root.inner_text()
    panel.notebook.ask("setattr(lab, 'device_memory_bytes', None)")
    assert panel.run() == peak


def test_stop_ends_a_step_and_a_second_press_is_refused(panel: PanelPage) -> None:
    panel.notebook.ask("lab.set_workload(num_microbatches=500)")
    panel.press("run")
    expect(panel.part("progress-text")).to_contain_text(re.compile(r"forward|backward"))
    panel.press("run")
    expect(panel.part("status")).to_contain_text("busy")
    panel.press("stop")
    expect(panel.rows).to_have_count(1)
    assert panel.notebook.ask("lab.records[-1].status") == "interrupted"
    expect(panel.root.locator("tr.memlab-message")).to_be_visible()
    panel.notebook.ask("lab.set_workload(num_microbatches=1)")
    panel.run()


def test_a_cell_that_runs_again_shows_the_same_panel(panel: PanelPage) -> None:
    peak = panel.run()
    count = "len(__import__('ipywidgets').Widget.widgets)"
    widgets = panel.notebook.ask(count)
    panel.notebook.run_cell(PANEL_CELL)
    expect(panel.root).to_have_count(1)
    expect(panel.rows).to_have_count(1)
    panel.wait_for_peak(peak)
    assert panel.notebook.ask(count) == widgets
    panel.run()


def test_a_page_that_is_loaded_again_has_the_panel_and_its_runs(panel: PanelPage) -> None:
    peak = panel.run()
    panel.choose("recompute-granularity", "full")
    panel.run()
    panel.press("pin")
    panel.rows.first.click()
    panel.wait_for_peak(peak)
    before = [(trace["name"], trace["look"]) for trace in panel.chart()["traces"] if trace["x"]]
    panel.notebook.reload(panel.root)
    expect(panel.root).to_have_count(1)
    expect(panel.rows).to_have_count(2)
    panel.wait_for_peak(peak)
    assert [(trace["name"], trace["look"]) for trace in panel.chart()["traces"] if trace["x"]] == before
    expect(panel.part("recompute-granularity", "select")).to_have_value("full")
    panel.choose("recompute-granularity", "selective")
    panel.run()
    expect(panel.rows).to_have_count(3)


def test_in_a_tab_beside_the_notebook_run_works_and_the_chart_is_drawn(panel: PanelPage) -> None:
    page = panel.notebook.page
    page.evaluate(SEVERAL_DOCUMENTS)
    try:
        panel.root.locator("h3").click(button="right")
        page.get_by_role("menuitem", name="Create New View for Cell Output").click()
        side = PanelPage(panel.notebook, ".jp-LinkedOutputView")
        expect(side.root).to_be_visible()
        notebook = page.locator(".jp-NotebookPanel")
        whole = notebook.bounding_box()
        assert whole is not None
        right_edge = {"x": whole["width"] - 8, "y": whole["height"] / 2}
        page.get_by_role("tab", name="Output View").drag_to(notebook, target_position=right_edge)
        side.press("run")
        expect(side.rows).to_have_count(1)
        expect(side.root.locator(".memlab-timeline .nsewdrag").first).to_be_visible()
        left, right, chart = (
            part.bounding_box() for part in (notebook, page.locator(".jp-LinkedOutputView"), side.part("drawing"))
        )
        assert left is not None and right is not None and chart is not None
        assert left["x"] + left["width"] <= right["x"] <= chart["x"], "the panel is beside the notebook"
        assert chart["x"] + chart["width"] <= right["x"] + right["width"]
        drawn = side.root.locator(".memlab-timeline .js-plotly-plot").evaluate(HIGHEST_TOTAL)
    finally:
        page.evaluate(ONE_DOCUMENT)
    assert drawn * 2**20 == panel.notebook.ask("lab.records[-1].peak_allocated_bytes")
