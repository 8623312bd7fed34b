"""Puts the executed notebook of each lab in the lab's place, and one copy of plotly.js next to the pages.

`memlab run` has executed the labs into the folder `executed_labs` of Sphinx's configuration: one folder for each lab.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from docutils import nodes
from sphinx.errors import ExtensionError

from memlab.regression.run.readable_notebook import make_readable
from memlab.regression.suite.notebooks import read_notebook

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PLOTLY_FILE = "plotly.min.js"


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.add_config_value("executed_labs", "build/book/labs", "env", str)
    app.connect("source-read", _read_executed)
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _shorten_title, priority=900)  # after Sphinx has collected the titles
    app.connect("html-page-context", _load_plotly)
    app.connect("build-finished", _write_plotly)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _read_executed(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces a lab by its executed notebook, with a line under its title that says what the page is."""
    if Path(app.env.doc2path(name)).suffix != ".ipynb":
        return
    executed = Path(app.srcdir, app.config.executed_labs, Path(name).name, "notebook.ipynb")
    if not executed.is_file():
        raise ExtensionError(f"{name}.ipynb has not run: {executed} does not exist: build the book with make docs")
    app.env.dependencies[name].add(str(executed))
    notebook = read_notebook(executed)
    make_readable(notebook, as_report=False)
    notebook.cells[0].source = _with_note(notebook.cells[0].source, name)
    source[0] = nbformat.writes(notebook)


def _with_note(text: str, name: str) -> str:
    """Adds a note below the first line, the lab's title."""
    title, _, rest = text.partition("\n")
    note = (
        "```{note}\nThis page shows the lab as it ran when the book was built. To try the exercises and to change "
        f"something, open `{Path(name).name}.ipynb` in JupyterLab: `make lab`.\n```"
    )
    return f"{title}\n\n{note}\n{rest}"


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the table of contents to the first page; on GitHub, the README stays free of Sphinx's directives."""
    if name == app.config.root_doc:
        source[0] += Path(app.srcdir, "labs", "book", "contents.md").read_text(encoding="utf-8")


def _shorten_title(app: Sphinx, doctree: nodes.document) -> None:
    """Gives a lab a short title in the lists of pages: its number, and what is before the colon."""
    name = app.env.docname
    number, _, rest = Path(name).name.partition("_")
    if rest and number.isdigit():
        title = f"{number} {app.env.titles[name].astext().partition(':')[0]}"
        app.env.titles[name] = nodes.title("", title)
        whole_page = next(app.env.tocs[name].findall(nodes.reference))
        whole_page.children = [nodes.Text(title)]


def _load_plotly(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Loads plotly.js before the figures of a page, which draw themselves as the browser reads them."""
    if "Plotly.newPlot(" in context.get("body", ""):
        # In the head of the page: the theme loads what `add_js_file` adds at the end, after the figures.
        context["metatags"] += f'<script src="{context["pathto"](f"_static/{PLOTLY_FILE}", True)}"></script>'


def _write_plotly(app: Sphinx, error: Exception | None) -> None:
    from plotly.offline import get_plotlyjs

    if error is None and app.builder.format == "html":
        Path(app.outdir, "_static", PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
