"""The process of one headless run: ``python -m memlab.regression.run.execute`` in the run's folder.

It takes a request (notebook, parameters) as JSON, writes the executed notebook and its environment into the current
folder, and reports its progress to the runner by JSON lines. It does not judge the run: papermill's cell statuses are
wrong after a dead kernel or an early exit, so the runner reads what the run left in its folder.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import shutil
import sys
import threading
import traceback
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from memlab.regression.run.papermill_engine import ENGINE, register_engine
from memlab.regression.run.process import end_processes
from memlab.regression.suite.notebooks import INTERACTIVE_TAG, headings, read_notebook

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REPORTED_VARIABLES = ("CUDA_", "MEMLAB_BACKEND", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_")


def main() -> int:
    """Runs the notebook; returns 0 only if every cell that ran did so without an error."""
    folder = Path.cwd()
    _end_with_the_runner(folder)
    _adopt_orphans()
    # Only this process may write to the runner: what libraries and the kernel print goes to the log.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    request = json.loads(sys.argv[1])
    Path("environment.json").write_text(json.dumps(_environment(request), indent=2) + "\n")
    try:
        _execute(Path(request["notebook"]), request["parameters"], channel)
    except Exception as error:  # noqa: BLE001 - any error that ends the notebook is this process's result
        traceback.print_exc()
        _report(channel, failure=_reason(error))
        return 1
    finally:
        end_processes(folder)
    return 0


def _end_with_the_runner(folder: Path) -> None:
    """Ends the run, its kernel and its folder if the runner is killed: then its end of this process's stdin closes."""
    runner = os.dup(sys.stdin.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)

    def wait() -> None:
        os.read(runner, 1)  # the runner never writes
        end_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that `end_processes` finds every one of them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _execute(notebook: Path, parameters: dict[str, Any], channel: TextIO) -> None:
    register_engine()
    names = headings(read_notebook(notebook), with_injected=bool(parameters))
    waiting = enumerate(names, start=1)

    def on_cell_execute(cell: nbformat.NotebookNode, cell_index: int) -> None:
        number, heading = next(waiting)
        _report(channel, cell=number, num_cells=len(names), heading=heading)

    papermill.execute_notebook(
        # papermill formats paths as templates.
        str(notebook).replace("{", "{{").replace("}", "}}"),
        "notebook.ipynb",
        parameters=parameters,
        cwd=notebook.parent,
        kernel_name="python3",
        language="python",  # the metadata of a stripped notebook does not have it
        progress_bar=False,
        log_output=True,
        start_timeout=120,
        engine_name=ENGINE,
        # The others are nbclient's. Widget state takes megabytes per figure, and headless labs show plain figures.
        iopub_timeout=120,
        on_cell_execute=on_cell_execute,
        skip_cells_with_tag=INTERACTIVE_TAG,
        store_widget_state=False,
    )


def _report(channel: TextIO, **message: object) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _reason(error: Exception) -> str:
    if isinstance(error, PapermillExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, DeadKernelError):
        return "the kernel died: it crashed or was killed, most often because the host ran out of memory"
    return f"{type(error).__name__}: {error}"


def _environment(request: dict[str, Any]) -> dict[str, Any]:
    descriptions = [package.metadata for package in distributions()]  # a package's name and version each read it again
    return {
        "request": request,
        "python": sys.version,
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_REPORTED_VARIABLES)
        },
        "packages": dict(sorted((each["Name"], each["Version"]) for each in descriptions)),
    }


if __name__ == "__main__":
    sys.exit(main())
