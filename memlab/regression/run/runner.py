"""Runs a lab headless, with a time limit, into a folder that holds a whole run or does not exist.

A run has succeeded if its process ended with 0, every cell that should run has an execution count, and the last cell
wrote its metrics. Nothing else counts: a notebook whose kernel died, or that called ``sys.exit(0)``, looks complete by
its metadata.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from memlab.config.from_json import read_json
from memlab.record.notebook_result import METRICS_MIMETYPE
from memlab.regression.case_measurements import LEFT_TO_FINISH
from memlab.regression.one_line import one_line
from memlab.regression.run.notebook_page import write_page
from memlab.regression.run.process import execute
from memlab.regression.suite.notebooks import cells_that_run, check_record_cell, read_notebook
from memlab.regression.suite.parameters import ParameterValue, read_parameters, resolve
from memlab.regression.summary import CaseResult

_WEEK_SECONDS = 7 * 24 * 3600
_KEPT_OF_A_FAILURE = ("environment.json", "log.txt", "notebook.ipynb", "page.html")
_MAX_LOG_BYTES = 8 * 2**20
_NOTEBOOK, _PAGE, _LOG_FILE = "notebook.ipynb", "page.html", "log.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRun:
    """One headless run that came to its end."""

    notebook: Path
    """The lab that was run; the executed notebook is ``notebook.ipynb`` and ``page.html`` in `folder`."""
    parameters: dict[str, ParameterValue]
    folder: Path
    metrics: dict[str, Any]
    seconds: float


class LabFailedError(Exception):
    """A run that did not come to its end."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder
        """The folder that keeps what there is of its notebook, page and log; the name ends in ``.failed``, or in
        ``.failed-2`` and so on if there is such a folder already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLab:
    """A run that has not begun; its notebook, parameters, folder and limit were checked."""

    notebook: Path
    parameters: dict[str, ParameterValue]
    folder: Path
    timeout_seconds: float
    plotly_js: str = ""
    """Path from its page to plotly.js; if empty, the page has its own copy of 5 MB."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of its process."""

    def run(self, on_progress: Callable[[str], object] = print) -> LabRun:
        """Runs the lab in a process of its own.

        Args:
            on_progress: Called with one line for each cell that begins.

        Returns:
            The run, with the metrics that its last cell wrote.

        Raises:
            LabFailedError: If the run did not come to its end.
        """
        started = time.monotonic()
        staging = self.folder.with_name(f".{self.folder.name[:100]}.running-{uuid.uuid4().hex[:8]}")
        staging.mkdir(parents=True)
        try:
            failure, details, metrics = self._execute(staging, on_progress)
            if failure:
                message = f"{self.notebook.name} failed {failure}"
                raise LabFailedError(message, _keep_failure(staging, self, message, details))
            folder = _rename(staging, self.folder)
        finally:
            # Nothing is left of a run that a signal ended. A run that was renamed is no longer here.
            shutil.rmtree(staging, ignore_errors=True)
        return LabRun(
            notebook=self.notebook,
            parameters=self.parameters,
            folder=folder,
            metrics=metrics,
            seconds=time.monotonic() - started,
        )

    def _execute(self, staging: Path, on_progress: Callable[[str], object]) -> tuple[str, str, dict[str, Any]]:
        """Returns why the run failed, details for the log, and the metrics of a run that did not fail."""
        try:
            failure = execute(
                self.notebook, self.parameters, staging, self.timeout_seconds, on_progress, self.variables
            )
            _shorten_log(staging / _LOG_FILE)
            failure = failure or _judge(staging)
            if failure:
                return failure, "", {}
            write_page(staging / _NOTEBOOK, staging / _PAGE, self.notebook.parent, plotly_js=self.plotly_js)
            return "", "", read_json(staging / "metrics.json", LEFT_TO_FINISH)
        except Exception as error:  # noqa: BLE001 - a notebook is any code, and may leave its folder in any state
            return f"outside of its cells: {type(error).__name__}: {one_line(error)}", traceback.format_exc(), {}


def prepare_lab(
    notebook: Path | str, parameters: Mapping[str, object], output_folder: Path | str, timeout_seconds: float
) -> PreparedLab:
    """Checks a run before anything of it begins.

    Args:
        notebook: A lab, as in ``labs/``. It is not changed by a run.
        parameters: Values for the names in its parameters cell, of their type or as text.
        output_folder: The run makes it, and only if it succeeds. A failed run is kept next to it, as ``<name>.failed``,
            or as ``<name>.failed-2`` and so on if there is one.
        timeout_seconds: Wall-clock limit of the whole run. A run that reaches it is killed with all its processes.

    Raises:
        ValueError: If the notebook is not a lab, or a parameter, the folder or the limit is wrong.
    """
    source = read_notebook(Path(notebook))
    folder = Path(output_folder).resolve()
    values = resolve(read_parameters(source), parameters)
    check_record_cell(source)
    if not 0 < timeout_seconds <= _WEEK_SECONDS:
        raise ValueError(f"timeout is {timeout_seconds:g} seconds, must be above 0 and at most a week: give another")
    _check_folder(folder)
    return PreparedLab(
        notebook=Path(notebook).resolve(), parameters=values, folder=folder, timeout_seconds=timeout_seconds
    )


