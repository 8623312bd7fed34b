"""The panel of a live job of two ranks: both are on the page, a click enlarges one, a button leads back, Stop ends both."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import STACKS_ON_SIGNAL, NotebookPage
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
CELLS = (
    STACKS_ON_SIGNAL + "from memlab import Lab, Layout, Ranks, panel",
    "ranks = Ranks.start(2)",
    "options = {'num_layers': 2, 'seq_length': 64, 'num_microbatches': 2, 'backend': 'cpu', 'ranks': ranks}",
    "lab = Lab('qwen3-moe-tiny', layout=Layout(pipeline_model_parallel_size=2), **options)",
    "panel(lab, predict=False)",
)


@pytest.fixture(scope="module")
def job(notebook_page: NotebookPage) -> Iterator[tuple[PanelPage, NotebookPage]]:
    """Opens the panel of all tests of the job: its engines take seconds to start."""
    notebook_page.complaints.clear()
    notebook_page.open_shared(*CELLS)
    notebook_page.run_all()
    assert notebook_page.errors() == []
    yield PanelPage(notebook_page), notebook_page
    notebook_page.ask("(lab.close(), ranks.close())[0]")


def small_charts(panel: PanelPage) -> dict[int, float]:
    """Returns the highest total of each rank that the chart shows next to others, in its unit."""
    figures = [figure for figure in panel.notebook.figures() if figure["in_panel"]]
    traces = [trace for figure in figures for trace in figure["traces"]]
    return {int(trace["uid"][5:]): max(trace["y"]) for trace in traces if trace["uid"].startswith("area-")}


def test_both_ranks_are_shown_and_a_click_enlarges_one(job: tuple[PanelPage, NotebookPage]) -> None:
    panel, notebook = job
    ask, count = notebook.ask, panel.rows.count()
    panel.press("run")
    expect(panel.rows).to_have_count(count + 1)
    second = panel.root.locator(".nsewdrag[data-subplot='x2y2']")
    expect(second).to_be_visible()
    peaks = ask("[record.peak_allocated_bytes for record in lab.records[-1].ranks]")
    drawn = small_charts(panel)
    assert drawn[0] / drawn[1] == pytest.approx(peaks[0] / peaks[1], rel=1e-3)
    worst = ask("lab.records[-1].worst_rank")
    expect(panel.rows.last.locator("[data-column=worst_rank]")).to_contain_text(re.compile(rf"^{worst} \("))
    expect(panel.part("breakdown")).to_contain_text("<- worst")
    second.click()
    expect(second).to_have_count(0)
    panel.wait_for_peak(peaks[1])
    expect(panel.part("breakdown")).to_contain_text("by category")
    panel.press("all-ranks")
    expect(second).to_be_visible()
    panel.part("rank", "select").press("ArrowDown")  # from all ranks to the first one
    expect(second).to_have_count(0)
    panel.wait_for_peak(peaks[0])
    expect(panel.part("repeat")).to_contain_text("--ranks 2")
    panel.press("all-ranks")
    assert notebook.complaints == [], "what the page wrote on its console"


def test_stop_ends_the_step_of_both_ranks_the_page_says_so_and_the_next_run_works(
    job: tuple[PanelPage, NotebookPage],
) -> None:
    panel, notebook = job
    ask, count = notebook.ask, panel.rows.count()
    processes = "lab.each('audit_residency') and [one.pid for one in ranks.engines]"
    before = ask(processes)
    ask("lab.set_workload(num_microbatches=20)")
    panel.press("run")
    expect(panel.part("progress-text")).to_contain_text(re.compile(r"forward|backward"))
    panel.press("stop")
    expect(panel.part("status")).to_contain_text("the step ends on all ranks together, before the optimizer")
    expect(panel.rows).to_have_count(count + 1)
    assert ask("[record.status for record in lab.records[-1].ranks]") == ["interrupted"] * 2
    expect(panel.root.locator("tr.memlab-message")).to_contain_text(re.compile(r"rank \d: stopped in \w+"))
    expect(panel.part("status")).to_contain_text("stopped")
    expect(panel.part("stop")).to_be_disabled()
    ask("lab.set_workload(num_microbatches=2)")
    panel.press("run")
    expect(panel.rows).to_have_count(count + 2)
    assert ask("[record.status for record in lab.records[-1].ranks]") == ["ok"] * 2
    assert ask(processes) == before, "the same processes"
    expect(panel.root.locator(".nsewdrag[data-subplot='x2y2']")).to_be_visible()
    assert notebook.complaints == [], "what the page wrote on its console"
