"""Suites of small labs, in folders laid out as the project's."""

from __future__ import annotations

from pathlib import Path

from memlab.regression.case_measurements import Measured, MetricValue, RecordMeasured
from memlab.regression.compare import MetricChange
from memlab.regression.summary import CaseResult, Summary
from tests.notebooks.small_labs import write_lab

FAULTS = """\
import os, pathlib, signal, sys, time
if name.startswith("slow"):
    pathlib.Path(name.removeprefix("slow") or os.devnull).write_text(str(os.getpid()))
    time.sleep(600)
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "exits":
    sys.exit(0)
if name == "filling":
    pathlib.Path(os.environ["MEMLAB_RUN_FOLDER"], "large").write_bytes(bytes(2**24))
"""
"""A cell whose fault is the parameter `name`."""


def write_suite(root: Path, text: str) -> Path:
    """Writes a suite beside a lab `small`, whose parameter `name` may name a fault."""
    (root / "labs").mkdir(exist_ok=True)
    write_lab(root / "labs", FAULTS, name="small")
    folder = root / "papermill_runs" / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def files_below(folder: Path) -> dict[str, bytes]:
    """Returns every file under a folder with its content, locks left out."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def measured(**changes: MetricValue) -> Measured:
    """A case with one record; `changes` are to its metrics."""
    metrics: dict[str, MetricValue] = {
        "status": "ok",
        "peak_allocated_bytes": 2**20,
        "offloaded_bytes_by_module/moe_act": 2**16,
        "loss": 1.5,
        "step_seconds": 0.25,
    }
    record = RecordMeasured(
        metrics=metrics | changes,
        peak_by_module={"decoder.layers.0.mlp": 2**19, "decoder.layers.1.mlp": 2**19},
        scenario={"architecture": "phi-4-tiny", "seq_length": 64},
        settings={"offload_modules": ["expert_fc1", "moe_act"]},
    )
    return Measured(
        lab="small",
        parameters={"seq_length": 64},
        versions={"memlab": "0", "torch": "2", "megatron-core": "0.16.1"},
        machine="x86_64",
        records={"plain": record},
    )


def summary_of(*results: CaseResult, name: str = "2026-01-02-030405_abc1234_cpu") -> Summary:
    """A run of some cases."""
    started = "2026-01-02T03:04:05+00:00"
    return Summary(
        suite="small", backend="cpu", name=name, commit="abc1234", started=started, seconds=60.0, results=results
    )


def result_of(name: str = "small", **values: object) -> CaseResult:
    """A passed case."""
    defaults: dict[str, object] = {"lab": "small", "status": "passed", "seconds": 3.0, "folder": name}
    return CaseResult(name=name, **defaults | {"measured": measured()} | values)  # type: ignore[arg-type]


def difference_of(**values: object) -> MetricChange:
    """A peak that rose."""
    defaults: dict[str, object] = {"record": "plain", "metric": "peak_allocated_bytes", "baseline": 2**20, "now": 2**21}
    return MetricChange(**defaults | values)  # type: ignore[arg-type]
