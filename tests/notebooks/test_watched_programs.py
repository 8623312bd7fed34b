"""A plain PyTorch loop as a case of a nightly: green until it allocates something else."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from memlab.cli import main
from memlab.regression.run.kept_runs import kept_runs
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import write_lab

pytestmark = pytest.mark.notebook

LOOP = """\
import torch, memlab
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
runs = []
for _ in range(3):
    with memlab.watch(model, optimizer, name="step") as run:
        loss = model(torch.ones(count, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    runs.append(run)
"""
RECORD = 'memlab.finish({"first": runs[0], "steady": runs[-1]}, steps=len(runs))'
SUITE = "backend: cpu\ntimeout_seconds: 120\ncases:\n  - {lab: loop, parameters: {count: 32}}\n"


def test_a_watched_program_is_a_case_of_a_nightly(tmp_path: Path) -> None:
    (tmp_path / "labs").mkdir()
    suite = tmp_path / "papermill_runs" / "suites" / "programs.yaml"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    nightly = ["nightly", str(suite), "--jobs", "1"]
    output = io.StringIO()
    with cells_in_this_process(), redirect_stdout(output), redirect_stderr(output):
        lab = write_lab(tmp_path / "labs", LOOP, name="loop", record=RECORD)
        codes = [main(["run", str(lab), "-p", "count", "32", "--out", str(tmp_path / "once")])]
        codes += [main([*nightly, "--allow-missing"]), main(["baseline", "update", str(suite)]), main(nightly)]
        write_lab(
            tmp_path / "labs", LOOP.replace("64), torch.nn.ReLU()", "64), torch.nn.GELU()"), name="loop", record=RECORD
        )
        codes.append(main(nightly))
    assert codes == [0, 0, 0, 0, 1], output.getvalue()
    assert (tmp_path / "once" / "records" / "steady" / "record.json").is_file()
    page = (kept_runs(tmp_path / "papermill_runs" / "runs")[-1] / "index.html").read_text()
    assert "peak_by_category/activations" in page
    [baseline] = (tmp_path / "papermill_runs" / "baselines" / "cpu").glob("*.json")
    assert "Sequential, 8,320 parameters" in baseline.read_text()
