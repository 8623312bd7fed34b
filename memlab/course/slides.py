"""Slides from the cells of a lab: a section's first paragraphs, its tables, figures, questions and what to look at."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence

import nbformat
from nbconvert import SlidesExporter

from memlab.regression.run.readable_notebook import make_readable
from memlab.regression.suite.notebooks import HIDE_INPUT_TAG, RECORD_TAG, has_tag
from memlab.regression.suite.parameters import read_parameters
from memlab.views.text.questions import NO_GUESS

PLOTLY_FILE = "plotly.min.js"
"""Draws the figures; it has to be next to the pages."""
_LONGEST_PARAGRAPHS = 2
_LOOK = "**Look at**"
_ABOUT_THE_NOTEBOOK = re.compile(r"## (Parameters|Preparation for .*|Record)$", re.MULTILINE)
"""Sections that say how to run a notebook, and what its last cell saves."""
_OF_CELLS = re.compile(r"next (two |three )?cells?\b|fields below|code is (hidden|folded)")
"""A sentence with these words says what to do in the notebook, or what its code does."""
_FOLDED = re.compile(r"<details.*?</details>", re.DOTALL)


def slides_of(executed: nbformat.NotebookNode) -> str:
    """Returns reveal.js slides as one HTML page; opened, it loads reveal.js from the network, and `PLOTLY_FILE`.

    Args:
        executed: A lab with its outputs; without outputs, slides have text only, and leave out what to look at in an
            output. It is not changed.
    """
    notebook = copy.deepcopy(executed)
    values = {name: parameter.default for name, parameter in read_parameters(executed).items()}
    notebook.cells = [each for cell in notebook.cells for each in _asked(cell, values)]
    num_figures = make_readable(notebook, as_report=True)
    is_executed = any(cell.get("outputs") for cell in notebook.cells)
    kept: list[nbformat.NotebookNode] = []
    has_output = False
    for cell in notebook.cells:
        if "slideshow" in cell.metadata:
            kept.append(cell)
            continue
        if cell.cell_type == "markdown":
            kept += _slides_of_text(cell, has_output, is_executed)
            continue
        has_output = bool(cell.get("outputs"))
        if has_output and not has_tag(cell, HIDE_INPUT_TAG) and not has_tag(cell, RECORD_TAG):
            cell.metadata["slideshow"] = {"slide_type": "subslide"}
            for output in cell.outputs:
                if output.output_type == "stream":  # the course runs labs without anybody who guesses
                    output.text = output.text.replace(f" {NO_GUESS}", "")
            kept.append(cell)
    notebook.cells = kept
    hidden = {"exclude_input": True, "exclude_input_prompt": True, "exclude_output_prompt": True}
    # A table with the figure below it is higher than a slide, and some tables are wider than reveal.js's 960 pixels.
    exporter = SlidesExporter(reveal_scroll=True, reveal_width="1280", **hidden)
    page, _ = exporter.from_notebook_node(notebook)
    script = f'<script src="{PLOTLY_FILE}"></script>' if num_figures else ""
    return str(page).replace("</head>", f"{script}</head>", 1)


def _asked(cell: nbformat.NotebookNode, values: Mapping[str, object]) -> list[nbformat.NotebookNode]:
    """Returns a slide with what a cell asks by `memlab.guess` or `memlab.quiz`; a cell that asks nothing as it is."""
    if cell.cell_type != "code" or not re.search(r"\b(guess|quiz)\(", cell.source):  # others may have magics
        return [cell]
    body = ast.parse(cell.source)
    constants = [node for node in body.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    known = dict(values) | {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in constants}
    lines: list[str] = []
    for call in ast.walk(body):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("guess", "quiz"):
            question, *others = call.args
            lines.append(f"1. {_text(question, known)}")
            for each in others:
                if isinstance(each, ast.Dict):  # the choices of a quiz
                    lines += [f"   - {_text(choice, known)}" for choice in each.keys if choice]
                else:
                    lines[-1] += f" ({_text(each, known)})"
    slide = nbformat.v4.new_markdown_cell("\n".join(lines))
    slide.metadata["slideshow"] = {"slide_type": "subslide"}
    return [slide] if lines else [cell]


def _text(node: ast.expr, values: Mapping[str, object]) -> str:
    """Returns a text of a cell, with the values of the names in it.

    Raises:
        ValueError: The text has a name whose value only a run of the lab would tell.
    """
    try:
        return str(eval(compile(ast.Expression(node), "<lab>", "eval"), {}, dict(values)))  # noqa: S307  # a lab's text
    except NameError as error:
        raise ValueError(
            f"{ast.unparse(node)}: the slides cannot ask this, because {error}: use the lab's parameters and names that"
            " the cell itself sets to constants"
        ) from error


def _announced(paragraphs: list[str], table: str) -> str:
    """Returns a table below the sentence that announces it, which ends with a colon, if there is one."""
    before = paragraphs[max(paragraphs.index(table) - 1, 0)]
    if before is table or not before.endswith(":"):
        return table
    return f"{_last_sentence(before)}\n\n{table}"


def _without_cells(paragraph: str) -> str:
    """Returns a paragraph without the sentences about the notebook's cells; one that announces a list stays."""
    sentences = _sentences(paragraph)
    return " ".join(each for each in sentences if "\n\n" in each or not _OF_CELLS.search(each))


