"""The labs as students get them: without the answers to the exercises, and with points for nbgrader."""

from __future__ import annotations

import ast
import copy
import re

import nbformat

from memlab.exercises.checks import CHECKED
from memlab.regression.suite.notebooks import EXERCISE_TAG, has_tag

_SUMMARY = r"<summary><strong>Answers?</strong> to the (?:exercise|task)"
"""The first lab has tasks, which nothing checks, in place of exercises."""
_ANSWERS = re.compile(rf"<details>{_SUMMARY}.*?</details>\n*", re.DOTALL)
_MISSED = "a goal is missed: the line printed above says how; change the answer, and run its cell and this one again"
_TURN = "## Your turn\n"
_TWO_CELLS = "Each exercise has two cells: the first is your answer, and the next one checks it. Run both.\n"
_INSTALL = """\
import sys

if "google.colab" in sys.modules:
    %pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu '{requirement}'"""


def student_notebook(lab: nbformat.NotebookNode, requirement: str | None) -> nbformat.NotebookNode:
    """Returns a lab without the answers to its exercises, each of which nbgrader can grade.

    An exercise becomes two cells: the answer, which a student changes, and the check, which fails if a goal is missed
    and gives a point per exercise. Quizzes keep their answers, because they explain each choice when it is clicked.

    Args:
        lab: A lab; it is not changed.
        requirement: What pip installs on Colab, such as the address of a wheel; None leaves that cell out.
    """
    notebook = copy.deepcopy(lab)
    cells: list[nbformat.NotebookNode] = []
    if requirement is not None:
        cells.append(nbformat.v4.new_code_cell(_INSTALL.format(requirement=requirement), id="install"))
    has_checks = any(has_tag(cell, EXERCISE_TAG) for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = _ANSWERS.sub("", cell.source)
        if has_checks:
            cell.source = cell.source.replace(_TURN, f"{_TURN}\n{_TWO_CELLS}")
        cells += _graded(cell) if has_tag(cell, EXERCISE_TAG) else [cell] if cell.source.strip() else []
    notebook.cells = cells
    return notebook


def solved_notebook(lab: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Returns a lab whose answers to the exercises are open."""
    notebook = copy.deepcopy(lab)
    for cell in notebook.cells:
        cell.source = re.sub(f"<details>({_SUMMARY})", r"<details open>\1", cell.source)
    return notebook


def _graded(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Splits an exercise into the answer and the check, with the metadata of nbgrader's schema 3."""
    last = ast.parse(cell.source).body[-1]
    lines = cell.source.splitlines()
    answer, goals = lines[: last.lineno - 1], lines[last.lineno - 1 :]
    check = copy.deepcopy(cell)
    cell.source = "\n".join(answer).rstrip()
    # An answer with a syntax error does not run, so the check itself forgets the answer before it, even a wrong one.
    judged = [f'{name} = "{CHECKED}"  # the next check needs a new answer' for name in _judged("\n".join(answer), last)]
    lines = ["is_reached = bool(", *(f"    {line}" for line in goals), ")", *judged, f"assert is_reached, {_MISSED!r}"]
    check.source = "\n".join(lines)
    check.id = f"{cell.id}-check"
    for each, is_answer in ((cell, True), (check, False)):
        name = f"{each.id}"
        kind = {"solution": is_answer, "grade": not is_answer, "locked": not is_answer, "task": False}
        points = {} if is_answer else {"points": 1}
        each.metadata["nbgrader"] = {"schema_version": 3, "grade_id": name, "cell_type": "code", **kind, **points}
    return [cell, check]


def _judged(answer: str, goals: ast.stmt) -> list[str]:
    """Returns the names that an answer gives to a value, a block or a function, and that its check judges."""
    nodes = list(ast.walk(ast.parse(answer)))
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    judged = [
        argument
        for call in ast.walk(goals)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
        for argument in call.args
    ]
    names = [node.id for each in judged for node in ast.walk(each) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(names) if name in given]
