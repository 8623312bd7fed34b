"""Slides from the cells of a lab: one per section, with its first paragraphs, tables, figures and what to look at."""

from __future__ import annotations

import copy
import re

import nbformat
from nbconvert import SlidesExporter

from memlab.regression.run.readable_notebook import make_readable
from memlab.regression.suite.notebooks import HIDE_INPUT_TAG, RECORD_TAG, has_tag

PLOTLY_FILE = "plotly.min.js"
"""Draws the figures; it has to be next to the pages."""
_LONGEST_PARAGRAPHS = 2
_FOLDED = re.compile(r"<details.*?</details>", re.DOTALL)


def slides_of(executed: nbformat.NotebookNode) -> str:
    """Returns reveal.js slides as one HTML page; opened, it loads reveal.js from the network, and `PLOTLY_FILE`.

    Args:
        executed: A lab with its outputs; without outputs, slides have text only. It is not changed.
    """
    notebook = copy.deepcopy(executed)
    num_figures = make_readable(notebook, as_report=True)
    kept: list[nbformat.NotebookNode] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            kept += _slides_of_text(cell)
        elif cell.get("outputs") and not has_tag(cell, HIDE_INPUT_TAG) and not has_tag(cell, RECORD_TAG):
            cell.metadata["slideshow"] = {"slide_type": "subslide"}
            kept.append(cell)
    notebook.cells = kept
    exporter = SlidesExporter(exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(notebook)
    script = f'<script src="{PLOTLY_FILE}"></script>' if num_figures else ""
    return str(page).replace("</head>", f"{script}</head>", 1)


def _slides_of_text(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns a slide for each section that begins in a text, one for what to look at before it, one for each table."""
    slides = []
    text = _FOLDED.sub("", cell.source).strip()
    for section in re.split(r"(?m)^(?=#{1,2} )", text):
        # A list belongs to the paragraph that announces it.
        every = [each for each in re.split(r"\n\n+(?!- |\d+\. )", section) if each.strip()]
        tables = [each for each in every if each.startswith("|")]
        paragraphs = [each for each in every if each not in tables]
        is_heading = section.startswith("#")
        shown = paragraphs if is_heading else [each for each in paragraphs if each.startswith("**Look at**")]
        texts = ["\n\n".join(shown[: _LONGEST_PARAGRAPHS + is_heading])] if shown else []
        for number, shown_text in enumerate(texts + tables):
            slide = nbformat.v4.new_markdown_cell(shown_text)
            kind = "slide" if is_heading and number == 0 else "subslide"
            slide.metadata["slideshow"] = {"slide_type": kind}
            slides.append(slide)
    return slides