def _without_announcement(paragraph: str, announced: Sequence[str]) -> str:
    """Returns a paragraph without its last sentence where a table's own slide has that."""
    sentence = _last_sentence(paragraph)
    repeats = any(table.startswith(f"{sentence}\n\n") for table in announced)
    return paragraph.removesuffix(sentence).rstrip() if repeats else paragraph


def _last_sentence(paragraph: str) -> str:
    return _sentences(paragraph)[-1]


def _sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.?!]) (?=[A-Z])", paragraph)


def _slides_of_text(cell: nbformat.NotebookNode, has_output: bool, is_executed: bool) -> list[nbformat.NotebookNode]:
    """Returns a slide for each section that begins in a text, one for what to look at before it, one for each table.

    Args:
        cell: The text.
        has_output: Whether a slide before it shows what it says to look at.
        is_executed: Whether outputs may follow, for which a heading alone is a slide.
    """
    slides = []
    text = _FOLDED.sub("", cell.source).strip()
    for section in re.split(r"(?m)^(?=#{1,2} )", text):
        if _ABOUT_THE_NOTEBOOK.match(section):
            continue
        # A list or a formula belongs to the paragraph that announces it.
        every = [each for each in re.split(r"\n\n+(?!- |\d+\. |    )", section) if each.strip()]
        tables = [each for each in every if each.startswith("|")]
        paragraphs = [each for each in every if each not in tables and (has_output or not each.startswith(_LOOK))]
        is_heading = section.startswith("#")
        shown = paragraphs if is_heading else [each for each in paragraphs if each.startswith(_LOOK)]
        shown = shown[: _LONGEST_PARAGRAPHS + is_heading]
        shown = [_without_cells(each) for each in shown]
        announced = [_announced(every, table) for table in tables]
        shown = [_without_announcement(each, announced) for each in shown]
        shown = [each for each in shown if each]
        is_bare_heading = section.startswith("##") and len(shown) == 1  # a title alone is a slide
        is_empty = not shown or (is_bare_heading and not is_executed and not tables)
        texts = [] if is_empty else ["\n\n".join(shown)]
        for number, shown_text in enumerate(texts + announced):
            slide = nbformat.v4.new_markdown_cell(shown_text)
            kind = "slide" if is_heading and number == 0 else "subslide"
            slide.metadata["slideshow"] = {"slide_type": kind}
            slides.append(slide)
    return slides
