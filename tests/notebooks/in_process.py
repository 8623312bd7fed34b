"""Runs a lab's cells in this process: for tests of how runs are judged, reported and kept, whatever process ran them."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat

from memlab.record.notebook_result import METRICS_MIMETYPE, RUN_FOLDER_VARIABLE, Metrics
from memlab.regression.suite.notebooks import cells_that_run, read_notebook


@contextmanager
def cells_in_this_process() -> Iterator[None]:
    """Lets nightlies, of one job, run without processes: a kernel takes seconds to start and to import torch."""
    with patch("memlab.regression.run.runner.execute", _execute):
        yield


def _execute(
    notebook: Path,
    parameters: Mapping[str, Any],
    folder: Path,
    timeout_seconds: float,
    on_progress: Callable[[str], object],
    variables: Mapping[str, str],
) -> str:
    lab = read_notebook(notebook)
    names: dict[str, Any] = {}
    (folder / "environment.json").write_text("{}")
    (folder / "log.txt").touch()
    try:
        with patch.dict(os.environ, variables | {RUN_FOLDER_VARIABLE: str(folder)}):
            for number, cell in enumerate(cells_that_run(lab), start=1):
                if isinstance(value := _run(cell.source, names), Metrics):
                    data = {METRICS_MIMETYPE: {}, "text/plain": ""}
                    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
                del value
                names |= parameters if number == 1 else {}
                cell.execution_count = number
    finally:
        if "lab" in names:
            names["lab"].close()
    nbformat.write(lab, folder / "notebook.ipynb")
    return ""


def _run(source: str, names: dict[str, Any]) -> object:
    """Runs a cell; returns what its last line shows, if that is an expression."""
    lines = ast.parse(source).body
    last = lines.pop().value if lines and isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)  # noqa: S102  # the test's own cell
    return None if last is None else eval(compile(ast.Expression(last), "cell", "eval"), names)  # noqa: S307
