"""One JupyterLab server and one chromium for all tests of a process; a page and a kernel for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import ARGS, NoChromiumError, find_chromium
from tests.browser.notebook_page import NotebookPage
from tests.browser.server import JupyterServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Starts chromium without a window, after installing it where that is needed and allowed."""
    from playwright.sync_api import sync_playwright

    try:
        path = find_chromium()
    except NoChromiumError as reason:
        pytest.skip(str(reason))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """Starts JupyterLab, once there is a browser to look at it."""
    with JupyterServer(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture
def notebook_page(browser: Browser, server: JupyterServer, tmp_path: Path) -> Iterator[NotebookPage]:
    """Opens a page as wide as a laptop's screen; what it shows at the test's end stays in the test's folder."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield NotebookPage(page, server)
    page.screenshot(path=tmp_path / "page.png")
    page.close()
    server.end_kernels()
