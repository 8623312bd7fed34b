"""What a notebook must have to run as a lab, and which of its cells run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import nbformat
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

PARAMETERS_TAG = "parameters"
INJECTED_TAG = "injected-parameters"
"""papermill gives it to the cell with the values of a run."""
RECORD_TAG = "record"
EXERCISE_TAG = "exercise"
HIDE_INPUT_TAG = "hide-input"
"""Code that a page leaves out, such as a quiz's, which names the right answer."""
FOLD_INPUT_TAG = "fold-input"
"""Code that a page for a learner folds, such as formulas that the reader is to find first."""
INTERACTIVE_TAG = "interactive-only"
"""Cells that only make sense for a user at the screen; a headless run skips them."""


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Reads a notebook file.

    Raises:
        ValueError: If the file does not exist, cannot be read, or is not a notebook.
    """
    invalid: dict[str, Exception] = {}
    try:
        if not path.is_file():
            raise ValueError(f"notebook {path} does not exist: give the path of an .ipynb file, such as those in labs/")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"notebook {str(path)[:200]} cannot be read ({reason}): give an .ipynb file") from error
    try:
        with warnings.catch_warnings():
            for category in (MissingIDFieldWarning, DuplicateCellId):  # nbformat repairs both, and no run uses the ids
                warnings.simplefilter("ignore", category)
            notebook: nbformat.NotebookNode = nbformat.reads(text, as_version=4, capture_validation_error=invalid)
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise ValueError(f"{path} is not a valid notebook ({reason}): save it again in JupyterLab") from error
    if invalid:
        reason = str(invalid["ValidationError"]).partition("\n")[0][:100]
        raise ValueError(f"{path} is not a valid notebook ({reason}): save it again in JupyterLab")
    return notebook


def has_tag(cell: nbformat.NotebookNode, tag: str) -> bool:
    """Whether a cell carries a tag."""
    return tag in cell.metadata.get("tags", [])


def cells_that_run(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns the code cells that a headless run executes: not empty, and not tagged ``interactive-only``."""
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip() and not has_tag(cell, INTERACTIVE_TAG)
    ]


def check_record_cell(notebook: nbformat.NotebookNode) -> None:
    """Checks that a lab ends with the cell that calls `finish`.

    Raises:
        ValueError: If the last code cell that runs is not tagged ``record``.
    """
    cells = cells_that_run(notebook)
    if not cells or not has_tag(cells[-1], RECORD_TAG):
        raise ValueError(
            f"the last code cell is not tagged '{RECORD_TAG}', so a run could not know that it came to its end: "
            "end the notebook with a cell of that tag that calls finish(...)"
        )


def headings(notebook: nbformat.NotebookNode, *, with_injected: bool) -> list[str]:
    """Returns the heading above each cell that a headless run executes, in order.

    Args:
        notebook: A lab as it is before the run.
        with_injected: Whether the run adds a cell with its own values after the parameters cell.
    """
    found, heading = [], ""
    runs = {id(cell) for cell in cells_that_run(notebook)}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            titles = re.findall(r"^#{1,6}\s+(.+?)\s*$", cell.source, re.MULTILINE)
            heading = titles[-1] if titles else heading
        if id(cell) in runs:
            found.append(heading)
        if with_injected and has_tag(cell, PARAMETERS_TAG):
            found.append("the parameters of this run")
    return found