def _check_folder(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"output folder {folder} is not empty, and a run overwrites nothing: give another folder")
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        raise ValueError(f"output folder {folder} cannot be used ({error.strerror}): give another folder") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"output folder {folder} cannot be made in {existing}: give a folder that you may write")


def _rename(staging: Path, folder: Path) -> Path:
    """Gives a run its folder, or the next free name if the folder has something in it."""
    for number in count(2):
        try:
            return staging.rename(folder if number == 2 else folder.with_name(f"{folder.name}-{number - 1}"))
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
    raise AssertionError


def _judge(staging: Path) -> str:
    """Returns why a run has failed although its process ended with 0, or an empty text."""
    links = [path.relative_to(staging) for path in staging.rglob("*") if path.is_symlink()]
    if links:
        return f"in its folder: {links[0]} is a link, must be a file or folder: write files there"
    if not (staging / _LOG_FILE).is_file():
        return f"in its folder: {_LOG_FILE} is gone, must be the log of the run: leave that file to the runner"
    cells = cells_that_run(read_notebook(staging / _NOTEBOOK))
    never_ran = [number for number, cell in enumerate(cells, start=1) if cell.execution_count is None]
    if never_ran:
        return f"before cell {never_ran[0]} of {len(cells)}: the kernel exited early: take sys.exit() out of the lab"
    has_metrics = any(METRICS_MIMETYPE in output.get("data", {}) for output in cells[-1].outputs)
    if not has_metrics or not (staging / "metrics.json").is_file():
        return "in its last cell: it wrote no metrics: end that cell with the line finish(...)"
    return ""


def _shorten_log(log: Path) -> None:
    """Keeps the beginning and the end of a log that is too long."""
    if not log.is_file() or log.stat().st_size <= _MAX_LOG_BYTES:
        return
    half = _MAX_LOG_BYTES // 2
    with log.open("rb") as file:
        beginning = file.read(half)
        file.seek(-half, os.SEEK_END)
        log.write_bytes(beginning + b"\n[left out]\n" + file.read())


def _keep_failure(staging: Path, lab: PreparedLab, message: str, details: str) -> Path:
    """Keeps the files that explain a failure, and nothing that a reader could take for the figures of a run."""
    # A folder of its own: the notebook's may be gone, or have links and folders in the places of files.
    kept = staging.with_name(f"{staging.name}-failed")
    kept.mkdir(parents=True)
    try:
        for name in _KEPT_OF_A_FAILURE:
            path = staging / name
            if path.is_file() and not path.is_symlink():
                path.replace(kept / name)
        shutil.rmtree(staging, ignore_errors=True)  # of a full disk, so that there is space for what follows
        note = f"{details}{message}\n"
        try:
            write_page(kept / _NOTEBOOK, kept / _PAGE, lab.notebook.parent, message, lab.plotly_js)
        except Exception as error:  # noqa: BLE001 - killed before its first save or in the middle of one, or any content
            note += f"no page was made: {one_line(error)}\n"
        _append_to_log(kept, note)
        return _rename(kept, lab.folder.with_name(f"{lab.folder.name}.failed"))
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def failed(result: CaseResult, run_folder: Path, error: Exception) -> CaseResult:
    """Returns a case as failed because of an error, whose traceback goes into the case's ``log.txt``.

    Args:
        result: The case; its figures are dropped, as the error may lie in them. Its records stay in its folder.
        run_folder: Holds the case's folder.
        error: What stopped the case, its judgement or its part of the report.
    """
    message = one_line(error, 1000) if isinstance(error, ValueError) else f"{type(error).__name__}: {one_line(error)}"
    try:
        (run_folder / result.folder).mkdir(parents=True, exist_ok=True)
        _append_to_log(run_folder / result.folder, "".join(traceback.format_exception(error)))
    except OSError as unwritable:
        message += f" (its log could not be written: {unwritable.strerror})"
    return replace(result, status="failed", message=message, differences=(), measured=None, baseline=None)


def _append_to_log(folder: Path, text: str) -> None:
    """Adds lines to the log of a run."""
    with (folder / _LOG_FILE).open("a", encoding="utf-8", errors="backslashreplace") as log:
        log.write(text)
