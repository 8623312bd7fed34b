"""An executed notebook as an HTML file that opens without a network: text, tables and interactive figures.

nbconvert's own pages load scripts from the network and leave out plotly's figures. So the body is nbconvert's, and this
module adds one copy of plotly.js for all figures, and the text of each figure under it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import nbformat

from memlab.regression.suite.notebooks import INTERACTIVE_TAG, has_tag, headings, read_notebook

PLOTLY_MIMETYPE = "application/vnd.plotly.v1+json"

_STYLE = Path(__file__).with_name("notebook_page.css").read_text(encoding="utf-8")


def write_page(notebook_path: Path, page_path: Path, failure: str = "", plotly_js: str = "") -> None:
    """Writes an executed notebook as a page.

    Args:
        notebook_path: The executed notebook.
        page_path: The file to write.
        failure: Why the run failed; the page begins with it.
        plotly_js: Path from the page to a copy of plotly.js that it shares; if empty, the page has its own copy.

    Raises:
        ValueError: If the notebook cannot be read.
    """
    from nbconvert import HTMLExporter
    from plotly.offline import get_plotlyjs
    from pygments.formatters import HtmlFormatter

    notebook = read_notebook(notebook_path)
    title = next(filter(None, headings(notebook, with_injected=False)), notebook_path.stem)
    num_figures = _draw_figures(notebook)
    notebook.cells = [cell for cell in notebook.cells if not has_tag(cell, INTERACTIVE_TAG)]
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(notebook)
    source = f' src="{escape(plotly_js)}">' if plotly_js else f">{get_plotlyjs()}"
    script = f"<script{source}</script>" if num_figures else ""
    banner = f'<p class="failure">{escape(failure)}</p>' if failure else ""
    page_path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}{HtmlFormatter().get_style_defs('.highlight')}</style>\n{script}\n"
        f"</head><body>\n{banner}{body}\n</body></html>\n",
        encoding="utf-8",
        errors="replace",  # what a notebook prints may have half a surrogate pair
    )


def _draw_figures(notebook: nbformat.NotebookNode) -> int:
    """Replaces plotly's MIME type by HTML with the figure's text folded under it; returns the number of figures."""
    from plotly.io import to_html

    num_figures = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PLOTLY_MIMETYPE not in data:
                continue
            figure = data.pop(PLOTLY_MIMETYPE)
            html = to_html(
                {"data": figure["data"], "layout": figure["layout"]},
                config={"displaylogo": False, "responsive": True},
                include_plotlyjs=False,
                full_html=False,
                validate=False,
            )
            twin = f"<details><summary>Show as text</summary><pre>{escape(data.get('text/plain', ''))}</pre></details>"
            data["text/html"] = html + twin
            num_figures += 1
    return num_figures
