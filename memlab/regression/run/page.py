"""An executed notebook as an HTML file that opens without a network: text, tables and living figures.

nbconvert's own pages load scripts from the network and leave plotly's figures out, so the body is nbconvert's
and the rest is here: one copy of plotly.js for all figures, and each figure's table under it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import nbformat

from memlab.regression.suite.notebooks import INTERACTIVE_TAG, has_tag, headings, read_notebook

PLOTLY_MIMETYPE = "application/vnd.plotly.v1+json"

_STYLE = """
body { margin: 2rem auto; max-width: 75rem; padding: 0 1.5rem; color: #1b1f24; background: #fff;
       font: 16px/1.55 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; margin: 1.8em 0 .5em; }
h1 { margin-top: 0; }
.anchor-link { display: none; }
code, pre { font: 13.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
:not(pre) > code { background: #f0f2f5; border-radius: 3px; padding: .1em .3em; }
.highlight pre { background: #f6f8fa; border-left: 3px solid #c8d1da; margin: .8em 0; overflow-x: auto;
                 padding: .7em 1em; }
.output pre { margin: .5em 0; overflow-x: auto; padding: 0 1em; }
@media (min-width: 70rem) { .output pre { white-space: pre-wrap; } }
.output_stderr pre { background: #fdf5e6; padding: .6em 1em; }
.output_error pre { background: #fdeeee; padding: .6em 1em; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #d8dee4; padding: .3em .8em; text-align: left; }
summary { color: #57606a; cursor: pointer; font-size: 14px; }
.failure { background: #fdeeee; border-left: 4px solid #b3261e; padding: .8em 1em; }
.ansi-red-fg, .ansi-red-intense-fg { color: #b3261e; }
.ansi-green-fg, .ansi-green-intense-fg { color: #1a7f37; }
.ansi-blue-fg, .ansi-cyan-fg { color: #0550ae; }
.ansi-bold { font-weight: bold; }
"""


def write_page(notebook_path: Path, page_path: Path, failure: str = "", plotly_js: str = "") -> None:
    """Writes an executed notebook as a page.

    Args:
        notebook_path: The executed notebook.
        page_path: Where the page goes.
        failure: Why the run failed; stands at the head of the page.
        plotly_js: Where the page finds plotly.js, for pages that share a copy; without it the page holds its own.

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
    )


def _draw_figures(notebook: nbformat.NotebookNode) -> int:
    """Puts HTML in the place of plotly's MIME type, with the text twin folded under it; returns how many there are."""
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
