"""`finish` outside of a headless run, and what it refuses. Inside of one: tests/notebooks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.record.notebook_result import METRICS_MIMETYPE, RUN_FOLDER_VARIABLE, finish
from memlab.record.step_record import StepRecord
from memlab.regression.case_measurements import read_measured
from memlab.regression.compare import compare_with_baseline
from tests.unit.builders import job_of, record_of, training_step


@pytest.fixture
def record() -> StepRecord:
    return record_of(training_step())


def test_finish_shows_its_metrics_and_writes_nothing(
    record: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    shown = finish({"plain": record}, seconds=1.5)._repr_mimebundle_()
    assert not list(tmp_path.iterdir())
    values = json.loads(json.dumps(shown[METRICS_MIMETYPE]))
    assert values["records"]["plain"]["peak_allocated_bytes"] == record.peak_allocated_bytes
    assert values["extra"] == {"seconds": 1.5}
    assert "memlab" in values["versions"]
    assert shown["text/plain"].splitlines()[0].startswith("plain: peak ")
    assert "seconds: 1.5" in shown["text/plain"]


def test_finish_writes_whole_files_into_the_folder_of_a_run(
    record: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    metrics = finish({"a": record, "b": record})
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics.values
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "records"]
    assert StepRecord.load(tmp_path / "records" / "b") == record
    with pytest.raises(ValueError, match="finish must be called once"):
        finish({"a": record})


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "two words"])
def test_a_record_name_must_be_a_folder_name(record: StepRecord, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        finish({name: record})


def test_what_is_no_number_is_no_metric(record: StepRecord) -> None:
    with pytest.raises(ValueError, match=r"metric loss of plain is nan, must be finite"):
        finish({"plain": record_of(training_step(), loss=math.nan)})
    with pytest.raises(ValueError, match=r"metric speed of the lab is inf, must be finite"):
        finish({"plain": record}, speed=math.inf)
    with pytest.raises(ValueError, match=r"metric speed is 'fast', must be a number"):
        finish({"plain": record}, speed="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finish got no records"):
        finish({})


@pytest.mark.parametrize(
    "settings",
    [
        MemorySettings(),
        MemorySettings(offload_parameters=True),
        MemorySettings(offload_optimizer=True, offload_gradients=True),
        MemorySettings(offload_optimizer=True, offload_gradients=False),
    ],
    ids=str,
)
def test_a_report_names_the_settings_that_a_record_had(
    settings: MemorySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    finish({"a": record_of(training_step(), settings=settings)})
    measured = read_measured(tmp_path, "lab", {}, "simulated").records["a"]
    assert MemorySettings.from_dict(measured.settings) == settings
    assert measured.settings_name == str(settings)


def test_every_rank_of_a_job_is_a_record_of_its_own_and_is_gated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    job = job_of(Layout(pipeline_model_parallel_size=2))
    finish({"job": job})
    before = read_measured(tmp_path, "lab", {}, "simulated")
    assert list(before.records) == ["job-rank-0", "job-rank-1"]
    best = before.records[f"job-rank-{1 - job.worst_rank}"]
    best.metrics["peak_allocated_bytes"] = int(best.metrics["peak_allocated_bytes"]) + 1  # not of the worst rank
    changes = compare_with_baseline(before, read_measured(tmp_path, "lab", {}, "simulated"), "simulated")
    assert [(change.record, change.metric) for change in changes] == [
        (f"job-rank-{1 - job.worst_rank}", "peak_allocated_bytes")
    ]


def test_a_record_with_the_name_of_a_rank_is_refused(record: StepRecord) -> None:
    with pytest.raises(ValueError, match="'job-rank-0' is also that of a rank of a job: give one of the two another"):
        finish({"job-rank-0": record, "job": job_of(Layout(pipeline_model_parallel_size=2))})
