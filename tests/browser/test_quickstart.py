"""The quickstart as a person runs it: all cells in JupyterLab, its figures on the page, and its panel."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.panel_page import PanelPage

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
QUICKSTART = Path(__file__).parents[2] / "labs" / "00_quickstart.ipynb"
SMALLER = {"num_layers: int = 4 ": "num_layers: int = 2 ", "seq_length: int = 1024 ": "seq_length: int = 128 "}
"""Defaults, and what replaces them: a smaller model has fewer events, and figures of the same traces."""


@pytest.fixture
def quickstart(notebook_page: NotebookPage, tmp_path: Path) -> Iterator[NotebookPage]:
    """Opens a copy of the quickstart, with a kernel of its own."""
    lab = QUICKSTART.read_text()
    for default, smaller in SMALLER.items():
        assert lab.count(default) == 1
        lab = lab.replace(default, smaller)
    (notebook_page.server.work / QUICKSTART.name).write_text(lab)
    notebook_page.complaints.clear()
    notebook_page.open(QUICKSTART.name)
    yield notebook_page
    notebook_page.page.screenshot(path=tmp_path / "page.png")
    notebook_page.close_notebook()


def numbers(column: Any) -> list[float]:
    """What plotly sends: a list, or a typed array in base64."""
    if isinstance(column, dict):
        return np.frombuffer(base64.b64decode(column["bdata"]), dtype=column["dtype"]).tolist()
    return list(column)


def test_the_quickstart_draws_each_figure_as_it_was_sent_and_ends_in_a_panel(quickstart: NotebookPage) -> None:
    quickstart.run_all()
    assert quickstart.errors() == []
    outputs = [output for cell in quickstart.outputs() for output in cell]
    sent = [output["data"].get("application/vnd.plotly.v1+json") for output in outputs if "data" in output]
    sent = [figure for figure in sent if figure]
    assert len(sent) >= 8
    drawn = quickstart.wait_for_figures(len(sent))
    titles = [figure["title"] for figure in drawn]
    for figure in sent:
        # A panel has figures of its own, so each figure that was sent is looked for by its title.
        shown = drawn[titles.index(figure["layout"]["title"]["text"])]
        assert len(shown["traces"]) == len(figure["data"])
        for trace, on_page in zip(figure["data"], shown["traces"], strict=True):
            assert on_page["x"] == numbers(trace["x"])
            assert on_page["y"] == numbers(trace["y"])
    # The panel is on the dense model, and has the runs of the cells before it.
    panel = PanelPage(quickstart)
    expect(panel.root).to_have_count(1)
    expect(panel.part("offload-modules-moe-act", "input")).to_be_disabled()
    count = panel.rows.count()
    panel.press("run")
    expect(panel.rows).to_have_count(count + 1)
    complaints = quickstart.complaints
    if Version(version("plotly")) < Version("7"):  # beside each figure, plotly 6 asks for MathJax from the internet
        complaints = [complaint for complaint in complaints if "net::ERR_NAME_NOT_RESOLVED" not in complaint]
    assert complaints == []
