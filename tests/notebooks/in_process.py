"""Runs a lab's cells in this process: for tests of how runs are judged, reported and kept, whatever process ran them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat

from memlab.record.notebook_result import METRICS_MIMETYPE, RUN_FOLDER_VARIABLE
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
    try:
        with patch.dict(os.environ, variables | {RUN_FOLDER_VARIABLE: str(folder)}):
            for number, cell in enumerate(cells_that_run(lab), start=1):
                exec(cell.source, names)  # noqa: S102  # the test's own cell
                names |= parameters if number == 1 else {}
                cell.execution_count = number
    finally:
        if "lab" in names:
            names["lab"].close()
    data = {METRICS_MIMETYPE: {}, "text/plain": ""}
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    nbformat.write(lab, folder / "notebook.ipynb")
    (folder / "log.txt").touch()
    return ""
