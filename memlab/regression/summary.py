"""How a run of a suite went, as plain data: ``summary.json``, from which table, report and JUnit file are made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from memlab.config.from_json import build, read_json
from memlab.regression.case_measurements import Measured
from memlab.regression.compare import MetricChange
from memlab.regression.one_line import one_line
from memlab.regression.suite.suite import SUMMARY_FILE

Status = Literal["passed", "new", "changed", "no baseline", "bad baseline", "failed", "not run"]
GREEN: tuple[Status, ...] = ("passed", "new")
"""``new`` has no baseline, and ``--allow-missing`` lets it pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """How one case went."""

    name: str
    lab: str
    status: Status
    seconds: float
    folder: str
    """Name of the case's folder in the folder of the run."""
    message: str = ""
    """Why it is red, or what the reader should know although it is green."""
    engine: str = ""
    """The engine that ran it, and its host; empty if the nightly ran it on its own machine."""
    differences: tuple[MetricChange, ...] = ()
    measured: Measured | None = None
    """None if the lab did not come to its end."""
    baseline: Measured | None = None

    def settings_of(self, record: str) -> str:
        """Returns the settings of a record as tables and legends name them; empty if it has none."""
        if self.measured is None or record not in self.measured.records:
            return ""
        return self.measured.records[record].settings_name

    @property
    def is_green(self) -> bool:
        """Whether the case leaves the nightly green."""
        return self.status in GREEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a run went."""

    suite: str
    backend: str
    name: str
    """Name of the run's folder."""
    commit: str
    started: str
    """UTC, ISO 8601."""
    seconds: float
    results: tuple[CaseResult, ...]
    number: int = 0
    """Counts the runs of a folder, so that they sort in the order of making even if the clock was set back."""

    @property
    def red(self) -> tuple[CaseResult, ...]:
        """The cases that make the run red."""
        return tuple(result for result in self.results if not result.is_green)

    @property
    def hardware(self) -> dict[str, str]:
        """What the records were measured on; empty where none says it."""
        return next(
            (result.measured.hardware for result in self.results if result.measured and result.measured.hardware), {}
        )

    @property
    def headline(self) -> str:
        """The outcome in one line."""
        num_cases = f"{len(self.results)} case{'' if len(self.results) == 1 else 's'}"
        num_failed = len(self.red) - len(self.not_run)
        if not self.not_run:
            return f"{num_failed} of {num_cases} failed" if self.red else f"{num_cases} passed"
        return f"ended early: {len(self.not_run)} of {num_cases} did not run, {num_failed} failed"

    @property
    def not_run(self) -> tuple[CaseResult, ...]:
        """The cases that had not ended when the run was ended."""
        return tuple(result for result in self.results if result.status == "not run")

    def to_json(self) -> str:
        """Returns the text of ``summary.json``."""
        values = asdict(self)
        for result in values["results"]:
            del result["baseline"]  # it has a file of its own
        values = {"status": "red" if self.red else "green"} | values
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Writes ``summary.json``, which appears whole: a run with that file has its results."""
        partial = folder / f"{SUMMARY_FILE}.partial"
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(folder / SUMMARY_FILE)
        finally:
            partial.unlink(missing_ok=True)


def read_summary(folder: Path) -> Summary:
    """Reads the summary of a run.

    Raises:
        ValueError: If the folder has none, or one that is damaged or of another version.
    """
    path = folder / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {SUMMARY_FILE}: give the folder of a nightly's run")
    action = "it is damaged or of another version, remove its run"
    values: Any = read_json(path, action)
    if isinstance(values, dict):
        values.pop("status", None)
    try:
        summary = build(Summary, values, "it", finite=True)
        _check(summary)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)}): {action}") from error
    return summary


def _check(summary: Summary) -> None:
    datetime.fromisoformat(summary.started)
    for result in summary.results:
        if "/" in result.folder or result.folder.startswith("."):
            raise ValueError(f"folder of case {result.name} is {result.folder!r}, which is not a case's folder")
        if result.measured is not None:
            result.measured.check()
