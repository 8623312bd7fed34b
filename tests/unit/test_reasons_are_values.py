"""No code decides by a text for people or by the name of a family: errors have fields, notices kinds, families rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlab.config.families import FAMILIES

MEMLAB = Path(__file__).parents[2] / "memlab"
TEXTS = ("notice", "validation_error", "message")
READERS = ("startswith", "endswith", "partition", "rpartition", "removeprefix", "find", "index", "count")


def readings(tree: ast.AST) -> Iterator[ast.AST]:
    """Every expression whose value depends on what a text says; its first line is cut off to be shown."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = [ast.unparse(argument) for argument in node.args]
            if node.func.attr in READERS and words != [repr("\n")]:
                yield node.func.value


def is_text_for_people(node: ast.expr, errors: set[str]) -> bool:
    """Whether it is ``str(error)`` of a caught error, or an attribute that is known to be a text for people."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(value, ast.Name) and value.id in errors for value in node.args)
    return isinstance(node, ast.Attribute) and node.attr in TEXTS


def read_texts(source: str) -> list[int]:
    """The lines that read a text for people to decide something; whether there is a text at all may be asked."""
    tree = ast.parse(source)
    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    return [
        inner.lineno
        for reading in readings(tree)
        for inner in ast.walk(reading)
        if isinstance(inner, ast.expr) and is_text_for_people(inner, errors)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "if state.notice.startswith('Not started'): pass",
        "if 'busy' in lab.message: pass",
        "reason = run.message.partition(', but ')[2]",
        "try: step()\nexcept ValueError as error:\n    if 'memory' in str(error): pass",
        "try: step()\nexcept ValueError as error:\n    word = str(error).partition(':')[0]",
        "[run for run in runs if run.notice == 'ok']",
    ],
)
def test_a_text_that_is_read_is_found(source: str) -> None:
    assert read_texts(source)


def test_whether_there_is_a_text_may_be_asked() -> None:
    assert not read_texts("if state.validation_error: print(state.validation_error)")


def test_no_code_reads_a_text_for_people() -> None:
    found = {path.name: lines for path in MEMLAB.rglob("*.py") if (lines := read_texts(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize("path", sorted(MEMLAB.rglob("*.py")), ids=lambda path: str(path.relative_to(MEMLAB)))
def test_what_differs_between_families_is_in_their_rows(path: Path) -> None:
    compared = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare))
    constants = (each for node in compared for each in ast.walk(node) if isinstance(each, ast.Constant))
    names = [each.lineno for each in constants if each.value in FAMILIES]
    # Sizes without a name have the family that this file chooses for them.
    assert not names or path == MEMLAB / "jobs" / "model.py"
