"""The panel in a notebook that runs headless: no front end, and little on disk."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest

from tests.notebooks.small_labs import run_lab

from .small_labs import write_lab

pytestmark = pytest.mark.notebook

CELLS = (
    'from memlab import Lab, panel\nlab = Lab("qwen3-moe-tiny", seq_length=256)\nplain = lab.step()',
    "shown = panel(lab)\nshown",
    'shown.state.pin()\nshown.state.edit(recompute_granularity="full")\nfull = shown.state.run().result()',
    "assert len(shown.runs.table.rows) == 2 and panel(lab) is shown, shown.state.notice\nprint(full)",
)


def test_a_panel_runs_headless_and_leaves_its_text(tmp_path: Path) -> None:
    run_lab(write_lab(tmp_path, *CELLS), {}, tmp_path / "run", timeout_seconds=120, on_progress=lambda _: None)

    path = tmp_path / "run" / "notebook.ipynb"
    shown = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.source == CELLS[1])
    assert "device, the step's peak" in shown.outputs[0]["data"]["text/plain"]
    assert path.stat().st_size < 100_000


def test_a_panel_saved_with_its_widgets_stays_under_a_megabyte(tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbformat.write(notebook, tmp_path / "in.ipynb")

    papermill.execute_notebook(
        tmp_path / "in.ipynb",
        out,
        kernel_name="python3",
        language="python",
        progress_bar=False,
        store_widget_state=True,
    )

    assert "widgets" in nbformat.read(out, as_version=4).metadata
    assert out.stat().st_size < 1_000_000
