"""The process of one headless run: ``python -m memlab.regression.run.execute`` in the run's folder.

It takes a request (notebook, parameters) as JSON, writes the executed notebook and its environment into
the current folder, and tells the runner by JSON lines how far it is. It does not judge the run: papermill's cell
statuses are wrong after a dead kernel or an early exit, so the runner looks at what the run left.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import traceback
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from memlab.regression.suite.notebooks import INTERACTIVE_TAG, headings, read_notebook

_REPORTED_VARIABLES = ("CUDA_", "MEMLAB_BACKEND", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_")


def main() -> int:
    """Runs the notebook; returns 0 only if every cell that ran did so without an error."""
    # Only this process may speak to the runner: what libraries and the kernel print goes to the log.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    request = json.loads(sys.argv[1])
    Path("environment.json").write_text(json.dumps(_environment(request), indent=2) + "\n")
    try:
        _execute(Path(request["notebook"]), request["parameters"], channel)
    except Exception as error:  # noqa: BLE001 - whatever ends the notebook is this process's result
        traceback.print_exc()
        _tell(channel, failure=_reason(error))
        return 1
    return 0


def _execute(notebook: Path, parameters: dict[str, Any], channel: TextIO) -> None:
    names = headings(read_notebook(notebook), with_injected=bool(parameters))
    waiting = enumerate(names, start=1)

    def on_cell_execute(cell: nbformat.NotebookNode, cell_index: int) -> None:
        number, heading = next(waiting)
        _tell(channel, cell=number, num_cells=len(names), heading=heading)

    papermill.execute_notebook(
        # papermill formats paths as templates.
        str(notebook).replace("{", "{{").replace("}", "}}"),
        "notebook.ipynb",
        parameters=parameters,
        cwd=notebook.parent,
        kernel_name="python3",
        language="python",  # a stripped notebook does not say
        progress_bar=False,
        log_output=True,
        start_timeout=120,
        # The rest are nbclient's. A widget's state is megabytes a figure, and labs show plain figures headless.
        iopub_timeout=120,
        on_cell_execute=on_cell_execute,
        skip_cells_with_tag=INTERACTIVE_TAG,
        store_widget_state=False,
    )


def _tell(channel: TextIO, **message: object) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _reason(error: Exception) -> str:
    if isinstance(error, PapermillExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, DeadKernelError):
        return "the kernel died: it crashed or was killed, most often for want of host memory"
    return f"{type(error).__name__}: {error}"


def _environment(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "request": request,
        "python": sys.version,
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_REPORTED_VARIABLES)
        },
        "packages": dict(sorted((package.name, package.version) for package in distributions())),
    }


if __name__ == "__main__":
    sys.exit(main())
