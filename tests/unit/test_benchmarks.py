"""What a benchmark imports exists and takes what it is called with: most benchmarks need a GPU, and no test runs them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.figures import synthetic_job, synthetic_record
from memlab.views.text.record import record_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_MISSING = object()


def test_every_name_that_a_benchmark_imports_exists_and_takes_the_arguments_of_its_calls() -> None:
    wrong = []
    for path in BENCHMARKS.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = dict(_imported(tree))
        wrong += [f"{path.name}: {name} is not there" for name, value in imported.items() if value is _MISSING]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = imported.get(node.func.id)
                complaint = _complaint(called, node) if callable(called) else ""
                wrong += [f"{path.name}:{node.lineno}: {node.func.id}: {complaint}"] * bool(complaint)
    assert not wrong, "\n".join(wrong)


def test_a_step_that_was_made_up_has_a_table() -> None:
    record = synthetic_record(num_events=100, num_modules=3)
    assert "qwen3-30b-a3b" in record_table(record)
    assert len(synthetic_job().ranks) == 8


def _imported(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Each name that is imported of memlab, of its tests or of another benchmark, with what it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("benchmarks."):
            for alias in node.names if node.module.partition(".")[0] in ("memlab", "tests") else ():
                is_module = find_spec(node.module).submodule_search_locations and find_spec(
                    f"{node.module}.{alias.name}"
                )
                value = getattr(import_module(node.module), alias.name, _MISSING)
                yield alias.asname or alias.name, value if value is not _MISSING else is_module or _MISSING
        elif (
            isinstance(node, ast.ImportFrom) and node.module
        ):  # not imported: some need packages that are not installed
            names = set(_defined(ast.parse((BENCHMARKS / f"{node.module.removeprefix('benchmarks.')}.py").read_text())))
            yield from ((alias.asname or alias.name, None if alias.name in names else _MISSING) for alias in node.names)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module has once it is imported."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        else:
            yield from (
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )


def _complaint(called: Callable[..., Any], call: ast.Call) -> str:
    """Why the object does not take the arguments of a call; empty where it does, or where the call does not say them."""
    if any(isinstance(each, ast.Starred) for each in call.args) or not all(each.arg for each in call.keywords):
        return ""
    try:
        inspect.signature(called).bind(*call.args, **{str(each.arg): each.value for each in call.keywords})
    except TypeError as error:
        return str(error)
    return ""
