"""An executed notebook as a page shows it: figures that draw themselves, and no code that only runs the lab."""

from __future__ import annotations

import re
from html import escape
from itertools import zip_longest

import nbformat

from memlab.regression.suite.notebooks import (
    EXERCISE_TAG,
    FOLD_INPUT_TAG,
    HIDE_INPUT_TAG,
    INJECTED_TAG,
    INTERACTIVE_TAG,
    PARAMETERS_TAG,
    RECORD_TAG,
    has_tag,
)

PLOTLY_MIMETYPE = "application/vnd.plotly.v1+json"
_PLUMBING_TAGS = frozenset({HIDE_INPUT_TAG, INJECTED_TAG, RECORD_TAG})
REMOVE_INPUT_TAG = "remove-input"
"""MyST-NB leaves out the code of a cell with this tag, and so does nbconvert as `notebook_page` configures it."""
_MYST_FOLD_TAG = "hide-input"
"""MyST-NB folds the code of a cell with this tag, unless the cell has `REMOVE_INPUT_TAG` too."""
_WIDGET_MIMETYPE = "application/vnd.jupyter.widget-view+json"  # an executed notebook has no widget state to draw from
_HEADING = re.compile(r"(#+) ")
_ONLY_HEADING = re.compile(r"(#+) [^\n]*\s*")
_FOLDED = re.compile(r"<details(?![^>]*\sopen\b)")


def make_readable(notebook: nbformat.NotebookNode, *, as_report: bool) -> int:
    """Prepares an executed notebook for a page, in place: cells that only run the lab show their outputs alone.

    Args:
        notebook: An executed notebook.
        as_report: For a reader who wants the results: answers are open, and exercises and the code of the parameters
            are left out. Otherwise the page is for a reader who learns: answers and formulas are folded, and exercises
            are shown.

    Returns:
        The number of figures. The page must load plotly.js if there is one.
    """
    hidden_tags = _PLUMBING_TAGS | ({PARAMETERS_TAG} if as_report else set())
    num_figures = 0
    kept = []
    for cell in notebook.cells:
        if has_tag(cell, INTERACTIVE_TAG) and (as_report or not has_tag(cell, EXERCISE_TAG)):
            continue
        outputs = cell.get("outputs", [])
        if cell.cell_type == "markdown" and as_report:
            cell.source = _FOLDED.sub("<details open", cell.source)
        for output in outputs:
            data = output.get("data", {})
            data.pop(_WIDGET_MIMETYPE, None)
            if as_report and isinstance(data.get("text/html"), str):
                data["text/html"] = _FOLDED.sub("<details open", data["text/html"])
            if PLOTLY_MIMETYPE in data:
                data["text/html"] = _figure_html(data.pop(PLOTLY_MIMETYPE), data.get("text/plain", ""))
                num_figures += 1
        if cell.cell_type == "code" and any(has_tag(cell, tag) for tag in hidden_tags):
            if not outputs:
                continue
            if not any(output.output_type == "error" for output in outputs):
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), REMOVE_INPUT_TAG]
        kept.append(cell if as_report else _folded(cell))
    notebook.cells = [cell for cell, after in zip_longest(kept, kept[1:]) if not _is_heading_of_nothing(cell, after)]
    return num_figures


def _folded(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Marks a cell for MyST-NB, in place, if the reader is to find by themselves what its code says."""
    if has_tag(cell, FOLD_INPUT_TAG):
        cell.metadata["tags"] = [*cell.metadata["tags"], _MYST_FOLD_TAG]
    return cell


def _is_heading_of_nothing(cell: nbformat.NotebookNode, after: nbformat.NotebookNode | None) -> bool:
    """Whether a cell is only a heading, and all cells of its section were left out."""
    heading = _ONLY_HEADING.fullmatch(cell.source) if cell.cell_type == "markdown" else None
    if heading is None:
        return False
    next_heading = _HEADING.match(after.source) if after is not None and after.cell_type == "markdown" else None
    return after is None or (next_heading is not None and len(next_heading[1]) <= len(heading[1]))


def _figure_html(figure: nbformat.NotebookNode, text: str) -> str:
    """Returns a figure that draws itself with the page's plotly.js, with its text folded under it."""
    from plotly.io import to_html

    html = to_html(
        {"data": figure["data"], "layout": figure["layout"]},
        config={"displaylogo": False, "responsive": True},
        include_plotlyjs=False,
        full_html=False,
        validate=False,
    )
    return f"{html}<details><summary>Show as text</summary><pre>{escape(text)}</pre></details>"
