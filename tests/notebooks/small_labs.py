"""Small notebooks that are run headless without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat

from memlab.regression.run.runner import LabRun, prepare_lab

PARAMETERS = "count: int = 1\nrate: float = 0.5\nname: str = 'a'\nmodules: list[str] = []\ninteractive: bool = True"
RECORD = """\
from memlab import MemorySettings, Scenario, StepRecord, finish
record = StepRecord(
    scenario=Scenario.of(architecture="phi-4-tiny"), settings=MemorySettings(), backend="cpu", versions={"torch": "0"},
    step_index=2, static_bytes=10, peak_allocated_bytes=30, activation_peak_bytes=20, residual_bytes=0, host_bytes=0,
    peak_by_category={"parameters": 30}, peak_by_module={"embedding": 30}, loss=1.5,
)
finish({"plain": record}, count=count)
"""


def write_lab(
    folder: Path,
    *sources: str,
    parameters: str | None = PARAMETERS,
    record: str | None = RECORD,
    name: str = "small lab {x}",
) -> Path:
    """Writes a lab with the given code cells between its parameters and its record cell."""
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [markdown("# A small lab")]
    if parameters is not None:
        cells.append(code(parameters, metadata={"tags": ["parameters"]}))
    for number, source in enumerate(sources, start=1):
        cells += [markdown(f"## Part {number}"), code(source)]
    if record is not None:
        cells += [markdown("## Record"), code(record, metadata={"tags": ["record"]})]
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def run_lab(
    lab: Path,
    parameters: dict[str, object],
    folder: Path,
    timeout_seconds: float,
    on_progress: Callable[[str], object] = print,
) -> LabRun:
    """Checks a run and runs it."""
    return prepare_lab(lab, parameters, folder, timeout_seconds).run(on_progress)


def set_tag(lab: Path, cell_index: int, tag: str) -> None:
    """Tags one cell of a lab."""
    notebook = nbformat.read(lab, as_version=4)
    notebook.cells[cell_index].metadata["tags"] = [tag]
    nbformat.write(notebook, lab)
