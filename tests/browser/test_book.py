"""The book works from disk without a network: a small one, built with the settings and the extensions of the real one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, expect

from memlab.views.text.questions import quiz_html

pytest.importorskip("myst_nb", reason="Sphinx is not installed: pip install -e '.[cpu,docs]'")
pytestmark = pytest.mark.browser
BOOK = Path(__file__).parents[2] / "labs" / "book"
code, markdown, output = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell, nbformat.v4.new_output


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a book of two pages; a warning fails the build."""
    folder = tmp_path_factory.mktemp("book")
    figure = {"application/vnd.plotly.v1+json": go.Figure({"data": [{"y": [1, 3, 2]}]}).to_plotly_json()}
    quiz = quiz_html("How much?", {"Two": "It is.", "Three": "It is not."}, "Two")
    cells = [
        markdown("# Small: how much?\n\nThe [README](../README.md) says it."),
        code("size: int = 2  # of it", metadata={"tags": ["parameters"]}),
        code("interactive = False", metadata={"tags": ["injected-parameters"]}),
        code("show(it)", outputs=[output("display_data", figure | {"text/plain": "it has 2"})]),
        code(
            "quiz('secret')", metadata={"tags": ["hide-input"]}, outputs=[output("display_data", {"text/html": quiz})]
        ),
        code("answer = 0  # change me", metadata={"tags": ["interactive-only", "exercise"]}),
        code("panel(it)", metadata={"tags": ["interactive-only"]}),
    ]
    language = {"name": "python", "pygments_lexer": "ipython3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": language})
    files = {
        "README.md": "# Front\n\nRead [the lab](labs/00_small.ipynb).\n",
        "labs/book/contents.md": "\n```{toctree}\n:hidden:\n\nlabs/00_small\n```\n",
        "labs/00_small.ipynb": "{}",
        "build/book/labs/00_small/notebook.ipynb": nbformat.writes(notebook),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-c", str(BOOK), str(folder)]
    built = subprocess.run([*command, str(folder / "html")], capture_output=True, text=True, check=False)
    assert (built.stderr, built.returncode) == ("", 0)
    return folder / "html"


def test_a_lab_is_read_from_disk_without_a_network(site: Path, browser: Browser) -> None:
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        asked, failed = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.locator("article").get_by_role("link", name="the lab").click()
        expect(page.locator(".plotly-graph-div .main-svg >> nth=0")).to_be_visible(timeout=120_000)  # plotly is 5 MB
        right = page.locator("details", has_text="It is.")
        expect(right.locator("p")).to_be_hidden()
        right.locator("summary").click()
        expect(right.locator("p")).to_be_visible()
        shown = page.locator("article").inner_text()
        assert "size: int = 2" in shown
        assert "answer = 0" in shown
        assert [word for word in ("secret", "interactive", "panel(it)") if word in shown] == []
        expect(page.locator(".sidebar-tree .current-page")).to_have_text("00 Small")
        page.goto((site / "search.html").as_uri() + "?q=small")
        expect(page.locator("#search-results li a").first).to_be_visible()
    assert failed == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_pages_share_one_plotly(site: Path) -> None:
    front, lab = ((site / name).read_text() for name in ("README.html", "labs/00_small.html"))
    assert 'src="../_static/plotly.min.js"' in lab
    assert "plotly" not in front
    assert max(path.stat().st_size for path in site.rglob("*.html")) < 100_000


def test_a_broken_link_a_large_page_and_a_page_that_needs_a_network_are_found(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("site_checks", BOOK / "site_checks.py")
    assert spec is not None
    assert spec.loader is not None
    site_checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_checks)
    page = (
        '<a href="b.html#here">b</a><a href="#top">top</a><a href="https://example.org">elsewhere</a><img src="p.png">'
    )
    (tmp_path / "p.png").touch()
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<p id="here">')
    assert site_checks.complaints(tmp_path) == []
    (tmp_path / "b.html").write_text('<script src="https://example.org/x.js"></script>' + "x" * 3_000_000)
    (tmp_path / "p.png").unlink()
    found = site_checks.complaints(tmp_path)
    named = (
        "p.png, which does not exist",
        "b.html#here, and that page has no such anchor",
        "must have at most",
        "x.js",
    )
    assert [sum(part in complaint for complaint in found) for part in named] == [1, 1, 1, 1]
    assert len(found) == 4
