"""Runs a lab headless, under a limit on the clock, into a folder that holds a whole run or is not there.

A run has succeeded when its process ended with 0, every cell that should run has an execution count, and the last
cell handed over its metrics. Nothing else counts: a notebook whose kernel died, or that called ``sys.exit(0)``, looks
complete by its metadata.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.record.metrics import METRICS_MIMETYPE
from memlab.regression.run.page import write_page
from memlab.regression.run.process import execute
from memlab.regression.suite.notebooks import cells_that_run, check_record_cell, read_notebook
from memlab.regression.suite.parameters import ParameterValue, read_parameters, resolve

_WEEK_SECONDS = 7 * 24 * 3600
_KEPT_OF_A_FAILURE = ("environment.json", "log.txt", "notebook.ipynb", "page.html")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRun:
    """One headless run that came to its end."""

    notebook: Path
    """The lab that was run; what it became is ``notebook.ipynb`` and ``page.html`` in `folder`."""
    parameters: dict[str, ParameterValue]
    folder: Path
    metrics: dict[str, Any]
    seconds: float


class LabFailedError(Exception):
    """A run that did not come to its end."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder
        """Where its notebook, page and log are kept; the name ends in ``.failed``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLab:
    """A run whose notebook, parameters, folder and limit were checked, and that has not begun."""

    notebook: Path
    parameters: dict[str, ParameterValue]
    folder: Path
    timeout_seconds: float
    plotly_js: str = ""
    """Where its page finds plotly.js; without it the page holds its own copy, of 5 MB."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment of its process."""

    def run(self, on_progress: Callable[[str], object] = print) -> LabRun:
        """Runs the lab in a process of its own.

        Args:
            on_progress: Called with one line for each cell that begins.

        Returns:
            The run, with the metrics that its last cell handed over.

        Raises:
            LabFailedError: If the run did not come to its end.
        """
        started = time.monotonic()
        staging = self.folder.with_name(f".{self.folder.name}.running-{uuid.uuid4().hex[:8]}")
        staging.mkdir(parents=True)
        try:
            failure = execute(
                self.notebook, self.parameters, staging, self.timeout_seconds, on_progress, self.variables
            )
            failure = failure or _judge(staging)
            if failure:
                message = f"{self.notebook.name} failed {failure}"
                raise LabFailedError(message, _keep_failure(staging, self, message))
            write_page(staging / "notebook.ipynb", staging / "page.html", plotly_js=self.plotly_js)
            staging.replace(self.folder)
        finally:
            # Nothing is left of a run that Ctrl-C ended. Of one that was renamed there is nothing here.
            shutil.rmtree(staging, ignore_errors=True)
        return LabRun(
            notebook=self.notebook,
            parameters=self.parameters,
            folder=self.folder,
            metrics=json.loads((self.folder / "metrics.json").read_text()),
            seconds=time.monotonic() - started,
        )


def prepare_lab(
    notebook: Path | str, parameters: Mapping[str, object], output_folder: Path | str, timeout_seconds: float
) -> PreparedLab:
    """Checks a run before anything of it begins.

    Args:
        notebook: A lab, as in ``labs/``. It is not changed by a run.
        parameters: Values for the names in its parameters cell, of their type or as text.
        output_folder: Made by the run, and only if it succeeds. A failed run is kept beside it, as ``<name>.failed``.
        timeout_seconds: Wall-clock limit of the whole run. A run that reaches it is killed with all its processes.

    Raises:
        ValueError: If the notebook is no lab, or a parameter, the folder or the limit is wrong.
    """
    source = read_notebook(Path(notebook))
    folder = Path(output_folder).resolve()
    values = resolve(read_parameters(source), parameters)
    check_record_cell(source)
    if not 0 < timeout_seconds <= _WEEK_SECONDS:
        raise ValueError(f"timeout is {timeout_seconds:g} seconds, must be above 0 and at most a week: give another")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"output folder {folder} is not empty, and a run overwrites nothing: give another folder")
    return PreparedLab(
        notebook=Path(notebook).resolve(), parameters=values, folder=folder, timeout_seconds=timeout_seconds
    )


def run_lab(
    notebook: Path | str,
    parameters: Mapping[str, object],
    output_folder: Path | str,
    timeout_seconds: float,
    on_progress: Callable[[str], object] = print,
) -> LabRun:
    """Checks a run with `prepare_lab`, and runs it.

    Raises:
        ValueError: Before anything runs, if an argument is wrong.
        LabFailedError: If the run did not come to its end.
    """
    return prepare_lab(notebook, parameters, output_folder, timeout_seconds).run(on_progress)


def _judge(staging: Path) -> str:
    """Returns why a run whose process ended with 0 is no run after all, or an empty text."""
    cells = cells_that_run(read_notebook(staging / "notebook.ipynb"))
    never_ran = [number for number, cell in enumerate(cells, start=1) if cell.execution_count is None]
    if never_ran:
        return f"before cell {never_ran[0]} of {len(cells)}: the kernel exited early: take sys.exit() out of the lab"
    handed_over = any(METRICS_MIMETYPE in output.get("data", {}) for output in cells[-1].outputs)
    if not handed_over or not (staging / "metrics.json").is_file():
        return "in its last cell: it handed over no metrics: end that cell with the line finish(...)"
    return ""


def _keep_failure(staging: Path, lab: PreparedLab, message: str) -> Path:
    """Keeps what helps to understand a failure, and nothing that could be taken for the figures of a run."""
    failed = lab.folder.with_name(f"{lab.folder.name}.failed")
    with (staging / "log.txt").open("a") as log:
        log.write(f"{message}\n")
    try:
        write_page(staging / "notebook.ipynb", staging / "page.html", message, lab.plotly_js)
    except ValueError as error:  # killed before its first save, or in the middle of one
        with (staging / "log.txt").open("a") as log:
            log.write(f"no page was made: {error}\n")
    for path in staging.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in _KEPT_OF_A_FAILURE:
            path.unlink()
    shutil.rmtree(failed, ignore_errors=True)
    return staging.rename(failed)
