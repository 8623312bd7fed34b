"""An executed notebook as an HTML file that reads like a report and opens without a network.

nbconvert's own pages load scripts from the network and leave out plotly's figures. So the body is nbconvert's, and this
module adds one copy of plotly.js for all figures, and the parameters of the run under the title. The page is light or
dark as its reader's system is.
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path

import nbformat

from memlab.regression.run.readable_notebook import REMOVE_INPUT_TAG, make_readable
from memlab.regression.suite.notebooks import read_notebook
from memlab.regression.suite.parameters import INTERACTIVE, read_parameters

_RELATIVE_LINK = re.compile(r'<a href="(?=[^":#/?]+["#?/])')
_STYLE = Path(__file__).with_name("notebook_page.css").read_text(encoding="utf-8")


def write_page(notebook_path: Path, page_path: Path, links_from: Path, failure: str = "", plotly_js: str = "") -> None:
    """Writes an executed notebook as a page.

    The page leaves out the code of cells that only run the lab, shows the parameters as a table, and opens the answers.

    Args:
        links_from: The folder that the notebook's links begin in: that of the lab, not of its executed copy.
        failure: Why the run failed; the page begins with it.
        plotly_js: Path from the page to a copy of plotly.js that it shares; if empty, the page has its own copy.

    Raises:
        ValueError: If the notebook cannot be read.
    """
    from nbconvert import HTMLExporter
    from plotly.offline import get_plotlyjs
    from traitlets.config import Config

    notebook = read_notebook(notebook_path)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^#+ +(.+)", text, re.MULTILINE)
    title = heading[1] if heading else notebook_path.stem
    parameters = _parameters_table(notebook)
    num_figures = make_readable(notebook, as_report=True)
    hiding = Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {REMOVE_INPUT_TAG}}})
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True, config=hiding)
    body, _ = exporter.from_notebook_node(notebook)
    folder = escape(Path(os.path.relpath(links_from, page_path.parent)).as_posix())
    body = _RELATIVE_LINK.sub(rf"\g<0>{folder}/", body)
    before, heading_end, after = body.partition("</h1>")
    body = f"{before}{heading_end}{parameters}{after}" if heading_end else f"{parameters}{body}"
    source = f' src="{escape(plotly_js)}">' if plotly_js else f">{get_plotlyjs()}"
    script = f"<script{source}</script>" if num_figures else ""
    banner = f'<p class="failure">{escape(failure)}</p>' if failure else ""
    page_path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}{_code_colours()}</style>\n{script}\n"
        f"</head><body>\n{banner}{body}\n</body></html>\n",
        encoding="utf-8",
        errors="replace",  # what a notebook prints may have half a surrogate pair
    )


def _code_colours() -> str:
    """Writes the colours of Python code. Each style is alone: what one colours and the other does not would stay."""
    from pygments.formatters import HtmlFormatter

    return "".join(
        f"@media (prefers-color-scheme: {scheme}) {{\n{HtmlFormatter(style=style).get_style_defs('.highlight')}\n}}\n"
        for scheme, style in (("light", "default"), ("dark", "github-dark"))
    )


def _parameters_table(notebook: nbformat.NotebookNode) -> str:
    """Writes the parameters with their values; those that the run was given are bold."""
    given = notebook.metadata.get("papermill", {}).get("parameters", {})
    rows = []
    for name, parameter in read_parameters(notebook).items():
        if name == INTERACTIVE:
            continue
        value = escape(str(given.get(name, parameter.default)))
        shown = f"<strong>{value}</strong>" if name in given else value
        rows.append(f"<tr><th>{escape(name)}</th><td>{shown}</td><td>{escape(parameter.help_text)}</td></tr>")
    note = " Values in bold were given to it." if given.keys() - {INTERACTIVE} else ""
    return (
        f'<table class="parameters"><caption>The parameters of this run.{note}</caption>{"".join(rows)}</table>'
        if rows
        else ""
    )
