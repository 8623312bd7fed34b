"""The page that a run of a lab writes, in a browser."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

from memlab.regression.run.notebook_page import write_page

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_a_long_line_scrolls_inside_its_box_and_makes_no_page_wider_than_the_window(
    browser: Browser, tmp_path: Path
) -> None:
    line = f"{'x' * 60} = {'y' * 60}"
    code, markdown = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    printed = nbformat.v4.new_output("stream", text=f"{line}\n")
    cells = [
        code("n: int = 1  # one", metadata={"tags": ["parameters"]}),
        markdown(f"# Lines\n\n```python\n{line}\n```\n\n```\n{line}\n```"),
        markdown(f"<details><summary>An answer</summary>\n\n```\n{line}\n```\n\n</details>"),
        code(line, outputs=[printed]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    write_page(tmp_path / "notebook.ipynb", tmp_path / "page.html", tmp_path)
    page = browser.new_page(viewport={"width": 900, "height": 800})
    page.goto((tmp_path / "page.html").as_uri())
    boxes = page.locator("pre")
    assert boxes.count() == 5
    assert boxes.evaluate_all("boxes => boxes.map(box => box.scrollWidth > box.clientWidth)") == [True] * 5
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    page.close()
