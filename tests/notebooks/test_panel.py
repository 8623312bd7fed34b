"""The panel in a notebook that runs headless: no front end, and little on disk."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest

pytestmark = pytest.mark.notebook

CELLS = (
    'from memlab import Lab, panel\nlab = Lab("qwen3-moe-tiny", seq_length=256)\nplain = lab.step()',
    "shown = panel(lab, predict=False)\nshown",
    'shown.state.pin()\nshown.state.edit(recompute_granularity="full")\nfull = shown.state.run().result()',
    "assert len(shown.runs.table.rows) == 2 and panel(lab) is shown, shown.state.notice\nprint(full)",
)


def test_a_panel_runs_headless_and_leaves_its_text_in_a_small_notebook(tmp_path: Path) -> None:
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

    executed = nbformat.read(out, as_version=4)
    shown = next(cell for cell in executed.cells if cell.source == CELLS[1])
    assert "device, the step's peak" in shown.outputs[0]["data"]["text/plain"]
    assert out.stat().st_size < 1_000_000, "with its widgets"
    del executed.metadata["widgets"]
    assert len(nbformat.writes(executed)) < 100_000, "as a headless run keeps it, without them"
