"""How a run of a suite went, as plain data: ``summary.json``, from which table, report and JUnit file are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.regression.compare import Difference
from memlab.regression.measured import Measured

Status = Literal["passed", "new", "changed", "no baseline", "bad baseline", "failed", "not run"]
GREEN: tuple[Status, ...] = ("passed", "new")
"""``new`` has no baseline, which was allowed."""

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """How one case went."""

    name: str
    lab: str
    status: Status
    seconds: float
    folder: str
    """Its folder in the run's."""
    message: str = ""
    """Why it is red, or what is to be known though it is green."""
    differences: tuple[Difference, ...] = ()
    measured: Measured | None = None
    """None if the lab did not come to its end."""
    baseline: Measured | None = None

    def settings_of(self, record: str) -> str:
        """Returns the settings of a record as tables and legends name them; empty where it has none."""
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
    """Of the run's folder."""
    commit: str
    started: str
    """UTC, ISO 8601."""
    seconds: float
    results: tuple[CaseResult, ...]

    @property
    def red(self) -> tuple[CaseResult, ...]:
        """The cases that make the run red."""
        return tuple(result for result in self.results if not result.is_green)

    @property
    def headline(self) -> str:
        """The outcome in one line."""
        num_cases = f"{len(self.results)} case{'' if len(self.results) == 1 else 's'}"
        num_failed = len(self.red) - len(self.not_run)
        if not self.not_run:
            return f"{num_failed} of {num_cases} failed" if self.red else f"{num_cases} passed"
        return f"ended early: of {num_cases} {len(self.not_run)} not run, {num_failed} failed"

    @property
    def not_run(self) -> tuple[CaseResult, ...]:
        """The cases that had not ended when the run was ended."""
        return tuple(result for result in self.results if result.status == "not run")

    def write(self, folder: Path) -> None:
        """Writes ``summary.json``."""
        values = asdict(self)
        for result in values["results"]:
            del result["baseline"]  # stands in its own file
        values = {"status": "red" if self.red else "green"} | values
        (folder / SUMMARY_FILE).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_summary(folder: Path) -> Summary:
    """Reads the summary of a run.

    Raises:
        ValueError: If the folder has none, or one of another form.
    """
    path = folder / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {SUMMARY_FILE}: give the folder of a nightly's run")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values.pop("status")
        return Summary(**values | {"results": tuple(map(_result, values["results"]))})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged or of another version, remove its run"
        ) from error


def _result(values: Mapping[str, Any]) -> CaseResult:
    measured = values["measured"]
    return CaseResult(
        **dict(values)
        | {
            "differences": tuple(Difference(**difference) for difference in values["differences"]),
            "measured": None if measured is None else Measured.from_dict(measured),
        }
    )
