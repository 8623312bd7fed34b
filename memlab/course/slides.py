"""Slides from the cells of a lab: a section's first paragraphs, its tables, figures, questions and what to look at."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping

import nbformat
from nbconvert import SlidesExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

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
_TO_THE_READER = re.compile(r"^(Enter your guesses|Run the next cell)[^.]*\.\s*(Their code is hidden[^.]*\.\s*)?")
"""What a paragraph may begin with that says what to do in the notebook, and to which nothing after it refers."""
_NOT_GUESSED = re.compile(rf"(?m)^.*\n  result: .* {re.escape(NO_GUESS)}\n?")
"""A question with its result. The course runs labs without anybody who guesses."""
_STYLE = """\
<style>
.reveal .slides section section { box-sizing: border-box; max-height: 700px; overflow-y: auto; }
.reveal .slides .jp-RenderedHTMLCommon table { font-size: 14px; }
.reveal .slides .jp-RenderedHTMLCommon table :is(th, td) { padding: 0.25em 0.35em; }
.reveal .slides pre { white-space: pre-wrap; word-break: normal; overflow-wrap: break-word; }
</style>"""
"""A slide is 1280 x 700 pixels of reveal.js: a taller one scrolls. Compare tables fit into 960."""
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
            kept += _slides_of_outputs(cell)
    notebook.cells = kept
    hidden = {"exclude_input": True, "exclude_input_prompt": True, "exclude_output_prompt": True}
    exporter = SlidesExporter(reveal_width="1280", **hidden)
    page, _ = exporter.from_notebook_node(notebook)
    script = f'<script src="{PLOTLY_FILE}"></script>' if num_figures else ""
    return str(page).replace("</head>", f"{_STYLE}{script}</head>", 1)


def _slides_of_outputs(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns a slide for each output of a cell, without the results of guesses; lines printed in turn share one."""
    slides: list[nbformat.NotebookNode] = []
    coalesced, _ = CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
    for output in coalesced.outputs:
        if output.output_type == "stream":
            output.text = _NOT_GUESSED.sub("", output.text)
            if not output.text.strip():
                continue
        slide = nbformat.v4.new_code_cell(outputs=[output])
        slide.metadata["slideshow"] = {"slide_type": "subslide"}
        slides.append(slide)
    return slides


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


def _announced(paragraphs: list[str], table: str) -> str | None:
    """Returns the paragraph before a table if it announces the table, which ends with a colon."""
    before = paragraphs[max(paragraphs.index(table) - 1, 0)]
    return before if before is not table and before.endswith(":") else None


def _slides_of_text(cell: nbformat.NotebookNode, has_output: bool, is_executed: bool) -> list[nbformat.NotebookNode]:
    """Returns a slide for each section that begins in a text, one for what to look at before it, one for each table.

    Args:
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
        announced = {table: _announced(every, table) for table in tables}
        texts_only = [each for each in every if each not in tables and each not in announced.values()]
        paragraphs = [each for each in texts_only if has_output or not each.startswith(_LOOK)]
        is_heading = section.startswith("#")
        shown = paragraphs if is_heading else [each for each in paragraphs if each.startswith(_LOOK)]
        shown = shown[: _LONGEST_PARAGRAPHS + is_heading]
        shown = [_TO_THE_READER.sub("", each) for each in shown]
        shown = [each for each in shown if each]
        is_bare_heading = section.startswith("##") and len(shown) == 1  # a title alone is a slide
        is_empty = not shown or (is_bare_heading and not is_executed and not tables)
        heading, texts = ([], []) if is_empty else (shown[:is_heading], shown[is_heading:])
        # A text that stands after a table is about it.
        begins = next((place for place, each in enumerate(every) if texts and each.endswith(texts[0])), len(every))
        of_tables = {table: f"{before}\n\n{table}" if before else table for table, before in announced.items()}
        early = [of_tables.pop(table) for table in tables if every.index(table) < begins]
        parts = [each for each in (*early, "\n\n".join(texts), *of_tables.values()) if each]
        parts[:1] = ["\n\n".join([*heading, *parts[:1]])] if heading else parts[:1]
        for number, shown_text in enumerate(parts):
            slide = nbformat.v4.new_markdown_cell(shown_text)
            kind = "slide" if is_heading and number == 0 else "subslide"
            slide.metadata["slideshow"] = {"slide_type": kind}
            slides.append(slide)
    return slides
