"""``memlab measure --ranks N``: starts the ranks itself, and prints and saves what ``torchrun`` would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.record.job_record import JobRecord
from memlab.record.timeline import Timeline
from memlab.views.panel.exports import measure_command
from memlab.views.panel.run import Run

STEP = "measure qwen3-moe-tiny --num-layers 2 --seq-length 64 --backend cpu --num-microbatches 2"


def test_two_stages_are_measured_printed_and_saved_and_torchrun_measures_the_same_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    line = f"{STEP} --ranks 2 --pipeline-model-parallel-size 2 --json --out {folder} --snapshot"
    assert main(line.split()) == 0
    printed = json.loads(capfd.readouterr().out)
    job = JobRecord.load(folder)
    assert printed == json.loads(json.dumps(job.to_dict()))
    assert [record["scenario"]["layout"]["rank"] for record in printed["ranks"]] == [0, 1]
    assert {record.scenario.layout.pipeline_stage for record in job.ranks} == {0, 1}
    assert [record.loss is None for record in job.ranks] == [True, False], "the last stage computes the loss"
    for record in job.ranks:
        snapshot = Timeline.from_snapshot(folder / f"rank-{record.scenario.layout.rank}" / "snapshot.pickle")
        assert snapshot.peak_bytes() == record.peak_allocated_bytes
    run = Run(number=1, scenario=job.scenario, settings=MemorySettings(), backend=job.backend, record=job)
    repeat = measure_command(run).removeprefix("memlab ").split()
    words = [word for word in line.split() if word not in ("--json", "--out", str(folder), "--snapshot")]
    assert sorted(repeat) == sorted(words)
    assert job.scenario.layout == Layout(pipeline_model_parallel_size=2, rank=job.worst_rank)
    assert without_times(by_torchrun(line, tmp_path / "by torchrun")) == without_times(printed)
    assert saved(tmp_path / "by torchrun") == saved(folder)


def by_torchrun(line: str, folder: Path) -> dict[str, Any]:
    """Measures the same step on ranks that the command ``torchrun`` starts, and returns what rank 0 prints."""
    words = line.replace("--ranks 2 ", "").split()
    words[words.index("--out") + 1] = str(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "memlab", *words],
        check=True,
        stdout=subprocess.PIPE,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def without_times(job: dict[str, Any]) -> dict[str, Any]:
    times = ("step_seconds", "tokens_per_second")
    ranks = [{name: value for name, value in rank.items() if name not in times} for rank in job["ranks"]]
    return job | {"ranks": ranks}


def saved(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))
