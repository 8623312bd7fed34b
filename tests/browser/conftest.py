"""One JupyterLab server, one chromium and one page with JupyterLab for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

from tests.browser.chromium import ARGS, NoChromiumError, find_chromium
from tests.browser.notebook_page import ANSWER_SECONDS, STACKS_ON_SIGNAL, NotebookPage
from tests.browser.panel_page import PanelPage
from tests.browser.server import JupyterServer

expect.set_options(timeout=ANSWER_SECONDS * 1000)
SCREEN: ViewportSize = {"width": 1280, "height": 800}
CELLS = (
    STACKS_ON_SIGNAL + "from memlab import Lab, MemorySettings, panel",
    'lab = Lab("qwen3-moe-tiny", num_layers=2, seq_length=256)',
    "panel(lab, predict=False)",
)
PANEL_CELL = len(CELLS) - 1


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Starts chromium without a window, after installing it where that is needed and allowed."""
    try:
        path = find_chromium()
    except NoChromiumError as reason:
        pytest.skip(str(reason))
    with sync_playwright() as playwright:
        # Users have scrollbars, which take room.
        browser = playwright.chromium.launch(executable_path=path, args=ARGS, ignore_default_args=["--hide-scrollbars"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """Starts JupyterLab, once there is a browser to look at it."""
    with JupyterServer(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture(scope="session")
def notebook_page(
    browser: Browser, server: JupyterServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NotebookPage]:
    """Opens the page of all notebooks, as wide as a laptop's screen: JupyterLab takes seconds to load."""
    notebook = NotebookPage(browser.new_page(viewport=SCREEN), server)
    yield notebook
    notebook.close(tmp_path_factory.mktemp("notebook") / "page.png")


@pytest.fixture
def panel(notebook_page: NotebookPage) -> Iterator[PanelPage]:
    """Gives each test a new lab and its panel, and fails the test if the page wrote errors on its console."""
    notebook_page.complaints.clear()
    notebook_page.open_shared(*CELLS)
    try:
        notebook_page.run_all()
        assert notebook_page.errors() == []
        panel = PanelPage(notebook_page)
        expect(panel.root.locator(".js-plotly-plot")).to_be_visible()
        yield panel
    finally:
        notebook_page.ask("lab.close()")  # an open lab would put a warning under the next test's cell
    assert notebook_page.complaints == [], "what the page wrote on its console"
